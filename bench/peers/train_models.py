"""What `bench train` trains: sizes, first weights and batches, the same for every library.

Weights have PyTorch's names and layouts. The text is of a Markov chain, so that there is something
to learn; the images are noise around ten patterns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

RATE, BETAS, DECAY, CLIP = 1e-3, (0.9, 0.95), 0.1, 1.0
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


SMALL = {"gpt": Gpt(2, 32, 2, 16, 3, 11), "cnn": Cnn((2, 4, 6, 8), 8, 5, 3)}  # for tests
LARGE = {"gpt": Gpt(), "cnn": Cnn()}


def weights(model: str, sizes: Any) -> Weights:
    rng = np.random.default_rng(0)

    def normal(*shape: int, scale: float) -> np.ndarray[Any, Any]:
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    return (_gpt if model == "gpt" else _cnn)(sizes, normal)


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
