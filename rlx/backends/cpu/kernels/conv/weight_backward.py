"""Weight gradients of convolutions: sums over images and windows, with nothing like im2col.

A tile of filters times the taps of a kernel row are accumulators, vectors along the columns of the
result. They stay in registers over the rows of a chunk, whose cotangents of the tile's filters fit
in the L1 cache: packed, with the filters of a tile side by side. Rows of x are copied to scratch
memory with their padding, a column phase of the stride at a time, so that every tap reads vectors.

A worker takes blocks of channels and adds up all chunks in order: the number of workers does not
show in the bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx.backends.cpu.kernels.spec import KernelSpec, Operands
from rlx.backends.cpu.lowering import Context, KernelArg, KernelLaunch, Pointer, Scratch, lowers
from rlx.ir.dim import Dim, upper_bound
from rlx.ir.dtype import DType
from rlx.ir.lir import aligned
from rlx.ir.node import Node
from rlx.ir.shape import Shape
from rlx.llvm.builder import Function, Module, Value, vec
from rlx.llvm.storage import compute_type, load, memory_type, store
from rlx.llvm.target import Target
from rlx.support.records import dataclass

_CHUNK = 8192  # cotangents of a tile and a chunk
_BLOCK = 16  # channels of a block, at most
_MOST_FILTERS = 8  # of a tile
_MOST_TAPS = 12  # of a kernel row


def tile_filters(target: Target, taps: int) -> int:
    """Filters of a tile: registers are left for their cotangents and for x."""
    room = 24 if target.num_vector_registers >= 32 else 12
    return max(1, min(_MOST_FILTERS, room // taps))


_ARGS = (
    "x", "dy", "dw", "scratch", "worker_bytes", "batch", "groups", "channels", "filters", "height",
    "width", "out_height", "out_width", "taps_y", "stride_y", "dilation_y", "start_y", "start_x",
    "block",
)  # fmt: skip


@dataclass(frozen=True)
class WeightBackward(KernelSpec):
    """args: `_ARGS`; channels and filters are those of a group"""

    x: DType
    dy: DType
    dw: DType
    taps: int  # of a kernel row, `dilation` apart
    stride: int  # along a row
    dilation: int

    @property
    def flushes_denormals(self) -> bool:
        return True

    def emit(self, m: Module) -> None:
        _Emitter(self, m.kernel()).emit()


class _Emitter:
    def __init__(self, spec: WeightBackward, f: Function) -> None:
        self.spec, self.f = spec, f
        self.o = o = Operands(f, _ARGS, ("x", "dy", "dw", "scratch"))
        self.acc = compute_type(spec.dw)
        self.lanes = lanes = f.target.lanes(self.acc.bits)
        self.tile = tile_filters(f.target, spec.taps)
        self.vector = vec(lanes, self.acc)
        self.sums = self.tile * spec.taps
        wide = f.ceil_div(o["out_width"], lanes) * lanes
        self.vectors = wide.udiv(lanes)
        reach = (spec.taps - 1) * spec.dilation // spec.stride
        self.pitch = wide + -(-reach // lanes) * lanes
        self.row = self.pitch * spec.stride  # elements of a row of x in scratch memory
        most = f.max(f.i64(_CHUNK).udiv(wide * self.tile), 1)
        self.rows = f.min(most, o["out_height"])  # of a chunk, for each of its images
        self.images = f.min(f.max(most.udiv(self.rows), 1), o["batch"])
        self.x_rows = (self.rows - 1) * o["stride_y"] + (o["taps_y"] - 1) * o["dilation_y"] + 1
        self.tiles = f.ceil_div(o["filters"], self.tile)
        size = self.acc.bytes
        self.acc_at = f.gep(o["scratch"], f["tid"].to(o["batch"].type) * o["worker_bytes"])
        count = self.tiles * o["block"] * o["taps_y"] * self.sums
        self.dy_at = f.gep(self.acc_at, count, self.vector)
        self.x_at = f.gep(self.dy_at, self.images * self.rows * wide * self.tile, size)

    def emit(self) -> None:
        f, o = self.f, self.o
        blocks = (o["channels"] + o["block"] - 1).udiv(o["block"])
        lo, hi = f.split(o["groups"] * blocks)
        for unit in f.range(lo, hi):
            group = unit.udiv(blocks)
            first = (unit - group * blocks) * o["block"]
            count = f.min(o["channels"] - first, o["block"])
            self._block(group, first, count)

    def _block(self, group: Value, first: Value, count: Value) -> None:
        """All sums of some channels of a group."""
        f, o = self.f, self.o
        total = self.tiles * o["block"] * o["taps_y"] * self.sums
        for i in f.range(0, total):
            f.store(f.const(0, self.vector), f.gep(self.acc_at, i, self.vector), align=64)
        for image in f.range(0, o["batch"], self.images):
            images = f.min(o["batch"] - image, self.images)
            for y in f.range(0, o["out_height"], self.rows):
                rows = f.min(o["out_height"] - y, self.rows)
                self._pack_x(group * o["channels"] + first, count, image, images, y)
                for tile in f.range(0, self.tiles):
                    self._pack_dy(group, tile, image, images, y, rows)
                    for c in f.range(0, count):
                        for tap in f.range(0, o["taps_y"]):
                            self._add(tile, c, tap, images, rows)
        self._finish(group, first, count)

    def _pack_x(self, channel: Value, count: Value, image: Value, images: Value, y: Value) -> None:
        """The rows that a chunk reads, with zeros around them."""
        f, o, spec = self.f, self.o, self.spec
        channels = o["groups"] * o["channels"]
        for c in f.range(0, count):
            for i in f.range(0, images):
                plane = ((image + i) * channels + (channel + c)) * o["height"]
                for r in f.range(0, self.x_rows):
                    to = f.gep(self.x_at, ((c * self.images + i) * self.x_rows + r) * self.row,
                               self.acc)  # fmt: skip
                    for k in f.range(0, self.row, self.lanes):
                        f.store(f.const(0, self.vector), f.gep(to, k, self.acc))
                    source = y * o["stride_y"] + r - o["start_y"]
                    for _ in f.when((source >= 0) & (source < o["height"])):
                        row = f.gep(o["x"], (plane + source) * o["width"], spec.x.bytes)
                        self._pack_row(row, to)

    def _pack_row(self, row: Value, to: Value) -> None:
        """A row of x, phase by phase of the stride."""
        f, o, spec, size = self.f, self.o, self.spec, self.spec.x.bytes
        if spec.stride == 1:
            end = f.max(f.min(o["width"], self.pitch - o["start_x"]), 0)
            self._copy(row, f.gep(to, o["start_x"], self.acc), end, spec.x)
            return
        for column in f.range(0, o["width"]):
            at = (column + o["start_x"]).udiv(spec.stride)
            phase = column + o["start_x"] - at * spec.stride
            for _ in f.when(at < self.pitch):
                value = load(f, f.gep(row, column, size), spec.x, 1, self.acc)
                f.store(value, f.gep(to, phase * self.pitch + at, self.acc))

    def _copy(self, source: Value, to: Value, count: Value, dtype: DType) -> None:
        f, whole = self.f, count & -self.lanes
        for lanes, lo, hi in ((self.lanes, f.i64(0), whole), (1, whole, count)):
            for i in f.range(lo, hi, lanes):
                value = load(f, f.gep(source, i, dtype.bytes), dtype, lanes, self.acc)
                f.store(value, f.gep(to, i, self.acc))

    def _pack_dy(
        self, group: Value, tile: Value, image: Value, images: Value, y: Value, rows: Value
    ) -> None:
        """Cotangents of a tile's filters: [image][row][vector][filter][lanes]; zeros elsewhere."""
        f, o = self.f, self.o
        for t in range(self.tile):
            number = tile * self.tile + t
            exists = number < o["filters"]
            width = f.select(exists, o["out_width"], 0)
            filter_ = group * o["filters"] + f.min(number, o["filters"] - 1)
            for i in f.range(0, images):
                plane = ((image + i) * (o["groups"] * o["filters"]) + filter_) * o["out_height"]
                for r in f.range(0, rows):
                    row = f.gep(o["dy"], (plane + (y + r)) * o["out_width"], self.spec.dy.bytes)
                    to = f.gep(self._dy_row(i, r), t, self.vector)
                    self._spread(row, to, width)

    def _dy_row(self, image: Value, row: Value) -> Value:
        step = self.vectors * self.tile
        return self.f.gep(self.dy_at, (image * self.rows + row) * step, self.vector)

    def _spread(self, row: Value, to: Value, width: Value) -> None:
        """A row in vectors that are a tile apart."""
        f, dtype, lanes = self.f, self.spec.dy, self.lanes
        whole = width.udiv(lanes)
        for v in f.range(0, whole):
            value = load(f, f.gep(row, v * lanes, dtype.bytes), dtype, lanes, self.acc)
            f.store(value, f.gep(to, v * self.tile, self.vector))
        for v in f.range(whole, self.vectors):
            place = f.gep(to, v * self.tile, self.vector)
            f.store(f.const(0, self.vector), place)
            for i in f.range(v * lanes, f.min(width, (v + 1) * lanes)):
                value = load(f, f.gep(row, i, dtype.bytes), dtype, 1, self.acc)
                f.store(value, f.gep(place, i - v * lanes, self.acc))

    def _sums_at(self, tile: Value, c: Value, tap: Value) -> Value:
        o = self.o
        number = (tile * o["block"] + c) * o["taps_y"] + tap
        return self.f.gep(self.acc_at, number * self.sums, self.vector)

    def _add(self, tile: Value, c: Value, tap: Value, images: Value, rows: Value) -> None:
        """The products of a chunk for a tile of filters, a channel and a kernel row."""
        f, o, size = self.f, self.o, self.vector.bytes
        at = self._sums_at(tile, c, tap)
        down = o["stride_y"] * self.row * self.acc.bytes
        sums = [f.load(at, self.vector, i * size, align=64) for i in range(self.sums)]
        total = f.carry(sums)
        for i in total.range(0, images):
            first = (c * self.images + i) * self.x_rows + tap * o["dilation_y"]
            x, dy = f.gep(self.x_at, first * self.row, self.acc), self._dy_row(i, f.i64(0))
            lines = f.carry([*total.values, x, dy])  # addresses are carried: rows are short
            for _ in lines.range(0, rows):
                *sums, x, dy = lines.values
                taps, row = self._taps(x), f.carry([*sums, dy])
                for v in row.range(0, self.vectors):
                    *sums, dy = row.values
                    here = [f.load(f.gep(p, v, self.vector), self.vector) for p in taps]
                    row.values = [*self._products(sums, here, dy), f.gep(dy, self.tile * size)]
                *sums, dy = row.values
                lines.values = [*sums, f.gep(x, down), dy]
            total.values = lines.values[:-2]
        for number, value in enumerate(total.values):
            f.store(value, at, number * size, align=64)

    def _taps(self, x: Value) -> list[Value]:
        """Where the taps of a kernel row begin to read."""
        f, spec, found = self.f, self.spec, []
        for t in range(spec.taps):
            ahead, phase = divmod(t * spec.dilation, spec.stride)
            found.append(f.gep(f.gep(x, self.pitch * phase, self.acc), ahead, self.acc))
        return found

    def _products(self, sums: Sequence[Value], x: Sequence[Value], dy: Value) -> list[Value]:
        """The sums and the products of a vector of each tap and of each filter of the tile."""
        f, found = self.f, list[Value]()
        for t in range(self.tile):
            part = f.load(dy, self.vector, t * self.vector.bytes, align=64)
            found += [f.fma(part, v, sums[t * len(x) + k]) for k, v in enumerate(x)]
        return found

    def _finish(self, group: Value, first: Value, count: Value) -> None:
        """The lanes of all sums added up, to the result."""
        f, o, spec = self.f, self.o, self.spec
        for tile in f.range(0, self.tiles):
            for t in f.range(0, f.min(o["filters"] - tile * self.tile, self.tile)):
                row = (group * o["filters"] + (tile * self.tile + t)) * o["channels"] + first
                for c in f.range(0, count):
                    for tap in f.range(0, o["taps_y"]):
                        sums = f.gep(self._sums_at(tile, c, tap), t * spec.taps, self.vector)
                        to = ((row + c) * o["taps_y"] + tap) * spec.taps
                        for column in range(spec.taps):
                            wide = f.load(sums, self.vector, column * self.vector.bytes)
                            place = f.gep(o["dw"], to + column, memory_type(spec.dw))
                            store(f, f.reduce("add", wide), place, spec.dw)


# -- lowering -------------------------------------------------------------------------------------


def _image(x: Shape) -> tuple[Dim, Dim]:
    """Height and width; a 1-D image has one row."""
    return (1, x.dims[2]) if x.rank == 3 else (x.dims[2], x.dims[3])


def _is_native(node: Node) -> bool:
    x, dw = node.inputs[0].shape, node.output.shape
    return dw.is_static and dw.dims[-1] <= _MOST_TAPS and isinstance(x.dims[1], int)  # type: ignore[operator]


def _sizes(node: Node) -> dict[str, int]:
    """What the op and the filters say: sizes of a group, and of the rows of a window."""
    op: Any = node.op
    window, dims = op.window, node.output.shape.static_dims
    rank = len(dims) - 2
    down = 0 if rank == 2 else None

    def of_rows(values: tuple[int, ...], missing: int) -> int:
        return missing if down is None else values[down]

    return {
        "groups": op.groups, "channels": dims[1], "filters": dims[0] // op.groups,
        "taps_y": of_rows(dims[2:], 1), "stride_y": of_rows(window.stride, 1),
        "dilation_y": of_rows(window.dilation, 1), "start_y": of_rows(window.low, 0),
        "start_x": window.low[-1],
    }  # fmt: skip


def _block(node: Node, threads: int) -> int:
    """Channels of a block: all workers get some."""
    sizes = _sizes(node)
    each = -(-sizes["channels"] * sizes["groups"] // max(threads, 1))
    return max(1, min(_BLOCK, each, sizes["channels"]))


def _spec(node: Node) -> WeightBackward:
    op: Any = node.op
    x, dy = node.inputs
    window = op.window
    return WeightBackward(
        x.dtype, dy.dtype, node.output.dtype, window.kernel[-1], window.stride[-1],
        window.dilation[-1],
    )  # fmt: skip


def _worker_bytes(node: Node, target: Target, threads: int) -> int:
    """Sums, cotangents of a chunk, rows of x: at most."""
    spec, sizes = _spec(node), _sizes(node)
    acc = compute_type(spec.dw)
    lanes, tile = target.lanes(acc.bits), tile_filters(target, spec.taps)
    block = _block(node, threads)
    tiles = -(-sizes["filters"] // tile)
    sums = tiles * block * sizes["taps_y"] * tile * spec.taps * lanes
    wide = upper_bound(node.inputs[1].shape.dims[-1], node.graph.live) + lanes - 1
    rows = max(_CHUNK // (tile * lanes), 1)  # of dy
    area = max(_CHUNK // tile, wide)  # rows times their width
    more = ((spec.taps - 1) * spec.dilation // spec.stride // lanes + 1) * lanes
    each = sizes["stride_y"] + (sizes["taps_y"] - 1) * sizes["dilation_y"]  # rows of x for one
    x_size = block * (area + rows * more) * spec.stride * each
    return aligned((sums + area * tile + x_size) * acc.bytes)


def _scratch(node: Node, target: Target, threads: int) -> int:
    return _worker_bytes(node, target, threads) * threads


@lowers("conv_weight_backward", when=_is_native, scratch=_scratch)
def lower_weight_backward(node: Node, ctx: Context) -> list[KernelLaunch]:
    spec, (x, dy) = _spec(node), node.inputs
    (height, width), (lines, columns) = _image(x.shape), _image(dy.shape)
    args: dict[str, KernelArg] = {
        "x": Pointer(x), "dy": Pointer(dy), "dw": Pointer(node.output), "scratch": Scratch(node),
        "worker_bytes": _worker_bytes(node, ctx.target, ctx.threads), "batch": x.shape.dims[0],
        "height": height, "width": width, "out_height": lines, "out_width": columns,
        "block": _block(node, ctx.threads), **_sizes(node),
    }  # fmt: skip
    cost = node.op.cost([x.shape, dy.shape], [node.output.shape])
    return [
        KernelLaunch(
            spec,
            [args[name] for name in _ARGS],
            node.inputs,
            node.outputs,
            uses_scratch=True,
            flops=cost.flops,
            bytes=cost.bytes,
        )
    ]
