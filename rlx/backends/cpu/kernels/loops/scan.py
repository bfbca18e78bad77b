"""Prefix sums (cumsum) along an axis; floats accumulate in f64, for precision on long axes."""

from __future__ import annotations

from rlx.backends.cpu.kernels.loops.registers import (
    convert,
    from_memory,
    raw_type,
    register_type,
    to_memory,
)
from rlx.backends.cpu.kernels.spec import KernelSpec
from rlx.ir.dtype import DType
from rlx.llvm.builder import Function, Module, Value, f64, i64, vec
from rlx.support.records import dataclass


@dataclass(frozen=True)
class CumSum(KernelSpec):
    """args: x, result, outer, size, inner

    Both are contiguous [outer, size, inner]. With `columns`, vectors are along `inner`.
    """

    source: DType
    result: DType
    exclusive: bool
    reverse: bool
    columns: bool

    @property
    def label(self) -> str:
        return "cumsum"

    def emit(self, m: Module) -> None:
        f = m.kernel()
        outer, inner = f.arg(f["args"], 2, i64), f.arg(f["args"], 4, i64)
        lanes = f.target.lanes(64) if self.columns else 1
        width = lanes * 4
        blocks = f.ceil_div(inner, width)
        lo, hi = f.split(outer * blocks)
        for item in f.range(lo, hi):
            row = item.udiv(blocks)
            start = (item - row * blocks) * width
            stop = f.min(start + width, inner)
            whole = start + (stop - start & -lanes)
            for column in f.range(start, whole, lanes):
                self._scan_columns(f, row, column, lanes)
            if lanes > 1:
                for column in f.range(whole, stop):
                    self._scan_columns(f, row, column, 1)

    def _scan_columns(self, f: Function, row: Value, column: Value, lanes: int) -> None:
        """Scan `lanes` neighbouring columns."""
        x, result = f.arg(f["args"], 0), f.arg(f["args"], 1)
        size, inner = f.arg(f["args"], 3, i64), f.arg(f["args"], 4, i64)
        base = row * size * inner + column
        sum_type = f64 if self.result.is_float else register_type(self.result)

        def body(i: Value, total: Value) -> Value:
            at = base + (size - 1 - i if self.reverse else i) * inner
            raw = f.load(f.gep(x, at, self.source.bytes), vec(lanes, raw_type(self.source)))
            element = convert(f, from_memory(f, raw, self.source), self.source, self.result)
            assert isinstance(element, Value)
            more = total + element.to(sum_type)
            shown = total if self.exclusive else more
            value = shown.to(register_type(self.result)) if self.result.is_float else shown
            f.store(to_memory(f, value, self.result), f.gep(result, at, self.result.bytes))
            return more

        f.loop(0, size, 1, [f.const(0, vec(lanes, sum_type))], body)
