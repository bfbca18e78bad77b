"""Shapes and layouts: reshape, transpose, slice, concat, split, pad, …"""

from __future__ import annotations

from typing import Any

import numpy as np

import rlx.numpy as xp
from rlx.numpy.array import Array
from rlx.numpy.trace import Size
from rlx.onnx.call import Call
from rlx.onnx.graph_ops import graph_op
from rlx.onnx.table import op
from rlx.onnx.values import known_sizes, shape_of


def axes_of(node: Call, given: Any, rank: int, name: str = "axes") -> tuple[int, ...] | None:
    """Axes from an operand or an attribute, none negative; None where neither is there."""
    found = node.ints(name, None) if given is None else [int(a) for a in np.reshape(given, -1)]
    if found is None:
        return None
    for axis in found:
        if not -rank <= axis < rank:
            raise node.fault("axis out of range", got=axis, expected=f"{-rank} … {rank - 1}")
    return tuple([a % rank for a in found])


def size_list(values: Any) -> list[Any]:
    """Elements as ints and symbolic sizes."""
    return [x if isinstance(x, Size) else int(x) for x in np.reshape(values, -1)]


@op("Shape", raw=True)
def shape(node: Call, x: Any) -> Any:
    sizes = shape_of(x)
    return known_sizes(sizes[slice(node.int("start", 0), node.int("end", None))])


@op("Size", raw=True)
def size(node: Call, x: Any) -> Any:
    total: Any = 1
    for n in shape_of(x):
        total = total * n
    found = known_sizes([total])
    return type(found)(found.data.reshape(()), found.dtype)


@op("Reshape", known=(1,))
def reshape(node: Call, x: Array, shape: Any) -> Array:
    sizes = size_list(shape)
    if not node.int("allowzero", 0):
        kept = list(enumerate(sizes))
        if any(n == 0 and i >= x.ndim for i, n in kept if not isinstance(n, Size)):
            raise node.fault("a size of 0 keeps an axis that is not there", got=sizes)
        sizes = [x.shape[i] if not isinstance(n, Size) and n == 0 else n for i, n in kept]
    return xp.reshape(x, tuple(sizes))


@op("Flatten")
def flatten(node: Call, x: Array) -> Array:
    axis = node.int("axis", 1)
    axis = axis + x.ndim if axis < 0 else axis
    first: Any = 1
    for n in x.shape[:axis]:
        first = first * n
    rest: Any = 1
    for n in x.shape[axis:]:
        rest = rest * n
    return xp.reshape(x, (first, rest))


@op("Transpose")
def transpose(node: Call, x: Array) -> Array:
    axes = node.ints("perm", None)
    return xp.permute_dims(x, axes or tuple(reversed(range(x.ndim))))


@op("Squeeze", known=(1,))
def squeeze(node: Call, x: Array, axes: Any = None) -> Array:
    found = axes_of(node, axes, x.ndim)
    if found is None:
        found = tuple([i for i, n in enumerate(x.shape) if n == 1])
    return xp.squeeze(x, found) if found else x


@op("Unsqueeze", known=(1,))
def unsqueeze(node: Call, x: Array, axes: Any = None) -> Array:
    count = len(node.ints("axes")) if axes is None else np.size(axes)
    found = axes_of(node, axes, x.ndim + count)
    if found is None or len(set(found)) != len(found):
        raise node.fault("not axes to add", got=found)
    sizes = list(x.shape)
    for axis in sorted(found):
        sizes.insert(axis, 1)
    return xp.reshape(x, tuple(sizes))


@op("Concat")
def concat(node: Call, *tensors: Array) -> Array:
    return xp.concat(tensors, axis=node.int("axis", 1))


@op("Expand", known=(1,))
def expand(node: Call, x: Array, shape: Any) -> Array:
    sizes = size_list(shape)
    rank = max(len(sizes), x.ndim)
    own = [1] * (rank - x.ndim) + list(x.shape)
    sizes = [1] * (rank - len(sizes)) + sizes
    target = [b if a is None else a for a, b in ((_if_one(n, m)) for n, m in
              zip(sizes, own, strict=True))]  # fmt: skip
    return xp.broadcast_to(x, tuple(target))


def _if_one(wanted: Any, own: Any) -> tuple[Any, Any]:
    """(None, own) where the wanted size is 1: broadcasting goes both ways."""
    return (None, own) if not isinstance(wanted, Size) and wanted == 1 else (wanted, own)


@op("Tile", known=(1,))
def tile(node: Call, x: Array, repeats: Any) -> Array:
    counts = size_list(repeats)
    sizes: list[Any] = []
    whole: list[Any] = []
    wide: list[Any] = []
    for n, count in zip(x.shape, counts, strict=True):
        sizes += [1, n]
        wide += [count, n]
        whole.append(n * count)
    return xp.reshape(xp.broadcast_to(xp.reshape(x, tuple(sizes)), tuple(wide)), tuple(whole))


@op("Slice", since=10, known=(1, 2, 3, 4))
def slice_10(
    node: Call, x: Array, starts: Any, ends: Any, axes: Any = None, steps: Any = None
) -> Array:
    found = axes_of(node, range(len(starts)) if axes is None else axes, x.ndim) or ()
    strides = [1] * len(found) if steps is None else [int(s) for s in steps]
    key: list[Any] = [slice(None)] * x.ndim
    for axis, start, end, step in zip(
        found, size_list(starts), size_list(ends), strides, strict=True
    ):
        if step == 0:
            raise node.fault("a step of 0")
        key[axis] = slice(*_limits(start, end, step, x.shape[axis]), step)
    return x[tuple(key)]


@op("Slice", since=1)
def slice_1(node: Call, x: Array) -> Any:
    axes = node.ints("axes", tuple(range(len(node.ints("starts")))))
    return slice_10(node, x, node.ints("starts"), node.ints("ends"), axes)


def _limits(start: Any, end: Any, step: int, size: Any) -> tuple[Any, Any]:
    """Limits as Python takes them: far ones mean the end."""
    far = 2**31 - 1
    if step > 0:
        start = size if not isinstance(start, Size) and start >= far else start
        end = None if not isinstance(end, Size) and end >= far else end
        return start, end
    start = None if not isinstance(start, Size) and start >= far else start
    if isinstance(end, Size):
        return start, end
    if end <= -far:
        return start, None
    if end < 0 and end + size < 0:
        return start, None
    return start, end


@op("Split", known=(1,))
def split(node: Call, x: Array, sizes: Any = None) -> tuple[Array, ...]:
    axis = node.int("axis", 0) % x.ndim
    given = node.ints("split", None) if sizes is None else size_list(sizes)
    if given is None:
        count = node.num_outputs
        if node.int("num_outputs", count) != count:
            raise node.fault("not the number of parts", got=node.int("num_outputs"), expected=count)
        size: Any = x.shape[axis]
        each = (size + (count - 1)) // count
        given = [each] * (count - 1) + [size - each * (count - 1)]
    if len(given) != node.num_outputs:
        raise node.fault("not the number of parts", got=len(given), expected=node.num_outputs)
    parts, start = [], 0
    for length in given:
        key: list[Any] = [slice(None)] * x.ndim
        key[axis] = slice(start, start + length)
        parts.append(x[tuple(key)])
        start = start + length
    return tuple(parts)


@op("Pad", since=11, known=(1, 2, 3))
def pad_11(node: Call, x: Array, pads: Any, value: Any = None, axes: Any = None) -> Array:
    rank = x.ndim
    found = tuple(range(rank)) if axes is None else axes_of(node, axes, rank) or ()
    amounts = size_list(pads)
    low: list[Any] = [0] * rank
    high: list[Any] = [0] * rank
    for i, axis in enumerate(found):
        low[axis], high[axis] = amounts[i], amounts[i + len(found)]
    fill = 0 if value is None or np.size(value) == 0 else np.reshape(value, -1)[0]
    return padded(node, x, low, high, fill, node.text("mode", "constant"))


@op("Pad", since=1)
def pad_1(node: Call, x: Array) -> Array:
    amounts = node.ints("pads") if node.has("pads") else node.ints("paddings")
    half = len(amounts) // 2
    return padded(
        node, x, list(amounts[:half]), list(amounts[half:]), node.float("value", 0.0),
        node.text("mode", "constant"),
    )  # fmt: skip


def padded(node: Call, x: Array, low: list[Any], high: list[Any], value: Any, mode: str) -> Array:
    """`x` with elements before and after; negative amounts take some away."""
    key = tuple([
        slice(-a if _negative(a) else 0, n + b if _negative(b) else None)
        for a, b, n in zip(low, high, x.shape, strict=True)
    ])  # fmt: skip
    if any(_negative(n) for n in (*low, *high)):
        for a, b, n in zip(low, high, x.shape, strict=True):
            taken = sum(-amount for amount in (a, b) if _negative(amount))
            if isinstance(n, int) and taken > n:
                raise node.fault("takes away more than there is", got=taken, expected=f"≤ {n}")
        x = x[key]
        low = [0 if _negative(n) else n for n in low]
        high = [0 if _negative(n) else n for n in high]
    if mode == "constant" and not any(isinstance(n, Size) for n in (*low, *high)):
        plain = x.dtype.kind != "bool"
        made = x if plain else x.astype(xp.uint8)
        fill = int(value) if made.dtype.is_integer else float(value)
        made = graph_op("pad", made, low=tuple(low), high=tuple(high), value=fill)
        return made if plain else made.astype(bool)
    for axis, (before, after) in enumerate(zip(low, high, strict=True)):
        if isinstance(before, Size) or isinstance(after, Size) or before or after:
            index = _source_index(node, mode, before, after, x.shape[axis])
            if mode == "constant":
                inside = xp.logical_and(index >= 0, index < x.shape[axis])
                shape = [1] * x.ndim
                shape[axis] = -1
                outside = Array(np.asarray(value, x.dtype.numpy))
                taken = xp.take(x, xp.clip(index, 0, x.shape[axis] - 1), axis=axis)
                x = xp.where(xp.reshape(inside, tuple(shape)), taken, outside)
            else:
                x = xp.take(x, index, axis=axis)
    return x


def _negative(amount: Any) -> bool:
    return not isinstance(amount, Size) and amount < 0


def _source_index(node: Call, mode: str, before: Any, after: Any, size: Any) -> Any:
    """Where each element of a padded axis comes from."""
    index = xp.arange(before + size + after) - before
    if mode == "constant":
        return index
    if mode == "edge":
        return xp.clip(index, 0, size - 1)
    if mode == "wrap":
        return xp.remainder(index, size)
    if mode == "reflect":
        period = 2 * (size - 1)
        folded = xp.remainder(index, period if not _is_zero(period) else 1)
        return xp.minimum(folded, period - folded)
    raise node.fault("unknown padding", got=mode)


def _is_zero(n: Any) -> bool:
    return bool(n == 0)


@op("DepthToSpace")
def depth_to_space(node: Call, x: Array) -> Array:
    block = node.int("blocksize")
    batch, channels, height, width = x.shape
    if node.text("mode", "DCR") == "DCR":
        parts = xp.reshape(x, (batch, block, block, channels // block**2, height, width))
        order = (0, 3, 4, 1, 5, 2)
    else:
        parts = xp.reshape(x, (batch, channels // block**2, block, block, height, width))
        order = (0, 1, 4, 2, 5, 3)
    made = xp.permute_dims(parts, order)
    return xp.reshape(made, (batch, channels // block**2, height * block, width * block))


@op("SpaceToDepth")
def space_to_depth(node: Call, x: Array) -> Array:
    block = node.int("blocksize")
    batch, channels, height, width = x.shape
    parts = xp.reshape(x, (batch, channels, height // block, block, width // block, block))
    order = (0, 3, 5, 1, 2, 4) if node.text("mode", "DCR") == "DCR" else (0, 1, 3, 5, 2, 4)
    made = xp.permute_dims(parts, order)
    return xp.reshape(made, (batch, channels * block**2, height // block, width // block))
