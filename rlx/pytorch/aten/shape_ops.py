"""Shapes: views, slices, joins, padding. All of them are functional: a write gives a new tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlx.errors import UnsupportedError
from rlx.ir.dim import Dim
from rlx.ir.dtype import i64
from rlx.ir.node import Value
from rlx.pytorch.aten.table import aten

if TYPE_CHECKING:
    from rlx.pytorch.lower_aten import Lowering

_END = 2**62  # slices name an end beyond every size


@aten(
    "view.default", "_unsafe_view.default", "reshape.default", "squeeze.default", "squeeze.dim",
    "squeeze.dims", "unsqueeze.default", "flatten.using_ints", "unflatten.int",
    "_reshape_alias.default", "view_copy.default",
)  # fmt: skip
def reshape(low: Lowering, x: Value, *_: Any, **__: Any) -> Value:
    """PyTorch says the shape of the result, which is all that these ops differ in."""
    return low.reshape(x, low.out.dims)


@aten("permute.default")
def permute(low: Lowering, x: Value, axes: Sequence[int]) -> Value:
    order = tuple([a % x.shape.rank for a in axes])
    return x if order == tuple(range(len(order))) else low.g.transpose(x, axes=order)


@aten("transpose.int", "swapaxes.default")
def transpose(low: Lowering, x: Value, a: int, b: int) -> Value:
    order = list(range(x.shape.rank))
    if not order:
        return x
    order[a], order[b] = order[b], order[a]
    return permute(low, x, order)


@aten("t.default", "numpy_T.default")
def t(low: Lowering, x: Value) -> Value:
    return permute(low, x, tuple(reversed(range(x.shape.rank))))


@aten("expand.default", "broadcast_to.default", "expand_as.default")
def expand(low: Lowering, x: Value, *_: Any, **__: Any) -> Value:
    return low.expand(x, low.out.dims)


@aten("repeat.default")
def repeat(low: Lowering, x: Value, counts: Sequence[Any]) -> Value:
    """Each axis becomes two, of which the first repeats."""
    times = low.dims(counts)
    dims = (*[1] * (len(times) - x.shape.rank), *x.shape.dims)
    if all(n == 1 for n in times):
        return low.reshape(x, dims)
    split = [n for d in dims for n in (1, d)]
    wide = [n for count, d in zip(times, dims, strict=True) for n in (count, d)]
    return low.reshape(low.expand(low.reshape(x, split), wide), low.out.dims)


def _bounds(low: Lowering, size: Dim, start: Any, end: Any) -> tuple[Dim, Dim]:
    """Start and end of a slice within an axis, negative ones from the end."""
    first = 0 if start is None else low.dim(start)
    last = size if end is None else low.dim(end)
    found = []
    for bound in (first, last):
        if isinstance(bound, int):
            if bound < 0:
                bound = size + bound
                bound = max(bound, 0) if isinstance(bound, int) else bound
            elif bound >= _END:
                bound = size
            elif isinstance(size, int):
                bound = min(bound, size)
        found.append(bound)
    return found[0], found[1]


@aten("slice.Tensor", "slice_copy.Tensor")
def slice_(
    low: Lowering, x: Value, axis: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Value:
    at = axis % x.shape.rank
    size = x.shape.dims[at]
    first, last = _bounds(low, size, start, end)
    if step == 1:
        length = low.out.dims[at]
        if first == 0 and length == size:
            return x
        return low.g.narrow(x, axis=at, start=first, length=length)
    if not (isinstance(first, int) and (isinstance(last, int) or last == size)):
        raise UnsupportedError("a strided slice with symbolic bounds", where="slice", got=str(end))
    starts: list[int | None] = [0] * x.shape.rank
    stops: list[int | None] = [None] * x.shape.rank
    steps = [1] * x.shape.rank
    starts[at], stops[at], steps[at] = first, None if last == size else int(str(last)), step
    return low.g.slice(x, starts, stops, steps)


@aten("select.int", "select_copy.int")
def select(low: Lowering, x: Value, axis: int, index: Any) -> Value:
    at = axis % x.shape.rank
    start = low.dim(index)
    if isinstance(start, int) and start < 0:
        start = x.shape.dims[at] + start
    row = low.g.narrow(x, axis=at, start=start, length=1)
    return low.reshape(row, low.out.dims)


@aten("narrow.default")
def narrow(low: Lowering, x: Value, axis: int, start: Any, length: Any) -> Value:
    return low.g.narrow(x, axis=axis % x.shape.rank, start=low.dim(start), length=low.dim(length))


def _split(low: Lowering, x: Value, lengths: Sequence[Dim], axis: int) -> tuple[Value, ...]:
    at, start, parts = axis % x.shape.rank, 0, []
    for length in lengths:
        parts.append(low.g.narrow(x, axis=at, start=start, length=length))
        start = start + length  # type: ignore[assignment]
    return tuple(parts)


@aten("split.Tensor", "chunk.default", "tensor_split.sections")
def split(low: Lowering, x: Value, size: Any, axis: int = 0) -> tuple[Value, ...]:
    lengths = [low.outs(i).dims[axis] for i in range(len(low.node.meta["val"]))]
    return _split(low, x, lengths, axis)


@aten("split_with_sizes.default", "split_with_sizes_copy.default")
def split_with_sizes(
    low: Lowering, x: Value, sizes: Sequence[Any], axis: int = 0
) -> tuple[Value, ...]:
    return _split(low, x, low.dims(sizes), axis)


@aten("unbind.int", "unbind_copy.int")
def unbind(low: Lowering, x: Value, axis: int = 0) -> tuple[Value, ...]:
    at = axis % x.shape.rank
    dims = (*x.shape.dims[:at], *x.shape.dims[at + 1 :])
    parts = _split(low, x, [1] * low.number(x.shape.dims[at], "unbind"), at)
    return tuple([low.reshape(p, dims) for p in parts])


@aten("cat.default", "concat.default")
def cat(low: Lowering, tensors: Sequence[Value], axis: int = 0) -> Value:
    """Tensors of shape [0] are left out, as PyTorch does."""
    kept = [x for x in tensors if x.shape.dims != (0,) or low.out.rank == 1]
    cast = [low.cast(x, low.out.dtype) for x in kept]
    return cast[0] if len(cast) == 1 else low.g.concat(*cast, axis=axis % low.out.rank)


@aten("stack.default")
def stack(low: Lowering, tensors: Sequence[Value], axis: int = 0) -> Value:
    at = axis % low.out.rank
    dims = low.out.dims
    rows = [
        low.reshape(low.cast(x, low.out.dtype), (*dims[:at], 1, *dims[at + 1 :])) for x in tensors
    ]
    return low.g.concat(*rows, axis=at)


@aten("flip.default")
def flip(low: Lowering, x: Value, axes: Sequence[int]) -> Value:
    return low.g.flip(x, axis=tuple([a % x.shape.rank for a in axes])) if axes else x


@aten("roll.default")
def roll(low: Lowering, x: Value, shifts: Any, axes: Any = ()) -> Value:
    """The last elements of each axis in front of the others."""
    given = shifts if isinstance(shifts, (list, tuple)) else [shifts]
    if not axes:
        flat = low.reshape(x, (x.shape.num_elements,))
        return low.reshape(_rolled(low, flat, given[0], 0), x.shape.dims)
    for shift, axis in zip(given, axes, strict=True):
        x = _rolled(low, x, shift, axis % x.shape.rank)
    return x


def _rolled(low: Lowering, x: Value, shift: Any, axis: int) -> Value:
    size = low.number(x.shape.dims[axis], "roll")
    by = low.number(shift, "roll") % max(size, 1)
    if not by:
        return x
    tail = low.g.narrow(x, axis=axis, start=size - by, length=by)
    head = low.g.narrow(x, axis=axis, start=0, length=size - by)
    return low.g.concat(tail, head, axis=axis)


@aten("constant_pad_nd.default", "pad.default")
def constant_pad_nd(
    low: Lowering, x: Value, pads: Sequence[Any], mode: Any = 0, value: Any = None
) -> Value:
    """Pairs from the last axis on; negative ones cut off."""
    if isinstance(mode, str):
        number, how = value or 0, mode
    else:
        number, how = mode, "constant"
    modes = {"constant": "constant", "reflect": "reflect", "replicate": "edge"}
    if how not in modes:
        raise UnsupportedError("a mode of padding", where="pad", got=how, expected=", ".join(modes))
    rank = x.shape.rank
    pairs = [low.number(p, "pad") for p in pads]
    before, after = [0] * rank, [0] * rank
    for i in range(len(pairs) // 2):
        before[rank - 1 - i], after[rank - 1 - i] = pairs[2 * i], pairs[2 * i + 1]
    for axis in range(rank):
        cut = max(-before[axis], 0), max(-after[axis], 0)
        if any(cut):
            length = x.shape.dims[axis] - (cut[0] + cut[1])
            x = low.g.narrow(x, axis=axis, start=cut[0], length=length)
    highs, lows = tuple([max(n, 0) for n in after]), tuple([max(n, 0) for n in before])
    if not any(highs + lows):
        return x
    fill = bool(number) if x.shape.dtype.kind == "bool" else float(number)
    return low.g.pad(x, low=lows, high=highs, value=fill, mode=modes[how])


@aten("reflection_pad1d.default", "reflection_pad2d.default", "reflection_pad3d.default")
def reflection_pad(low: Lowering, x: Value, pads: Sequence[Any]) -> Value:
    return constant_pad_nd(low, x, pads, "reflect")


@aten("replication_pad1d.default", "replication_pad2d.default", "replication_pad3d.default")
def replication_pad(low: Lowering, x: Value, pads: Sequence[Any]) -> Value:
    return constant_pad_nd(low, x, pads, "replicate")


@aten("slice_scatter.default")
def slice_scatter(
    low: Lowering, x: Value, source: Value, axis: int = 0, start: Any = None, end: Any = None,
    step: int = 1,
) -> Value:  # fmt: skip
    """x with a slice of it replaced: what is before, the source, and what is behind."""
    at = axis % x.shape.rank
    size = x.shape.dims[at]
    first, _ = _bounds(low, size, start, end)
    length = source.shape.dims[at]
    part = low.cast(source, x.shape.dtype)
    if step != 1:
        count = low.number(length, "slice_scatter")
        index = low.g.mul(low.g.iota((count,), dtype=i64), step)
        return low.g.scatter(x, low.g.add(index, low.scalar(first, i64)), part, axis=at)
    if x in low.states:
        return low.update_state(x, part, at, start=first)
    rest = size - first - length
    parts = [] if first == 0 else [low.g.narrow(x, axis=at, start=0, length=first)]
    parts.append(part)
    if rest != 0:
        parts.append(low.g.narrow(x, axis=at, start=first + length, length=rest))
    return parts[0] if len(parts) == 1 else low.g.concat(*parts, axis=at)


@aten("select_scatter.default")
def select_scatter(low: Lowering, x: Value, source: Value, axis: int, index: Any) -> Value:
    at = axis % x.shape.rank
    start = low.dim(index)
    if isinstance(start, int) and start < 0:
        start = x.shape.dims[at] + start
    row = low.reshape(source, (*x.shape.dims[:at], 1, *x.shape.dims[at + 1 :]))
    return slice_scatter(low, x, row, at, start, start + 1)


@aten("slice_backward.default")
def slice_backward(
    low: Lowering, gradient: Value, sizes: Any, axis: int, start: Any, end: Any, step: int
) -> Value:
    return slice_scatter(low, low.full(0, low.out), gradient, axis, start, end, step)


@aten("select_backward.default")
def select_backward(low: Lowering, gradient: Value, sizes: Any, axis: int, index: Any) -> Value:
    return select_scatter(low, low.full(0, low.out), gradient, axis, index)


@aten("diagonal.default", "diagonal_copy.default")
def diagonal(low: Lowering, x: Value, offset: int = 0, a: int = 0, b: int = 1) -> Value:
    """The two axes last, then elements i and i + offset of them."""
    rank = x.shape.rank
    a, b = a % rank, b % rank
    rest = [i for i in range(rank) if i not in (a, b)]
    last = permute(low, x, (*rest, a, b))
    count = low.out.dims[-1]
    rows = low.g.add(low.g.iota((count,), dtype=i64), max(-offset, 0))
    columns = low.g.add(low.g.iota((count,), dtype=i64), max(offset, 0))
    *lead, height, width = last.shape.dims
    flat = low.reshape(last, (*lead, height * width))
    at = low.g.add(low.g.mul(rows, low.scalar(width, i64)), columns)
    return low.g.gather(flat, at, axis=len(lead))


@aten("unfold.default")
def unfold(low: Lowering, x: Value, axis: int, size: int, step: int) -> Value:
    """Windows of an axis, their elements last."""
    at = axis % x.shape.rank
    count = low.out.dims[at]
    first = low.g.mul(low.g.iota((count, 1), dtype=i64), step)
    index = low.g.add(first, low.g.iota((1, size), axis=1, dtype=i64))
    made = low.g.gather(x, index, axis=at)
    order = [i for i in range(made.shape.rank) if i != at + 1]
    return low.g.transpose(made, axes=(*order, at + 1))
