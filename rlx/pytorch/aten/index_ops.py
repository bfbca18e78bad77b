"""Reading and writing by index: embeddings, gather, scatter, `x[i, j]` and `x[i, j] = v`.

Ours take one axis at a time. Several indices of neighbouring axes become one index into those axes
merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rlx.errors import UnsupportedError
from rlx.ir.dim import Dim
from rlx.ir.dtype import i64
from rlx.ir.node import Value
from rlx.pytorch.aten.table import aten

if TYPE_CHECKING:
    from rlx.pytorch.lower_aten import Lowering


@aten("embedding.default")
def embedding(low: Lowering, table: Value, ids: Value, *_: Any) -> Value:
    return low.g.gather(table, ids, axis=0)


@aten("embedding_dense_backward.default")
def embedding_dense_backward(
    low: Lowering, gradient: Value, ids: Value, count: Any, padding: int, by_frequency: bool
) -> Value:
    if by_frequency:
        raise UnsupportedError("gradients scaled by frequency", where="embedding_dense_backward")
    if padding >= 0:
        padded = low.g.eq(ids, low.scalar(padding, ids.shape.dtype))
        padded = low.reshape(padded, (*ids.shape.dims, 1))
        gradient = low.g.where(padded, low.scalar(0, gradient.shape.dtype), gradient)
    made: Value = low.g.gather_backward(gradient, ids, size=low.dim(count), axis=0)
    return made


@aten("index_select.default")
def index_select(low: Lowering, x: Value, axis: int, index: Value) -> Value:
    return low.g.gather(x, low.reshape(index, (index.shape.num_elements,)), axis=axis)


def _axis_part(low: Lowering, x: Value, axis: int, like: Value) -> Value:
    """x with the other axes cut to those of an index, which may be smaller."""
    for a, (size, wanted) in enumerate(zip(x.shape.dims, like.shape.dims, strict=True)):
        if a != axis and size != wanted:
            x = low.g.narrow(x, axis=a, start=0, length=wanted)
    return x


@aten("gather.default")
def gather(low: Lowering, x: Value, axis: int, index: Value, sparse_grad: bool = False) -> Value:
    if x.shape.rank == 0:
        return x
    at = axis % x.shape.rank
    return low.g.take_along(_axis_part(low, x, at, index), index, axis=at)


@aten("take_along_dim.default")
def take_along(low: Lowering, x: Value, index: Value, axis: int) -> Value:
    return low.g.take_along(x, index, axis=axis)


# -- one index an element ---------------------------------------------------------------------


def _places(low: Lowering, x: Value, axis: int, index: Value) -> Value:
    """For each element of an index, where in x it points, counted in row-major order: [n]."""
    g, total = low.g, None
    stride: Dim = 1
    for a in reversed(range(x.shape.rank)):
        if a == axis:
            at = low.cast(index, i64)
            at = _wrapped(low, at, x.shape.dims[a])
        else:
            at = g.iota(index.shape.dims, axis=a, dtype=i64)
        part = at if stride == 1 else g.mul(at, low.scalar(stride, i64))
        total = part if total is None else g.add(total, part)
        stride = stride * x.shape.dims[a]
    assert total is not None
    return low.reshape(total, (index.shape.num_elements,))


def _wrapped(low: Lowering, index: Value, size: Dim) -> Value:
    zero = low.scalar(0, index.shape.dtype)
    behind = low.g.add(index, low.scalar(size, index.shape.dtype))
    return low.g.where(low.g.lt(index, zero), behind, index)


def _written(
    low: Lowering, x: Value, axis: int, index: Value, source: Any, name: str, **options: Any
) -> Value:
    if x.shape.rank == 0:
        raise UnsupportedError("a scatter into a scalar", where="scatter", got=x.shape)
    at = axis % x.shape.rank
    if isinstance(source, Value):
        for a, (size, wanted) in enumerate(zip(source.shape.dims, index.shape.dims, strict=True)):
            if size != wanted:
                source = low.g.narrow(source, axis=a, start=0, length=wanted)
        updates = low.cast(source, x.shape.dtype)
    else:
        updates = low.expand(low.scalar(source, x.shape.dtype), index.shape.dims)
    count = index.shape.num_elements
    flat = low.reshape(x, (x.shape.num_elements,))
    rows = low.reshape(updates, (count,))
    made = low.g.apply(name, flat, _places(low, x, at, index), rows, axis=0, **options)
    return low.reshape(made, x.shape.dims)


@aten("scatter.src", "scatter.value")
def scatter(low: Lowering, x: Value, axis: int, index: Value, source: Any) -> Value:
    return _written(low, x, axis, index, source, "scatter")


@aten("scatter_add.default")
def scatter_add(low: Lowering, x: Value, axis: int, index: Value, source: Value) -> Value:
    return _written(low, x, axis, index, source, "scatter_add")


@aten("scatter_reduce.two")
def scatter_reduce(
    low: Lowering, x: Value, axis: int, index: Value, source: Value, reduce: str,
    *, include_self: bool = True,
) -> Value:  # fmt: skip
    known = {"prod": "mul", "amax": "maximum", "amin": "minimum"}
    if not include_self or reduce not in (*known, "sum"):
        raise UnsupportedError("a way to reduce", where="scatter_reduce",
                               got=f"{reduce}, include_self={include_self}")  # fmt: skip
    if reduce == "sum":
        return _written(low, x, axis, index, source, "scatter_add")
    return _written(low, x, axis, index, source, "scatter_reduce", how=known[reduce])


# -- slices by index --------------------------------------------------------------------------


@aten("index_copy.default")
def index_copy(low: Lowering, x: Value, axis: int, index: Value, source: Value) -> Value:
    at = axis % x.shape.rank
    where = low.reshape(index, (index.shape.num_elements,))
    if x in low.states:
        return low.update_state(x, source, at, slots=where)
    return low.g.scatter(x, where, low.cast(source, x.shape.dtype), axis=at)


@aten("index_add.default")
def index_add(
    low: Lowering, x: Value, axis: int, index: Value, source: Value, *, alpha: Any = 1
) -> Value:
    rows = low.cast(source, x.shape.dtype)
    if alpha != 1:
        rows = low.g.mul(rows, low.scalar(alpha, x.shape.dtype))
    where = low.reshape(index, (index.shape.num_elements,))
    return low.g.scatter_add(x, where, rows, axis=axis % x.shape.rank)


@aten("index_fill.int_Scalar", "index_fill.int_Tensor")
def index_fill(low: Lowering, x: Value, axis: int, index: Value, value: Any) -> Value:
    at, count = axis % x.shape.rank, index.shape.num_elements
    dims = tuple([count if a == at else d for a, d in enumerate(x.shape.dims)])
    rows = low.expand(low.tensor(value, x.shape.dtype), dims)
    return low.g.scatter(x, low.reshape(index, (count,)), rows, axis=at)


# -- x[i, j] ----------------------------------------------------------------------------------


class Merged(NamedTuple):
    """x with the indexed axes as one, at `axis`; `order` is how its axes were moved before."""

    x: Value
    dims: tuple[Dim, ...]  # before the axes were merged
    order: tuple[int, ...]
    axis: int
    places: Value  # into the merged axis; its dims take its place in the result


def _merged(low: Lowering, x: Value, indices: Sequence[Value | None]) -> Merged:
    axes = [a for a, index in enumerate(indices) if index is not None]
    given = [low.cast(index, i64) for index in indices if index is not None]
    is_run = axes == list(range(axes[0], axes[0] + len(axes)))
    first = axes[0] if is_run else 0
    order = tuple(range(x.shape.rank))
    if not is_run:  # the indexed axes come first, as in NumPy
        order = (*axes, *[a for a in order if a not in axes])
        x = low.g.transpose(x, axes=order)
    dims, count = x.shape.dims, len(axes)
    if count == 1:
        return Merged(x, dims, order, first, given[0])
    index, size = None, dims[first]
    for at, each in enumerate(given):
        n = dims[first + at]
        part = _wrapped(low, each, n)
        if index is None:
            index = part
            continue
        index = low.g.add(low.g.mul(index, low.scalar(n, i64)), part)
        size = size * n
    assert index is not None
    whole = low.reshape(x, (*dims[:first], size, *dims[first + count :]))
    return Merged(whole, dims, order, first, index)


def _require_positions(indices: Sequence[Value | None], where: str) -> None:
    if any(i is not None and i.shape.dtype.kind == "bool" for i in indices):
        raise UnsupportedError("a mask as an index: the size depends on data", where=where)


@aten("index.Tensor", "_unsafe_index.Tensor")
def index_(low: Lowering, x: Value, indices: Sequence[Value | None]) -> Value:
    _require_positions(indices, "index")
    found = _merged(low, x, indices)
    return low.g.gather(found.x, found.places, axis=found.axis)


@aten("index_put.default", "_unsafe_index_put.default")
def index_put(
    low: Lowering, x: Value, indices: Sequence[Value | None], values: Value,
    accumulate: bool = False,
) -> Value:  # fmt: skip
    mask = indices[0]
    if mask is not None and mask.shape.dtype.kind == "bool" and len(indices) == 1:
        return _put_where(low, x, mask, values, accumulate)
    _require_positions(indices, "index_put")
    found = _merged(low, x, indices)
    lead, dims = found.x.shape.dims[: found.axis], found.places.shape.dims
    behind = found.x.shape.dims[found.axis + 1 :]
    count = found.places.shape.num_elements
    rows = low.expand(low.cast(values, x.shape.dtype), (*lead, *dims, *behind))
    rows = low.reshape(rows, (*lead, count, *behind))
    where = low.reshape(found.places, (count,))
    if x in low.states and found.x is x and not accumulate:
        return low.update_state(x, rows, found.axis, slots=where)
    how = "scatter_add" if accumulate else "scatter"
    made: Value = low.g.apply(how, found.x, where, rows, axis=found.axis)
    made = low.reshape(made, found.dims)
    back = tuple([found.order.index(a) for a in range(len(found.order))])
    return made if back == found.order else low.g.transpose(made, axes=back)


def _put_where(low: Lowering, x: Value, mask: Value, values: Value, accumulate: bool) -> Value:
    """One number, or one row for all: chosen by the mask."""
    if values.shape.rank > x.shape.rank - mask.shape.rank:
        if values.shape.num_elements != 1:
            raise UnsupportedError("a row for each place of a mask", where="index_put",
                                   got=values.shape)  # fmt: skip
        values = low.reshape(values, ())
    wide = low.reshape(mask, (*mask.shape.dims, *[1] * (x.shape.rank - mask.shape.rank)))
    put = low.cast(values, x.shape.dtype)
    return low.g.where(wide, low.g.add(x, put) if accumulate else put, x)


@aten("searchsorted.Tensor", "bucketize.Tensor")
def searchsorted(low: Lowering, a: Value, b: Value, *_: Any, **named: Any) -> Value:
    """`bucketize` has the table second."""
    table, x = (b, a) if "bucketize" in str(low.node.target) else (a, b)
    if table.shape.rank != 1:
        raise UnsupportedError("a table per row", where="searchsorted", got=table.shape)
    right = bool(named.get("right", False)) or named.get("side") == "right"
    element = low.promoted(0, 1)
    return low.g.searchsorted(
        low.cast(table, element), low.cast(x, element), side="right" if right else "left"
    )
