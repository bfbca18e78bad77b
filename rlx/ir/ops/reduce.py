"""Reductions, softmax, cumulative sum and top-k.

Floats are accumulated in f64 and rounded once, integers wrap in their own type; sums of bools are
counts in i32. NaN wins every comparison: it is the maximum and the minimum, and comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rlx.errors import AttributeValueError, ShapeError
from rlx.ir.dim import Dim
from rlx.ir.dtype import DType, bool_, f32, i32
from rlx.ir.op import Array, Cost, Op, op
from rlx.ir.ops._common import (
    ANY,
    REAL,
    as_real,
    cast,
    compute,
    normalize_axes,
    quiet,
    real_type,
    require_dtype,
    rounded,
    size_value,
    wide,
)
from rlx.ir.ops.control import make_body
from rlx.ir.shape import Shape, normalize_axis

if TYPE_CHECKING:
    from rlx.ir.graph import Graph
    from rlx.ir.node import Value


def _wide(x: Array) -> Array:
    """`x` in its accumulator type."""
    kind = DType.of(x.dtype).kind
    if kind == "complex":
        return x.astype(np.complex128)
    return x.astype(np.float64) if kind == "float" else x


def _remaining(dims: Sequence[Dim], axes: Sequence[int], keepdims: bool) -> list[Dim]:
    if keepdims:
        return [1 if i in axes else d for i, d in enumerate(dims)]
    return [d for i, d in enumerate(dims) if i not in axes]


def _require_elements(dims: Sequence[Any], axes: Sequence[int]) -> None:
    if any(dims[a] == 0 for a in axes):
        raise ShapeError(
            "nothing to choose from along an empty axis", got=list(dims),
            expected="at least one element", hint="sum, prod, any and all take empty axes",
        )  # fmt: skip


class _PerInput(Op):
    """One operation per operand element."""

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        plain = super().cost(inputs, outputs)
        return plain._replace(flops=inputs[0].num_elements)


class Reduction(_PerInput):
    """Reduces axes, which are removed, or kept as size 1 with `keepdims`."""

    is_reduction = True
    takes: ClassVar[Sequence[str]] = REAL
    needs_elements: ClassVar[bool] = False
    axis: tuple[int, ...] | None = None
    keepdims: bool = False

    def reduce(self, x: Array, **how: Any) -> Array:
        """The NumPy reduction; `how` is axis and keepdims."""
        raise NotImplementedError

    def result(self, element: DType) -> DType:
        return element

    def infer(self, x: Shape) -> Shape:
        require_dtype(x, self.takes, "operand")
        axes = normalize_axes(self.axis, x.rank)
        if self.needs_elements:
            _require_elements(x.dims, axes)
        return Shape(_remaining(x.dims, axes, self.keepdims), self.result(x.dtype))

    def reference(self, x: Array) -> Array:
        axes = normalize_axes(self.axis, x.ndim)
        if self.needs_elements:
            _require_elements(x.shape, axes)
        with quiet():
            reduced = self.reduce(x, axis=axes, keepdims=self.keepdims)
            return rounded(reduced, self.result(DType.of(x.dtype)))


class _Accumulation(Reduction):
    takes = ANY

    def result(self, element: DType) -> DType:
        return i32 if element is bool_ else element


@op("sum")
class Sum(_Accumulation):
    """The sum of the elements; 0 of none. Of bools: how many are true."""

    axis: tuple[int, ...] | None = None
    keepdims: bool = False

    def reduce(self, x: Array, **how: Any) -> Array:
        wide = _wide(x)
        return np.sum(wide, dtype=_sum_type(wide), **how)


@op("prod")
class Prod(_Accumulation):
    """The product of the elements; 1 of none."""

    axis: tuple[int, ...] | None = None
    keepdims: bool = False

    def reduce(self, x: Array, **how: Any) -> Array:
        wide = _wide(x)
        return np.prod(wide, dtype=_sum_type(wide), **how)


def _sum_type(x: Array) -> Any:
    return np.int32 if x.dtype == np.bool_ else x.dtype  # NumPy would widen integers


@op("mean")
class Mean(Reduction):
    """The sum over the number of elements; NaN of none. Integers give f32."""

    takes = ANY
    axis: tuple[int, ...] | None = None
    keepdims: bool = False

    def result(self, element: DType) -> DType:
        return element if element.kind in ("float", "complex") else f32

    def reduce(self, x: Array, **how: Any) -> Array:
        wide = _wide(x) if x.dtype.kind == "c" else x.astype(np.float64)
        count = np.prod([x.shape[a] for a in how["axis"]], dtype=np.float64)
        return np.sum(wide, **how) / count  # np.mean warns of an empty axis

    def decompose(self, g: Graph, x: Value) -> Any:
        if x.shape.dtype.kind == "complex":
            return g.complex(*[g.append(self, [part]) for part in (g.real(x), g.imag(x))])
        dims = [x.shape.dims[a] for a in normalize_axes(self.axis, x.shape.rank)]
        total = g.sum(as_real(g, x), axis=self.axis, keepdims=self.keepdims)
        count = size_value(g, x.shape.with_dims(dims).num_elements, total)
        return cast(g, g.div(total, count), self.result(x.shape.dtype))


@op("max")
class Max(Reduction):
    """The greatest element; NaN if there is one."""

    needs_elements = True
    axis: tuple[int, ...] | None = None
    keepdims: bool = False

    def reduce(self, x: Array, **how: Any) -> Array:
        return np.max(compute(x), **how)


@op("min")
class Min(Reduction):
    """The least element; NaN if there is one."""

    needs_elements = True
    axis: tuple[int, ...] | None = None
    keepdims: bool = False

    def reduce(self, x: Array, **how: Any) -> Array:
        return np.min(compute(x), **how)


class _Quantifier(Reduction):
    takes = ANY

    def result(self, element: DType) -> DType:
        return bool_


@op("any")
class Any_(_Quantifier):
    """Whether one element is not zero; false of none."""

    axis: tuple[int, ...] | None = None
    keepdims: bool = False

    def reduce(self, x: Array, **how: Any) -> Array:
        return np.any(compute(x) != 0, **how)


@op("all")
class All(_Quantifier):
    """Whether no element is zero; true of none."""

    axis: tuple[int, ...] | None = None
    keepdims: bool = False

    def reduce(self, x: Array, **how: Any) -> Array:
        return np.all(compute(x) != 0, **how)


# -- argmax and argmin ------------------------------------------------------------------------


class _Position(_PerInput):
    axis: int = -1
    keepdims: bool = False

    def locate(self, x: Array, axis: int, keepdims: bool) -> Array:
        raise NotImplementedError

    def infer(self, x: Shape) -> Shape:
        require_dtype(x, (*REAL, "bool"), "operand")
        axes = [normalize_axis(self.axis, x.rank)]
        _require_elements(x.dims, axes)
        return Shape(_remaining(x.dims, axes, self.keepdims), i32)

    def reference(self, x: Array) -> Array:
        axis = normalize_axis(self.axis, x.ndim)
        _require_elements(x.shape, [axis])
        return rounded(self.locate(compute(x), axis, self.keepdims), i32)


@op("argmax")
class ArgMax(_Position):
    """The index of the greatest element, or of the first NaN; the lowest of equal ones."""

    axis: int = -1
    keepdims: bool = False

    def locate(self, x: Array, axis: int, keepdims: bool) -> Array:
        return np.argmax(x, axis, keepdims=keepdims)


@op("argmin")
class ArgMin(_Position):
    """The index of the least element, or of the first NaN; the lowest of equal ones."""

    axis: int = -1
    keepdims: bool = False

    def locate(self, x: Array, axis: int, keepdims: bool) -> Array:
        return np.argmin(x, axis, keepdims=keepdims)


# -- along one axis, dims unchanged -----------------------------------------------------------


class _Normalised(Op):
    runs_as_region = True
    axis: int = -1

    def infer(self, x: Shape) -> Shape:
        require_dtype(x, (*REAL, "bool"), "operand")
        normalize_axis(self.axis, x.rank)
        return x if x.dtype.is_float else x.with_dtype(f32)

    def shifted(self, x: Array) -> tuple[Array, Array]:
        """x − max along the axis, so that exp cannot overflow; and the sum of its exp."""
        wide = x.astype(np.float64)
        low = wide - np.max(wide, self.axis, keepdims=True, initial=-np.inf)
        return low, np.sum(np.exp(low), self.axis, keepdims=True)

    def shifted_value(self, g: Graph, x: Value) -> Any:
        """x − max along the axis, as a value."""
        real = as_real(g, x)
        return g.sub(real, g.max(real, axis=(self.axis,), keepdims=True))

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        plain = super().cost(inputs, outputs)
        return plain._replace(flops=plain.flops * 12)  # max, subtract, exp, sum, scale


@op("softmax")
class Softmax(_Normalised):
    """e^x over its sum along the axis; NaN where every element is −inf."""

    axis: int = -1

    def reference(self, x: Array) -> Array:
        with quiet():
            low, total = self.shifted(x)
            return rounded(np.exp(low) / total, self.infer(Shape(x.shape, x.dtype)).dtype)

    def decompose(self, g: Graph, x: Value) -> Any:
        e = g.exp(self.shifted_value(g, x))
        # one division per row: the sum is at least 1, so its reciprocal is as accurate
        share = g.reciprocal(g.sum(e, axis=(self.axis,), keepdims=True))
        return cast(g, g.mul(e, share), real_type(x.shape.dtype))


@op("log_softmax")
class LogSoftmax(_Normalised):
    """x minus the logarithm of the sum of e^x along the axis."""

    axis: int = -1

    def reference(self, x: Array) -> Array:
        with quiet():
            low, total = self.shifted(x)
            return rounded(low - np.log(total), self.infer(Shape(x.shape, x.dtype)).dtype)

    def decompose(self, g: Graph, x: Value) -> Any:
        low = self.shifted_value(g, x)
        total = g.sum(g.exp(low), axis=(self.axis,), keepdims=True)
        return cast(g, g.sub(low, g.log(total)), real_type(x.shape.dtype))


class _Cumulative(Op):
    """Each element replaced by the sum or product up to it."""

    axis: int = -1
    exclusive: bool = False
    reverse: bool = False
    identity: ClassVar[int] = 0
    joins: ClassVar[str] = "add"

    def infer(self, x: Shape) -> Shape:
        require_dtype(x, ANY, "operand")
        normalize_axis(self.axis, x.rank)
        return x.with_dtype(i32) if x.dtype is bool_ else x

    def reference(self, x: Array) -> Array:
        element = i32 if x.dtype == np.bool_ else DType.of(x.dtype)
        wide = np.moveaxis(_wide(x), self.axis, -1)
        if self.reverse:
            wide = wide[..., ::-1]
        with quiet():
            accumulate = np.multiply.accumulate if self.identity else np.add.accumulate
            total = accumulate(wide, -1, dtype=_sum_type(wide))
        if self.exclusive:
            # shifted sums, not total − x, which is inf − inf after an infinity
            start = np.full_like(total[..., :1], self.identity)
            total = np.concatenate([start, total[..., :-1]], -1)
        if self.reverse:
            total = total[..., ::-1]
        return rounded(np.moveaxis(total, -1, self.axis), element)

    def decompose(self, g: Graph, x: Value) -> Any:
        """A scan along the axis that carries the sum."""
        if x.shape.dtype.kind == "complex" and self.joins == "add":
            return g.complex(*[g.append(self, [part]) for part in (g.real(x), g.imag(x))])
        result = i32 if x.shape.dtype is bool_ else x.shape.dtype
        x = wide(g, cast(g, x, result))
        rank = x.shape.rank
        axis = normalize_axis(self.axis, rank)
        perm = (axis, *(i for i in range(rank) if i != axis))
        rows = g.transpose(x, axes=perm)
        row = rows.shape.with_dims(rows.shape.dims[1:])
        start = g.expand(g.constant(self.identity, row.dtype), shape=row.dims)

        def step(b: Graph, total: Value, part: Value) -> list[Value]:
            new = b.apply(self.joins, total, part)
            return [new, total if self.exclusive else new]

        body = make_body(step, row, row, name=f"{self.name}_step")
        _, sums = g.scan(start, rows, body=body, n_carry=1, n_xs=1, reverse=self.reverse)
        back = tuple(perm.index(i) for i in range(rank))
        return cast(g, g.transpose(sums, axes=back), result)


@op("cumsum")
class CumSum(_Cumulative):
    """Each element replaced by the sum up to it.

    `exclusive` leaves the element itself out; `reverse` sums from the end.
    """

    axis: int = -1
    exclusive: bool = False
    reverse: bool = False


@op("cumprod")
class CumProd(_Cumulative):
    """Each element replaced by the product up to it; `exclusive` and `reverse` as in cumsum."""

    axis: int = -1
    exclusive: bool = False
    reverse: bool = False
    identity: ClassVar[int] = 1
    joins: ClassVar[str] = "mul"


@op("top_k", is_choice=True)
class TopK(_PerInput):
    """The k greatest (or least) elements along an axis in order, and their indices (i32).

    Equal elements come by index, lowest first; NaNs come before all others.
    """

    k: int
    axis: int = -1
    largest: bool = True

    def check(self) -> None:
        if self.k < 1:
            raise AttributeValueError("k must be at least 1", where=self.name, got=self.k)

    def infer(self, x: Shape) -> tuple[Shape, Shape]:
        require_dtype(x, (*REAL, "bool"), "operand")
        axis = normalize_axis(self.axis, x.rank)
        self._require_enough(x.dims[axis])
        dims = [self.k if i == axis else d for i, d in enumerate(x.dims)]
        return x.with_dims(dims), Shape(dims, i32)

    def _require_enough(self, size: Dim) -> None:
        if isinstance(size, int) and size < self.k:
            raise ShapeError(
                "fewer elements than k", where=self.name, got=size, expected=f"at least {self.k}"
            )

    def reference(self, x: Array) -> tuple[Array, Array]:
        values = np.moveaxis(x, self.axis, -1)
        size = values.shape[-1]
        self._require_enough(size)
        keys = compute(values)
        if self.largest:
            # a stable ascending sort of the mirrored row, mirrored again: equal ones keep order
            order = (size - 1 - np.argsort(keys[..., ::-1], -1, kind="stable"))[..., ::-1]
        else:
            order = np.lexsort((keys, keys == keys), axis=-1)  # only NaN differs from itself
        order = order[..., : self.k]
        best = np.take_along_axis(values, order, -1)
        return np.moveaxis(best, -1, self.axis), np.moveaxis(rounded(order, i32), -1, self.axis)
