"""Gemma 3: Gemma 2 without soft caps, with QK norm, and full attention in one layer of six."""

from __future__ import annotations

from dataclasses import replace

from rlx.models.arch.gemma2 import FIELDS as _GEMMA2
from rlx.models.arch.gemma2 import HARMLESS, SWITCHES, embed, finish, layer, scaled
from rlx.models.arch.gemma2 import HF_NAMES as _NAMES
from rlx.models.arch.llama import QK_NORM
from rlx.models.arch.qwen3 import SHAPES
from rlx.models.config import ModelConfig
from rlx.models.config_fields import ROPE_KEYS, Field, only, read, without
from rlx.models.config_hf import HfSettings
from rlx.models.rope_tables import RopeConfig
from rlx.models.weights import Names, inside

_TEXT = {**_NAMES, **QK_NORM}
# of the text alone, or of a multimodal model, as it is saved now and as it was first
HF_NAMES: Names = {
    ours: (*(names if isinstance(names, tuple) else (names,)), f"language_model.{_TEXT[ours]}")
    for ours, names in inside("language_model", _TEXT).items()
}
# of the images that a multimodal model takes
HARMLESS_TENSORS = ("*vision_tower.*", "*multi_modal_projector.*")
FIELDS = {
    **without(_GEMMA2, "partial_rotary_factor", "original_max_position_embeddings"),
    **read(
        vocab_size=262208, max_position_embeddings=131072, rope_theta=1e6,
        rope_local_base_freq=10000.0, sliding_window_pattern=6,
        final_logit_softcapping=Field(None, kind=float),
        attn_logit_softcapping=only(None),
    ),
}  # fmt: skip


def read_config(s: HfSettings) -> ModelConfig:
    every, layers = s.get("sliding_window_pattern"), s.get("num_hidden_layers")
    s.require("sliding_window_pattern", every > 0, "a positive number")
    full = ((i + 1) % every == 0 for i in range(layers))
    config = s.decoder("gemma3", SWITCHES, rope=_rope(s, "full"), **s.windows(full))
    return replace(scaled(s, config), local_rope=_rope(s, "sliding"))


def _rope(s: HfSettings, kind: str) -> RopeConfig:
    """The rotary embedding of full or of sliding layers; rope_scaling is of full ones."""
    theta = s.get("rope_theta" if kind == "full" else "rope_local_base_freq")
    objects = read(**{f"{k}_attention": Field(None, kind=dict) for k in ("full", "sliding")})
    given = s.inside("rope_parameters", objects).inside(f"{kind}_attention", ROPE_KEYS)
    if kind == "full" and s.get("rope_scaling"):
        # transformers does not read the older name of rope_type here
        given = s.inside("rope_scaling", {**ROPE_KEYS, "rope_type": Field("default")})
    return s.rope_of(given, s.head_dim(), theta)


def configure(config: ModelConfig) -> ModelConfig:
    scale = config.attention_scale
    if scale is None and config.layers == 62:  # the 27B model scales by hidden / heads
        scale = (config.hidden / config.heads) ** -0.5
    return replace(
        config, activation="gelu_tanh", window_layers=config.windows_or_every(6),
        attention_scale=scale, embedding_scale=float(config.hidden) ** 0.5,
        local_rope=config.local_rope or RopeConfig(theta=10000.0),
    )  # fmt: skip


__all__ = [
    "FIELDS",
    "HARMLESS",
    "HF_NAMES",
    "SHAPES",
    "configure",
    "embed",
    "finish",
    "layer",
    "read_config",
]
