"""Reductions, softmax, running sums, sorting and the largest elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rlx.errors import UnsupportedError
from rlx.ir.dim import Dim
from rlx.ir.dtype import f32, f64, i64
from rlx.ir.node import Value
from rlx.pytorch.aten.table import aten

if TYPE_CHECKING:
    from rlx.pytorch.lower_aten import Lowering


def axes_of(x: Value, axes: Any) -> tuple[int, ...]:
    """Axes as positive numbers; all of them where none are given."""
    rank = x.shape.rank
    if axes is None or (isinstance(axes, (list, tuple)) and not axes):
        return tuple(range(rank))
    given = axes if isinstance(axes, (list, tuple)) else [axes]
    return tuple(sorted(a % rank for a in given)) if rank else ()


def reduced(low: Lowering, op: str, x: Value, axes: Any, keepdim: bool = False) -> Value:
    found = axes_of(x, axes)
    if not found:  # a tensor without axes is its own sum
        return x
    made: Value = low.g.apply(op, x, axis=found, keepdims=bool(keepdim))
    return made


@aten("sum.default", "sum.dim_IntList")
def sum_(low: Lowering, x: Value, axes: Any = None, keepdim: bool = False, **_: Any) -> Value:
    return reduced(low, "sum", low.cast(x, low.out.dtype), axes, keepdim)


@aten("mean.default", "mean.dim")
def mean(low: Lowering, x: Value, axes: Any = None, keepdim: bool = False, **_: Any) -> Value:
    return reduced(low, "mean", low.cast(x, low.out.dtype), axes, keepdim)


@aten("prod.default", "prod.dim_int")
def prod(low: Lowering, x: Value, axes: Any = None, keepdim: bool = False, **_: Any) -> Value:
    return reduced(low, "prod", low.cast(x, low.out.dtype), axes, keepdim)


@aten("amax.default", "max.default")
def amax(low: Lowering, x: Value, axes: Any = None, keepdim: bool = False) -> Value:
    return reduced(low, "max", x, axes, keepdim)


@aten("amin.default", "min.default")
def amin(low: Lowering, x: Value, axes: Any = None, keepdim: bool = False) -> Value:
    return reduced(low, "min", x, axes, keepdim)


def _logical(name: str) -> Callable[..., Value]:
    def build(low: Lowering, x: Value, axes: Any = None, keepdim: bool = False) -> Value:
        if x.shape.dtype.kind != "bool":
            x = low.g.ne(x, low.scalar(0, x.shape.dtype))
        return reduced(low, name, x, axes, keepdim)

    return build


for _name in ("any", "all"):
    aten(f"{_name}.default", f"{_name}.dim", f"{_name}.dims")(_logical(_name))


def _arg(name: str) -> Callable[..., Value]:
    def build(low: Lowering, x: Value, axis: int | None = None, keepdim: bool = False) -> Value:
        if axis is None:
            flat = low.reshape(x, (x.shape.num_elements,))
            return low.reshape(low.g.apply(name, flat, axis=0), low.out.dims)
        if x.shape.rank == 0:
            return low.full(0, low.out)
        made: Value = low.g.apply(name, x, axis=axis % x.shape.rank, keepdims=bool(keepdim))
        return made

    return build


aten("argmax.default")(_arg("argmax"))
aten("argmin.default")(_arg("argmin"))


def _extremum(op: str, arg: str) -> Callable[..., tuple[Value, Value]]:
    def build(low: Lowering, x: Value, axis: int, keepdim: bool = False) -> tuple[Value, Value]:
        at = axis % x.shape.rank
        found: Value = low.g.apply(arg, x, axis=at, keepdims=bool(keepdim))
        return reduced(low, op, x, at, keepdim), low.cast(found, i64)

    return build


aten("max.dim")(_extremum("max", "argmax"))
aten("min.dim")(_extremum("min", "argmin"))


def _count(low: Lowering, x: Value, axes: Sequence[int]) -> Dim:
    total: Dim = 1
    for a in axes:
        total = total * x.shape.dims[a]
    return total


def variance(
    low: Lowering, x: Value, axes: Any, correction: Any, keepdim: bool
) -> tuple[Value, Value]:
    """Variance and mean, in f32 at least."""
    g, found = low.g, axes_of(x, axes)
    wide = low.cast(x, f64 if x.shape.dtype is f64 else f32)
    middle = g.mean(wide, axis=found, keepdims=True)
    total = g.sum(g.square(g.sub(wide, middle)), axis=found, keepdims=bool(keepdim))
    number = low.scalar(_count(low, x, found), wide.shape.dtype)
    free = g.maximum(g.sub(number, low.scalar(correction, wide.shape.dtype)), 0.0)
    dims = middle.shape.dims
    kept = dims if keepdim else tuple([d for i, d in enumerate(dims) if i not in found])
    return g.div(total, free), low.reshape(middle, kept)


@aten("var.correction")
def var(
    low: Lowering, x: Value, axes: Any = None, correction: Any = 1, keepdim: bool = False
) -> Value:
    return variance(low, x, axes, 1 if correction is None else correction, keepdim)[0]


@aten("std.correction")
def std(
    low: Lowering, x: Value, axes: Any = None, correction: Any = 1, keepdim: bool = False
) -> Value:
    return low.g.sqrt(var(low, x, axes, correction, keepdim))


@aten("var_mean.correction")
def var_mean(
    low: Lowering, x: Value, axes: Any = None, correction: Any = 1, keepdim: bool = False
) -> tuple[Value, Value]:
    return variance(low, x, axes, 1 if correction is None else correction, keepdim)


@aten("linalg_vector_norm.default")
def vector_norm(
    low: Lowering, x: Value, order: Any = 2, axes: Any = None, keepdim: bool = False, **_: Any
) -> Value:
    g, made = low.g, low.cast(x, low.out.dtype)
    if order == 2:
        return g.sqrt(reduced(low, "sum", g.square(made), axes, keepdim))
    size = g.abs(made)
    if order in (float("inf"), float("-inf")):
        return reduced(low, "max" if order > 0 else "min", size, axes, keepdim)
    if order == 1:
        return reduced(low, "sum", size, axes, keepdim)
    if order == 0:
        raise UnsupportedError("a norm of order 0", where="linalg_vector_norm", got=order)
    element = low.out.dtype
    total = reduced(low, "sum", g.pow(size, low.scalar(order, element)), axes, keepdim)
    return g.pow(total, low.scalar(1 / order, element))


@aten("logsumexp.default")
def logsumexp(low: Lowering, x: Value, axes: Any, keepdim: bool = False) -> Value:
    """The largest is taken out first; it counts as 0 where it is infinite."""
    g, found = low.g, axes_of(x, axes)
    top = g.max(x, axis=found, keepdims=True)
    safe = g.where(g.is_inf(top), low.scalar(0, x.shape.dtype), top)
    total = g.log(g.sum(g.exp(g.sub(x, safe)), axis=found, keepdims=True))
    return low.reshape(g.add(total, safe), low.out.dims)


@aten("_softmax.default", "softmax.int", "_safe_softmax.default")
def softmax(low: Lowering, x: Value, axis: int, *_: Any, **__: Any) -> Value:
    made = low.cast(x, low.out.dtype)
    if x.shape.rank == 0:
        return low.full(1, low.out)
    found = low.g.softmax(made, axis=axis)
    if "_safe_softmax" not in str(low.node.target):
        return found
    # a row that is masked altogether gives zeros
    nothing = low.g.eq(made, low.scalar(float("-inf"), made.shape.dtype))
    nothing = low.g.all(nothing, axis=(axis % x.shape.rank,), keepdims=True)
    return low.g.where(nothing, low.scalar(0, made.shape.dtype), found)


@aten("_log_softmax.default", "log_softmax.int")
def log_softmax(low: Lowering, x: Value, axis: int, *_: Any, **__: Any) -> Value:
    if x.shape.rank == 0:
        return low.full(0, low.out)
    return low.g.log_softmax(low.cast(x, low.out.dtype), axis=axis)


@aten("cumsum.default")
def cumsum(low: Lowering, x: Value, axis: int, **_: Any) -> Value:
    made = low.cast(x, low.out.dtype)
    return made if x.shape.rank == 0 else low.g.cumsum(made, axis=axis % x.shape.rank)


@aten("cumprod.default")
def cumprod(low: Lowering, x: Value, axis: int, **_: Any) -> Value:
    made = low.cast(x, low.out.dtype)
    return made if x.shape.rank == 0 else low.g.cumprod(made, axis=axis % x.shape.rank)


@aten("topk.default")
def topk(
    low: Lowering, x: Value, k: Any, axis: int = -1, largest: bool = True, ordered: bool = True
) -> tuple[Value, Value]:
    count = low.number(k, "topk")
    values, index = low.g.top_k(x, k=count, axis=axis % x.shape.rank, largest=bool(largest))
    return values, low.cast(index, i64)


@aten("sort.default", "sort.stable")
def sort(
    low: Lowering, x: Value, axis: int = -1, descending: bool = False, **named: Any
) -> tuple[Value, Value]:
    at, down = named.get("dim", axis) % x.shape.rank, named.get("descending", descending)
    index = low.g.argsort(x, axis=at, descending=bool(down))
    return low.g.take_along(x, index, axis=at), index


@aten("argsort.default", "argsort.stable")
def argsort(
    low: Lowering, x: Value, axis: int = -1, descending: bool = False, **named: Any
) -> Value:
    at, down = named.get("dim", axis) % x.shape.rank, named.get("descending", descending)
    return low.g.argsort(x, axis=at, descending=bool(down))
