"""Matmuls with and lookups in quantised weights, which stay packed.

A packed weight is out-major, [N, row] (`ir.quant.scheme`): N output channels, each a row of blocks
along the K inputs. `scale` and `zp` are operands where the scheme keeps them beside the blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.errors import DTypeError, ShapeError
from rlx.ir.dim import Dim, same
from rlx.ir.dtype import DType, f32, i32
from rlx.ir.op import Array, Cost, Op, op
from rlx.ir.ops._common import (
    cast,
    quiet,
    require_float,
    require_indices,
    require_integer,
    require_rank,
    require_same,
    rounded,
)
from rlx.ir.ops.matmul import grouped_cost, matmul_cost, require_routes, row_matmul, widened
from rlx.ir.quant.scheme import QuantScheme, decode
from rlx.ir.shape import Shape

if TYPE_CHECKING:
    from rlx.ir.graph import Graph
    from rlx.ir.node import Value


def packed_columns(scheme: QuantScheme, w: Shape, scale: Shape | None, zp: Shape | None) -> int:
    """Check the parts of a packed weight [..., N, row]; returns K."""
    _require_type(scheme, "w", w, scheme.packed_dtype)
    row = w.dims[-1]
    if not isinstance(row, int):
        raise ShapeError("rows of a packed weight have a fixed size", got=w, expected="[..., int]")
    k = scheme.row_elements(row)
    groups = (*w.dims[:-1], k // scheme.block if scheme.block else 1)
    _require_side(scheme, "scale", scale, groups, "f32" if scheme.has_scale else None)
    _require_side(scheme, "zp", zp, groups, scheme.zero_point_dtype)
    return k


def _require_type(scheme: QuantScheme, what: str, shape: Shape, expected: str) -> None:
    if shape.dtype.name != expected:
        raise DTypeError(
            f"{what} of a {scheme} weight has the wrong element type", got=shape, expected=expected
        )


def _require_side(
    scheme: QuantScheme, what: str, given: Shape | None, dims: tuple[Dim, ...], dtype: str | None
) -> None:
    shown = f"[{', '.join(map(str, dims))}] {dtype}"
    if dtype is None or given is None:
        if dtype is None and given is None:
            return
        raise ShapeError(
            f"{scheme} weights {'have no' if dtype is None else 'need a'} separate {what}",
            got=given or "none", expected=None if dtype is None else shown,
        )  # fmt: skip
    _require_type(scheme, what, given, dtype)
    if given.rank != len(dims) or not all(map(same, given.dims, dims)):
        per = f"{scheme.block} columns" if scheme.block else "row"
        raise ShapeError(
            f"{what} does not fit the packed weight", got=given, expected=shown,
            hint=f"{scheme} has one entry per {per}",
        )  # fmt: skip


def _decode_at(
    scheme: QuantScheme, index: Array, w: Array, scale: Array | None, zp: Array | None
) -> Array:
    """`decode` of the rows or experts at `index` alone."""
    scale, zp = (None if t is None else t[index] for t in (scale, zp))
    return decode(scheme, w[index], scale, zp)


@op("dequant_matmul", group="matmul", is_anchor=True, runs_in_low_precision=True)
class DequantMatMul(Op):
    """x [..., K] · dequant(w)ᵀ with w packed [N, row]; the result has the element type of x."""

    scheme: QuantScheme

    def infer(
        self, x: Shape, w: Shape, scale: Shape | None = None, zp: Shape | None = None
    ) -> Shape:
        require_float(x, "x")
        require_rank(w, 2, "w")
        if x.rank == 0:
            raise ShapeError("x is a scalar", got=x, expected="[..., K]")
        k = packed_columns(self.scheme, w, scale, zp)
        require_same(x.dims[-1], k, f"columns of x against the weights in a {self.scheme} row")
        return Shape((*x.dims[:-1], w.dims[0]), x.dtype)

    def reference(
        self, x: Array, w: Array, scale: Array | None = None, zp: Array | None = None
    ) -> Array:
        dtype = DType.of(x.dtype)
        with quiet():
            wide, weights = widened(dtype, x, decode(self.scheme, w, scale, zp))
            return rounded(wide @ weights.T, dtype)

    def decompose(self, g: Graph, x: Value, *packed: Value) -> Any:
        """The weight as the only expert, unpacked to [K, N]."""
        parts = [g.reshape(p, shape=(1, *p.shape.dims)) for p in packed]
        first = g.constant([0], i32)
        weights = g.dequant_moe_weights(parts[0], first, *parts[1:], scheme=self.scheme)
        weight = g.reshape(weights, shape=weights.shape.dims[1:])
        return cast(g, g.matmul(_computed(g, x), weight), x.shape.dtype)

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        return matmul_cost(inputs, outputs, inputs[0].dims[-1])


@op("dequant_matmul_transposed", group="matmul", is_anchor=True)
class DequantMatMulTransposed(Op):
    """x [..., N] · dequant(w) with w packed [N, row]: `dequant_matmul` transposed, as its backward
    part needs it."""

    scheme: QuantScheme

    def infer(
        self, x: Shape, w: Shape, scale: Shape | None = None, zp: Shape | None = None
    ) -> Shape:
        require_float(x, "x")
        require_rank(w, 2, "w")
        if x.rank == 0:
            raise ShapeError("x is a scalar", got=x, expected="[..., N]")
        k = packed_columns(self.scheme, w, scale, zp)
        require_same(x.dims[-1], w.dims[0], "columns of x against the packed rows")
        return Shape((*x.dims[:-1], k), x.dtype)

    def reference(
        self, x: Array, w: Array, scale: Array | None = None, zp: Array | None = None
    ) -> Array:
        dtype = DType.of(x.dtype)
        with quiet():
            wide, weights = widened(dtype, x, decode(self.scheme, w, scale, zp))
            return rounded(wide @ weights, dtype)

    def decompose(self, g: Graph, x: Value, *packed: Value) -> Any:
        """With the weight unpacked."""
        table, *sides = packed
        every = g.iota((table.shape.dims[0],), dtype=i32)
        weight = g.dequant_gather(table, every, *sides, scheme=self.scheme)
        return cast(g, g.matmul(_computed(g, x), weight), x.shape.dtype)

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        return matmul_cost(inputs, outputs, inputs[0].dims[-1])


@op("dequant_grouped_matmul", group="matmul", is_anchor=True, runs_in_low_precision=True)
class DequantGroupedMatMul(Op):
    """Row t of x [T, K] · dequant(w[expert[t]])ᵀ; w packed [E, N, row] -> [T, N]."""

    scheme: QuantScheme

    def infer(
        self,
        x: Shape,
        w: Shape,
        expert: Shape,
        scale: Shape | None = None,
        zp: Shape | None = None,
    ) -> Shape:
        require_float(x, "x")
        require_rank(x, 2, "x")
        require_rank(w, 3, "w")
        require_routes(expert, x.dims[0])
        k = packed_columns(self.scheme, w, scale, zp)
        require_same(x.dims[1], k, f"columns of x against the weights in a {self.scheme} row")
        return Shape((x.dims[0], w.dims[1]), x.dtype)

    def reference(
        self,
        x: Array,
        w: Array,
        expert: Array,
        scale: Array | None = None,
        zp: Array | None = None,
    ) -> Array:
        dtype = DType.of(x.dtype)
        require_indices(expert, w.shape[0], "expert")
        (wide,) = widened(dtype, x)
        out = np.zeros((x.shape[0], w.shape[1]), wide.dtype)
        with quiet():
            for e in np.unique(expert):
                rows = expert == e
                weights = _decode_at(self.scheme, e, w, scale, zp).astype(wide.dtype, copy=False)
                out[rows] = wide[rows] @ weights.T
        return rounded(out, dtype)

    def decompose(self, g: Graph, x: Value, w: Value, expert: Value, *sides: Value) -> Any:
        weights = g.dequant_moe_weights(w, expert, *sides, scheme=self.scheme)
        return cast(g, row_matmul(g, _computed(g, x), weights), x.shape.dtype)

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        return grouped_cost(inputs, outputs)


@op("dequant_moe_weights", group="matmul", is_anchor=True)
class DequantMoeWeights(Op):
    """The weights of the chosen experts: w packed [E, N, row], expert [T] -> f32 [T, K, N]."""

    scheme: QuantScheme

    def infer(
        self, w: Shape, expert: Shape, scale: Shape | None = None, zp: Shape | None = None
    ) -> Shape:
        require_rank(w, 3, "w")
        require_routes(expert)
        k = packed_columns(self.scheme, w, scale, zp)
        return Shape((expert.dims[0], k, w.dims[1]), f32)

    def reference(
        self, w: Array, expert: Array, scale: Array | None = None, zp: Array | None = None
    ) -> Array:
        require_indices(expert, w.shape[0], "expert")
        with quiet():
            weights = _decode_at(self.scheme, expert, w, scale, zp)
        return np.ascontiguousarray(weights.transpose(0, 2, 1))

    def decompose(self, g: Graph, w: Value, expert: Value, *sides: Value) -> Any:
        """For schemes with separate scales; GGUF blocks have no decomposition."""
        scheme = self.scheme
        if scheme.ggml_type is not None or not scheme.has_scale:
            return None
        packed, scale, *zero = (g.gather(v, expert, axis=0) for v in (w, *sides))
        q = cast(g, _nibbles(g, packed) if scheme.bits_per_element == 4 else packed, f32)
        tokens, n, k = q.shape.dims
        q = g.reshape(q, shape=(tokens, n, scale.shape.dims[2], -1))
        if scheme.has_zero_point:
            q = g.sub(q, _per_group(g, cast(g, zero[0], f32)))
        elif scheme.bits_per_element == 4:
            q = g.sub(q, 8.0)  # symmetric nibbles are stored with 8 added
        q = g.mul(q, _per_group(g, scale))
        return g.transpose(g.reshape(q, shape=(tokens, n, k)), axes=(0, 2, 1))

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        return lookup_cost(inputs, outputs)


@op("dequant_gather", group="matmul")
class DequantGather(Op):
    """Rows `ids` of a packed table [V, row] as f32: ids [...] -> [..., K]."""

    scheme: QuantScheme

    def infer(
        self, table: Shape, ids: Shape, scale: Shape | None = None, zp: Shape | None = None
    ) -> Shape:
        require_rank(table, 2, "table")
        require_integer(ids, "ids")
        k = packed_columns(self.scheme, table, scale, zp)
        return Shape((*ids.dims, k), f32)

    def reference(
        self, table: Array, ids: Array, scale: Array | None = None, zp: Array | None = None
    ) -> Array:
        require_indices(ids, table.shape[0], "ids")
        with quiet():
            return _decode_at(self.scheme, ids, table, scale, zp)

    def decompose(self, g: Graph, table: Value, ids: Value, *sides: Value) -> Any:
        """Treat every row of the table as an expert with one output."""
        rows = (table, *sides)
        parts = [g.reshape(p, shape=(p.shape.dims[0], 1, *p.shape.dims[1:])) for p in rows]
        flat = g.reshape(ids, shape=(ids.shape.num_elements,))
        found = g.dequant_moe_weights(parts[0], flat, *parts[1:], scheme=self.scheme)
        return g.reshape(found, shape=(*ids.shape.dims, found.shape.dims[1]))

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        return lookup_cost(inputs, outputs)


def lookup_cost(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
    """A scale and an offset per element; of the packed weight only the chosen rows are read."""
    chosen = inputs[1]
    traffic: Dim = chosen.size_bytes + outputs[0].size_bytes
    for part in (inputs[0], *inputs[2:]):
        traffic = traffic + part.with_dims(part.dims[1:]).size_bytes * chosen.num_elements
    return Cost(outputs[0].num_elements * 2, traffic)


# -- decomposition ----------------------------------------------------------------------------


def _computed(g: Graph, x: Value) -> Value:
    return x if x.shape.dtype.bytes > 4 else cast(g, x, f32)


def _per_group(g: Graph, side: Value) -> Value:
    return g.reshape(side, shape=(*side.shape.dims, 1))


def _nibbles(g: Graph, packed: Value) -> Value:
    """[..., n] bytes as [..., 2n] numbers 0 … 15, the low nibble first."""
    element = packed.shape.dtype
    low = g.bitwise_and(packed, g.constant(15, element))
    high = g.shift_right(packed, g.constant(4, element))
    pairs = [g.reshape(v, shape=(*v.shape.dims, 1)) for v in (low, high)]
    *outer, n = packed.shape.dims
    joined = g.concat(*pairs, axis=packed.shape.rank)
    return g.reshape(joined, shape=(*outer, n * 2))
