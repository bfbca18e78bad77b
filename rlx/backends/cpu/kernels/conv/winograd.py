"""3×3 convolutions of stride 1 by Winograd's F(2×2, 3×3): 16 products for 4 results instead of 36.

A block is 2×2 results; they depend on 4×4 inputs d. With filters g,
Y = Aᵀ [ Σ_channels (G g Gᵀ) ⊙ (Bᵀ d B) ] A, where ⊙ multiplies the 16 points of two 4×4 matrices:
a GEMM of filters and blocks for each point. All constants but those of G are 0 and ±1, so that a
result is as precise as that of a sum over all taps. A worker transforms a panel of blocks, which
stays in its L2 cache while all filters use it.

An infinity or NaN spreads to all results of a block, and sums of large inputs may overflow: an
image that has such a result is flagged, and `DirectConv` computes it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rlx.backends.cpu.kernels.conv.windows import RowLoads, store_masked
from rlx.backends.cpu.kernels.spec import KernelSpec, Operands
from rlx.ir.dtype import DType
from rlx.llvm.builder import Function, Module, Value, f32, i32, i64, ptr, vec
from rlx.llvm.nest.elements import activate
from rlx.llvm.storage import load, memory_type
from rlx.llvm.target import Target
from rlx.support.records import dataclass

POINTS = 16
VECTORS = 3  # of blocks in a panel, as in `direct`
_PADDING = 128  # bytes between points, which would else begin in the same sets of the L1 cache
_SEGMENT_BYTES = 32  # of a segment: image row, image column, first block in the panel, blocks
_INFINITE = 0x7F800000  # bits of f32; those of NaN without its sign are more
_POINTERS = frozenset(["x", "filters", "out", "bias", "scratch", "flags"])
_SIZES = ["scratch_bytes", "batch", "tiles", "rows", "height", "width", "out_height", "out_width"]


@dataclass(frozen=True)
class WinogradConv(KernelSpec):
    """args: as `self.args` lists them.

    As `DirectConv` with 3×3 taps, one group and no strides. `filters` are
    `[tile of filters][point][channel][filter]`; `flags[worker][image]` is not 0 if the image must
    be computed again.
    """

    x: DType
    out: DType
    bias: DType | None
    tile: int
    channels: int
    activation: str = "none"

    @property
    def flushes_denormals(self) -> bool:
        return True

    @property
    def args(self) -> list[str]:
        bias = ["bias"] * (self.bias is not None)
        starts = ["start_y", "start_x"]
        return ["x", "filters", "out", *bias, "scratch", "flags", *_SIZES, *starts]

    def scratch(self, target: Target) -> int:
        """Bytes each worker needs: transformed inputs, and sums of a tile of filters."""
        vector = target.vector_bits // 8
        inputs = POINTS * (self.channels * _row_bytes(target) + _PADDING)
        return inputs + (POINTS * self.tile * VECTORS + 1) * vector

    def emit(self, m: Module) -> None:
        _Winograd(self, m).emit()


def _row_bytes(target: Target) -> int:
    """Bytes of one channel's blocks, and a vector that the last store may clobber."""
    return (VECTORS + 1) * target.vector_bits // 8


class _Winograd:
    def __init__(self, spec: WinogradConv, m: Module) -> None:
        self.spec, self.lanes = spec, m.target.lanes(32)
        self.width = VECTORS * self.lanes
        self.row_bytes = _row_bytes(m.target)
        self.point_bytes = spec.channels * self.row_bytes + _PADDING
        self.sum_bytes = spec.tile * self.width * 4  # of a point
        self.type = vec(self.lanes, f32)
        self.pack = self._emit_pack(m)
        self.microkernels = {v: self._emit_microkernel(m, v) for v in range(1, VECTORS + 1)}
        self.store = self._emit_store(m)
        self.f = m.kernel()
        self.o = Operands(self.f, spec.args, _POINTERS)

    def emit(self) -> None:
        f, o = self.f, self.o
        tid = f["tid"].to(i64)
        self.panel = f.gep(o["scratch"], tid * o["scratch_bytes"])
        self.sums = f.gep(self.panel, POINTS * self.point_bytes)
        self.segments = f.alloca(self.width * _SEGMENT_BYTES)
        flags = f.gep(o["flags"], tid * o["batch"], 8)
        for image in f.range(0, o["batch"]):
            f.store(f.i64(0), f.gep(flags, image, 8))
        blocks = _half(o["out_height"]) * _half(o["out_width"])
        panels = f.ceil_div(blocks, self.width)
        even = (blocks + panels - 1).udiv(f.max(panels, 1))  # panels of an image are alike
        size = f.ceil_div(even, self.lanes) * self.lanes
        lo, hi = f.split(o["batch"] * panels * o["tiles"])

        def work_item(u: Value, packed: Value) -> list[Value]:
            number, tile = u.udiv(o["tiles"]), u.urem(o["tiles"])
            image, first = number.udiv(panels), number.urem(panels) * size
            count = f.max(f.min(blocks - first, size), 0)
            segments = f.carry([packed])
            for is_new in f.either(number.ne(packed)):
                if is_new:
                    f.call(self.pack, f["args"], image, first, count, self.panel, self.segments)
            segments.values = [number]
            self._tile(tile, count)
            f.call(
                self.store, f["args"], self.sums, image, tile, self.segments,
                f.gep(flags, image, 8), count,
            )  # fmt: skip
            return segments.values

        f.loop(lo, hi, 1, [f.i64(-1)], work_item)

    def _tile(self, tile: Value, count: Value) -> None:
        """The sums of a tile of filters, at all points of the panel."""
        f, o = self.f, self.o
        step = self.spec.channels * self.spec.tile * 4
        filters = f.gep(o["filters"], tile, POINTS * step)

        def all_points(vectors: int) -> None:
            for point in f.range(0, POINTS):
                a, b = f.gep(filters, point, step), f.gep(self.panel, point, self.point_bytes)
                f.call(self.microkernels[vectors], a, b, f.gep(self.sums, point, self.sum_bytes))

        f.switch(
            f.ceil_div(count, self.lanes),
            {v: partial(all_points, v) for v in range(1, VECTORS)},
            partial(all_points, VECTORS),
        )

    def _emit_microkernel(self, m: Module, vectors: int) -> Function:
        """void microkernel(ptr a, ptr b, ptr sums)"""
        params = [("a", ptr), ("b", ptr), ("sums", ptr)]
        f = m.function(f"microkernel{vectors}", params, internal=True)
        rows = self.spec.tile

        def accumulate(k: Value, *sums: Value) -> list[Value]:
            a, b = f.gep(f["a"], k, rows * 4), f.gep(f["b"], k, self.row_bytes)
            blocks = [f.load(b, self.type, j * self.type.bytes) for j in range(vectors)]
            out = []
            for i in range(rows):
                weight = f.broadcast_load(a, f32, self.lanes, i * 4)
                out += [f.fma(weight, x, sums[i * vectors + j]) for j, x in enumerate(blocks)]
            return out

        zero = f.const(0, self.type)
        sums = f.loop(0, self.spec.channels, 1, [zero] * (rows * vectors), accumulate)
        for n, value in enumerate(sums):
            f.store(value, f["sums"], (n // vectors * VECTORS + n % vectors) * self.type.bytes)
        return f

    # -- inputs ---------------------------------------------------------------------------------

    def _emit_pack(self, m: Module) -> Function:
        """void pack(ptr args, i64 image, i64 first, i64 count, ptr panel, ptr segments)"""
        names = ["image", "first", "count"]
        params = [("args", ptr), *((n, i64) for n in names), ("panel", ptr), ("segments", ptr)]
        f = m.function("pack", params, internal=True)
        o = Operands(f, self.spec.args, _POINTERS)
        size = memory_type(self.spec.x).bytes
        plane = o["height"] * o["width"]
        zeros = f.alloca((2 * self.lanes + 2) * size)
        for n in range(0, (2 * self.lanes + 2) * size, 4):
            f.store(f.i32(0), zeros, n)
        image = f.gep(o["x"], f["image"] * (self.spec.channels * plane), size)
        end = f.gep(f["segments"], self._split_rows(f, o), _SEGMENT_BYTES)
        for at in f.range(f.bitcast(f["segments"], i64), f.bitcast(end, i64), _SEGMENT_BYTES):
            segment = f.bitcast(at, ptr)
            y, x = f.load(segment, i64) + o["start_y"], f.load(segment, i64, 8) + o["start_x"]
            sources, steps = [], []
            for i in range(4):
                exists = (y + i >= 0) & (y + i < o["height"])
                row = f.gep(image, (y + i) * o["width"] + x, size)
                sources.append(f.select(exists, row, zeros))
                steps.append(f.select(exists, plane, 0))
            to = f.gep(f["panel"], f.load(segment, i64, 16), 4)
            self._pack_segment(f, x, o["width"], sources, steps, to)
        return f

    def _split_rows(self, f: Function, o: Operands) -> Value:
        """Split the panel's blocks into segments, each of one row of them. Returns their number."""
        columns = _half(o["out_width"])

        def split_row(at: Value, number: Value, y: Value, x: Value) -> list[Value]:
            segment = f.gep(f["segments"], number, _SEGMENT_BYTES)
            n = f.min(f.min(columns - x, self.lanes), f["count"] - at)
            for place, value in enumerate((y * 2, x * 2, at, n)):
                f.store(value, segment, 8 * place)
            ends = (x + n).eq(columns)
            return [at + n, number + 1, y + ends.to(i64, signed=False), f.select(ends, 0, x + n)]

        start = [f.i64(0), f.i64(0), f["first"].udiv(columns), f["first"].urem(columns)]
        return f.while_(start, lambda at, *_: at < f["count"], split_row)[1]

    def _pack_segment(
        self, f: Function, x: Value, width: Value, sources: list[Value], steps: list[Value],
        to: Value,
    ) -> None:  # fmt: skip
        """Bᵀ d B of a segment's blocks, for all channels."""
        loads = RowLoads(self.spec.x, f32, self.lanes)
        size = memory_type(self.spec.x).bytes
        offsets = [start + v * self.lanes for start in (0, 2) for v in (0, 1)]

        def copy(inside: bool) -> None:
            one = f.i64(1)
            read = [loads.loader(f, x + at, width, one, inside) for at in offsets]

            def channel(_: Value, to: Value, *rows: Value) -> list[Value]:
                d = []
                for row in rows:
                    a, b, c, e = [
                        r(f.gep(row, at, size)) for r, at in zip(read, offsets, strict=True)
                    ]
                    d.append([f.deinterleave(v, j) for v in ([a, b], [c, e]) for j in (0, 1)])
                columns = [_input_sums(column) for column in zip(*d, strict=True)]
                for i, line in enumerate(zip(*columns, strict=True)):
                    for j, value in enumerate(_input_sums(line)):
                        f.store(value, to, (4 * i + j) * self.point_bytes)
                moved = [f.gep(r, s, size) for r, s in zip(rows, steps, strict=True)]
                return [f.gep(to, self.row_bytes), *moved]

            f.loop(0, self.spec.channels, 1, [to, *sources], channel, guard=False)

        inside = (x >= 0) & (x + (2 * self.lanes + 2) <= width)
        f.if_(inside, lambda: copy(True), lambda: copy(False))

    # -- results --------------------------------------------------------------------------------

    def _emit_store(self, m: Module) -> Function:
        """void store(ptr args, ptr sums, i64 image, i64 tile, ptr segments, ptr flag, i64 count)"""
        params = [("args", ptr), ("sums", ptr), ("image", i64), ("tile", i64)]
        params += [("segments", ptr), ("flag", ptr), ("count", i64)]
        f = m.function("store", params, internal=True)
        o = Operands(f, self.spec.args, _POINTERS)
        row = f["tile"] * self.spec.tile
        used = f.min(o["rows"] - row, self.spec.tile)
        plane = o["out_height"] * o["out_width"]
        largest = f.carry([f.const(0, vec(self.lanes, i32))])
        for i in largest.range(0, used):
            bias = self._bias(f, o, row + i)
            out = (f["image"] * o["rows"] + row + i) * plane
            sums = f.gep(f["sums"], i, self.width * 4)

            def segment(
                at: Value, segment: Value, most: Value, sums: Value = sums, out: Value = out,
                bias: Value | None = bias,
            ) -> list[Value]:  # fmt: skip
                most = self._store_segment(f, o, segment, sums, out, bias, most)
                after = at + f.load(segment, i64, 24)
                return [after, f.gep(segment, _SEGMENT_BYTES), most]

            start = [f.i64(0), f["segments"], *largest.values]
            largest.values = f.while_(start, lambda at, *_: at < f["count"], segment)[2:]
        bad = f.any(largest.values[0] >= _INFINITE)
        f.if_(bad, lambda: f.store(f.i64(1), f["flag"]))
        return f

    def _store_segment(
        self, f: Function, o: Operands, segment: Value, sums: Value, out: Value,
        bias: Value | None, most: Value,
    ) -> Value:  # fmt: skip
        """Aᵀ m A of a segment's blocks for one filter, whose plane is at `out`. Returns the largest
        bits of all results."""
        y, x, at, n = [f.load(segment, i64, 8 * place) for place in range(4)]
        base = f.gep(sums, at, 4)
        m = [f.load(base, self.type, p * self.sum_bytes) for p in range(POINTS)]
        lines = list(zip(*[_output_sums(m[j::4]) for j in range(4)], strict=True))
        mask, length = f.lane_mask(n, self.lanes), f.min(n * 2, o["out_width"] - x)
        size = memory_type(self.spec.out).bytes
        for i, line in enumerate(lines):
            results = _output_sums(line)
            for value in results:
                bits = f.select(mask, value, 0.0).bits() & 0x7FFFFFFF
                most = f.max(most, bits)
            if bias is not None:
                results = [value + f.splat(bias, self.lanes) for value in results]
            both = f.interleave(*[activate(self.spec.activation, value) for value in results])
            to = f.gep(o["out"], out + (y + i) * o["out_width"] + x, size)
            for _ in f.when(y + i < o["out_height"]) if i else (None,):
                self._store_pixels(f, both, to, length)
        return most

    def _store_pixels(self, f: Function, both: Value, to: Value, length: Value) -> None:
        size = memory_type(self.spec.out).bytes
        parts = [(k, f.slice(both, k, self.lanes)) for k in (0, self.lanes)]
        for whole in f.either(length.eq(2 * self.lanes)):
            for k, part in parts:
                mask = None if whole else f.lane_mask(f.max(length - k, 0), self.lanes)
                store_masked(f, part, f.gep(to, k, size), self.spec.out, mask)

    def _bias(self, f: Function, o: Operands, row: Value) -> Value | None:
        dtype = self.spec.bias
        if dtype is None:
            return None
        return load(f, f.gep(o["bias"], row, memory_type(dtype).bytes), dtype, 1, f32)


def _half(size: Value) -> Value:
    return (size + 1).udiv(2)


def _input_sums(d: Sequence[Value]) -> list[Value]:
    """Bᵀ d"""
    return [d[0] - d[2], d[1] + d[2], d[2] - d[1], d[1] - d[3]]


def _output_sums(m: Sequence[Value]) -> list[Value]:
    """Aᵀ m"""
    return [m[0] + m[1] + m[2], m[1] - m[2] - m[3]]


@dataclass(frozen=True)
class PackWinograd(KernelSpec):
    """args: w, to, tiles, rows, channels.

    G g Gᵀ of the filters `[rows][channels][3][3]`, as `WinogradConv` reads them; 0 where the last
    tile has no filter.
    """

    w: DType
    tile: int

    args = ("w", "to", "tiles", "rows", "channels")

    def emit(self, m: Module) -> None:
        f = m.kernel()
        o = Operands(f, self.args, ("w", "to"))
        lo, hi = f.split(o["tiles"] * o["channels"])
        size = memory_type(self.w).bytes
        for at in f.range(lo, hi):
            tile, channel = at.udiv(o["channels"]), at.urem(o["channels"])
            to = f.gep(o["to"], tile * POINTS * o["channels"] + channel, self.tile * 4)
            for i in f.range(0, self.tile):
                row = tile * self.tile + i
                source = f.gep(o["w"], (row * o["channels"] + channel) * 9, size)

                def weights(source: Value = source) -> list[Value]:
                    return [load(f, source, self.w, 1, f32, n * size) for n in range(9)]

                g = f.if_(row < o["rows"], weights, lambda: [f.const(0, f32)] * 9)
                columns = [_filter_sums(g[j::3]) for j in range(3)]
                for k, line in enumerate(zip(*columns, strict=True)):
                    for j, value in enumerate(_filter_sums(line)):
                        place = (4 * k + j) * o["channels"] * self.tile + i
                        f.store(value, f.gep(to, place, 4))


def _filter_sums(g: Sequence[Value]) -> list[Value]:
    """G g"""
    outer = g[0] + g[2]
    return [g[0], (outer + g[1]) * 0.5, (outer - g[1]) * 0.5, g[2]]
