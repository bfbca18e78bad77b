"""Blocks of weights unpacked for many rows, where bytes are multiplied in pairs.

With `pmaddubsw` products take so few instructions that taking codes apart for every tile of rows
would be a good part of the work. An unpacked block is lines of 16 columns: for each word of codes
one of bytes, or two of pairs of i16 where codes have 8 bits; then scales and what else belongs to
the block. A row that is one block is unpacked by pieces, and its sums stay integers until its end.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.codegen.emit import Function, Value, i16, i32, vec
from rlx.codegen.qmatmul.dot import Index, Run, Widened
from rlx.codegen.qmatmul.formats import Blocks, Format, Strip, Weights
from rlx.codegen.qmatmul.supers import Super
from rlx.codegen.qmatmul.tile import Tile
from rlx.ir.quant_strips import LINE, ROWS
from rlx.support.records import dataclass

_CACHE = 16 << 10  # bytes of unpacked blocks: they and a tile's rows stay in the first-level cache
_PIECE = 16  # codes of a row without blocks


class _Writing(Widened):
    """Writes the codes of a run to where a product would read rows."""

    def __init__(self, f: Function, bits: int) -> None:
        super().__init__(f, 1, f.target.lanes(32))
        self.signed_bytes = bits == 8

    def run(self, run: Run, sums: Sequence[Value]) -> list[Value]:
        f = self.f
        for g in f.range(0, run.groups):
            for s, codes in enumerate(run.codes(g)):
                place = f.gep(run.x(g, s), 4 * self.lanes * run.columns[s])
                for p, part in enumerate(_widened(codes) if run.bits == 8 else [codes]):
                    f.store(part, place, p * LINE)
        return list(sums)


def _widened(codes: Value) -> list[Value]:
    """Signed bytes 0 and 2, and 1 and 3, of every lane as pairs of i16."""
    halves = codes.bits(vec(codes.type.bytes // 2, i16))
    return [(halves << 8).ashr(8), halves.ashr(8)]


class Unpacking(Tile):
    """Reads weights as any tile does; what it is given as rows is where their codes go."""

    def __init__(self, f: Function, codes: Codes) -> None:
        super().__init__(f, 1, ROWS // f.target.lanes(32), f.i64(0))
        self.dot = _Writing(f, codes.bits)
        self.word_bytes = LINE * codes.planes

    def rows_at(self, base: Value, index: Index) -> Value:
        return self.f.gep(base, index, self.word_bytes)

    def put(self, values: Sequence[Value], base: Value, line: int) -> None:
        """A line, of one value for each vector of columns."""
        for v, value in enumerate(values):
            self.f.store(value, base, LINE * line + 4 * self.lanes * v)


@dataclass
class Codes:
    """The codes of an unpacked block of `words` words."""

    words: int
    bits: int

    @property
    def planes(self) -> int:
        """Lines of a word."""
        return 2 if self.bits == 8 else 1

    @property
    def lines(self) -> int:
        return self.words * self.planes

    def run(
        self, t: Tile, w: Value, x: Value, count: Index, scales: Sequence[Value] | None = None
    ) -> Run:
        """The products of `count` words; `scales` has one entry for each column."""
        planes = range(self.planes)
        return Run(
            count,
            self.bits,
            lambda g: [t.line(w, g * self.planes + p, v) for p in planes for v in t.columns],
            lambda g, s: t.rows_at(x, g * self.planes + s // t.vectors),
            [v for _ in planes for v in t.columns],
            None if scales is None else [s for _ in planes for s in scales],
        )

    def widen(self, t: Tile, x: Value, wide: Value) -> None:
        """A block of a tile's rows as 8-bit codes are multiplied: `[word][plane][row]`."""
        f, word = t.f, 4 * t.rows
        some = max(1, t.lanes // t.rows)
        for g in f.range(0, self.words, some):
            codes = f.load(f.gep(x, g, word), vec(some * t.rows, i32))
            planes = [p.bits(codes.type) for p in _widened(codes)]
            for i in range(some):
                parts = [f.slice(p, i * t.rows, t.rows) for p in planes]
                f.store(f.concat(*parts), f.gep(wide, g + i, 2 * word))


@dataclass
class Piece:
    """Some unpacked blocks, and a tile's rows of them."""

    blocks: Value
    x: Value
    count: Value


class UnpackedSuper(Super):
    """Behind the codes: sub-scales, pairs of minima, d and dmin."""

    def __init__(self, form: Super) -> None:
        self.form, self.subs, self.sums, self.bits = form, form.subs, form.sums, form.bits
        self.unpacked = Codes(64, form.bits)
        self.table_line = self.unpacked.lines
        self.pairs_line = self.table_line + self.subs
        self.scale_line = self.pairs_line + self.subs // 2
        self.lines = self.scale_line + 2
        self.row_bytes = 256 + 52

    def write(self, t: Unpacking, strip: Strip, b: Value, to: Value) -> None:
        form, w = self.form, strip.block(b)
        form.table = t.f.gep(to, LINE * self.table_line)
        for v in t.columns:
            form.unpack(t, w.words, v)
        form.dots(t, w.words, to)
        for i, pair in enumerate(zip(*(form.pairs(t, w.words, v) for v in t.columns), strict=True)):
            t.put(pair, to, self.pairs_line + i)
        for i, scale in enumerate(zip(*(form.scales(t, w, v) for v in t.columns), strict=True)):
            t.put(scale, to, self.scale_line + i)

    def add(self, t: Tile, piece: Piece, out: Value, stride: int) -> None:
        f = t.f
        self.buffer = f.alloca(4 * t.lanes * t.vectors * t.rows)
        self.wide = f.alloca(2 * 256 * t.rows) if self.bits == 8 else None
        for b in f.range(0, piece.count):
            w = Weights(f.gep(piece.blocks, b, LINE * self.lines), [])
            self._block(t, w, f.gep(piece.x, b, self.row_bytes * t.rows), out, stride)

    def unpack(self, t: Tile, w: Value, v: int) -> None:
        """They lie ready."""

    def pairs(self, t: Tile, w: Value, v: int) -> list[Value]:
        return [t.word(w, self.pairs_line + i, v) for i in range(self.subs // 2)]

    def scales(self, t: Tile, w: Weights, v: int) -> tuple[Value, Value]:
        d, low = (t.word(w.words, self.scale_line + i, v).bits(t.floating) for i in range(2))
        return d, low

    def value(self, t: Tile, sums: Value, total: Value, d: Value, low: Value) -> Value:
        return self.form.value(t, sums, total, d, low)

    def dots(self, t: Tile, w: Value, x: Value) -> list[Value]:
        f, codes, count = t.f, self.unpacked, 64 // self.subs
        if self.wide is not None:
            codes.widen(t, x, self.wide)
            x = self.wide

        def sub(s: Value, *sums: Value) -> list[Value]:
            scales = [t.word(w, s + self.table_line, v) for v in t.columns]
            lines = f.gep(w, s, LINE * codes.planes * count)
            rows = t.rows_at(x, s * (codes.planes * count))
            return t.dot.run(codes.run(t, lines, rows, count, scales), sums)

        return f.loop(0, self.subs, 1, t.zeros(), sub)


class UnpackedBlocks(Blocks):
    """Behind the codes: scales, and minima where there are any."""

    def __init__(self, form: Blocks) -> None:
        self.form, self.unpacked = form, Codes(form.block // 4, form.bits)
        self.lines = self.unpacked.lines + (2 if form.minimum else 1)
        self.row_bytes = form.block + 12
        super().__init__(
            form.block,
            form.codes,
            lambda t, w, v: self._line(t, w, 0, v),
            form.block // 4,
            form.bits,
            form.offset,
            (lambda t, w, v, scale: self._line(t, w, 1, v)) if form.minimum else None,
        )

    def _line(self, t: Tile, w: Weights, i: int, v: int) -> Value:
        return t.word(w.words, self.unpacked.lines + i, v).bits(t.floating)

    def write(self, t: Unpacking, strip: Strip, b: Value, to: Value) -> None:
        form, w = self.form, strip.block(b)
        t.dot.run(form.run(t, w, to, form.steps), t.zeros())
        scales = [form.scale(t, w, v) for v in t.columns]
        t.put(scales, to, self.unpacked.lines)
        if form.minimum:
            low = [form.minimum(t, w, v, scales[v]) for v in t.columns]
            t.put(low, to, self.unpacked.lines + 1)

    def add(self, t: Tile, piece: Piece, out: Value, stride: int) -> None:
        f, size = t.f, 2 * self.block * t.rows
        wide = _widened_rows(t, self, piece) if self.bits == 8 else None

        def block(b: Value, *sums: Value) -> list[Value]:
            w = Weights(f.gep(piece.blocks, b, LINE * self.lines), [])
            x, meta = f.gep(piece.x, b, self.row_bytes * t.rows), f.i64(self.block // 4)
            rows = x if wide is None else f.gep(wide, b, size)
            run = self.unpacked.run(t, w.words, rows, self.steps)
            # What offsets make too much is added at the end: until then registers are scarce.
            dots = t.dot.run(run, t.zeros())
            ints = [a + b for a, b in zip(dots, self.start(t, x, meta), strict=True)]
            return self.scaled(t, w, x, meta, ints, list(sums))

        start = [f.load(p, t.floating) for p in t.places(out, stride)]
        t.write(f.loop(0, piece.count, 1, start, block), out, stride)


class UnpackedRow:
    """Pieces of a row that is one block: codes alone."""

    def __init__(self, form: Blocks) -> None:
        self.form, self.block, self.row_bytes = form, _PIECE, _PIECE
        self.unpacked = Codes(_PIECE // 4, form.bits)
        self.lines = self.unpacked.lines

    def write(self, t: Unpacking, strip: Strip, b: Value, to: Value) -> None:
        f, form, row = t.f, self.form, strip.block(t.f.i64(0))
        steps = _PIECE // (4 * form.streams)
        w = Weights(f.gep(row.words, b * steps, LINE), row.fields)
        t.dot.run(form.run(t, w, to, steps), t.zeros())

    def add(self, t: Tile, piece: Piece, out: Value, stride: int) -> None:
        x = _widened_rows(t, self, piece) if self.form.bits == 8 else piece.x
        start = [t.f.load(p, t.dot.sums) for p in t.places(out, stride)]
        run = self.unpacked.run(t, piece.blocks, x, piece.count * self.unpacked.words)
        t.write(t.dot.run(run, start), out, stride)

    def scale(self, t: Tile, strip: Strip, out: Value, stride: int) -> None:
        """The numbers that a tile's integers stand for."""
        f, meta = t.f, strip.k.udiv(4)
        ints = [
            f.load(place, t.dot.sums) + start
            for place, start in zip(
                t.places(out, stride), self.form.start(t, strip.x, meta), strict=True
            )
        ]
        row = strip.block(f.i64(0))
        t.write(self.form.scaled(t, row, strip.x, meta, ints, t.float_zeros()), out, stride)


Unpacked = UnpackedSuper | UnpackedBlocks | UnpackedRow


def _widened_rows(t: Tile, form: UnpackedBlocks | UnpackedRow, piece: Piece) -> Value:
    """All codes beforehand: what has just been written would be waited for."""
    f, size = t.f, 2 * form.block * t.rows
    wide = f.alloca(size * blocks_at_once(form))
    for b in f.range(0, piece.count):
        form.unpacked.widen(t, f.gep(piece.x, b, form.row_bytes * t.rows), f.gep(wide, b, size))
    return wide


def unpacked_format(form: Format) -> Unpacked:
    if isinstance(form, Super):
        return UnpackedSuper(form)
    assert isinstance(form, Blocks)
    return UnpackedBlocks(form) if form.block else UnpackedRow(form)


def blocks_at_once(form: Unpacked) -> int:
    """Blocks that the cache holds unpacked."""
    return max(1, _CACHE // (LINE * form.lines))
