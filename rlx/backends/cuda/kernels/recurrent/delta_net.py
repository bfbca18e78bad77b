"""The gated delta rule: a warp has eight columns of a head's state in registers.

Columns of the state are independent. Four groups of lanes share the rows and add up their parts.
The numbers of the next token are loaded while those of this one are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from rlx.backends.cuda.builder import WARP, BlockFunction, KernelModule
from rlx.backends.cuda.kernel import BlockKernel
from rlx.backends.cuda.kernels.gemm.weight_rows import load_run
from rlx.backends.cuda.kernels.recurrent.selective_scan import exp
from rlx.ir.dtype import DType
from rlx.llvm.builder import Value, f32, i64
from rlx.llvm.storage import load, memory_type, store
from rlx.support.records import dataclass

_WARPS = 4
_COLUMNS = 8  # of a warp
_GROUPS = WARP // _COLUMNS  # of lanes, that share the rows
MOST = 128  # rows of a state


@dataclass(frozen=True)
class DeltaNet(BlockKernel):
    """args: q, k, v, g, beta, state (0 where there is none), o, last, sequences, tokens, heads

    S ← exp(g)·S; d = (v − kᵀS)·beta; S ← S + k dᵀ; o = (q/√N)ᵀS.
    """

    q: DType
    k: DType
    v: DType
    g: DType
    beta: DType
    state: DType | None
    o: DType
    last: DType
    size: int  # N
    one: bool  # token
    aligned: bool  # q and k lie at multiples of 16 bytes

    @property
    def label(self) -> str:
        return "gated_delta_net"

    @property
    def threads(self) -> int:
        return _WARPS * WARP

    @property
    def parts(self) -> int:
        """Warps of a head."""
        return -(-self.size // _COLUMNS)

    def blocks(self, heads: int) -> int:
        return -(-heads * self.parts // _WARPS)

    def emit(self, m: KernelModule) -> None:
        f = m.begin_block(self.threads)
        f.let_next_start()
        f.wait_for_previous()
        _Rule(f, self).emit()


class _Rule:
    def __init__(self, f: BlockFunction, kernel: DeltaNet) -> None:
        self.f, self.kernel, args = f, kernel, f["args"]
        names = ("q", "k", "v", "g", "beta", "state", "o", "last")
        self.base = {name: f.arg(args, i) for i, name in enumerate(names)}
        self.sequences, self.tokens, self.heads = (f.arg(args, i, i64) for i in (8, 9, 10))
        lane = f.lane()
        self.group, size = lane.udiv(_COLUMNS), kernel.size
        self.own = -(-size // _GROUPS)  # rows of a lane
        self.row = self.group * self.own
        self.ragged = size % _GROUPS != 0

    def emit(self) -> None:
        """Warps without columns do what those of the last ones do, but write nothing."""
        f, kernel = self.f, self.kernel
        total = self.sequences * self.heads * kernel.parts
        item = f.block_number().to(i64) * _WARPS + (f.thread() >> 5).to(i64)

        def columns() -> None:
            at = f.min(item, total - 1)
            head = at.udiv(kernel.parts)
            column = (at - head * kernel.parts) * _COLUMNS + (f.lane() & _COLUMNS - 1)
            self.column = f.min(column, kernel.size - 1)
            self.writes = (item < total) & (column < kernel.size)
            sequence = head.udiv(self.heads)
            self.first = sequence * self.tokens * self.heads + (head - sequence * self.heads)
            self._columns(head * (kernel.size * kernel.size))

        f.if_(total > 0, columns)

    def _columns(self, start: Value) -> None:
        f, kernel = self.f, self.kernel
        rows = [self._row(i) for i in range(self.own)]
        state = [f.const(0.0, f32)] * self.own
        if kernel.state is not None:
            state = [self._load("state", start + r * kernel.size + self.column) for r in rows]
            state = [self._there(i, s) for i, s in enumerate(state)]
        if kernel.one:
            last = self._token(f.i64(0), state, self._numbers(f.i64(0)))
        else:
            last = f.if_(self.tokens > 0, lambda: self._tokens(state), lambda: list(state))
        for i, (r, s) in enumerate(zip(rows, last, strict=True)):
            wanted = self.writes
            if self.ragged:
                wanted = wanted & (self.row + i < kernel.size)
            self._store_if(wanted, s, start + r * kernel.size + self.column)

    def _store_if(self, wanted: Value, s: Value, at: Value) -> None:
        self.f.if_(wanted, lambda: self._store("last", s, at, self.kernel.last))

    def _row(self, i: int) -> Value:
        row = self.row + i
        return self.f.min(row, self.kernel.size - 1) if self.ragged else row

    def _there(self, i: int, value: Value) -> Value:
        """0 in place of a row that is past the end."""
        if not self.ragged:
            return value
        return self.f.select(self.row + i < self.kernel.size, value, 0.0)

    def _tokens(self, start: list[Value]) -> list[Value]:
        final = self.tokens - 1

        def step(s: Value, *carried: Value) -> list[Value]:
            following = self._numbers(self.f.min(s + 1, final))
            state = self._token(s, carried[: self.own], carried[self.own :])
            return [*state, *following]

        first = [*start, *self._numbers(self.f.i64(0))]
        return self.f.loop(self.f.i64(0), self.tokens, 1, first, step)[: self.own]

    def _numbers(self, s: Value) -> list[Value]:
        """What a token brings: g, beta, v of this column, and this lane's rows of k and q."""
        token = self.first + s * self.heads
        row = token * self.kernel.size
        found = [self._load("g", token), self._load("beta", token)]
        found.append(self._load("v", row + self.column))
        return [*found, *self._own("k", row), *self._own("q", row)]

    def _own(self, name: str, row: Value) -> list[Value]:
        dtype: DType = getattr(self.kernel, name)
        if self.kernel.aligned and self.own * dtype.bytes % 16 == 0:
            return load_run(self.f, self.base[name], row + self.row, self.own, dtype)
        found = [self._load(name, row + self._row(i)) for i in range(self.own)]
        return [self._there(i, v) for i, v in enumerate(found)]

    def _token(self, s: Value, state: Sequence[Value], numbers: Sequence[Value]) -> list[Value]:
        """The state after a token, whose result is written."""
        f, (g, beta, v, *rest) = self.f, numbers
        k, q = rest[: self.own], rest[self.own :]
        decay = exp(f, g)
        seen = self._sum(k, state)
        change = f.fma(-decay, seen, v) * beta
        updated = [f.fma(decay, h, x * change) for h, x in zip(state, k, strict=True)]
        o = self._sum(q, updated) * (1 / sqrt(self.kernel.size))
        at = (self.first + s * self.heads) * self.kernel.size + self.column
        wanted = self.writes & self.group.eq(0)
        f.if_(wanted, lambda: self._store("o", o, at, self.kernel.o))
        return updated

    def _sum(self, left: Sequence[Value], right: Sequence[Value]) -> Value:
        """The sum of products over all rows, in four chains."""
        f, chains = self.f, [self.f.const(0.0, f32)] * min(4, self.own)
        for i, (a, b) in enumerate(zip(left, right, strict=True)):
            chains[i % len(chains)] = f.fma(a, b, chains[i % len(chains)])
        total = chains[0]
        for more in chains[1:]:
            total = total + more
        distance = _COLUMNS
        while distance < WARP:
            total = total + f.exchange(total, distance)
            distance *= 2
        return total

    def _load(self, name: str, at: Value) -> Value:
        dtype: DType = getattr(self.kernel, name)
        return load(self.f, self.f.gep(self.base[name], at, memory_type(dtype)), dtype, 1, f32)

    def _store(self, name: str, value: Value, at: Value, dtype: DType) -> None:
        store(self.f, value, self.f.gep(self.base[name], at, memory_type(dtype)), dtype)
