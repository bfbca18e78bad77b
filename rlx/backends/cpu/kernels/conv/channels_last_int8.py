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
from rlx.llvm.builder import Function, Module, Type, Value, f32, i1, i8, i32, i64, ptr, vec
from rlx.llvm.target import Target
from rlx.support.records import dataclass

_RESIDUAL = ["residual", "r_zero", "factors", "sum_zero"]
_ALL_POINTERS = POINTERS | {"sums", "x_zero", "scale", "y_zero", *_RESIDUAL}
_Store = Callable[[Sequence[Value], Value, int], None]
_Add = Callable[[Sequence[Value], Value, Sequence[Value | None], Value], None]
_ORDINARY = 2.0**30
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
    `out` type, scaled, rounded and clamped. `bias` is i32. A residual of bytes is added to what the
    sums became: both are dequantised, and the sum is quantised again.
    """

    x_type: DType = u8
    out: DType | None = None
    own_type: DType = u8  # of the result, before the residual is added
    residual_type: DType = u8

    @property
    def out_bytes(self) -> int:
        return 4 if self.out is None else 1

    @property
    def args(self) -> list[str]:
        given = ["bias"] * self.bias + ["scale", "y_zero"] * (self.out is not None)
        given += _RESIDUAL * self.residual
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

        def store_rows(store: _Store) -> None:
            def store_row(r: int) -> None:
                out = f.gep(f["out"], f["out_stride"] * r)
                store([sums[r * n + j] + offsets[j] for j in range(n)], out, r)

            self.each_row(store_row)

        if not spec.residual:
            store_rows(self._plain(masks) if spec.out is None else self._requantized(o, masks))
            return
        for is_ordinary in f.either(self._are_ordinary(o)):
            store_rows(self._requantized(o, masks, is_ordinary))

    def _plain(self, masks: Sequence[Value | None]) -> _Store:
        def store(totals: Sequence[Value], out: Value, r: int) -> None:
            for j, value in enumerate(totals):
                self.put(value, out, j, masks[j])

        return store

    def _requantized(
        self, o: Operands, masks: Sequence[Value | None], is_ordinary: bool = False
    ) -> _Store:
        """What makes bytes of a row of sums, and stores them."""
        f, spec = self.f, self.spec
        assert spec.out is not None
        kind = vec(self.lanes, f32)
        base = f.gep(o["scale"], f["column"], 4)
        scales = [self.fetch(base, j, mask).bits(kind) for j, mask in enumerate(masks)]
        own = spec.own_type if spec.residual else spec.out
        relu = spec.activation == "relu"
        encoder = self._encoder(o, "y_zero", own, relu and not spec.residual)
        added = self._added(o, encoder, relu, is_ordinary) if spec.residual else None

        def store(totals: Sequence[Value], out: Value, r: int) -> None:
            reals = [t.to(f32) * s for t, s in zip(totals, scales, strict=True)]
            if added is None:
                encoder.store(reals, out, masks[-1], f["tail"])
            else:
                added(reals, out, masks, f.gep(f["residual"], f["out_stride"] * r))

        return store

    def _encoder(self, o: Operands, name: str, dtype: DType, relu: bool) -> ByteEncoder:
        zero = self.f.load(o[name], i8).to(i32, signed=dtype is not u8)
        return ByteEncoder(self.f, self.lanes, dtype, zero, relu)

    def _are_ordinary(self, o: Operands) -> Value:
        """Whether no quotient of a sum, and no remainder of one, is infinite or denormal."""
        found = self.f.const(1, i1)
        for n in range(3):
            factor = self.f.load(o["factors"], f32, 4 * n)
            found = found & (factor > 1 / _ORDINARY) & (factor < _ORDINARY)
        return found

    def _added(self, o: Operands, encoder: ByteEncoder, relu: bool, is_ordinary: bool) -> _Add:
        """What adds the residual to a row, and stores it."""
        f, spec = self.f, self.spec
        assert spec.out is not None
        sums = self._encoder(o, "sum_zero", spec.out, relu)
        signed = spec.residual_type is not u8
        zero = f.splat(f.load(o["r_zero"], i8).to(i32, signed=signed), self.lanes)
        own, its, whole = (f.broadcast_load(o["factors"], f32, self.lanes, 4 * n) for n in range(3))
        lanes = vec(self.lanes, i8)
        inverse = 1.0 / whole

        def quotient(x: Value) -> Value:
            """x / whole. Where that is so, two corrections of x · (1 / whole) have its bits: the
            first one is an ulp off at most, and so the second is the nearest float (Markstein)."""
            if not is_ordinary or not f.target.fma:
                return x / whole
            found = x * inverse
            for _ in range(2):
                found = f.fma(f.fma(-found, whole, x), inverse, found)
            return found

        def add(
            reals: Sequence[Value], out: Value, masks: Sequence[Value | None], row: Value
        ) -> None:
            found = []
            with f.exact():
                for j, real in enumerate(reals):
                    mask = masks[j]
                    raw = (
                        f.load(row, lanes, j * self.lanes) if mask is None
                        else f.masked_load(row, lanes, mask, offset=j * self.lanes)
                    )  # fmt: skip
                    other = (raw.to(i32, signed=signed) - zero).to(f32) * its
                    made = quotient(encoder.bounded(real) * own + other)
                    found.append(made if is_ordinary else f.select(made.is_nan(), 0.0, made))
            sums.store(found, out, masks[-1], f["tail"])

        return add
