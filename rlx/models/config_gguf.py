"""A model's configuration from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlx.errors import FormatError, UnsupportedError
from rlx.formats.gguf import GgufFile
from rlx.formats.tensor_file import TensorInfo
from rlx.models.arch import architecture
from rlx.models.builder import activation_named
from rlx.models.config import (
    MOST_LAYERS,
    UNNORMALIZED_ROUTERS,
    EncoderConfig,
    ExpertConfig,
    LatentConfig,
    ModelConfig,
    RecurrentConfig,
)
from rlx.models.rope_tables import RopeConfig

# general.architecture → model_type, where they differ
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
# general.architecture → the page in arch/encoders/
GGUF_ENCODERS = {"bert": "bert", "nomic-bert": "nomic_bert", "modern-bert": "modernbert"}
_RANK = 4  # pooling_type of rerankers
# keys behind the name of the architecture that are read here, or only say what tensors show
_READ = (
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "attention.key_length_mla", "attention.value_length_mla",
    "attention.kv_lora_rank", "attention.q_lora_rank", "attention.layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon", "attention.scale", "attention.sliding_window",
    "attention.sliding_window_pattern", "attention.causal", "attn_logit_softcapping",
    "final_logit_softcapping", "embedding_scale", "residual_scale", "logit_scale",
    "use_parallel_residual", "hidden_activation", "nextn_predict_layers", "pooling_type",
    "expert_count", "expert_used_count", "expert_feed_forward_length", "expert_gating_func",
    "expert_shared_count", "expert_shared_feed_forward_length", "expert_weights_norm",
    "expert_weights_scale", "expert_group_count", "expert_group_used_count",
    "leading_dense_block_count", "full_attention_interval", "classifier.output_labels",
    "classifier.pooling_type", "rope.dimension_count", "rope.freq_base", "rope.freq_base_swa",
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.attn_factor", "rope.scaling.yarn_log_multiplier",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "ssm.conv_kernel",
    "ssm.group_count", "ssm.time_step_rank", "ssm.state_size", "ssm.inner_size",
)  # fmt: skip
# how a file was made, and the axes of images in positions
_HARMLESS = ("rope.scaling.finetuned", "rope.dimension_sections", "tensor_data_layout")


def from_gguf(file: GgufFile) -> ModelConfig:
    """The configuration in a GGUF file's metadata."""
    arch = file.need("general.architecture", str)
    _refuse_unread(file, arch)
    if arch in GGUF_ENCODERS:
        return _gguf_encoder(file, arch)
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
    latent = _gguf_latent(file, arch)
    if latent is None and get("attention.value_length", head_dim) != head_dim:
        raise _unsupported(file, f"{arch}.attention.value_length", "the length of keys")
    eps = get("attention.layer_norm_rms_epsilon", get("attention.layer_norm_epsilon", 1e-5))
    scale = get("attention.scale", 0.0)
    page = architecture(name, file.name)
    config = ModelConfig(
        arch=name,
        vocab=_embedding(file).shape[0],
        hidden=hidden,
        layers=need("block_count") - get("nextn_predict_layers", 0),  # they only draft tokens
        heads=heads,
        kv_heads=get("attention.head_count_kv", heads),
        head_dim=head_dim,
        ffn=ffn,
        context=get("context_length", 2048),
        eps=eps,
        rope=_gguf_rope(file, arch),
        local_rope=_gguf_local_rope(file, arch),
        sliding_window=get("attention.sliding_window", 0),
        window_layers=_gguf_windows(file, arch, need("block_count")),
        attention_softcap=get("attn_logit_softcapping", 0.0),
        final_softcap=get("final_logit_softcapping", 0.0),
        attention_scale=scale or None,
        embedding_scale=get("embedding_scale", 1.0),
        residual_scale=get("residual_scale", 1.0),
        logit_scale=get("logit_scale", 1.0) ** (-1 if arch == "granite" else 1),
        parallel=get("use_parallel_residual", True),
        experts=_gguf_experts(file, arch),
        latent=latent,
        recurrent=recurrent,
    )
    configure: Callable[[ModelConfig], ModelConfig] | None = getattr(page, "configure", None)
    config = config.check(file.name)
    return configure(config) if configure else config


def _refuse_unread(file: GgufFile, arch: str) -> None:
    """Raise for settings that would change results and are not built."""
    for key, value in file.metadata.items():
        prefix, _, name = key.partition(".")
        unset = isinstance(value, (int, float, str)) and not value
        if prefix == arch and name not in (*_READ, *_HARMLESS) and not unset:
            raise UnsupportedError(
                f"{key} is not supported", where=file.name, got=repr(value)[:60],
                expected=", ".join(sorted(_READ)),
            )  # fmt: skip
    causal = f"{arch}.attention.causal"
    if causal in file.metadata and file.get(causal, bool, True) is (arch in GGUF_ENCODERS):
        raise _unsupported(file, causal, str(arch not in GGUF_ENCODERS))


def _unsupported(file: GgufFile, key: str, expected: str) -> UnsupportedError:
    got = repr(file.metadata[key])[:60]
    return UnsupportedError(f"{key} is not supported", where=file.name, got=got, expected=expected)


def _gguf_windows(file: GgufFile, arch: str, layers: int) -> frozenset[int] | None:
    """The layers with a sliding window: every n-th has none, or the file says it of each."""
    key = f"{arch}.attention.sliding_window_pattern"
    found = file.metadata.get(key)
    if found is None:
        return None
    if layers > MOST_LAYERS:
        return None  # which is refused with the rest
    if type(found) is int and found > 0:
        return frozenset(i for i in range(layers) if (i + 1) % found)
    if isinstance(found, (int, str)) or len(found) != layers:
        raise _unsupported(file, key, f"a number, or one flag for each of {layers} layers")
    return frozenset(i for i, slides in enumerate(found) if slides)


def _gguf_local_rope(file: GgufFile, arch: str) -> RopeConfig | None:
    theta = file.get(f"{arch}.rope.freq_base_swa", float, 0.0)
    return RopeConfig(theta=theta) if theta else None


def _embedding(file: GgufFile) -> TensorInfo:
    found = file.tensors.get("token_embd.weight")
    if found is None:
        raise FormatError("no token embedding", where=file.name, expected="token_embd.weight")
    return found


def _gguf_experts(file: GgufFile, arch: str) -> ExpertConfig | None:
    def get(name: str, default: Any) -> Any:
        return file.get(f"{arch}.expert_{name}", type(default), default)

    count, gating = get("count", 0), get("gating_func", 1)
    if not count:
        return None
    if get("group_count", 1) > 1:
        raise _unsupported(file, f"{arch}.expert_group_count", "1")
    if gating not in (0, 1, 3):  # unset, softmax, softmax of the chosen ones alone
        raise _unsupported(file, f"{arch}.expert_gating_func", "softmax")
    normalize = get("weights_norm", GGUF_NAMES.get(arch, arch) not in UNNORMALIZED_ROUTERS)
    return ExpertConfig(count, get("used_count", 1), normalize, get("weights_scale", 1.0) or 1.0)


def _gguf_latent(file: GgufFile, arch: str) -> LatentConfig | None:
    def get(name: str, default: int = 0) -> int:
        return file.get(f"{arch}.{name}", int, default)

    rank, rope_dim = get("attention.kv_lora_rank"), get("rope.dimension_count")
    if not rank:
        return None
    # in newer files key_length and value_length are sizes of the compressed vector
    key = get("attention.key_length_mla", get("attention.key_length"))
    value = get("attention.value_length_mla", get("attention.value_length"))
    return LatentConfig(rank, key - rope_dim, rope_dim, value)


def _gguf_recurrent(file: GgufFile, arch: str) -> RecurrentConfig | None:
    if not file.get(f"{arch}.ssm.conv_kernel", int, 0):
        return None
    names = ("conv_kernel", "group_count", "time_step_rank", "state_size", "inner_size")
    taps, groups, heads, state, inner = (file.need(f"{arch}.ssm.{n}", int) for n in names)
    return RecurrentConfig(taps, groups, heads, state, inner)


def _gguf_rope(file: GgufFile, arch: str) -> RopeConfig:
    def get(name: str, default: Any) -> Any:
        return file.get(f"{arch}.rope.{name}", type(default), default)

    factors = "rope_freqs.weight" in file.tensors
    long, short = (_gguf_factors(file, kind) for kind in ("long", "short"))
    scaling = "longrope" if long else get("scaling.type", "none")
    whole = bool(long) == bool(short) == (scaling == "longrope")
    if scaling not in ("none", "linear", "yarn", "longrope") or not whole:
        raise UnsupportedError(
            f"{arch}.rope.scaling.type is not supported", where=file.name, got=scaling,
            expected="none, linear, yarn, or longrope with its factors",
        )  # fmt: skip
    return RopeConfig(
        theta=get("freq_base", 10000.0),
        n_rot=get("dimension_count", 0),
        # GGUF reorders q and k of these architectures so that pairs are neighbours
        interleaved=arch in ("llama", "granite"),
        scaling="factors" if factors else scaling,
        factor=get("scaling.factor", 1.0),
        original_context=get("scaling.original_context_length", 0),
        attention_factor=get("scaling.attn_factor", 0.0),
        log_factor=get("scaling.yarn_log_multiplier", 0.0) * 10,
        beta_fast=get("scaling.yarn_beta_fast", 32.0),
        beta_slow=get("scaling.yarn_beta_slow", 1.0),
        long_factors=long,
        short_factors=short,
    )


def _gguf_factors(file: GgufFile, kind: str) -> tuple[float, ...]:
    """The factors of longrope, where the file has them."""
    name = f"rope_factors_{kind}.weight"
    return tuple(file.array(name).tolist()) if name in file.tensors else ()


def _gguf_encoder(file: GgufFile, kind: str) -> ModelConfig:
    def need(name: str) -> int:
        return file.need(f"{kind}.{name}", int)

    def get(name: str, default: Any) -> Any:
        return file.get(f"{kind}.{name}", type(default), default)

    embedding, arch = _embedding(file), GGUF_ENCODERS[kind]
    hidden, heads, context = (
        need(n) for n in ("embedding_length", "attention.head_count", "context_length")
    )
    positions = file.tensors.get("position_embd.weight")
    activation = get("hidden_activation", "silu" if arch == "nomic_bert" else "gelu")
    local = RopeConfig(theta=get("rope.freq_base_swa", 10000.0)) if arch == "modernbert" else None
    config = ModelConfig(
        arch=arch,
        vocab=embedding.shape[0],
        hidden=hidden,
        layers=need("block_count"),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // max(heads, 1),
        ffn=need("feed_forward_length"),
        context=context if positions is None else min(context, positions.shape[0]),
        eps=get("attention.layer_norm_epsilon", 1e-12),
        activation=activation_named(activation, file.name),
        rope=RopeConfig(theta=get("rope.freq_base", 10000.0)),
        local_rope=local,
        encoder=_gguf_encoder_parts(file, kind, arch),
    )
    return config.check(file.name)


def _gguf_encoder_parts(file: GgufFile, kind: str, arch: str) -> EncoderConfig:
    def get(name: str, default: int) -> int:
        return file.get(f"{kind}.{name}", int, default)

    classifier = file.tensors.get("cls.output.weight")
    if classifier is None and get("pooling_type", 1) == _RANK:
        raise UnsupportedError(
            "a reranker without the last layer of its classifier", where=file.name,
            expected="cls.output.weight", hint="load the folder that the file was made of",
        )  # fmt: skip
    labels = 0 if classifier is None else classifier.shape[0]
    if arch != "modernbert":
        return EncoderConfig(rotary=arch != "bert", labels=labels)
    every, layers = get("attention.sliding_window_pattern", 3), get("block_count", 0)
    return EncoderConfig(
        rotary=True,
        labels=labels,
        window=get("attention.sliding_window", 128) // 2,
        local_layers=frozenset(i for i in range(layers) if i % max(every, 1)),
        classifier_activation="gelu",
        classifier_pooling="cls" if get("classifier.pooling_type", 1) == 2 else "mean",
    )
