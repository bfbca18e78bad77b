"""GEMM with weights dequantised on the fly: any scheme, on any target.

Many rows: a panel of columns is dequantised, row by row of the stored weight, transposed, and read
by the f32 micro-kernel; all rows of a block share its cost. Few rows: every stored row is
dequantised into the cache and multiplied with all of them at once.
"""

from __future__ import annotations

from functools import partial

from rlx.backends.cpu.kernels.gemm.gemm import (
    KC,
    MC,
    PANEL_GROUP,
    Gemm,
    GemmEmitter,
    round_up,
    to_cache_line,
)
from rlx.backends.cpu.kernels.gemm.grouped_gemm import GroupedGemm, GroupedGemmEmitter
from rlx.backends.cpu.kernels.gemm.microkernel import MR
from rlx.backends.cpu.kernels.qgemm.dequantize import emit_dequantize
from rlx.ir.quant.scheme import GGUF_SCHEMES, QuantScheme
from rlx.llvm.builder import Function, Module, Value, f32, i64, ptr, vec
from rlx.llvm.target import Target
from rlx.support.records import dataclass

FEW_ROWS = 12  # up to so many rows dequantising a column at a time beats transposing panels
_AT_ONCE = 4  # rows that share the loads of a column, or accumulators of one row
_POINTERS = frozenset(["scale", "zp"])
_F32 = GGUF_SCHEMES["F32"]


def dequant_kc(scheme: QuantScheme) -> int:
    """k of a dequantised panel: about `KC`, in whole blocks."""
    run = scheme.block or scheme.block_size
    return max(KC // run, 1) * run


@dataclass(frozen=True)
class DequantGemm(Gemm):
    """args: as `self.args` lists them; `w`, `scale` and `zp` are the weight's, with
    `row`, `scale_row` and `zp_row` bytes to a row."""

    scheme: QuantScheme = _F32

    @property
    def args(self) -> list[str]:
        return [*super().args, "scale", "zp", "row", "scale_row", "zp_row"]

    @property
    def label(self) -> str:
        return f"dequant_gemm {self.scheme}"

    @property
    def reads_x_in_place(self) -> bool:
        """Rows are copied: with few rows, some beyond the last may be read."""
        return False

    def scratch(self, target: Target, rows: int, n: int, k: int) -> int:
        kc = dequant_kc(self.scheme)
        g, tall = self.tile_shape(target), round_up(min(rows, MC), MR)
        tiles = min(-(-n // g.nr), PANEL_GROUP) * max(tall // MR, 1) * g.tile_bytes
        parts = [max(tall * kc, FEW_ROWS * k), kc * g.nr, max(kc * g.nr, k)]
        return sum(round_up(4 * p, 64) for p in parts) + max(tiles, FEW_ROWS * g.row_bytes)

    def emit(self, m: Module) -> None:
        DequantGemmEmitter(self, m).emit()


class _DequantEmitter(GemmEmitter):
    """Panels from quantised rows. `spec.w` is f32: what the micro-kernel reads."""

    spec: DequantGemm
    dequantize: Function

    def arg(self, f: Function, name: str) -> Value:
        if name in _POINTERS:
            return f.arg(f["args"], self.spec.args.index(name), ptr)
        return super().arg(f, name)

    def lay_out_scratch(self, offset: Value, mc: Value) -> None:
        """Packed rows of x (or x itself, if few), a panel, dequantised rows, and tiles."""
        f, kc, k = self.f, dequant_kc(self.spec.scheme), self["k"]
        self.choose_kc(mc)
        tall = f.ceil_div(mc, MR) * MR
        self.packed_x = f.gep(self["scratch"], offset)
        rows = f.max(tall * kc, k * FEW_ROWS)
        self.packed_panel = f.gep(self.packed_x, to_cache_line(rows * 4))
        panel = round_up(4 * kc * self.g.nr, 64)
        self.dequantized = f.gep(self.packed_panel, panel)
        self.tiles = f.gep(self.dequantized, f.max(to_cache_line(k * 4), panel))

    def choose_kc(self, rows: Value) -> None:
        kc = dequant_kc(self.spec.scheme)
        self.kc, self.one_k_block = self.f.i64(kc), self["k"] <= kc

    def dequantize_row(self, w: Value, row: Value, k: Value, count: Value, out: Value) -> None:
        """Weights k .. k + count of a row of the expert (or the whole weight) that begins at w."""
        f = self.f
        before = (w.bits(i64) - self["w"].bits(i64)).udiv(f.max(self["row"], 1))
        index = before + row
        names = (("w", "row"), ("scale", "scale_row"), ("zp", "zp_row"))
        places = [f.gep(self[base], index * self[step]) for base, step in names]
        f.call(self.dequantize, *places, k, count, out)

    def _panel(self, w: Value, p: Value, k: Value, kc: Value) -> Value:
        f = self.f
        first = p * self.columns
        count = f.min(self["n"] - first, self.columns)
        for i in f.range(0, count):
            self.dequantize_row(w, first + i, k, kc, f.gep(self.dequantized, i * kc, 4))
        self._pack_panel(self.dequantized, (kc * 4, f.i64(4)), count, kc, 0)
        return self.packed_panel


class DequantGemmEmitter(_DequantEmitter):
    def __init__(self, spec: DequantGemm, m: Module) -> None:
        super().__init__(spec, m)
        self.dequantize = emit_dequantize(m, spec.scheme)

    def emit(self) -> None:
        f = self.f
        f.if_(self["m"] <= FEW_ROWS, self._few_rows, super().emit)

    def _few_rows(self) -> None:
        """Dequantise every column once and multiply it with all rows."""
        f, rows, k = self.f, self["m"], self["k"]
        self.lay_out_scratch(f["tid"].to(i64) * self["worker_bytes"], rows)
        self._copy_rows(rows, k)
        panels = f.ceil_div(self["n"], self.columns)
        lo, hi = f.split(panels)
        for p in f.range(lo, hi):
            first = p * self.columns
            count = f.min(self["n"] - first, self.columns)
            for c in f.range(0, count):
                self.dequantize_row(self["w"], first + c, f.i64(0), k, self.dequantized)
                f.if_(rows.eq(1), partial(self._column, 1, c), partial(self._column, _AT_ONCE, c))
            self._run_epilogue(self.tiles, rows, first, first, f.null())

    def _column(self, at_once: int, c: Value) -> None:
        """Column c of the tile, some rows at once; missing rows hold anything."""
        f, k = self.f, self["k"]
        for r in f.range(0, self["m"], at_once):
            rows = [f.gep(self.packed_x, (r + i) * k, 4) for i in range(at_once)]
            for i, total in enumerate(self._dots(rows, self.dequantized, k)):
                f.store(total, f.gep(self.tiles, (r + i) * self.g.nr + c, 4))

    def _copy_rows(self, rows: Value, k: Value) -> None:
        """The rows as f32, one after another."""
        f = self.f
        for r in f.range(0, rows):
            src = f.gep(self["x"], r * self["x_stride_m"])
            dst = f.gep(self.packed_x, r * k, 4)
            one = f.i64(1)
            f.call(
                self.pack_x, src, self["x_stride_m"], self["x_stride_k"], one, k, dst, one, f.null()
            )

    def _dots(self, rows: list[Value], b: Value, k: Value) -> list[Value]:
        """Dot products of rows with one column."""
        f, lanes, count = self.f, self.g.lanes, len(rows)
        wide, chains = vec(lanes, f32), _AT_ONCE // count
        whole = k - k.urem(lanes * chains)

        def step(i: Value, *given: Value) -> list[Value]:
            sums = list(given)
            places = [f.gep(row, i, 4) for row in rows]
            column = f.gep(b, i, 4)
            for j in range(chains):
                weights = f.load(column, wide, j * wide.bytes)
                for r, place in enumerate(places):
                    x = f.load(place, wide, j * wide.bytes)
                    sums[j * count + r] = f.fma(x, weights, sums[j * count + r])
            return sums

        zeros = [f.const(0.0, wide)] * _AT_ONCE
        sums = f.loop(0, whole, lanes * chains, zeros, step)
        totals = []
        for r in range(count):
            total = sums[r]
            for j in range(1, chains):
                total = total + sums[j * count + r]
            totals.append(f.reduce("add", total))

        def one(i: Value, *totals: Value) -> list[Value]:
            weight = f.load(f.gep(b, i, 4), f32)
            return [
                f.fma(f.load(f.gep(row, i, 4), f32), weight, total)
                for row, total in zip(rows, totals, strict=True)
            ]

        return f.loop(whole, k, 1, totals, one)


@dataclass(frozen=True)
class DequantGroupedGemm(DequantGemm, GroupedGemm):
    """args: those of `DequantGemm`, and `table`, `w_expert` as for `GroupedGemm`."""

    def emit(self, m: Module) -> None:
        _DequantGroupedEmitter(self, m).emit()


class _DequantGroupedEmitter(_DequantEmitter, GroupedGemmEmitter):
    def __init__(self, spec: DequantGroupedGemm, m: Module) -> None:
        GroupedGemmEmitter.__init__(self, spec, m)
        self.dequantize = emit_dequantize(m, spec.scheme)
