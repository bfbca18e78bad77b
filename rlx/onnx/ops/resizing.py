"""Resize, Upsample and GridSample: interpolation, separable or at given places."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import numpy as np

import rlx.numpy as xp
from rlx.ir.dtype import f32
from rlx.numpy.array import Array
from rlx.numpy.trace import Size
from rlx.onnx.call import Call
from rlx.onnx.graph_ops import graph_op
from rlx.onnx.ops.layout import axes_of, size_list
from rlx.onnx.table import op

MOST_TAPS = 1024  # elements that one result of an antialiased resize is made of


class Axis(NamedTuple):
    """One axis that changes: its size before and after, the scale, and the region of interest."""

    number: int
    before: Any
    after: Any
    scale: Any
    start: float
    end: float


# -- which sizes ----------------------------------------------------------------------------------


@op("Resize", since=11, known=(1, 2, 3))
def resize(node: Call, x: Array, roi: Any = None, scales: Any = None, sizes: Any = None) -> Array:
    rank = x.ndim
    chosen = axes_of(node, node.ints("axes", tuple(range(rank))), rank) or ()
    given = [] if scales is None else [float(s) for s in np.reshape(scales, -1)]
    wanted = [] if sizes is None else size_list(sizes)
    if len(given or wanted) != len(chosen):
        raise node.fault("not as many scales or sizes as axes", got=len(given or wanted))
    limits = [] if roi is None else [float(r) for r in np.reshape(roi, -1)]
    if node.text("coordinate_transformation_mode", "half_pixel") != "tf_crop_and_resize":
        limits = []
    if limits and len(limits) != 2 * len(chosen):
        raise node.fault("a region that does not fit the axes", got=len(limits))
    policy = node.text("keep_aspect_ratio_policy", "stretch")
    if wanted and policy != "stretch":
        given, wanted = _same_ratio(node, x, chosen, wanted, policy)
    axes = []
    for i, axis in enumerate(chosen):
        before = x.shape[axis]
        after = wanted[i] if wanted else _scaled_size(node, before, given[i])
        scale = given[i] if given else _ratio(after, before)
        start, end = (limits[i], limits[i + len(chosen)]) if limits else (0.0, 1.0)
        same = scale == 1.0 if given else (type(after) is type(before) and after == before)
        if not same or limits:
            axes.append(Axis(axis, before, after, scale, start, end))
    return _resized(node, x, axes)


@op("Resize", since=10, known=(1,))
@op("Upsample", since=9, known=(1,))
def upsample(node: Call, x: Array, scales: Any) -> Array:
    return _asymmetric(node, x, [float(s) for s in np.reshape(scales, -1)])


@op("Upsample", since=7)
def upsample_7(node: Call, x: Array) -> Array:
    return _asymmetric(node, x, [float(s) for s in node.floats("scales")])


def _asymmetric(node: Call, x: Array, scales: list[float]) -> Array:
    if len(scales) != x.ndim:
        raise node.fault("not as many scales as axes", got=len(scales))
    axes = [
        Axis(i, n, _scaled_size(node, n, s), s, 0.0, 1.0)
        for i, (n, s) in enumerate(zip(x.shape, scales, strict=True))
        if s != 1.0
    ]
    rule = Rule(node.text("mode", "nearest"), "asymmetric", "floor", -0.75, False, False, None)
    return _by_rule(node, x, axes, rule)


def _same_ratio(
    node: Call, x: Array, chosen: tuple[int, ...], wanted: list[Any], policy: str
) -> tuple[list[float], list[Any]]:
    ratios = [int(size) / int(x.shape[a]) for a, size in zip(chosen, wanted, strict=True)]
    if policy not in ("not_larger", "not_smaller"):
        raise node.fault("unknown policy", got=policy)
    scale = min(ratios) if policy == "not_larger" else max(ratios)
    return [scale] * len(chosen), [int(np.floor(scale * int(x.shape[a]) + 0.5)) for a in chosen]


def _scaled_size(node: Call, size: Any, scale: float) -> Any:
    """⌊size · scale⌋; symbolic for whole factors and parts."""
    if not 0.0 < scale < 2.0**24:
        raise node.fault("not a scale", got=scale)
    if scale == int(scale):
        return size * int(scale)
    if 1 / scale == int(1 / scale):
        return size // int(1 / scale)
    return int(np.floor(int(size) * scale))


def _ratio(after: Any, before: Any) -> Any:
    if isinstance(after, Size) or isinstance(before, Size):
        return _real(after) / _real(before)
    return after / before if before else 1.0


def _real(n: Any) -> Any:
    """A size as a number for computing."""
    return n.as_array(xp.float64) if isinstance(n, Size) else float(n)


# -- how ------------------------------------------------------------------------------------------


class Rule(NamedTuple):
    """The attributes that say which elements a result is made of."""

    mode: str
    place: str
    nearest: str
    cubic: float
    exclude_outside: bool
    antialias: bool
    outside: float | None  # the value of places outside the tensor, where they have one


def _resized(node: Call, x: Array, axes: list[Axis]) -> Array:
    place = node.text("coordinate_transformation_mode", "half_pixel")
    cropped = place == "tf_crop_and_resize"
    rule = Rule(
        node.text("mode", "nearest"), place, node.text("nearest_mode", "round_prefer_floor"),
        node.float("cubic_coeff_a", -0.75), bool(node.int("exclude_outside", 0)),
        bool(node.int("antialias", 0)),
        node.float("extrapolation_value", 0.0) if cropped else None,
    )  # fmt: skip
    return _by_rule(node, x, axes, rule)


def _by_rule(node: Call, x: Array, axes: list[Axis], rule: Rule) -> Array:
    if not axes:
        return x
    native = _native(x, axes, rule)
    if native is not None:
        return native
    kind = x.dtype
    y = x if kind.is_float or rule.mode == "nearest" else x.astype(f32)
    for axis in axes:
        y = _along(node, y, axis, rule)
    if y.dtype is kind:
        return y
    limits = np.iinfo(kind.numpy)
    return xp.clip(xp.round(y), float(limits.min), float(limits.max)).astype(kind)


def _native(x: Array, axes: list[Axis], rule: Rule) -> Array | None:
    """The graph's own op, where its places are these."""
    if [a.number for a in axes] != list(range(2, x.ndim)) or not 3 <= x.ndim <= 5:
        return None
    if rule.antialias or rule.exclude_outside or rule.outside is not None:
        return None
    exact = all(_is_exact(a) for a in axes)
    sizes = tuple([a.after for a in axes])
    if rule.mode == "nearest":
        whole = all(isinstance(a.scale, float) and a.scale == int(a.scale) for a in axes)
        floors = rule.place == "asymmetric" and rule.nearest == "floor" and exact
        middle = rule.place in ("half_pixel", "pytorch_half_pixel", "half_pixel_symmetric")
        if floors or (whole and exact and middle and rule.nearest.startswith("round")):
            return graph_op("resize", x, sizes=sizes, mode="nearest")
        return None
    if rule.mode != "linear" or not x.dtype.is_float:
        return None
    if exact and rule.place == "align_corners":
        return graph_op("resize", x, sizes=sizes, mode="linear", align_corners=True)
    if exact and rule.place in ("half_pixel", "half_pixel_symmetric"):
        return graph_op("resize", x, sizes=sizes, mode="linear")
    return None


def _is_exact(axis: Axis) -> bool:
    """Whether the scale is the ratio of the sizes."""
    if isinstance(axis.after, Size) or isinstance(axis.before, Size):
        whole = isinstance(axis.scale, float) and axis.scale == int(axis.scale)
        return whole or not isinstance(axis.scale, float)
    return bool(axis.before * axis.scale == axis.after)


def _along(node: Call, x: Array, axis: Axis, rule: Rule) -> Array:
    symbolic = any(isinstance(n, Size) for n in (axis.before, axis.after))
    lib: Any = xp if symbolic else np
    at = _places(node, lib, axis, rule.place)
    if rule.mode == "nearest":
        return _taken(x, _rounded(node, lib, at, rule.nearest), axis, lib)
    base = lib.floor(at)
    first, kernel = _kernel(node, axis, rule)
    taps, weights = [], []
    for offset in first:
        index = base + offset
        weight = kernel(lib, at - index)
        if rule.exclude_outside:
            inside = lib.logical_and(index >= 0, index <= _real(axis.before) - 1)
            weight = lib.where(inside, weight, lib.zeros_like(weight))
        taps.append(index)
        weights.append(weight)
    if rule.exclude_outside or rule.antialias:
        total = sum(weights[1:], weights[0])
        weights = [w / total for w in weights]
    y: Any = None
    for index, weight in zip(taps, weights, strict=True):
        part = _taken(x, index, axis, lib) * _shaped(weight, x, axis, lib)
        y = part if y is None else y + part
    if rule.outside is None:
        return y  # type: ignore[no-any-return]
    inside = lib.logical_and(at >= 0, at <= _real(axis.before) - 1)
    flag = xp.reshape(xp.asarray(inside), _column(x, axis))
    return xp.where(flag, y, xp.asarray(rule.outside, dtype=y.dtype))


def _places(node: Call, lib: Any, axis: Axis, how: str) -> Any:
    """Where on the axis before each element after lies, in f64."""
    i = lib.arange(axis.after, dtype=lib.float64)
    n, size, scale = _real(axis.before), _real(axis.after), axis.scale
    if how == "asymmetric":
        return i / scale
    if how == "align_corners":
        last = scale * n - 1  # by the scale, which a whole size may not have
        return i * ((n - 1) / lib.where(last > 0, last, lib.asarray(1.0)))
    if how == "half_pixel":
        return (i + 0.5) / scale - 0.5
    if how == "pytorch_half_pixel":
        one = type(axis.after) is int and axis.after == 1
        return i if one else (i + 0.5) / scale - 0.5
    if how == "half_pixel_symmetric":
        adjusted = size / (scale * n)
        return n / 2 * (1 - adjusted) + (i + 0.5) / scale - 0.5
    if how == "tf_half_pixel_for_nn":
        return (i + 0.5) / scale
    if how == "tf_crop_and_resize":
        if type(axis.after) is int and axis.after == 1:
            return i + 0.5 * (axis.start + axis.end) * (n - 1)
        return axis.start * (n - 1) + i * ((axis.end - axis.start) * (n - 1) / (size - 1))
    raise node.fault("unknown coordinates", got=how)


def _rounded(node: Call, lib: Any, at: Any, how: str) -> Any:
    if how == "floor":
        return lib.floor(at)
    if how == "ceil":
        return lib.ceil(at)
    if how == "round_prefer_floor":
        return lib.ceil(at - 0.5)
    if how == "round_prefer_ceil":
        return lib.floor(at + 0.5)
    raise node.fault("unknown rounding", got=how)


Kernel = Callable[[Any, Any], Any]


def _kernel(node: Call, axis: Axis, rule: Rule) -> tuple[range, Kernel]:
    """The offsets of the elements that count, and the weight of one by its distance."""
    stretch = 1.0
    if rule.antialias:
        scale = axis.scale if isinstance(axis.scale, float) else int(axis.after) / int(axis.before)
        stretch = min(scale, 1.0)
    weight: Kernel
    if rule.mode == "linear":
        reach, weight = 1, _hat
    elif rule.mode == "cubic":
        reach, weight = 2, _cubic(rule.cubic)
    else:
        raise node.fault("unknown interpolation", got=rule.mode)
    first = int(np.floor(-reach / stretch)) + 1
    if reach - first > MOST_TAPS:
        raise node.fault("too many elements for each result", got=reach - first)
    offsets = range(first, reach - first + 1 if stretch < 1.0 else reach + 1)
    return offsets, lambda lib, d: weight(lib, d * stretch)


def _hat(lib: Any, distance: Any) -> Any:
    return lib.maximum(1.0 - lib.abs(distance), lib.zeros_like(distance))


def _cubic(a: float) -> Kernel:
    def weight(lib: Any, distance: Any) -> Any:
        d = lib.abs(distance)
        near = ((a + 2) * d - (a + 3)) * d * d + 1
        far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
        return lib.where(d <= 1, near, lib.where(d < 2, far, lib.zeros_like(d)))

    return weight


def _taken(x: Array, index: Any, axis: Axis, lib: Any) -> Array:
    """Elements at these places, those outside taken from the edge."""
    last = _real(axis.before) - 1
    clipped = lib.clip(index, 0.0, last) if lib is np else xp.minimum(xp.maximum(index, 0.0), last)
    return xp.take(x, xp.asarray(clipped).astype(xp.int64), axis=axis.number)


def _column(x: Array, axis: Axis) -> tuple[int, ...]:
    return tuple([-1 if a == axis.number else 1 for a in range(x.ndim)])


def _shaped(weight: Any, x: Array, axis: Axis, lib: Any) -> Array:
    made = Array(weight.astype(x.dtype.numpy)) if lib is np else weight.astype(x.dtype)
    return xp.reshape(made, _column(x, axis))


# -- at given places ------------------------------------------------------------------------------


@op("GridSample", since=16)
def grid_sample(node: Call, x: Array, grid: Array) -> Array:
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(*[node.text("mode", "linear")] * 2)
    outside, corners = node.text("padding_mode", "zeros"), bool(node.int("align_corners", 0))
    rank = x.ndim - 2
    sizes = x.shape[2:]
    if mode not in ("linear", "nearest", "cubic") or rank < 1 or (mode == "cubic" and rank > 2):
        raise node.fault("unknown interpolation", got=f"{mode} over {rank} axes")
    # the last axis of the grid has the places along the last axis of x first
    places = [_unnormalised(grid[..., rank - 1 - a], sizes[a], corners) for a in range(rank)]
    if mode != "cubic":
        places = [_inside(p, n, outside, corners) for p, n in zip(places, sizes, strict=True)]
    rows = _rows(x)
    total: Any = None
    options = [list(_corners(p, mode)) for p in places]
    for corner in product(*options):
        index: Any = None
        weight: Any = None
        for (place, own), n in zip(corner, sizes, strict=True):
            if mode == "cubic":
                place = _inside(place, n, outside, corners)
            size = _as(place, n)
            if outside == "zeros":
                valid = xp.logical_and(place >= 0, place <= size - 1)
                flag = valid.astype(x.dtype)
                own = flag if own is None else own.astype(x.dtype) * flag
            elif own is not None:
                own = own.astype(x.dtype)
            at = xp.minimum(xp.maximum(place, 0.0), size - 1).astype(xp.int64)
            index = at if index is None else index * n + at
            weight = own if weight is None else weight if own is None else weight * own
        part = _gathered(rows, index, sizes)
        part = part if weight is None else part * xp.expand_dims(weight, -1)
        total = part if total is None else total + part
    return xp.moveaxis(total, -1, 1)


def _as(like: Array, n: Any) -> Any:
    return n.as_array(like.dtype) if isinstance(n, Size) else float(n)


def _rows(x: Array) -> Array:
    """[N, C, …] as [N · …, C]."""
    return xp.reshape(xp.moveaxis(x, 1, -1), (-1, x.shape[1]))


def _gathered(rows: Array, index: Array, sizes: Any) -> Array:
    each: Any = 1
    for n in sizes:
        each = each * n
    shape = (index.shape[0], *[1] * (index.ndim - 1))
    first = xp.reshape(xp.arange(index.shape[0], dtype=xp.int64) * each, shape)
    return graph_op("gather", rows, index + first, axis=0)


def _unnormalised(place: Array, n: Any, corners: bool) -> Any:
    """−1 … 1 as a position on an axis."""
    size = _as(place, n)
    return (place + 1) * ((size - 1) / 2) if corners else ((place + 1) * size - 1) * 0.5


def _inside(place: Array, n: Any, outside: str, corners: bool) -> Array:
    if outside == "zeros":
        return place
    size = _as(place, n)
    if outside == "border":
        return xp.minimum(xp.maximum(place, 0.0), size - 1)
    low, span = (0.0, size - 1) if corners else (-0.5, size)
    if corners and type(n) is int and n == 1:
        return xp.zeros_like(place)
    folded = xp.remainder(place - low, 2 * span)
    made = xp.minimum(folded, 2 * span - folded) + low
    return xp.minimum(xp.maximum(made, 0.0), size - 1)


def _corners(place: Array, mode: str) -> Any:
    """The neighbours of a position along one axis, each with its weight."""
    if mode == "nearest":
        yield xp.round(place), None
        return
    base = xp.floor(place)
    part = place - base
    if mode == "linear":
        yield base, 1.0 - part
        yield base + 1, part
        return
    weight = _cubic(-0.75)
    for offset in (-1, 0, 1, 2):
        yield base + offset, weight(xp, part - offset)
