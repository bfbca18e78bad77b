"""Normalisations. Batch norm of inference becomes part of the convolution before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlx.ir.dtype import f32, f64
from rlx.ir.node import Value
from rlx.ir.shape import Shape
from rlx.pytorch.aten.convolutions import folded
from rlx.pytorch.aten.reduce_ops import variance
from rlx.pytorch.aten.table import aten

if TYPE_CHECKING:
    from rlx.pytorch.lower_aten import Lowering


def _rows(low: Lowering, x: Value, shape: Sequence[Any]) -> tuple[Value, Any]:
    """x with the axes that are normalised as one, and its size."""
    kept = x.shape.rank - len(shape)
    width: Any = 1
    for d in x.shape.dims[kept:]:
        width = width * d
    return low.reshape(x, (*x.shape.dims[:kept], width)), width


def _factor(low: Lowering, x: Value, given: Value | None, width: Any, value: int) -> Value:
    if given is None:
        return low.full(value, Shape((width,), x.shape.dtype))
    return low.reshape(given, (width,))


def _layer_norm(
    low: Lowering, x: Value, shape: Sequence[Any], weight: Value | None, bias: Value | None,
    eps: float,
) -> tuple[Value, Value]:  # fmt: skip
    rows, width = _rows(low, x, shape)
    gamma = _factor(low, x, weight, width, 1)
    more = () if bias is None else (low.reshape(bias, (width,)),)
    return low.reshape(low.g.layer_norm(rows, gamma, *more, eps=float(eps)), x.shape.dims), rows


@aten("layer_norm.default")
def layer_norm(
    low: Lowering, x: Value, shape: Sequence[Any], weight: Value | None = None,
    bias: Value | None = None, eps: float = 1e-5, *_: Any,
) -> Value:  # fmt: skip
    return _layer_norm(low, x, shape, weight, bias, eps)[0]


@aten("native_layer_norm.default")
def native_layer_norm(
    low: Lowering, x: Value, shape: Sequence[Any], weight: Value | None, bias: Value | None,
    eps: float,
) -> tuple[Value, Value | None, Value | None]:  # fmt: skip
    y, rows = _layer_norm(low, x, shape, weight, bias, eps)
    if not (low.uses(1) or low.uses(2)):
        return y, None, None
    spread, middle = variance(low, rows, (-1,), 0, True)
    dims = low.outs(1).dims
    inverse = low.g.rsqrt(low.g.add(spread, float(eps)))
    return y, low.reshape(middle, dims), low.reshape(inverse, dims)


@aten("native_layer_norm_backward.default")
def native_layer_norm_backward(
    low: Lowering, gradient: Value, x: Value, shape: Sequence[Any], mean: Value, inverse: Value,
    weight: Value | None, bias: Value | None, wanted: Sequence[bool],
) -> tuple[Value | None, ...]:  # fmt: skip
    """dx, dgamma, dbeta from the mean and 1 / deviation of each row that forward kept."""
    g, element = low.g, f64 if x.shape.dtype is f64 else f32
    rows, width = _rows(low, x, shape)
    dy, _ = _rows(low, gradient, shape)
    wide, cotangent = low.cast(rows, element), low.cast(dy, element)
    lead = (*rows.shape.dims[:-1], 1)
    middle, scale = low.reshape(mean, lead), low.reshape(inverse, lead)
    unit = g.mul(g.sub(wide, middle), scale)
    factor = low.cast(_factor(low, x, weight, width, 1), element)
    scaled = g.mul(cotangent, factor)
    off = g.mean(scaled, axis=(-1,), keepdims=True)
    along = g.mean(g.mul(scaled, unit), axis=(-1,), keepdims=True)
    dx = g.mul(g.sub(g.sub(scaled, off), g.mul(unit, along)), scale)
    outer = tuple(range(rows.shape.rank - 1))
    sums = [g.mul(cotangent, unit), cotangent]
    totals = [low.reshape(g.sum(s, axis=outer) if outer else s, low.dims(shape)) for s in sums]
    made = (low.reshape(dx, x.shape.dims), *totals)
    return tuple([v if w else None for v, w in zip(made, wanted, strict=True)])


@aten("rms_norm.default")
def rms_norm(
    low: Lowering, x: Value, shape: Sequence[Any], weight: Value | None = None, eps: Any = None
) -> Value:
    import ml_dtypes

    limits: Any = ml_dtypes.finfo
    number = float(limits(x.shape.dtype.numpy).eps) if eps is None else float(eps)
    rows, width = _rows(low, x, shape)
    made = low.g.rms_norm(rows, _factor(low, x, weight, width, 1), eps=number)
    return low.reshape(made, x.shape.dims)


@aten("_fused_rms_norm.default")
def fused_rms_norm(
    low: Lowering, x: Value, shape: Sequence[Any], weight: Value | None, eps: Any
) -> tuple[Value, Value | None]:
    y = rms_norm(low, x, shape, weight, eps)
    if not low.uses(1):
        return y, None
    g, element = low.g, low.outs(1).dtype
    rows, _ = _rows(low, x, shape)
    power = g.mean(g.square(low.cast(rows, element)), axis=(-1,), keepdims=True)
    number = 1.1920929e-07 if eps is None else float(eps)
    return y, low.reshape(g.rsqrt(g.add(power, number)), low.outs(1).dims)


@aten("native_group_norm.default")
def native_group_norm(
    low: Lowering, x: Value, weight: Value | None, bias: Value | None, batch: Any, channels: Any,
    positions: Any, groups: int, eps: float,
) -> tuple[Value, Value | None, Value | None]:  # fmt: skip
    width = x.shape.dims[1]
    gamma, beta = (
        _factor(low, x, given, width, value) for given, value in ((weight, 1), (bias, 0))
    )
    y = low.g.group_norm(x, gamma, beta, groups=int(groups), eps=float(eps))
    if not (low.uses(1) or low.uses(2)):
        return y, None, None
    size = low.dim(channels) * low.dim(positions) // int(groups)
    rows = low.reshape(x, (low.dim(batch), int(groups), size))
    spread, middle = variance(low, rows, (-1,), 0, False)
    return y, middle, low.g.rsqrt(low.g.add(spread, float(eps)))


# -- batch norm -------------------------------------------------------------------------------


def _per_channel(low: Lowering, x: Value, row: Value) -> Value:
    return low.reshape(row, (x.shape.dims[1], *[1] * (x.shape.rank - 2)))


def _affine(
    low: Lowering, x: Value, weight: Value | None, bias: Value | None, mean: Value, inverse: Value
) -> tuple[Value, Value]:
    """Scale and shift per channel: weight / deviation, and bias − mean · scale."""
    scale = inverse if weight is None else low.g.mul(low.cast(weight, inverse.shape.dtype), inverse)
    moved = low.g.mul(mean, scale)
    if bias is None:
        return scale, low.g.neg(moved)
    return scale, low.g.sub(low.cast(bias, scale.shape.dtype), moved)


@aten("_native_batch_norm_legit_no_training.default")
def batch_norm_inference(
    low: Lowering, x: Value, weight: Value | None, bias: Value | None, mean: Value, var: Value,
    momentum: float, eps: float,
) -> tuple[Value, Value, Value]:  # fmt: skip
    inverse = low.g.rsqrt(low.g.add(var, float(eps)))
    scale, shift = _affine(low, x, weight, bias, mean, inverse)
    y = folded(low, x, scale, shift) if scale.shape.dtype is x.shape.dtype else None
    if y is None:
        y = low.g.add(low.g.mul(x, _per_channel(low, x, scale)), _per_channel(low, x, shift))
    nothing = low.full(0, low.outs(1))
    return y, nothing, nothing


def _batch_statistics(low: Lowering, x: Value) -> tuple[Value, Value]:
    axes = (0, *range(2, x.shape.rank))
    return variance(low, x, axes, 0, False)


def _running(
    low: Lowering, x: Value, old: tuple[Value, Value], new: tuple[Value, Value], momentum: float
) -> tuple[Value, Value]:
    """(1 − m) · old + m · new; the variance that is kept is that of a sample."""
    g, element = low.g, old[1].shape.dtype
    count: Any = 1
    for axis, d in enumerate(x.shape.dims):
        count = count if axis == 1 else count * d
    number = low.scalar(count, element)
    sample = g.mul(new[1], g.div(number, g.maximum(g.sub(number, 1.0), 1.0)))
    kept = [
        g.add(g.mul(o, 1 - momentum), g.mul(low.cast(n, o.shape.dtype), momentum))
        for o, n in zip(old, (new[0], sample), strict=True)
    ]
    return kept[0], kept[1]


@aten("_native_batch_norm_legit_functional.default")
def batch_norm_training(
    low: Lowering, x: Value, weight: Value | None, bias: Value | None, mean: Value, var: Value,
    training: bool, momentum: float, eps: float,
) -> tuple[Value, ...]:  # fmt: skip
    """(y, mean and 1 / deviation of the batch, the running mean and variance after it)"""
    if training:
        spread, middle = _batch_statistics(low, x)
        after = _running(low, x, (mean, var), (middle, spread), momentum)
    else:
        spread, middle, after = var, mean, (mean, var)
    inverse = low.g.rsqrt(low.g.add(spread, float(eps)))
    scale, shift = _affine(low, x, weight, bias, middle, inverse)
    y = low.g.add(low.g.mul(x, _per_channel(low, x, scale)), _per_channel(low, x, shift))
    return y, middle, inverse, *after


@aten("_native_batch_norm_legit.no_stats")
def batch_norm_no_stats(
    low: Lowering, x: Value, weight: Value | None, bias: Value | None, training: bool,
    momentum: float, eps: float,
) -> tuple[Value, ...]:  # fmt: skip
    spread, middle = _batch_statistics(low, x)
    inverse = low.g.rsqrt(low.g.add(spread, float(eps)))
    scale, shift = _affine(low, x, weight, bias, middle, inverse)
    y = low.g.add(low.g.mul(x, _per_channel(low, x, scale)), _per_channel(low, x, shift))
    return y, middle, inverse


@aten("native_batch_norm_backward.default")
def batch_norm_backward(
    low: Lowering, gradient: Value, x: Value, weight: Value | None, mean: Value | None,
    var: Value | None, batch_mean: Value | None, inverse: Value | None, training: bool, eps: float,
    wanted: Sequence[bool],
) -> tuple[Value | None, ...]:  # fmt: skip
    """In training the mean and deviation of the batch depend on x; else they are constants."""
    g, element = low.g, f64 if x.shape.dtype is f64 else f32
    axes = (0, *range(2, x.shape.rank))
    wide, dy = low.cast(x, element), low.cast(gradient, element)
    if training:
        assert batch_mean is not None and inverse is not None  # forward kept them
        middle, scale = batch_mean, inverse
    else:
        assert mean is not None and var is not None
        middle, scale = mean, g.rsqrt(g.add(var, float(eps)))
    unit = g.mul(g.sub(wide, _per_channel(low, x, middle)), _per_channel(low, x, scale))
    dgamma, dbeta = g.sum(g.mul(dy, unit), axis=axes), g.sum(dy, axis=axes)
    factor = scale if weight is None else g.mul(low.cast(weight, element), scale)
    dx = dy
    if training:
        count: Any = 1
        for a in axes:
            count = count * x.shape.dims[a]
        number = low.scalar(count, element)
        dx = g.sub(dx, _per_channel(low, x, g.div(dbeta, number)))
        dx = g.sub(dx, g.mul(unit, _per_channel(low, x, g.div(dgamma, number))))
    dx = g.mul(dx, _per_channel(low, x, factor))
    made = (dx, dgamma, dbeta)
    return tuple([v if w else None for v, w in zip(made, wanted, strict=True)])
