"""Canonical forms of operands, so that few kernels serve arrays of all shapes and layouts.

An elementwise op or a reduction does not care how many axes an array has. Axes that lie behind
each other in memory and broadcast alike, or are reduced alike, are one axis. What is left is named
by its pattern: which operands have which axes, in which order in memory. A kernel is compiled for
a pattern with dynamic sizes.

Small arrays have two patterns only: operands that broadcast, or whose elements are not in row-major
order, are copied first. That costs a microsecond or two, and a kernel many milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from operator import methodcaller
from typing import Any, NamedTuple

import numpy as np

from rlx.errors import ShapeError

Data = np.ndarray[Any, Any]
View = Callable[[Data], Data]

SMALL = 1024  # elements
_SHORT = 32  # elements of an axis: of three axes of a small array one, at most, is longer
_FIXED_INNER = 64  # shorter innermost axes of large arrays are constants of the code: unrolled
_VAST = 1 << 28  # elements; sizes of larger arrays are static: bounds would ask for too much memory


class Operand(NamedTuple):
    """An operand of a kernel: sizes in the order of memory; `axes` is their order in the graph, or
    None where that is the same."""

    sizes: tuple[int, ...]
    axes: tuple[int, ...] | None = None


class Form(NamedTuple):
    """How arrays of certain shapes and strides are given to a kernel and taken from it."""

    operands: tuple[Operand, ...]
    views: tuple[View | None, ...]  # of each array: what the kernel reads; None: itself
    sizes: tuple[int, ...]  # of the axes of the graph
    fixed: bool  # whether the innermost axis is a constant of the code
    shape: tuple[int, ...]  # of a result, in the order of memory
    axes: tuple[int, ...] | None = None  # the order of a result's axes, if that is another
    reduced: tuple[int, ...] = ()  # the axes of the graph that are reduced, or worked along

    @property
    def is_small(self) -> bool:
        return prod(self.sizes) <= SMALL

    def bounds(self) -> tuple[int, ...]:
        """For each axis of the graph, the bound of its dynamic size; 0 where the size is static.
        Few, so that most shapes find an executable; close, since kernels suit the bound."""
        if self.is_small:
            if len(self.sizes) < 3:
                return (SMALL,) * len(self.sizes)
            return tuple([_SHORT if n <= _SHORT else SMALL for n in self.sizes])
        found = [_bound(n) for n in self.sizes]
        if self.fixed:
            found[-1] = 0
        return (
            tuple(found) if prod(b or _FIXED_INNER for b in found) <= _VAST else (0,) * len(found)
        )


def _bound(n: int) -> int:
    """The next power of two; for long axes a closer one, since kernels for results that outgrow the
    caches write past them."""
    if n <= 1 << 20:
        return 1 << max(n - 1, 15).bit_length()
    step = 1 << (n.bit_length() - 3)
    return -(-n // step) * step


# -- elementwise ----------------------------------------------------------------------------------


def broadcast_shape(datas: Sequence[Data]) -> tuple[int, ...]:
    shape: tuple[int, ...] = datas[0].shape
    if all(d.shape == shape for d in datas):
        return shape
    try:
        return tuple(np.broadcast_shapes(*[d.shape for d in datas]))
    except ValueError:
        shown = " and ".join(str(list(d.shape)) for d in datas)
        raise ShapeError(
            "shapes do not broadcast", got=shown, expected="equal sizes, or 1, from the last axis"
        ) from None


def elementwise(datas: Sequence[Data], shape: tuple[int, ...]) -> Form:
    """The form of operands that broadcast to `shape`, which has elements."""
    size = prod(shape)
    if size <= SMALL:
        operands = [_SCALAR if d.size == 1 < size else Operand((size,)) for d in datas]
        views = [_small_view(d, shape, size) for d in datas]
        return Form(tuple(operands), tuple(views), (size,), False, shape)
    return _large_elementwise(datas, shape)


_SCALAR = Operand(())
_flat: View = methodcaller("reshape", -1)
_scalar: View = methodcaller("reshape", ())


def _small_view(d: Data, shape: tuple[int, ...], size: int) -> View | None:
    if d.size == 1 < size:
        return _scalar if d.ndim else None
    if d.shape == shape:  # reshape copies elements that are not in row-major order
        return _flat if d.ndim != 1 or not d.flags.c_contiguous else None
    return lambda x: np.broadcast_to(x, shape).reshape(-1)


class _Strided:
    """An operand with more than one element: its strides along the axes of the result that are
    longer than 1, 0 where it broadcasts."""

    def __init__(self, d: Data, shape: tuple[int, ...], axes: Sequence[int]) -> None:
        self.own = [a - len(shape) + d.ndim for a in axes]  # the array's own axes
        self.has = [a >= 0 and d.shape[a] > 1 for a in self.own]
        self.strides = [d.strides[a] if h else 0 for a, h in zip(self.own, self.has, strict=True)]
        self.sizes = [shape[a] for a in axes]
        self.item = d.itemsize

    def order(self) -> list[int]:
        """The axes from the one with the longest stride on; broadcast ones where they stand."""
        mine = [i for i, h in enumerate(self.has) if h]
        ranked = iter(sorted(mine, key=lambda i: -abs(self.strides[i])))
        return [next(ranked) if h else i for i, h in enumerate(self.has)]

    def is_dense(self) -> bool:
        """Whether the elements fill a range of memory, in some order of the axes."""
        step = self.item
        for i in reversed(self.order()):
            if self.has[i]:
                if self.strides[i] != step:
                    return False
                step *= self.sizes[i]
        return True

    def pack(self, order: Sequence[int]) -> None:
        """The strides after a copy with the axes in this order."""
        step = self.item
        for i in reversed(order):
            if self.has[i]:
                self.strides[i] = step
                step *= self.sizes[i]

    def joins(self, outer: int, inner: int) -> bool:
        """Whether two axes are one."""
        if not self.has[outer] or not self.has[inner]:
            return self.has[outer] == self.has[inner]
        return self.strides[outer] == self.strides[inner] * self.sizes[inner]


def _large_elementwise(datas: Sequence[Data], shape: tuple[int, ...]) -> Form:
    axes = [i for i, n in enumerate(shape) if n != 1]
    strided = [_Strided(d, shape, axes) if d.size > 1 else None for d in datas]
    order = _common_order([s for s in strided if s is not None], len(axes))
    for s in strided:
        if s is not None and not s.is_dense():
            s.pack(order)
    groups = _groups(order, lambda a, b: all(s is None or s.joins(a, b) for s in strided))
    sizes = tuple([prod(shape[axes[i]] for i in g) for g in groups])
    pairs = [_operand(d, s, groups, sizes) for d, s in zip(datas, strided, strict=True)]
    operands, views = zip(*pairs, strict=True)
    dims, back = _result_order(shape, [axes[i] for i in order])
    fixed = len(sizes) > 1 and sizes[-1] < _FIXED_INNER
    return Form(operands, views, sizes, fixed, dims, back)


def _common_order(operands: Sequence[_Strided], rank: int) -> list[int]:
    """The order of axes in memory of the operand with the most axes: results have it too."""
    whole = max(operands, key=lambda s: sum(s.has), default=None)
    return list(range(rank)) if whole is None else whole.order()


def _groups(order: Sequence[int], joins: Callable[[int, int], bool]) -> list[list[int]]:
    groups: list[list[int]] = []
    for i in order:
        if groups and joins(groups[-1][-1], i):
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _operand(
    d: Data, strided: _Strided | None, groups: Sequence[Sequence[int]], sizes: Sequence[int]
) -> tuple[Operand, View | None]:
    """The operand of a kernel with these groups of axes, and the view of the array it reads."""
    if strided is None:
        return _SCALAR, _scalar if d.ndim else None
    has = [strided.has[g[0]] for g in groups]
    mine = [i for i, h in enumerate(has) if h]
    ranked = iter(sorted(mine, key=lambda i: -strided.strides[groups[i][-1]]))
    memory = [next(ranked) if h else i for i, h in enumerate(has)]
    dims = tuple([sizes[i] if has[i] else 1 for i in memory])
    back = tuple([memory.index(i) for i in range(len(memory))])
    transposed = [strided.own[a] for i in memory if has[i] for a in groups[i]]
    ones = [a for a in range(d.ndim) if a not in transposed]
    return Operand(dims, None if list(back) == sorted(back) else back), _view(
        d, ones + transposed, dims
    )


def _view(d: Data, transposed: Sequence[int], dims: tuple[int, ...]) -> View | None:
    if list(transposed) == list(range(d.ndim)):
        return None if d.shape == dims and d.flags.c_contiguous else methodcaller("reshape", dims)
    return lambda x: x.transpose(transposed).reshape(dims)


def _result_order(
    shape: tuple[int, ...], order: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """The shape of a result in the order of memory, and the axes that give it its own order."""
    memory = [*[a for a in range(len(shape)) if a not in order], *order]
    if list(order) == sorted(order):
        return shape, None
    back = tuple([memory.index(a) for a in range(len(shape))])
    return tuple([shape[a] for a in memory]), back


# -- reductions -----------------------------------------------------------------------------------


def reduction(d: Data, axes: tuple[int, ...], keepdims: bool) -> Form:
    """The form of an array whose `axes` are reduced; what is left has elements."""
    kept = [a for a in range(d.ndim) if a not in axes]
    shape = tuple([1 if a in axes else d.shape[a] for a in range(d.ndim)])
    shape = shape if keepdims else tuple([d.shape[a] for a in kept])
    outer, inner = prod(d.shape[a] for a in kept), prod(d.shape[a] for a in axes)
    if d.size <= SMALL:
        form = Operand((outer, inner))
        view = _view(d, [*kept, *axes], form.sizes)
        return Form((form,), (view,), form.sizes, False, shape, reduced=(1,))
    return _large_reduction(d, axes, keepdims, shape)


def _large_reduction(
    d: Data, axes: tuple[int, ...], keepdims: bool, shape: tuple[int, ...]
) -> Form:
    long = [a for a in range(d.ndim) if d.shape[a] != 1]
    strided = _Strided(d, d.shape, long)
    order = strided.order()
    if not strided.is_dense():
        order = list(range(len(long)))
    groups = _groups(order, lambda a, b: (long[a] in axes) == (long[b] in axes))
    sizes = tuple([prod(d.shape[long[i]] for i in g) for g in groups])
    reduced = tuple([i for i, g in enumerate(groups) if long[g[0]] in axes])
    ones = [a for a in range(d.ndim) if a not in long]
    view = _view(d, [*ones, *[long[i] for i in order]], sizes)
    if not reduced:  # the reduced axes have one element each
        sizes, reduced = (*sizes, 1), (len(sizes),)
        view = _view(d, [*ones, *[long[i] for i in order]], sizes)
    left = [long[i] for i in order if long[i] not in axes]
    if not keepdims:  # numbers of the axes that are left
        left = [a - sum(r < a for r in axes) for a in left]
    dims, back = _result_order(shape, left)
    fixed = len(sizes) > 1 and sizes[-1] < _FIXED_INNER
    return Form((Operand(sizes),), (view,), sizes, fixed, dims, back, reduced)


# -- along one axis -------------------------------------------------------------------------------


def along(d: Data, axis: int, more: int) -> Form:
    """The form of an array with elements whose order matters along `axis`, where the result has
    `more` elements. What lies before that axis is one axis, and what lies behind it another."""
    before, behind = prod(d.shape[:axis]), prod(d.shape[axis + 1 :])
    outer = (before,) if before > 1 else ()
    sizes = (*outer, d.shape[axis], *((behind,) if behind > 1 else ()))
    shape = (*d.shape[:axis], d.shape[axis] + more, *d.shape[axis + 1 :])
    view = _view(d, range(d.ndim), sizes)
    fixed = d.size > SMALL and len(sizes) > 1 and sizes[-1] < _FIXED_INNER
    return Form((Operand(sizes),), (view,), sizes, fixed, shape, reduced=(len(outer),))
