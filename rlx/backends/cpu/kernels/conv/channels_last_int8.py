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
from rlx.backends.cpu.kernels.conv.float_bytes import ByteEncoder
from rlx.backends.cpu.kernels.qgemm.dot import FourWay, IntDot, dot_kind, make_dot
from rlx.backends.cpu.kernels.spec import Operands
from rlx.ir.dtype import DType, u8
from rlx.llvm.builder import Function, Module, Type, Value, f32, i8, i32, i64, ptr, vec
from rlx.llvm.target import Target
from rlx.support.records import dataclass

_ALL_POINTERS = POINTERS | {"sums", "x_zero", "scale", "y_zero"}
_Store = Callable[[Sequence[Value], Value, Sequence[Value | None]], None]
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
        store = self._plain if spec.out is None else self._requantized(o, masks)

        def store_row(r: int) -> None:
            out = f.gep(f["out"], f["out_stride"] * r)
            store([sums[r * n + j] + offsets[j] for j in range(n)], out, masks)

        self.each_row(store_row)

    def _plain(self, totals: Sequence[Value], out: Value, masks: Sequence[Value | None]) -> None:
        for j, value in enumerate(totals):
            self.put(value, out, j, masks[j])

    def _requantized(self, o: Operands, masks: Sequence[Value | None]) -> _Store:
        """What makes bytes of a row of sums, and stores them."""
        f, spec = self.f, self.spec
        assert spec.out is not None
        kind = vec(self.lanes, f32)
        base = f.gep(o["scale"], f["column"], 4)
        scales = [self.fetch(base, j, mask).bits(kind) for j, mask in enumerate(masks)]
        zero = f.load(o["y_zero"], i8).to(i32, signed=spec.out is not u8)
        encoder = ByteEncoder(f, self.lanes, spec.out, zero, spec.activation == "relu")

        def store(totals: Sequence[Value], out: Value, masks: Sequence[Value | None]) -> None:
            reals = [t.to(f32) * s for t, s in zip(totals, scales, strict=True)]
            encoder.store(reals, out, masks[-1], f["tail"])

        return store
