"""The functions that `bench arrays` times, for libraries with NumPy's names, and their arguments.

Where a library has a better way to say the same, `array_server` says so.
"""

from __future__ import annotations

from typing import Any

import numpy as np

TEN_MILLION = 10_000_000
HEADS, POSITIONS, HEAD_DIM = 8, 512, 64


def chain_5(xp: Any, x: Any, y: Any) -> Any:
    return xp.maximum((x * 2.0 + y) * x - 0.5, 0.0)


def chain_20(xp: Any, x: Any, y: Any) -> Any:
    z = x
    for _ in range(4):
        z = xp.tanh(z * 0.5 + y) - x * 0.25
    return z


def total(xp: Any, x: Any) -> Any:
    return xp.sum(x)


def softmax(xp: Any, x: Any) -> Any:
    e = xp.exp(x - xp.max(x, axis=-1, keepdims=True))
    return e / xp.sum(e, axis=-1, keepdims=True)


def layer_norm(xp: Any, x: Any, gain: Any, bias: Any) -> Any:
    centred = x - xp.mean(x, axis=-1, keepdims=True)
    variance = xp.mean(centred * centred, axis=-1, keepdims=True)
    return centred / xp.sqrt(variance + 1e-5) * gain + bias


def mlp(xp: Any, x: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> Any:
    return xp.maximum(x @ w1 + b1, 0.0) @ w2 + b2


def attention(xp: Any, q: Any, k: Any, v: Any) -> Any:
    return softmax(xp, q @ xp.swapaxes(k, -1, -2) * HEAD_DIM**-0.5) @ v


def nearest(xp: Any, points: Any, centroids: Any) -> Any:
    """The nearest centroid: |p − c|² = |p|² − 2 p·c + |c|², and |p|² is the same for all."""
    distances = xp.sum(centroids * centroids, axis=1) - 2.0 * (points @ centroids.T)
    return xp.argmin(distances, axis=1)


def tiny(x: Any, y: Any, z: Any) -> Any:
    return x * y + z


def arguments(row: str) -> list[np.ndarray[Any, Any]]:
    """The arguments of a row: the same in every process."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray[Any, Any]:
        return rng.standard_normal(shape, dtype=np.float32)

    if row in ("chain_5", "chain_20"):
        return [normal(TEN_MILLION), normal(TEN_MILLION)]
    if row == "sum":
        return [normal(TEN_MILLION)]
    if row == "softmax":
        return [normal(4096, 1024)]
    if row == "layer_norm":
        return [normal(4096, 1024), normal(1024), normal(1024)]
    if row == "mlp":
        return mlp_arguments(256)
    if row == "attention":
        return [normal(1, HEADS, POSITIONS, HEAD_DIM) for _ in range(3)]
    if row == "kmeans":
        return [normal(100_000, 16), normal(64, 16)]
    if row == "conv":
        return [normal(8, 64, 56, 56), normal(64, 64, 3, 3) / 24]
    return [normal(16), normal(16), normal(16)]


def mlp_arguments(rows: int) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(1)
    shapes = [(rows, 512), (512, 2048), (2048,), (2048, 512), (512,)]
    made = [rng.standard_normal(s, dtype=np.float32) for s in shapes]
    return [made[0], made[1] / 24, made[2], made[3] / 48, made[4]]


ROWS = ("chain_5", "chain_20", "sum", "softmax", "layer_norm", "mlp", "attention", "kmeans", "conv")
NEW_SHAPES = tuple(range(33, 233, 10))  # rows of the MLP's input
