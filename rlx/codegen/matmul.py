"""Products of matrices: packed weights, or two tensors with batches and strides.

Rows are cut into chunks whose packed form stays in the second-level cache, columns into panels. A
unit of work is one chunk against one panel; workers take equal runs of units, so that rows are
packed once for a run. Sums over long k are kept between blocks of k as unfinished tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from rlx.codegen.batches import batch_args, batch_count, batch_start
from rlx.codegen.emit import Function, Module, Value, i64, ptr
from rlx.codegen.kernel import KernelSpec
from rlx.codegen.matmul_finish import Epilogue, emit_finish
from rlx.codegen.matmul_micro import Dots, Geometry
from rlx.codegen.pack import emit_pack
from rlx.codegen.storage import LINE, compute_type, memory_type
from rlx.codegen.target import Target
from rlx.ir.dtype import DType, f32
from rlx.support.records import dataclass

CHUNK = 192  # rows packed at a time
TERMS = 384  # k per block: a chunk and a panel fit in a cache of 512 kB
GROUP = 32  # panels whose unfinished sums are kept between blocks of k
_CHUNK_COST = 3  # what starting a unit costs, in rows
_POINTERS = frozenset(["x", "w", "up", "out", "bias", "residual", "scratch", "table"])


@dataclass(frozen=True)
class Matmul(KernelSpec):
    """args: as `self.args` lists them. Strides are bytes: `line` is the one of a row of x or of a
    column of w, `term` the one of k. `scratch` holds `step` bytes for each worker.
    """

    x: DType
    w: DType
    epilogue: Epilogue
    packed: bool = True
    x_unit: str = "term"  # which stride of x is one element: "term", "line" or "none"
    w_unit: str = "line"
    batch: int = 0  # axes of batches
    one: bool = False  # there is one row, always

    @property
    def args(self) -> list[str]:
        names = ["x", "w", "out", *self.epilogue.args, "scratch", "step", "m", "n", "k"]
        names += ["x_line", "x_term"]
        if not self.packed:
            names += ["w_line", "w_term"] + ["up"] * self.epilogue.pair
        return names + batch_args(self.batch)

    @property
    def panel(self) -> DType:
        """What the micro-kernel reads: 8-bit floats take too long to decode in its inner loop."""
        return f32 if self.w.is_float and self.w.bytes == 1 else self.w

    @property
    def staged(self) -> bool:
        """Whether panels pass through scratch memory."""
        return not self.packed or self.panel is not self.w

    @property
    def direct(self) -> bool:
        """Whether rows are read as they lie."""
        return self.x_unit == "term" and memory_type(self.x) is compute_type(self.epilogue.out)

    def geometry(self, target: Target) -> Geometry:
        return Geometry.of(target, compute_type(self.epilogue.out))

    def scratch(self, target: Target, rows: int, n: int, k: int) -> int:
        """Bytes each worker needs when there are at most `rows` rows."""
        g, k = self.geometry(target), max(k, 1)
        terms = min(k, TERMS)
        tall = up(min(rows, CHUNK), g.rows)
        size = 0 if self.direct else tall * terms
        if not self.staged and not self.direct:
            size = max(size, up(min(rows, g.rows), 2) * k)
        total = up(size * g.sums.bytes, 64)
        if self.staged:
            total += up(terms * g.width * memory_type(self.panel).bytes, 64)
        tiles = 1
        if k > TERMS:
            tiles = min(-(-n // self.epilogue.columns(g)), GROUP) * (tall // g.rows)
        return total + max(tiles, 1) * g.tile_bytes

    def emit(self, m: Module) -> None:
        Product(self, m).emit()


class Part(NamedTuple):
    """A chunk's rows and a panel, from k on over a block of terms; `step` is the bytes from one k
    of the panel to the next."""

    rows: Value
    panel: Value
    step: Value
    next: Value  # the panel after it
    k: Value
    terms: Value


Work = Callable[[Value, Value, Value, Value, Value, Value], None]
"""(x, w, rows, at, first, last): as `Product.chunk`."""


def up(n: int, step: int) -> int:
    """n rounded up to a multiple of step."""
    return -(-n // step) * step


class Product:
    """Emits the functions of one spec and the kernel that drives them."""

    def __init__(self, spec: Matmul, m: Module, routed: bool = False) -> None:
        g = spec.geometry(m.target)
        self.spec, self.g, self.columns = spec, g, spec.epilogue.columns(g)
        sizes = (1,) if spec.one else g.sizes
        self.dots = Dots(m, g, spec.panel, sizes, not spec.direct, not spec.staged)
        self.step = self.dots.step
        if not spec.direct:
            self.pack_x = emit_pack(m, "pack_x", spec.x, g.sums, spec.x_unit, routed)
        if spec.staged:
            compute = None if spec.panel is spec.w else memory_type(spec.panel)
            unit = "line" if spec.packed else spec.w_unit
            self.pack_w = emit_pack(m, "pack_w", spec.w, compute, unit)
        self.finish = emit_finish(m, g, spec.epilogue, self.arg, routed)
        self.f = m.kernel()
        self.given = {name: self.arg(self.f, name) for name in spec.args}
        if spec.one:
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
        per_chunk = self["m"]
        if not self.spec.one:
            per_chunk = self.rows_per_chunk(per_chunk, batches * panels, CHUNK)
        self.lay_out_scratch(f["tid"].to(i64) * self["step"], per_chunk)
        self.deal(batches, per_chunk, panels, self.chunk)

    def deal(self, batches: Value, per_chunk: Value, panels: Value, work: Work) -> None:
        """Chunks of rows, and panels of columns (or what stands for them), to the workers."""
        f, rows, chunks = self.f, self["m"], self.f.i64(1)
        if not self.spec.one:
            chunks = (rows + per_chunk - 1).udiv(per_chunk)
        lo, hi = f.split(batches * chunks * panels)

        def run(unit: Value) -> Value:
            """The panels that this worker and the unit's chunk have in common."""
            chunk = unit.udiv(panels)
            first = unit - chunk * panels
            last = f.min(panels, first + (hi - unit))
            batch = chunk.udiv(chunks)
            row = (chunk - batch * chunks) * per_chunk
            x, w = batch_start(f, self.given, self.spec.batch, batch)
            x = f.gep(x, row * self["x_line"])
            at = (batch * rows + row) * self["n"]
            work(x, w, f.min(per_chunk, rows - row), at, first, last)
            return unit + (last - first)

        f.while_([lo], lambda u: u < hi, run)

    def rows_per_chunk(self, rows: Value, columns: Value, most: int) -> Value:
        """Few enough for the cache, and such that the units divide evenly among the workers."""
        f = self.f
        workers = f["nth"].to(i64)
        least = f.max(f.ceil_div(rows, most), 1)

        def better(chunks: Value, cost: Value, best: Value) -> list[Value]:
            each = (rows + chunks - 1).udiv(chunks)
            rounds = (columns * chunks + workers - 1).udiv(workers)
            this = rounds * (each + _CHUNK_COST)
            return [f.min(this, cost), f.select(this < cost, each, best)]

        end = f.select(rows > self.g.rows, least + workers, least + 1)
        _, best = f.loop(least, end, 1, [f.i64(1 << 62), rows], better)
        return f.max(best, 1)

    def lay_out_scratch(self, offset: Value, per_chunk: Value) -> None:
        """This worker's packed rows, packed panel and tiles, `offset` bytes into the scratch."""
        f, size = self.f, self.g.sums.bytes
        self.cut_terms(self["m"])
        self.packed_rows = after = f.gep(self["scratch"], offset)
        if not self.spec.direct:
            tall = f.ceil_div(per_chunk, 2) * 2
            room = tall * self.terms
            if self.routed and not self.spec.staged:
                # some chunks have few rows
                room = f.max(room, f.min(tall, self.g.rows) * self["k"])
            after = f.gep(self.packed_rows, round_up(room * size))
        self.packed_panel = after
        if self.spec.staged:
            after = f.gep(after, round_up(self.terms * self.step))
        self.tiles = after

    def cut_terms(self, rows: Value) -> None:
        """Into how many blocks of k a product of so many rows is cut."""
        f, k = self.f, self["k"]
        blocks = f.max(f.ceil_div(k, TERMS), 1)
        if not self.spec.staged:
            # Few rows read the weights once and nothing else: one stream, one pass over k.
            blocks = f.select(rows > self.g.rows, blocks, 1)
        self.terms = f.max((k + blocks - 1).udiv(blocks), 1)
        self.single = blocks.eq(1)

    def chunk(self, x: Value, w: Value, rows: Value, at: Value, first: Value, last: Value) -> None:
        """Rows of x against panels first to last; `at` is where they begin in the result."""
        f = self.f
        # Unfinished sums are kept for a group of panels; with one block of k there are none.
        group = f.select(self.single, f.max(last, 1), f.i64(GROUP))
        for start in f.range(first, last, group):
            stop = f.min(start + group, last)
            for k in f.range(0, self["k"], self.terms, guard=False):
                terms = f.min(self.terms, self["k"] - k)
                rows_at = self._pack_rows(f.gep(x, k * self["x_term"]), rows, terms)
                for p in f.range(start, stop):
                    panel = self._place(w, p, k, terms)
                    next_ = self._next(w, f.min(p + 1, last - 1), k)
                    slot = f.select(self.single, 0, (p - start) * f.ceil_div(rows, self.g.rows))
                    part = Part(rows_at, *panel, next_, k, terms)
                    self._tiles(part, rows, slot, at, p * self.columns)

    def _tiles(self, part: Part, rows: Value, slot: Value, at: Value, column: Value) -> None:
        """All rows of a chunk against one panel, over one block of k."""
        f, g, dots = self.f, self.g, self.dots
        line = self["x_line"] if self.spec.direct else part.terms * g.sums.bytes
        is_last = part.k + self.terms >= self["k"]
        for r in f.range(0, rows, g.rows):
            number = r.udiv(g.rows)
            tile = f.gep(self.tiles, slot + f.select(self.single, 0, number), g.tile_bytes)
            left = f.min(rows - r, g.rows)
            to = at + r * self["n"] + column
            if not self.routed:
                f.if_(is_last, partial(self._ask, left, to))
            ahead = dots.ahead(f, number, part.panel, part.terms, part.next)
            dots.call(
                f, left, f.gep(part.rows, r * line), line, part.terms, part.panel, part.step, tile,
                part.k, ahead,
            )  # fmt: skip
            route = f.gep(self.route, r, 4)
            f.if_(is_last, partial(self._finish, tile, left, to, column, route))

    def _ask(self, rows: Value, at: Value) -> None:
        """For the memory of a tile's result: it comes while the tile is summed."""
        f, size = self.f, memory_type(self.spec.epilogue.out).bytes
        for i in f.range(0, rows):
            row = f.gep(self["out"], at + i * self["n"], size)
            for line in range(0, self.columns * size, LINE):
                f.prefetch(row, line)

    def _finish(self, tile: Value, rows: Value, at: Value, column: Value, route: Value) -> None:
        self.f.call(self.finish, self.f["args"], tile, rows, at, column, route)

    def _pack_rows(self, x: Value, rows: Value, terms: Value) -> Value:
        f, g = self.f, self.g
        if self.spec.direct:
            return x
        strides = self["x_line"], self["x_term"]
        for r in f.range(0, rows, g.rows):
            count = f.min(rows - r, g.rows)
            dst = f.gep(self.packed_rows, r * terms, g.sums)
            src = x if self.routed else f.gep(x, r * self["x_line"])
            route = f.gep(self.route, r, 4)
            f.call(self.pack_x, src, *strides, count, terms, dst, g.padded(f, count), route)
        return self.packed_rows

    def _place(self, w: Value, p: Value, k: Value, terms: Value) -> tuple[Value, Value]:
        """Where panel p is to be read from k on, and the bytes from one k to the next."""
        f, spec, step = self.f, self.spec, self.f.i64(self.step)
        if spec.packed or spec.w_unit != "line" or spec.panel is not spec.w or spec.epilogue.pair:
            return self._panel(w, p, k, terms), step
        # Few rows read a panel once: as it lies, if it is a whole one.
        as_it_lies = (self["m"] <= self.g.rows) & (self["n"] - p * self.columns >= self.columns)
        b, step = f.if_(
            as_it_lies,
            lambda: (self._source(w, p, k), self["w_term"]),
            lambda: (self._panel(w, p, k, terms), step),
        )
        return b, step

    def _next(self, w: Value, p: Value, k: Value) -> Value:
        """Where panel p is to be asked for."""
        return w if self.spec.staged else self._panel(w, p, k, k)

    def _source(self, w: Value, p: Value, k: Value) -> Value:
        """Where panel p of an unpacked weight begins."""
        f = self.f
        return f.gep(f.gep(w, p * self.columns * self["w_line"]), k * self["w_term"])

    def _panel(self, w: Value, p: Value, k: Value, terms: Value) -> Value:
        """Panel p from k on, made in scratch memory where it does not lie ready."""
        f, g, spec, size = self.f, self.g, self.spec, memory_type(self.spec.w).bytes
        if spec.packed:
            packed = f.gep(w, p * self["k"] + k, g.width * size)
            if spec.staged:
                strides = f.i64(size), f.i64(g.width * size)
                self._stage(packed, strides, f.i64(g.width), terms, 0)
            return self.packed_panel if spec.staged else packed
        strides = self["w_line"], self["w_term"]
        at = self._source(w, p, k)
        count = f.min(self["n"] - p * self.columns, self.columns)
        self._stage(at, strides, count, terms, 0)
        if spec.epilogue.pair:
            # `up` lies like w: at the same distance from it wherever w has come to.
            up = f.gep(at, self["up"].bits(i64) - self["w"].bits(i64))
            self._stage(up, strides, count, terms, self.columns * memory_type(spec.panel).bytes)
        return self.packed_panel

    def _stage(
        self, src: Value, strides: tuple[Value, Value], count: Value, terms: Value, offset: int
    ) -> None:
        """Columns into the packed panel, from `offset` bytes of each of its rows on."""
        f = self.f
        dst, width = f.gep(self.packed_panel, offset), f.i64(self.g.width)
        f.call(self.pack_w, src, *strides, count, terms, dst, width, f.null())


def round_up(size: Value) -> Value:
    """Bytes, to a multiple of a cache line."""
    return (size + 63) & -64
