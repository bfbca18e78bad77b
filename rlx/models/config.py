"""What a model is, in numbers: read from GGUF metadata or a Hugging Face config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from typing import Any

from rlx.errors import FormatError, UnsupportedError
from rlx.formats.gguf import GgufFile
from rlx.formats.hf import HfFolder

# model_type of what GGUF calls otherwise
GGUF_NAMES = {
    "deepseek2": "deepseek_v2",
    "gpt-oss": "gpt_oss",
    "gptneox": "gpt_neox",
    "phi2": "phi",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "qwen3next": "qwen3_next",
    "qwen35": "qwen3_5",
    "qwen35moe": "qwen3_5_moe",
}
_RAW_SCORES = ("deepseek_v2", "olmoe", "qwen2_moe")  # do not normalise, unless the file says so


_EXPERT_SIZE = "moe_intermediate_size"
_DELTA = ("qwen3_next", "qwen3_5")  # with layers of a gated delta rule


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base, how many dimensions turn, and how long contexts are stretched."""

    theta: float = 10000.0
    n_rot: int = 0  # 0: the whole head
    interleaved: bool = False
    scaling: str = "none"  # none, linear, llama3, yarn, longrope
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0  # 0: what the scaling's own formula says
    whole_steps: bool = True  # yarn blends from a whole dimension to another
    log_factor: float = 0.0  # of log(factor) / 10, by which yarn makes latent attention sharper
    long_factors: tuple[float, ...] = ()
    short_factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class ExpertConfig:
    """A mixture of experts: how many there are, and how tokens choose among them."""

    count: int
    active: int
    normalize: bool = True  # the scores of the chosen ones sum to 1
    scale: float = 1.0  # of their sum


@dataclass(frozen=True)
class LatentConfig:
    """Keys and values as one short vector per token, common to all heads."""

    rank: int  # of keys and values
    plain: int  # dimensions of a head that do not turn
    turned: int
    value: int


@dataclass(frozen=True)
class RecurrentConfig:
    """Layers that carry a state from token to token, beside or instead of attention."""

    taps: int  # of the convolution
    groups: int  # heads of keys, each shared by several of values
    heads: int
    state: int  # numbers of a key
    inner: int  # numbers of all values together

    @property
    def value(self) -> int:
        """Numbers of one value."""
        return self.inner // self.heads


@dataclass(frozen=True)
class ModelConfig:
    arch: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    context: int
    eps: float = 1e-5
    activation: str = "silu"
    rope: RopeConfig = field(default_factory=RopeConfig)
    local_rope: RopeConfig | None = None  # of sliding-window layers, where it differs
    sliding_window: int = 0
    window_pattern: int = 0  # n: every n-th layer sees everything; 0: all layers slide
    attention_softcap: float = 0.0
    final_softcap: float = 0.0
    attention_scale: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what a layer adds
    logit_scale: float = 1.0
    norm_offset: float = 0.0  # added to norm weights that are stored less one
    parallel: bool = True  # attention and network side by side, where an architecture may choose
    centred_norms: bool = False  # layer norms, also where the file has no bias for them
    experts: ExpertConfig | None = None
    latent: LatentConfig | None = None
    recurrent: RecurrentConfig | None = None

    def slides(self, layer: int) -> bool:
        """Whether a layer sees a window of the past only."""
        if not self.sliding_window:
            return False
        return not self.window_pattern or (layer + 1) % self.window_pattern != 0

    def check(self, where: str) -> ModelConfig:
        """Raise unless the numbers can be those of a model."""
        positive = ("vocab", "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "context")
        for name in positive:
            value = getattr(self, name)
            if not isinstance(value, int) or not 0 < value < 1 << 31:
                raise FormatError(
                    f"{name} is not a size", where=where, got=value, expected="a positive number"
                )
        if self.heads % self.kv_heads:
            raise FormatError(
                "query heads do not share key heads evenly", where=where,
                got=f"{self.heads} and {self.kv_heads}",
            )  # fmt: skip
        if self.recurrent is not None:
            _check_recurrent(self.recurrent, where)
        return self


def _check_recurrent(c: RecurrentConfig, where: str) -> None:
    sizes = astuple(c)
    fits = all(isinstance(n, int) and 0 < n < 1 << 31 for n in sizes)
    if not fits or c.inner % c.heads or c.heads % c.groups:
        raise FormatError(
            "sizes of recurrent layers do not fit together", where=where, got=c,
            expected="inner a multiple of heads, heads of groups",
        )  # fmt: skip


def from_gguf(file: GgufFile) -> ModelConfig:
    """The configuration in a GGUF file's metadata."""
    arch = file.need("general.architecture", str)
    name = GGUF_NAMES.get(arch, arch)

    def need(name: str) -> int:
        return file.need(f"{arch}.{name}", int)

    def get(name: str, default: Any) -> Any:
        return file.get(f"{arch}.{name}", type(default), default)

    recurrent = _gguf_recurrent(file, arch)
    hidden, heads, ffn = (
        need(n) for n in ("embedding_length", "attention.head_count", "feed_forward_length")
    )
    if recurrent is not None and not heads:  # a model without attention
        heads, ffn = recurrent.heads, recurrent.inner
    head_dim = get("attention.key_length", hidden // max(heads, 1))
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise FormatError("no token embedding", where=file.name, expected="token_embd.weight")
    eps = get("attention.layer_norm_rms_epsilon", get("attention.layer_norm_epsilon", 1e-5))
    scale = get("attention.scale", 0.0)
    config = ModelConfig(
        arch=name,
        vocab=embedding.shape[0],
        hidden=hidden,
        layers=need("block_count") - get("nextn_predict_layers", 0),  # those only guess ahead
        heads=heads,
        kv_heads=get("attention.head_count_kv", heads),
        head_dim=head_dim,
        ffn=ffn,
        context=get("context_length", 2048),
        eps=eps,
        rope=_gguf_rope(file, arch),
        sliding_window=get("attention.sliding_window", 0),
        attention_softcap=get("attn_logit_softcapping", 0.0),
        final_softcap=get("final_logit_softcapping", 0.0),
        attention_scale=scale or None,
        embedding_scale=get("embedding_scale", 1.0),
        residual_scale=get("residual_scale", 1.0),
        logit_scale=get("logit_scale", 1.0) ** (-1 if arch == "granite" else 1),
        parallel=get("use_parallel_residual", True),
        experts=_gguf_experts(file, arch),
        latent=_gguf_latent(file, arch),
        recurrent=recurrent,
    )
    return config.check(file.name)


def _gguf_experts(file: GgufFile, arch: str) -> ExpertConfig | None:
    def get(name: str, default: Any) -> Any:
        return file.get(f"{arch}.expert_{name}", type(default), default)

    count, gating = get("count", 0), get("gating_func", 1)
    if not count:
        return None
    if get("group_count", 1) > 1:
        raise UnsupportedError(
            "experts chosen by groups", where=file.name, got=get("group_count", 1), expected="1"
        )
    if gating not in (0, 1, 3):  # unset, softmax, softmax of the chosen ones alone
        raise UnsupportedError(
            "unknown scoring of experts", where=file.name, got=gating, expected="softmax"
        )
    normalize = get("weights_norm", GGUF_NAMES.get(arch, arch) not in _RAW_SCORES)
    return ExpertConfig(count, get("used_count", 1), normalize, get("weights_scale", 1.0) or 1.0)


def _gguf_latent(file: GgufFile, arch: str) -> LatentConfig | None:
    def get(name: str, default: int = 0) -> int:
        return file.get(f"{arch}.{name}", int, default)

    rank, turned = get("attention.kv_lora_rank"), get("rope.dimension_count")
    if not rank:
        return None
    # newer files state the sizes of the latent attention itself as key_length and value_length
    key = get("attention.key_length_mla", get("attention.key_length"))
    value = get("attention.value_length_mla", get("attention.value_length"))
    return LatentConfig(rank, key - turned, turned, value)


def _gguf_recurrent(file: GgufFile, arch: str) -> RecurrentConfig | None:
    if not file.get(f"{arch}.ssm.conv_kernel", int, 0):
        return None
    names = ("conv_kernel", "group_count", "time_step_rank", "state_size", "inner_size")
    return RecurrentConfig(*(file.need(f"{arch}.ssm.{n}", int) for n in names))


def _gguf_rope(file: GgufFile, arch: str) -> RopeConfig:
    def get(name: str, default: Any) -> Any:
        return file.get(f"{arch}.rope.{name}", type(default), default)

    factors = "rope_freqs.weight" in file.tensors
    return RopeConfig(
        theta=get("freq_base", 10000.0),
        n_rot=get("dimension_count", 0),
        # GGUF reorders q and k of these architectures so that pairs are neighbours
        interleaved=arch in ("llama", "granite"),
        scaling="factors" if factors else get("scaling.type", "none"),
        factor=get("scaling.factor", 1.0),
        original_context=get("scaling.original_context_length", 0),
        attention_factor=get("scaling.attn_factor", 0.0),
        log_factor=get("scaling.yarn_log_multiplier", 0.0) * 10,
    )


def from_hf(folder: HfFolder) -> ModelConfig:
    """The configuration in a Hugging Face folder."""
    c = folder.config
    c = {**c, **c.get("text_config", {})} if isinstance(c.get("text_config"), Mapping) else c
    arch = c.get("model_type")
    if not isinstance(arch, str):
        raise FormatError("no model_type in config.json", where=folder.name)
    arch = arch.removesuffix("_text")  # of a model that also sees
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
    normalize = c.get("norm_topk_prob", arch not in _RAW_SCORES)
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
        context=1 << 20,  # as GGUF has it: there is no limit
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
    if "full_attention" in given:  # one table per kind of layer
        given = given["full_attention"]
    kind = given.get("rope_type", given.get("type", "none"))
    theta = given.get("rope_theta", c.get("rope_theta", c.get("rotary_emb_base", 10000.0)))
    original = int(
        given.get("original_max_position_embeddings")
        or c.get("original_max_position_embeddings")
        or c.get("max_position_embeddings", 0)
    )
    # longrope states how far it stretches by the two lengths
    longest = c.get("max_position_embeddings", 0)
    stretch = longest / original if original and "long_factor" in given else 1.0
    whole = 0.25 if str(c.get("model_type")).startswith(_DELTA) else 1.0  # where nothing is said
    turned = c.get("partial_rotary_factor", c.get("rotary_pct", whole))
    share = given.get("partial_rotary_factor", turned)
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
    """yarn's factor of all angles where it is stated by two numbers; else 0."""
    mscale, of_scores = given.get("mscale"), given.get("mscale_all_dim")
    if not mscale or not of_scores:
        return 0.0
    grown = 0.1 * math.log(factor) if factor > 1 else 0.0
    return float((mscale * grown + 1) / (of_scores * grown + 1))


def _refuse(c: Mapping[str, Any], folder: HfFolder) -> None:
    """Raise for what would change results and is not built."""
    for name in ("clip_qkv", "qk_layernorm"):
        if c.get(name):
            raise UnsupportedError(f"{name} is not supported", where=folder.name, got=c[name])


def _need(c: Mapping[str, Any], name: str, folder: HfFolder) -> int:
    value = c.get(name)
    if not isinstance(value, int):
        raise FormatError("config.json lacks a number", where=folder.name, got=value, expected=name)
    return value
