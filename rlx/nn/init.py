"""Initialisers: arrays of a shape, drawn with a key.

`fan_in` is the product of all sizes but the first, as PyTorch counts for [out, in] and [O, C, k].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

import rlx.numpy as rnp
from rlx import random
from rlx.errors import OptionError, ShapeError
from rlx.ir.dtype import DType
from rlx.numpy.array import Array

Shape = Sequence[int]
_GAINS = {
    "linear": 1.0, "identity": 1.0, "sigmoid": 1.0, "tanh": 5 / 3, "relu": math.sqrt(2.0),
    "selu": 3 / 4,
}  # fmt: skip


def gain(nonlinearity: str, negative_slope: float = 0.01) -> float:
    """The factor that keeps the variance of activations: √2 for relu, 5/3 for tanh, …"""
    if nonlinearity == "leaky_relu":
        return math.sqrt(2.0 / (1 + negative_slope**2))
    if nonlinearity not in _GAINS:
        known = ", ".join([*_GAINS, "leaky_relu"])
        raise OptionError("no such gain", where="init.gain", got=nonlinearity, expected=known)
    return _GAINS[nonlinearity]


def fans(shape: Shape) -> tuple[int, int]:
    """(fan_in, fan_out) of a weight [out, in, *kernel]."""
    if len(shape) < 2:
        raise ShapeError("no fan", where="init", got=tuple(shape), expected="two axes or more")
    taps = math.prod(shape[2:])
    return shape[1] * taps, shape[0] * taps


def zeros(shape: Shape, dtype: Any = rnp.float32) -> Array:
    """Zeros."""
    return rnp.zeros(tuple(shape), dtype=dtype)


def ones(shape: Shape, dtype: Any = rnp.float32) -> Array:
    """Ones."""
    return rnp.ones(tuple(shape), dtype=dtype)


def constant(value: float, shape: Shape, dtype: Any = rnp.float32) -> Array:
    """One number everywhere."""
    return rnp.full(tuple(shape), value, dtype=dtype)


def _scaled(x: Array, factor: float, offset: float = 0.0) -> Array:
    y = rnp.multiply(x, factor)
    return y if offset == 0 else rnp.add(y, offset)


def uniform(
    key: Array, shape: Shape, low: float = 0.0, high: float = 1.0, dtype: Any = rnp.float32
) -> Array:
    """Uniform in [low, high)."""
    return random.uniform(key, tuple(shape), dtype, low, high)


def normal(
    key: Array, shape: Shape, mean: float = 0.0, std: float = 1.0, dtype: Any = rnp.float32
) -> Array:
    """Normal."""
    return _scaled(random.normal(key, tuple(shape), dtype), std, mean)


def truncated_normal(
    key: Array, shape: Shape, mean: float = 0.0, std: float = 1.0, low: float = -2.0,
    high: float = 2.0, dtype: Any = rnp.float32,
) -> Array:  # fmt: skip
    """Normal within low … high, which are distances from 0 as in PyTorch, not from the mean."""
    a, b = (low - mean) / std, (high - mean) / std
    return _scaled(random.truncated_normal(key, a, b, tuple(shape), dtype), std, mean)


def xavier_uniform(key: Array, shape: Shape, gain: float = 1.0, dtype: Any = rnp.float32) -> Array:
    """Uniform of variance 2 / (fan_in + fan_out) · gain² (Glorot and Bengio, 2010)."""
    bound = gain * math.sqrt(6.0 / sum(fans(shape)))
    return uniform(key, shape, -bound, bound, dtype)


def xavier_normal(key: Array, shape: Shape, gain: float = 1.0, dtype: Any = rnp.float32) -> Array:
    """Normal of variance 2 / (fan_in + fan_out) · gain²."""
    return normal(key, shape, 0.0, gain * math.sqrt(2.0 / sum(fans(shape))), dtype)


def _fan(shape: Shape, mode: str) -> int:
    if mode not in ("fan_in", "fan_out"):
        raise OptionError("no such mode", where="init", got=mode, expected="fan_in or fan_out")
    return fans(shape)[mode == "fan_out"]


def kaiming_uniform(
    key: Array, shape: Shape, gain: float = math.sqrt(2.0), mode: str = "fan_in",
    dtype: Any = rnp.float32,
) -> Array:  # fmt: skip
    """Uniform of variance gain² / fan (He et al., 2015); the gain is that of relu by default."""
    bound = gain * math.sqrt(3.0 / _fan(shape, mode))
    return uniform(key, shape, -bound, bound, dtype)


def kaiming_normal(
    key: Array, shape: Shape, gain: float = math.sqrt(2.0), mode: str = "fan_in",
    dtype: Any = rnp.float32,
) -> Array:  # fmt: skip
    """Normal of variance gain² / fan."""
    return normal(key, shape, 0.0, gain / math.sqrt(_fan(shape, mode)), dtype)


def orthogonal(key: Array, shape: Shape, gain: float = 1.0, dtype: Any = rnp.float32) -> Array:
    """Rows (or columns, the shorter ones) that are orthonormal, times the gain (Saxe et al., 2014).
    By a QR decomposition on the host."""
    if len(shape) < 2:
        raise ShapeError("no matrix", where="init.orthogonal", got=tuple(shape))
    rows, columns = shape[0], math.prod(shape[1:])
    drawn = np.asarray(random.normal(key, (max(rows, columns), min(rows, columns)), rnp.float64))
    q, r = np.linalg.qr(drawn)
    q = q * np.where(np.diagonal(r) < 0, -1.0, 1.0)  # uniform over all orthogonal matrices
    q = (q.T if rows < columns else q) * gain
    return Array(np.ascontiguousarray(q.reshape(tuple(shape)).astype(DType.of(dtype).numpy)))
