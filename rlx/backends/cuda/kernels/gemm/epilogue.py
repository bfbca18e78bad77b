"""What happens to a sum of products before it is stored: bias, activation, gate, residual."""

from __future__ import annotations

from rlx.backends.cuda.builder import BlockFunction
from rlx.backends.cuda.kernels.gemm.weight_rows import load_run
from rlx.ir.dtype import DType
from rlx.llvm.builder import Value, f32
from rlx.llvm.storage import load, memory_type, store
from rlx.support.records import dataclass


@dataclass(frozen=True)
class Epilogue:
    """activation(x·w + bias) + residual, in `out`; with `pair`, activation(x·gate) * (x·up)."""

    out: DType
    activation: str = "none"
    bias: DType | None = None
    residual: DType | None = None
    pair: bool = False

    @property
    def extras(self) -> int:
        """How many operands it has beside the result."""
        return (self.bias is not None) + (self.residual is not None)


class EpilogueArgs:
    """The addresses of the result and of what is added to it, from arg `first` on."""

    def __init__(self, f: BlockFunction, epilogue: Epilogue, first: int) -> None:
        args = f["args"]
        self.f, self.epilogue, self.out = f, epilogue, f.arg(args, first)
        self.bias = self.residual = None
        if epilogue.bias is not None:
            self.bias = f.arg(args, first + 1)
        if epilogue.residual is not None:
            self.residual = f.arg(args, first + epilogue.extras)
        self.added: Value | None = None  # the residual, where it was loaded before

    def load_residual(self, at: Value) -> None:
        """Load what is added to element `at` (i64) of the output, the only one of this thread."""
        f, dtype = self.f, self.epilogue.residual
        if self.residual is not None and dtype is not None:
            there = f.gep(self.residual, at, memory_type(dtype).bytes)
            self.added = load(f, there, dtype, 1, f32)

    def finish(self, total: Value, other: Value | None, column: Value, at: Value) -> Value:
        """The result (f32) of column `column` (i64) at element `at` (i64) of the output."""
        f, e = self.f, self.epilogue
        if self.bias is not None and e.bias is not None:
            there = f.gep(self.bias, column, memory_type(e.bias).bytes)
            total = total + load(f, there, e.bias, 1, f32)
        total = f.activate(e.activation, total)
        if other is not None:
            total = total * other
        if self.added is not None:
            total = total + self.added
        elif self.residual is not None and e.residual is not None:
            there = f.gep(self.residual, at, memory_type(e.residual).bytes)
            total = total + load(f, there, e.residual, 1, f32)
        return total

    def finish_pair(
        self, totals: list[Value], others: list[Value] | None, column: Value, at: Value
    ) -> list[Value]:
        """As `finish`, of two neighbours, the first at an even element. What is added to them lies
        at addresses that are aligned for two."""
        f, e = self.f, self.epilogue
        if self.bias is not None and e.bias is not None:
            more = load_run(f, self.bias, column, 2, e.bias)
            totals = [a + b for a, b in zip(totals, more, strict=True)]
        totals = [f.activate(e.activation, v) for v in totals]
        if others is not None:
            totals = [a * b for a, b in zip(totals, others, strict=True)]
        if self.residual is not None and e.residual is not None:
            more = load_run(f, self.residual, at, 2, e.residual)
            totals = [a + b for a, b in zip(totals, more, strict=True)]
        return totals

    def store(self, total: Value, other: Value | None, column: Value, at: Value) -> None:
        """Finish one element and store it."""
        self.write(self.finish(total, other, column, at), at)

    def write(self, made: Value, at: Value) -> None:
        out = self.epilogue.out
        store(self.f, made, self.f.gep(self.out, at, memory_type(out).bytes), out)

    def store_pair(self, first: Value, second: Value, at: Value) -> None:
        """Write two neighbours, the first at an even element."""
        f, out = self.f, self.epilogue.out
        to = f.gep(self.out, at, memory_type(out).bytes)
        if out.bytes == 4:
            f.store(f.join([first, second]), to, align=8)
        else:
            f.store(f.pack_halves(first, second, memory_type(out)), to, align=4)
