"""GEMM of two bf16 matrices in AMX's tile registers.

Nothing is rounded but the sums, which are f32 as elsewhere. Their order is that of `tdpbf16ps` for
any number of rows: over 32 of k a sum of the even and one of the odd products, those two, then the
total. So a row has the same bits alone and among others. Denormal numbers count as zero.

A tile of sums is 16 rows times 16 columns, a panel of w two of them, and rows go two tiles at once,
which takes all eight registers and loads each operand for two products. Rows are packed as tiles,
so that none is read beyond its end; a block of k stays in the L1 cache for all rows, with sums in
memory meanwhile.
"""

from __future__ import annotations

from rlx.backends.cpu.kernels.gemm.epilogue import emit_epilogue
from rlx.backends.cpu.kernels.gemm.gemm import Gemm, round_up
from rlx.backends.cpu.kernels.gemm.microkernel import TileShape
from rlx.backends.cpu.layouts.pack import TILE_K
from rlx.ir.dtype import DType, bf16
from rlx.llvm.amx import NUM_TILES, TILE_BYTES, TILE_ROWS, Tiles
from rlx.llvm.builder import Function, Module, Value, f32, i16, i64, ptr, vec
from rlx.llvm.target import Target
from rlx.support.records import dataclass

_COLUMNS = 16  # of a tile
PANEL = 2 * _COLUMNS  # columns of a panel
_TILE = TILE_ROWS * TILE_BYTES
_W_TILE = 2 * _TILE  # bytes of a panel for the k of a tile
_OUT_ROW = 4 * PANEL  # bytes of a row of sums
_ROW_BLOCK = 128  # rows of a block: they stay in the L2 cache up to some thousand k
_K_TILES = 8  # tiles of k of a block: 16 kB of a panel, and of two tiles of rows
_SHAPES = [(TILE_ROWS, TILE_BYTES)] * NUM_TILES


def suits_tiles(target: Target, x: DType, w: DType, result: DType) -> bool:
    """Whether a GEMM runs in tile registers: both operands are bf16, so that none is rounded."""
    has_tiles = (target.amx_bf16 and target.avx512) or target.emulates_amx
    return has_tiles and x is w is bf16 and result.is_float and result.bytes <= 4


@dataclass(frozen=True)
class Bf16Gemm(Gemm):
    """args: as those of `Gemm`; w lies in panels of the layout `tilesW`."""

    def scratch(self, target: Target, rows: int, n: int, k: int) -> int:
        return round_up(min(rows, _ROW_BLOCK), TILE_ROWS) * round_up(k, TILE_K) * bf16.bytes

    def emit(self, m: Module) -> None:
        _Emitter(self, m).emit()


class _Emitter:
    def __init__(self, spec: Bf16Gemm, m: Module) -> None:
        lanes = m.target.lanes(32)
        self.pack = _emit_pack(m)
        self.multiply = {tiles: _emit_multiply(m, tiles) for tiles in (2, 1)}
        shape = TileShape(f32, lanes, PANEL // lanes)
        self.epilogue = emit_epilogue(m, shape, spec.epilogue, spec.args)
        self.f = f = m.kernel()
        pointers = ("x", "w", "out", "bias", "residual", "scratch")
        self.given = {
            name: f.arg(f["args"], i, ptr if name in pointers else i64)
            for i, name in enumerate(spec.args)
        }

    def __getitem__(self, name: str) -> Value:
        return self.given[name]

    def emit(self) -> None:
        f = self.f
        self.sums = f.alloca(_OUT_ROW * _ROW_BLOCK)
        self.k_tiles = f.ceil_div(self["k"], TILE_K)
        self.rows_at = f.gep(self["scratch"], f["tid"].to(i64) * self["worker_bytes"])
        panels, tiles = f.ceil_div(self["n"], PANEL), f.ceil_div(self["m"], TILE_ROWS)
        # Row blocks differ by at most a tile, so that equal ranges of units are equal work.
        blocks = f.ceil_div(tiles, _ROW_BLOCK // TILE_ROWS)
        regs = Tiles(f, _SHAPES)
        regs.configure()
        packed = f.carry([f.i64(-1)])
        for unit in packed.range(*f.split(blocks * panels)):
            block = unit.udiv(panels)
            first, last = ((b * tiles).udiv(blocks) * TILE_ROWS for b in (block, block + 1))
            rows = f.min(last, self["m"]) - first
            for _ in f.when(block.ne(packed.values[0])):
                x = f.gep(self["x"], first * self["x_stride_m"])
                f.call(self.pack, x, self["x_stride_m"], rows, self["k"], self.rows_at)
            self._panel(unit - block * panels, first, rows)
            packed.values = [block]
        regs.release()

    def _panel(self, p: Value, first: Value, rows: Value) -> None:
        """A packed row block against panel p."""
        f, tiles, next_ = self.f, self.f.ceil_div(rows, TILE_ROWS), self.k_tiles * _TILE
        panel = f.gep(self["w"], p * self.k_tiles, _W_TILE)
        for k in f.range(0, f.max(self.k_tiles, 1), _K_TILES):
            count = f.min(self.k_tiles - k, _K_TILES)
            done = f.i64(0)
            for size, function in self.multiply.items():
                end = tiles - (tiles - done).urem(size)
                for i in f.range(done, end, size):
                    x = f.gep(f.gep(self.rows_at, i * next_), k, _TILE)
                    out = f.gep(self.sums, i, _OUT_ROW * TILE_ROWS)
                    f.call(function, x, next_, f.gep(panel, k, _W_TILE), count, k, out)
                done = end
        column = p * PANEL
        at = first * self["n"] + column
        f.call(self.epilogue, f["args"], self.sums, rows, at, column, f.null())


def _emit_pack(m: Module) -> Function:
    """void pack(ptr x, i64 stride, i64 rows, i64 k, ptr to)

    Rows become tiles, [tile][k / 32][row][32], with zeros behind the last k.
    """
    params = [("x", ptr), ("stride", i64), ("rows", i64), ("k", i64), ("to", ptr)]
    f = m.function("pack", params, internal=True)
    line, k = vec(TILE_K, i16), f["k"]
    whole, k_tiles = k & -TILE_K, f.ceil_div(k, TILE_K)
    for r in f.range(0, f["rows"]):
        row, tile = f.gep(f["x"], r * f["stride"]), r.udiv(TILE_ROWS)
        to = f.gep(f.gep(f["to"], tile * k_tiles, _TILE), r & TILE_ROWS - 1, TILE_BYTES)
        for j in f.range(0, whole, TILE_K):
            f.store(f.load(f.gep(row, j, 2), line), f.gep(to, j, _TILE // TILE_K))
        for _ in f.when(whole < k):
            last = f.gep(to, whole, _TILE // TILE_K)
            f.store(f.const(0, line), last)
            for j in f.range(whole, k):
                f.store(f.load(f.gep(row, j, 2), i16), f.gep(last, j - whole, 2))
    return f


def _emit_multiply(m: Module, tiles: int) -> Function:
    """void multiply(ptr x, i64 next, ptr w, i64 count, i64 k, ptr out)

    `count` tiles of k of some tiles of rows, `next` bytes apart, times those of a panel, are added
    to the sums, or stored where k is 0.
    """
    params = [("x", ptr), ("next", i64), ("w", ptr), ("count", i64), ("k", i64), ("out", ptr)]
    f = m.function(f"multiply{tiles}", params, internal=True)
    regs, rows, halves = Tiles(f, _SHAPES), range(tiles), range(2)
    sums = {
        2 * r + s: f.gep(f["out"], _OUT_ROW * TILE_ROWS * r + TILE_BYTES * s)
        for r in rows
        for s in halves
    }
    for is_first in f.either(f["k"].eq(0)):
        for total, at in sums.items():
            if is_first:
                regs.zero(total)
            else:
                regs.load(total, at, _OUT_ROW)
    for k in f.range(0, f["count"]):
        for r in rows:
            regs.load(4 + r, f.gep(f.gep(f["x"], f["next"] * r), k, _TILE), TILE_BYTES)
        for s in halves:
            regs.load(6 + s, f.gep(f.gep(f["w"], k, _W_TILE), TILE_BYTES * s), 2 * TILE_BYTES)
        for total in sums:
            regs.multiply("bf16", total, 4 + total // 2, 6 + total % 2)
    for total, at in sums.items():
        regs.store(total, at, _OUT_ROW)
    return f
