"""A model's configuration from a Hugging Face config.json.

What config.json says of an encoder is read by `read_config` of its own page, with `HfSettings`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlx.errors import FormatError, UnsupportedError
from rlx.formats.hf import HfFolder
from rlx.models.arch import encoder_architecture
from rlx.models.config import (
    UNNORMALIZED_ROUTERS,
    EncoderConfig,
    ExpertConfig,
    LatentConfig,
    ModelConfig,
    RecurrentConfig,
    activation_named,
)
from rlx.models.rope_tables import RopeConfig

# model_type → the page in arch/encoders/
HF_ENCODERS = {
    "bert": "bert",
    "roberta": "roberta",
    "xlm-roberta": "roberta",
    "camembert": "roberta",
    "mpnet": "mpnet",
    "distilbert": "distilbert",
    "nomic_bert": "nomic_bert",
    "modernbert": "modernbert",
    "electra": "electra",
    "albert": "albert",
    "gte": "gte",
    "new": "gte",
    "jina_embeddings_v3": "jina_embeddings_v3",
    "deberta-v2": "deberta_v2",
}
_EXPERT_SIZE = "moe_intermediate_size"
_DELTA = ("qwen3_next", "qwen3_5")  # with gated delta rule layers


def from_hf(folder: HfFolder) -> ModelConfig:
    """The configuration in a Hugging Face folder."""
    c = folder.config
    c = {**c, **c.get("text_config", {})} if isinstance(c.get("text_config"), Mapping) else c
    arch = c.get("model_type")
    if not isinstance(arch, str):
        raise FormatError("no model_type in config.json", where=folder.name)
    if folder.config.get("model_type") == arch and arch in HF_ENCODERS:
        page = encoder_architecture(HF_ENCODERS[arch])
        config: ModelConfig = page.read_config(HfSettings(folder.config, folder.name))
        return config.check(folder.name)
    return _language(c, arch.removesuffix("_text"), folder)  # of a multimodal model


def _language(c: Mapping[str, Any], arch: str, folder: HfFolder) -> ModelConfig:
    if arch == "gpt2":
        return _hf_gpt2(c).check(folder.name)
    if arch == "mamba2":
        return _hf_mamba2(c, folder).check(folder.name)
    _refuse(c, folder)
    hidden, heads = _need(c, "hidden_size", folder), _need(c, "num_attention_heads", folder)
    head_dim = c.get("head_dim") or hidden // max(heads, 1)
    scalar = c.get("query_pre_attn_scalar")
    rope = _hf_rope(c, head_dim)
    config = ModelConfig(
        arch=arch,
        vocab=_need(c, "vocab_size", folder),
        hidden=hidden,
        layers=_need(c, "num_hidden_layers", folder),
        heads=heads,
        kv_heads=c.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        ffn=_need(c, "intermediate_size" if "intermediate_size" in c else _EXPERT_SIZE, folder),
        context=c.get("max_position_embeddings", 2048),
        eps=_hf_eps(c),
        rope=rope,
        sliding_window=_hf_window(c),
        attention_softcap=c.get("attn_logit_softcapping") or 0.0,
        final_softcap=c.get("final_logit_softcapping") or 0.0,
        attention_scale=scalar**-0.5 if scalar else c.get("attention_multiplier"),
        embedding_scale=c.get("embedding_multiplier", 1.0),
        residual_scale=c.get("residual_multiplier", 1.0),
        logit_scale=c.get("logit_scale") or 1 / c.get("logits_scaling", 1.0),
        parallel=c.get("use_parallel_residual", True),
        norm_offset=1.0 if arch.startswith(("gemma", *_DELTA)) else 0.0,
        experts=_hf_experts(c, arch, folder),
        latent=_hf_latent(c),
        recurrent=_hf_recurrent(c, folder),
    )
    return config.check(folder.name)


def _hf_eps(c: Mapping[str, Any]) -> float:
    names = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon")
    return float(next((c[n] for n in names if n in c), 1e-5))


def _hf_experts(c: Mapping[str, Any], arch: str, folder: HfFolder) -> ExpertConfig | None:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    count = next((c[n] for n in names if c.get(n)), 0)
    if not count:
        return None
    if c.get("topk_method", "greedy") != "greedy":
        raise UnsupportedError(
            "unknown way to choose experts", where=folder.name, got=c["topk_method"],
            expected="greedy",
        )  # fmt: skip
    normalize = c.get("norm_topk_prob", arch not in UNNORMALIZED_ROUTERS)
    scale = c.get("routed_scaling_factor") or 1.0
    return ExpertConfig(count, _need(c, "num_experts_per_tok", folder), bool(normalize), scale)


def _hf_latent(c: Mapping[str, Any]) -> LatentConfig | None:
    if not c.get("kv_lora_rank"):
        return None
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return LatentConfig(*(int(c[n]) for n in names))


def _hf_recurrent(c: Mapping[str, Any], folder: HfFolder) -> RecurrentConfig | None:
    if "linear_conv_kernel_dim" not in c:
        return None
    names = ("conv_kernel_dim", "num_key_heads", "num_value_heads", "key_head_dim")
    taps, groups, heads, state = (_need(c, f"linear_{n}", folder) for n in names)
    inner = heads * _need(c, "linear_value_head_dim", folder)
    return RecurrentConfig(taps, groups, heads, state, inner)


def _hf_mamba2(c: Mapping[str, Any], folder: HfFolder) -> ModelConfig:
    if tuple(c.get("time_step_limit", (0.0, math.inf))) != (0.0, math.inf):
        raise UnsupportedError(
            "limits of time steps", where=folder.name, got=c["time_step_limit"],
            expected="0 … infinity",
        )  # fmt: skip
    names = ("conv_kernel", "n_groups", "num_heads", "state_size")
    taps, groups, heads, state = (_need(c, n, folder) for n in names)
    head_dim = _need(c, "head_dim", folder)
    return ModelConfig(
        arch="mamba2",
        vocab=_need(c, "vocab_size", folder),
        hidden=_need(c, "hidden_size", folder),
        layers=_need(c, "num_hidden_layers", folder),
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        ffn=heads * head_dim,
        context=1 << 20,  # as in GGUF: there is no limit
        eps=float(c.get("layer_norm_epsilon", 1e-5)),
        recurrent=RecurrentConfig(taps, groups, heads, state, heads * head_dim),
    )


def _hf_gpt2(c: Mapping[str, Any]) -> ModelConfig:
    hidden, heads = int(c["n_embd"]), int(c["n_head"])
    return ModelConfig(
        arch="gpt2",
        vocab=int(c["vocab_size"]),
        hidden=hidden,
        layers=int(c["n_layer"]),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=int(c.get("n_inner") or 4 * hidden),
        context=int(c["n_positions"]),
        eps=float(c.get("layer_norm_epsilon", 1e-5)),
    )


def _hf_window(c: Mapping[str, Any]) -> int:
    if c.get("use_sliding_window") is False:
        return 0
    window = c.get("sliding_window")
    return window if isinstance(window, int) else 0


def _hf_rope(c: Mapping[str, Any], head_dim: int) -> RopeConfig:
    given = c.get("rope_parameters") or c.get("rope_scaling") or {}
    if "full_attention" in given:  # one for each kind of layer
        given = given["full_attention"]
    kind = given.get("rope_type", given.get("type", "none"))
    theta = given.get("rope_theta", c.get("rope_theta", c.get("rotary_emb_base", 10000.0)))
    original = int(
        given.get("original_max_position_embeddings")
        or c.get("original_max_position_embeddings")
        or c.get("max_position_embeddings", 0)
    )
    # the factor of longrope is the ratio of the two lengths
    longest = c.get("max_position_embeddings", 0)
    stretch = longest / original if original and "long_factor" in given else 1.0
    default = 0.25 if str(c.get("model_type")).startswith(_DELTA) else 1.0  # the default
    outer = c.get("partial_rotary_factor", c.get("rotary_pct", default))
    share = given.get("partial_rotary_factor", outer)
    factor = float(given.get("factor") or stretch)
    return RopeConfig(
        theta=float(theta),
        n_rot=int(head_dim * share) if share != 1.0 else 0,
        scaling={"default": "none", "su": "longrope"}.get(kind, kind),
        factor=factor,
        original_context=original,
        low_freq_factor=float(given.get("low_freq_factor", 1.0)),
        high_freq_factor=float(given.get("high_freq_factor", 4.0)),
        beta_fast=float(given.get("beta_fast") or 32.0),
        beta_slow=float(given.get("beta_slow") or 1.0),
        attention_factor=float(given.get("attention_factor") or _hf_sharpness(given, factor)),
        whole_steps=bool(given.get("truncate", True)),
        log_factor=float(given.get("mscale_all_dim") or 0.0),
        long_factors=tuple(given.get("long_factor") or ()),
        short_factors=tuple(given.get("short_factor") or ()),
    )


def _hf_sharpness(given: Mapping[str, Any], factor: float) -> float:
    """yarn's attention factor where it is given as two numbers; else 0."""
    mscale, of_scores = given.get("mscale"), given.get("mscale_all_dim")
    if not mscale or not of_scores:
        return 0.0
    grown = 0.1 * math.log(factor) if factor > 1 else 0.0
    return float((mscale * grown + 1) / (of_scores * grown + 1))


def _refuse(c: Mapping[str, Any], folder: HfFolder) -> None:
    """Raise for settings that would change results and are not built."""
    for name in ("clip_qkv", "qk_layernorm"):
        if c.get(name):
            raise UnsupportedError(f"{name} is not supported", where=folder.name, got=c[name])


def _need(c: Mapping[str, Any], name: str, folder: HfFolder) -> int:
    value = c.get(name)
    if not isinstance(value, int):
        raise FormatError("config.json lacks a number", where=folder.name, got=value, expected=name)
    return value


class HfSettings:
    """A config.json whose keys may have several names."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def get(self, *names: str, default: Any) -> Any:
        for name in names:
            value = self.values.get(name)
            if value is not None:
                if isinstance(default, float) and type(value) is int and abs(value) < 1 << 62:
                    value = float(value)
                # true is no number, though Python says so
                if not isinstance(value, type(default)) or (
                    isinstance(value, bool) and not isinstance(default, bool)
                ):
                    raise FormatError(
                        f"{name} of config.json has the wrong type", where=self.where,
                        got=repr(value)[:40], expected=type(default).__name__,
                    )  # fmt: skip
                return value
        return default

    def need(self, *names: str) -> int:
        found: int = self.get(*names, default=-1)
        if found < 0:
            raise FormatError(
                "config.json lacks a size", where=self.where, expected=" or ".join(names)
            )
        return found

    def inside(self, name: str) -> HfSettings:
        """A nested object; empty where there is none."""
        return HfSettings(self.get(name, default={}), self.where)

    def require(self, name: str, default: Any, expected: Any) -> None:
        """Raise for a value that would change results and is not built."""
        got = self.get(name, default=default)
        if got != expected:
            raise UnsupportedError(
                f"{name} of this kind is not known here", where=self.where, got=got,
                expected=expected,
            )  # fmt: skip

    def activation(self, *names: str, default: str) -> str:
        return activation_named(self.get(*names, default=default), self.where)

    def rope(self, theta: float) -> RopeConfig:
        """Rotary embedding in new or old keys; only GTE scales it."""
        new, old = self.inside("rope_parameters"), self.inside("rope_scaling")
        theta = new.get("rope_theta", default=self.get("rope_theta", default=theta))
        kind = new.get("rope_type", default=old.get("rope_type", "type", default="default"))
        if kind not in ("default", "ntk") or theta <= 0 or old.values.get("mixed_b") is not None:
            raise UnsupportedError(
                "a rotation that is not known here", where=self.where, got=f"{kind}, theta {theta}",
                expected="default, ntk",
            )  # fmt: skip
        if kind == "default":
            return RopeConfig(theta)
        return RopeConfig(theta, scaling="ntk", factor=old.get("factor", default=1.0))

    def encoder(
        self, arch: str, parts: Mapping[str, Any] | None = None, **changes: Any
    ) -> ModelConfig:
        """An encoder; `parts` are fields of its EncoderConfig, `changes` of the ModelConfig."""
        hidden = self.need("hidden_size", "dim", "n_embd")
        heads = self.need("num_attention_heads", "n_heads", "n_head")
        values: dict[str, Any] = {
            "arch": arch,
            "vocab": self.need("vocab_size"),
            "hidden": hidden,
            "layers": self.need("num_hidden_layers", "n_layers", "n_layer"),
            "heads": heads,
            "kv_heads": heads,
            "head_dim": hidden // max(heads, 1),
            "ffn": self.need("intermediate_size", "hidden_dim", "n_inner"),
            "context": self.need("max_position_embeddings", "n_positions"),
            "eps": self.get("layer_norm_eps", "norm_eps", "layer_norm_epsilon", default=1e-12),
            "activation": self.activation(
                "hidden_act", "hidden_activation", "activation", "activation_function",
                default="gelu",
            ),
            "encoder": EncoderConfig(
                rotary="rope" in changes, labels=self._labels(), **(parts or {})
            ),
        }  # fmt: skip
        return ModelConfig(**(values | changes))

    def _labels(self) -> int:
        kinds = self.get("architectures", default=[])
        if not any(str(k).endswith("ForSequenceClassification") for k in kinds):
            return 0
        return len(self.get("id2label", default={})) or self.get("num_labels", default=2)
