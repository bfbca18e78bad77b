"""Convolutions as products of filters and pixels, without a copy of all windows.

A panel is a run of output pixels of one image; for it the inputs under every tap are packed once,
`[taps][channels][width]`, and stay in the cache while tiles of filters pass over them. Filters come
packed, `[taps][channels][rows]` per tile of `rows` filters. The product of a tile is held in
registers for the whole sum.

Taps lie in rows and columns at equal distances, which is all the kernel knows of geometry: a
convolution, one phase of a transposed one, any stride, dilation and padding are the same code.
"""

from __future__ import annotations

from functools import partial

from rlx.codegen.conv_panel import emit_pack
from rlx.codegen.emit import Function, Module, Value, i64, ptr, vec
from rlx.codegen.kernel import KernelSpec
from rlx.codegen.line import store_some
from rlx.codegen.operands import Operands
from rlx.codegen.region.elements import activate
from rlx.codegen.storage import compute_type, load, memory_type, narrow
from rlx.codegen.target import Target
from rlx.ir.dtype import DType
from rlx.support.records import dataclass

VECTORS = 3  # of pixels in a panel; with 8 (4) rows they leave room among 32 (16) registers
POINTERS = frozenset(["x", "filters", "out", "bias", "scratch"])
_CHUNK_BYTES = 384 << 10  # of panels that are packed before the tiles pass over them
_CHUNK = 8  # panels at most, so that there are enough chunks for many workers
_SIZES = ["batch", "groups", "channels", "tiles", "rows", "chunk", "height", "width"]
_PIXELS = ["lines", "columns", "step_y", "step_x"]
_TAPS = ["taps_y", "first_y", "tap_y", "taps_x", "first_x", "tap_x"]
_PLACES = ["plane", "line", "out_first_y", "out_first_x", "out_step_y", "out_step_x"]


def tile_rows(target: Target, filters: int) -> int:
    """How many filters a tile holds on this target."""
    most = 8 if target.num_vector_registers >= 32 else 4
    return min(most, 1 << max(filters - 1, 0).bit_length())


@dataclass(frozen=True)
class Conv(KernelSpec):
    """args: as `self.args` lists them.

    out[b, g·rows + o, y, x] = Σ filters[o, c, i, j] · in[c, y·step_y + first_y + i·tap_y, …] + bias
    for `rows` filters of each group and `lines` by `columns` pixels, through the activation; inputs
    outside the image are 0. `scratch` holds `stride` bytes for each worker, `chunk` is the number
    of panels there. `spread` results go to lines and columns at distances: pixel (y, x) lies at
    (out_first_y + y·out_step_y) · line + out_first_x + x·out_step_x of a plane of `plane` elements.
    """

    x: DType
    out: DType
    bias: DType | None = None
    tile: int = 8
    step: int = 1  # distance of neighbouring pixels in the input, where it is small; else 0
    spread: bool = False
    activation: str = "none"

    @property
    def args(self) -> list[str]:
        names = ["x", "filters", "out", *["bias"] * (self.bias is not None), "scratch", "stride"]
        names += [*_SIZES, *_PIXELS, *_TAPS]
        return names + _PLACES if self.spread else names

    def panel_bytes(self, target: Target) -> int:
        """Bytes of one term of a panel: its pixels, and a vector that the last store may spoil."""
        return (VECTORS + 1) * target.vector_bits // 8

    def chunk(self, target: Target, terms: int) -> int:
        """How many panels of sums over `terms` inputs are packed together."""
        room = _CHUNK_BYTES // (self.panel_bytes(target) * max(terms, 1))
        return max(1, min(room, _CHUNK))

    def scratch(self, target: Target, terms: int) -> int:
        """Bytes each worker needs."""
        return self.chunk(target, terms) * max(terms, 1) * self.panel_bytes(target)

    def emit(self, m: Module) -> None:
        _Conv(self, m).emit()


class _Conv:
    def __init__(self, spec: Conv, m: Module) -> None:
        self.spec, self.sums = spec, compute_type(spec.out)
        self.lanes = m.target.lanes(self.sums.bits)
        self.width = VECTORS * self.lanes
        self.term_bytes = spec.panel_bytes(m.target)
        self.pack = emit_pack(m, spec, self.sums, self.lanes)
        self.products = {v: self._emit_product(m, v) for v in range(1, VECTORS + 1)}
        self.store = self._emit_spread(m) if spec.spread else self._emit_store(m)
        self.f = m.kernel()
        self.o = Operands(self.f, spec.args, POINTERS)

    def emit(self) -> None:
        f, o = self.f, self.o
        tid = f["tid"].to(i64)
        self.panels = f.gep(o["scratch"], tid * o["stride"])
        self.pixels = o["lines"] * o["columns"]
        self.terms = o["taps_y"] * o["taps_x"] * o["channels"]
        most = o["chunk"] * self.width
        chunks = (self.pixels + most - 1).udiv(most)
        # Chunks of one image are of equal size, so that workers have equal shares of them.
        even = (self.pixels + chunks - 1).udiv(f.max(chunks, 1))
        per_chunk = f.ceil_div(even, self.lanes) * self.lanes
        lo, hi = f.split(o["batch"] * o["groups"] * chunks * o["tiles"])

        def unit(u: Value, packed: Value) -> Value:
            chunk, tile = u.udiv(o["tiles"]), u.urem(o["tiles"])
            image, first = chunk.udiv(chunks), chunk.urem(chunks) * per_chunk
            count = f.min(self.pixels - first, per_chunk)
            f.if_(packed.ne(chunk), lambda: self._pack_chunk(image, first, count))
            self._tile(image, tile, first, count)
            return chunk

        f.loop(lo, hi, 1, [f.i64(-1)], unit)

    def _pack_chunk(self, image: Value, first: Value, count: Value) -> None:
        f, o = self.f, self.o
        size = memory_type(self.spec.x).bytes
        source = f.gep(o["x"], image * o["channels"] * o["height"] * o["width"], size)
        for at in f.range(0, count, self.width):
            n = f.min(count - at, self.width)
            f.call(self.pack, f["args"], source, first + at, n, self._panel(at))

    def _panel(self, at: Value) -> Value:
        number = at.udiv(self.width)
        return self.f.gep(self.panels, number * self.terms, self.term_bytes)

    def _tile(self, image: Value, tile: Value, first: Value, count: Value) -> None:
        """One tile of filters over every panel of the chunk."""
        f, o, rows = self.f, self.o, self.spec.tile
        group = image.urem(o["groups"])
        number = group * o["tiles"] + tile
        a = f.gep(o["filters"], number * self.terms, rows * self.sums.bytes)
        sums = f.alloca(rows * self.width * self.sums.bytes)
        row = tile * rows
        channel = image * o["rows"] + row  # over all images
        used = f.min(o["rows"] - row, rows)
        for at in f.range(0, count, self.width):
            n = f.min(count - at, self.width)
            panel = self._panel(at)

            def product(vectors: int, panel: Value = panel) -> None:
                f.call(self.products[vectors], self.terms, a, panel, sums)

            f.switch(
                f.ceil_div(n, self.lanes),
                {v: partial(product, v) for v in range(1, VECTORS)},
                partial(product, VECTORS),
            )
            bias = group * o["rows"] + row
            f.call(self.store, f["args"], sums, bias, channel, used, first + at, n)

    def _emit_product(self, m: Module, vectors: int) -> Function:
        """void product(i64 terms, ptr a, ptr b, ptr sums)"""
        params = [("terms", i64), ("a", ptr), ("b", ptr), ("sums", ptr)]
        f = m.function(f"product{vectors}", params, internal=True)
        rows, type_ = self.spec.tile, vec(self.lanes, self.sums)
        size = self.sums.bytes

        def step(k: Value, *sums: Value) -> list[Value]:
            a, b = f.gep(f["a"], k, rows * size), f.gep(f["b"], k, self.term_bytes)
            pixels = [f.load(b, type_, j * type_.bytes) for j in range(vectors)]
            out = []
            for i in range(rows):
                weight = f.broadcast_load(a, self.sums, self.lanes, i * size)
                out += [f.fma(weight, p, sums[i * vectors + j]) for j, p in enumerate(pixels)]
            return out

        zero = f.const(0, type_)
        sums = f.loop(0, f["terms"], 1, [zero] * (rows * vectors), step)
        for n, value in enumerate(sums):
            place = n // vectors * self.width + n % vectors * self.lanes
            f.store(value, f["sums"], place * size)
        return f

    def _store_function(self, m: Module) -> tuple[Function, Operands]:
        """void store(ptr args, ptr sums, i64 bias, i64 channel, i64 rows, i64 pixel, i64 n)"""
        names = ["bias", "channel", "rows", "pixel", "n"]
        params = [("args", ptr), ("sums", ptr), *((name, i64) for name in names)]
        f = m.function("store", params, internal=True)
        return f, Operands(f, self.spec.args, POINTERS)

    def _emit_store(self, m: Module) -> Function:
        """Rows of a tile to runs of pixels."""
        f, o = self._store_function(m)
        pixels, size = o["lines"] * o["columns"], memory_type(self.spec.out).bytes
        whole = f["n"] - f["n"].urem(self.lanes)
        rest = f.lane_mask(f["n"] - whole, self.lanes)
        for i in f.range(0, f["rows"]):
            row = f.gep(f["sums"], i, self.width * self.sums.bytes)
            out = f.gep(o["out"], (f["channel"] + i) * pixels + f["pixel"], size)
            bias = self._bias(f, o, i)

            def put(
                at: Value, mask: Value | None = None, row: Value = row, out: Value = out,
                bias: Value | None = bias,
            ) -> None:  # fmt: skip
                value = f.load(f.gep(row, at, self.sums), vec(self.lanes, self.sums))
                if bias is not None:
                    value = value + f.splat(bias, self.lanes)
                value = activate(self.spec.activation, value)
                store_some(f, value, f.gep(out, at, size), self.spec.out, mask)

            for at in f.range(0, whole, self.lanes):
                put(at)
            f.if_(whole < f["n"], partial(put, whole, rest))
        return f

    def _bias(self, f: Function, o: Operands, i: Value) -> Value | None:
        dtype = self.spec.bias
        if dtype is None:
            return None
        address = f.gep(o["bias"], f["bias"] + i, memory_type(dtype).bytes)
        return load(f, address, dtype, 1, self.sums)

    def _emit_spread(self, m: Module) -> Function:
        """One pixel at a time, each to its own place."""
        f, o = self._store_function(m)
        size = memory_type(self.spec.out).bytes
        for i in f.range(0, f["rows"]):
            row = f.gep(f["sums"], i, self.width * self.sums.bytes)
            plane = (f["channel"] + i) * o["plane"]
            bias = self._bias(f, o, i)
            for at in f.range(0, f["n"]):
                pixel = f["pixel"] + at
                y, x = pixel.udiv(o["columns"]), pixel.urem(o["columns"])
                line = (o["out_first_y"] + y * o["out_step_y"]) * o["line"]
                place = plane + line + o["out_first_x"] + x * o["out_step_x"]
                value = f.load(f.gep(row, at, self.sums), self.sums)
                total = activate(self.spec.activation, value if bias is None else value + bias)
                f.store(narrow(f, total, self.spec.out), f.gep(o["out"], place, size))
        return f
