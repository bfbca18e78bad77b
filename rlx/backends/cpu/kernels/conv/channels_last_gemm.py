"""Convolution of images with channels last, as a GEMM whose rows are pixels.

A tile is some pixels times a panel of filters, in registers: per tap and channel one broadcast for
each pixel and one vector of weights for each vector of the panel. The rows of a 1×1 convolution lie
in memory as a GEMM has them. For others a table holds, for each tap, a pointer to the input pixel
under it; the border points at zeros. The table is made for a block of pixels and serves all panels.

Sums are over taps, then channels, one fma each, in every tile: the bits of a pixel do not depend on
the pixels beside it. Where a panel has more terms than fit in the L2 cache, its tiles wait in
memory between chunks of terms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

from rlx.backends.cpu.kernels.spec import KernelSpec, Operands
from rlx.llvm.builder import Function, Module, Type, Value, f32, i64, ptr, vec
from rlx.llvm.nest.elements import activate
from rlx.llvm.target import Target
from rlx.support.records import dataclass

POINTERS = frozenset(["x", "filters", "out", "bias", "residual", "scratch"])
SIZES = [
    "scratch_bytes", "batch", "groups", "columns", "panels", "channels", "taps_y", "taps_x", "run",
    "block", "chunk_taps", "chunk_run", "height", "width", "out_height", "out_width", "stride_y",
    "stride_x", "start_y", "start_x", "dilation_y", "dilation_x",
]  # fmt: skip
MICRO = [
    ("rows", ptr), ("row_stride", i64), ("count", i64), ("b", ptr), ("taps", i64), ("run", i64),
    ("tile", ptr), ("goes_on", i64), ("stops", i64), ("out", ptr), ("out_stride", i64),
    ("bias", ptr), ("residual", ptr), ("tail", i64), ("ahead", ptr), ("ahead_step", i64),
]  # fmt: skip
_WIDE, _TALL = 6, 8  # pixels of a tile with four vectors, and with fewer
_PIXELS_AHEAD = 8192  # bytes
_FILLED = 8  # pixels whose pointers are computed together
_L2_ROWS, _L2_PANEL = 256 << 10, 1024  # bytes of a block's pixels; terms of a chunk


def panel_width(target: Target, filters: int) -> int:
    """Vectors of a panel: four, or such that the last one is not much narrower than the rest."""
    vectors = -(-filters // target.lanes(32))
    if target.num_vector_registers < 32:
        return min(vectors, 2)
    return 3 if vectors in (3, 5, 6, 9) else min(vectors, 4)


def tile_pixels(target: Target, width: int) -> int:
    """Pixels of a tile, for panels of so many vectors."""
    if target.num_vector_registers < 32:
        return _WIDE
    return _WIDE if width > 3 else _TALL


@dataclass(frozen=True)
class ChannelsLastGemm(KernelSpec):
    """args: as `self.args` lists them.

    activation(conv + bias + residual) of x `[batch, height, width, groups · channels]`. `run`
    elements are contiguous under each tap. A panel has `width` vectors, the last one `last`.
    """

    width: int
    last: int
    masked: bool  # the last vector has fewer columns
    pointwise: bool
    bias: bool
    residual: bool
    activation: str = "none"

    @property
    def flushes_denormals(self) -> bool:
        return True

    @property
    def out_bytes(self) -> int:
        """Of an element of the result."""
        return 4

    @property
    def args(self) -> list[str]:
        given = ["bias"] * self.bias + ["residual"] * self.residual
        return ["x", "filters", "out", *given, "scratch", *SIZES]

    def weight_words(self, target: Target) -> int:
        """Words of 32 bits that the weights of a term and a column have; a term of x is one."""
        return 1

    def tile(self, target: Target) -> int:
        return tile_pixels(target, self.width)

    def sizes(self, target: Target) -> list[int]:
        """Pixels of the full tile and of smaller ones."""
        return [self.tile(target), 4, 2, 1]

    def block(self, target: Target, channels: int, area: int) -> int:
        """Tiles of a block of pixels, which have `area` input pixels each."""
        rows = self.tile(target)
        most = _L2_ROWS // (rows * channels * 4 * area)
        return max(-(-54 // rows), min(64, most))

    def chunk(self, taps: int, run: int) -> tuple[int, int]:
        """Taps, and terms of each tap, that are summed before the next tile."""
        if taps == 1:
            parts = max(-(-run // _L2_PANEL), 1)
            return 1, -(-run // parts)
        whole = -(-taps * run // _L2_PANEL)
        return max(-(-taps // whole), 1), run

    def scratch(self, target: Target, taps: int, run: int, block: int) -> tuple[int, int, int]:
        """Bytes each worker needs: zeros, the table, tiles that wait."""
        rows, line = self.tile(target), target.vector_bits // 8
        zeros = 0 if self.pointwise else -(-run * 4 // 64) * 64
        whole = -(-rows // _FILLED) * _FILLED  # pointers are stored so many at a time
        table = 0 if self.pointwise else (block * rows * taps + whole - rows) * 8
        unfinished = self.chunk(taps, run) != (taps, run)
        tiles = block * rows * self.width * line if unfinished else 0
        return zeros, -(-table // 64) * 64, tiles

    def emit(self, m: Module) -> None:
        Emitter(self, m).emit()


class Emitter:
    """The loops around the micro-kernels: blocks of pixels, panels of filters, chunks of terms."""

    pointers: ClassVar[frozenset[str]] = POINTERS

    def __init__(self, spec: ChannelsLastGemm, m: Module) -> None:
        self.spec, self.lanes = spec, m.target.lanes(32)
        self.rows, self.line = spec.tile(m.target), self.lanes * 4
        self.weight_words = spec.weight_words(m.target)
        sizes = self.sizes = spec.sizes(m.target)
        self.kinds = list(dict.fromkeys([(spec.width, False), (spec.last, spec.masked)]))
        self.micro = {
            (kind, r): self.micro_kernel(m, *kind, r) for kind in self.kinds for r in sizes
        }
        if not spec.pointwise:
            self.fill = self._emit_fill(m)
        self.f = m.kernel()
        self.o = Operands(self.f, spec.args, self.pointers)

    def micro_kernel(self, m: Module, vectors: int, masked: bool, rows: int) -> Function:
        return Micro(self.spec, m, vectors, masked, rows, self.sizes).function

    def border(self) -> Value:
        """A vector of what lies beside the image."""
        return self.f.const(0, vec(self.lanes, f32))

    def emit(self) -> None:
        f, o = self.f, self.o
        self.pixels = o["batch"] * o["out_height"] * o["out_width"]
        tiles = (self.pixels + (self.rows - 1)).udiv(self.rows)
        self.taps = o["taps_y"] * o["taps_x"]
        self.terms = self.taps * o["run"]
        self._lay_out_scratch()
        panels = o["groups"] * o["panels"]
        lo, hi = f.split(panels * tiles)
        at, table = f.carry([lo, f.i64(-1)]), None
        for _ in at.forever():
            i, made = at.values
            at.break_unless(i < hi)
            each = panels * o["block"]
            block = i.udiv(each)
            first = block * o["block"]  # tile
            count = f.min(o["block"], tiles - first)
            rest = i - block * each
            number = rest.udiv(count)
            start = rest - number * count
            stop = f.min(count, start + (hi - i))
            table = self._prepare(made, block, number, first, count)
            self._panel(number, first, start, stop)
            at.values = [i + (stop - start), table]

    def _lay_out_scratch(self) -> None:
        f, o = self.f, self.o
        if self.spec.pointwise:
            self.tiles = f.gep(o["scratch"], f["tid"].to(i64) * o["scratch_bytes"])
            return
        zeros = f.gep(o["scratch"], f["tid"].to(i64) * o["scratch_bytes"])
        size = f.ceil_div(o["run"], self.lanes) * self.line
        border = self.border()
        for at in f.range(0, size, self.line):
            f.store(border, f.gep(zeros, at))
        self.zeros = zeros
        self.table = f.gep(zeros, (o["run"] * 4 + 63) & -64)
        entries = o["block"] * self.rows * self.taps * 8 + -self.rows % _FILLED * 8
        self.tiles = f.gep(self.table, (entries + 63) & -64)

    def more(self, column: Value) -> list[Value]:
        """Further arguments of the micro-kernels."""
        return []

    def _prepare(
        self, made: Value, block: Value, number: Value, first: Value, count: Value
    ) -> Value:
        """Fill the table unless it is that of this block and group."""
        if self.spec.pointwise:
            return made
        f, o = self.f, self.o
        group = number.udiv(o["panels"])
        key = block * o["groups"] + group
        for _ in f.when(key.ne(made)):
            f.call(
                self.fill, f["args"], f.gep(o["x"], group * o["channels"], 4), self.zeros,
                self.table, first * self.rows, count,
            )  # fmt: skip
        return key

    def _emit_fill(self, m: Module) -> Function:
        """void fill(ptr args, ptr x, ptr zeros, ptr table, i64 pixel, i64 tiles)

        Pixels of a tile are the lanes of vectors, which go from tile to tile."""
        params = [("args", ptr), ("x", ptr), ("zeros", ptr), ("table", ptr)]
        f = m.function("fill", [*params, ("pixel", i64), ("tiles", i64)], internal=True)
        o = Operands(f, self.spec.args, self.pointers)
        plane = o["out_height"] * o["out_width"]
        image = f["pixel"].udiv(f.max(plane, 1))
        inside = f["pixel"] - image * plane
        y = inside.udiv(f.max(o["out_width"], 1))
        lanes = vec(_FILLED, i64)
        first = [f.splat(n, _FILLED) for n in (image, y, inside - y * o["out_width"])]
        parts = range(0, self.rows, _FILLED)
        places = f.carry(
            [n for p in parts for n in (*first[:2], first[2] + f.iota(lanes, start=p))]
        )
        size = o["taps_y"] * o["taps_x"] * (self.rows * 8)
        for t in places.range(0, f["tiles"]):
            following: list[Value] = []
            for n, p in enumerate(parts):
                place = self._carried(f, o, places.values[3 * n : 3 * n + 3])
                self._fill_lanes(f, o, place, f.gep(f["table"], t * size + p * 8))
                following += [*place[:2], place[2] + f.splat(f.i64(self.rows), _FILLED)]
            places.values = following
        return f

    def _carried(self, f: Function, o: Operands, place: Sequence[Value]) -> list[Value]:
        """Image, row and column, with columns beyond a row counted in the next one."""
        width, height = f.splat(o["out_width"], _FILLED), f.splat(o["out_height"], _FILLED)
        found = f.carry(place)
        for _ in found.forever():
            image, y, x = found.values
            over = x >= width
            found.break_unless(f.any(over))
            y = y + over.to(i64, signed=False)
            last = over & (y >= height)
            found.values = [
                image + last.to(i64, signed=False), f.select(last, y - height, y),
                f.select(over, x - width, x),
            ]  # fmt: skip
        return found.values

    def _fill_lanes(self, f: Function, o: Operands, place: Sequence[Value], to: Value) -> None:
        """The pointers of some pixels under each tap; beyond the last pixel they are zeros."""

        def splat(value: Value) -> Value:
            return f.splat(value, _FILLED)

        image, y, x = place
        pitch = o["groups"] * o["channels"] * 4
        line = o["width"] * pitch
        top = y * splat(o["stride_y"]) + splat(o["start_y"])
        left = x * splat(o["stride_x"]) + splat(o["start_x"])
        base = image * splat(o["height"] * line) + top * splat(line) + left * splat(pitch)
        base, zeros = base + splat(f["x"].bits(i64)), splat(f["zeros"].bits(i64))
        exists = image < splat(o["batch"])
        for i in f.range(0, o["taps_y"]):
            down = i * o["dilation_y"]
            here = exists & (top + splat(down)).ult(splat(o["height"]))
            for j in f.range(0, o["taps_x"]):
                right = j * o["dilation_x"]
                there = here & (left + splat(right)).ult(splat(o["width"]))
                pointers = f.select(there, base + splat(down * line + right * pitch), zeros)
                f.store(pointers, f.gep(to, (i * o["taps_x"] + j) * (self.rows * 8)))

    def _panel(self, number: Value, first: Value, start: Value, stop: Value) -> None:
        """Tiles start … stop of a block, which begins at tile `first`, for one panel."""
        f, o, spec = self.f, self.o, self.spec
        group, panel = number.udiv(o["panels"]), number.urem(o["panels"])
        padded = ((o["panels"] - 1) * spec.width + spec.last) * self.line
        words = self.terms * self.weight_words
        b = f.gep(o["filters"], (group * padded + panel * (spec.width * self.line)) * words)
        column = group * o["columns"] + panel * (spec.width * self.lanes)
        if len(self.kinds) == 1:
            self._chunks(self.kinds[0], group, b, column, first, start, stop)
            return
        for is_last in f.either(panel.eq(o["panels"] - 1)):
            kind = self.kinds[1 if is_last else 0]
            self._chunks(kind, group, b, column, first, start, stop)

    def _chunks(
        self, kind: tuple[int, bool], group: Value, b: Value, column: Value, first: Value,
        start: Value, stop: Value,
    ) -> None:  # fmt: skip
        f, o = self.f, self.o
        panel = partial(self._tiles, kind, group, b, column, first, start, stop)
        if self.spec.pointwise:
            for k in f.range(0, o["run"], o["chunk_run"], guard=False):
                n = f.min(o["chunk_run"], o["run"] - k)
                panel(k, f.i64(1), n, k.ne(0), (k + n) < o["run"])
        else:
            for t in f.range(0, self.taps, o["chunk_taps"], guard=False):
                n = f.min(o["chunk_taps"], self.taps - t)
                panel(t, n, o["run"], t.ne(0), (t + n) < self.taps)

    def _tiles(
        self, kind: tuple[int, bool], group: Value, b: Value, column: Value, first: Value,
        start: Value, stop: Value, at: Value, taps: Value, run: Value, goes_on: Value, stops: Value,
    ) -> None:  # fmt: skip
        """All tiles of a chunk of terms, which begins at tap (or channel) `at`."""
        f, o, spec, rows = self.f, self.o, self.spec, self.rows
        vectors, masked = kind
        pitch = o["groups"] * o["columns"]
        term = at if spec.pointwise else at * o["run"]
        term_bytes = vectors * self.line * self.weight_words
        weights = f.gep(b, term, term_bytes)
        following = f.gep(weights, taps * run, term_bytes)
        left = o["columns"] - (column - group * o["columns"])
        tail = left - (vectors - 1) * self.lanes if masked else f.i64(0)
        bias = f.gep(o["bias"], column, 4) if spec.bias else f.null()
        x_pitch = o["groups"] * o["channels"] * 4
        # the first panel reads the pixels from memory; where they are more than the weights, they
        # are fetched ahead, not the next panel
        streams = column.eq(0) & taps.eq(1) & run.eq(o["channels"]) & (self.pixels > o["columns"])
        for t in f.range(start, stop):
            pixel = (first + t) * rows
            count = f.min(self.pixels - pixel, rows)
            if spec.pointwise:
                source = f.gep(o["x"], (group * o["channels"] + at) * 4 + pixel * x_pitch)
            else:
                source = f.gep(self.table, (t * self.taps + at) * (rows * 8))
            place = pixel * pitch + column
            out = f.gep(o["out"], place, spec.out_bytes)
            residual = f.gep(o["residual"], place, spec.out_bytes) if spec.residual else f.null()
            tile = f.gep(self.tiles, t, rows * spec.width * self.line)
            part = (t - start) * self.line
            ahead = f.select(part < term_bytes, f.gep(following, part), weights)
            step = f.i64(term_bytes)
            if spec.pointwise:
                ahead = f.select(streams, f.gep(source, _PIXELS_AHEAD), ahead)
                step = f.select(streams, f.i64(4 * rows), step)
            given = [
                source, x_pitch, count, weights, taps, run, tile, goes_on.to(i64, signed=False),
                stops.to(i64, signed=False), out, pitch * spec.out_bytes, bias, residual, tail,
                ahead, step, *self.more(column),
            ]  # fmt: skip
            for r in f.cases(padded(f, count, self.sizes), self.sizes):
                f.call(self.micro[kind, r], *given)


def padded(f: Function, count: Value, sizes: Sequence[int]) -> Value:
    """The smallest of the tile heights that holds `count` rows."""
    found = f.i64(sizes[0])
    for size in sizes[1:]:
        found = f.select(count <= size, size, found)
    return found


class Micro:
    """void micro(…): a tile of up to `rows` pixels times `vectors` vectors of filters."""

    params: ClassVar[list[tuple[str, Type]]] = MICRO
    element: ClassVar[Type] = f32  # of the sums

    def __init__(
        self, spec: ChannelsLastGemm, m: Module, vectors: int, masked: bool, rows: int,
        sizes: Sequence[int],
    ) -> None:  # fmt: skip
        self.spec, self.vectors, self.masked, self.rows = spec, vectors, masked, rows
        self.lanes = m.target.lanes(32)
        self.weight_words = spec.weight_words(m.target)
        self.type = vec(self.lanes, self.element)
        # fewer pixels would run in a smaller tile
        self.sure = max((s + 1 for s in sizes if s < rows), default=1)
        self.table_rows = sizes[0]
        kind = "rows" if spec.pointwise else "taps"
        name = f"{kind}{vectors}_{rows}" + "m" * masked
        self.function = self.f = m.function(name, self.params, internal=True)
        self._emit()

    def _emit(self) -> None:
        f, spec = self.f, self.spec
        n = self.rows * self.vectors
        sums, zero = f.carry(), f.const(0, self.type)
        for goes_on in f.either(f["goes_on"].ne(0), sums):
            places = [i * self.type.bytes for i in range(n)]
            sums.values = (
                [f.load(f["tile"], self.type, at) for at in places] if goes_on else [zero] * n
            )
        if spec.pointwise:
            rows = [f.gep(f["rows"], f["row_stride"] * self._row(r)) for r in range(self.rows)]
            for k in sums.range(0, f["run"], guard=False):
                sums.values = self._step(rows, k, k, sums.values)
        else:
            self._taps(sums)
        for stops in f.either(f["stops"].ne(0)):
            if stops:
                for i, value in enumerate(sums.values):
                    f.store(value, f["tile"], i * self.type.bytes)
            else:
                self.finish(sums.values)

    def _taps(self, sums: object) -> None:
        f = self.f
        carry = sums
        for tap in carry.range(0, f["taps"], guard=False):  # type: ignore[attr-defined]
            entry = f.gep(f["rows"], tap * (self.table_rows * 8))
            rows = [f.load(entry, ptr, r * 8) for r in range(self.rows)]
            inner = f.carry(carry.values)  # type: ignore[attr-defined]
            base = tap * f["run"]
            for k in inner.range(0, f["run"], guard=False):
                inner.values = self._step(rows, k, base + k, inner.values)
            carry.values = inner.values  # type: ignore[attr-defined]

    def _row(self, r: int) -> Value:
        """Missing pixels read the last one again."""
        f = self.f
        return f.i64(r) if r < self.sure else f.min(f["count"] - 1, r)

    def _step(
        self, rows: Sequence[Value], k: Value, term: Value, sums: Sequence[Value]
    ) -> list[Value]:
        """A term of the sums. What comes next is fetched meanwhile: weights, a line of each term by
        each of the first tiles, or pixels."""
        f = self.f
        f.prefetch(f.gep(f["ahead"], term * f["ahead_step"]), locality=2)
        return self.rank_one(rows, k, term, sums)

    def rank_one(
        self, rows: Sequence[Value], k: Value, term: Value, sums: Sequence[Value]
    ) -> list[Value]:
        f, n = self.f, self.vectors
        b = f.gep(f["b"], term, n * self.type.bytes)
        weights = [f.load(b, self.type, j * self.type.bytes) for j in range(n)]
        found: list[Value] = []
        for row in rows:
            x = f.broadcast_load(f.gep(row, k, 4), f32, self.lanes)
            for weight in weights:
                found.append(f.fma(x, weight, sums[len(found)]))
        return found

    def finish(self, sums: Sequence[Value]) -> None:
        """Bias, residual, activation, and the store of the pixels that exist."""
        f, spec, n = self.f, self.spec, self.vectors
        masks = self.masks()
        biases = [self.fetch(f["bias"], j, masks[j]) for j in range(n)] if spec.bias else []

        def store_row(r: int) -> None:
            out = f.gep(f["out"], f["out_stride"] * r)
            residual = f.gep(f["residual"], f["out_stride"] * r) if spec.residual else None
            if residual is not None:
                following = f.gep(residual, f["out_stride"] * (2 * self.rows))
                for j in range(n):
                    f.prefetch(following, j * self.type.bytes)
            for j in range(n):
                value = sums[r * n + j]
                if biases:
                    value = value + biases[j]
                if residual is not None:
                    value = value + self.fetch(residual, j, masks[j])
                self.put(activate(spec.activation, value), out, j, masks[j])

        self.each_row(store_row)

    def masks(self) -> list[Value | None]:
        """For each vector the lanes that are columns; None where all are."""
        f, n = self.f, self.vectors
        mask = f.lane_mask(f["tail"], self.lanes) if self.masked else None
        return [mask if j == n - 1 else None for j in range(n)]

    def each_row(self, store_row: Callable[[int], None]) -> None:
        """Code that stores a row, for each row that exists."""
        for r in range(self.rows):
            if r < self.sure:
                store_row(r)
            else:
                for _ in self.f.when(self.f["count"] > r):
                    store_row(r)

    def put(self, value: Value, out: Value, j: int, mask: Value | None) -> None:
        at = j * value.type.bytes
        if mask is None:
            self.f.store(value, out, at)
        else:
            self.f.masked_store(value, out, mask, at)

    def fetch(self, base: Value, j: int, mask: Value | None) -> Value:
        f, at = self.f, j * self.type.bytes
        if mask is None:
            return f.load(base, self.type, at)
        return f.masked_load(base, self.type, mask, offset=at)
