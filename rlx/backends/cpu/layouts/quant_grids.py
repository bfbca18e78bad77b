"""Blocks of the grid formats (IQ1 to IQ3) in column tiles: what bits of the file's words go where.

A weight of these formats is a coordinate of a grid point, with a sign or a shift. A packed block is
words: its sub-block scales (nibbles), planes of the bits of indices above the lowest eight, then
for each run of 32 weights the low bytes of its indices and, where there are signs, a byte of them
for every eight weights. Types that store seven sign bits, the eighth being their parity, get it
here: a block takes 4 bytes more for that, 4 to 6 %.

Bits are moved by the operators that NumPy's arrays and the values of a kernel share, so that one
table serves both, and its inverse as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

Word = TypeVar("Word", bound=Any)
"""A word of 32 bits, or an array of them."""

RUNS = 8  # of 32 weights in a block


class BitMove(NamedTuple):
    """`width` bits from bit `source` of the file's words to bit `place` of the packed ones."""

    source: int
    place: int
    width: int


class GridWords(NamedTuple):
    """The packed words of a grid format. `parity` lists the words of sign bytes whose top bit is
    not in the file."""

    words: int
    file_words: int
    moves: tuple[BitMove, ...]
    parity: tuple[int, ...] = ()

    def pack(self, words: Sequence[Word]) -> list[Word]:
        """The packed words of a block from those of the file."""
        packed = _moved(words, self.words, self.moves)
        for word in self.parity:
            packed[word] = _with_parity(packed[word])
        return packed

    def unpack(self, words: Sequence[Word]) -> list[Word]:
        """The inverse of `pack`."""
        back = [BitMove(place, source, width) for source, place, width in self.moves]
        return _moved(words, self.file_words, back)


def _moved(words: Sequence[Word], count: int, moves: Sequence[BitMove]) -> list[Word]:
    out: dict[int, Word] = {}
    for source, place, width in moves:
        bits = words[source // 32]
        if width < 32:
            bits = (bits >> source % 32 & (1 << width) - 1) << place % 32
        at = place // 32
        out[at] = out[at] | bits if at in out else bits
    return [out[i] for i in range(count)]


def _with_parity(signs: Word) -> Word:
    """Bytes of seven sign bits; the eighth makes the number of minus signs even."""
    fold = signs
    for shift in (4, 2, 1):
        fold = fold ^ fold >> shift
    full: Word = signs | (fold & 0x01010101) << 7
    return full


class _Table:
    """Collects moves, bit by bit of the packed words; offsets in the file are in bytes."""

    def __init__(self) -> None:
        self.moves: list[BitMove] = []

    def word(self, at: int, word: int) -> None:
        self.moves.append(BitMove(8 * at, 32 * word, 32))

    def bits(self, source: int, place: int, width: int) -> None:
        self.moves.append(BitMove(source, place, width))

    def planes(
        self, count: int, field: Callable[[int], int], low: Sequence[tuple[int, int, int]]
    ) -> None:
        """Cut `count` fields, which begin at bit field(i): part (word, first bit, width) of each
        goes to a plane of such parts that begins at `word`."""
        for word, first, width in low:
            for i in range(count):
                self.bits(field(i) + first, 32 * word + width * i, width)


def _iq2_xxs() -> GridWords:
    """Per run four indices, then four times seven sign bits and a scale in one word."""
    table = _Table()
    for s in range(RUNS):
        aux = 64 * s + 32
        table.bits(aux + 28, 4 * s, 4)
        table.word(8 * s, 1 + 2 * s)
        for g in range(4):
            table.bits(aux + 7 * g, 32 * (2 + 2 * s) + 8 * g, 7)
    return GridWords(17, 16, tuple(table.moves), tuple(range(2, 17, 2)))


def _iq2_xs() -> GridWords:
    """Half words of nine bits of index and seven of sign, then scales."""
    table = _Table()
    table.word(64, 0)
    table.word(68, 1)
    table.planes(32, lambda i: 16 * i, [(2, 8, 1)])
    for i in range(32):
        low, byte = 32 * (3 + 2 * (i // 4)), 8 * (i % 4)
        table.bits(16 * i, low + byte, 8)
        table.bits(16 * i + 9, low + 32 + byte, 7)
    return GridWords(19, 18, tuple(table.moves), tuple(range(4, 19, 2)))


def _iq2_s() -> GridWords:
    """Low bytes of indices, signs, pairs of high bits, scales: all in whole words."""
    table = _Table()
    for i in range(2):
        table.word(72 + 4 * i, i)
        table.word(64 + 4 * i, 2 + i)
    for s in range(RUNS):
        table.word(4 * s, 4 + 2 * s)
        table.word(32 + 4 * s, 5 + 2 * s)
    return GridWords(20, 20, tuple(table.moves))


def _iq3_xxs() -> GridWords:
    """Eight indices per run; after them words of seven sign bits four times and a scale."""
    table = _Table()
    for s in range(RUNS):
        aux = 8 * 64 + 32 * s
        table.bits(aux + 28, 4 * s, 4)
        for g in range(4):
            table.bits(aux + 7 * g, 32 * (1 + 3 * s) + 8 * g, 7)
        table.word(8 * s, 2 + 3 * s)
        table.word(8 * s + 4, 3 + 3 * s)
    return GridWords(25, 24, tuple(table.moves), tuple(range(1, 25, 3)))


def _iq3_s() -> GridWords:
    """Low bytes of indices, their ninth bits, signs, scales: all in whole words."""
    table = _Table()
    table.word(104, 0)
    table.word(64, 1)
    table.word(68, 2)
    for s in range(RUNS):
        table.word(72 + 4 * s, 3 + 3 * s)
        table.word(8 * s, 4 + 3 * s)
        table.word(8 * s + 4, 5 + 3 * s)
    return GridWords(27, 27, tuple(table.moves))


def _iq1_s() -> GridWords:
    """Low bytes of indices; half words of four times three high bits, a scale and a shift."""
    table = _Table()
    table.planes(RUNS, lambda s: 8 * 32 + 16 * s, [(0, 12, 4)])
    table.planes(32, lambda i: 8 * 32 + 16 * (i // 4) + 3 * (i % 4), [(1, 0, 2), (3, 2, 1)])
    for s in range(RUNS):
        table.word(4 * s, 4 + s)
    return GridWords(12, 12, tuple(table.moves))


def _iq1_m() -> GridWords:
    """Low bytes of indices; nibbles of three high bits and a shift; half words of four scales of
    three bits and a nibble of the f16 scale, which is put together in the low half of a word."""
    table = _Table()
    scales = 8 * 48
    for i in range(4):
        table.bits(scales + 16 * i + 12, 4 * i, 4)
    table.planes(16, lambda i: scales + 16 * (i // 4) + 3 * (i % 4), [(1, 0, 2)])
    for i in range(16):
        table.bits(scales + 16 * (i // 4) + 3 * (i % 4) + 2, 16 + i, 1)
    table.planes(32, lambda i: 8 * 32 + 4 * i, [(2, 0, 2), (4, 2, 1), (5, 3, 1)])
    for s in range(RUNS):
        table.word(4 * s, 6 + s)
    return GridWords(14, 14, tuple(table.moves))


GRID_WORDS: dict[str, GridWords] = {
    "IQ2_XXS": _iq2_xxs(),
    "IQ2_XS": _iq2_xs(),
    "IQ2_S": _iq2_s(),
    "IQ3_XXS": _iq3_xxs(),
    "IQ3_S": _iq3_s(),
    "IQ1_S": _iq1_s(),
    "IQ1_M": _iq1_m(),
}
