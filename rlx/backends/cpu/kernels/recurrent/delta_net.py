"""The gated delta rule: a kernel for one token, and one for many with the same arithmetic.

Per token S ← e·S, d = (v − kᵀS)·β, S ← S + k dᵀ, o = qᵀS/√N with e = exp(g). Columns of S are
independent, so a work item is a block of columns of one head. Tokens run one after the other, so
that a token's numbers do not depend on how many run with it. (The chunkwise form of the rule would
round differently for every cut of a sequence into chunks.)
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

from rlx.backends.cpu.kernels.recurrent.selective_scan import dividing_lanes
from rlx.backends.cpu.kernels.spec import KernelSpec, Operands
from rlx.ir.dtype import DType
from rlx.llvm.builder import Function, Module, Type, Value, f32, f64, i64, vec
from rlx.llvm.math import exp
from rlx.llvm.storage import load, memory_type, narrow, store, widen
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
    def flushes_denormals(self) -> bool:
        return True

    @property
    def args(self) -> list[str]:
        return [*self.rule.operands, "heads"]

    def emit(self, m: Module) -> None:
        _Step(self.rule, m.kernel(), self.args).emit()


class _Token(Emitter):
    """What both kernels do for a token: `row` is its first element in q, k and v."""

    @property
    def accumulators(self) -> int:
        """Independent sums of kᵀS, to hide the latency of the fma."""
        return 4 if self.size % 4 == 0 else 1

    def zeros(self, count: int = 1) -> list[Value]:
        return [self.f.const(0, self.vector)] * (count * self.vectors)

    def key(self, row: Value, i: Value) -> Value:
        return self.splat(self.load("k", row + i))

    def predict(self, row: Value, state: Callable[[Value], list[Value]]) -> list[Value]:
        """kᵀS: the prediction of a state, given by rows, for this key, before the decay."""

        def add(i: Value, *sums: Value) -> list[Value]:
            out = list(sums)
            for c in range(self.accumulators):
                self.add_row(out, c, self.key(row, i + c), state(i + c))
            return out

        start = self.zeros(self.accumulators)
        return self.total(self.f.loop(0, self.size, self.accumulators, start, add))

    def add_row(self, sums: list[Value], number: int, k: Value, state: list[Value]) -> None:
        """Add a row of the state to accumulators `number` of kᵀS."""
        for j, s in enumerate(state):
            at = number * self.vectors + j
            sums[at] = self.f.fma(k, s, sums[at])

    def total(self, sums: list[Value]) -> list[Value]:
        """kᵀS from its accumulators."""
        while len(sums) > self.vectors:
            half = len(sums) // 2
            sums = [a + b for a, b in zip(sums[:half], sums[half:], strict=True)]
        return sums

    def gates(self, at: Value) -> tuple[Value, Value]:
        """e and β of a token."""
        return self.splat(exp(self.load("g", at))), self.splat(self.load("beta", at))

    def deltas(self, v: list[Value], prediction: list[Value], e: Value, beta: Value) -> list[Value]:
        f = self.f
        return [f.fma(-p, e, x) * beta for x, p in zip(v, prediction, strict=True)]

    def updated(self, k: Value, e: Value, deltas: list[Value], old: list[Value]) -> list[Value]:
        """A row of the state after the token."""
        return [self.f.fma(e, s, k * d) for s, d in zip(old, deltas, strict=True)]

    def write(self, row: Value, totals: list[Value]) -> None:
        """The token's result, from qᵀS."""
        self.store("o", row, [t * (1 / sqrt(self.size)) for t in totals])


class _Step(_Token):
    def emit(self) -> None:
        f, o = self.f, self.o
        lo, hi = f.split(o["heads"] * self.blocks)
        for work_item in f.range(lo, hi):
            head, column = work_item.udiv(self.blocks), work_item.urem(self.blocks) * self.width
            self._columns(head, column)

    def _columns(self, head: Value, column: Value) -> None:
        f, n = self.f, self.size
        first, row = head * (n * n) + column, head * n

        def state(i: Value) -> list[Value]:
            given = self.rule.state is not None
            return self.row("state", first + i * n) if given else self.zeros()

        e, beta = self.gates(head)
        prediction = self.zeros() if self.rule.state is None else self.predict(row, state)
        deltas = self.deltas(self.row("v", row + column), prediction, e, beta)

        def update(i: Value, *sums: Value) -> list[Value]:
            q = self.splat(self.load("q", row + i))
            rows = self.updated(self.key(row, i), e, deltas, state(i))
            self.store("last", first + i * n, rows)
            return [f.fma(q, s, total) for s, total in zip(rows, sums, strict=True)]

        self.write(row + column, f.loop(0, n, 1, self.zeros(), update))


@dataclass(frozen=True)
class DeltaTokens(KernelSpec):
    """args: q, k, v, g, beta, state (if any), o, last, scratch, batch, seq, heads

    Any number of tokens. A work item copies its columns of the state to scratch memory; while a
    token updates them, the next one's prediction is summed.
    """

    rule: Rule

    @property
    def flushes_denormals(self) -> bool:
        return True

    @property
    def args(self) -> list[str]:
        return [*self.rule.operands, "scratch", "batch", "seq", "heads"]

    def scratch(self, target: Target) -> int:
        """Bytes each worker needs."""
        width = self.rule.lanes(target) * self.rule.vectors(target)
        return -(-self.rule.size * width * self.rule.sums.bytes // 64) * 64

    def emit(self, m: Module) -> None:
        _Tokens(self, m.kernel()).emit()


class _Tokens(_Token):
    def __init__(self, spec: DeltaTokens, f: Function) -> None:
        super().__init__(spec.rule, f, spec.args)
        size = spec.scratch(f.target)
        self.own = f.gep(self.o["scratch"], f["tid"].to(i64), size)

    def emit(self) -> None:
        f, o = self.f, self.o
        lo, hi = f.split(o["batch"] * o["heads"] * self.blocks)
        for work_item in f.range(lo, hi):
            head, column = work_item.udiv(self.blocks), work_item.urem(self.blocks) * self.width
            sequence = head.udiv(o["heads"])
            # token s of this head has number `token` + s·heads, and element N times that of q
            token = sequence * o["seq"] * o["heads"] + head.urem(o["heads"])
            self._columns(head * (self.size * self.size) + column, token, column)

    def _columns(self, first: Value, token: Value, column: Value) -> None:
        f, n, last = self.f, self.size, self.o["seq"] - 1
        for i in f.range(0, n):
            given = self.rule.state is not None
            self._put(i, self.row("state", first + i * n) if given else self.zeros())

        def step(s: Value, *prediction: Value) -> list[Value]:
            return self._token(token + s * self.o["heads"], column, list(prediction), True)

        def tokens() -> None:
            prediction = f.loop(0, last, 1, self.predict(token * n, self._state), step)
            self._token(token + last * self.o["heads"], column, prediction, False)

        f.if_(last >= 0, tokens)
        for i in f.range(0, n):
            self.store("last", first + i * n, self._state(i))

    def _token(self, at: Value, column: Value, prediction: list[Value], more: bool) -> list[Value]:
        """Update the state; returns the prediction for the next token, if there are more."""
        f, row, count = self.f, at * self.size, self.accumulators
        following = row + self.o["heads"] * self.size
        e, beta = self.gates(at)
        deltas = self.deltas(self.row("v", row + column), prediction, e, beta)

        def update(i: Value, *sums: Value) -> list[Value]:
            totals, predicted = list(sums[: self.vectors]), list(sums[self.vectors :])
            for c in range(count):
                q = self.splat(self.load("q", row + i + c))
                rows = self.updated(self.key(row, i + c), e, deltas, self._state(i + c))
                totals = [f.fma(q, s, total) for s, total in zip(rows, totals, strict=True)]
                kept = self._put(i + c, rows)
                if more:
                    self.add_row(predicted, c, self.key(following, i + c), kept)
            return [*totals, *predicted]

        start = self.zeros(1 + count * more)
        sums = f.loop(0, self.size, count, start, update)
        self.write(row + column, sums[: self.vectors])
        return self.total(sums[self.vectors :]) if more else []

    def _state(self, i: Value) -> list[Value]:
        f, base = self.f, self.f.gep(self.own, i, self.width * self.sums.bytes)
        return [f.load(base, self.vector, j * self.vector.bytes) for j in range(self.vectors)]

    def _put(self, i: Value, rows: list[Value]) -> list[Value]:
        """Keep a row of the state as the result can hold it: what one token leaves in memory."""
        f, dtype = self.f, self.rule.last
        if memory_type(dtype) is not self.sums:
            rows = [widen(f, narrow(f, x, dtype), dtype, self.sums) for x in rows]
        base = f.gep(self.own, i, self.width * self.sums.bytes)
        for j, x in enumerate(rows):
            f.store(x, base, j * self.vector.bytes)
        return rows
