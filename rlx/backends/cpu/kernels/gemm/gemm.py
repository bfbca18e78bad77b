"""GEMM after BLIS: packed blocks of x against panels of w, with batches and any strides.

x is cut into blocks of MC rows that stay packed in the L2 cache, w into panels of NR columns, k
into blocks of KC. A unit of work is one row block against one panel; each worker takes a contiguous
range of units, so that a row block is packed once per range. Partial sums between k blocks are kept
in memory, as tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from rlx.backends.cpu.kernels.gemm.epilogue import Epilogue, emit_epilogue
from rlx.backends.cpu.kernels.gemm.microkernel import MicroKernels, TileShape
from rlx.backends.cpu.kernels.gemm.pack_operands import emit_pack
from rlx.backends.cpu.kernels.spec import KernelSpec
from rlx.ir.dtype import DType, f32
from rlx.llvm.builder import Function, Module, Value, i64, ptr
from rlx.llvm.storage import LINE, compute_type, memory_type
from rlx.llvm.target import Target
from rlx.support.records import dataclass

MC = 192  # rows of a packed block of x
KC = 384  # k of a block: packed rows and a panel fit in an L2 cache of 512 kB
NARROW_KC = 256  # k of several blocks with narrow panels: a tile's rows and a panel fit in 32 kB
PANEL_GROUP = 32  # panels whose partial sums are kept between k blocks
NARROW_GROUP = 16  # the same of narrow panels: sums and rows fit in an L2 cache of 512 kB
_BLOCK_OVERHEAD = 3  # cost of starting a unit of work, in rows
_PACKING_MC, _PACKING = 256, 16  # the same where each row block packs the panels of w anew
_POINTERS = frozenset(["x", "w", "up", "out", "bias", "residual", "scratch", "table"])


def is_narrow(shape: TileShape) -> bool:
    """Whether panels are those of targets with few registers."""
    return shape.vectors <= 2


def panel_group(shape: TileShape) -> int:
    """Panels whose partial sums are kept between k blocks."""
    return NARROW_GROUP if is_narrow(shape) else PANEL_GROUP


def batch_args(axes: int) -> list[str]:
    """Names of the args of `axes` axes, outermost first; strides are bytes, 0 where shared."""
    return [name for i in range(axes) for name in (f"size{i}", f"x_batch{i}", f"w_batch{i}")]


def batch_count(f: Function, given: Mapping[str, Value], axes: int) -> Value:
    """The product of the batch sizes."""
    count = f.i64(1)
    for i in range(axes):
        count = count * given[f"size{i}"]
    return count


def batch_start(
    f: Function, given: Mapping[str, Value], axes: int, batch: Value
) -> tuple[Value, Value]:
    """Where x and w of batch entry `batch` begin."""
    x, w = given["x"], given["w"]
    for i in reversed(range(axes)):
        outer = batch.udiv(given[f"size{i}"]) if i else f.i64(0)
        index = batch - outer * given[f"size{i}"]
        x = f.gep(x, index * given[f"x_batch{i}"])
        w = f.gep(w, index * given[f"w_batch{i}"])
        batch = outer
    return x, w


@dataclass(frozen=True)
class Gemm(KernelSpec):
    """out [m, n] = epilogue(x [m, k] · w [k, n]).

    args: as `self.args` lists them. Strides are bytes. `scratch` holds `worker_bytes` bytes for
    each worker.
    """

    x: DType
    w: DType
    epilogue: Epilogue
    packed: bool = True  # w lies in panels
    x_unit: str = "k"  # the axis of x with unit stride: "k", "m" or "none"
    w_unit: str = "n"  # the axis of w with unit stride: "n", "k" or "none"
    batch: int = 0  # number of batch axes
    single_row: bool = False  # m is 1

    @property
    def flushes_denormals(self) -> bool:
        return True

    @property
    def args(self) -> list[str]:
        names = ["x", "w", "out", *self.epilogue.args, "scratch", "worker_bytes", "m", "n", "k"]
        names += ["x_stride_m", "x_stride_k"]
        if not self.packed:
            names += ["w_stride_n", "w_stride_k"] + ["up"] * self.epilogue.pair
        return names + batch_args(self.batch)

    @property
    def panel(self) -> DType:
        """Element type of panels: 8-bit floats are widened when packed, not in the inner loop."""
        return f32 if self.w.is_float and self.w.bytes == 1 else self.w

    @property
    def packs_w(self) -> bool:
        """Whether panels are packed into scratch memory first."""
        return not self.packed or self.panel is not self.w

    @property
    def reads_x_in_place(self) -> bool:
        """Whether the micro-kernel reads rows of x without packing."""
        return self.x_unit == "k" and memory_type(self.x) is compute_type(self.epilogue.out)

    def tile_shape(self, target: Target) -> TileShape:
        return TileShape.of(target, compute_type(self.epilogue.out), self.w)

    def scratch(self, target: Target, rows: int, n: int, k: int) -> int:
        """Bytes each worker needs when there are at most `rows` rows."""
        g, k = self.tile_shape(target), max(k, 1)
        kc = min(k, KC)
        tall = round_up(min(rows, _PACKING_MC if self.packs_w else MC), g.mr)
        size = 0 if self.reads_x_in_place else tall * kc
        if not self.packs_w and not self.reads_x_in_place:
            size = max(size, round_up(min(rows, g.mr), 2) * k)
        total = round_up(size * g.acc.bytes, 64)
        if self.packs_w:
            total += round_up(kc * g.nr * memory_type(self.panel).bytes, 64)
        tiles = 1
        if k > KC:
            tiles = min(-(-n // self.epilogue.columns(g)), panel_group(g)) * (tall // g.mr)
        return total + max(tiles, 1) * g.tile_bytes

    def emit(self, m: Module) -> None:
        GemmEmitter(self, m).emit()


class Block(NamedTuple):
    """The operands of a macro-kernel: a row block and a panel, `kc` of k from `k` on."""

    rows: Value
    panel: Value
    panel_stride: Value  # bytes from one k of the panel to the next
    next: Value  # the panel after it, to prefetch
    k: Value
    kc: Value


Work = Callable[[Value, Value, Value, Value, Value, Value], None]
"""(x, w, rows, at, first, last): as `GemmEmitter.row_block`."""


def round_up(n: int, step: int) -> int:
    """n rounded up to a multiple of step."""
    return -(-n // step) * step


class GemmEmitter:
    """Emits the functions of one spec and the kernel that calls them."""

    def __init__(self, spec: Gemm, m: Module, routed: bool = False) -> None:
        g = spec.tile_shape(m.target)
        self.spec, self.m = spec, m
        self.g, self.columns = g, spec.epilogue.columns(g)
        sizes = (1,) if spec.single_row else g.sizes
        self.microkernels = MicroKernels(
            m, g, spec.panel, sizes, not spec.reads_x_in_place, not spec.packs_w
        )
        self.panel_stride = self.microkernels.b_stride
        if not spec.reads_x_in_place:
            self.pack_x = emit_pack(m, "pack_x", spec.x, g.acc, spec.x_unit, routed)
        if spec.packs_w:
            compute = None if spec.panel is spec.w else memory_type(spec.panel)
            unit = "n" if spec.packed else spec.w_unit
            whole = self.columns if spec.w_unit == "n" and not spec.packed else 0
            self.pack_w = emit_pack(m, "pack_w", spec.w, compute, unit, panel=whole)
        self.epilogue = emit_epilogue(m, g, spec.epilogue, spec.args, routed)
        self.f = m.kernel()
        self.given = {name: self.arg(self.f, name) for name in spec.args}
        if spec.single_row:
            self.given["m"] = self.f.i64(1)
        self.routed, self.route = routed, self.f.null()

    def arg(self, f: Function, name: str) -> Value:
        index = self.spec.args.index(name)
        return f.arg(f["args"], index, ptr if name in _POINTERS else i64)

    def __getitem__(self, name: str) -> Value:
        return self.given[name]

    def emit(self) -> None:
        f = self.f
        panels = f.ceil_div(self["n"], self.columns)
        batches = batch_count(f, self.given, self.spec.batch)
        mc = self["m"]
        if not self.spec.single_row:
            most = _PACKING_MC if self.spec.packs_w else MC
            mc = self.choose_mc(mc, batches * panels, self.m.tunable("block_rows", most, 96, 128))
        self.lay_out_scratch(f["tid"].to(i64) * self["worker_bytes"], mc)
        self.split_work(batches, mc, panels, self.row_block)

    def split_work(self, batches: Value, mc: Value, panels: Value, work: Work) -> None:
        """Divide row blocks x panels (or groups of panels) among the workers."""
        f, rows, row_blocks = self.f, self["m"], self.f.i64(1)
        if not self.spec.single_row:
            row_blocks = (rows + mc - 1).udiv(mc)
        lo, hi = f.split(batches * row_blocks * panels)
        at_unit = f.carry([lo])
        for _ in at_unit.forever():  # this worker's panels of the unit's row block
            [unit] = at_unit.values
            at_unit.break_unless(unit < hi)
            row_block = unit.udiv(panels)
            first = unit - row_block * panels
            last = f.min(panels, first + (hi - unit))
            batch = row_block.udiv(row_blocks)
            row = (row_block - batch * row_blocks) * mc
            x, w = batch_start(f, self.given, self.spec.batch, batch)
            x = f.gep(x, row * self["x_stride_m"])
            at = (batch * rows + row) * self["n"]
            work(x, w, f.min(mc, rows - row), at, first, last)
            at_unit.values = [unit + (last - first)]

    def choose_mc(self, rows: Value, columns: Value, most: int) -> Value:
        """Rows of a block: at most `most`, and such that units divide evenly among the workers."""
        f = self.f
        workers = f["nth"].to(i64)
        least = f.max(f.ceil_div(rows, most), 1)
        overhead = _PACKING if self.spec.packs_w else _BLOCK_OVERHEAD
        end = f.select(rows > self.g.mr, least + workers, least + 1)
        found = f.carry([f.i64(1 << 62), rows])
        for row_blocks in found.range(least, end):
            cost, best = found.values
            each = (rows + row_blocks - 1).udiv(row_blocks)
            rounds = (columns * row_blocks + workers - 1).udiv(workers)
            this = rounds * (each + overhead)
            found.values = [f.min(this, cost), f.select(this < cost, each, best)]
        return f.max(found.values[1], 1)

    def lay_out_scratch(self, offset: Value, mc: Value) -> None:
        """This worker's packed rows, packed panel and tiles, `offset` bytes into the scratch."""
        f, size = self.f, self.g.acc.bytes
        self.choose_kc(self["m"])
        self.packed_x = after = f.gep(self["scratch"], offset)
        if not self.spec.reads_x_in_place:
            tall = f.ceil_div(mc, 2) * 2
            room = tall * self.kc
            if self.routed and not self.spec.packs_w:
                # some row blocks have few rows
                room = f.max(room, f.min(tall, self.g.mr) * self["k"])
            after = f.gep(self.packed_x, to_cache_line(room * size))
        self.packed_panel = after
        if self.spec.packs_w:
            after = f.gep(after, to_cache_line(self.kc * self.panel_stride))
        self.tiles = after

    def choose_kc(self, rows: Value) -> None:
        """Set `kc`, the size of a k block, for a GEMM of so many rows."""
        f, k = self.f, self["k"]
        blocks = f.max(f.ceil_div(k, KC), 1)
        if is_narrow(self.g):
            blocks = f.select(k > KC, f.ceil_div(k, NARROW_KC), blocks)
        if not self.spec.packs_w:
            # Few rows stream the weights once: one pass over the whole k.
            blocks = f.select(rows > self.g.mr, blocks, 1)
        self.kc = f.max((k + blocks - 1).udiv(blocks), 1)
        self.one_k_block = blocks.eq(1)

    def row_block(
        self, x: Value, w: Value, rows: Value, at: Value, first: Value, last: Value
    ) -> None:
        """Rows of x against panels [first, last); `at` is their first element in the result."""
        f = self.f
        # Partial sums are kept for a group of panels; a single k block leaves none.
        group = f.select(self.one_k_block, f.max(last, 1), f.i64(panel_group(self.g)))
        for start in f.range(first, last, group):
            stop = f.min(start + group, last)
            for k in f.range(0, self["k"], self.kc, guard=False):
                kc = f.min(self.kc, self["k"] - k)
                rows_at = self._pack_x(f.gep(x, k * self["x_stride_k"]), rows, kc)
                for p in f.range(start, stop):
                    panel = self._panel_and_stride(w, p, k, kc)
                    next_ = self._next_panel(w, f.min(p + 1, last - 1), k)
                    slot = f.select(self.one_k_block, 0, (p - start) * f.ceil_div(rows, self.g.mr))
                    block = Block(rows_at, *panel, next_, k, kc)
                    self._macro_kernel(block, rows, slot, at, p * self.columns)

    def _macro_kernel(
        self, block: Block, rows: Value, slot: Value, at: Value, column: Value
    ) -> None:
        """The macro-kernel: all tiles of a row block and a panel, over one k block."""
        f, g, microkernels = self.f, self.g, self.microkernels
        stride = self["x_stride_m"] if self.spec.reads_x_in_place else block.kc * g.acc.bytes
        is_last = block.k + self.kc >= self["k"]
        for r in f.range(0, rows, g.mr):
            number = r.udiv(g.mr)
            tile = f.gep(self.tiles, slot + f.select(self.one_k_block, 0, number), g.tile_bytes)
            left = f.min(rows - r, g.mr)
            to = at + r * self["n"] + column
            if not self.routed:
                for _ in f.when(is_last):
                    self._prefetch_out(left, to)
            ahead = microkernels.prefetch(f, number, block.panel, block.kc, block.next)
            microkernels.call(
                f, left, f.gep(block.rows, r * stride), stride, block.kc, block.panel,
                block.panel_stride, tile, block.k, ahead,
            )  # fmt: skip
            route = f.gep(self.route, r, 4)
            for _ in f.when(is_last):
                self._run_epilogue(tile, left, to, column, route)

    def _prefetch_out(self, rows: Value, at: Value) -> None:
        """Prefetch the result rows of a tile while it is computed."""
        f, size = self.f, memory_type(self.spec.epilogue.out).bytes
        for i in f.range(0, rows):
            row = f.gep(self["out"], at + i * self["n"], size)
            for line in range(0, self.columns * size, LINE):
                f.prefetch(row, line)

    def _run_epilogue(
        self, tile: Value, rows: Value, at: Value, column: Value, route: Value
    ) -> None:
        self.f.call(self.epilogue, self.f["args"], tile, rows, at, column, route)

    def _pack_x(self, x: Value, rows: Value, kc: Value) -> Value:
        f, g = self.f, self.g
        if self.spec.reads_x_in_place:
            return x
        strides = self["x_stride_m"], self["x_stride_k"]
        for r in f.range(0, rows, g.mr):
            count = f.min(rows - r, g.mr)
            dst = f.gep(self.packed_x, r * kc, g.acc)
            src = x if self.routed else f.gep(x, r * self["x_stride_m"])
            route = f.gep(self.route, r, 4)
            f.call(self.pack_x, src, *strides, count, kc, dst, g.padded(f, count), route)
        return self.packed_x

    def _panel_and_stride(self, w: Value, p: Value, k: Value, kc: Value) -> tuple[Value, Value]:
        """Where to read panel p from k on, and the bytes from one k to the next."""
        f, spec, step = self.f, self.spec, self.f.i64(self.panel_stride)
        if spec.packed or spec.w_unit != "n" or spec.panel is not spec.w or spec.epilogue.pair:
            return self._panel(w, p, k, kc), step
        # Few rows read a panel once: unpacked, if it has all its columns.
        in_place = (self["m"] <= self.g.mr) & (self["n"] - p * self.columns >= self.columns)
        found = f.carry()
        for reads_in_place in f.either(in_place, found):
            if reads_in_place:
                found.values = [self._w_address(w, p, k), self["w_stride_k"]]
            else:
                found.values = [self._panel(w, p, k, kc), step]
        b, step = found.values
        return b, step

    def _next_panel(self, w: Value, p: Value, k: Value) -> Value:
        """Where panel p is prefetched from."""
        return w if self.spec.packs_w else self._panel(w, p, k, k)

    def _w_address(self, w: Value, p: Value, k: Value) -> Value:
        """Where panel p of an unpacked weight begins, from k on."""
        f = self.f
        return f.gep(f.gep(w, p * self.columns * self["w_stride_n"]), k * self["w_stride_k"])

    def _panel(self, w: Value, p: Value, k: Value, kc: Value) -> Value:
        """Panel p from k on; packed into scratch memory unless it lies packed."""
        f, g, spec, size = self.f, self.g, self.spec, memory_type(self.spec.w).bytes
        if spec.packed:
            packed = f.gep(w, p * self["k"] + k, g.nr * size)
            if spec.packs_w:
                strides = f.i64(size), f.i64(g.nr * size)
                self._pack_panel(packed, strides, f.i64(g.nr), kc, 0)
            return self.packed_panel if spec.packs_w else packed
        strides = self["w_stride_n"], self["w_stride_k"]
        at = self._w_address(w, p, k)
        count = f.min(self["n"] - p * self.columns, self.columns)
        self._pack_panel(at, strides, count, kc, 0)
        if spec.epilogue.pair:
            # `up` has the strides of w: the distance between them is constant.
            up = f.gep(at, self["up"].bits(i64) - self["w"].bits(i64))
            self._pack_panel(up, strides, count, kc, self.columns * memory_type(spec.panel).bytes)
        return self.packed_panel

    def _pack_panel(
        self, src: Value, strides: tuple[Value, Value], count: Value, kc: Value, offset: int
    ) -> None:
        """Pack columns into the packed panel, `offset` bytes into each of its rows."""
        f = self.f
        dst, width = f.gep(self.packed_panel, offset), f.i64(self.g.nr)
        f.call(self.pack_w, src, *strides, count, kc, dst, width, f.null())


def to_cache_line(size: Value) -> Value:
    """Bytes rounded up to a multiple of a cache line."""
    return (size + 63) & -64
