"""Quantised weights in column tiles, in the order in which integer dot products read them.

A column tile holds 16 output channels: columns of the result, rows of the stored weight [N, K]. A
line of 64 bytes holds the same 4-byte word of all 16, so that a vector of 32-bit sums has one lane
per channel and no horizontal reduction is needed. What a block has beside its words (its f16 scale,
say) is laid out in whole lines for a few blocks together, a group:

    tile   [group][fields of the group's blocks, each [block][column] | its blocks, [word][column]]

Memory is read once from front to back. A tile takes exactly the bytes of its rows, rounded up to
lines (some grid formats take up to 6 % more, see `quant_grids`); the last tile is padded with
zeros. A pair (gate and up) holds two weights of one shape, whose tiles alternate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rlx.backends.cpu.layouts.quant_grids import GRID_WORDS, GridWords
from rlx.ir.quant.scheme import GGUF_SCHEMES, QuantScheme, decode
from rlx.support.records import dataclass

Array = npt.NDArray[Any]

TILE_COLUMNS = 16  # output channels of a column tile
LINE = 64  # bytes: a word of each of them


class BlockMap(NamedTuple):
    """Where the parts of a GGUF block go.

    Bytes `first` to `last` are words, `fields` (offset, size) are kept apart from them. `order` is
    the order in which words are read, where that is not the file's; `top` is the offset of the word
    of high bits, which is rearranged (see `_spread`); `grid` moves the bits of the words.
    """

    first: int
    last: int
    fields: tuple[tuple[int, int], ...] = ()
    order: tuple[int, ...] | None = None
    top: int | None = None
    grid: GridWords | None = None

    @property
    def words(self) -> int:
        return (self.last - self.first) // 4 if self.grid is None else self.grid.words


def _q6_k_order() -> tuple[int, ...]:
    """Q6_K: scales first, then low and high bits of the same weights together."""
    triples = [(16 * h + g, 16 * h + 8 + g, 32 + 8 * h + g) for h in range(2) for g in range(8)]
    return (*range(48, 52), *(word for triple in triples for word in triple))


def _grid_map(grid: GridWords, first: int) -> BlockMap:
    """Words that bits are moved between, with the f16 scale before them or among them."""
    fields = ((0, 2),) if first else ()
    return BlockMap(first, first + 4 * grid.file_words, fields, grid=grid)


def _high_bits_first(scales: Sequence[int], high: int, codes: int, last: int) -> tuple[int, ...]:
    """Scales, then words of high bits alternating with the first words of codes, which are read
    with them, then the other codes: memory is read in order."""
    pairs = [w for g in range(8) for w in (high + g, codes + g)]
    return (*scales, *pairs, *range(codes + 8, last))


BLOCKS: dict[str, BlockMap] = {
    "Q4_0": BlockMap(2, 18, ((0, 2),)),
    "Q4_1": BlockMap(0, 20),
    "Q5_0": BlockMap(2, 22, ((0, 2),), top=2),
    "Q5_1": BlockMap(0, 24, top=4),
    "Q8_0": BlockMap(2, 34, ((0, 2),)),
    "IQ4_NL": BlockMap(2, 18, ((0, 2),)),
    "MXFP4": BlockMap(1, 17, ((0, 1),)),
    "NVFP4": BlockMap(0, 36),
    "TQ1_0": BlockMap(0, 52, ((52, 2),)),
    "TQ2_0": BlockMap(0, 64, ((64, 2),)),
    "Q2_K": BlockMap(0, 84),
    "Q3_K": BlockMap(0, 108, ((108, 2),), order=_high_bits_first((24, 25, 26), 0, 8, 24)),
    "Q4_K": BlockMap(0, 144),
    "Q5_K": BlockMap(0, 176, order=_high_bits_first(range(4), 4, 12, 44)),
    "Q6_K": BlockMap(0, 208, ((208, 2),), order=_q6_k_order()),
    "IQ4_XS": BlockMap(0, 136),
    **{name: _grid_map(grid, 0 if name == "IQ1_M" else 2) for name, grid in GRID_WORDS.items()},
}


@dataclass(frozen=True)
class ColumnTileLayout:
    """The layout of a column tile of rows of k weights of a scheme."""

    scheme: QuantScheme
    block: int  # weights that share a scale: the whole row where the scheme has no blocks
    words: int  # of a block
    fields: tuple[int, ...]  # sizes of the fields of a block
    blocks: int

    @property
    def group(self) -> int:
        """Blocks whose fields together fill whole lines."""
        return max([LINE // (TILE_COLUMNS * size) for size in self.fields], default=1)

    @property
    def field_offsets(self) -> list[int]:
        """Byte offset of each field in a group, then that of the blocks."""
        return [
            self.group * TILE_COLUMNS * sum(self.fields[:i]) for i in range(len(self.fields) + 1)
        ]

    @property
    def group_bytes(self) -> int:
        return self.field_offsets[-1] + self.group * self.words * LINE

    @property
    def tile_bytes(self) -> int:
        """The last group may have fewer blocks; its fields take whole lines all the same."""
        groups = -(-self.blocks // self.group)
        missing = groups * self.group - self.blocks
        return groups * self.group_bytes - missing * self.words * LINE


@cache
def column_tile_layout(scheme: QuantScheme, k: int) -> ColumnTileLayout | None:
    """The layout for rows of k weights, or None where there is none."""
    if scheme.name in BLOCKS:
        found = BLOCKS[scheme.name]
        block, words = scheme.block_size, found.words
        sizes = [size for _, size in found.fields]
    else:
        block = scheme.block or k
        if scheme.ggml_type is not None or scheme.packed_dtype not in ("i8", "u8"):
            return None
        if not block or block % 16:
            return None
        words, sizes = scheme.row_bytes(block) // 4, [4, 1] if scheme.has_zero_point else [4]
    return ColumnTileLayout(scheme, block, words, tuple(sizes), k // block)


def column_tile_count(n: int, pair: bool = False) -> int:
    """Column tiles of n output channels (of each weight of a pair)."""
    return -(-n // TILE_COLUMNS) * (2 if pair else 1)


def pack_column_tiles(
    scheme: QuantScheme, w: Array, scale: Array | None, zp: Array | None, pair: bool = False
) -> Array:
    """Rows [..., N, row] as tiles [..., tiles, bytes]; the weights of a pair come concatenated."""
    layout = column_tile_layout(scheme, scheme.row_elements(w.shape[-1]))
    assert layout is not None, f"{scheme} has no column tiles of rows of {w.shape[-1]} bytes"
    parts = [_cut_tiles(p, pair) for p in (w, scale, zp) if p is not None]
    blocks = [p.view(np.uint8).reshape(len(p), TILE_COLUMNS, layout.blocks, -1) for p in parts]
    body, fields = _split(layout, blocks[0])
    groups = np.zeros((len(body), -(-layout.blocks // layout.group), layout.group_bytes), np.uint8)
    for place, source in zip(_places(layout, groups), [*fields, *blocks[1:], body], strict=True):
        transposed = source.swapaxes(1, 2)
        if source is body:
            transposed = np.ascontiguousarray(body).view(np.uint32).transpose(0, 2, 3, 1)
        for j in range(layout.group):
            chosen = transposed[:, j :: layout.group]
            place[:, : chosen.shape[1], j] = chosen
    tiles = groups.reshape(len(body), -1)[:, : layout.tile_bytes]
    return np.ascontiguousarray(tiles).reshape(*w.shape[:-2], -1, layout.tile_bytes)


def _places(layout: ColumnTileLayout, groups: Array) -> list[Array]:
    """Views of groups [tile, group, bytes]: each field [.., block, column, bytes], then the words
    [.., block, word, column]."""
    found = []
    for at, size in zip(layout.field_offsets, layout.fields, strict=False):
        part = groups[..., at : at + layout.group * TILE_COLUMNS * size]
        found.append(part.reshape(*groups.shape[:2], layout.group, TILE_COLUMNS, size))
    words = groups[..., layout.field_offsets[-1] :].view(np.uint32)
    found.append(words.reshape(*groups.shape[:2], layout.group, layout.words, TILE_COLUMNS))
    return found


def _cut_tiles(rows: Array, pair: bool) -> Array:
    """[..., N, x] as [tiles, 16, x], padded with zeros."""
    n, width = rows.shape[-2:]
    halves = 2 if pair else 1
    cut = rows.reshape(-1, halves, n // halves, width)
    count = -(-cut.shape[2] // TILE_COLUMNS)
    if not pair and cut.shape[2] == count * TILE_COLUMNS:
        return np.ascontiguousarray(cut).reshape(-1, TILE_COLUMNS, width)
    filled = np.zeros((len(cut), halves, count * TILE_COLUMNS, width), rows.dtype)
    filled[:, :, : cut.shape[2]] = cut
    tiles = filled.reshape(len(cut), halves, count, TILE_COLUMNS, width).swapaxes(1, 2)
    return np.ascontiguousarray(tiles).reshape(-1, TILE_COLUMNS, width)


def _split(layout: ColumnTileLayout, rows: Array) -> tuple[Array, list[Array]]:
    """Blocks [..., bytes] as (words, fields)."""
    if layout.scheme.ggml_type is None:
        return (_nibbles_by_word(rows) if layout.scheme.packed_dtype == "u8" else rows), []
    found = BLOCKS[layout.scheme.name]
    fields = [rows[..., at : at + size] for at, size in found.fields]
    if found.top is not None:
        rows = rows.copy()
        top = rows[..., found.top : found.top + 4]
        top[...] = _spread(top)
    body = rows[..., found.first : found.last]
    if found.grid is not None:
        body = _by_words(found.grid.pack, body)
    if found.order is not None:
        words = np.ascontiguousarray(body).view(np.uint32)
        body = words.take(found.order, axis=-1).view(np.uint8)
    return body, fields


def _by_words(move: Callable[[Sequence[Array]], list[Array]], body: Array) -> Array:
    """Bytes [..., 4 * words], moved word by word."""
    words = np.ascontiguousarray(body).view(np.uint32)
    moved = np.stack(move([words[..., i] for i in range(words.shape[-1])]), axis=-1)
    return moved.astype(np.uint32).view(np.uint8)


def _spread(top: Array) -> Array:
    """A word whose bit k belongs to weight k, as one whose byte b has bit g for weight 4g + b."""
    bits = np.unpackbits(top, axis=-1, bitorder="little")
    transposed = bits.reshape(*bits.shape[:-1], 8, 4).swapaxes(-1, -2)
    return np.packbits(transposed, axis=-1, bitorder="little")[..., 0]


def _gather_bits(top: Array) -> Array:
    """The inverse of `_spread`."""
    bits = np.unpackbits(top, axis=-1, bitorder="little")
    transposed = bits.reshape(*bits.shape[:-1], 4, 8).swapaxes(-1, -2).reshape(bits.shape)
    return np.packbits(transposed, axis=-1, bitorder="little")


def _nibbles_by_word(rows: Array) -> Array:
    """Bytes of two neighbours as words of eight weights: the first four in the low nibbles."""
    both = np.stack([rows & 15, rows >> 4], axis=-1)
    eight = both.reshape(*rows.shape[:-1], -1, 2, 4)
    joined: Array = eight[..., 0, :] | eight[..., 1, :] << 4
    return joined.reshape(rows.shape)


def _nibbles_by_pair(rows: Array) -> Array:
    """The inverse of `_nibbles_by_word`."""
    words = rows.reshape(*rows.shape[:-1], -1, 4)
    eight = np.concatenate([words & 15, words >> 4], axis=-1)
    joined: Array = eight[..., ::2] | eight[..., 1::2] << 4
    return joined.reshape(rows.shape)


def unpack_column_tiles(
    scheme: QuantScheme, packed: Array, n: int, k: int, pair: bool = False
) -> Array:
    """The f32 weights [..., N, K] of column tiles; of a pair [..., 2, N, K]."""
    layout = column_tile_layout(scheme, k)
    assert layout is not None
    *outer, tiles, width = packed.shape
    count = -(-layout.blocks // layout.group)
    full = np.zeros((packed.size // width, count * layout.group_bytes), np.uint8)
    full[:, :width] = packed.reshape(-1, width)
    *fields, words = _places(layout, full.reshape(-1, count, layout.group_bytes))
    merged = [p.reshape(len(full), -1, *p.shape[3:])[:, : layout.blocks] for p in (*fields, words)]
    body = np.ascontiguousarray(merged.pop().transpose(0, 3, 1, 2)).view(np.uint8)
    rows = _dequantized(layout, body, [np.ascontiguousarray(f.swapaxes(1, 2)) for f in merged])
    halves = 2 if pair else 1
    cut = rows.reshape(-1, tiles // halves, halves, TILE_COLUMNS, k).swapaxes(1, 2)
    cut = cut.reshape(*outer, halves, -1, k)[..., :n, :]
    return cut if pair else cut[..., 0, :, :]


def _dequantized(layout: ColumnTileLayout, body: Array, fields: list[Array]) -> Array:
    """Blocks [tile, 16, block, bytes] and their fields as f32 weights."""
    scheme = layout.scheme
    shape = body.shape[:2]
    if scheme.ggml_type is None:
        scale = fields[0].view(np.float32)[..., 0]
        if scheme.packed_dtype == "u8":
            return decode(scheme, _nibbles_by_pair(body).reshape(*shape, -1), scale, *_zp(fields))
        signed = [z.view(np.int8) for z in _zp(fields)]
        return decode(scheme, body.view(np.int8).reshape(*shape, -1), scale, *signed)
    found = BLOCKS[scheme.name]
    rows = np.zeros((*body.shape[:-1], scheme.bytes_per_block), np.uint8)
    if found.order is not None:
        words = np.empty_like(body).view(np.uint32)
        words[..., list(found.order)] = body.view(np.uint32)
        body = words.view(np.uint8)
    if found.grid is not None:
        body = _by_words(found.grid.unpack, body)
    rows[..., found.first : found.last] = body
    for (at, size), field in zip(found.fields, fields, strict=True):
        rows[..., at : at + size] = field
    if found.top is not None:
        top = rows[..., found.top : found.top + 4]
        top[...] = _gather_bits(top)
    return decode(scheme, rows.reshape(*shape, -1))


def _zp(fields: list[Array]) -> list[Array]:
    return [f[..., 0] for f in fields[1:]]


TILED_SCHEMES = tuple(GGUF_SCHEMES[name] for name in BLOCKS)
