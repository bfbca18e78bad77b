"""SmolLM2-135M in f32, as a Hugging Face folder: the catalogue's quantised weights, unpacked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from rlx.formats.fetch import resolve
from rlx.formats.safetensors import write_safetensors
from rlx.ir.quant.scheme import decode
from rlx.models.arch.llama import HF_NAMES
from rlx.models.model_file import ModelFile
from rlx.models.rope_tables import pairs_apart

DOCS = Path(__file__).resolve().parent.parent / "docs"


def write_lora_model(folder: Path) -> None:
    """Every library begins with these weights, and reads this text: our documentation."""
    model = ModelFile.open(resolve("smollm2-135m"))
    weights, c = model.weights(), model.config
    arrays: dict[str, Any] = {}
    for ours, theirs in HF_NAMES.items():
        for i in range(c.layers) if "{i}" in ours else (0,):
            name = ours.replace("{i}", str(i))
            if name not in weights:
                continue
            weight = weights.get(name)
            data = weight.array if weight.scheme is None else decode(weight.scheme, weight.array)
            data = np.asarray(data, np.float32)
            if "attn_q" in name or "attn_k" in name:
                data = pairs_apart(data, c.heads if "attn_q" in name else c.kv_heads)
            arrays[str(theirs).replace("{i}", str(i))] = np.ascontiguousarray(data)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32",
        "vocab_size": c.vocab, "hidden_size": c.hidden, "intermediate_size": c.ffn,
        "num_hidden_layers": c.layers, "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads, "head_dim": c.head_dim, "hidden_act": "silu",
        "max_position_embeddings": c.context, "rms_norm_eps": c.eps,
        "rope_theta": c.rope.theta, "tie_word_embeddings": True, "attention_bias": False,
        "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md")))
    np.save(folder / "tokens.npy", np.asarray(model.tokenizer().encode(text), np.int32))
    write_safetensors(folder / "model.safetensors", arrays)
