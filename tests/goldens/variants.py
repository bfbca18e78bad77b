"""Small configurations of every architecture: odd sizes, and variants that differ in their fields.

Weights come from a seed, by the name of each tensor: the same here and where goldens are made.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

Config = dict[str, Any]
# three query heads share one KV head, heads are wider than hidden / heads, the vocabulary is prime
_SIZES: Config = {
    "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3,
    "num_key_value_heads": 1, "head_dim": 12, "intermediate_size": 36,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-4, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_CENTRED = {n: v for n, v in _SIZES.items() if n != "rms_norm_eps"}
_EVEN = {n: v for n, v in _CENTRED.items() if n not in ("num_key_value_heads", "head_dim")}
_MOE: Config = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
_DELTA: Config = {
    "num_hidden_layers": 3, "full_attention_interval": 2, "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 1,
    "linear_num_value_heads": 3, "partial_rotary_factor": 0.5,
}  # fmt: skip
_LATE: Config = {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1}
_ENCODER: Config = {
    "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3,
    "intermediate_size": 36, "max_position_embeddings": 40, "pad_token_id": 0,
    "layer_norm_eps": 1e-6, "type_vocab_size": 2, "id2label": {"0": "a", "1": "b", "2": "c"},
}  # fmt: skip
_UNTYPED = {n: v for n, v in _ENCODER.items() if n != "type_vocab_size"}

# model_type → a configuration
DECODERS: dict[str, Config] = {
    "llama": _SIZES,
    "mistral": {**_SIZES, "sliding_window": 5},
    "mixtral": {**_SIZES, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 5},
    "qwen2": {**_SIZES, **_LATE},
    "qwen3": {**_SIZES, **_LATE},
    "qwen2_moe": {**_SIZES, **_MOE, **_LATE, "shared_expert_intermediate_size": 28},
    "qwen3_moe": {**_SIZES, **_MOE, "sliding_window": 5, "use_sliding_window": True},
    "qwen3_next": {**_SIZES, **_MOE, **_DELTA, "shared_expert_intermediate_size": 28},
    "qwen3_5_text": {**_SIZES, **_DELTA},
    "qwen3_5_moe_text": {
        **{n: v for n, v in _SIZES.items() if n != "intermediate_size"}, **_MOE, **_DELTA,
        "shared_expert_intermediate_size": 28,
    },
    "olmo2": _SIZES,
    "olmoe": {
        **_EVEN, "num_key_value_heads": 1, "rms_norm_eps": 1e-4, "num_experts": 5,
        "num_experts_per_tok": 2,
    },
    "granite": {
        **_SIZES, "embedding_multiplier": 2.0, "residual_multiplier": 0.6,
        "attention_multiplier": 0.4, "logits_scaling": 1.5,
    },
    "cohere2": {**_CENTRED, "sliding_window": 5, "sliding_window_pattern": 2},
    "gemma2": {**_SIZES, "sliding_window": 5, "query_pre_attn_scalar": 20},
    "gemma3_text": {
        **_SIZES, "sliding_window": 5, "query_pre_attn_scalar": 20, "sliding_window_pattern": 2,
    },
    "gpt2": {
        "vocab_size": 61, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 64,
        "bos_token_id": None, "eos_token_id": None,
    },
    "gpt_neox": {**_EVEN, "rotary_pct": 0.5},
    "gpt_oss": {
        **_SIZES, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 5,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8,
        },
    },
    "deepseek_v2": {
        **{n: v for n, v in _SIZES.items() if n not in ("head_dim", "num_key_value_heads")},
        "kv_lora_rank": 10, "q_lora_rank": 14, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
        "v_head_dim": 9, "n_routed_experts": 5, "num_experts_per_tok": 2, "n_shared_experts": 2,
        "moe_intermediate_size": 20, "first_k_dense_replace": 1,
    },
    "mamba2": {
        "vocab_size": 61, "hidden_size": 20, "num_hidden_layers": 2, "num_heads": 5, "head_dim": 8,
        "state_size": 6, "conv_kernel": 3, "n_groups": 1, "bos_token_id": None,
        "eos_token_id": None, "pad_token_id": None,
    },
    "phi": {**_CENTRED, "partial_rotary_factor": 0.5},
    "phi3": {**_EVEN, "num_key_value_heads": 1},
    "stablelm": {
        **_EVEN, "num_key_value_heads": 1, "partial_rotary_factor": 0.5, "layer_norm_eps": 1e-4,
    },
    "starcoder2": {**_CENTRED, "sliding_window": 5, "norm_epsilon": 1e-4},
}  # fmt: skip
ENCODERS: dict[str, Config] = {
    "bert": _ENCODER,
    "roberta": {**_ENCODER, "pad_token_id": 1},
    "xlm-roberta": {**_ENCODER, "pad_token_id": 2},
    "mpnet": {**_UNTYPED, "pad_token_id": 1},
    "distilbert": {
        "vocab_size": 61, "dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 36,
        "max_position_embeddings": 40, "pad_token_id": 0, "id2label": {"0": "a", "1": "b"},
    },
    "nomic_bert": {**_ENCODER},
    "modernbert": {
        **{n: v for n, v in _UNTYPED.items() if n != "layer_norm_eps"}, "num_hidden_layers": 3,
        "local_attention": 6, "norm_eps": 1e-4, "global_attn_every_n_layers": 2,
        "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2,
    },
    "electra": {**_ENCODER, "embedding_size": 10},
    "albert": {**_ENCODER, "embedding_size": 10, "num_hidden_groups": 2},
    "gte": _ENCODER,
    "jina_embeddings_v3": _ENCODER,
    "deberta-v2": {
        **_ENCODER, "relative_attention": True, "position_biased_input": False,
        "share_att_key": True, "norm_rel_ebd": "layer_norm", "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 6, "type_vocab_size": 0,
    },
}  # fmt: skip

_BIASES: Config = {"attention_bias": True}
_LLAMA3: Config = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
_YARN: Config = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
_YARN_ALL: Config = {
    **_YARN, "rope_theta": 500.0, "beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.3,
}  # fmt: skip
_LINEAR: Config = {"rope_type": "linear", "factor": 3.0, "rope_theta": 777.0}
_PROPORTIONAL: Config = {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0}


def _long(pairs: int, original: int) -> Config:
    return {
        "rope_type": "longrope", "original_max_position_embeddings": original,
        "short_factor": [1.0 + 0.1 * i for i in range(pairs)],
        "long_factor": [2.0 + 0.3 * i for i in range(pairs)],
    }  # fmt: skip


_LATER = ["full_attention", "sliding_attention"]  # other layers than the default
_ONE: Config = {"num_hidden_layers": 1, "tie_word_embeddings": True, "num_key_value_heads": 3}
_SIX: Config = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}

# name → (model_type, changes): together they differ in every field that is declared
VARIANTS: dict[str, tuple[str, Config]] = {
    "llama_biases": ("llama", {
        **_BIASES, "mlp_bias": True, "hidden_act": "gelu", "rope_scaling": _LINEAR,
        "rms_norm_eps": 0.3,
    }),
    "llama_one": ("llama", {**_ONE, "hidden_act": "relu2", "rope_scaling": _LLAMA3}),
    "llama_yarn": ("llama", {**_SIX, "hidden_act": "mish", "rope_parameters": _YARN_ALL}),
    "llama_mscale": ("llama", {
        "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False},
        "hidden_act": "laplace",
    }),
    "llama_long": ("llama", {"rope_parameters": _long(6, 8), "hidden_act": "hardswish"}),
    "llama_short": ("llama", {
        "rope_parameters": {**_long(6, 32), "attention_factor": 1.2}, "hidden_act": "gelu_10",
    }),
    "llama_proportional": ("llama", {
        "rope_parameters": _PROPORTIONAL, "hidden_act": "sqrtsoftplus",
    }),
    "llama_dynamic": ("llama", {
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}, "rope_theta": 300.0,
        "hidden_act": "leaky_relu", "head_dim": None,
    }),
    "mistral_one": ("mistral", {**_ONE, "sliding_window": 3, "hidden_act": "quick_gelu"}),
    "mistral_full": ("mistral", {**_SIX, "sliding_window": None, "rope_scaling": _YARN}),
    "mixtral_one": ("mixtral", {
        **_ONE, "sliding_window": None, "num_local_experts": 3, "num_experts_per_tok": 3,
        "hidden_act": "relu",
    }),
    "qwen2_types": ("qwen2", {"layer_types": _LATER, **_SIX, "hidden_act": "gelu_new"}),
    "qwen2_one": ("qwen2", {
        **_ONE, "use_sliding_window": False, "rope_scaling": _YARN, "hidden_act": "tanh",
    }),
    "qwen3_types": ("qwen3", {"layer_types": _LATER[::-1], **_BIASES, "hidden_act": "gelu"}),
    "qwen3_one": ("qwen3", {**_ONE, "max_window_layers": 0, "rope_scaling": _LLAMA3}),
    "qwen2_moe_mixed": ("qwen2_moe", {
        "mlp_only_layers": [0], "qkv_bias": False, "norm_topk_prob": True, "hidden_act": "gelu",
    }),
    "qwen2_moe_step": ("qwen2_moe", {
        "decoder_sparse_step": 2, "layer_types": _LATER, "tie_word_embeddings": True,
    }),
    "qwen3_moe_mixed": ("qwen3_moe", {
        "mlp_only_layers": [1], **_BIASES, "norm_topk_prob": True, "use_sliding_window": False,
    }),
    "qwen3_moe_step": ("qwen3_moe", {
        "decoder_sparse_step": 2, "sliding_window": 3, "hidden_act": "gelu",
        "tie_word_embeddings": True, "rope_scaling": _YARN,
    }),
    "qwen3_next_types": ("qwen3_next", {
        "layer_types": ["full_attention", "linear_attention", "full_attention"], **_BIASES,
        "norm_topk_prob": False, "mlp_only_layers": [0], "partial_rotary_factor": 1.0,
        "tie_word_embeddings": True, "hidden_act": "gelu",
    }),
    "qwen3_next_two": ("qwen3_next", {
        "num_hidden_layers": 2, "linear_num_value_heads": 2, "linear_num_key_heads": 2,
        "linear_conv_kernel_dim": 4, "decoder_sparse_step": 2,
    }),
    "qwen3_5_types": ("qwen3_5_text", {
        "layer_types": ["full_attention", "linear_attention", "full_attention"], **_BIASES,
        "rope_parameters": {**_LINEAR, "partial_rotary_factor": 0.5}, "hidden_act": "gelu",
    }),
    "qwen3_5_moe_tied": ("qwen3_5_moe_text", {
        "tie_word_embeddings": True, "num_experts_per_tok": 1, "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
    }),
    "olmo2_one": ("olmo2", {**_ONE, **_BIASES, "hidden_act": "gelu", "rms_norm_eps": 0.1}),
    "olmo2_six": ("olmo2", {**_SIX, "rope_scaling": _LLAMA3}),
    "olmoe_norm": ("olmoe", {
        "norm_topk_prob": True, **_BIASES, "num_attention_heads": 4, "num_key_value_heads": 2,
        "hidden_act": "relu", "tie_word_embeddings": True,
    }),
    "granite_defaults": ("granite", {
        **_BIASES, "mlp_bias": True, "attention_multiplier": 1.0, "hidden_act": "relu6",
        "tie_word_embeddings": True,
    }),
    "cohere2_types": ("cohere2", {
        "layer_types": _LATER, **_BIASES, "logit_scale": 0.5, "hidden_act": "gelu",
        "tie_word_embeddings": False, "layer_norm_eps": 0.1,
    }),
    "cohere2_one": ("cohere2", {"num_hidden_layers": 1, **_SIX, "rope_scaling": _YARN}),
    "gemma2_types": ("gemma2", {
        "layer_types": _LATER, **_BIASES, "attn_logit_softcapping": None,
        "final_logit_softcapping": 2.0, "hidden_activation": "relu",
    }),
    "gemma2_caps": ("gemma2", {
        **_SIX, "attn_logit_softcapping": 1.5, "final_logit_softcapping": None,
        "tie_word_embeddings": False, "rope_scaling": _LINEAR,
    }),
    "gemma3_ropes": ("gemma3_text", {
        "rope_parameters": {
            "full_attention": {**_YARN, "rope_theta": 77.0},
            "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 55.0},
        },
        **_BIASES, "hidden_activation": "silu",
    }),
    "gemma3_old": ("gemma3_text", {
        "rope_theta": 90.0, "rope_local_base_freq": 30.0, "rope_scaling": _LINEAR,
        "layer_types": _LATER, "final_logit_softcapping": 2.0, "tie_word_embeddings": False,
    }),
    "gpt2_untied": ("gpt2", {
        "tie_word_embeddings": False, "scale_attn_by_inverse_layer_idx": True, "n_inner": 17,
        "activation_function": "relu", "layer_norm_epsilon": 0.1,
    }),
    "gpt2_unscaled": ("gpt2", {
        "scale_attn_weights": False, "n_head": 1, "n_layer": 1, "activation_function": "silu",
    }),
    "gpt_neox_sequential": ("gpt_neox", {
        "use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_fast",
        "rotary_pct": 1.0, "rotary_emb_base": 300.0,
    }),
    "gpt_neox_one": ("gpt_neox", {
        "num_hidden_layers": 1, "tie_word_embeddings": True, "rope_scaling": _LLAMA3,
        "layer_norm_eps": 0.1,
    }),
    "gpt_oss_types": ("gpt_oss", {
        "layer_types": _LATER, "swiglu_limit": 0.4, "swiglu_alpha": 1.1, "attention_bias": False,
        "rope_parameters": {**_YARN_ALL, "truncate": False},
    }),
    "gpt_oss_one": ("gpt_oss", {**_ONE, "rope_parameters": _LINEAR, "num_experts_per_tok": 1}),
    "deepseek_v2_biases": ("deepseek_v2", {
        **_BIASES, "mlp_bias": True, "hidden_act": "gelu", "first_k_dense_replace": 0,
        "rope_scaling": {**_YARN, "mscale_all_dim": 1.2}, "rms_norm_eps": 0.1,
    }),
    "deepseek_v2_plain": ("deepseek_v2", {
        "q_lora_rank": None, "n_shared_experts": 1, "routed_scaling_factor": 2.5,
        "tie_word_embeddings": True, "first_k_dense_replace": 2, "rope_theta": 50.0,
    }),
    "mamba2_biases": ("mamba2", {
        "use_bias": True, "use_conv_bias": False, "hidden_act": "gelu", "n_groups": 5,
        "tie_word_embeddings": True, "layer_norm_epsilon": 0.1,
    }),
    "mamba2_limits": ("mamba2", {"time_step_limit": [0.2, 0.6], "num_hidden_layers": 1}),
    "phi_one": ("phi", {
        **_ONE, "partial_rotary_factor": 1.0, "hidden_act": "relu", "rope_theta": 99.0,
    }),
    "phi_yarn": ("phi", {**_SIX, "rope_scaling": _YARN, "layer_norm_eps": 0.1}),
    "phi3_long": ("phi3", {
        "rope_scaling": _long(4, 8), "original_max_position_embeddings": 8, "sliding_window": 5,
        "hidden_act": "gelu",
    }),
    "phi3_part": ("phi3", {
        "partial_rotary_factor": 0.5, "num_attention_heads": 2, "num_key_value_heads": 2,
        "tie_word_embeddings": True, "num_hidden_layers": 1,
    }),
    "stablelm_biases": ("stablelm", {
        "use_qkv_bias": True, "use_parallel_residual": True, "hidden_act": "gelu",
        "rope_theta": 99.0,
    }),
    "stablelm_one": ("stablelm", {
        "num_hidden_layers": 1, "tie_word_embeddings": True, "partial_rotary_factor": 1.0,
        "rope_scaling": _YARN,
    }),
    "starcoder2_plain": ("starcoder2", {
        "use_bias": False, "sliding_window": None, "tie_word_embeddings": False,
        "hidden_act": "gelu", "norm_epsilon": 0.1,
    }),
    "starcoder2_one": ("starcoder2", {**_ONE, "sliding_window": 2, "rope_scaling": _LINEAR}),
    "bert_act": ("bert", {"hidden_act": "relu", "layer_norm_eps": 0.1, "type_vocab_size": 1}),
    "bert_one": ("bert", {"num_hidden_layers": 1, "num_attention_heads": 1}),
    "roberta_pad": ("roberta", {"pad_token_id": 3, "hidden_act": "gelu_new"}),
    "mpnet_act": ("mpnet", {"layer_norm_eps": 0.1, "hidden_act": "silu"}),
    "distilbert_act": ("distilbert", {"activation": "relu", "n_heads": 1, "n_layers": 1}),
    "nomic_rope": ("nomic_bert", {"rope_parameters": _LINEAR, "hidden_act": "gelu"}),
    "nomic_yarn": ("nomic_bert", {"rope_parameters": _YARN, "type_vocab_size": 1}),
    "modernbert_biases": ("modernbert", {
        **_BIASES, "mlp_bias": True, "norm_bias": True, "classifier_bias": True,
        "classifier_activation": "relu", "classifier_pooling": "mean",
        "hidden_activation": "silu",
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }),
    "modernbert_rope": ("modernbert", {
        "rope_parameters": {
            "full_attention": {**_YARN, "rope_theta": 300.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 55.0},
        },
        "local_attention": 10,
    }),
    "electra_wide": ("electra", {"embedding_size": 24, "hidden_act": "relu"}),
    "albert_groups": ("albert", {
        "num_hidden_groups": 1, "hidden_act": "gelu", "embedding_size": 8,
    }),
    "gte_rope": ("gte", {"rope_parameters": _LINEAR, "type_vocab_size": 0, "hidden_act": "silu"}),
    "jina_rope": ("jina_embeddings_v3", {"rope_parameters": _YARN, "hidden_act": "relu"}),
    "deberta_near": ("deberta-v2", {
        "max_relative_positions": 9, "position_buckets": 4, "pooler_hidden_act": "tanh",
        "hidden_act": "relu", "layer_norm_eps": 0.1, "type_vocab_size": 2,
    }),
}  # fmt: skip
_TURNED: Config = {"rope_type": "proportional", "partial_rotary_factor": 0.5}
# types that rotate whole heads: another base, and both names of the object
for _kind in (
    "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "olmo2", "olmoe", "granite",
    "cohere2", "gemma2", "gpt_oss", "starcoder2", "nomic_bert", "gte", "jina_embeddings_v3",
):  # fmt: skip
    _one = {"num_hidden_layers": 1}
    VARIANTS[f"{_kind}_turned"] = _kind, {**_one, "rope_theta": 300.0, "rope_scaling": _TURNED}
    VARIANTS[f"{_kind}_yarn"] = _kind, {**_one, "rope_theta": 300.0, "rope_parameters": _YARN}
VARIANTS |= {
    "qwen3_next_yarn": ("qwen3_next", {"rope_theta": 300.0, "rope_scaling": _YARN}),
    "qwen3_5_yarn": ("qwen3_5_text", {
        "rope_theta": 300.0, "rope_scaling": _YARN, "tie_word_embeddings": True,
    }),
    "qwen3_5_moe_types": ("qwen3_5_moe_text", {
        "layer_types": ["full_attention", "linear_attention", "linear_attention"], **_BIASES,
        "hidden_act": "gelu", "rope_theta": 300.0, "rope_scaling": _YARN,
    }),
    "deepseek_v2_linear": ("deepseek_v2", {"rope_parameters": _LINEAR}),
    "phi3_theta": ("phi3", {"rope_theta": 300.0, "rms_norm_eps": 0.1, "head_dim": 12}),
    "roberta_types": ("roberta", {"type_vocab_size": 1}),
    "electra_types": ("electra", {"type_vocab_size": 3}),
    "albert_types": ("albert", {"type_vocab_size": 3}),
    "modernbert_old": ("modernbert", {
        "global_rope_theta": 300.0, "local_rope_theta": 55.0, "sliding_window": 4,
    }),
}  # fmt: skip
# and each as it is, with the config.json that transformers saves
VARIANTS |= {f"{kind}_saved": (kind, {}) for kind in (*DECODERS, *ENCODERS)}

TOKENS = [13, 41, 59, 26, 5, 35, 60, 7, 32, 38, 46, 26, 11, 19, 17, 52, 23, 8]  # none is padding


def values(seed: str, tensor: str, shape: tuple[int, ...]) -> np.ndarray:
    """Values of a size that keeps activations near 1."""
    rng = np.random.default_rng(zlib.crc32(f"{seed} {tensor}".encode()))
    x = rng.standard_normal(shape, dtype=np.float32)
    if len(shape) < 2 or tensor.endswith("_bias"):
        centre = 1.0 if "norm" in tensor.lower() and tensor.endswith("weight") else 0.0
        return (centre + 0.2 * x).astype(np.float32)
    return (1.4 * x / np.sqrt(shape[-1])).astype(np.float32)


def config(name: str) -> Config:
    """The config.json of a variant."""
    kind, changes = VARIANTS[name]
    heads = {"architectures": [f"{kind}ForSequenceClassification"]} if kind in ENCODERS else {}
    return {"model_type": kind, **heads, **(DECODERS | ENCODERS)[kind], **changes}
