"""GEMM with the rows of a packed weight along k: x [m, n] · W, the backward part of x · Wᵀ.

Of a k block a strip of columns is dequantised, as wide as a block of the scheme or as a panel; it
is a panel of the GEMM, or holds several. All rows of a row block share that cost.
"""

from __future__ import annotations

import math

from rlx.backends.cpu.kernels.gemm.gemm import (
    KC,
    Block,
    Gemm,
    GemmEmitter,
    panel_group,
    round_up,
)
from rlx.backends.cpu.kernels.qgemm.dequantize import emit_dequantize
from rlx.ir.quant.scheme import GGUF_SCHEMES, QuantScheme
from rlx.llvm.builder import Function, Module, Value, ptr
from rlx.llvm.target import Target
from rlx.support.records import dataclass

_F32 = GGUF_SCHEMES["F32"]


@dataclass(frozen=True)
class TransposedDequantGemm(Gemm):
    """args: as `self.args` lists them; `row`, `scale_row` and `zp_row` are the bytes of a packed
    row and of what belongs to it."""

    scheme: QuantScheme = _F32

    @property
    def args(self) -> list[str]:
        return [*super().args, "scale", "zp", "row", "scale_row", "zp_row"]

    @property
    def label(self) -> str:
        return f"transposed_gemm {self.scheme}"

    def strip(self, columns: int) -> int:
        """Columns that are dequantised at once: whole blocks and whole panels."""
        return math.lcm(columns, self.scheme.block or self.scheme.block_size, 2)

    def scratch(self, target: Target, rows: int, n: int, k: int) -> int:
        g = self.tile_shape(target)
        wide = min(max(k, 1), KC) * (self.strip(g.nr) - g.nr) * 4
        return super().scratch(target, rows, n, k) + round_up(wide, 64)

    def emit(self, m: Module) -> None:
        _Emitter(self, m).emit()


class _Emitter(GemmEmitter):
    spec: TransposedDequantGemm

    def __init__(self, spec: TransposedDequantGemm, m: Module) -> None:
        self.dequantize = emit_dequantize(m, spec.scheme)
        super().__init__(spec, m)
        self.strip = spec.strip(self.columns)
        self.panel_stride = self.strip * 4  # of the dequantised strip that panels lie in

    def arg(self, f: Function, name: str) -> Value:
        if name in ("scale", "zp"):
            return f.arg(f["args"], self.spec.args.index(name), ptr)
        return super().arg(f, name)

    def row_block(
        self, x: Value, w: Value, rows: Value, at: Value, first: Value, last: Value
    ) -> None:
        f, panels = self.f, self.strip // self.columns
        group = f.select(self.one_k_block, f.max(last, 1), f.i64(panel_group(self.g)))
        for start in f.range(first, last, group):
            stop = f.min(start + group, last)
            for k in f.range(0, self["k"], self.kc, guard=False):
                kc = f.min(self.kc, self["k"] - k)
                rows_at = self._pack_x(f.gep(x, k * self["x_stride_k"]), rows, kc)
                for p in f.range(start, stop):
                    inside = p.urem(panels)
                    for _ in f.when(inside.eq(0) | p.eq(start)):
                        self._dequantize(w, (p - inside) * self.columns, k, kc)
                    panel = f.gep(self.packed_panel, inside * self.columns, 4)
                    slot = f.select(self.one_k_block, 0, (p - start) * f.ceil_div(rows, self.g.mr))
                    stride = f.i64(self.panel_stride)
                    block = Block(rows_at, panel, stride, panel, k, kc)
                    self._macro_kernel(block, rows, slot, at, p * self.columns)

    def _dequantize(self, w: Value, column: Value, k: Value, kc: Value) -> None:
        """The strip from `column` on, of the packed rows of a k block."""
        f, count = self.f, self.f.min(self["n"] - column, self.strip)
        names = ((w, "row"), (self["scale"], "scale_row"), (self["zp"], "zp_row"))
        for i in f.range(0, kc):
            places = [f.gep(base, (k + i) * self[step]) for base, step in names]
            to = f.gep(self.packed_panel, i, self.panel_stride)
            f.call(self.dequantize, *places, column, count, to)
