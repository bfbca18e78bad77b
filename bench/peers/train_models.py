"""What `bench train` trains: sizes, first weights and batches, the same for every library.

Weights have PyTorch's names and layouts. The text of the tiny GPT is of a Markov chain, so that
there is something to learn, that of LoRA is our documentation; the images are noise around ten
patterns.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

RATE, BETAS, DECAY, CLIP = 1e-3, (0.9, 0.95), 0.1, 1.0
LORA_RATE = 2e-4
Weights = dict[str, np.ndarray[Any, Any]]


class Gpt(NamedTuple):
    layers: int = 6
    width: int = 384
    heads: int = 6
    context: int = 256
    batch: int = 12
    vocab: int = 65


class Cnn(NamedTuple):
    channels: tuple[int, ...] = (3, 32, 64, 128)
    size: int = 32
    batch: int = 64
    classes: int = 10


class Lora(NamedTuple):
    """Adapters of all matrices of the language model in `folder`."""

    rank: int = 8
    alpha: int = 16
    context: int = 512
    batch: int = 4
    vocab: int = 49152
    folder: str = ""
    random: bool = False


LARGE = {"gpt": Gpt(), "cnn": Cnn(), "lora": Lora()}


def weights(model: str, sizes: Any) -> Weights:
    rng = np.random.default_rng(0)

    def normal(*shape: int, scale: float) -> np.ndarray[Any, Any]:
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    return {"gpt": _gpt, "cnn": _cnn, "lora": _lora}[model](sizes, normal)


def _lora(sizes: Lora, normal: Any) -> Weights:
    """The matrices A of the adapters, by the names of modules; B begins as zeros."""
    c = json.loads((Path(sizes.folder) / "config.json").read_text(encoding="utf-8"))
    hidden, ffn, joined = c["hidden_size"], c["intermediate_size"], c["num_attention_heads"]
    inner = {"self_attn.q_proj": hidden, "self_attn.k_proj": hidden, "self_attn.v_proj": hidden,
             "self_attn.o_proj": joined * c["head_dim"], "mlp.gate_proj": hidden,
             "mlp.up_proj": hidden, "mlp.down_proj": ffn}  # fmt: skip
    return {
        f"model.layers.{i}.{name}": normal(sizes.rank, width, scale=(3 * width) ** -0.5)
        for i in range(c["num_hidden_layers"]) for name, width in inner.items()
    }  # fmt: skip


def _gpt(sizes: Gpt, normal: Any) -> Weights:
    w = sizes.width
    made = {"tokens.weight": normal(sizes.vocab, w, scale=0.02)}
    made["positions.weight"] = normal(sizes.context, w, scale=0.02)
    for i in range(sizes.layers):
        for name, rows, columns in (("qkv", 3 * w, w), ("out", w, w), ("up", 4 * w, w),
                                    ("down", w, 4 * w)):  # fmt: skip
            made[f"blocks.{i}.{name}.weight"] = normal(rows, columns, scale=0.02)
            made[f"blocks.{i}.{name}.bias"] = np.zeros(rows, np.float32)
        for name in ("norm1", "norm2"):
            made[f"blocks.{i}.{name}.weight"] = np.ones(w, np.float32)
            made[f"blocks.{i}.{name}.bias"] = np.zeros(w, np.float32)
    made["norm.weight"], made["norm.bias"] = np.ones(w, np.float32), np.zeros(w, np.float32)
    return made  # the head is the embedding


def _cnn(sizes: Cnn, normal: Any) -> Weights:
    made = {}
    for i, (a, b) in enumerate(zip(sizes.channels, sizes.channels[1:], strict=False)):
        made[f"convs.{i}.weight"] = normal(b, a, 3, 3, scale=(2 / (9 * a)) ** 0.5)
        made[f"convs.{i}.bias"] = np.zeros(b, np.float32)
        made[f"norms.{i}.weight"] = np.ones(b, np.float32)
        made[f"norms.{i}.bias"] = np.zeros(b, np.float32)
    last = sizes.channels[-1] * (sizes.size // 4) ** 2
    made["head.weight"] = normal(sizes.classes, last, scale=last**-0.5)
    made["head.bias"] = np.zeros(sizes.classes, np.float32)
    return made


def batch(model: str, sizes: Any, step: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Inputs and targets of a step."""
    rng = np.random.default_rng([7, step])
    if model == "lora" and sizes.random:
        text = rng.integers(0, sizes.vocab, (sizes.batch, sizes.context + 1))
        return text[:, :-1], text[:, 1:]
    if model == "lora":
        tokens = np.load(Path(sizes.folder) / "tokens.npy").astype(np.int64)
        starts = rng.integers(0, tokens.size - sizes.context, sizes.batch)
        text = tokens[starts[:, None] + np.arange(sizes.context + 1)]
        return text[:, :-1], text[:, 1:]
    if model == "gpt":
        following = np.random.default_rng(1).integers(0, sizes.vocab, (sizes.vocab, 4))
        choices = rng.integers(0, 4, (sizes.batch, sizes.context + 1))
        text = np.zeros(choices.shape, np.int64)
        text[:, 0] = rng.integers(0, sizes.vocab, sizes.batch)
        for i in range(1, text.shape[1]):
            text[:, i] = following[text[:, i - 1], choices[:, i]]
        return text[:, :-1], text[:, 1:]
    shape = (sizes.channels[0], sizes.size, sizes.size)
    patterns = np.random.default_rng(1).standard_normal((sizes.classes, *shape))
    labels = rng.integers(0, sizes.classes, sizes.batch)
    noise = rng.standard_normal((sizes.batch, *shape))
    return (patterns[labels] * 0.5 + noise).astype(np.float32), labels
