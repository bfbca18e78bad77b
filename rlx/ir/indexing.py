"""`x[…]` as ops: narrow and slice for ranges, gather for arrays of ints, one reshape for the rest.

As in NumPy, an int removes an axis, None adds one of size 1, `...` covers the axes not named, and
negative positions count from the end, also of a symbolic axis. Two things differ. Bounds outside
the axis are an error instead of being clipped, so that a symbolic size behaves like the number
bound to it. And at most one index is an array of ints, next to slices only: NumPy's rules for
several arrays, or for an array next to an int, surprise even experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.errors import InputError, ShapeError
from rlx.ir.dim import Dim, Expr, as_dim, same

if TYPE_CHECKING:
    from rlx.ir.node import Value


def index_value(x: Value, index: object) -> Value:
    """The part of `x` that `index` names."""
    items = _items(x, index if isinstance(index, tuple) else (index,))
    named = [i for i in items if i is not None]
    for axis, item in enumerate(named):
        x = _narrowed(x, axis, item)
    x = _strided(x, named)
    sizes = iter(x.shape.dims)
    dims: list[Dim] = []
    for item in items:
        size = 1 if item is None else next(sizes)
        if not _is_int(item):
            dims.append(size)
    if dims != list(x.shape.dims):
        x = x.graph.reshape(x, dims)
    for axis, item in enumerate(items):  # an array of ints, where there is one
        if item is not None and not isinstance(item, slice) and not _is_int(item):
            x = x.graph.gather(x, item, axis)
    return x


def _items(x: Value, given: Sequence[object]) -> list[Any]:
    """One item per axis of `x`, and a None for each new axis; the ellipsis expanded."""
    named = [i for i in given if i is not None and i is not Ellipsis]
    dots = [at for at, item in enumerate(given) if item is Ellipsis]
    for item in named:
        if not (isinstance(item, slice) or _is_int(item) or _is_array(item)):
            raise _wrong(x, "not an index", item)
    arrays = [i for i in named if not isinstance(i, slice) and not _is_int(i)]
    if len(arrays) > 1 or (arrays and any(map(_is_int, named))):
        raise _wrong(x, "an array of ints goes with slices only", given)
    if len(dots) > 1 or len(named) > x.shape.rank:
        raise _wrong(x, "too many indices" if len(dots) < 2 else "more than one ellipsis", given)
    at = dots[0] if dots else len(given)
    rest = [slice(None)] * (x.shape.rank - len(named))
    return [*given[:at], *rest, *given[at + 1 :]]


def _is_int(item: object) -> bool:
    return isinstance(item, (int, np.integer, Expr)) and not isinstance(item, bool)


def _is_array(item: object) -> bool:
    """Whether `item` is a tensor of ints."""
    from rlx.ir.node import Value

    if isinstance(item, Value):
        return bool(item.shape.dtype.is_integer)
    return isinstance(item, (np.ndarray, list)) and np.asarray(item).dtype.kind in "iu"


def _wrong(x: Value, what: str, got: object) -> InputError:
    return InputError(
        what, where="index", got=f"{got!r} for {x!r}",
        expected="ints, slices, None, ... and at most one array of ints",
        hint="g.gather and g.take_along index by data, g.where chooses by flags",
    )  # fmt: skip


def _position(at: Dim, size: Dim) -> Dim:
    return at + size if isinstance(at, int) and at < 0 else at


def _narrowed(x: Value, axis: int, item: Any) -> Value:
    """An int or a contiguous range of one axis; the full range is a no-op."""
    size = x.shape.dims[axis]
    if _is_int(item):
        at = _position(as_dim(item), size)
        if isinstance(at, int) and isinstance(size, int) and not 0 <= at < size:
            raise ShapeError(
                "index past the end of its axis", where="index",
                got=f"{item} for axis {axis} of {x!r}", expected=f"{-size} … {size - 1}",
            )  # fmt: skip
        return x.graph.narrow(x, axis, at, 1)
    if not isinstance(item, slice) or item.step not in (None, 1):
        return x
    start = 0 if item.start is None else _position(as_dim(item.start), size)
    stop = size if item.stop is None else _position(as_dim(item.stop), size)
    if start == 0 and same(stop, size):
        return x
    return x.graph.narrow(x, axis, start, stop - start)


def _strided(x: Value, items: Sequence[Any]) -> Value:
    """All strided ranges, as one slice op."""
    wide = [isinstance(i, slice) and i.step not in (None, 1) for i in items]
    if not any(wide):
        return x
    starts = [i.start if w else None for i, w in zip(items, wide, strict=True)]
    stops = [i.stop if w else None for i, w in zip(items, wide, strict=True)]
    steps = [i.step if w else 1 for i, w in zip(items, wide, strict=True)]
    return x.graph.slice(x, starts, stops, steps)
