"""The gated delta rule: the kernel for one token, and the base of both kernels.

Per token S ← e·S, d = (v − kᵀS)·β, S ← S + k dᵀ, o = qᵀS/√N with e = exp(g). Columns of S are
independent, so a work item is a block of columns of one head.
"""

from __future__ import annotations

from math import sqrt

from rlx.backends.cpu.kernels.recurrent.selective_scan import dividing_lanes
from rlx.backends.cpu.kernels.spec import KernelSpec, Operands
from rlx.ir.dtype import DType
from rlx.llvm.builder import Function, Module, Type, Value, f32, f64, vec
from rlx.llvm.math import exp
from rlx.llvm.storage import load, memory_type, store
from rlx.llvm.target import Target
from rlx.support.records import dataclass

_POINTERS = ("q", "k", "v", "g", "beta", "state", "o", "last", "scratch")


@dataclass(frozen=True)
class Rule:
    """The problem of both kernels: element types and the size N of a head."""

    q: DType
    k: DType
    v: DType
    g: DType
    beta: DType
    state: DType | None
    o: DType
    last: DType
    size: int

    @property
    def sums(self) -> Type:
        types = (self.q, self.k, self.v, self.g, self.beta, self.state, self.last)
        return f64 if any(t is not None and t.bits == 64 for t in types) else f32

    def lanes(self, target: Target) -> int:
        return dividing_lanes(target, self.sums.bits, self.size)

    def vectors(self, target: Target) -> int:
        """Vectors of a block of columns."""
        most = 4 if target.num_vector_registers >= 32 else 2
        count = self.size // self.lanes(target)
        return max(v for v in range(1, most + 1) if count % v == 0)

    def blocks(self, target: Target) -> int:
        return self.size // (self.lanes(target) * self.vectors(target))

    @property
    def operands(self) -> list[str]:
        given = ["state"] * (self.state is not None)
        return ["q", "k", "v", "g", "beta", *given, "o", "last"]


class Emitter:
    """Base of the emitters: loads and stores of blocks of columns."""

    def __init__(self, rule: Rule, f: Function, args: list[str]) -> None:
        self.rule, self.f, self.size = rule, f, rule.size
        self.sums, self.lanes = rule.sums, rule.lanes(f.target)
        self.vectors, self.blocks = rule.vectors(f.target), rule.blocks(f.target)
        self.width = self.lanes * self.vectors
        self.vector = vec(self.lanes, self.sums)
        self.o = Operands(f, args, _POINTERS)

    def load(self, name: str, at: Value, lanes: int = 1) -> Value:
        dtype: DType = getattr(self.rule, name)
        address = self.f.gep(self.o[name], at, memory_type(dtype))
        return load(self.f, address, dtype, lanes, self.sums)

    def row(self, name: str, at: Value) -> list[Value]:
        """The vectors of a block of columns from element `at` on."""
        return [self.load(name, at + j * self.lanes, self.lanes) for j in range(self.vectors)]

    def store(self, name: str, at: Value, values: list[Value]) -> None:
        dtype: DType = getattr(self.rule, name)
        for j, value in enumerate(values):
            address = self.f.gep(self.o[name], at + j * self.lanes, memory_type(dtype))
            store(self.f, value, address, dtype)

    def splat(self, value: Value) -> Value:
        return self.f.splat(value, self.lanes)


@dataclass(frozen=True)
class DeltaStep(KernelSpec):
    """args: q, k, v, g, beta, state (if any), o, last, heads

    One token of every head (`heads` counts those of all sequences): reads and writes the state
    once, at memory bandwidth.
    """

    rule: Rule

    @property
    def args(self) -> list[str]:
        return [*self.rule.operands, "heads"]

    def emit(self, m: Module) -> None:
        _Step(self.rule, m.kernel(), self.args).emit()


class _Step(Emitter):
    def emit(self) -> None:
        f, o = self.f, self.o
        lo, hi = f.split(o["heads"] * self.blocks)
        for work_item in f.range(lo, hi):
            head, column = work_item.udiv(self.blocks), work_item.urem(self.blocks) * self.width
            self._columns(head, column)

    def _columns(self, head: Value, column: Value) -> None:
        f, n = self.f, self.size
        first = head * (n * n) + column
        decay = self.splat(exp(self.load("g", head)))
        beta = self.splat(self.load("beta", head))
        row = head * n
        prediction = self._predict(first, row) if self.rule.state is not None else None
        delta = []
        for j, v in enumerate(self.row("v", row + column)):
            error = v if prediction is None else v - prediction[j] * decay
            delta.append(error * beta)

        def update(i: Value, *sums: Value) -> list[Value]:
            k, q = self.splat(self.load("k", row + i)), self.splat(self.load("q", row + i))
            rows = [k * d for d in delta]
            if prediction is not None:
                old = self.row("state", first + i * n)
                rows = [f.fma(decay, s, r) for s, r in zip(old, rows, strict=True)]
            self.store("last", first + i * n, rows)
            return [f.fma(q, s, total) for s, total in zip(rows, sums, strict=True)]

        zeros = [f.const(0, self.vector)] * self.vectors
        totals = f.loop(0, n, 1, zeros, update)
        self.store("o", row + column, [t * (1 / sqrt(n)) for t in totals])

    def _predict(self, first: Value, row: Value) -> list[Value]:
        """kᵀS: the state's prediction for this key, before the decay."""
        f, n = self.f, self.size
        accumulators = 4 if n % 4 == 0 else 1  # independent, to hide the latency of the fma

        def add(i: Value, *sums: Value) -> list[Value]:
            out = list(sums)
            for c in range(accumulators):
                k = self.splat(self.load("k", row + i + c))
                for j, s in enumerate(self.row("state", first + (i + c) * n)):
                    at = c * self.vectors + j
                    out[at] = f.fma(k, s, out[at])
            return out

        zeros = [f.const(0, self.vector)] * (accumulators * self.vectors)
        sums = f.loop(0, n, accumulators, zeros, add)
        while len(sums) > self.vectors:
            half = len(sums) // 2
            sums = [a + b for a, b in zip(sums[:half], sums[half:], strict=True)]
        return sums
