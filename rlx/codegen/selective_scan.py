"""The selective scan: a state per channel that decays and grows with every token.

Vectors lie along the state. A unit of work is a few channels of one sequence: their states stay on
the stack, and what they read of a token lies together.
"""

from __future__ import annotations

from rlx.codegen.emit import Function, Module, Value, f32, f64, vec
from rlx.codegen.kernel import KernelSpec
from rlx.codegen.math import exp
from rlx.codegen.operands import Operands
from rlx.codegen.storage import load, memory_type, narrow, store
from rlx.codegen.target import Target
from rlx.ir.dtype import DType
from rlx.support.records import dataclass

_CHANNELS = 16  # of one unit of work
_STACK = 32 << 10  # bytes of states at most


def dividing_lanes(target: Target, bits: int, size: int) -> int:
    """The most lanes, up to a whole vector, into which `size` elements divide."""
    lanes = target.lanes(bits)
    while size % lanes:
        lanes //= 2
    return lanes


@dataclass(frozen=True)
class SelectiveScan(KernelSpec):
    """args: u, delta, a, b, c, d and state where they are, y, last, batch, seq, inner

    h ← exp(delta·a)·h + delta·b·u; y = Σ c·h + d·u, for every channel of `inner`.
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

    @property
    def args(self) -> list[str]:
        optional = ["d"] * (self.d is not None) + ["state"] * (self.state is not None)
        return ["u", "delta", "a", "b", "c", *optional, "y", "last", "batch", "seq", "inner"]

    def emit(self, m: Module) -> None:
        if self.size:
            _Scan(self, m.kernel()).emit()
        else:
            _emit_stateless(self, m.kernel())


class _Scan:
    def __init__(self, spec: SelectiveScan, f: Function) -> None:
        self.spec, self.f = spec, f
        wide = any(t is not None and t.bits == 64 for t in _types(spec))
        self.sums = f64 if wide else f32
        self.lanes = dividing_lanes(f.target, self.sums.bits, spec.size)
        self.vector = vec(self.lanes, self.sums)
        self.o = Operands(f, spec.args, _POINTERS)
        room = _STACK // (spec.size * self.sums.bytes)
        self.channels = max(1, min(_CHANNELS, room))
        self.states = f.alloca(self.channels * spec.size * self.sums.bytes)

    def emit(self) -> None:
        f, o = self.f, self.o
        blocks = f.ceil_div(o["inner"], self.channels)
        lo, hi = f.split(o["batch"] * blocks)
        for unit in f.range(lo, hi):
            image, first = unit.udiv(blocks), unit.urem(blocks) * self.channels
            count = f.min(o["inner"] - first, self.channels)
            place = (image * o["inner"] + first) * self.spec.size
            self._begin(place, count)
            for s in f.range(0, o["seq"]):
                token = image * o["seq"] + s
                for d in f.range(0, count):
                    self._step(token, first + d, d)
            self._end(place, count)

    def _begin(self, place: Value, count: Value) -> None:
        f, dtype = self.f, self.spec.state
        for i in f.range(0, count * self.spec.size, self.lanes):
            value = f.const(0, self.vector)
            if dtype is not None:
                source = f.gep(self.o["state"], place + i, memory_type(dtype))
                value = load(f, source, dtype, self.lanes, self.sums)
            f.store(value, f.gep(self.states, i, self.sums))

    def _end(self, place: Value, count: Value) -> None:
        f, dtype = self.f, self.spec.last
        for i in f.range(0, count * self.spec.size, self.lanes):
            value = f.load(f.gep(self.states, i, self.sums), self.vector)
            store(f, value, f.gep(self.o["last"], place + i, memory_type(dtype)), dtype)

    def _step(self, token: Value, channel: Value, d: Value) -> None:
        """One token of one channel."""
        f, o, spec = self.f, self.o, self.spec
        at = token * o["inner"] + channel
        u, delta = self._scalar("u", at), self._scalar("delta", at)
        grow = f.splat(delta * u, self.lanes)
        decay = f.splat(delta, self.lanes)
        state = f.gep(self.states, d * spec.size, self.sums)

        def part(n: Value, total: Value) -> Value:
            a = self._vector("a", channel * spec.size + n)
            b = self._vector("b", token * spec.size + n)
            c = self._vector("c", token * spec.size + n)
            place = f.gep(state, n, self.sums)
            h = f.fma(exp(decay * a), f.load(place, self.vector), grow * b)
            f.store(h, place)
            return f.fma(c, h, total)

        [sums] = f.loop(0, spec.size, self.lanes, [f.const(0, self.vector)], part)
        y = f.reduce("add", sums)
        if spec.d is not None:
            y = f.fma(u, self._scalar("d", channel), y)
        store(f, y, f.gep(o["y"], at, memory_type(spec.u)), spec.u)

    def _scalar(self, name: str, at: Value) -> Value:
        return self._load(name, at, 1)

    def _vector(self, name: str, at: Value) -> Value:
        return self._load(name, at, self.lanes)

    def _load(self, name: str, at: Value, lanes: int) -> Value:
        dtype: DType = getattr(self.spec, name)
        return load(
            self.f, self.f.gep(self.o[name], at, memory_type(dtype)), dtype, lanes, self.sums
        )


_POINTERS = ("u", "delta", "a", "b", "c", "d", "state", "y", "last")


def _types(spec: SelectiveScan) -> list[DType | None]:
    return [getattr(spec, name) for name in ("u", "delta", "a", "b", "c", "d", "state", "last")]


def _emit_stateless(spec: SelectiveScan, f: Function) -> None:
    """States of no elements: y = d·u, or nothing but zeros."""
    o = Operands(f, spec.args, _POINTERS)
    inner, raw = o["inner"], memory_type(spec.u)
    sums = f64 if spec.u.bits == 64 else f32
    lo, hi = f.split(o["batch"] * o["seq"] * inner)
    for at in f.range(lo, hi):
        y = f.const(0, sums)
        if spec.d is not None:
            d = load(f, f.gep(o["d"], at.urem(inner), memory_type(spec.d)), spec.d, 1, sums)
            y = load(f, f.gep(o["u"], at, raw), spec.u, 1, sums) * d
        f.store(narrow(f, y, spec.u), f.gep(o["y"], at, raw))
