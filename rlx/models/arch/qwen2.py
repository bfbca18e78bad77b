"""Qwen2: Llama with biases on q, k and v."""

from __future__ import annotations

from rlx.models.arch.llama import ATTENTION_BIASES as _BIASES
from rlx.models.arch.llama import COMMON, PLAIN, embed, finish, layer
from rlx.models.config import ModelConfig
from rlx.models.config_fields import LATE_WINDOWS, number, read
from rlx.models.config_hf import HfSettings

QKV_BIASES = {ours: theirs for ours, theirs in _BIASES.items() if "attn_output" not in ours}
HF_NAMES = {**PLAIN, **QKV_BIASES}
FIELDS = {
    **COMMON,
    **LATE_WINDOWS,
    **read(
        vocab_size=151936, intermediate_size=22016, num_key_value_heads=number(32),
        max_position_embeddings=32768,
    ),
}  # fmt: skip


def read_config(s: HfSettings) -> ModelConfig:
    return s.decoder("qwen2", {}, **late_windows(s))


def late_windows(s: HfSettings) -> dict[str, object]:
    """A window from the layer max_window_layers on, if it is asked for."""
    used, first = s.get("use_sliding_window"), s.get("max_window_layers")
    used = used and s.get("sliding_window") is not None
    full = (not used or i < first for i in range(s.get("num_hidden_layers")))
    return s.windows(full, used)


__all__ = ["FIELDS", "HF_NAMES", "embed", "finish", "layer", "read_config"]
