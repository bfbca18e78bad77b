"""The selective scan (Mamba): some lanes of a warp have the state of a channel in registers.

The numbers of the next token are loaded while those of this one are used.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cuda.builder import WARP, BlockFunction, KernelModule
from rlx.backends.cuda.kernel import BlockKernel
from rlx.ir.dtype import DType
from rlx.llvm.builder import Value, f32, i64
from rlx.llvm.storage import load, memory_type, store
from rlx.support.records import dataclass

_THREADS = 128
MOST = 8  # numbers of a state that a lane has
_LOG2_E = 1.4426950408889634
_LOG2_E_REST = 1.9259629911266175e-08  # of the logarithm as an f32


@dataclass(frozen=True)
class SelectiveScan(BlockKernel):
    """args: u, delta, a, b, c, d, state (0 where there is none), y, last, batch, tokens, channels,
    then how many elements the tokens of u, delta, b and c are apart

    h ← exp(delta·a)·h + delta·b·u; y = Σ c·h + d·u.
    """

    u: DType
    delta: DType
    a: DType
    b: DType
    c: DType
    d: DType | None
    state: DType | None
    last: DType
    size: int  # of the state of a channel
    one: bool  # token

    @property
    def label(self) -> str:
        return "selective_scan"

    @property
    def threads(self) -> int:
        return _THREADS

    @property
    def lanes(self) -> int:
        """Of a channel."""
        return min(WARP, 1 << (self.size - 1).bit_length())

    @property
    def channels(self) -> int:
        """Of a block."""
        return _THREADS // self.lanes

    def emit(self, m: KernelModule) -> None:
        f = m.begin_block(self.threads)
        f.let_next_start()
        f.wait_for_previous()
        _Scan(f, self).emit()


class _Scan:
    def __init__(self, f: BlockFunction, kernel: SelectiveScan) -> None:
        self.f, self.kernel, args = f, kernel, f["args"]
        names = ("u", "delta", "a", "b", "c", "d", "state", "y", "last")
        self.base = {name: f.arg(args, i) for i, name in enumerate(names)}
        self.batch, self.tokens, self.inner = (f.arg(args, i, i64) for i in (9, 10, 11))
        self.apart = {
            name: f.arg(args, 12 + i, i64) for i, name in enumerate(("u", "delta", "b", "c"))
        }
        self.lane = (f.thread() & kernel.lanes - 1).to(i64)
        # which numbers of the state this lane has, and whether they are there
        places = [self.lane + i for i in range(0, kernel.size, kernel.lanes)]
        self.there = [
            None if i + kernel.lanes <= kernel.size else p < kernel.size
            for i, p in zip(range(0, kernel.size, kernel.lanes), places, strict=True)
        ]
        self.places = [
            p if there is None else f.min(p, kernel.size - 1)
            for p, there in zip(places, self.there, strict=True)
        ]

    def emit(self) -> None:
        """Threads without a channel do what those of the last one do, but write nothing."""
        f = self.f
        total = self.batch * self.inner
        team = f.thread().udiv(self.kernel.lanes).to(i64)
        item = f.block_number().to(i64) * self.kernel.channels + team

        def channel() -> None:
            at = f.min(item, total - 1)
            self.sequence = at.udiv(self.inner)
            self.channel = at - self.sequence * self.inner
            self.writes = item < total
            self._channel(at)

        f.if_(total > 0, channel)

    def _channel(self, item: Value) -> None:
        f, kernel = self.f, self.kernel
        a = [self._load("a", self.channel * kernel.size + n) for n in self.places]
        start = [f.const(0.0, f32)] * len(a)
        if kernel.state is not None:
            start = [self._load("state", item * kernel.size + n) for n in self.places]
        skip = None if kernel.d is None else self._load("d", self.channel)
        if kernel.one:
            last = self._token(f.i64(0), a, start, skip, self._numbers(f.i64(0)))
        else:
            last = f.if_(self.tokens > 0, lambda: self._tokens(a, start, skip), lambda: list(start))
        for n, h, there in zip(self.places, last, self.there, strict=True):
            wanted = self.writes if there is None else self.writes & there
            self._store_if(wanted, h, item * kernel.size + n)

    def _store_if(self, wanted: Value, h: Value, at: Value) -> None:
        self.f.if_(wanted, lambda: self._store("last", h, at, self.kernel.last))

    def _tokens(self, a: list[Value], start: list[Value], skip: Value | None) -> list[Value]:
        count, final = len(start), self.tokens - 1

        def step(s: Value, *carried: Value) -> list[Value]:
            following = self._numbers(self.f.min(s + 1, final))
            state = self._token(s, a, list(carried[:count]), skip, carried[count:])
            return [*state, *following]

        first = [*start, *self._numbers(self.f.i64(0))]
        return self.f.loop(self.f.i64(0), self.tokens, 1, first, step)[:count]

    def _numbers(self, s: Value) -> list[Value]:
        """What a token brings: u, delta, and its b and c of this lane."""
        token = self.sequence * self.tokens + s
        rows = {name: token * apart for name, apart in self.apart.items()}
        found = [self._load(name, rows[name] + self.channel) for name in ("u", "delta")]
        return found + [self._load(name, rows[name] + n) for name in "bc" for n in self.places]

    def _token(
        self, s: Value, a: list[Value], state: list[Value], skip: Value | None,
        numbers: Sequence[Value],
    ) -> list[Value]:  # fmt: skip
        """The state after a token, whose result is written."""
        f, (u, delta, *rest) = self.f, numbers
        given = delta * u
        total = f.const(0.0, f32)
        found = []
        for i, (h, there) in enumerate(zip(state, self.there, strict=True)):
            h = f.fma(exp(f, delta * a[i]), h, given * rest[i])
            h = h if there is None else f.select(there, h, 0.0)
            found.append(h)
            total = f.fma(rest[len(a) + i], h, total)
        y = f.warp_sum(total, self.kernel.lanes)
        if skip is not None:
            y = f.fma(u, skip, y)
        at = (self.sequence * self.tokens + s) * self.inner + self.channel
        wanted = self.writes & self.lane.eq(0)
        f.if_(wanted, lambda: self._store("y", y, at, self.kernel.u))
        return found

    def _load(self, name: str, at: Value) -> Value:
        dtype: DType = getattr(self.kernel, name)
        return load(self.f, self.f.gep(self.base[name], at, memory_type(dtype)), dtype, 1, f32)

    def _store(self, name: str, value: Value, at: Value, dtype: DType) -> None:
        store(self.f, value, self.f.gep(self.base[name], at, memory_type(dtype)), dtype)


def exp(f: BlockFunction, x: Value) -> Value:
    """eˣ to about 4 units in the last place; what is below 2⁻¹²⁶ is 0."""
    power = x * _LOG2_E
    # what the product rounds away, and what the logarithm does
    rest = f.fma(x, f.const(_LOG2_E_REST, f32), f.fma(x, f.const(_LOG2_E, f32), -power))
    rest = f.select(f.abs(x) < 200.0, rest, 0.0)
    return f.exp2_fast(power) * f.fma(rest, f.const(0.6931471805599453, f32), 1.0)
