"""Random numbers and dropout. A seed of the file gives the same numbers in every run; without one
each run draws others."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

import rlx.numpy as xp
from rlx import random
from rlx.ir.dtype import DType
from rlx.numpy.array import Array
from rlx.onnx.call import Call
from rlx.onnx.table import op
from rlx.onnx.values import NeedsValueError, shape_of, type_of


def _generator(node: Call) -> np.random.Generator:
    seed = node.float("seed", None)
    if seed is None:
        return np.random.default_rng()
    return np.random.default_rng(struct.unpack("<I", struct.pack("<f", float(seed)))[0])


def _key(node: Call) -> Array:
    """A key by the seed; between segments where a run needs a new one."""
    seed = node.float("seed", None)
    if seed is None and node.traced:
        raise NeedsValueError(on_host=True)
    number = int(_generator(node).integers(2**31))
    return random.key(number)


def _type(node: Call, default: Any = np.float32) -> np.dtype[Any]:
    return node.element_type("dtype") if node.int("dtype", 0) else np.dtype(default)


def _normal(node: Call, shape: tuple[Any, ...], dtype: np.dtype[Any]) -> Array:
    mean, scale = node.float("mean", 0.0), node.float("scale", 1.0)
    drawn = random.normal(_key(node), shape, xp.float32)
    return (drawn * float(scale) + float(mean)).astype(DType.of(dtype))


def _uniform(node: Call, shape: tuple[Any, ...], dtype: np.dtype[Any]) -> Array:
    low, high = node.float("low", 0.0), node.float("high", 1.0)
    drawn = random.uniform(_key(node), shape, xp.float32)
    made = drawn * float(high - low) + float(low)
    return made.astype(DType.of(dtype))


@op("RandomNormal", raw=True)
def random_normal(node: Call) -> Array:
    return _normal(node, tuple(node.ints("shape")), _type(node))


@op("RandomUniform", raw=True)
def random_uniform(node: Call) -> Array:
    return _uniform(node, tuple(node.ints("shape")), _type(node))


@op("RandomNormalLike", raw=True)
def random_normal_like(node: Call, x: Any) -> Array:
    return _normal(node, shape_of(x), _type(node, type_of(x)))


@op("RandomUniformLike", raw=True)
def random_uniform_like(node: Call, x: Any) -> Array:
    return _uniform(node, shape_of(x), _type(node, type_of(x)))


@op("Bernoulli")
def bernoulli(node: Call, p: Array) -> Array:
    drawn = random.uniform(_key(node), p.shape, xp.float32)
    kind = node.dtype("dtype") if node.int("dtype", 0) else p.dtype
    return xp.less(drawn, p.astype(xp.float32)).astype(kind)


@op("Multinomial", on_host=True)
def multinomial(node: Call, logits: Any) -> Any:
    count = node.int("sample_size", 1)
    to = node.element_type("dtype", 6)
    wide = logits.astype(np.float64)
    powers = np.exp(wide - wide.max(axis=1, keepdims=True))
    ends = np.cumsum(powers, axis=1)
    drawn = _generator(node).random((len(logits), count)) * ends[:, -1:]
    found = [np.searchsorted(e, d, side="right") for e, d in zip(ends, drawn, strict=True)]
    return np.minimum(np.stack(found), logits.shape[1] - 1).astype(to)


@op("Dropout", since=12, known=(1, 2))
def dropout(node: Call, x: Array, ratio: Any = None, training: Any = None) -> Any:
    rate = 0.5 if ratio is None else float(np.reshape(ratio, -1)[0])
    if training is None or not bool(np.reshape(training, -1)[0]) or rate == 0.0:
        return x, xp.ones(x.shape, dtype="bool")
    drawn = random.uniform(_key(node), x.shape, xp.float32)
    keep = xp.greater_equal(drawn, rate)
    factor = 1.0 / (1.0 - rate) if rate < 1.0 else 0.0
    return xp.where(keep, x * factor, xp.zeros_like(x)), keep


@op("Dropout", since=1)
def dropout_attributes(node: Call, x: Array) -> Any:
    return x, xp.ones(x.shape, dtype="bool" if node.opset >= 10 else x.dtype)
