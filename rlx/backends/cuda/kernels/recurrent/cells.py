"""LSTM and GRU as one kernel: a warp has the recurrent weights of a unit in registers.

After a step the warps hand each other their units: an f32 whose two lowest bits are a tag of the
step, so a value says by itself that it has come (an error of 2⁻²²). Two places take turns: a warp
writes a place again only after it has received all of the step between, which nobody could compute
before he had received all of the step that lay there. Steps are counted on from launch to launch.
"""

from __future__ import annotations

from rlx.backends.cuda.builder import WARP, BlockFunction, KernelModule
from rlx.backends.cuda.kernel import BlockKernel
from rlx.backends.cuda.kernels.recurrent.selective_scan import exp
from rlx.llvm.builder import Value, f32, i64
from rlx.llvm.builder import i32 as word
from rlx.support.records import dataclass

UNITS = 8  # of a block: a warp has one
MOST_UNITS = 1024
GATES = {"lstm": 4, "gru": 3}
HEAD = 64  # bytes of lasting memory that hold the number of steps so far
_PATIENCE = 1 << 32  # clocks: seconds


@dataclass(frozen=True)
class CellSteps(BlockKernel):
    """args: x_gates, r, h, c (or 0), bias (or 0), y, last h, last c (or 0), lasting memory, steps,
    rows"""

    cell: str
    hidden: int
    bias: bool
    reverse: bool

    @property
    def label(self) -> str:
        return f"{self.cell}({self.hidden})"

    @property
    def threads(self) -> int:
        return UNITS * WARP

    @property
    def blocks(self) -> int:
        return -(-self.hidden // UNITS)

    def lasting(self, rows: int) -> int:
        """Bytes of lasting memory."""
        return HEAD + 2 * 4 * rows * self.hidden

    def emit(self, m: KernelModule) -> None:
        f = m.begin_block(self.threads)
        f.patience = _PATIENCE
        _Emitter(f, self).emit()


class _Emitter:
    def __init__(self, f: BlockFunction, kernel: CellSteps) -> None:
        self.f, self.kernel, args = f, kernel, f["args"]
        self.gates, self.hidden = GATES[kernel.cell], kernel.hidden
        names = ("x", "r", "h", "c", "bias", "y", "last_h", "last_c", "lasting")
        self.base = {name: f.arg(args, i) for i, name in enumerate(names)}
        self.steps, self.rows = f.arg(args, 9, i64), f.arg(args, 10, i64)
        unit = f.block_number() * UNITS + (f.thread() >> 5)
        self.owns = (unit < kernel.hidden) & f.lane32().eq(0)
        self.unit = f.min(unit, kernel.hidden - 1).to(i64)
        # runs of four columns of a lane; those past the end count nothing
        firsts = [(f.lane32() + i) * 4 for i in range(0, -(-kernel.hidden // 4), WARP)]
        self.inside = [c < kernel.hidden for c in firsts]
        self.columns = [f.min(c, kernel.hidden - 4).to(i64) for c in firsts]

    def emit(self) -> None:
        f, base = self.f, self.base
        f.let_next_start()
        f.wait_for_previous()
        self.weights = [self._weights(g) for g in range(self.gates)]
        before = f.load(base["lasting"], i64)

        for t in f.range(f.i64(0), self.steps):
            for row in f.range(f.i64(0), self.rows):
                self._row(t, before + t, row)
        f.if_(self.steps.eq(0), self._copy_states)
        # with two steps or more this block has values of all others: they have read the number
        counts = f.block_number().eq(0) & f.thread().eq(0) & (self.steps > 1)
        f.if_(counts, lambda: f.store(before + self.steps, base["lasting"]))

    def _weights(self, gate: int) -> list[Value]:
        """This lane's numbers of the unit's column of a gate."""
        f, found = self.f, list[Value]()
        for first, inside in zip(self.columns, self.inside, strict=True):
            for i in range(4):
                at = (first + i) * (self.gates * self.hidden) + self.unit + gate * self.hidden
                value = f.load(f.gep(self.base["r"], at, 4), f32)
                found.append(f.select(inside, value, 0.0))
        return found

    def _row(self, t: Value, count: Value, row: Value) -> None:
        f, kernel, hidden = self.f, self.kernel, self.hidden
        at = self.steps - 1 - t if kernel.reverse else t
        token = at * self.rows + row
        x = [
            self._load("x", (token * self.gates + g) * hidden + self.unit)
            for g in range(self.gates)
        ]
        state = row * hidden + self.unit
        is_first = t.eq(0)
        if kernel.cell == "lstm":
            [c] = f.if_(
                is_first, lambda: [self._load("c", state)], lambda: [self._load("last_c", state)]
            )
        else:
            [c] = f.if_(
                is_first, lambda: [self._load("h", state)], lambda: [self._load("last_h", state)]
            )
        h = f.if_(is_first, lambda: self._given(row), lambda: self._received(count - 1, row))
        sums = []
        for weights in self.weights:
            total = f.const(0.0, f32)
            for a, b in zip(h, weights, strict=True):
                total = f.fma(a, b, total)
            sums.append(f.warp_sum(total))
        made = self._lstm(x, sums, c) if kernel.cell == "lstm" else self._gru(x, sums, c)

        def keep() -> None:
            place, tag = self._place(count, row)
            there = f.gep(place, self.unit, 4)
            f.if_(self.steps > 1, lambda: f.hand_over(made[0], there, tag))
            f.store(made[0], f.gep(self.base["y"], token * hidden + self.unit, 4))
            f.store(made[0], f.gep(self.base["last_h"], state, 4))
            if kernel.cell == "lstm":
                f.store(made[1], f.gep(self.base["last_c"], state, 4))

        f.if_(self.owns, keep)

    # -- what is handed over ----------------------------------------------------------------------

    def _place(self, count: Value, row: Value) -> tuple[Value, Value]:
        """Where the units of a row lie after a step, and the tag that they have then."""
        f = self.f
        first = ((count & 1) * self.rows + row) * self.hidden
        tag = ((count >> 1) + 1 & 3).to(word)
        return f.gep(self.base["lasting"], first * 4 + HEAD), tag

    def _given(self, row: Value) -> list[Value]:
        start = self.f.gep(self.base["h"], row * self.hidden, 4)
        return [
            self.f.load(self.f.gep(start, first + i, 4), f32)
            for first in self.columns
            for i in range(4)
        ]

    def _received(self, count: Value, row: Value) -> list[Value]:
        f = self.f
        place, tag = self._place(count, row)
        places = [(f.gep(place, first, 4), 0, 4) for first in self.columns]
        return f.receive(places, tag, f.look(places))

    # -- the functions of the gates ---------------------------------------------------------------

    def _lstm(self, x: list[Value], sums: list[Value], c: Value) -> list[Value]:
        i, forget, new, out = (a + b for a, b in zip(x, sums, strict=True))
        c = self._sigmoid(forget) * c + self._sigmoid(i) * self._tanh(new)
        return [self._sigmoid(out) * self._tanh(c), c]

    def _gru(self, x: list[Value], sums: list[Value], h: Value) -> list[Value]:
        reset, update = (self._sigmoid(x[i] + sums[i]) for i in range(2))
        hidden = sums[2]
        if self.kernel.bias:
            hidden = hidden + self._load("bias", self.unit)
        new = self._tanh(self.f.fma(reset, hidden, x[2]))
        return [self.f.fma(update, h - new, new)]

    def _sigmoid(self, x: Value) -> Value:
        return 1.0 / (exp(self.f, -x) + 1.0)

    def _tanh(self, x: Value) -> Value:
        """Of half the difference: an error of 2⁻²³ beside the result's own rounding."""
        f = self.f
        below = exp(f, f.abs(x) * -2.0)
        size = (1.0 - below) / (below + 1.0)
        return f.select(x < 0.0, -size, size)

    # -- memory -----------------------------------------------------------------------------------

    def _load(self, name: str, at: Value) -> Value:
        return self.f.load(self.f.gep(self.base[name], at, 4), f32)

    def _copy_states(self) -> None:
        """No step: the states stay."""
        f = self.f
        for row in f.range(f.i64(0), self.rows):
            at = row * self.hidden + self.unit

            def keep(at: Value = at) -> None:
                f.store(self._load("h", at), f.gep(self.base["last_h"], at, 4))
                if self.kernel.cell == "lstm":
                    f.store(self._load("c", at), f.gep(self.base["last_c"], at, 4))

            f.if_(self.owns, keep)
