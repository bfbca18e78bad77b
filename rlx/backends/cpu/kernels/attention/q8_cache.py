"""The Q8_0 KV cache: blocks of an f16 scale and 32 codes."""

from __future__ import annotations

from rlx.backends.cpu.kernels.spec import KernelSpec
from rlx.ir.dtype import DType
from rlx.ir.quant.scheme import GGUF_SCHEMES
from rlx.llvm.builder import Function, Module, Type, Value, f16, f32, i8, i32, i64, vec
from rlx.llvm.storage import load, memory_type
from rlx.support.records import dataclass

Q8_0 = GGUF_SCHEMES["Q8_0"]
_SIZE, _CODES = Q8_0.block_size, 2  # elements of a block; byte offset of its codes
_SMALLEST_NORMAL = 2.0**-126


def load_q8(f: Function, row: Value, at: Value, lanes: int, compute: Type) -> Value:
    """`lanes` elements of a Q8_0 row from element `at` on, all of one block."""
    block = f.gep(row, at.udiv(_SIZE), Q8_0.bytes_per_block)
    scale = f.load(block, f16).to(compute)
    codes = f.load(f.gep(block, at.urem(_SIZE)), vec(lanes, i8), _CODES)
    return codes.to(compute) * (scale if lanes == 1 else f.splat(scale, lanes))


@dataclass(frozen=True)
class QuantizeBlocks(KernelSpec):
    """x to Q8_0; its rows are contiguous blocks. args: x, out, blocks."""

    x: DType

    def emit(self, m: Module) -> None:
        f = m.kernel()
        x, out = f.arg(f["args"], 0), f.arg(f["args"], 1)
        lo, hi = f.split(f.arg(f["args"], 2, i64))
        for block in f.range(lo, hi):
            source = f.gep(x, block, _SIZE * memory_type(self.x).bytes)
            self._block(f, source, f.gep(out, block, Q8_0.bytes_per_block))

    def _block(self, f: Function, x: Value, to: Value) -> None:
        """Rounds as `quant.encode` does: by the inverse of the scale before that becomes f16, and
        halves away from zero. The fraction is exact, so halves are recognised."""
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


__all__ = ["Q8_0", "QuantizeBlocks", "load_q8"]
