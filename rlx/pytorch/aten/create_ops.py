"""Tensors that are made from nothing but numbers and sizes, and masks of triangles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlx.ir.dtype import f64, i64
from rlx.ir.node import Value
from rlx.pytorch.aten.table import aten

if TYPE_CHECKING:
    from rlx.pytorch.lower_aten import Lowering


@aten("full.default", "full_like.default", "new_full.default")
def full(low: Lowering, *arguments: Any, **_: Any) -> Value:
    return low.full(arguments[-1], low.out)


@aten("fill.Scalar", "fill.Tensor")
def fill(low: Lowering, x: Value, value: Any) -> Value:
    return low.expand(low.tensor(value, low.out.dtype), low.out.dims)


@aten(
    "zeros.default", "zeros_like.default", "new_zeros.default", "empty.memory_format",
    "empty_like.default", "new_empty.default", "empty_strided.default", "empty_permuted.default",
    "new_empty_strided.default", "zero.default",
)  # fmt: skip
def zeros(low: Lowering, *_: Any, **__: Any) -> Value:
    return low.full(0, low.out)


@aten("ones.default", "ones_like.default", "new_ones.default")
def ones(low: Lowering, *_: Any, **__: Any) -> Value:
    return low.full(1, low.out)


@aten("scalar_tensor.default")
def scalar_tensor(low: Lowering, value: Any, **_: Any) -> Value:
    return low.tensor(value, low.out.dtype)


@aten("arange.default", "arange.start", "arange.start_step")
def arange(low: Lowering, *arguments: Any, **_: Any) -> Value:
    """start + i · step, in i64 or f64 before it is rounded to the type of the result."""
    g = low.g
    given = [low.dim(a) if not isinstance(a, float) else a for a in arguments]
    start = given[0] if len(given) > 1 else 0
    step = given[2] if len(given) > 2 else 1
    if not isinstance(start, float) and step == 1 and low.out.dtype.kind != "bool":
        return g.iota(low.out.dims, dtype=low.out.dtype, start=start)
    wide = f64 if low.out.dtype.is_float or isinstance(step, float) else i64
    count = low.cast(g.iota(low.out.dims, dtype=i64), wide)
    made = g.add(g.mul(count, low.scalar(step, wide)), low.scalar(start, wide))
    return low.cast(made, low.out.dtype)


@aten("linspace.default")
def linspace(low: Lowering, start: Any, end: Any, steps: Any, **_: Any) -> Value:
    g, count = low.g, low.number(steps, "linspace")
    at = low.cast(g.iota((count,), dtype=i64), f64)
    made = g.add(g.mul(at, low.scalar((end - start) / max(count - 1, 1), f64)),
                 low.scalar(start, f64))  # fmt: skip
    return low.cast(made, low.out.dtype)


@aten("eye.default", "eye.m")
def eye(low: Lowering, *_: Any, **__: Any) -> Value:
    rows, columns = low.out.dims
    g = low.g
    same = g.eq(g.iota((rows, 1), dtype=i64), g.iota((1, columns), axis=1, dtype=i64))
    return low.cast(same, low.out.dtype)


def _kept(low: Lowering, x: Value, diagonal: int, lower: bool) -> Value:
    g = low.g
    rows, columns = x.shape.dims[-2:]
    at = g.add(g.iota((rows, 1), dtype=i64), diagonal)
    column = g.iota((1, columns), axis=1, dtype=i64)
    kept = g.le(column, at) if lower else g.ge(column, at)
    return g.where(kept, x, low.scalar(0, x.shape.dtype))


@aten("tril.default")
def tril(low: Lowering, x: Value, diagonal: int = 0) -> Value:
    return _kept(low, x, diagonal, True)


@aten("triu.default")
def triu(low: Lowering, x: Value, diagonal: int = 0) -> Value:
    return _kept(low, x, diagonal, False)
