"""Keys and values packed in blocks of Q8_0: 32 codes behind the scale they share."""

from __future__ import annotations

from rlx.codegen.emit import Function, Module, Type, Value, f16, f32, i8, i32, i64, vec
from rlx.codegen.kernel import KernelSpec
from rlx.codegen.storage import load, memory_type
from rlx.ir.dtype import DType
from rlx.ir.quant import GGUF_SCHEMES
from rlx.support.records import dataclass

Q8_0 = GGUF_SCHEMES["Q8_0"]
_SIZE, _CODES = Q8_0.block_size, 2  # numbers of a block; where its codes begin
_SMALLEST_NORMAL = 2.0**-126


def load_packed(f: Function, row: Value, at: Value, lanes: int, compute: Type) -> Value:
    """`lanes` numbers of a packed row from number `at` on; they belong to one block."""
    block = f.gep(row, at.udiv(_SIZE), Q8_0.bytes_per_block)
    scale = f.load(block, f16).to(compute)
    codes = f.load(f.gep(block, at.urem(_SIZE)), vec(lanes, i8), _CODES)
    return codes.to(compute) * (scale if lanes == 1 else f.splat(scale, lanes))


@dataclass(frozen=True)
class QuantizeBlocks(KernelSpec):
    """args: x, out, blocks. Rows without gaps are blocks one after the other."""

    x: DType

    def emit(self, m: Module) -> None:
        f = m.kernel()
        x, out = f.arg(f["args"], 0), f.arg(f["args"], 1)
        lo, hi = f.split(f.arg(f["args"], 2, i64))
        for block in f.range(lo, hi):
            source = f.gep(x, block, _SIZE * memory_type(self.x).bytes)
            self._block(f, source, f.gep(out, block, Q8_0.bytes_per_block))

    def _block(self, f: Function, x: Value, to: Value) -> None:
        """The rounding of `quant.encode`: the inverse of the scale before it becomes f16, and
        halves away from zero. What is left after the whole part is exact, so halves are seen."""
        numbers = load(f, x, self.x, _SIZE, f32)
        scale = f.reduce("max", f.abs(numbers)) / 127.0
        inverse = f.select(scale < _SMALLEST_NORMAL, 0.0, 1.0 / scale)
        with f.exact():
            scaled = numbers * f.splat(inverse, _SIZE)
            whole = scaled.to(vec(_SIZE, i32))
            rest = scaled - whole.to(f32)
        up, down = (
            f.select(flag, 1, f.const(0, whole.type)) for flag in (rest >= 0.5, rest <= -0.5)
        )
        f.store(scale.to(f16), to)
        f.store((whole + up - down).to(i8), to, _CODES)


__all__ = ["Q8_0", "QuantizeBlocks", "load_packed"]
