"""3×3 convolution of stride 1 with channels last, by Winograd's F(2×2, 3×3).

As `winograd`, with vectors along the channels: a block of tiles (2×2 results each) is transformed
to 16 matrices of tiles and channels, each is multiplied by that point's filters, and panels of
products are transformed back, with bias, residual and activation. Sums are over channels, one fma
each, whatever tiles are beside them.

An infinity or NaN spreads to all results of a tile: such a tile is computed by its taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx.backends.cpu.kernels.conv.channels_last_gemm import (
    ChannelsLastGemm,
    Micro,
    padded,
    tile_pixels,
)
from rlx.backends.cpu.kernels.spec import KernelSpec, Operands
from rlx.llvm.builder import Function, Module, Value, f32, i64, ptr, vec
from rlx.llvm.nest.elements import activate
from rlx.llvm.target import Target
from rlx.support.records import dataclass

POINTS, TAPS = 16, 9
_POINTERS = frozenset(["x", "filters", "points", "out", "bias", "residual", "scratch"])
_SIZES = [
    "scratch_bytes", "batch", "columns", "panels", "channels", "block", "height", "width",
    "out_height", "out_width", "start_y", "start_x",
]  # fmt: skip
_BLOCK = 48  # tiles whose products and inputs fit in an L2 cache of 1 MB
_LINE = 64  # between matrices, which would else begin in the same sets of the L1 cache


@dataclass(frozen=True)
class ChannelsLastWinograd(KernelSpec):
    """args: as `self.args` lists them.

    As `ChannelsLastGemm` with one group; `points` are the filters of all points.
    """

    width: int
    last: int
    masked: bool
    bias: bool
    residual: bool
    activation: str = "none"

    @property
    def flushes_denormals(self) -> bool:
        return True

    @property
    def args(self) -> list[str]:
        given = ["bias"] * self.bias + ["residual"] * self.residual
        return ["x", "filters", "points", "out", *given, "scratch", *_SIZES]

    def block(self, target: Target) -> int:
        """Tiles that are transformed together: whole tiles of the micro-kernel."""
        rows = tile_pixels(target, self.width)
        return _BLOCK // rows * rows

    def matrices(self, target: Target, channels: int) -> tuple[int, int, int]:
        """Bytes of zeros, of one transformed matrix of inputs, and of one of products."""
        block, line = self.block(target), target.vector_bits // 8
        row = -(-channels * 4 // line) * line
        return row, block * row + _LINE, block * self.width * line + _LINE

    def scratch(self, target: Target, channels: int) -> int:
        """Bytes each worker needs."""
        zeros, inputs, products = self.matrices(target, channels)
        return -(-zeros // 64) * 64 + POINTS * (inputs + products)

    def emit(self, m: Module) -> None:
        _Emitter(self, m).emit()


class _Emitter:
    def __init__(self, spec: ChannelsLastWinograd, m: Module) -> None:
        self.spec, self.lanes = spec, m.target.lanes(32)
        self.type, self.line = vec(self.lanes, f32), self.lanes * 4
        self.rows = tile_pixels(m.target, spec.width)
        self.kinds = list(dict.fromkeys([(spec.width, False), (spec.last, spec.masked)]))
        products = ChannelsLastGemm(spec.width, spec.width, False, True, False, False)
        self.sizes = products.sizes(m.target)
        self.micro = {
            (v, r): Micro(products, m, v, False, r, self.sizes).function
            for v in {v for v, _ in self.kinds}
            for r in self.sizes
        }
        taps = ChannelsLastGemm(
            spec.width, spec.last, spec.masked, False, spec.bias, spec.residual, spec.activation
        )
        self.again = {k: Micro(taps, m, *k, 1, [1]).function for k in self.kinds}
        self.transform = self._emit_transform(m)
        self.backs = {kind: self._emit_back(m, kind) for kind in self.kinds}
        self.f = m.kernel()
        self.o = Operands(self.f, spec.args, _POINTERS)

    # -- the kernel -------------------------------------------------------------------------------

    def emit(self) -> None:
        f, o = self.f, self.o
        down, right = _half(o["out_height"]), _half(o["out_width"])
        tiles = o["batch"] * down * right
        row = (o["channels"] * 4 + (self.line - 1)) & -self.line
        base = f.gep(o["scratch"], f["tid"].to(i64) * o["scratch_bytes"])
        for at in f.range(0, row, self.line):
            f.store(f.const(0, self.type), f.gep(base, at))
        self.zeros, self.inputs = base, f.gep(base, (row + 63) & -64)
        self.input_bytes = o["block"] * row + _LINE
        self.product_bytes = o["block"] * (self.spec.width * self.line) + _LINE
        self.products = f.gep(self.inputs, self.input_bytes * POINTS)
        (first, last), (panel, panels) = self._share(tiles)
        for at in f.range(first, last, o["block"]):
            count = f.min(o["block"], last - at)
            f.call(
                self.transform, f["args"], self.zeros, self.inputs, self.input_bytes, row, at,
                count,
            )  # fmt: skip
            for p in f.range(panel, panels):
                self._panel(p, at, count, row)

    def _share(self, tiles: Value) -> tuple[tuple[Value, Value], tuple[Value, Value]]:
        """This worker's tiles and panels: all panels of some tiles, or of few tiles some panels."""
        f, o = self.f, self.o
        few = (tiles < f["nth"].to(i64) * o["block"]) & (o["panels"] >= f["nth"].to(i64))
        rows, columns = f.split(tiles, self.rows), f.split(o["panels"])
        zero = f.i64(0)
        return (
            (f.select(few, zero, rows[0]), f.select(few, tiles, rows[1])),
            (f.select(few, columns[0], zero), f.select(few, columns[1], o["panels"])),
        )

    def _panel(self, panel: Value, at: Value, count: Value, row: Value) -> None:
        f, o, spec = self.f, self.o, self.spec
        start = panel * (spec.width * self.line) * o["channels"]
        for is_last in f.either(panel.eq(o["panels"] - 1)):
            kind = self.kinds[-1 if is_last else 0]
            step = o["channels"] * (kind[0] * self.line)
            points = f.gep(o["points"], start * POINTS)
            for point in f.range(0, POINTS):
                x = f.gep(self.inputs, point * self.input_bytes)
                to = f.gep(self.products, point * self.product_bytes)
                self._multiply(kind[0], x, row, f.gep(points, point * step), to, count)
            f.call(
                self.backs[kind], f["args"], self.zeros, self.products, self.product_bytes,
                f.gep(o["filters"], start * TAPS), panel * (spec.width * self.lanes), at, count,
            )  # fmt: skip

    def _multiply(
        self, vectors: int, x: Value, row: Value, b: Value, to: Value, count: Value
    ) -> None:
        """The products of one point."""
        f, zero, null = self.f, self.f.i64(0), self.f.null()
        pitch, term_bytes = self.spec.width * self.line, vectors * self.line
        following = f.gep(b, self.o["channels"], term_bytes)  # the next point's weights
        for t in f.range(0, count, self.rows):
            n = f.min(count - t, self.rows)
            part = t.udiv(self.rows) * self.line
            ahead = f.select(part < term_bytes, f.gep(following, part), b)
            given = [
                f.gep(x, t * row), row, n, b, f.i64(1), self.o["channels"], null, zero, zero,
                f.gep(to, t * pitch), f.i64(pitch), null, null, zero, ahead,
                f.i64(term_bytes),
            ]  # fmt: skip
            for r in f.cases(padded(f, n, self.sizes), self.sizes):
                f.call(self.micro[vectors, r], *given)

    # -- transforms -------------------------------------------------------------------------------

    def _place(self, f: Function, o: Operands, tile: Value) -> tuple[Value, Value, Value]:
        """Image, row and column of a tile's first result."""
        down, right = _half(o["out_height"]), _half(o["out_width"])
        image = tile.udiv(down * right)
        inside = tile - image * (down * right)
        y = inside.udiv(right)
        return image, y * 2, (inside - y * right) * 2

    def _pixels(
        self, f: Function, o: Operands, zeros: Value, image: Value, y: Value, x: Value, size: int
    ) -> list[Value]:
        """Pointers to size × size input pixels; those of the border point at zeros."""
        top, left = y + o["start_y"], x + o["start_x"]
        base = f.gep(o["x"], image * (o["height"] * o["width"]) * (o["channels"] * 4))
        found = []
        for i in range(size):
            row = top + i
            limit = f.select(row.ult(o["height"]), o["width"], 0)
            line = row * o["width"]
            for j in range(size):
                column = left + j
                there = f.gep(base, (line + column) * (o["channels"] * 4))
                found.append(f.select(column.ult(limit), there, zeros))
        return found

    def _emit_transform(self, m: Module) -> Function:
        """void transform(ptr args, ptr zeros, ptr to, i64 step, i64 row, i64 tile, i64 count)"""
        params: list[Any] = [("args", ptr), ("zeros", ptr), ("to", ptr)]
        params += [(name, i64) for name in ("step", "row", "tile", "count")]
        f = m.function("transform", params, internal=True)
        o = Operands(f, self.spec.args, _POINTERS)
        table = f.alloca(POINTS * 8)
        whole = o["channels"] - o["channels"].urem(self.lanes)
        rest = f.lane_mask(o["channels"] - whole, self.lanes)
        for t in f.range(0, f["count"]):
            place = self._place(f, o, f["tile"] + t)
            for i, pixel in enumerate(self._pixels(f, o, f["zeros"], *place, 4)):
                f.store(pixel, table, i * 8)
            to = f.gep(f["to"], t * f["row"])
            for c in f.range(0, whole, self.lanes):
                self._transform(f, table, to, c, None)
            for _ in f.when(whole < o["channels"]):
                self._transform(f, table, to, whole, rest)
        return f

    def _transform(
        self, f: Function, table: Value, to: Value, c: Value, mask: Value | None
    ) -> None:
        """Bᵀ d B of a vector of channels."""
        d: list[Value] = []
        for i in range(POINTS):
            pixel = f.gep(f.load(table, ptr, i * 8), c, 4)
            d.append(
                f.load(pixel, self.type) if mask is None else f.masked_load(pixel, self.type, mask)
            )
        rows = [_inputs(d[j::4]) for j in range(4)]  # each column of d
        for i in range(4):
            for j, value in enumerate(_inputs([rows[k][i] for k in range(4)])):
                f.store(value, f.gep(f.gep(to, c, 4), f["step"] * (i * 4 + j)))

    def _emit_back(self, m: Module, kind: tuple[int, bool]) -> Function:
        """void back(ptr args, ptr zeros, ptr products, i64 step, ptr filters, i64 column, i64 tile,
        i64 count)"""
        vectors, masked = kind
        params: list[Any] = [("args", ptr), ("zeros", ptr), ("products", ptr), ("step", i64)]
        params += [("filters", ptr), *((name, i64) for name in ("column", "tile", "count"))]
        f = m.function(f"back{vectors}" + "m" * masked, params, internal=True)
        o = Operands(f, self.spec.args, _POINTERS)
        pitch = o["columns"] * 4
        tail = o["columns"] - f["column"] - (vectors - 1) * self.lanes
        mask = f.lane_mask(tail, self.lanes) if masked else None
        for t in f.range(0, f["count"]):
            image, y, x = self._place(f, o, f["tile"] + t)
            pixel = (image * o["out_height"] + y) * o["out_width"] + x
            offset = pixel * pitch + f["column"] * 4
            there = [
                (y + i < o["out_height"]) & (x + j < o["out_width"])
                for i in range(2) for j in range(2)
            ]  # fmt: skip
            places = [
                f.const(0) + offset + (o["out_width"] * i + j) * pitch
                for i in range(2) for j in range(2)
            ]  # fmt: skip
            source = f.gep(f["products"], t * (self.spec.width * self.line))
            bad = f.const(0, self.type)
            for v in range(vectors):
                at = f.gep(source, v * self.line)
                given = (
                    f.gep(f.gep(o["bias"], f["column"], 4), v * self.line)
                    if self.spec.bias
                    else None
                )
                bad = self._vector(
                    f, o, at, given, places, there, v, mask if v == vectors - 1 else None, bad
                )
            for _ in f.when(f.any(bad.is_nan())):
                self._by_taps(f, o, kind, image, y, x, places, there, tail)
        return f

    def _vector(
        self, f: Function, o: Operands, source: Value, bias: Value | None, places: Sequence[Value],
        there: Sequence[Value], v: int, mask: Value | None, bad: Value,
    ) -> Value:  # fmt: skip
        """Aᵀ m A of a vector of results, stored where the pixels exist."""
        m = [f.load(f.gep(source, f["step"] * p), self.type) for p in range(POINTS)]
        rows = [_results(m[j::4]) for j in range(4)]
        sums = [s for i in range(2) for s in _results([rows[k][i] for k in range(4)])]
        shift = self._load(f, bias, 0, mask) if bias is not None else None
        for n, total in enumerate(sums):
            bad = f.fma(total, f.const(0.0, self.type), bad)
            for _ in f.when(there[n]):
                value = total if shift is None else total + shift
                if self.spec.residual:
                    value = value + self._load(f, f.gep(o["residual"], places[n]), v, mask)
                value = activate(self.spec.activation, value)
                out = f.gep(o["out"], places[n])
                if mask is None:
                    f.store(value, out, v * self.line)
                else:
                    f.masked_store(value, out, mask, v * self.line)
        return bad

    def _load(self, f: Function, base: Value, v: int, mask: Value | None) -> Value:
        if mask is None:
            return f.load(base, self.type, v * self.line)
        return f.masked_load(base, self.type, mask, offset=v * self.line)

    def _by_taps(
        self, f: Function, o: Operands, kind: tuple[int, bool], image: Value, y: Value, x: Value,
        places: Sequence[Value], there: Sequence[Value], tail: Value,
    ) -> None:  # fmt: skip
        """The results of a tile, each by nine taps."""
        table, null, zero = f.alloca(TAPS * 8), f.null(), f.i64(0)
        for n in range(4):
            for _ in f.when(there[n]):
                i, j = divmod(n, 2)
                pixels = self._pixels(f, o, f["zeros"], image, y + i, x + j, 3)
                for k, pixel in enumerate(pixels):
                    f.store(pixel, table, k * 8)
                bias = f.gep(o["bias"], f["column"], 4) if self.spec.bias else null
                residual = f.gep(o["residual"], places[n]) if self.spec.residual else null
                f.call(
                    self.again[kind], table, zero, f.i64(1), f["filters"], f.i64(TAPS),
                    o["channels"], null, zero, zero, f.gep(o["out"], places[n]), zero, bias,
                    residual, tail, f["filters"], zero,
                )  # fmt: skip


def _half(n: Value) -> Value:
    return (n + 1).udiv(2)


def _inputs(d: Sequence[Value]) -> list[Value]:
    """Bᵀ d"""
    return [d[0] - d[2], d[1] + d[2], d[2] - d[1], d[1] - d[3]]


def _results(m: Sequence[Value]) -> list[Value]:
    """Aᵀ m"""
    return [m[0] + m[1] + m[2], m[1] - m[2] - m[3]]
