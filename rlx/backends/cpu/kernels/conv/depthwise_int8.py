"""Depthwise convolution of 8-bit integers with channels last: see `layouts/depthwise_int8`.

Four columns of an image are interleaved into words by two rounds of unpacking. A step multiplies
the four bytes of every word with weights and adds them to a 32-bit sum: with one instruction where
the target has it, else as two pairs of 16 bits. Columns and rows beside the image read the zero
point of x, which counts as zero. Tiles of a few rows that lie below each other follow each other,
so that the rows between them are still in the L1 cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cpu.kernels.conv.float_bytes import ByteEncoder
from rlx.backends.cpu.kernels.qgemm.dot import FourWay, dot_kind
from rlx.backends.cpu.kernels.spec import KernelSpec, Operands
from rlx.backends.cpu.layouts.depthwise_int8 import Tile
from rlx.errors import CodegenError
from rlx.ir.dtype import DType, u8
from rlx.llvm.builder import Module, Type, Value, f32, i8, i16, i32, vec
from rlx.llvm.target import Target
from rlx.support.records import dataclass

_POINTERS = frozenset(["x", "filters", "out", "sums", "x_zero", "scale", "y_zero", "bias"])
_SIZES = [
    "batch", "channels", "height", "width", "out_height", "out_width", "stride_y", "start_y",
    "start_x",
]  # fmt: skip
_DOWN = 4  # rows whose tiles follow each other
_PAIRS, _HIGH_BITS = 0x00FF00FF, -128


def block_channels(target: Target, channels: int) -> int:
    """Channels of a block: the widest register that they fill, or 0."""
    widest = target.vector_bits // 8
    return next((n for n in (64, 32, 16) if n <= min(channels, widest)), 0)


def tile_of(target: Target, taps: int, stride: int, dilation: int) -> Tile:
    return Tile.of(taps, stride, dilation, 4 if target.num_vector_registers >= 32 else 2)


@dataclass(frozen=True)
class DepthwiseInt8(KernelSpec):
    """args: as `self.args` lists them."""

    tile: Tile
    rows: int  # of taps
    dilation_y: int
    vector: int
    halves: bool
    bias: bool
    relu: bool
    x_type: DType
    out: DType

    @property
    def flushes_denormals(self) -> bool:
        return True

    @property
    def args(self) -> list[str]:
        given = ["bias"] * self.bias
        return ["x", "filters", "out", "sums", "x_zero", "scale", "y_zero", *given, *_SIZES]

    def emit(self, m: Module) -> None:
        _Emitter(self, m).emit()


class _Emitter:
    def __init__(self, spec: DepthwiseInt8, m: Module) -> None:
        self.spec, self.f = spec, m.kernel()
        self.o = Operands(self.f, spec.args, _POINTERS)
        self.tile, self.vector, self.lanes = spec.tile, spec.vector, spec.vector // 4
        kind = dot_kind(m.target)
        if kind is None:
            raise CodegenError("no integer dot products", where="depthwise", got=m.target.key)
        self.dot = kind(self.f, 1, self.lanes)
        takes_signed = isinstance(self.dot, FourWay) and kind.signed_bytes
        self.flips = (spec.x_type is u8) == takes_signed  # x has 128 added, as products take it
        self.bytes, self.words = vec(spec.vector, i8), vec(self.lanes, i32)
        self.word_bytes = spec.vector * (8 if spec.halves else 4)

    def emit(self) -> None:
        f, o = self.f, self.o
        self._prepare()
        blocks = f.ceil_div(o["channels"], self.vector)
        bands = f.ceil_div(o["out_height"], _DOWN)
        lo, hi = f.split(o["batch"] * bands * blocks)
        for band in f.range(lo.udiv(blocks), (hi + blocks - 1).udiv(blocks)):
            image = band.udiv(bands)
            y = (band - image * bands) * _DOWN
            lines = y, f.min(y + _DOWN, o["out_height"])
            begin, end = f.max(lo - band * blocks, 0), f.min(hi - band * blocks, blocks)
            for block in f.range(begin, end):
                self._block(image, lines, block)

    def _prepare(self) -> None:
        f, o, spec = self.f, self.o, self.spec
        raw = f.load(o["x_zero"], i8)
        self.border = f.alloca(self.vector)
        f.store(f.splat(raw, self.vector), self.border)
        zero = raw.to(i32, signed=spec.x_type is not u8)
        if self.flips:
            zero = zero + (-128 if spec.x_type is u8 else 128)
        self.less = f.splat(zero, self.lanes)
        y_zero = f.load(o["y_zero"], i8).to(i32, signed=spec.out is not u8)
        self.encoder = ByteEncoder(f, self.lanes, spec.out, y_zero, spec.relu)
        self.pitch = o["channels"]
        self.line = o["width"] * self.pitch

    def _block(self, image: Value, lines: tuple[Value, Value], block: Value) -> None:
        """Some rows of an image, for one block of channels."""
        f, o, tile = self.f, self.o, self.tile
        c = f.min(block * self.vector, o["channels"] - self.vector)
        offsets = [-(x * self.less) for x in self._by_channel("sums", c, i32)]
        if self.spec.bias:
            more = self._by_channel("bias", c, i32)
            offsets = [x + y for x, y in zip(offsets, more, strict=True)]
        scales = self._by_channel("scale", c, f32)
        each = self.spec.rows * tile.pixels * tile.words * self.word_bytes
        weights = f.gep(o["filters"], block, each)
        source = f.gep(o["x"], image * o["height"] * self.line + c)
        out = f.gep(o["out"], image * o["out_height"] * o["out_width"] * self.pitch + c)
        for x in f.range(0, o["out_width"], tile.pixels):
            left = x * tile.stride + o["start_x"]
            across = (left >= 0) & (left + tile.columns <= o["width"])
            across = across & (x + tile.pixels <= o["out_width"])
            for y in f.range(*lines):
                top = y * o["stride_y"] + o["start_y"]
                reach = (self.spec.rows - 1) * self.spec.dilation_y
                inside = across & (top >= 0) & (top + reach < o["height"])
                first = f.gep(source, top * self.line + left * self.pitch)
                to = f.gep(out, (y * o["out_width"] + x) * self.pitch)
                for is_inside in f.either(inside):
                    sums = self._sums(first, top, left, weights, is_inside)
                    self._store(sums, offsets, scales, to, o["out_width"] - x, is_inside)

    def _by_channel(self, name: str, c: Value, scalar: Type) -> list[Value]:
        """Numbers of a block's channels, in the order of the registers."""
        f, lanes, units = self.f, self.lanes, self.lanes // 4
        base, kind = f.gep(self.o[name], c, 4), vec(lanes, scalar)
        plain = [f.load(base, kind, 4 * lanes * j) for j in range(4)]
        if units == 1:
            return plain
        found = []
        for q in range(4):
            parts = []
            for unit in range(units):
                at = unit * 16 + q * 4
                parts.append(f.slice(plain[at // lanes], at % lanes, 4))
            while len(parts) > 1:
                parts = [f.concat(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
            found.append(parts[0])
        return found

    # -- sums -----------------------------------------------------------------------------------

    def _sums(
        self, first: Value, top: Value, left: Value, weights: Value, inside: bool
    ) -> list[list[Value]]:
        """The four registers of sums of each pixel."""
        f, o, spec, tile = self.f, self.o, self.spec, self.tile
        zero = f.const(0, self.words)
        sums = [[zero] * 4 for _ in range(tile.pixels)]
        for i in range(spec.rows):
            row = f.gep(first, self.line * (i * spec.dilation_y)) if i else first
            there = None if inside else (top + i * spec.dilation_y).ult(o["height"])
            for word in range(tile.words):
                columns = [
                    self._column(row, left, 4 * word + n, there) for n in range(4)
                ]  # fmt: skip
                registers = self._interleaved(columns)
                for p in range(tile.pixels):
                    if not tile.uses(p, word):
                        continue
                    number = (i * tile.pixels + p) * tile.words + word
                    at = number * self.word_bytes
                    sums[p] = self._step(sums[p], registers, f.gep(weights, at))
        return sums

    def _column(self, row: Value, left: Value, column: int, there: Value | None) -> Value | None:
        """A column's bytes; None where no window has it."""
        f = self.f
        if column >= self.tile.columns:
            return None
        pixel = f.gep(row, self.pitch * column) if column else row
        if there is not None:
            exists = there & (left + column).ult(self.o["width"])
            pixel = f.select(exists, pixel, self.border)
        x = f.load(pixel, self.bytes)
        return x ^ _HIGH_BITS if self.flips else x

    def _interleaved(self, columns: Sequence[Value | None]) -> list[Value]:
        """Words of four columns; what no window has is multiplied by zero, whatever it is."""
        f, units = self.f, self.lanes // 4
        a, b, c, d = [x if x is not None else columns[0] for x in columns]
        assert a is not None and b is not None and c is not None and d is not None

        def unpacked(x: Value, y: Value, high: bool) -> Value:
            each, total = x.type.lanes // units, x.type.lanes
            order = []
            for unit in range(units):
                for n in range(each // 2):
                    at = unit * each + n + high * (each // 2)
                    order += [at, at + total]
            return f.shuffle(x, y, order)

        halves, found = vec(2 * self.lanes, i16), []
        for high in (False, True):
            first, second = (unpacked(x, y, high).bits(halves) for x, y in ((a, b), (c, d)))
            found += [unpacked(first, second, up).bits(self.words) for up in (False, True)]
        return found

    def _step(self, sums: Sequence[Value], x: Sequence[Value], weights: Value) -> list[Value]:
        f, dot, size = self.f, self.dot, self.words.bytes
        found = []
        for q, (total, word) in enumerate(zip(sums, x, strict=True)):
            if self.spec.halves:
                w = [f.load(weights, self.words, (2 * q + n) * size) for n in range(2)]
                even = dot.pairs(total, word & _PAIRS, w[0])
                found.append(dot.pairs(even, word >> 8 & _PAIRS, w[1]))
            else:
                assert isinstance(dot, FourWay)
                w_bytes = f.load(weights, self.bytes, q * size)
                found.append(dot.step(total, word.bits(self.bytes), w_bytes))
        return found

    def _store(
        self, sums: Sequence[Sequence[Value]], offsets: Sequence[Value], scales: Sequence[Value],
        out: Value, left: Value, inside: bool,
    ) -> None:  # fmt: skip
        f = self.f

        def store_pixel(p: int) -> None:
            parts = zip(sums[p], offsets, scales, strict=True)
            reals = [(total + offset).to(f32) * scale for total, offset, scale in parts]
            encoded = self.encoder.of_units(reals)
            f.store(encoded, f.gep(out, self.pitch * p) if p else out)

        for p in range(self.tile.pixels):
            if inside or p == 0:
                store_pixel(p)
            else:
                for _ in f.when(left > p):
                    store_pixel(p)
