"""Tiny models with weights from a seed: the same here and where the goldens are made."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

VOCAB, HIDDEN, LAYERS, HEADS, KV, HEAD, FFN = 160, 64, 3, 4, 2, 16, 96
EXPERTS = 6

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": HEAD,
    "intermediate_size": FFN,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_CENTRED = {name: value for name, value in _BASE.items() if name != "rms_norm_eps"}  # layer norms
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(HEAD // 2)],
    "long_factor": [1.5 + 0.3 * i for i in range(HEAD // 2)],
    "original_max_position_embeddings": 32,
}
_MOE = {"num_experts": EXPERTS, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_LATENT = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": HEADS,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
_MAMBA = {
    "model_type": "mamba2",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_heads": 2 * HEADS,
    "head_dim": HEAD,
    "state_size": 8,
    "conv_kernel": 4,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
}
_DELTA = {
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "partial_rotary_factor": 0.5,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_BASE, "model_type": "llama"},
    "llama_tied": {**_BASE, "model_type": "llama", "tie_word_embeddings": True},
    "llama_llama3": {**_BASE, "model_type": "llama", "rope_scaling": _LLAMA3},
    "llama_linear": {
        **_BASE, "model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "llama_yarn": {**_BASE, "model_type": "llama", "rope_scaling": _YARN},
    "mistral": {**_BASE, "model_type": "mistral", "sliding_window": 5},
    "qwen2": {**_BASE, "model_type": "qwen2"},
    "qwen3": {**_BASE, "model_type": "qwen3"},
    "gemma2": {
        **_BASE, **_GEMMA, "model_type": "gemma2", "sliding_window": 5,
        "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 24,
    },
    "gemma3": {
        **_BASE, **_GEMMA, "model_type": "gemma3_text", "sliding_window": 5,
        "num_hidden_layers": 7, "query_pre_attn_scalar": 24, "rope_local_base_freq": 10000.0,
        "rope_theta": 1000000.0,
    },
    "phi3": {**_BASE, "model_type": "phi3", "pad_token_id": 0},
    "phi3_long": {
        **_BASE, "model_type": "phi3", "pad_token_id": 0, "rope_scaling": _LONG,
        "original_max_position_embeddings": 32,
    },
    "gpt2": {
        "model_type": "gpt2", "vocab_size": VOCAB, "n_embd": HIDDEN, "n_layer": LAYERS,
        "n_head": HEADS, "n_positions": 128, "layer_norm_epsilon": 1e-5,
    },
    "mixtral": {
        **_BASE, "model_type": "mixtral", "num_local_experts": EXPERTS, "num_experts_per_tok": 2,
    },
    "qwen2_moe": {
        **_BASE, **_MOE, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 48,
        "norm_topk_prob": False,
    },
    "qwen3_moe": {**_BASE, **_MOE, "model_type": "qwen3_moe", "norm_topk_prob": True},
    "olmoe": {
        **_BASE, "model_type": "olmoe", "num_experts": EXPERTS, "num_experts_per_tok": 3,
    },
    "deepseek_v2": {
        **_BASE, **_LATENT, "model_type": "deepseek_v2", "q_lora_rank": None, "rope_scaling": {
            **_YARN, "mscale": 0.707, "mscale_all_dim": 0.707,
        },
    },
    "deepseek_v2_rank": {
        **_BASE, **_LATENT, "model_type": "deepseek_v2", "q_lora_rank": 24,
        "routed_scaling_factor": 2.0,
    },
    "gpt_oss": {
        **_BASE, "model_type": "gpt_oss", "num_local_experts": EXPERTS, "num_experts_per_tok": 3,
        "sliding_window": 5, "num_hidden_layers": 4,
        "rope_scaling": {**_YARN, "factor": 8.0, "truncate": False},
    },
    "olmo2": {**_BASE, "model_type": "olmo2"},
    "starcoder2": {
        **_CENTRED, "model_type": "starcoder2", "norm_epsilon": 1e-5, "tie_word_embeddings": True,
        "sliding_window": 5, "use_bias": True,
    },
    "stablelm": {**_CENTRED, "model_type": "stablelm", "partial_rotary_factor": 0.25},
    "stablelm_parallel": {
        **_CENTRED, "model_type": "stablelm", "partial_rotary_factor": 0.5,
        "use_parallel_residual": True,
    },
    "granite": {
        **_BASE, "model_type": "granite", "embedding_multiplier": 1.5, "residual_multiplier": 0.5,
        "attention_multiplier": 0.3, "logits_scaling": 2.5,
    },
    "cohere2": {
        **_CENTRED, "model_type": "cohere2", "tie_word_embeddings": True, "sliding_window": 5,
        "logit_scale": 0.25, "layer_norm_eps": 1e-5, "num_hidden_layers": 4,
    },
    "qwen3_next": {
        **_BASE, **_MOE, **_DELTA, "model_type": "qwen3_next", "norm_topk_prob": True,
        "shared_expert_intermediate_size": 48,
    },
    "qwen3_5": {**_BASE, **_DELTA, "model_type": "qwen3_5_text"},
    "qwen3_5_moe": {
        **_BASE, **_MOE, **_DELTA, "model_type": "qwen3_5_moe_text",
        "shared_expert_intermediate_size": 48,
    },
    "mamba2": {**_MAMBA, "n_groups": 1},
    "mamba2_groups": {**_MAMBA, "n_groups": 2},
    "phi": {
        **_CENTRED, "model_type": "phi", "num_key_value_heads": HEADS, "partial_rotary_factor": 0.5,
        "layer_norm_eps": 1e-5,
    },
    "gpt_neox": {
        **_CENTRED, "model_type": "gpt_neox", "num_key_value_heads": HEADS, "rotary_pct": 0.25,
        "layer_norm_eps": 1e-5,
    },
}  # fmt: skip
del CONFIGS["gpt_neox"]["rope_theta"]  # it is rotary_emb_base there


# values are drawn in this order, which goldens depend on
_LATE = ((1, "_norm.weight"), (2, "o_proj.weight"), (3, "mlp.down_proj.weight"))


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes as Hugging Face has them."""
    kind = config["model_type"]
    if kind in ("gpt2", "gpt_neox", "phi"):
        return {"gpt2": _gpt2_shapes, "gpt_neox": _gpt_neox_shapes, "phi": _phi_shapes}[kind]()
    if kind == "mamba2":
        return _mamba2_shapes(config)
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    if kind in ("starcoder2", "stablelm"):
        found["model.norm.bias"] = (HIDDEN,)
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (VOCAB, HIDDEN)
    for i in range(config["num_hidden_layers"]):
        parts = _norms(config) | _attention(config, i) | _network(config, i)
        names = sorted(parts, key=lambda n: next((j for j, e in _LATE if n.endswith(e)), 0))
        found |= {f"model.layers.{i}.{n}": parts[n] for n in names}
    return found


def _norms(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    kind = config["model_type"]
    names = ["input_layernorm", "post_attention_layernorm"]
    if kind.startswith("gemma"):
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    if kind == "olmo2":
        names = ["post_attention_layernorm", "post_feedforward_layernorm"]
    if kind == "cohere2" or config.get("use_parallel_residual"):
        names = ["input_layernorm"]
    parts = ("weight", "bias") if kind in ("starcoder2", "stablelm") else ("weight",)
    return {f"{n}.{p}": (HIDDEN,) for n in names for p in parts}


def _attention(config: dict[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    kind, q, kv = config["model_type"], HEADS * HEAD, KV * HEAD
    if kind == "deepseek_v2":
        return _latent_attention(config)
    if (layer + 1) % config.get("full_attention_interval", 1):
        return _delta_net(config)
    found: dict[str, tuple[int, ...]] = {"self_attn.o_proj.weight": (HIDDEN, q)}
    if kind == "phi3":
        found["self_attn.qkv_proj.weight"] = (q + 2 * kv, HIDDEN)
    else:
        gated = 2 if "full_attention_interval" in config else 1
        for n, width in (("q", gated * q), ("k", kv), ("v", kv)):
            found[f"self_attn.{n}_proj.weight"] = (width, HIDDEN)
            if kind in ("qwen2", "qwen2_moe", "starcoder2", "gpt_oss"):
                found[f"self_attn.{n}_proj.bias"] = (width,)
    if kind in ("starcoder2", "gpt_oss"):
        found["self_attn.o_proj.bias"] = (HIDDEN,)
    if kind.startswith("qwen3") or kind == "gemma3_text":
        found |= {f"self_attn.{n}_norm.weight": (HEAD,) for n in "qk"}
    if kind in ("olmoe", "olmo2"):
        found |= {"self_attn.q_norm.weight": (q,), "self_attn.k_norm.weight": (kv,)}
    if kind == "gpt_oss":
        found["self_attn.sinks"] = (HEADS,)
    return found


def _delta_net(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    names = ("num_key_heads", "key_head_dim", "num_value_heads", "value_head_dim")
    key_heads, key, heads, value = (config[f"linear_{n}"] for n in names)
    mixed = 2 * key_heads * key + heads * value
    if config["model_type"] == "qwen3_next":
        widths = {"qkvz": mixed + heads * value, "ba": 2 * heads}
    else:
        widths = {"qkv": mixed, "z": heads * value, "b": heads, "a": heads}
    return {f"linear_attn.in_proj_{n}.weight": (w, HIDDEN) for n, w in widths.items()} | {
        "linear_attn.conv1d.weight": (mixed, 1, config["linear_conv_kernel_dim"]),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.A_log": (heads,),
        "linear_attn.norm.weight": (value,),
        "linear_attn.out_proj.weight": (HIDDEN, heads * value),
    }


def _mamba2_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    heads, inner = config["num_heads"], config["num_heads"] * config["head_dim"]
    mixed = inner + 2 * config["n_groups"] * config["state_size"]
    found: dict[str, tuple[int, ...]] = {
        "backbone.embeddings.weight": (VOCAB, HIDDEN), "backbone.norm_f.weight": (HIDDEN,),
    }  # fmt: skip
    for i in range(LAYERS):
        p = f"backbone.layers.{i}."
        found |= {
            p + "norm.weight": (HIDDEN,),
            p + "mixer.in_proj.weight": (inner + mixed + heads, HIDDEN),
            p + "mixer.conv1d.weight": (mixed, 1, config["conv_kernel"]),
            p + "mixer.conv1d.bias": (mixed,), p + "mixer.dt_bias": (heads,),
            p + "mixer.A_log": (heads,), p + "mixer.D": (heads,), p + "mixer.norm.weight": (inner,),
            p + "mixer.out_proj.weight": (HIDDEN, inner),
        }  # fmt: skip
    return found


def _latent_attention(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    rank, turned = config["kv_lora_rank"], config["qk_rope_head_dim"]
    plain, value = config["qk_nope_head_dim"], config["v_head_dim"]
    found: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa.weight": (rank + turned, HIDDEN),
        "kv_a_layernorm.weight": (rank,),
        "kv_b_proj.weight": (HEADS * (plain + value), rank),
        "o_proj.weight": (HIDDEN, HEADS * value),
    }
    low = config["q_lora_rank"]
    if low is None:
        found["q_proj.weight"] = (HEADS * (plain + turned), HIDDEN)
    else:
        found |= {"q_a_proj.weight": (low, HIDDEN), "q_a_layernorm.weight": (low,)}
        found["q_b_proj.weight"] = (HEADS * (plain + turned), low)
    return {f"self_attn.{n}": dims for n, dims in found.items()}


def _network(config: dict[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    kind = config["model_type"]
    if kind == "phi3":
        return {"mlp.gate_up_proj.weight": (2 * FFN, HIDDEN), "mlp.down_proj.weight": (HIDDEN, FFN)}
    if kind == "starcoder2":
        return {
            "mlp.c_fc.weight": (FFN, HIDDEN), "mlp.c_fc.bias": (FFN,),
            "mlp.c_proj.weight": (HIDDEN, FFN), "mlp.c_proj.bias": (HIDDEN,),
        }  # fmt: skip
    if kind == "gpt_oss":
        return _joined_experts()
    width = config.get("moe_intermediate_size", FFN)
    if kind == "mixtral":
        moe, names = "block_sparse_moe", ("w1", "w3", "w2")
    else:
        moe, names = "mlp", ("gate_proj", "up_proj", "down_proj")
    if not _has_experts(config, layer):
        return _gated("mlp", names, FFN)
    found: dict[str, tuple[int, ...]] = {f"{moe}.gate.weight": (EXPERTS, HIDDEN)}
    if kind == "qwen3_5_moe_text":
        found["mlp.experts.gate_up_proj"] = (EXPERTS, 2 * width, HIDDEN)
        found["mlp.experts.down_proj"] = (EXPERTS, HIDDEN, width)
    else:
        for e in range(EXPERTS):
            found |= _gated(f"{moe}.experts.{e}", names, width)
    if "shared_expert_intermediate_size" in config:
        found |= _gated("mlp.shared_expert", names, config["shared_expert_intermediate_size"])
        found["mlp.shared_expert_gate.weight"] = (1, HIDDEN)
    if kind == "deepseek_v2":
        found |= _gated("mlp.shared_experts", names, width * config["n_shared_experts"])
    return found


def _has_experts(config: dict[str, Any], layer: int) -> bool:
    return "num_experts_per_tok" in config and layer >= config.get("first_k_dense_replace", 0)


def _gated(base: str, names: tuple[str, ...], width: int) -> dict[str, tuple[int, ...]]:
    gate, up, down = (f"{base}.{n}.weight" for n in names)
    return {gate: (width, HIDDEN), up: (width, HIDDEN), down: (HIDDEN, width)}


def _joined_experts() -> dict[str, tuple[int, ...]]:
    """gpt_oss: [experts, in, out], gate and up in turn."""
    return {
        "mlp.router.weight": (EXPERTS, HIDDEN),
        "mlp.router.bias": (EXPERTS,),
        "mlp.experts.gate_up_proj": (EXPERTS, HIDDEN, 2 * FFN),
        "mlp.experts.gate_up_proj_bias": (EXPERTS, 2 * FFN),
        "mlp.experts.down_proj": (EXPERTS, FFN, HIDDEN),
        "mlp.experts.down_proj_bias": (EXPERTS, HIDDEN),
    }


def _with_biases(found: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Names without an end, as weights [out, in] or [out] with a bias [out] each."""
    made: dict[str, tuple[int, ...]] = {}
    for name, dims in found.items():
        made |= {f"{name}.weight": dims, f"{name}.bias": dims[:1]}
    return made


def _gpt_neox_shapes() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"gpt_neox.final_layer_norm": (HIDDEN,)}
    for i in range(LAYERS):
        p = f"gpt_neox.layers.{i}."
        found |= {
            p + "input_layernorm": (HIDDEN,), p + "post_attention_layernorm": (HIDDEN,),
            p + "attention.query_key_value": (3 * HIDDEN, HIDDEN),
            p + "attention.dense": (HIDDEN, HIDDEN),
            p + "mlp.dense_h_to_4h": (FFN, HIDDEN), p + "mlp.dense_4h_to_h": (HIDDEN, FFN),
        }  # fmt: skip
    ends = {"gpt_neox.embed_in.weight": (VOCAB, HIDDEN), "embed_out.weight": (VOCAB, HIDDEN)}
    return ends | _with_biases(found)


def _phi_shapes() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {
        "model.final_layernorm": (HIDDEN,), "lm_head": (VOCAB, HIDDEN),
    }  # fmt: skip
    for i in range(LAYERS):
        p = f"model.layers.{i}."
        found |= {p + "input_layernorm": (HIDDEN,), p + "self_attn.dense": (HIDDEN, HIDDEN)}
        found |= {p + f"self_attn.{n}_proj": (HIDDEN, HIDDEN) for n in "qkv"}
        found |= {p + "mlp.fc1": (FFN, HIDDEN), p + "mlp.fc2": (HIDDEN, FFN)}
    return {"model.embed_tokens.weight": (VOCAB, HIDDEN)} | _with_biases(found)


def _gpt2_shapes() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (VOCAB, HIDDEN),
        "transformer.wpe.weight": (128, HIDDEN),
        "transformer.ln_f.weight": (HIDDEN,),
        "transformer.ln_f.bias": (HIDDEN,),
    }
    for i in range(LAYERS):
        p = f"transformer.h.{i}."
        for n, dims in {
            "ln_1": (HIDDEN,), "ln_2": (HIDDEN,), "attn.c_attn": (HIDDEN, 3 * HIDDEN),
            "attn.c_proj": (HIDDEN, HIDDEN), "mlp.c_fc": (HIDDEN, 4 * HIDDEN),
            "mlp.c_proj": (4 * HIDDEN, HIDDEN),
        }.items():  # fmt: skip
            found[f"{p}{n}.weight"] = dims
            found[f"{p}{n}.bias"] = (dims[-1],)
    return found


def weights(name: str) -> dict[str, np.ndarray]:
    """Values of a size that keeps activations near 1."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    made = {}
    for tensor, shape in shapes(CONFIGS[name]).items():
        x = rng.standard_normal(shape, dtype=np.float32)
        if len(shape) == 1:
            centre = 0.0 if tensor.endswith("bias") or name.startswith("gemma") else 1.0
            made[tensor] = (centre + 0.2 * x).astype(np.float32)
        else:
            made[tensor] = (x / np.sqrt(shape[-1])).astype(np.float32)
    return made


def write_folder(name: str, folder: Path) -> None:
    """A Hugging Face folder: config.json and model.safetensors, written by hand."""
    write_config(name, folder)
    write_safetensors(folder / "model.safetensors", weights(name))


def write_config(name: str, folder: Path) -> None:
    config = {**CONFIGS[name], "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


_DTYPES = {"float32": "F32", "uint8": "U8", "bfloat16": "BF16", "float16": "F16"}


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    header: dict[str, Any] = {}
    blobs, at = [], 0
    for tensor, array in tensors.items():
        data = array.tobytes()
        header[tensor] = {
            "dtype": _DTYPES[array.dtype.name], "shape": list(array.shape),
            "data_offsets": [at, at + len(data)],
        }  # fmt: skip
        blobs.append(data)
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


PROMPT = [3, 141, 59, 26, 5, 35, 89, 79, 32, 38, 46, 26]  # twelve tokens, then sixteen greedy ones
STEPS = 16
