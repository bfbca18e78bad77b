"""Repacking of weights from rows to column tiles (`layouts.quant_tiles`), at memory speed."""

from __future__ import annotations

import struct
from collections.abc import Callable

from rlx.backends.cpu.kernels.spec import KernelSpec
from rlx.backends.cpu.layouts.quant_tiles import (
    BLOCKS,
    LINE,
    TILE_COLUMNS,
    BlockMap,
    column_tile_layout,
)
from rlx.ir.dim import Dim
from rlx.ir.quant.scheme import QuantScheme
from rlx.llvm.builder import Function, Module, Type, Value, i8, i16, i32, i64, vec
from rlx.support.records import dataclass

SIZES: dict[int, Type] = {1: i8, 2: i16, 4: i32}


@dataclass(frozen=True)
class RepackColumnTiles(KernelSpec):
    """args: w, scale, zp, out, weights, n, halves, blocks, words, column_tile_bytes

    `weights` weights of `halves` times `n` rows, rows of `blocks` blocks of `words` words; two
    halves are a pair (gate and up), whose column tiles alternate.
    """

    scheme: QuantScheme

    @property
    def label(self) -> str:
        return f"repack {self.scheme}"

    def sizes(self, weights: Dim, rows: int, k: int, pair: bool) -> list[Dim]:
        """The words after the pointers, for weights of `rows` rows in all."""
        layout = column_tile_layout(self.scheme, k)
        assert layout is not None
        halves = 2 if pair else 1
        sizes = [rows // halves, halves, layout.blocks, layout.words, layout.tile_bytes]
        return [weights, *sizes]

    def emit(self, m: Module) -> None:
        _Repack(self.scheme, m.kernel()).emit()


class _Repack:
    def __init__(self, scheme: QuantScheme, f: Function) -> None:
        self.f, self.scheme = f, scheme
        self.w, self.scale, self.zp, self.out = (f.arg(f["args"], i) for i in range(4))
        names = ("weights", "n", "halves", "blocks", "words", "column_tile_bytes")
        self.size = {name: f.arg(f["args"], 4 + i, i64) for i, name in enumerate(names)}
        layout = column_tile_layout(scheme, scheme.block or scheme.block_size * 16)
        assert layout is not None
        self.layout = layout
        self.map: BlockMap = BLOCKS.get(scheme.name, BlockMap(0, 0))
        self.place = word_places(f, self.map)

    def emit(self) -> None:
        f, size = self.f, self.size
        column_tiles = f.ceil_div(size["n"], TILE_COLUMNS) * size["halves"]
        gaps = (size["blocks"] & self.layout.group - 1).ne(0)
        lo, hi = f.split(size["weights"] * column_tiles)
        for s in f.range(lo, hi):
            weight = s.udiv(column_tiles)
            rest = s - weight * column_tiles
            place = rest.udiv(size["halves"])
            half = rest - place * size["halves"]
            first = (weight * size["halves"] + half) * size["n"] + place * TILE_COLUMNS
            out = f.gep(self.out, s * size["column_tile_bytes"])
            rows = f.min(size["n"] - place * TILE_COLUMNS, TILE_COLUMNS)
            # Columns of missing rows and fields of missing blocks are zero.
            for _ in f.when((rows < TILE_COLUMNS) | gaps):
                self._zero(out)
            for r in f.range(0, rows):
                for b in f.range(0, size["blocks"]):
                    self._block(first + r, r, b, out)

    def _zero(self, out: Value) -> None:
        f, zero = self.f, self.f.const(0, vec(LINE // 4, i32))
        for at in f.range(0, self.size["column_tile_bytes"], LINE):
            f.store(zero, out, at)

    def _block(self, row: Value, r: Value, b: Value, out: Value) -> None:
        """Block b of a row, which is column r of the column tile."""
        f, layout, block_map = self.f, self.layout, self.map
        index = row * self.size["blocks"] + b
        known = self.scheme.ggml_type is not None
        width = f.i64(self.scheme.bytes_per_block) if known else self.size["words"] * 4
        source = f.gep(self.w, index * width)
        inside = b & layout.group - 1
        group = f.gep(out, b.udiv(layout.group), layout.group_bytes)
        for i, size in enumerate(layout.fields):
            # Fields are part of a block, or separate tensors.
            if block_map.fields:
                at = f.gep(source, block_map.fields[i][0])
            else:
                at = f.gep((self.scale, self.zp)[i], index, size)
            to = f.gep(f.gep(group, layout.field_offsets[i]), inside * TILE_COLUMNS + r, size)
            f.store(f.load(at, SIZES[size], align=1), to)
        words = f.i64(layout.words) if known else self.size["words"]
        body = f.gep(group, layout.field_offsets[-1])
        to = f.gep(f.gep(body, inside * words, LINE), r, 4)
        self._words(f.gep(source, block_map.first), to, words)

    def _words(self, source: Value, to: Value, words: Value) -> None:
        f, block_map = self.f, self.map
        if block_map.grid is not None:
            given = [f.load(source, i32, 4 * i, align=1) for i in range(block_map.grid.file_words)]
            for i, moved in enumerate(block_map.grid.pack(given)):
                f.store(moved, to, LINE * i)
            return
        for j in f.range(0, words):
            word = f.load(f.gep(source, j, 4), i32, align=1)
            if self.scheme.packed_dtype == "u8" and self.scheme.ggml_type is None:
                word = spread_nibbles(word) | spread_nibbles(word >> 16) << 4
            f.store(word, f.gep(to, self.place(j), LINE))
        if block_map.top is not None:
            at = block_map.top - block_map.first
            top = f.load(source, i32, at, align=1)
            f.store(spread_bits(f, top), to, at // 4 * LINE)


def word_places(f: Function, block_map: BlockMap) -> Callable[[Value], Value]:
    """The position in a column tile of word j of a block."""
    order = block_map.order
    if order is None:
        return lambda j: j
    places = [order.index(i) for i in range(len(order))]
    table = f.module.table(f, struct.pack(f"<{len(places)}i", *places))
    return lambda j: f.load(f.gep(table, j, 4), i32).to(i64)


def spread_nibbles(word: Value) -> Value:
    """The low four nibbles of a word, one to a byte."""
    low = word & 0xFFFF
    low = (low | low << 8) & 0x00FF00FF
    return (low | low << 4) & 0x0F0F0F0F


def spread_bits(f: Function, top: Value) -> Value:
    """Bit 4g + b of a word as bit g of its byte b."""
    bits = f.i32(0)
    for g in range(8):
        four = top >> 4 * g & 15
        # The product puts each of the four bits at the bottom of a byte; the rest is masked.
        bits = bits | (four * 0x00204081 & 0x01010101) << g
    return bits
