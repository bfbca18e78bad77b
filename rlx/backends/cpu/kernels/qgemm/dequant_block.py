"""What block dequantisation is written with: `Block`, and the table of its emitters."""

from __future__ import annotations

from collections.abc import Callable

from rlx.llvm.builder import Function, Value, f16, f32, i8, i32, vec

Emitter = Callable[["Block"], None]
DEQUANTIZERS: dict[str, Emitter] = {}

Offset = Value | int


def dequantizes(*names: str) -> Callable[[Emitter], Emitter]:
    """Register an emitter for block types."""

    def register(emitter: Emitter) -> Emitter:
        DEQUANTIZERS.update(dict.fromkeys(names, emitter))
        return emitter

    return register


class Block:
    """The block being dequantised: its address, and where its weights go."""

    def __init__(self, f: Function, src: Value, out: Value) -> None:
        self.f, self.src, self.out = f, src, out

    def raw(self, at: Offset, count: int) -> Value:
        return self.f.load(self.src, vec(count, i8), at)

    def byte(self, at: Offset) -> Value:
        """An unsigned byte, as i32."""
        return self.f.load(self.src, i8, at).to(i32, signed=False)

    def word(self, at: Offset, bits: int = 32) -> Value:
        """An unsigned word of 16 or 32 bits, as i32; blocks are not aligned."""
        type_ = vec(bits // 8, i8)
        raw = self.f.load(self.src, type_, at).bits(i32 if bits == 32 else f16.as_int)
        return raw.to(i32, signed=False)

    def half(self, at: Offset) -> Value:
        """An f16, as f32."""
        return self.f.load(self.src, f16, at, align=1).to(f32)

    def nibbles(self, at: Offset, count: int) -> tuple[Value, Value]:
        both = self.raw(at, count)
        return both & 15, both >> 4

    def put(
        self,
        at: Offset,
        q: Value,
        scale: Value,
        minimum: Value | None = None,
        signed: bool = False,
    ) -> None:
        """Weights at..: q * scale - minimum."""
        lanes = q.type.lanes
        value = q if q.type.is_float else q.to(f32, signed=signed)
        value = value * self.f.splat(scale, lanes)
        if minimum is not None:
            value = value - self.f.splat(minimum, lanes)
        self.f.store(value, self.f.gep(self.out, at, 4))

    def spill(self, values: Value) -> Value:
        """Store a vector to memory, so that a loop can index its lanes."""
        place = self.f.alloca(values.type.bytes)
        self.f.store(values, place)
        return place

    def reload(self, place: Value, index: Offset) -> Value:
        return self.f.load(self.f.gep(place, index, 4), f32)

    def table(self, data: bytes) -> Value:
        return self.f.module.table(self.f, data)

    def shift_right(self, raw: Value, count: Value) -> Value:
        """Bytes shifted right by up to 7 bits; bits of the next byte come in at the top."""
        words = raw.bits(vec(raw.type.lanes // 4, i32))
        return (words >> self.f.splat(count.to(i32), words.type.lanes)).bits(raw.type)
