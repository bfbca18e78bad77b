"""Ops on weights and activations in the CPU's quantised layouts; the backend puts them in.

`pack_quant` runs once, in `prepare`; `quantize_rows` once for each tensor that GEMMs read. The
bytes are described in `rlx.backends.cpu.layouts.quant_tiles` and
`rlx.backends.cpu.layouts.quant_rows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.backends.cpu.layouts.quant_rows import RowLayout, dequantized_rows, quantize_rows
from rlx.backends.cpu.layouts.quant_tiles import (
    TILE_COLUMNS,
    column_tile_count,
    column_tile_layout,
    pack_column_tiles,
    unpack_column_tiles,
)
from rlx.errors import ShapeError
from rlx.ir.dim import Dim
from rlx.ir.dtype import DType, f32, u8
from rlx.ir.op import Array, Cost, Op, op
from rlx.ir.ops._common import (
    quiet,
    require_float,
    require_indices,
    require_integer,
    require_rank,
    require_same,
    rounded,
)
from rlx.ir.ops.activation import activate, activation_flops, require_activation
from rlx.ir.ops.dequant import lookup_cost, packed_columns
from rlx.ir.ops.matmul import grouped_cost, matmul_cost, require_routes
from rlx.ir.quant.scheme import QuantScheme
from rlx.ir.shape import Shape


@op("pack_quant")
class PackQuant(Op):
    """A quantised weight [N, row] (or experts' [E, N, row]) in column tiles of 16 output channels.

    As a pair the weight is two of N/2 rows, concatenated, whose tiles alternate.
    """

    scheme: QuantScheme
    pair: bool = False

    def infer(self, w: Shape, scale: Shape | None = None, zp: Shape | None = None) -> Shape:
        k = packed_columns(self.scheme, w, scale, zp)
        layout = column_tile_layout(self.scheme, k)
        n = w.dims[-2] if w.rank in (2, 3) else None
        if layout is None or not isinstance(n, int):
            raise ShapeError("no column tiles for this weight", got=f"{w} {self.scheme}")
        if self.pair and n % 2:
            raise ShapeError("two weights of the same size", got=w, expected="an even N")
        column_tiles = column_tile_count(n // 2 if self.pair else n, self.pair)
        return Shape((*w.dims[:-2], column_tiles, layout.tile_bytes), u8)

    def reference(self, w: Array, scale: Array | None = None, zp: Array | None = None) -> Array:
        return pack_column_tiles(self.scheme, w, scale, zp, self.pair)


@op("quantize_rows")
class QuantizeRows(Op):
    """x [..., k] in 8 bits, block by block: bytes [rows + tile - 1, bytes of a row]."""

    layout: str

    def check(self) -> None:
        RowLayout.parse(self.layout, self.name)

    def infer(self, x: Shape) -> Shape:
        require_float(x, "x")
        layout = RowLayout.parse(self.layout, self.name)
        k = x.dims[-1] if x.rank else None
        if not isinstance(k, int) or k % max(layout.block, 16):
            raise ShapeError("rows are not whole blocks", got=x, expected=f"blocks of {layout}")
        rows = x.with_dims(x.dims[:-1]).num_elements
        return Shape((rows + (layout.tile - 1), layout.row_bytes(k)), u8)

    def reference(self, x: Array) -> Array:
        layout = RowLayout.parse(self.layout, self.name)
        return quantize_rows(layout, np.asarray(x).reshape(-1, x.shape[-1]))

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        return Cost(inputs[0].num_elements * 6, inputs[0].size_bytes + outputs[0].size_bytes)


@op("packed_dequant_matmul", is_anchor=True)
class PackedDequantMatMul(Op):
    """activation(x·w + bias) + residual, or activation(x·gate) · (x·up) of a pair.

    x comes as quantised rows, prod(dims) of them; the result is [*dims, n].
    """

    scheme: QuantScheme
    layout: str
    dims: tuple[Dim, ...]
    n: int
    k: int
    dtype: DType = f32
    pair: bool = False
    activation: str = "none"
    has_bias: bool = False
    has_residual: bool = False

    def check(self) -> None:
        RowLayout.parse(self.layout, self.name)
        require_activation(self.activation, self.name)

    def infer(
        self, rows: Shape, packed: Shape, bias: Shape | None = None, residual: Shape | None = None
    ) -> Shape:
        bias, residual = self.extras(bias, residual)
        layout = RowLayout.parse(self.layout, self.name)
        require_rank(rows, 2, "rows")
        require_same(rows.dims[1], layout.row_bytes(self.k), "bytes of a quantised row")
        _require_column_tiles(self.scheme, packed, column_tile_count(self.n, self.pair), self.k)
        out = Shape((*self.dims, self.n), self.dtype)
        require_same(
            rows.dims[0], Shape(self.dims).num_elements + (layout.tile - 1), "quantised rows"
        )
        if bias is not None:
            require_same(bias.num_elements, self.n, "elements of bias")
        if residual is not None and not residual.same_dims(out):
            raise ShapeError("residual does not fit the result", got=residual, expected=out)
        return out

    def extras(self, *given: Any) -> tuple[Any, Any]:
        """The operands after the weight as (bias, residual)."""
        there = [t for t in given if t is not None]
        if len(there) != self.has_bias + self.has_residual:
            raise ShapeError(
                "operands and flags disagree",
                where=self.name,
                got=f"{len(there)} extra operands",
                expected=f"has_bias={self.has_bias}, has_residual={self.has_residual}",
            )  # fmt: skip
        return there[0] if self.has_bias else None, there[-1] if self.has_residual else None

    def reference(
        self, rows: Array, packed: Array, bias: Array | None = None, residual: Array | None = None
    ) -> Array:
        bias, residual = self.extras(bias, residual)
        dims = Shape(self.dims).static_dims
        layout = RowLayout.parse(self.layout, self.name)
        x = dequantized_rows(layout, rows, int(np.prod(dims)), self.k)
        weights = unpack_column_tiles(self.scheme, packed, self.n, self.k, self.pair)
        with quiet():
            products = [_matmul(x, w) for w in (weights if self.pair else weights[None])]
            out = products[0] if bias is None else products[0] + bias.astype(np.float32)
            out = activate(self.activation, out)
            out = out * products[1] if self.pair else out
            out = out.reshape(*dims, self.n)
            if residual is not None:
                out = out + residual.astype(np.float32)
        return rounded(out, self.dtype)

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        gemm = matmul_cost(inputs, outputs, self.k * (2 if self.pair else 1))
        after = outputs[0].num_elements * (self.has_bias + self.has_residual)
        return Cost(gemm.flops + after + activation_flops(self.activation, outputs[0]), gemm.bytes)


def _matmul(x: Array, w: Array) -> Array:
    """x·wᵀ, as exact as f32 can hold it."""
    return (x.astype(np.float64) @ w.astype(np.float64).T).astype(np.float32)


def _require_column_tiles(scheme: QuantScheme, packed: Shape, column_tiles: int, k: int) -> None:
    layout = column_tile_layout(scheme, k)
    if layout is None:
        raise ShapeError("no column tiles for this weight", got=f"{k} columns of {scheme}")
    expected = (column_tiles, layout.tile_bytes)
    if packed.dims[-2:] != expected or packed.dtype is not u8:
        raise ShapeError("not the column tiles of this weight", got=packed, expected=list(expected))


@op("packed_dequant_grouped", is_anchor=True)
class PackedDequantGrouped(Op):
    """Row t of x [T, K] times the weight of its expert: tiles [E, tiles, bytes], expert [T].

    The kernel quantises the rows as `layout` says.
    """

    scheme: QuantScheme
    layout: str
    n: int
    k: int

    def check(self) -> None:
        RowLayout.parse(self.layout, self.name)

    def infer(self, x: Shape, packed: Shape, expert: Shape) -> Shape:
        require_float(x, "x")
        require_rank(x, 2, "x")
        require_rank(packed, 3, "packed")
        require_routes(expert, x.dims[0])
        require_same(x.dims[1], self.k, "columns of x")
        _require_column_tiles(self.scheme, packed, column_tile_count(self.n), self.k)
        return Shape((x.dims[0], self.n), x.dtype)

    def reference(self, x: Array, packed: Array, expert: Array) -> Array:
        require_indices(expert, packed.shape[0], "expert")
        layout = RowLayout.parse(self.layout, self.name)
        rows = dequantized_rows(layout, quantize_rows(layout, x), len(x), self.k)
        out = np.zeros((len(x), self.n), np.float32)
        with quiet():
            for e in np.unique(expert):
                weights = unpack_column_tiles(self.scheme, packed[e], self.n, self.k)
                out[expert == e] = _matmul(rows[expert == e], weights)
        return rounded(out, DType.of(x.dtype))

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        return grouped_cost(inputs, outputs)


@op("packed_dequant_gather")
class PackedDequantGather(Op):
    """Rows `ids` of a weight in column tiles, as f32: a tied embedding."""

    scheme: QuantScheme
    n: int
    k: int

    def infer(self, packed: Shape, ids: Shape) -> Shape:
        require_integer(ids, "ids")
        require_rank(packed, 2, "packed")
        _require_column_tiles(self.scheme, packed, column_tile_count(self.n), self.k)
        return Shape((*ids.dims, self.k), f32)

    def reference(self, packed: Array, ids: Array) -> Array:
        require_indices(ids, self.n, "ids")
        found, places = np.unique(ids // TILE_COLUMNS, return_inverse=True)
        with quiet():
            rows = unpack_column_tiles(
                self.scheme, packed[found], len(found) * TILE_COLUMNS, self.k
            )
        return rows.reshape(-1, TILE_COLUMNS, self.k)[places.reshape(ids.shape), ids % TILE_COLUMNS]

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        return lookup_cost(inputs, outputs)
