"""Normalisations."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.errors import ShapeError
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.nn.functional.operands import ArrayLike, call, call_many, fixed, require_rank, root
from rlx.numpy.array import Array
from rlx.numpy.dispatch import as_array


def _ones(g: Graph, like: Value) -> Any:
    one = g.constant(np.array(1, like.shape.dtype.numpy))
    return g.expand(one, like.shape.dims[-1:])


def _row_norm(
    g: Graph, x: Value, weight: Value | None, bias: Value | None, op: str, eps: float, axes: int
) -> Any:
    """A norm over the last `axes` axes, as one over rows."""
    dims = x.shape.dims
    if axes > 1:
        x = g.reshape(x, (*dims[: len(dims) - axes], -1))
        weight, bias = (None if v is None else g.reshape(v, (-1,)) for v in (weight, bias))
    gamma = _ones(g, x) if weight is None else weight
    more = () if bias is None else (bias,)
    y = getattr(g, op)(x, gamma, *more, eps=eps)
    return g.reshape(y, dims) if axes > 1 else y


def _norm_axes(x: Array, weight: ArrayLike | None, axes: int, where: str) -> int:
    found = axes if weight is None else as_array(weight).ndim
    if not 0 < found <= x.ndim:
        raise ShapeError(
            "no axes to normalise", where=where, got=str(list(x.shape)), expected=f"{found} axes"
        )
    return found


def layer_norm(
    x: ArrayLike, weight: ArrayLike | None = None, bias: ArrayLike | None = None,
    eps: float = 1e-5, axes: int = 1,
) -> Array:  # fmt: skip
    """(x − mean) / √(variance + eps) · weight + bias, over the axes of the weight at the end of x,
    or the last `axes`."""
    x = as_array(x)
    count = _norm_axes(x, weight, axes, "layer_norm")
    return call(_row_norm, [x, weight, bias], "layer_norm", float(eps), count)


def rms_norm(
    x: ArrayLike, weight: ArrayLike | None = None, bias: ArrayLike | None = None,
    eps: float = 1e-6, axes: int = 1,
) -> Array:  # fmt: skip
    """x / √(mean(x²) + eps) · weight (+ bias), over the last axes as for `layer_norm`."""
    x = as_array(x)
    count = _norm_axes(x, weight, axes, "rms_norm")
    return call(_row_norm, [x, weight, bias], "rms_norm", float(eps), count)


def _group_norm(
    g: Graph, x: Value, weight: Value | None, bias: Value | None, groups: int, eps: float,
    channels: int,
) -> Any:  # fmt: skip
    x = fixed(g, x, (None, channels, *[None] * (x.shape.rank - 2)))
    element = x.shape.dtype.numpy
    gamma = g.constant(np.ones(channels, element)) if weight is None else weight
    beta = g.constant(np.zeros(channels, element)) if bias is None else bias
    gamma, beta = (fixed(g, v, (channels,)) for v in (gamma, beta))
    return g.group_norm(x, gamma, beta, groups, eps=eps)


def group_norm(
    x: ArrayLike, num_groups: int, weight: ArrayLike | None = None,
    bias: ArrayLike | None = None, eps: float = 1e-5,
) -> Array:  # fmt: skip
    """x [B, C, …] standardised over groups of channels and all positions, scaled by channel."""
    x = as_array(x)
    if x.ndim < 2:
        raise ShapeError("no channels", where="group_norm", got=str(list(x.shape)))
    channels = int(x.shape[1])
    return call(_group_norm, [x, weight, bias], int(num_groups), float(eps), channels)


def instance_norm(
    x: ArrayLike, weight: ArrayLike | None = None, bias: ArrayLike | None = None, eps: float = 1e-5
) -> Array:
    """`group_norm` with a group per channel."""
    x = require_rank(x, (3, 4, 5), "instance_norm", "[batch, channels, …]")
    return group_norm(x, int(x.shape[1]), weight, bias, eps)


def _per_channel(g: Graph, v: Value, rank: int) -> Value:
    return v if rank < 3 else g.reshape(v, (*v.shape.dims, *[1] * (rank - 2)))


def _batch_norm(
    g: Graph, x: Value, mean: Value, var: Value, weight: Value | None, bias: Value | None,
    eps: float,
) -> Any:  # fmt: skip
    rank = x.shape.rank
    scale = g.rsqrt(g.add(var, eps))
    scale = scale if weight is None else g.mul(scale, weight)
    y = g.mul(g.sub(x, _per_channel(g, mean, rank)), _per_channel(g, scale, rank))
    y = y if bias is None else g.add(y, _per_channel(g, bias, rank))
    return g.cast(y, x.shape.dtype)


def batch_norm(
    x: ArrayLike, mean: ArrayLike, var: ArrayLike, weight: ArrayLike | None = None,
    bias: ArrayLike | None = None, eps: float = 1e-5,
) -> Array:  # fmt: skip
    """(x − mean) / √(var + eps) · weight + bias by channel of x [B, C, …]. `batch_statistics` gives
    the mean and variance of a batch."""
    return call(_batch_norm, [x, mean, var, weight, bias], float(eps))


def _statistics(g: Graph, x: Value) -> Any:
    axes = tuple(a for a in range(x.shape.rank) if a != 1)
    mean = g.mean(x, axis=axes)
    centred = g.sub(x, _per_channel(g, mean, x.shape.rank))
    return mean, g.mean(g.square(centred), axis=axes)


def batch_statistics(x: ArrayLike) -> tuple[Array, Array]:
    """Mean and (biased) variance by channel of x [B, C, …]."""
    made = as_array(x)
    if made.ndim < 2:
        raise ShapeError("no channels", where="batch_statistics", got=str(list(made.shape)))
    mean, var = call_many(_statistics, [made])
    return mean, var


def _normalize(g: Graph, x: Value, p: float, axis: int, eps: float) -> Any:
    if p == 2:
        size = root(g, g.sum(g.square(x), axis=(axis,), keepdims=True))
    elif p == 1:
        size = g.sum(g.abs(x), axis=(axis,), keepdims=True)
    else:
        total = g.sum(g.pow(g.abs(x), p), axis=(axis,), keepdims=True)
        size = root(g, total, p)
    return g.div(x, g.maximum(size, eps))


def normalize(x: ArrayLike, p: float = 2.0, axis: int = -1, eps: float = 1e-12) -> Array:
    """x over its p-norm along an axis, which counts as eps at least."""
    return call(_normalize, [x], float(p), axis, float(eps))


def _l2_norm(g: Graph, x: Value, axis: int, eps: float) -> Any:
    return g.l2_norm(x, axis=axis, eps=eps)


def l2_normalize(x: ArrayLike, axis: int = -1, eps: float = 1e-6) -> Array:
    """x / √(Σ x² + eps) along an axis."""
    return call(_l2_norm, [x], axis, float(eps))


def _local_response(g: Graph, x: Value, size: int, alpha: float, beta: float, k: float) -> Any:
    low = [0, size // 2, *[0] * (x.shape.rank - 2)]
    high = [0, (size - 1) // 2, *[0] * (x.shape.rank - 2)]
    squares = g.pad(g.square(x), low, high)
    channels = x.shape.dims[1]
    parts = [g.narrow(squares, axis=1, start=i, length=channels) for i in range(size)]
    total = parts[0]
    for part in parts[1:]:
        total = g.add(total, part)
    return g.div(x, g.pow(g.add(g.mul(total, alpha / size), k), beta))


def local_response_norm(
    x: ArrayLike, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> Array:
    """x / (k + alpha · mean of x² over `size` neighbouring channels)^beta."""
    made = require_rank(x, (3, 4, 5), "local_response_norm", "[batch, channels, …]")
    return call(_local_response, [made], int(size), float(alpha), float(beta), float(k))
