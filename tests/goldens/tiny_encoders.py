"""Tiny encoders with weights from a seed: the same here and where the goldens are made."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from tiny import write_safetensors

VOCAB, HIDDEN, LAYERS, HEADS, FFN, POSITIONS = 120, 32, 4, 4, 48, 40
LENGTHS = (12, 7, 20)  # of the texts in the golden batch

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": FFN,
    "max_position_embeddings": POSITIONS,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
    "id2label": {"0": "relevance"},
}
_KINDS = {
    "bert": "Bert", "roberta": "Roberta", "mpnet": "MPNet", "distilbert": "DistilBert",
    "nomic_bert": "NomicBert", "modernbert": "ModernBert", "electra": "Electra",
    "albert": "Albert", "gte": "Gte", "jina_embeddings_v3": "JinaEmbeddingsV3",
    "deberta_v2": "DebertaV2",
}  # fmt: skip
BUCKETS = 8  # of distances to either side
NARROW = 16  # width of tables that are not as wide as the layers

CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {**_BASE, "model_type": "bert", "hidden_act": "gelu", "type_vocab_size": 2},
    "roberta": {
        **_BASE, "model_type": "roberta", "type_vocab_size": 1, "pad_token_id": 1,
        "layer_norm_eps": 1e-5,
    },
    "mpnet": {**_BASE, "model_type": "mpnet", "pad_token_id": 1, "layer_norm_eps": 1e-5},
    "distilbert": {
        "model_type": "distilbert", "vocab_size": VOCAB, "dim": HIDDEN, "n_layers": LAYERS,
        "n_heads": HEADS, "hidden_dim": FFN, "max_position_embeddings": POSITIONS,
        "pad_token_id": 0, "id2label": {"0": "relevance"},
    },
    "nomic_bert": {
        **_BASE, "model_type": "nomic_bert", "type_vocab_size": 2, "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    },
    "modernbert": {
        **_BASE, "model_type": "modernbert", "norm_eps": 1e-5, "local_attention": 8,
        "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0, "classifier_pooling": "mean", "cls_token_id": 2,
        "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3,
    },
}  # fmt: skip
_ROPE: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
CONFIGS |= {
    "electra": {
        **_BASE, "model_type": "electra", "type_vocab_size": 2, "embedding_size": NARROW
    },
    "albert": {
        **_BASE, "model_type": "albert", "type_vocab_size": 2, "embedding_size": NARROW,
        "num_hidden_groups": 2, "hidden_act": "gelu_new",
    },
    "gte": {**_BASE, "model_type": "gte", "type_vocab_size": 2, **_ROPE},
    "jina_embeddings_v3": {
        **_BASE, "model_type": "jina_embeddings_v3", "type_vocab_size": 1, **_ROPE
    },
    "deberta_v2": {
        **_BASE, "model_type": "deberta-v2", "type_vocab_size": 0, "relative_attention": True,
        "position_biased_input": False, "share_att_key": True, "norm_rel_ebd": "layer_norm",
        "pos_att_type": ["p2c", "c2p"], "position_buckets": BUCKETS, "max_relative_positions": -1,
        "pooler_hidden_size": HIDDEN, "pooler_hidden_act": "gelu", "pooler_dropout": 0,
    },
}  # fmt: skip
for _name, _config in CONFIGS.items():
    _config["architectures"] = [f"{_KINDS[_name]}ForSequenceClassification"]

Shapes = dict[str, tuple[int, ...]]
_SQUARE, _UP, _DOWN = (HIDDEN, HIDDEN), (FFN, HIDDEN), (HIDDEN, FFN)


def _layers(pattern: str, matrices: Shapes, norms: list[str], bias: bool = True) -> Shapes:
    """Weights of every layer, with biases for matrices where asked for and for norms always."""
    found: Shapes = {}
    for i in range(LAYERS):
        for name, shape in matrices.items():
            found[f"{pattern.format(i)}{name}.weight"] = shape
            if bias:
                found[f"{pattern.format(i)}{name}.bias"] = shape[:1]
        for name in norms:
            for part in ("weight", "bias"):
                found[f"{pattern.format(i)}{name}.{part}"] = (HIDDEN,)
    return found


def _linear(name: str, shape: tuple[int, int]) -> Shapes:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def _tables(prefix: str, types: int, positions: bool = True, width: int = HIDDEN) -> Shapes:
    found: Shapes = {
        f"{prefix}word_embeddings.weight": (VOCAB, width),
        f"{prefix}LayerNorm.weight": (width,),
        f"{prefix}LayerNorm.bias": (width,),
    }
    if positions:
        found[f"{prefix}position_embeddings.weight"] = (POSITIONS, width)
    if types:
        found[f"{prefix}token_type_embeddings.weight"] = (types, width)
    return found


def _bert_layers(prefix: str) -> Shapes:
    matrices = {f"attention.self.{n}": _SQUARE for n in ("query", "key", "value")}
    matrices |= {
        "attention.output.dense": _SQUARE, "intermediate.dense": _UP, "output.dense": _DOWN
    }  # fmt: skip
    norms = ["attention.output.LayerNorm", "output.LayerNorm"]
    return _layers(prefix + "encoder.layer.{}.", matrices, norms)


def _bert() -> Shapes:
    return {
        **_tables("bert.embeddings.", 2), **_bert_layers("bert."),
        **_linear("bert.pooler.dense", _SQUARE), **_linear("classifier", (1, HIDDEN)),
    }  # fmt: skip


def _roberta() -> Shapes:
    return {
        **_tables("roberta.embeddings.", 1), **_bert_layers("roberta."),
        **_linear("classifier.dense", _SQUARE), **_linear("classifier.out_proj", (1, HIDDEN)),
    }  # fmt: skip


def _mpnet() -> Shapes:
    matrices = {f"attention.attn.{n}": _SQUARE for n in "qkvo"}
    matrices |= {"intermediate.dense": _UP, "output.dense": _DOWN}
    norms = ["attention.LayerNorm", "output.LayerNorm"]
    return {
        **_tables("mpnet.embeddings.", 0),
        **_layers("mpnet.encoder.layer.{}.", matrices, norms),
        "mpnet.encoder.relative_attention_bias.weight": (32, HEADS),
        **_linear("classifier.dense", _SQUARE), **_linear("classifier.out_proj", (1, HIDDEN)),
    }  # fmt: skip


def _distilbert() -> Shapes:
    matrices = {f"attention.{n}_lin": _SQUARE for n in ("q", "k", "v", "out")}
    matrices |= {"ffn.lin1": _UP, "ffn.lin2": _DOWN}
    norms = ["sa_layer_norm", "output_layer_norm"]
    return {
        **_tables("distilbert.embeddings.", 0),
        **_layers("distilbert.transformer.layer.{}.", matrices, norms),
        **_linear("pre_classifier", _SQUARE), **_linear("classifier", (1, HIDDEN)),
    }  # fmt: skip


def _nomic() -> Shapes:
    matrices = {f"self_attn.{n}_proj": _SQUARE for n in "qkvo"}
    matrices |= {"mlp.gate_proj": _UP, "mlp.up_proj": _UP, "mlp.down_proj": _DOWN}
    norms = ["post_attention_layernorm", "post_mlp_layernorm"]
    return {
        **_tables("nomic_bert.embeddings.", 2, positions=False),
        **_layers("nomic_bert.layers.{}.", matrices, norms, bias=False),
        **_linear("nomic_bert.pooler.dense", _SQUARE), **_linear("classifier", (1, HIDDEN)),
    }  # fmt: skip


def _modernbert() -> Shapes:
    matrices = {
        "attn.Wqkv": (3 * HIDDEN, HIDDEN), "attn.Wo": _SQUARE, "mlp.Wi": (2 * FFN, HIDDEN),
        "mlp.Wo": _DOWN,
    }  # fmt: skip
    found: Shapes = {
        "model.embeddings.tok_embeddings.weight": (VOCAB, HIDDEN),
        "model.embeddings.norm.weight": (HIDDEN,),
        "model.final_norm.weight": (HIDDEN,),
        "head.dense.weight": _SQUARE,
        "head.norm.weight": (HIDDEN,),
        **_linear("classifier", (1, HIDDEN)),
        **_layers("model.layers.{}.", matrices, [], bias=False),
    }
    for i in range(LAYERS):
        found[f"model.layers.{i}.mlp_norm.weight"] = (HIDDEN,)
        if i:
            found[f"model.layers.{i}.attn_norm.weight"] = (HIDDEN,)
    return found


def _electra() -> Shapes:
    return {
        **_tables("electra.embeddings.", 2, width=NARROW), **_bert_layers("electra."),
        **_linear("electra.embeddings_project", (HIDDEN, NARROW)),
        **_linear("classifier.dense", _SQUARE), **_linear("classifier.out_proj", (1, HIDDEN)),
    }  # fmt: skip


def _albert() -> Shapes:
    matrices = {f"attention.{n}": _SQUARE for n in ("query", "key", "value", "dense")}
    matrices |= {"ffn": _UP, "ffn_output": _DOWN}
    norms = ["attention.LayerNorm", "full_layer_layer_norm"]
    layers = _layers("albert.encoder.albert_layer_groups.{}.albert_layers.0.", matrices, norms)
    shared = ("groups.0.", "groups.1.")
    return {
        **_tables("albert.embeddings.", 2, width=NARROW),
        **_linear("albert.encoder.embedding_hidden_mapping_in", (HIDDEN, NARROW)),
        **{n: shape for n, shape in layers.items() if any(group in n for group in shared)},
        **_linear("albert.pooler", _SQUARE), **_linear("classifier", (1, HIDDEN)),
    }  # fmt: skip


def _gte() -> Shapes:
    joined = {"attention.qkv_proj": (3 * HIDDEN, HIDDEN), "attention.o_proj": _SQUARE}
    joined |= {"mlp.down_proj": _DOWN}
    layers = "gte.encoder.layer.{}."
    return {
        **_tables("gte.embeddings.", 2, positions=False),
        **_layers(layers, joined, ["attn_ln", "mlp_ln"]),
        **_layers(layers, {"mlp.up_gate_proj": (2 * FFN, HIDDEN)}, [], bias=False),
        **_linear("gte.pooler.dense", _SQUARE), **_linear("classifier", (1, HIDDEN)),
    }  # fmt: skip


def _jina() -> Shapes:
    matrices = {"mixer.Wqkv": (3 * HIDDEN, HIDDEN), "mixer.out_proj": _SQUARE}
    matrices |= {"mlp.fc1": _UP, "mlp.fc2": _DOWN}
    tables = _tables("roberta.embeddings.", 1, positions=False)
    return {
        **{name.replace("embeddings.LayerNorm", "emb_ln"): shape for name, shape in tables.items()},
        **_layers("roberta.encoder.layers.{}.", matrices, ["norm1", "norm2"]),
        **_linear("classifier.dense", _SQUARE), **_linear("classifier.out_proj", (1, HIDDEN)),
    }  # fmt: skip


def _deberta() -> Shapes:
    layers = {
        name.replace("self.query", "self.query_proj").replace("self.key", "self.key_proj")
        .replace("self.value", "self.value_proj"): shape
        for name, shape in _bert_layers("deberta.").items()
    }  # fmt: skip
    return {
        **_tables("deberta.embeddings.", 0, positions=False), **layers,
        "deberta.encoder.rel_embeddings.weight": (2 * BUCKETS, HIDDEN),
        "deberta.encoder.LayerNorm.weight": (HIDDEN,),
        "deberta.encoder.LayerNorm.bias": (HIDDEN,),
        **_linear("pooler.dense", _SQUARE), **_linear("classifier", (1, HIDDEN)),
    }  # fmt: skip


SHAPES = {
    "bert": _bert, "roberta": _roberta, "mpnet": _mpnet, "distilbert": _distilbert,
    "nomic_bert": _nomic, "modernbert": _modernbert, "electra": _electra, "albert": _albert,
    "gte": _gte, "jina_embeddings_v3": _jina, "deberta_v2": _deberta,
}  # fmt: skip


def weights(name: str) -> dict[str, np.ndarray]:
    """Values of a size that keeps activations near 1 and attention far from even."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    made = {}
    for tensor, shape in SHAPES[name]().items():
        x = rng.standard_normal(shape, dtype=np.float32)
        if len(shape) == 1:
            centre = 0.0 if tensor.endswith("bias") else 1.0
            made[tensor] = (centre + 0.2 * x).astype(np.float32)
        elif "relative" in tensor:
            made[tensor] = x
        else:
            made[tensor] = (1.5 * x / np.sqrt(shape[-1])).astype(np.float32)
    return made


def write_folder(name: str, folder: Path) -> None:
    """A Hugging Face folder: config.json and model.safetensors, written by hand."""
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]), encoding="utf-8")
    write_safetensors(folder / "model.safetensors", weights(name))


def batch(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Token ids [texts, seq], padded as the model expects, and kinds of text."""
    rng = np.random.default_rng(zlib.crc32(name.encode()) + 1)
    ids = rng.integers(5, VOCAB, (len(LENGTHS), max(LENGTHS)))
    types = (np.arange(max(LENGTHS)) >= 5).astype(np.int64) * np.ones_like(ids)
    for row, length in enumerate(LENGTHS):
        ids[row, length:] = CONFIGS[name]["pad_token_id"]
        types[row, length:] = 0
    return ids, types


# what the default encoder is asked in the golden of its real weights
SENTENCES = [
    "A compiler turns one description of a model into code for every size of batch.",
    "The cat sat on the mat.",
    "",
    "Größe, naïveté and 東京: characters beyond ASCII 🙂",
    "word " * 300,
    "Is it the same vector, alone or in a batch?",
]
