"""Tiny models with weights from a seed: the same here and where the goldens are made."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

VOCAB, HIDDEN, LAYERS, HEADS, KV, HEAD, FFN = 160, 64, 3, 4, 2, 16, 96

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
}  # fmt: skip


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes as Hugging Face has them."""
    kind = config["model_type"]
    if kind == "gpt2":
        return _gpt2_shapes()
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (VOCAB, HIDDEN)
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        norms = ["input_layernorm", "post_attention_layernorm"]
        if kind.startswith("gemma"):
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        found |= {f"{p}{n}.weight": (HIDDEN,) for n in norms}
        q, kv = HEADS * HEAD, KV * HEAD
        if kind == "phi3":
            found[p + "self_attn.qkv_proj.weight"] = (q + 2 * kv, HIDDEN)
            found[p + "mlp.gate_up_proj.weight"] = (2 * FFN, HIDDEN)
        else:
            for n, width in (("q", q), ("k", kv), ("v", kv)):
                found[f"{p}self_attn.{n}_proj.weight"] = (width, HIDDEN)
                if kind == "qwen2":
                    found[f"{p}self_attn.{n}_proj.bias"] = (width,)
            found[p + "mlp.gate_proj.weight"] = (FFN, HIDDEN)
            found[p + "mlp.up_proj.weight"] = (FFN, HIDDEN)
        if kind in ("qwen3", "gemma3_text"):
            found |= {f"{p}self_attn.{n}_norm.weight": (HEAD,) for n in "qk"}
        found[p + "self_attn.o_proj.weight"] = (HIDDEN, q)
        found[p + "mlp.down_proj.weight"] = (HIDDEN, FFN)
    return found


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
    config = {**CONFIGS[name], "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_safetensors(folder / "model.safetensors", weights(name))


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    header: dict[str, Any] = {}
    blobs, at = [], 0
    for tensor, array in tensors.items():
        data = array.tobytes()
        header[tensor] = {
            "dtype": "F32", "shape": list(array.shape), "data_offsets": [at, at + len(data)]
        }  # fmt: skip
        blobs.append(data)
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


PROMPT = [3, 141, 59, 26, 5, 35, 89, 79, 32, 38, 46, 26]  # twelve tokens, then sixteen greedy ones
STEPS = 16
