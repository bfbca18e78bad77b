"""Direct convolution: a GEMM of filters and pixels that packs panels instead of a whole im2col.

A panel is a run of output pixels of one image; the inputs under every tap are packed for it once,
`[taps][channels][width]`, and stay in the cache while all tiles of filters use them. Filters come
packed, `[taps][channels][rows]` per tile of `rows` filters. The accumulators of a tile are in
registers for the whole sum.

Taps have constant strides, which is all the kernel knows of geometry: a convolution, one phase of
a transposed one, any stride, dilation and padding are the same code.
"""

from __future__ import annotations

from functools import partial

from rlx.backends.cpu.kernels.conv.windows import RowLoads, store_masked
from rlx.backends.cpu.kernels.spec import KernelSpec, Operands
from rlx.ir.dtype import DType
from rlx.llvm.builder import Function, Module, Type, Value, i1, i64, ptr, vec
from rlx.llvm.nest.elements import activate
from rlx.llvm.storage import compute_type, load, memory_type, narrow
from rlx.llvm.target import Target
from rlx.support.records import dataclass

CHANNEL_BLOCK = 32  # channels packed together, so that all segments find their rows cached
SEGMENT_BYTES = 24  # of a segment: input row, input column, offset in the panel


def emit_pack(m: Module, spec: DirectConv, sums: Type, lanes: int) -> Function:
    """void pack(ptr args, ptr image, i64 pixel, i64 count, ptr panel)"""
    params = [("args", ptr), ("image", ptr), ("pixel", i64), ("count", i64), ("panel", ptr)]
    f = m.function("pack", params, internal=True)
    _Pack(f, spec, sums, lanes).emit()
    return f


class _Pack:
    def __init__(self, f: Function, spec: DirectConv, sums: Type, lanes: int) -> None:
        self.f, self.spec, self.sums, self.lanes = f, spec, sums, lanes
        self.o = Operands(f, spec.args, POINTERS)
        self.row_bytes = spec.panel_bytes(f.target)
        self.loads = RowLoads(spec.x, sums, lanes, spec.stride)
        self.size = memory_type(spec.x).bytes

    def emit(self) -> None:
        f, o = self.f, self.o
        most = self.row_bytes // self.sums.bytes
        self.segments = f.alloca(most * SEGMENT_BYTES)
        end = f.gep(self.segments, self._split_rows(), SEGMENT_BYTES)
        last = f.bitcast(end, i64)
        first = f.bitcast(self.segments, i64)
        for i in f.range(0, o["taps_y"]):
            for j in f.range(0, o["taps_x"]):
                tap = i * o["taps_x"] + j
                down = o["start_y"] + i * o["dilation_y"]
                right = o["start_x"] + j * o["dilation_x"]
                for c in f.range(0, o["channels"], CHANNEL_BLOCK):
                    for segment in f.range(first, last, SEGMENT_BYTES):
                        self._pack_segment(f.bitcast(segment, ptr), tap, down, right, c)

    def _split_rows(self) -> Value:
        """Split the panel's pixels into segments of one image row. Returns their number."""
        f, o = self.f, self.o
        pixel = f["pixel"]

        def split_row(at: Value, count: Value, y: Value, x: Value) -> list[Value]:
            segment = f.gep(self.segments, count, SEGMENT_BYTES)
            f.store(y * o["stride_y"], segment)
            f.store(x * o["stride_x"], segment, 8)
            f.store(at, segment, 16)
            n = f.min(o["out_width"] - x, self.lanes)
            ends = (x + n).eq(o["out_width"])
            return [at + n, count + 1, y + ends.to(i64), f.select(ends, 0, x + n)]

        start = [f.i64(0), f.i64(0), pixel.udiv(o["out_width"]), pixel.urem(o["out_width"])]
        return f.while_(start, lambda at, *_: at < f["count"], split_row)[1]

    def _pack_segment(
        self, segment: Value, tap: Value, down: Value, right: Value, c: Value
    ) -> None:
        f, o = self.f, self.o
        y, x = f.load(segment, i64) + down, f.load(segment, i64, 8) + right
        exists = (y >= 0) & (y < o["height"])
        limit = f.select(exists, o["width"], 0)
        stop = f.min(c + CHANNEL_BLOCK, o["channels"])
        term = tap * o["channels"] + c
        to = f.gep(f["panel"], term, self.row_bytes)
        to = f.gep(to, f.load(segment, i64, 16), self.sums)
        plane = o["height"] * o["width"]
        source = f.gep(f["image"], c * plane + y * o["width"] + x, self.size)

        def copy(inside: bool) -> None:
            load_vector = self.loads.loader(f, x, limit, o["stride_x"], inside)

            def channel(k: Value, source: Value, to: Value) -> list[Value]:
                f.store(load_vector(source), to)
                return [f.gep(source, plane, self.size), f.gep(to, self.row_bytes)]

            f.loop(c, stop, 1, [source, to], channel, guard=False)

        inside = self.loads.is_inside(f, x, limit, o["stride_x"])
        f.if_(inside, lambda: copy(True), lambda: copy(False))


VECTORS = 3  # of pixels in a panel; with 8 (4) rows the accumulators fit in 32 (16) registers
POINTERS = frozenset(["x", "filters", "out", "bias", "scratch", "flags"])
_CHUNK_BYTES = 384 << 10  # of panels that are packed before the tiles use them, in an L2 of 512 kB
_LARGE_CHUNK_BYTES = 512 << 10  # with AVX-512, whose cores have an L2 cache of 1 MB and more
_CHUNK = 8  # panels at most, for enough work items
_SIZES = ["batch", "groups", "channels", "tiles", "rows", "chunk", "height", "width"]
_PIXELS = ["out_height", "out_width", "stride_y", "stride_x"]
_TAPS = ["taps_y", "start_y", "dilation_y", "taps_x", "start_x", "dilation_x"]
_STRIDED_OUTPUT = [
    "plane",
    "out_pitch",
    "out_start_y",
    "out_start_x",
    "out_stride_y",
    "out_stride_x",
]


def tile_rows(target: Target, filters: int) -> int:
    """Filters of a tile on this target."""
    most = 8 if target.num_vector_registers >= 32 else 4
    return min(most, 1 << max(filters - 1, 0).bit_length())


@dataclass(frozen=True)
class DirectConv(KernelSpec):
    """args: as `self.args` lists them.

    out[b, g·rows + o, y, x] =
        activation(Σ filters[o, c, i, j] · in[c, y·stride_y + start_y + i·dilation_y, …] + bias)
    for `rows` filters of each group and `out_height` by `out_width` pixels; inputs outside the
    image are 0. `scratch` holds `scratch_bytes` for each worker, room for `chunk` panels. With
    `strided_output`, pixel (y, x) is element (out_start_y + y·out_stride_y) · out_pitch +
    out_start_x + x·out_stride_x of an output plane of `plane` elements. With `again` it
    computes the images that `WinogradConv` flagged, and no others.
    """

    x: DType
    out: DType
    bias: DType | None = None
    tile: int = 8
    stride: int = 1  # stride along a row, if it is a small constant; else 0
    strided_output: bool = False
    activation: str = "none"
    again: bool = False

    @property
    def flushes_denormals(self) -> bool:
        return True

    @property
    def args(self) -> list[str]:
        names = [
            "x",
            "filters",
            "out",
            *["bias"] * (self.bias is not None),
            *["flags"] * self.again,
            "scratch",
            "scratch_bytes",
        ]
        names += [*_SIZES, *_PIXELS, *_TAPS]
        return names + _STRIDED_OUTPUT if self.strided_output else names

    def panel_bytes(self, target: Target) -> int:
        """Bytes of one row (k) of a panel: pixels, and a vector that the last store may clobber."""
        return (VECTORS + 1) * target.vector_bits // 8

    def chunk(self, target: Target, terms: int) -> int:
        """Panels that are packed together, for sums over `terms` inputs."""
        size = _LARGE_CHUNK_BYTES if target.vector_bits >= 512 else _CHUNK_BYTES
        room = size // (self.panel_bytes(target) * max(terms, 1))
        return max(1, min(room, _CHUNK))

    def scratch(self, target: Target, terms: int) -> int:
        """Bytes each worker needs."""
        return self.chunk(target, terms) * max(terms, 1) * self.panel_bytes(target)

    def emit(self, m: Module) -> None:
        _DirectConv(self, m).emit()


class _DirectConv:
    def __init__(self, spec: DirectConv, m: Module) -> None:
        self.spec, self.sums = spec, compute_type(spec.out)
        self.lanes = m.target.lanes(self.sums.bits)
        self.width = VECTORS * self.lanes
        self.row_bytes = spec.panel_bytes(m.target)
        self.pack = emit_pack(m, spec, self.sums, self.lanes)
        self.microkernels = {v: self._emit_microkernel(m, v) for v in range(1, VECTORS + 1)}
        self.store = self._emit_strided_store(m) if spec.strided_output else self._emit_store(m)
        self.f = m.kernel()
        self.o = Operands(self.f, spec.args, POINTERS)

    def emit(self) -> None:
        f, o = self.f, self.o
        tid = f["tid"].to(i64)
        self.panels = f.gep(o["scratch"], tid * o["scratch_bytes"])
        self.pixels = o["out_height"] * o["out_width"]
        self.terms = o["taps_y"] * o["taps_x"] * o["channels"]
        most = o["chunk"] * self.width
        chunks = (self.pixels + most - 1).udiv(most)
        # Chunks of one image have equal sizes, to balance the work.
        even = (self.pixels + chunks - 1).udiv(f.max(chunks, 1))
        per_chunk = f.ceil_div(even, self.lanes) * self.lanes
        lo, hi = f.split(o["batch"] * o["groups"] * chunks * o["tiles"])

        def work_item(u: Value, packed: Value) -> Value:
            chunk, tile = u.udiv(o["tiles"]), u.urem(o["tiles"])
            image, first = chunk.udiv(chunks), chunk.urem(chunks) * per_chunk
            count = f.min(self.pixels - first, per_chunk)
            for _ in f.when(self._is_flagged(image) if self.spec.again else f.const(1, i1)):
                f.if_(packed.ne(chunk), lambda: self._pack_chunk(image, first, count))
                self._tile(image, tile, first, count)
            return chunk

        if self.spec.again:
            hi = f.select(self._is_flagged(None), hi, lo)
        f.loop(lo, hi, 1, [f.i64(-1)], work_item)

    def _is_flagged(self, image: Value | None) -> Value:
        """Whether any worker flagged the image, or any image."""
        f, o = self.f, self.o
        found, workers = f.carry([f.i64(0)]), f["nth"].to(i64)
        first, step = (0, 1) if image is None else (image, o["batch"])
        for at in found.range(first, workers * o["batch"], step):
            found.values = [found.values[0] | f.load(f.gep(o["flags"], at, 8), i64)]
        return found.values[0].ne(0)

    def _pack_chunk(self, image: Value, first: Value, count: Value) -> None:
        f, o = self.f, self.o
        size = memory_type(self.spec.x).bytes
        source = f.gep(o["x"], image * o["channels"] * o["height"] * o["width"], size)
        for at in f.range(0, count, self.width):
            n = f.min(count - at, self.width)
            f.call(self.pack, f["args"], source, first + at, n, self._panel(at))

    def _panel(self, at: Value) -> Value:
        number = at.udiv(self.width)
        return self.f.gep(self.panels, number * self.terms, self.row_bytes)

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

            def microkernel(vectors: int, panel: Value = panel) -> None:
                f.call(self.microkernels[vectors], self.terms, a, panel, sums)

            f.switch(
                f.ceil_div(n, self.lanes),
                {v: partial(microkernel, v) for v in range(1, VECTORS)},
                partial(microkernel, VECTORS),
            )
            bias = group * o["rows"] + row
            f.call(self.store, f["args"], sums, bias, channel, used, first + at, n)

    def _emit_microkernel(self, m: Module, vectors: int) -> Function:
        """void microkernel(i64 terms, ptr a, ptr b, ptr sums)"""
        params = [("terms", i64), ("a", ptr), ("b", ptr), ("sums", ptr)]
        f = m.function(f"microkernel{vectors}", params, internal=True)
        rows, type_ = self.spec.tile, vec(self.lanes, self.sums)
        size = self.sums.bytes

        def accumulate(k: Value, *sums: Value) -> list[Value]:
            a, b = f.gep(f["a"], k, rows * size), f.gep(f["b"], k, self.row_bytes)
            pixels = [f.load(b, type_, j * type_.bytes) for j in range(vectors)]
            out = []
            for i in range(rows):
                weight = f.broadcast_load(a, self.sums, self.lanes, i * size)
                out += [f.fma(weight, p, sums[i * vectors + j]) for j, p in enumerate(pixels)]
            return out

        zero = f.const(0, type_)
        sums = f.loop(0, f["terms"], 1, [zero] * (rows * vectors), accumulate)
        for n, value in enumerate(sums):
            offset = n // vectors * self.width + n % vectors * self.lanes
            f.store(value, f["sums"], offset * size)
        return f

    def _store_function(self, m: Module) -> tuple[Function, Operands]:
        """void store(ptr args, ptr sums, i64 bias, i64 channel, i64 rows, i64 pixel, i64 n)"""
        names = ["bias", "channel", "rows", "pixel", "n"]
        params = [("args", ptr), ("sums", ptr), *((name, i64) for name in names)]
        f = m.function("store", params, internal=True)
        return f, Operands(f, self.spec.args, POINTERS)

    def _emit_store(self, m: Module) -> Function:
        """Store the rows of a tile to contiguous pixels."""
        f, o = self._store_function(m)
        pixels, size = o["out_height"] * o["out_width"], memory_type(self.spec.out).bytes
        whole = f["n"] - f["n"].urem(self.lanes)
        rest = f.lane_mask(f["n"] - whole, self.lanes)
        for i in f.range(0, f["rows"]):
            row = f.gep(f["sums"], i, self.width * self.sums.bytes)
            out = f.gep(o["out"], (f["channel"] + i) * pixels + f["pixel"], size)
            bias = self._bias(f, o, i)

            def store_vector(
                at: Value, mask: Value | None = None, row: Value = row, out: Value = out,
                bias: Value | None = bias,
            ) -> None:  # fmt: skip
                value = f.load(f.gep(row, at, self.sums), vec(self.lanes, self.sums))
                if bias is not None:
                    value = value + f.splat(bias, self.lanes)
                value = activate(self.spec.activation, value)
                store_masked(f, value, f.gep(out, at, size), self.spec.out, mask)

            for at in f.range(0, whole, self.lanes):
                store_vector(at)
            f.if_(whole < f["n"], partial(store_vector, whole, rest))
        return f

    def _bias(self, f: Function, o: Operands, i: Value) -> Value | None:
        dtype = self.spec.bias
        if dtype is None:
            return None
        address = f.gep(o["bias"], f["bias"] + i, memory_type(dtype).bytes)
        return load(f, address, dtype, 1, self.sums)

    def _emit_strided_store(self, m: Module) -> Function:
        """Store pixel by pixel, to a strided output."""
        f, o = self._store_function(m)
        size = memory_type(self.spec.out).bytes
        for i in f.range(0, f["rows"]):
            row = f.gep(f["sums"], i, self.width * self.sums.bytes)
            plane = (f["channel"] + i) * o["plane"]
            bias = self._bias(f, o, i)
            for at in f.range(0, f["n"]):
                pixel = f["pixel"] + at
                y, x = pixel.udiv(o["out_width"]), pixel.urem(o["out_width"])
                row_start = (o["out_start_y"] + y * o["out_stride_y"]) * o["out_pitch"]
                offset = plane + row_start + o["out_start_x"] + x * o["out_stride_x"]
                value = f.load(f.gep(row, at, self.sums), self.sums)
                total = activate(self.spec.activation, value if bias is None else value + bias)
                f.store(narrow(f, total, self.spec.out), f.gep(o["out"], offset, size))
        return f


@dataclass(frozen=True)
class PackFilters(KernelSpec):
    """args: w, to, then the sizes and strides (in elements) that `args` names.

    to[group, tile, i, j, channel, row] = w at group·stride_group + filter·stride_row +
    channel·stride_channel + i·stride_y + j·stride_x, and 0 where the last tile has no filter.
    """

    w: DType
    out: DType
    tile: int

    args = ("w", "to", "groups", "tiles", "rows", "channels", "taps_y", "taps_x",
             "stride_group", "stride_row", "stride_channel", "stride_y", "stride_x")  # fmt: skip

    def emit(self, m: Module) -> None:
        f = m.kernel()
        o = Operands(f, self.args, ("w", "to"))
        sums = compute_type(self.out)
        terms = o["taps_y"] * o["taps_x"] * o["channels"]
        lo, hi = f.split(o["groups"] * o["tiles"] * terms)
        for at in f.range(lo, hi):
            number, term = at.udiv(terms), at.urem(terms)
            tap, channel = term.udiv(o["channels"]), term.urem(o["channels"])
            y, x = tap.udiv(o["taps_x"]), tap.urem(o["taps_x"])
            group, first = number.udiv(o["tiles"]), number.urem(o["tiles"]) * self.tile
            base = group * o["stride_group"] + channel * o["stride_channel"]
            base = base + y * o["stride_y"] + x * o["stride_x"]
            to = f.gep(o["to"], at, self.tile * sums.bytes)
            for row in f.range(0, self.tile):
                filter_ = first + row
                address = f.gep(o["w"], base + filter_ * o["stride_row"], memory_type(self.w))

                def load_weight(address: Value = address) -> Value:
                    return load(f, address, self.w, 1, sums)

                [value] = f.if_(filter_ < o["rows"], load_weight, lambda: f.const(0, sums))
                f.store(value, f.gep(to, row, sums))
