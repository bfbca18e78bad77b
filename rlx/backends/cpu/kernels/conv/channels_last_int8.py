"""Convolution of 8-bit integers with channels last: `channels_last_gemm` with another tile.

Four channels of a pixel are one word, so that sizes count words as they count floats there. A step
adds four products to every 32-bit sum: with one instruction where the target has it, else as two
pairs of 16 bits, for which weights are packed as 16 bits. Sums are exact, in any order.

The zero point of x is taken out at the end: `sums[column]` of the weights times it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from rlx.backends.cpu.kernels.conv.channels_last_gemm import (
    MICRO,
    POINTERS,
    SIZES,
    ChannelsLastGemm,
    Emitter,
    Micro,
)
from rlx.backends.cpu.kernels.qgemm.dot import FourWay, IntDot, dot_kind, make_dot
from rlx.backends.cpu.kernels.spec import Operands
from rlx.ir.dtype import DType, u8
from rlx.ir.ops.conv_integer import integer_range
from rlx.llvm.builder import Function, Module, Type, Value, f32, i8, i32, i64, ptr, vec
from rlx.llvm.math.real import round_even
from rlx.llvm.target import Target
from rlx.support.records import dataclass

_ALL_POINTERS = POINTERS | {"sums", "x_zero", "scale", "y_zero"}
_BYTES, _PAIRS, _HIGH_BITS = 0x01010101, 0x00FF00FF, 0x80808080 - (1 << 32)


def has_int8(target: Target) -> bool:
    """Whether the target multiplies bytes faster than floats."""
    return dot_kind(target) is not None


def packs_halves(target: Target) -> bool:
    """Whether weights are packed as 16 bits: the target has no product of four bytes."""
    kind = dot_kind(target)
    return kind is not None and not issubclass(kind, FourWay)


@dataclass(frozen=True)
class ChannelsLastInt8(ChannelsLastGemm):
    """args: as `self.args` lists them.

    `channels` and `run` count words of four bytes. Sums are stored as i32, or, where there is an
    `out` type, scaled, rounded and clamped. `bias` is i32.
    """

    x_type: DType = u8
    out: DType | None = None

    @property
    def out_bytes(self) -> int:
        return 4 if self.out is None else 1

    @property
    def args(self) -> list[str]:
        given = ["bias"] * self.bias + ["scale", "y_zero"] * (self.out is not None)
        return ["x", "filters", "out", "sums", "x_zero", *given, "scratch", *SIZES]

    def weight_words(self, target: Target) -> int:
        return 2 if packs_halves(target) else 1

    def emit(self, m: Module) -> None:
        _Emitter(self, m).emit()


class _Emitter(Emitter):
    spec: ChannelsLastInt8
    pointers: ClassVar[frozenset[str]] = _ALL_POINTERS

    def micro_kernel(self, m: Module, vectors: int, masked: bool, rows: int) -> Function:
        return Int8Micro(self.spec, m, vectors, masked, rows, self.sizes).function

    def border(self) -> Value:
        zero = self.f.load(self.o["x_zero"], i8).to(i32, signed=False)
        return self.f.splat(zero * _BYTES, self.lanes)

    def more(self, column: Value) -> list[Value]:
        return [self.f["args"], column]


class Int8Micro(Micro):
    """The tile; `args` are those of the kernel, `column` is the tile's first."""

    spec: ChannelsLastInt8
    params: ClassVar[list[tuple[str, Type]]] = [*MICRO, ("args", ptr), ("column", i64)]
    element: ClassVar[Type] = i32

    def rank_one(
        self, rows: Sequence[Value], k: Value, term: Value, sums: Sequence[Value]
    ) -> list[Value]:
        f, n = self.f, self.vectors
        dot = make_dot(f, 1)
        words, size = self.weight_words, self.type.bytes
        halves = words == 2
        b = f.gep(f["b"], term, n * size * words)
        weights = [f.load(b, self.type, j * size) for j in range(n * words)]
        found: list[Value] = []
        for row in rows:
            x = f.broadcast_load(f.gep(row, k, 4), i32, self.lanes)
            if self._flips:
                x = x ^ _HIGH_BITS
            even, odd = (x & _PAIRS, x >> 8 & _PAIRS) if halves else (x, x)
            for j in range(n):
                total = sums[len(found)]
                if halves:
                    total = dot.pairs(total, even, weights[2 * j])
                    found.append(dot.pairs(total, odd, weights[2 * j + 1]))
                else:
                    found.append(self._four(dot, total, x, weights[j]))
        return found

    def _four(self, dot: IntDot, total: Value, x: Value, w: Value) -> Value:
        assert isinstance(dot, FourWay)
        return dot.step(total, x.bits(dot.bytes), w.bits(dot.bytes))

    @property
    def _takes_signed(self) -> bool:
        """Whether bytes of x are multiplied as signed."""
        kind = dot_kind(self.f.target)
        return kind is not None and issubclass(kind, FourWay) and kind.signed_bytes

    @property
    def _flips(self) -> bool:
        """Whether x has 128 added (or taken away), to be as the products take it."""
        return (self.spec.x_type is u8) == self._takes_signed

    def finish(self, sums: Sequence[Value]) -> None:
        f, spec, n = self.f, self.spec, self.vectors
        o = Operands(f, spec.args, _ALL_POINTERS)
        masks = self.masks()
        zero = f.load(o["x_zero"], i8).to(i32, signed=spec.x_type is not u8)
        if self._flips:
            zero = zero + (-128 if spec.x_type is u8 else 128)
        base = f.gep(o["sums"], f["column"], 4)
        less = f.splat(zero, self.lanes)
        offsets = [-(self.fetch(base, j, masks[j]) * less) for j in range(n)]
        if spec.bias:
            bias = f.gep(o["bias"], f["column"], 4)
            offsets = [x + self.fetch(bias, j, masks[j]) for j, x in enumerate(offsets)]
        encode = self._requantized(o, masks) if spec.out is not None else None

        def store_row(r: int) -> None:
            out = f.gep(f["out"], f["out_stride"] * r)
            for j in range(n):
                value = sums[r * n + j] + offsets[j]
                self.put(value if encode is None else encode(value, j), out, j, masks[j])

        self.each_row(store_row)

    def _requantized(
        self, o: Operands, masks: Sequence[Value | None]
    ) -> Callable[[Value, int], Value]:
        """What makes bytes of the sums of vector j."""
        f, spec = self.f, self.spec
        assert spec.out is not None
        kind = vec(self.lanes, f32)
        base = f.gep(o["scale"], f["column"], 4)
        scales = [self.fetch(base, j, mask).bits(kind) for j, mask in enumerate(masks)]
        zero = f.load(o["y_zero"], i8).to(i32, signed=spec.out is not u8)
        low, high = (f.i32(int(x)) - zero for x in integer_range(spec.out))
        if spec.activation == "relu":
            low = f.max(low, 0)
        least, most = (f.splat(x.to(f32), self.lanes) for x in (low, high))
        offset = f.splat(zero, self.lanes)

        def encode(total: Value, j: int) -> Value:
            near = round_even(total.to(f32) * scales[j])
            kept = f.min(f.max(f.select(near.is_nan(), 0.0, near), least), most)
            return (kept.to(i32) + offset).to(i8)

        return encode
