"""Matmuls. Weights are [K, N]; accumulators are f32 (f64 for f64), integers wrap."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.errors import AttributeValueError, ShapeError
from rlx.ir.dim import Dim
from rlx.ir.dtype import DType, promote
from rlx.ir.op import Array, Cost, Op, op
from rlx.ir.ops._common import (
    NUMERIC,
    cast,
    quiet,
    require_dtype,
    require_float,
    require_indices,
    require_integer,
    require_rank,
    require_same,
    result_type,
    rounded,
    traffic,
    wide,
)
from rlx.ir.ops.composite import Composite
from rlx.ir.shape import Shape, broadcast_dims, normalize_axis

if TYPE_CHECKING:
    from rlx.ir.graph import Graph
    from rlx.ir.node import Value


def accumulator(result: DType) -> Any:
    """The accumulator type of a matmul with that result type."""
    return np.float32 if result.is_float and result.bytes < 4 else result.numpy


def widened(result: DType, *arrays: Array) -> tuple[Array, ...]:
    """`arrays` in the accumulator type of a matmul with that result type."""
    wide = accumulator(result)
    return tuple(np.asarray(a).astype(wide, copy=False) for a in arrays)


def matmul_cost(inputs: Sequence[Shape], outputs: Sequence[Shape], terms: Dim) -> Cost:
    """A multiply and an add for each of `terms` terms of each output element."""
    return Cost(outputs[0].num_elements * terms * 2, traffic(inputs, outputs))


def grouped_cost(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
    """`matmul_cost` of (x [T, K], w [E, …], …); T < E tokens read at most T experts."""
    x, w = inputs[:2]
    cost = matmul_cost(inputs, outputs, x.dims[1])
    tokens, experts = x.dims[0], w.dims[0]
    if not isinstance(experts, int) or not isinstance(tokens, int) or tokens >= experts:
        return cost
    unread = w.with_dims((experts - tokens, *w.dims[1:])).size_bytes
    return Cost(cost.flops, cost.bytes - unread)


def matmul_shape(a: Shape, b: Shape) -> Shape:
    """The result of a matmul by NumPy's rules."""
    for shape, what in ((a, "a"), (b, "b")):
        require_dtype(shape, NUMERIC, what)
        if shape.rank == 0:
            raise ShapeError(
                f"{what} is a scalar", got=shape, expected="rank 1 or more", hint="use mul"
            )
    inner = b.dims[-2] if b.rank > 1 else b.dims[0]
    require_same(a.dims[-1], inner, f"contracted sizes of {a} and {b}")
    dims = (*broadcast_dims(a.dims[:-2], b.dims[:-2]), *a.dims[-2:-1])
    if b.rank > 1:
        dims = (*dims, b.dims[-1])
    return Shape(dims, result_type(a, b))


@op("matmul", is_anchor=True, runs_in_low_precision=True)
class MatMul(Op):
    """a · b by NumPy's rules: batch axes broadcast, a 1-D operand is a row or a column."""

    def infer(self, a: Shape, b: Shape) -> Shape:
        return matmul_shape(a, b)

    def reference(self, a: Array, b: Array) -> Array:
        dtype = promote(DType.of(a.dtype), DType.of(b.dtype))
        with quiet():
            return rounded(np.matmul(*widened(dtype, a, b)), dtype)

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        return matmul_cost(inputs, outputs, inputs[0].dims[-1])


@op("dot_general", is_anchor=True, runs_in_low_precision=True)
class DotGeneral(Composite):
    """Sums over pairs of contracted axes; batch axes come first, then the free ones of a, of b."""

    lhs_contract: tuple[int, ...]
    rhs_contract: tuple[int, ...]
    lhs_batch: tuple[int, ...] = ()
    rhs_batch: tuple[int, ...] = ()

    def check(self) -> None:
        for role in ("contract", "batch"):
            left, right = getattr(self, f"lhs_{role}"), getattr(self, f"rhs_{role}")
            if len(left) != len(right):
                raise AttributeValueError(
                    f"{role} axes of the two operands differ in number",
                    where=self.name, got=f"{left} and {right}",
                    hint="axes are paired by position",
                )  # fmt: skip

    def infer(self, a: Shape, b: Shape) -> Shape:
        require_dtype(a, NUMERIC, "a")
        require_dtype(b, NUMERIC, "b")
        left, right = self.axes(a.rank, b.rank)
        for part, role in enumerate(("batch", "contracted")):
            for i, j in zip(left[part], right[part], strict=True):
                require_same(a.dims[i], b.dims[j], f"{role} axes {i} of {a} and {j} of {b}")
        dims = [a.dims[i] for i in (*left[0], *left[2])] + [b.dims[j] for j in right[2]]
        return Shape(dims, result_type(a, b))

    def axes(self, a_rank: int, b_rank: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Per operand its (batch, contracted, free) axes, all non-negative."""
        return (
            _split_axes(self.lhs_batch, self.lhs_contract, a_rank, "lhs"),
            _split_axes(self.rhs_batch, self.rhs_contract, b_rank, "rhs"),
        )

    def decompose(self, g: Graph, a: Value, b: Value) -> Any:
        """Transposed and reshaped to one batched matmul."""
        left, right = self.axes(a.shape.rank, b.shape.rank)
        (batch, contract, free), (b_batch, b_contract, b_free) = left, right
        sizes = [a.shape.dims[i] for i in batch]
        rows, columns = [a.shape.dims[i] for i in free], [b.shape.dims[j] for j in b_free]
        terms = a.shape.with_dims([a.shape.dims[i] for i in contract]).num_elements
        lhs = g.transpose(a, axes=batch + free + contract)
        lhs = g.reshape(lhs, shape=(*sizes, a.shape.with_dims(rows).num_elements, terms))
        rhs = g.transpose(b, axes=b_batch + b_contract + b_free)
        rhs = g.reshape(rhs, shape=(*sizes, terms, b.shape.with_dims(columns).num_elements))
        return g.reshape(g.matmul(lhs, rhs), shape=(*sizes, *rows, *columns))

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        _, contract, _ = self.axes(inputs[0].rank, inputs[1].rank)[0]
        terms: Dim = prod([inputs[0].dims[i] for i in contract], start=1)
        return matmul_cost(inputs, outputs, terms)


def _split_axes(
    batch: tuple[int, ...], contract: tuple[int, ...], rank: int, side: str
) -> tuple[tuple[int, ...], ...]:
    first = tuple(normalize_axis(i, rank, f"{side}_batch") for i in batch)
    second = tuple(normalize_axis(i, rank, f"{side}_contract") for i in contract)
    taken = first + second
    if len(set(taken)) != len(taken):
        raise ShapeError(
            f"an axis of {side} is named twice", got=f"batch {batch}, contract {contract}",
            expected="every axis at most once",
        )  # fmt: skip
    return first, second, tuple(i for i in range(rank) if i not in taken)


@op("lora_matmul", is_anchor=True, runs_in_low_precision=True, holds_weights=True)
class LoraMatMul(Composite):
    """x·w + scale · (x·a)·b: a weight [K, N] with a LoRA adapter a [K, R], b [R, N]."""

    scale: float = 1.0

    def infer(self, x: Shape, w: Shape, a: Shape, b: Shape) -> Shape:
        for shape, what in ((x, "x"), (w, "w"), (a, "a"), (b, "b")):
            require_float(shape, what)
            if what != "x":
                require_rank(shape, 2, what)
        if x.rank == 0:
            raise ShapeError("x is a scalar", got=x, expected="[..., K]")
        require_same(x.dims[-1], w.dims[0], "columns of x against rows of w")
        require_same(a.dims[0], w.dims[0], "rows of a against rows of w")
        require_same(b.dims[0], a.dims[1], "rows of b against columns of a")
        require_same(b.dims[1], w.dims[1], "columns of b against columns of w")
        return Shape((*x.dims[:-1], w.dims[1]), result_type(x, w, a, b))

    def decompose(self, g: Graph, x: Value, w: Value, a: Value, b: Value) -> Any:
        result = result_type(x, w, a, b)
        x, w, a, b = (wide(g, v) for v in (x, w, a, b))
        adapter = g.mul(g.matmul(g.matmul(x, a), b), self.scale)
        return cast(g, g.add(g.matmul(x, w), adapter), result)


def row_matmul(g: Graph, x: Value, weights: Value) -> Any:
    """x [T, K] with weights [T, K, N], row by row."""
    tokens, k = x.shape.dims
    rows = g.matmul(g.reshape(x, shape=(tokens, 1, k)), weights)
    return g.reshape(rows, shape=(tokens, weights.shape.dims[2]))


@op("grouped_matmul", is_anchor=True, runs_in_low_precision=True)
class GroupedMatMul(Op):
    """Row t of x [T, K] times the weight of its expert: w [E, K, N], expert [T] -> [T, N]."""

    def infer(self, x: Shape, w: Shape, expert: Shape) -> Shape:
        require_dtype(x, NUMERIC, "x")
        require_dtype(w, NUMERIC, "w")
        require_rank(x, 2, "x")
        require_rank(w, 3, "w")
        require_routes(expert, x.dims[0])
        require_same(x.dims[1], w.dims[1], "columns of x against rows of each expert of w")
        return Shape((x.dims[0], w.dims[2]), result_type(x, w))

    def reference(self, x: Array, w: Array, expert: Array) -> Array:
        dtype = promote(DType.of(x.dtype), DType.of(w.dtype))
        require_indices(expert, w.shape[0], "expert")
        (x,) = widened(dtype, x)
        out = np.zeros((x.shape[0], w.shape[2]), x.dtype)
        with quiet():
            for e in np.unique(expert):
                rows = expert == e
                out[rows] = x[rows] @ w[e].astype(x.dtype, copy=False)
        return rounded(out, dtype)

    def decompose(self, g: Graph, x: Value, w: Value, expert: Value) -> Any:
        """Gather the weight of each row's expert, then multiply row by row."""
        return row_matmul(g, x, g.gather(w, expert, axis=0))

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        return grouped_cost(inputs, outputs)


def require_routes(expert: Shape, tokens: Dim | None = None) -> None:
    """`expert` holds one expert number for each of `tokens` rows."""
    require_integer(expert, "expert")
    require_rank(expert, 1, "expert")
    if tokens is not None:
        require_same(expert.dims[0], tokens, "entries of expert against rows of x")
