"""Rotary embeddings, after a norm of each head where there is one: a warp for each head of a token.

The result goes where it is read next: to a value of its own, or to a KV cache in its type.
"""

from __future__ import annotations

from rlx.backends.cuda.builder import WARP, BlockFunction, KernelModule
from rlx.backends.cuda.kernel import BlockKernel
from rlx.backends.cuda.kernels.rotary.slots import Slots
from rlx.ir.dtype import DType
from rlx.llvm.builder import Value, f32, i64
from rlx.llvm.storage import load, memory_type, store
from rlx.support.records import dataclass

_WARPS = 8


@dataclass(frozen=True)
class RotaryKernel(BlockKernel):
    """args: x, gamma, cos, sin, positions, result, status, error number, slots, slots of the state,
    tokens, heads, items, first position, rows of the tables, strides of x and of the result (batch,
    token, head), of positions (batch)

    An item is a head of a token. `rotated` of the `dim` numbers of a head are rotated. With
    `slots`, the result goes to the slots of a state.
    """

    x: DType
    out: DType
    gamma: DType | None
    table: DType
    positions: DType | None
    dim: int
    rotated: int
    interleaved: bool
    eps: float
    slots: bool = False

    @property
    def label(self) -> str:
        return "rope" if self.gamma is None else "norm_rope"

    @property
    def threads(self) -> int:
        return _WARPS * WARP

    @property
    def items(self) -> int:
        """Of a block."""
        return _WARPS

    def emit(self, m: KernelModule) -> None:
        _Emitter(m.begin_block(self.threads), self).emit()


class _Emitter:
    def __init__(self, f: BlockFunction, kernel: RotaryKernel) -> None:
        self.f, self.kernel = f, kernel
        args = f["args"]
        self.x, self.gamma, self.cos, self.sin, self.positions, self.out = (
            f.arg(args, i) for i in range(6)
        )
        self.slots = Slots(f, args, 6, kernel.slots)
        self.tokens, self.heads, self.items, self.start, self.limit = (
            f.arg(args, i, i64) for i in range(10, 15)
        )
        self.x_strides = [f.arg(args, i, i64) for i in (15, 16, 17)]
        self.out_strides = [f.arg(args, i, i64) for i in (18, 19, 20)]
        self.position_stride = f.arg(args, 21, i64)
        self.lane = f.lane32()

    def emit(self) -> None:
        f = self.f
        item = f.block_number().to(i64) * _WARPS + (f.thread() >> 5).to(i64)
        f.let_next_start()
        f.wait_for_previous()
        f.if_(item < self.items, lambda: self._emit_item(item))

    def _emit_item(self, item: Value) -> None:
        f = self.f
        row = item.udiv(self.heads)
        head = item - row * self.heads
        batch = row.udiv(self.tokens)
        token = row - batch * self.tokens
        slot, known, wins = self.slots.place(token, self.tokens)
        source, target = (
            f.gep(base, batch * s[0] + at * s[1] + head * s[2], dtype.bytes)
            for base, at, s, dtype in (
                (self.x, token, self.x_strides, self.kernel.x),
                (self.out, slot, self.out_strides, self.kernel.out),
            )
        )
        position = self._position(batch, token)

        def rotate() -> None:
            if wins is None:
                self._rotate(source, target, position)
            else:
                f.if_(wins, lambda: self._rotate(source, target, position))

        found = position.ult(self.limit) if self.kernel.positions is not None else None
        both = [c for c in (found, known) if c is not None]
        if not both:
            rotate()
            return
        f.if_(both[0] & both[1] if len(both) > 1 else both[0], rotate, self.slots.report)

    def _position(self, batch: Value, token: Value) -> Value:
        f, dtype = self.f, self.kernel.positions
        if dtype is None:
            return self.start + token
        at = batch * self.position_stride + token
        found = f.load(f.gep(self.positions, at, dtype.bytes), memory_type(dtype))
        wide = found.to(i64, signed=dtype.kind == "int")
        return f.select(wide < 0, wide + self.limit, wide)

    def _rotate(self, source: Value, target: Value, position: Value) -> None:
        """A lane has every 32nd pair, and every 32nd of the numbers that pass through."""
        f, kernel = self.f, self.kernel
        half = kernel.rotated // 2
        places: list[tuple[Value, Value | None, Value]] = []  # elements, and whether they are there
        for i in range(0, half, WARP):
            p = self.lane + i
            there = f.min(p, half - 1)
            pair = (there * 2, there * 2 + 1) if kernel.interleaved else (there, there + half)
            places.append((*pair, p < half))
        for i in range(kernel.rotated, kernel.dim, WARP):
            e = self.lane + i
            places.append((f.min(e, kernel.dim - 1), None, e < kernel.dim))
        loaded = [
            [None if e is None else self._load(source, e, kernel.x) for e in (a, b)]
            for a, b, _ in places
        ]
        if kernel.gamma is not None:
            loaded = self._normed(places, loaded)
        for n, ((a, b, inside), (x, y)) in enumerate(zip(places, loaded, strict=True)):
            assert x is not None
            if b is None or y is None:
                self._store(target, a, x, inside)
                continue
            at = position * half + f.min(self.lane + n * WARP, half - 1).to(i64)
            cos, sin = (self._load(t, at, kernel.table) for t in (self.cos, self.sin))
            with f.exact():
                self._store(target, a, x * cos - y * sin, inside)
                self._store(target, b, y * cos + x * sin, inside)

    def _normed(
        self, places: list[tuple[Value, Value | None, Value]], loaded: list[list[Value | None]]
    ) -> list[list[Value | None]]:
        f, kernel = self.f, self.kernel
        assert kernel.gamma is not None
        total = f.const(0.0, f32)
        for (_, _, inside), numbers in zip(places, loaded, strict=True):
            for v in numbers:
                if v is not None:
                    total = f.select(inside, f.fma(v, v, total), total)
        mean = f.warp_sum(total) * (1.0 / kernel.dim)
        factor = 1.0 / f.sqrt(mean + kernel.eps)
        made: list[list[Value | None]] = []
        for (a, b, _), numbers in zip(places, loaded, strict=True):
            pair: list[Value | None] = []
            for e, v in zip((a, b), numbers, strict=True):
                if v is None or e is None:
                    pair.append(None)
                else:
                    pair.append(v * factor * self._load(self.gamma, e, kernel.gamma))
            made.append(pair)
        return made

    def _load(self, base: Value, element: Value, dtype: DType) -> Value:
        at = element if element.type is i64 else element.to(i64)
        return load(self.f, self.f.gep(base, at, dtype.bytes), dtype, 1, f32)

    def _store(self, base: Value, element: Value, value: Value, inside: Value) -> None:
        f, out = self.f, self.kernel.out
        to = f.gep(base, element.to(i64), out.bytes)
        f.if_(inside, lambda: store(f, value, to, out))
