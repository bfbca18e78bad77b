"""The selective scan (Mamba): a decaying state per channel, updated by every token.

Vectors are along the state. A work item is a few channels of one sequence: their states are on the
stack, and they read contiguous elements of a token.
"""

from __future__ import annotations

from rlx.backends.cpu.kernels.spec import KernelSpec, Operands
from rlx.ir.dtype import DType
from rlx.llvm.builder import Function, Module, Value, f32, f64, vec
from rlx.llvm.math import exp
from rlx.llvm.storage import load, memory_type, narrow, store
from rlx.llvm.target import Target
from rlx.support.records import dataclass

_CHANNELS = 16  # of a work item
_STACK = 32 << 10  # limit for the states, in bytes


def dividing_lanes(target: Target, bits: int, size: int) -> int:
    """The widest vector, up to a register, that divides `size` elements."""
    lanes = target.lanes(bits)
    while size % lanes:
        lanes //= 2
    return lanes


@dataclass(frozen=True)
class SelectiveScan(KernelSpec):
    """args: u, delta, a, b, c, d and state (if any), y, last, batch, seq, inner

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
    def flushes_denormals(self) -> bool:
        return True

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
        for work_item in f.range(lo, hi):
            sequence, first = work_item.udiv(blocks), work_item.urem(blocks) * self.channels
            count = f.min(o["inner"] - first, self.channels)
            offset = (sequence * o["inner"] + first) * self.spec.size
            self._begin(offset, count)
            for s in f.range(0, o["seq"]):
                token = sequence * o["seq"] + s
                for d in f.range(0, count):
                    self._step(token, first + d, d)
            self._end(offset, count)

    def _begin(self, offset: Value, count: Value) -> None:
        f, dtype = self.f, self.spec.state
        for i in f.range(0, count * self.spec.size, self.lanes):
            value = f.const(0, self.vector)
            if dtype is not None:
                source = f.gep(self.o["state"], offset + i, memory_type(dtype))
                value = load(f, source, dtype, self.lanes, self.sums)
            f.store(value, f.gep(self.states, i, self.sums))

    def _end(self, offset: Value, count: Value) -> None:
        f, dtype = self.f, self.spec.last
        for i in f.range(0, count * self.spec.size, self.lanes):
            value = f.load(f.gep(self.states, i, self.sums), self.vector)
            store(f, value, f.gep(self.o["last"], offset + i, memory_type(dtype)), dtype)

    def _step(self, token: Value, channel: Value, d: Value) -> None:
        """One token of one channel."""
        f, o, spec = self.f, self.o, self.spec
        at = token * o["inner"] + channel
        u, delta = self._scalar("u", at), self._scalar("delta", at)
        delta_u = f.splat(delta * u, self.lanes)
        delta_v = f.splat(delta, self.lanes)
        state = f.gep(self.states, d * spec.size, self.sums)

        def accumulate(n: Value, total: Value) -> Value:
            a = self._vector("a", channel * spec.size + n)
            b = self._vector("b", token * spec.size + n)
            c = self._vector("c", token * spec.size + n)
            address = f.gep(state, n, self.sums)
            h = f.fma(exp(delta_v * a), f.load(address, self.vector), delta_u * b)
            f.store(h, address)
            return f.fma(c, h, total)

        [sums] = f.loop(0, spec.size, self.lanes, [f.const(0, self.vector)], accumulate)
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
    """Empty states: y = d·u, or zeros."""
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
