"""Activations quantised to 8 bits for integer dot products, block by block.

Rows are grouped in tiles of `tile` rows; the remainder rows make a smaller tile of 1 or 4 rows
where that is enough, with arbitrary padding. Inside a tile everything is 4-byte words,
`[word][row]`: for each block of k the codes, then its metadata:

    block       scale, -(sum of the codes), scale * sum
    shared      scale, shared by several runs of 32 codes (blocks of a Q8_0 weight), and for each
                run the start of its dot product with bytes that have 128 added:
                BIAS - 128 * (sum of the codes), see `BIAS`
    unsigned    scale; codes have 7 bits and OFFSET added
    superblock  scale, the sums of its 16 runs of 16 codes as pairs of i16, those of its 8 runs
                of 32

Where a layout is paired, for matrix products of 8 codes (i8mm), the words of codes lie two by two,
`[pair][row][2]`; the metadata does not. Where it is a matrix layout, for tile registers (AMX), full
tiles have the codes of a block row by row, `[row][word]`; remainder rows take one tile more, unless
there is a single one. Tiles of several rows may have other codes than a single row, for products of
bytes by `pmaddubsw` and `pmaddwd`: in a wide layout i16, a word of codes 0 and 2 and one of codes 1
and 3 for each word; in a raised layout bytes with RAISE added.

A code is round(x / scale) with scale = max|x| / 127 over the block (63 for 7 bits). Pairs of sums
hold runs (0, 2), (1, 3), (4, 6), (5, 7), ...: the order in which byte scales widen to pairs.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.errors import AttributeValueError
from rlx.support.records import dataclass

Array = npt.NDArray[Any]

SUPERBLOCK = 256
# Blocks whose maximum is smaller are all zero: 127 divided by it must not overflow.
TINY = 2.0**-120
# The bits of 1.5 * 2^23: adding an integer below 2^22 to them adds its value to the float.
BIAS = 0x4B400000
RUN = 32
OFFSET = 64  # what "unsigned" codes have added
RAISE = 128  # what the codes of raised tiles have added
_PAIRS = ((0, 2), (1, 3))


@dataclass(frozen=True)
class RowLayout:
    """`block` codes share a scale; 0 means the whole row."""

    kind: str
    block: int
    tile: int
    paired: bool = False
    matrix: bool = False
    wide: bool = False
    raised: bool = False

    def __str__(self) -> str:
        traits = {"p": self.paired, "m": self.matrix, "w": self.wide, "r": self.raised}
        order = "".join(letter for letter, has in traits.items() if has)
        return f"{self.kind}{self.block}x{self.tile}{order}"

    @staticmethod
    def parse(text: str, where: str) -> RowLayout:
        found = re.fullmatch(r"(block|shared|unsigned|superblock)(\d+)x([1-9]\d*)([pmwr]?)", text)
        kind, size = (found[1], int(found[2])) if found else ("", 0)
        runs = size > 0 and size % RUN == 0
        fits = {"block": True, "shared": runs, "unsigned": runs, "superblock": size == SUPERBLOCK}
        if found is None or not fits[kind]:
            raise AttributeValueError(
                "unknown layout of activations",
                where=f"{where}.layout",
                got=text,
                expected=f"blockBxT, sharedBxT or unsignedBxT (B a multiple of {RUN}), "
                f"or superblock{SUPERBLOCK}xT",
                hint="p at its end: words of codes lie in pairs; m: row by row; w: wide; r: raised",
            )  # fmt: skip
        return RowLayout(found[1], int(found[2]), int(found[3]), *(found[4] == o for o in "pmwr"))

    def size(self, k: int) -> int:
        """Codes of a block of a row of k."""
        return self.block or k

    @property
    def meta(self) -> int:
        """Metadata words of a block."""
        sizes = {"block": 3, "shared": 1 + self.block // RUN, "unsigned": 1, "superblock": 13}
        return sizes[self.kind]

    @property
    def limit(self) -> int:
        """The largest code."""
        return 63 if self.kind == "unsigned" else 127

    @property
    def offset(self) -> int:
        """What codes have added."""
        return OFFSET if self.kind == "unsigned" else 0

    def words_together(self, width: int, k: int) -> int:
        """Words of codes of a row that lie together in a tile of `width` rows of k."""
        if self.matrix and width == self.tile:
            return self.size(k) // 4
        return 2 if self.paired else 1

    def block_words(self, width: int, k: int) -> int:
        """Words of a block of a row of k, in a tile of `width` rows."""
        codes = self.size(k) // 4
        return codes * (2 if self.wide and width > 1 else 1) + self.meta

    def row_bytes(self, k: int) -> int:
        """Bytes of a row in a full tile: no tile takes more."""
        return 0 if k == 0 else k // self.size(k) * 4 * self.block_words(self.tile, k)

    def width(self, rows: int) -> int:
        """Rows of the tile for so many remainder rows."""
        return next((s for s in self.widths if s >= rows), self.tile)

    @property
    def widths(self) -> tuple[int, ...]:
        """Tile sizes. Each one is compiled; two or three rows take no more time than four, and in
        tile registers no more than a full tile."""
        return (*[s for s in ((1,) if self.matrix else (1, 4)) if s < self.tile], self.tile)


def quantize_rows(layout: RowLayout, x: Array) -> Array:
    """x [rows, k] as [rows + tile - 1, row bytes]; padding is zero."""
    rows, k = x.shape
    out = np.zeros((rows + layout.tile - 1) * layout.row_bytes(k), np.uint8)
    codes, meta = _codes(layout, x), _meta(layout, x)
    at = 0
    for start, width in _tiles(layout, rows):
        mine = codes[start : start + width]
        if width > 1:
            mine = _widened(mine) if layout.wide else _raised(mine) if layout.raised else mine
        part = np.concatenate([mine, meta[start : start + width]], axis=2)
        tile = np.zeros((*part.shape[1:], width), np.uint32)
        tile[..., : len(part)] = part.transpose(1, 2, 0)
        pitch = layout.words_together(width, k)
        if pitch > 1:
            count = layout.size(k) // 4
            tile[:, :count] = _swapped(tile[:, :count], (-1, pitch, width))
        out[at : at + tile.nbytes] = tile.reshape(-1).view(np.uint8)
        at += tile.nbytes
    return out.reshape(rows + layout.tile - 1, layout.row_bytes(k))


def dequantized_rows(layout: RowLayout, packed: Array, rows: int, k: int) -> Array:
    """The f32 values [rows, k] of quantised rows."""
    flat = packed.reshape(-1)
    size, out, at = layout.size(k), np.zeros((rows, k), np.float32), 0
    for start, width in _tiles(layout, rows):
        count = k // size if size else 0
        shape = count, layout.block_words(width, k), width
        end = at + 4 * int(np.prod(shape))
        lines = _words(flat[at:end]).reshape(shape)
        pitch = layout.words_together(width, k)
        if pitch > 1:
            codes = _swapped(lines[:, : size // 4], (-1, width, pitch))
            lines = np.concatenate([codes, lines[:, size // 4 :]], axis=1)
        tile = lines.transpose(2, 0, 1)[: rows - start]
        stored = np.ascontiguousarray(tile[..., : -layout.meta])
        if width > 1:
            stored = _narrowed(stored) if layout.wide else stored
            stored = _raised(stored) if layout.raised else stored
        numbers = stored.view(np.int8) - layout.offset
        scale = np.ascontiguousarray(tile[..., -layout.meta]).view(np.float32)
        with np.errstate(invalid="ignore"):
            out[start : start + width] = (numbers * scale[..., None]).reshape(len(tile), k)
        at = end
    return out


def _swapped(words: Array, shape: tuple[int, int, int]) -> Array:
    """Words of codes [block, word, row] to groups of words, or back."""
    inner = words.reshape(len(words), *shape).swapaxes(-1, -2)
    return np.ascontiguousarray(inner).reshape(words.shape)


def _widened(words: Array) -> Array:
    """Codes as i16: words of codes 0 and 2, and of codes 1 and 3, of every word."""
    *outer, count = words.shape
    codes = words.view(np.int8).reshape(*outer, count, 2, 2).astype(np.int16)
    return _words(codes.swapaxes(-1, -2).reshape(*outer, 4 * count))


def _narrowed(words: Array) -> Array:
    """The bytes of widened codes."""
    *outer, count = words.shape
    codes = words.view(np.int16).reshape(*outer, count // 2, 2, 2).swapaxes(-1, -2)
    return _words(codes.astype(np.int8).reshape(*outer, 2 * count))


def _raised(words: Array) -> Array:
    """Codes with RAISE added as bytes, or the codes of such bytes."""
    return words ^ np.uint32(0x01010101 * RAISE)


def _tiles(layout: RowLayout, rows: int) -> list[tuple[int, int]]:
    """(first row, width) of every tile."""
    starts = range(0, rows, layout.tile)
    return [(s, layout.width(min(rows - s, layout.tile))) for s in starts]


def _blocks(layout: RowLayout, x: Array) -> tuple[Array, Array]:
    """Codes i8 [rows, blocks, size] and scales f32 [rows, blocks]."""
    rows, k = x.shape
    size = layout.size(k)
    blocks = x.astype(np.float32).reshape(rows, k // size if size else 0, size)
    peak = np.abs(blocks).max(axis=2, initial=0)
    usable = ~(peak < TINY)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        inverse = np.where(usable, np.float32(layout.limit) / peak, np.float32(0))
        inverse = inverse.astype(np.float32)
        codes = np.rint(blocks * inverse[..., None])
        scale = np.where(usable, peak * np.float32(1 / layout.limit), np.float32(0))
        scale = scale.astype(np.float32)
    return np.nan_to_num(codes, nan=0.0).astype(np.int8), scale


def _codes(layout: RowLayout, x: Array) -> Array:
    codes, _ = _blocks(layout, x)
    return _words(codes + np.int8(layout.offset))


def _words(array: Array) -> Array:
    return np.ascontiguousarray(array).view(np.uint32)


def _meta(layout: RowLayout, x: Array) -> Array:
    """The metadata of each block: u32 [rows, blocks, words]."""
    codes, scale = _blocks(layout, x)
    if layout.kind == "block":
        total = codes.sum(axis=2, dtype=np.int32)
        with np.errstate(invalid="ignore"):
            parts = [scale, -total, scale * total.astype(np.float32)]
        return np.stack([p.view(np.uint32) for p in parts], axis=2)
    pairs = [scale.view(np.uint32)[..., None]]
    if layout.kind == "unsigned":
        return pairs[0]
    if layout.kind == "shared":
        runs = codes.reshape(*codes.shape[:2], layout.block // RUN, RUN).sum(axis=3, dtype=np.int32)
        return np.concatenate([*pairs, (BIAS - 128 * runs).view(np.uint32)], axis=2)
    for run in (16, 32):
        sums = codes.reshape(*codes.shape[:2], SUPERBLOCK // run, run).sum(axis=3, dtype=np.int16)
        fours = sums.reshape(*sums.shape[:2], SUPERBLOCK // run // 4, 4)
        picked = np.stack([fours[..., list(p)] for p in _PAIRS], axis=3)
        pairs.append(_words(picked).reshape(*sums.shape[:2], SUPERBLOCK // run // 2))
    return np.concatenate(pairs, axis=2)
