"""Gather, scatter and iota.

Indices are in −n … n − 1; negative ones count from the end. The reference raises InputError for
others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.errors import AttributeValueError, DTypeError, InputError
from rlx.ir.dim import Dim, evaluate
from rlx.ir.dtype import DType, i32
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.ir.op import Array, Cost, Op, op
from rlx.ir.ops._common import (
    NUMERIC,
    REAL,
    quiet,
    require_dtype,
    require_integer,
    require_rank,
    require_same,
    rounded,
)
from rlx.ir.ops.control import make_body
from rlx.ir.shape import Shape, broadcast_dim, normalize_axis


def _checked(indices: Array, size: int, where: str) -> Array:
    """Indices as non-negative NumPy ones."""
    wrong = (indices < -size) | (indices >= size)
    if wrong.any():
        raise InputError(
            "index out of range", where=where, got=int(indices[wrong].flat[0]),
            expected=f"{-size} … {size - 1}",
        )  # fmt: skip
    wide = indices.astype(np.int64)
    return np.where(wide < 0, wide + size, wide)


class _Read(Op):
    """Only the elements that are read count, not the whole table."""

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        return Cost(0, inputs[1].size_bytes + outputs[0].size_bytes * 2)


@op("gather", group="layout")
class Gather(_Read):
    """Slices of x along an axis, at `indices`, whose dims replace the axis."""

    axis: int = 0

    def infer(self, x: Shape, indices: Shape) -> Shape:
        axis = normalize_axis(self.axis, x.rank)
        require_integer(indices, "indices")
        return x.with_dims((*x.dims[:axis], *indices.dims, *x.dims[axis + 1 :]))

    def reference(self, x: Array, indices: Array) -> Array:
        axis = normalize_axis(self.axis, x.ndim)
        return np.asarray(np.take(x, _checked(indices, x.shape[axis], self.name), axis))


@op("take_along", group="layout")
class TakeAlong(_Read):
    """One element per index along an axis; the other axes of x and `indices` broadcast."""

    axis: int = -1

    def infer(self, x: Shape, indices: Shape) -> Shape:
        axis = normalize_axis(self.axis, x.rank)
        require_integer(indices, "indices")
        require_rank(indices, x.rank, "indices")
        pairs = enumerate(zip(x.dims, indices.dims, strict=True))
        return x.with_dims([n if i == axis else broadcast_dim(d, n) for i, (d, n) in pairs])

    def reference(self, x: Array, indices: Array) -> Array:
        axis = normalize_axis(self.axis, x.ndim)
        return np.take_along_axis(x, _checked(indices, x.shape[axis], self.name), axis)


class _Write(Op):
    axis: int = 0

    def infer(self, x: Shape, indices: Shape, updates: Shape) -> Shape:
        axis = normalize_axis(self.axis, x.rank)
        require_integer(indices, "indices")
        require_rank(indices, 1, "indices")
        if updates.dtype is not x.dtype:
            raise DTypeError("updates of another type", got=updates.dtype, expected=x.dtype)
        require_rank(updates, x.rank, "updates")
        expected = [indices.dims[0] if i == axis else d for i, d in enumerate(x.dims)]
        for i, (found, wanted) in enumerate(zip(updates.dims, expected, strict=True)):
            require_same(found, wanted, f"updates, axis {i}")
        return x

    def rows(self, *tensors: Array) -> tuple[Array, ...]:
        """Views with the axis in front."""
        return tuple(np.moveaxis(t, self.axis, 0) for t in tensors)

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        return super().cost(inputs, outputs)._replace(flops=0)


@op("scatter", group="layout")
class Scatter(_Write):
    """x with its slices at `indices` [n] replaced by those of `updates`; the last of equal ones."""

    axis: int = 0

    def reference(self, x: Array, indices: Array, updates: Array) -> Array:
        result = np.array(x)
        to, source = self.rows(result, updates)
        to[_checked(indices, len(to), self.name)] = source
        return result


@op("scatter_add", group="layout")
class ScatterAdd(_Write):
    """x with the slices of `updates` added at `indices` [n]; equal indices add up."""

    axis: int = 0

    def infer(self, x: Shape, indices: Shape, updates: Shape) -> Shape:
        require_dtype(x, NUMERIC, "operand")
        return super().infer(x, indices, updates)

    def reference(self, x: Array, indices: Array, updates: Array) -> Array:
        element = DType.of(x.dtype)
        wide = {"float": np.float64, "complex": np.complex128}.get(element.kind, x.dtype)
        result = x.astype(wide)
        to, source = self.rows(result, updates)
        with quiet():
            np.add.at(to, _checked(indices, len(to), self.name), source.astype(wide))
        return rounded(result, element)

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        return super().cost(inputs, outputs)._replace(flops=inputs[2].num_elements)


_COMBINE = {"mul": np.multiply, "minimum": np.minimum, "maximum": np.maximum}


@op("scatter_reduce", group="layout")
class ScatterReduce(_Write):
    """x with its slices at `indices` [n] multiplied by those of `updates`, or the extremum of both

    `how` is mul, minimum or maximum. Equal indices take theirs in turn, and each result is rounded
    to the type of x.
    """

    axis: int = 0
    how: str = "mul"

    def check(self) -> None:
        if self.how not in _COMBINE:
            raise AttributeValueError(
                "not a way to combine slices", where=f"{self.name}.how", got=repr(self.how),
                expected=", ".join(_COMBINE), hint="scatter_add adds, scatter replaces",
            )  # fmt: skip

    def infer(self, x: Shape, indices: Shape, updates: Shape) -> Shape:
        require_dtype(x, NUMERIC if self.how == "mul" else REAL, "operand")
        return super().infer(x, indices, updates)

    def reference(self, x: Array, indices: Array, updates: Array) -> Array:
        result = np.array(x)
        to, source = self.rows(result, updates)
        with quiet():
            _COMBINE[self.how].at(to, _checked(indices, len(to), self.name), source)
        return result

    def decompose(self, g: Graph, x: Value, indices: Value, updates: Value) -> Any:
        """A scan over the indices: a slice is read, combined and written back."""
        axis = normalize_axis(self.axis, x.shape.rank)
        one = x.shape.with_dims([1 if a == axis else d for a, d in enumerate(x.shape.dims)])
        dims = [d for a, d in enumerate(x.shape.dims) if a != axis]

        def step(b: Graph, kept: Value, index: Value, update: Value) -> list[Value]:
            at = b.reshape(index, shape=(1,))
            slices = b.gather(kept, at, axis=axis), b.reshape(update, shape=one.dims)
            return [b.scatter(kept, at, b.apply(self.how, *slices), axis=axis)]

        shapes = x.shape, Shape((), indices.shape.dtype), x.shape.with_dims(dims)
        body = make_body(step, *shapes, name="scatter_reduce_step")
        front = (axis, *[a for a in range(x.shape.rank) if a != axis])
        rows = g.transpose(updates, axes=front)
        return g.scan(x, indices, rows, body=body, n_carry=1, n_xs=2)

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        return super().cost(inputs, outputs)._replace(flops=inputs[2].num_elements)


@op("iota", group="layout")
class Iota(Op):
    """start, start + 1, … along one axis of `shape`, the same on all others."""

    shape: tuple[Dim, ...]
    axis: int = 0
    dtype: DType = i32
    start: Dim = 0

    def infer(self) -> Shape:
        normalize_axis(self.axis, len(self.shape))
        shape = Shape(self.shape, self.dtype)
        require_dtype(shape, REAL, "counting")
        return shape

    def reference(self) -> Array:
        dims = tuple(evaluate(d, {}) for d in self.shape)
        axis = normalize_axis(self.axis, len(dims))
        count = np.arange(dims[axis]) + evaluate(self.start, {})
        along = [-1 if i == axis else 1 for i in range(len(dims))]
        return np.array(np.broadcast_to(rounded(count, self.dtype).reshape(along), dims))


@op("dim_value", group="layout")
class DimValue(Op):
    """The size that a dimension has in this run, as a scalar."""

    dim: Dim
    dtype: DType = i32

    def infer(self) -> Shape:
        shape = Shape((), self.dtype)
        require_dtype(shape, REAL, "a size")
        return shape

    def reference(self) -> Array:
        return rounded(evaluate(self.dim, {}), self.dtype)
