"""Normalisation: batch, instance, group, layer, RMS, Lp, local response."""

from __future__ import annotations

from typing import Any

import rlx.numpy as xp
from rlx.ir.dtype import DType, bf16, f16, f32
from rlx.numpy.array import Array
from rlx.onnx.call import Call
from rlx.onnx.graph_ops import graph_op
from rlx.onnx.ops.layout import padded
from rlx.onnx.table import op


def per_channel(x: Array, rank: int) -> Array:
    """[C] against [B, C, …]."""
    return xp.reshape(x, (1, -1, *[1] * (rank - 2))) if rank > 1 else x


@op("BatchNormalization", since=9)
def batch_normalization(
    node: Call, x: Array, scale: Array, bias: Array, mean: Array, variance: Array
) -> Any:
    eps = node.float("epsilon", 1e-5)
    if not node.int("training_mode", 0):
        return _by_channel(x, scale, bias, mean, variance, eps)
    axes = tuple([a for a in range(x.ndim) if a != 1])
    here = xp.mean(x, axis=axes)
    spread = xp.var(x, axis=axes)
    keep = node.float("momentum", 0.9)
    result = _by_channel(x, scale, bias, here.astype(mean.dtype), spread.astype(mean.dtype), eps)
    return (
        result, mean * keep + here.astype(mean.dtype) * (1.0 - keep),
        variance * keep + spread.astype(mean.dtype) * (1.0 - keep),
    )  # fmt: skip


def _by_channel(
    x: Array, scale: Array, bias: Array, mean: Array, variance: Array, eps: float
) -> Array:
    """x · factor + shift, both made of constants alone: they fold into a convolution before it."""
    factor = scale.astype(variance.dtype) / xp.sqrt(variance + eps)
    shift = bias.astype(variance.dtype) - mean * factor
    factor, shift = per_channel(factor, x.ndim), per_channel(shift, x.ndim)
    return x * factor.astype(x.dtype) + shift.astype(x.dtype)


@op("BatchNormalization", since=1)
def batch_normalization_1(
    node: Call, x: Array, scale: Array, bias: Array, mean: Array, variance: Array
) -> Array:
    return _by_channel(x, scale, bias, mean, variance, node.float("epsilon", 1e-5))


@op("InstanceNormalization")
def instance_normalization(node: Call, x: Array, scale: Array, bias: Array) -> Array:
    axes = tuple(range(2, x.ndim))
    made = _standard(x, axes, node.float("epsilon", 1e-5))
    return made * per_channel(scale, x.ndim) + per_channel(bias, x.ndim)


def _standard(x: Array, axes: tuple[int, ...], eps: float) -> Array:
    centred = x - graph_op("mean", x, axis=axes, keepdims=True)
    variance = graph_op("mean", xp.square(centred), axis=axes, keepdims=True)
    return centred / xp.sqrt(variance + eps)


@op("GroupNormalization", since=18)
def group_normalization(node: Call, x: Array, scale: Array, bias: Array) -> Array:
    groups, eps = node.int("num_groups"), node.float("epsilon", 1e-5)
    work = f32 if x.dtype in (f16, bf16) else x.dtype
    rows = xp.reshape(x.astype(work), (x.shape[0], groups, -1))
    made = _standard(rows, (2,), eps)
    if node.opset < 21:  # scale and bias of each group
        made = made * xp.reshape(scale.astype(work), (1, -1, 1)) + xp.reshape(
            bias.astype(work), (1, -1, 1)
        )
        return xp.reshape(made, x.shape).astype(x.dtype)
    made = xp.reshape(made, x.shape)
    made = made * per_channel(scale.astype(work), x.ndim)
    return (made + per_channel(bias.astype(work), x.ndim)).astype(x.dtype)


@op("LayerNormalization", since=17)
def layer_normalization(node: Call, x: Array, scale: Array, bias: Array | None = None) -> Any:
    axis, eps = node.int("axis", -1) % x.ndim, node.float("epsilon", 1e-5)
    if not node.wants(1) and not node.wants(2):
        return _over_last(node, "layer_norm", x, axis, scale, bias, eps)
    axes = tuple(range(axis, x.ndim))
    work = x.astype(_work_type(node, x.dtype))
    mean = graph_op("mean", work, axis=axes, keepdims=True)
    centred = work - mean
    variance = graph_op("mean", xp.square(centred), axis=axes, keepdims=True)
    inverse = 1.0 / xp.sqrt(variance + eps)
    made = (centred * inverse).astype(x.dtype) * scale
    return (made if bias is None else made + bias), mean, inverse


def _work_type(node: Call, own: DType) -> DType:
    if node.has("stash_type"):
        return node.dtype("stash_type")
    return f32 if own.bytes < 4 else own


def _over_last(
    node: Call, name: str, x: Array, axis: int, scale: Array, bias: Array | None, eps: float
) -> Array:
    """A norm over the axes from `axis` on, as one over a last axis."""
    count: Any = 1
    for n in x.shape[axis:]:
        count = count * n
    wide = (1,) * (x.ndim - axis - scale.ndim)
    target = x.shape[axis:]
    gamma = xp.reshape(xp.broadcast_to(xp.reshape(scale, (*wide, *scale.shape)), target), (count,))
    operands = [xp.reshape(x, (*x.shape[:axis], count)), gamma]
    if bias is not None:
        beta = xp.reshape(bias, ((1,) * (x.ndim - axis - bias.ndim)) + tuple(bias.shape))
        operands.append(xp.reshape(xp.broadcast_to(beta, target), (count,)))
    made = graph_op(name, *operands, eps=float(eps))
    return xp.reshape(made, x.shape).astype(x.dtype)


@op("RMSNormalization", since=23)
def rms_normalization(node: Call, x: Array, scale: Array) -> Array:
    axis = node.int("axis", -1) % x.ndim
    return _over_last(node, "rms_norm", x, axis, scale, None, node.float("epsilon", 1e-5))


@op("LpNormalization")
def lp_normalization(node: Call, x: Array) -> Array:
    axis, p = node.int("axis", -1) % x.ndim, node.int("p", 2)
    if p == 1:
        norm = graph_op("sum", xp.abs(x), axis=(axis,), keepdims=True)
    else:
        norm = xp.sqrt(graph_op("sum", xp.square(x), axis=(axis,), keepdims=True))
    return xp.where(xp.equal(norm, 0), xp.zeros_like(x), x / norm)


@op("LRN")
def local_response(node: Call, x: Array) -> Array:
    size, alpha = node.int("size"), node.float("alpha", 1e-4)
    beta, bias = node.float("beta", 0.75), node.float("bias", 1.0)
    if not 0 < size <= 2**16:
        raise node.fault("not a number of channels", got=size)
    before, after = (size - 1) // 2, size - 1 - (size - 1) // 2
    low, high = [0] * x.ndim, [0] * x.ndim
    low[1], high[1] = before, after
    squares = padded(node, xp.square(x), low, high, 0.0, "constant")
    total: Any = None
    for i in range(size):
        part = squares[:, i : i + x.shape[1]]
        total = part if total is None else total + part
    return x / xp.pow(bias + (alpha / size) * total, beta)


@op("MeanVarianceNormalization")
def mean_variance_normalization(node: Call, x: Array) -> Array:
    axes = tuple(a % x.ndim for a in node.ints("axes", (0, 2, 3)))
    centred = x - graph_op("mean", x, axis=axes, keepdims=True)
    spread = xp.sqrt(graph_op("mean", xp.square(centred), axis=axes, keepdims=True))
    return centred / (spread + 1e-9)
