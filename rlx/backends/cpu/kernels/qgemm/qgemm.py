"""Quantised GEMM: rows of 8-bit activations against column tiles of packed weights.

Rows are cut into blocks that stay in the L2 cache, columns into panels of one column tile (or a
pair: gate and up). A unit of work is one row block against one panel; each worker takes a
contiguous range of units. Dot products are of integers; sums of blocks are scaled to f32.

Quantised grouped GEMM for mixture of experts: routed rows times their expert's column tiles.

A chunk of the routing (see `kernels.gemm.grouped_gemm`) is rows of one expert. Its rows, quantised
in the order of the routing, are tiles of their own. Since the last tile of a chunk may be padded, a
chunk begins as many rows further on as the padding of the chunks before it can take.
"""

from __future__ import annotations

from rlx.backends.cpu.kernels.gemm.epilogue import Epilogue, emit_epilogue
from rlx.backends.cpu.kernels.gemm.gemm import MC
from rlx.backends.cpu.kernels.gemm.grouped_gemm import Chunk, each_chunk
from rlx.backends.cpu.kernels.gemm.microkernel import TileShape
from rlx.backends.cpu.kernels.qgemm.amx_gemm import AmxGemm, suits_tiles
from rlx.backends.cpu.kernels.qgemm.block_formats import (
    BLOCKS,
    ColumnTile,
    Format,
    SharedScaleFormat,
    integer_format,
)
from rlx.backends.cpu.kernels.qgemm.dot import FourWay, IntDot, MicroTile, dot_kind
from rlx.backends.cpu.kernels.qgemm.grid_formats import GRID_FORMATS
from rlx.backends.cpu.kernels.qgemm.kquant_superblock import KQUANT_FORMATS, KQuantFormat
from rlx.backends.cpu.kernels.qgemm.narrow_gemm import NarrowFormat, NarrowGemm, suits_narrow
from rlx.backends.cpu.kernels.qgemm.quantize_rows import QuantizeRows, tile_of, tile_width
from rlx.backends.cpu.kernels.qgemm.raised_dot import takes_raised_rows
from rlx.backends.cpu.kernels.qgemm.unpacked_gemm import ACC_ROWS, UnpackedGemm, takes_wide_rows
from rlx.backends.cpu.kernels.spec import KernelSpec
from rlx.backends.cpu.layouts.quant_rows import RowLayout
from rlx.backends.cpu.layouts.quant_tiles import TILE_COLUMNS, column_tile_layout
from rlx.ir.quant.scheme import QuantScheme
from rlx.llvm.amx import TILE_ROWS
from rlx.llvm.builder import Function, Module, Value, f32, i32, i64, ptr
from rlx.llvm.storage import memory_type
from rlx.llvm.target import Target
from rlx.support.records import dataclass

ROW_BLOCK_BYTES = 256 << 10  # quantised rows of a block: they stay in the L2 cache
_OTHER_ROW_BLOCKS = (64 << 10, 128 << 10, 256 << 10, 512 << 10)
_MATRIX_ROW_BLOCK_BYTES = 512 << 10  # the same with tile registers: those CPUs have 2 MB and more
SHARED_BLOCK = 64  # codes of a row that share a scale in the "shared" layout
ManyRows = UnpackedGemm | NarrowGemm | AmxGemm
_POINTERS = frozenset(["x", "w", "out", "bias", "residual"])


def format_of(scheme: QuantScheme, layout: RowLayout | None = None) -> Format:
    """The format that emits a tile's dot products, for weights of a scheme and rows of a layout."""
    if layout is not None and layout.kind == "shared":
        return SharedScaleFormat(layout.block)
    if layout is not None and layout.kind == "unsigned":
        return NarrowFormat(layout.block)
    made = KQUANT_FORMATS.get(scheme.name) or GRID_FORMATS.get(scheme.name)
    if made is not None:
        return made()
    return BLOCKS.get(scheme.name) or integer_format(scheme)


def tile_rows(target: Target) -> int:
    """Rows of a full tile: as many as leave registers for codes and scales."""
    return 8 if target.num_vector_registers >= 32 else 4


def row_layout(scheme: QuantScheme, k: int, target: Target) -> RowLayout:
    """How rows of k are quantised for a GEMM with weights of the scheme.

    With four-way dot products (VNNI, sdot) scaling is a good part of the work of Q8_0: two blocks
    of the row share a scale then.
    """
    kind = dot_kind(target) or IntDot
    four_way = issubclass(kind, FourWay) and target.num_vector_registers >= 32
    if suits_narrow(scheme, target):
        assert scheme.block is not None
        return RowLayout("unsigned", scheme.block, tile_rows(target))
    fmt = format_of(scheme)
    if scheme.name == "Q8_0" and four_way and k % SHARED_BLOCK == 0:
        fmt = SharedScaleFormat(SHARED_BLOCK)
    if suits_tiles(target):
        return RowLayout(fmt.kind, fmt.block, TILE_ROWS, matrix=True)
    paired = fmt.takes_pairs and kind.takes_pairs
    raised = isinstance(fmt, KQuantFormat) and takes_raised_rows(fmt.magnitude, kind, target)
    wide = takes_wide_rows(fmt, target)
    return RowLayout(fmt.kind, fmt.block, tile_rows(target), paired, wide=wide, raised=raised)


def has_integer_path(scheme: QuantScheme, k: int, target: Target) -> bool:
    """Whether weights of k columns take integer dot products on the target.

    Where the target has them they are faster for any number of rows, quantising the activations
    included: on Zen 4 with 128 rows Q8_0, Q4_K and Q6_K take 0.28, 0.28 and 0.32 of the time of
    dequantised panels and the f32 micro-kernel; with AVX2 alone 0.74, 0.38 and 0.47; with SSSE3
    alone 0.69, 0.31 and 0.46. With one row they take 0.1 to 0.3.
    """
    fits = scheme.block is not None or scheme.ggml_type is not None or k <= 1 << 16
    return dot_kind(target) is not None and fits and column_tile_layout(scheme, k) is not None


@dataclass(frozen=True)
class QuantGemm(KernelSpec):
    """args: x, w, out, (bias), (residual), m, n, k, row, column_tile_bytes

    `row` is the bytes of a quantised row.
    """

    scheme: QuantScheme
    layout: RowLayout
    epilogue: Epilogue

    @property
    def args(self) -> list[str]:
        return ["x", "w", "out", *self.epilogue.args, "m", "n", "k", "row", "column_tile_bytes"]

    @property
    def label(self) -> str:
        return f"qgemm {self.scheme}"

    def emit(self, m: Module) -> None:
        QuantGemmEmitter(self, m).emit()


class QuantGemmEmitter:
    """Emits the functions of one spec and the kernel that calls them."""

    routed = False

    def __init__(self, spec: QuantGemm, m: Module) -> None:
        self.spec, self.m = spec, m
        self.tiles_per_panel = 2 if spec.epilogue.pair else 1
        lanes = m.target.lanes(32)
        shape = TileShape(f32, lanes, TILE_COLUMNS * self.tiles_per_panel // lanes)
        self.columns = spec.epilogue.columns(shape)
        self.layout = spec.layout
        fmt = format_of(spec.scheme, self.layout)
        self.unpacked: ManyRows | None
        if self.layout.kind == "unsigned":
            self.unpacked = NarrowGemm(m, spec.scheme, self.layout, self.tiles_per_panel)
        elif self.layout.matrix:
            self.unpacked = AmxGemm(m, spec.scheme, fmt, self.layout, self.tiles_per_panel)
        else:
            self.unpacked = UnpackedGemm.of(m, spec.scheme, fmt, self.layout, self.tiles_per_panel)
        widths = self.layout.widths if self.unpacked is None else self.unpacked.packed_widths
        self.tiles = {rows: self._emit_tile(rows) for rows in widths}
        self.epilogue = emit_epilogue(m, shape, spec.epilogue, spec.args, self.routed)
        self.f = m.kernel()
        self.given = {name: self.arg(self.f, name) for name in spec.args}

    def arg(self, f: Function, name: str) -> Value:
        index = self.spec.args.index(name)
        return f.arg(f["args"], index, ptr if name in _POINTERS else i64)

    def __getitem__(self, name: str) -> Value:
        return self.given[name]

    def _emit_tile(self, rows: int) -> Function:
        """void tile(ptr args, ptr column_tile, ptr x, ptr out): a column tile x a row tile."""
        params = [("args", ptr), ("column_tile", ptr), ("x", ptr), ("out", ptr)]
        f = self.m.function(f"tile{rows}", params, internal=True)
        lanes = f.target.lanes(32)
        column_tile = ColumnTile(f, self.spec.scheme, f["column_tile"], f["x"], self.arg(f, "k"))
        # Few rows take all columns at once, so that memory is read in order.
        vectors = TILE_COLUMNS // lanes if rows * (TILE_COLUMNS // lanes) <= 4 else 1
        for shift in f.range(0, TILE_COLUMNS, lanes * vectors):
            tile = MicroTile(f, rows, vectors, shift, self.layout.paired)
            format_of(self.spec.scheme, self.layout).emit(
                tile, column_tile, f["out"], TILE_COLUMNS * self.tiles_per_panel
            )
        return f

    def reserve_accumulators(self) -> Value:
        if self.unpacked is not None:
            self.unpacked.reserve(self.f)
        return self.f.alloca(4 * TILE_COLUMNS * self.tiles_per_panel * self.layout.tile)

    def emit(self) -> None:
        f, rows, tile = self.f, self["m"], self.layout.tile
        self.acc = self.reserve_accumulators()
        panels = f.ceil_div(self["n"], self.columns)
        # Row blocks differ by at most a tile, so that equal ranges of units are equal work.
        tiles = f.ceil_div(rows, tile)
        limit = self._tiles_per_block()
        row_blocks = (tiles + limit - 1).udiv(limit)
        lo, hi = f.split(row_blocks * panels)
        for unit in f.range(lo, hi):
            row_block = unit.udiv(panels)
            first, last = ((c * tiles).udiv(row_blocks) * tile for c in (row_block, row_block + 1))
            last = f.min(last, rows)
            self.panel(self["w"], unit - row_block * panels, self["x"], first, last, f.null())

    def _tiles_per_block(self) -> Value:
        """The most row tiles that fit the cache."""
        f = self.f
        size = _MATRIX_ROW_BLOCK_BYTES if self.layout.matrix else ROW_BLOCK_BYTES
        most = self.m.tunable("block_bytes", size, *_OTHER_ROW_BLOCKS)
        return f.max(f.const(most).udiv(f.max(self["row"] * self.layout.tile, 1)), 1)

    def panel(self, w: Value, p: Value, x: Value, first: Value, last: Value, route: Value) -> None:
        """Quantised rows [first, last) of x against panel p of w."""
        f = self.f
        column_tiles = f.gep(w, p * self["column_tile_bytes"] * self.tiles_per_panel)
        given = column_tiles, p * self.columns, x, first, last, route
        if self.unpacked is None:
            self._gemm_tiles(*given)
        else:
            for many in f.either(last - first > max(self.tiles)):
                if many:
                    self._gemm_unpacked(self.unpacked, *given)
                else:
                    self._gemm_tiles(*given)

    def _gemm_tiles(
        self, column_tiles: Value, column: Value, x: Value, first: Value, last: Value, route: Value
    ) -> None:
        f = self.f
        for r in f.range(first, last, self.layout.tile):
            left = f.min(last - r, self.layout.tile)
            given = column_tiles, f.gep(x, r * self["row"]), self.acc
            width = tile_width(f, self.layout, left)
            for size in f.cases(width, list(self.tiles)):
                self._run_tile(self.tiles[size], *given)
            self._run_epilogue(self.acc, left, r, column, route)

    def _gemm_unpacked(
        self,
        unpacked: ManyRows,
        column_tiles: Value,
        column: Value,
        x: Value,
        first: Value,
        last: Value,
        route: Value,
    ) -> None:
        f = self.f
        for r in f.range(first, last, ACC_ROWS):
            left = f.min(last - r, ACC_ROWS)
            # rows at the end that lie in a tile of their own, which reads packed weights
            rest = left & self.layout.tile - 1
            whole = left - f.select(rest <= max(self.tiles), rest, 0)
            rows = f.gep(x, r * self["row"])
            self._fetch_results(r, left, column)
            unpacked.clear(whole)
            for s in range(self.tiles_per_panel):
                column_tile = f.gep(column_tiles, self["column_tile_bytes"] * s)
                unpacked.accumulate(column_tile, s, rows, whole, self["row"], self["k"])
            end = f.gep(rows, whole * self["row"])
            out = f.gep(unpacked.acc, whole, 4 * unpacked.stride)
            for _ in f.when(whole < left):
                width = tile_width(f, self.layout, left - whole)
                for size in f.cases(width, list(self.tiles)):
                    self._run_tile(self.tiles[size], column_tiles, end, out)
            self._run_epilogue(unpacked.acc, left, r, column, route)

    def _fetch_results(self, r: Value, rows: Value, column: Value) -> None:
        """Ask for the lines that the epilogue writes to: they lie a row apart."""
        f, size = self.f, memory_type(self.spec.epilogue.out).bytes
        out = f.gep(self["out"], r * self["n"] + column, size)
        for i in f.range(0, 0 if self.routed else rows):
            f.prefetch(f.gep(out, i * self["n"], size), writes=True)

    def _run_epilogue(self, acc: Value, rows: Value, r: Value, column: Value, route: Value) -> None:
        f = self.f
        at = r * self["n"] + column
        f.call(self.epilogue, f["args"], acc, rows, at, column, f.gep(route, r, 4))

    def _run_tile(self, tile: Function, w: Value, x: Value, out: Value) -> None:
        f = self.f
        for s in range(self.tiles_per_panel):
            column_tile = f.gep(w, self["column_tile_bytes"]) if s else w
            f.call(tile, f["args"], column_tile, x, f.gep(out, 4 * TILE_COLUMNS * s))


def routed_rows(rows: int, experts: int, tile: int) -> int:
    """Rows of the buffer that holds any routing."""
    chunks = min(rows, experts + rows // MC)
    return rows + chunks * (tile - 1)


def _first_row(chunk: Chunk, tile: int) -> Value:
    """The first quantised row of a chunk."""
    return chunk.start + chunk.number * (tile - 1)


@dataclass(frozen=True)
class QuantizeRoutedRows(QuantizeRows):
    """args: x, out, rows, k, table"""

    def emit(self, m: Module) -> None:
        f = m.kernel()
        x, out, table = (f.arg(f["args"], i) for i in (0, 1, 4))
        rows, k = (f.arg(f["args"], i, i64) for i in (2, 3))
        size, blocks, bytes_ = self.sizes(f, k)
        # A unit is a block of a row: the blocks of every chunk are divided among the workers.
        for chunk in each_chunk(f, table, rows, blocks):
            base = f.gep(out, _first_row(chunk, self.layout.tile) * blocks * bytes_)
            for i in f.range(0, chunk.size):
                row = f.load(f.gep(chunk.route, i, 4), i32).to(i64)
                start, width = tile_of(f, self.layout, i, chunk.size, blocks * bytes_)
                inside = i & self.layout.tile - 1
                to = f.gep(f.gep(base, start), inside, 4)
                for b in f.range(chunk.first, chunk.last):
                    source = f.gep(x, row * k + b * size, memory_type(self.x))
                    each = self.block_bytes(f, size, width) * width
                    self.block(f, source, f.gep(to, b * each), inside, width, size)


@dataclass(frozen=True)
class QuantGroupedGemm(QuantGemm):
    """args: those of `QuantGemm`, then table and the bytes of an expert's weight"""

    @property
    def args(self) -> list[str]:
        return [*super().args, "table", "w_expert"]

    def emit(self, m: Module) -> None:
        _GroupedEmitter(self, m).emit()


class _GroupedEmitter(QuantGemmEmitter):
    routed = True

    def arg(self, f: Function, name: str) -> Value:
        if name == "table":
            return f.arg(f["args"], self.spec.args.index(name), ptr)
        return super().arg(f, name)

    def emit(self) -> None:
        f = self.f
        self.acc = self.reserve_accumulators()
        panels = f.ceil_div(self["n"], self.columns)
        for chunk in each_chunk(f, self["table"], self["m"], panels):
            x = f.gep(self["x"], _first_row(chunk, self.layout.tile) * self["row"])
            w = f.gep(self["w"], chunk.expert * self["w_expert"])
            for p in f.range(chunk.first, chunk.last):
                self.panel(w, p, x, f.i64(0), chunk.size, chunk.route)
