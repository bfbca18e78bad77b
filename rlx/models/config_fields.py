"""What the page of an architecture declares of config.json.

A page reads some fields, each with the default that transformers has for this type and, where not
all are built, the values it takes. Others are harmless: they say nothing about results. A field
that is neither is refused, unless it is unset: null, false, or empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rlx.support.records import dataclass


@dataclass(frozen=True)
class Field:
    """A field of config.json that a page reads."""

    default: Any
    values: tuple[Any, ...] = ()  # those that are supported; none listed: all of the type
    kind: type | None = None  # of values; None: that of the default
    also: tuple[str, ...] = ()  # older names
    null: bool = False  # whether null is a value of its own, and not an absent field

    @property
    def type(self) -> type:
        return self.kind or type(self.default)


Fields = Mapping[str, Field]


def read(**fields: Any) -> Fields:
    """Fields, each by its default or as a `Field`."""
    return {n: f if isinstance(f, Field) else Field(f) for n, f in fields.items()}


def number(default: int | None = None, *also: str) -> Field:
    """A whole number that may be null."""
    return Field(default, kind=int, also=also, null=True)


def text(default: str | None = None) -> Field:
    return Field(default, kind=str)


def only(value: Any, default: Any = None) -> Field:
    """A field with one value that is built."""
    return Field(value if default is None else default, values=(value,))


def without(fields: Fields, *names: str) -> Fields:
    return {n: f for n, f in fields.items() if n not in names}


def is_unset(value: Any) -> bool:
    """Whether a value says no more than an absent field: null, false, or nothing in brackets."""
    return value is None or value is False or (isinstance(value, (dict, list)) and not value)


def is_listed(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name is one of those listed, in which * stands for anything."""
    return any(_fits(name, pattern.split("*")) for pattern in patterns)


def _fits(name: str, parts: list[str]) -> bool:
    first, *middle, last = parts if len(parts) > 1 else [*parts, ""]
    if len(parts) == 1:
        return name == first
    if len(name) < len(first) + len(last) or not (name.startswith(first) and name.endswith(last)):
        return False
    at, end = len(first), len(name) - len(last)
    for part in middle:
        at = name.find(part, at, end)
        if at < 0:
            return False
        at += len(part)
    return True


# how transformers numbers a rotary embedding; rope_scaling is the older name of rope_parameters
ROPE: Fields = read(
    rope_parameters=Field(None, kind=dict),
    rope_scaling=Field(None, kind=dict),
    rope_theta=10000.0,
    partial_rotary_factor=Field(None, kind=float),
    original_max_position_embeddings=number(),
)
ROPE_KEYS: Fields = read(
    rope_type=Field("default", also=("type",)),
    rope_theta=Field(None, kind=float),
    partial_rotary_factor=Field(None, kind=float),
    factor=Field(None, kind=float),
    original_max_position_embeddings=number(),
    attention_factor=Field(None, kind=float),
    beta_fast=Field(None, kind=float),
    beta_slow=Field(None, kind=float),
    short_factor=Field(None, kind=list),
    long_factor=Field(None, kind=list),
    low_freq_factor=Field(None, kind=float),
    high_freq_factor=Field(None, kind=float),
    mscale=Field(None, kind=float),
    mscale_all_dim=Field(None, kind=float),
    truncate=True,
)
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
PARTIAL = ROPE_TYPES[:-1]  # of types that rotate a part of each head
# of encoders: texts of a batch have one set of frequencies
BIDIRECTIONAL = tuple(kind for kind in ROPE_TYPES if kind != "longrope")
# what every language model reads
DECODER: Fields = read(is_causal=only(True), is_encoder_decoder=only(False), layer_types=only(None))
# sliding windows: in the layers that layer_types names
WINDOWS: Fields = read(sliding_window=number(4096), layer_types=Field(None, kind=list))
# a window in the later layers only, and only if asked for
LATE_WINDOWS: Fields = {**WINDOWS, **read(use_sliding_window=False, max_window_layers=28)}
# what every encoder reads
ENCODER: Fields = read(
    is_decoder=only(False),
    add_cross_attention=only(False),
    is_encoder_decoder=only(False),
    is_causal=only(False),
    architectures=Field([]),
    id2label=Field({}),
    num_labels=2,
)

# of every config.json: names, versions, training, tokens, and what a call of transformers returns
HARMLESS = (
    "_*", "architectures", "auto_map", "dtype", "model_type", "name_or_path", "torch_dtype",
    "torchscript", "transformers_version", "transformers.js_config", "unsloth_*", "use_bfloat16",
    "use_flash_attn", "use_flash_attention*", "attn_implementation", "experts_implementation",
    "deterministic_flash_attn", "use_cache", "output_attentions", "output_hidden_states",
    "output_logits", "output_past", "output_router_logits", "output_scores", "return_dict*",
    "chunk_size_feed_forward", "gradient_checkpointing", "pretraining_tp", "tie_encoder_decoder",
    "task_specific_params", "finetuning_task", "problem_type", "id2label",
    "label2id", "num_labels", "vocab_file", "language", "custom_pipelines", "memory_efficient*",
    "*dropout*", "*_pdrop", "initializer_*", "init_*", "*_init_std", "*aux_loss*", "*_z_loss_coef",
    "*router_jitter_noise", "*jitter*",
    "*token_id", "*token_index", "*token_ids", "tokenizer_class", "bos_token", "eos_token",
    "pad_token", "quantization_config", "text_config", "vision_config", "sentence_transformers",
    # of generation
    "*_ngram_size", "*_penalty", "assistant_*", "num_assistant_*", "target_lookbehind",
    "bad_words_ids", "begin_suppress_tokens", "suppress_tokens", "do_sample", "early_stopping",
    "epsilon_cutoff", "eta_cutoff", "max_length", "min_length", "max_new_tokens", "num_beam*",
    "num_return_sequences", "remove_invalid_values", "temperature", "top_k", "top_p", "typical_p",
    "prefix", "decoder_start_token_id", "is_llama_config", "max_seq*",
    "seq_length", "cache_implementation", "tie_weights_", "model_max_length", "training_*",
)  # fmt: skip
# tensors that every folder may have besides: they follow from the configuration
HARMLESS_TENSORS = (
    "*inv_freq", "*position_ids", "*.masked_bias", "*.rotary_emb.*", "*token_type_ids",
)  # fmt: skip
# heads of encoders that are neither embeddings nor a classifier
OTHER_HEADS = (
    "cls.predictions.*", "cls.seq_relationship.*", "lm_head.*", "vocab_*", "predictions.*",
    "discriminator_predictions.*", "generator_*", "qa_outputs.*", "mask_predictions.*",
    "lm_predictions.*", "sop_classifier.*", "decoder.*", "*pooler.*", "classifier.*", "head.*",
    "pre_classifier.*",
)  # fmt: skip
