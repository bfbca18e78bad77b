"""Finds every token of a vocabulary that occurs in a text, without a table of all tokens.

A string's hash is Σ T[byte i]·P^i modulo 2^64, so that two prefix sums give the hash of any
substring, and that of two strings in a row follows from theirs. The index of a vocabulary is its
hashes, sorted: nothing is built from it at a start. What has the hash of a token is compared with
it, byte by byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.formats.gguf import StringArray
from rlx.support.records import dataclass

Words = npt.NDArray[np.uint64]
Numbers = npt.NDArray[Any]

LONGEST = (1 << 16) - 1
"""Bytes of a string: powers are tabulated up to here."""
_MOST_EQUAL = 16  # tokens of one hash; more are no accident
_SIEVE = 21  # bits of a hash that sieve out most that no token has


def _scrambled(numbers: Words) -> Words:
    """SplitMix64 of the numbers: a fixed table that no text was made for."""
    z = numbers * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    scrambled: Words = z ^ (z >> np.uint64(31))
    return scrambled


_BASE = 0x2545F4914F6CDD1D  # P: odd, so that it has an inverse
_BYTES = _scrambled(np.arange(1, 257, dtype=np.uint64))


class _Powers:
    """Powers of P and of its inverse, made on first use."""

    @cached_property
    def up(self) -> Words:
        return self._table(_BASE)

    @cached_property
    def down(self) -> Words:
        return self._table(pow(_BASE, -1, 1 << 64))

    def _table(self, base: int) -> Words:
        factors = np.full(2 * LONGEST + 1, base, np.uint64)
        factors[0] = 1
        table: Words = np.cumprod(factors)
        return table


_powers = _Powers()


def _prefixes(raw: npt.NDArray[np.uint8]) -> Words:
    """Prefix sums of the terms of a text's hash."""
    sums = np.zeros(len(raw) + 1, np.uint64)
    np.cumsum(_BYTES[raw] * _powers.up[: len(raw)], out=sums[1:])
    return sums


def hash_strings(data: Any, starts: Numbers, ends: Numbers) -> Words | None:
    """The hash of every string; None where one is too long. They lie one after the other."""
    raw = np.frombuffer(data, np.uint8)
    hashes = np.zeros(len(starts), np.uint64)
    first = 0
    while first < len(starts):
        base = int(starts[first])
        last = int(np.searchsorted(ends[first:], base + LONGEST, "right")) + first
        if last == first or starts[last - 1] < base:
            return None
        sums = _prefixes(raw[base : int(ends[last - 1])])
        a, b = starts[first:last] - base, ends[first:last] - base
        hashes[first:last] = (sums[b] - sums[a]) * _powers.down[a]
        first = last
    return hashes


@dataclass(frozen=True)
class SortedHashes:
    """Hashes of strings in order, and whose they are."""

    hashes: Words
    numbers: npt.NDArray[np.uint32]

    @staticmethod
    def of(hashes: Words) -> SortedHashes:
        order = np.argsort(hashes, kind="stable")
        return SortedHashes(hashes[order], order.astype(np.uint32))

    def has(self, values: Words) -> npt.NDArray[np.bool_]:
        """Which of these are hashes of strings."""
        at = np.minimum(self.hashes.searchsorted(values), len(self.hashes) - 1)
        found: npt.NDArray[np.bool_] = self.hashes[at] == values
        return found

    def run(self, value: int) -> list[int]:
        """The numbers of all strings with this hash, in order."""
        key = np.uint64(value)
        a, b = self.hashes.searchsorted(key), self.hashes.searchsorted(key, "right")
        found: list[int] = self.numbers[a:b].tolist()
        return found

    @property
    def longest_run(self) -> int:
        h = self.hashes
        edges = np.flatnonzero(np.concatenate([[True], h[1:] != h[:-1], [True]]))
        return int(np.diff(edges).max(initial=0))


class TokenIndex(Mapping[str, int]):
    """The tokens of a vocabulary: by text, the first one where several are equal, and by the text
    that they occur in."""

    def __init__(self, texts: StringArray, index: SortedHashes, ids: Numbers | None = None) -> None:
        """`ids` are those of the texts, where they do not just count."""
        self.texts, self._index, self._ids = texts, index, ids
        counts = np.bincount(texts.ends - texts.starts)  # none is longer than LONGEST
        self._lengths: list[int] = [n for n in np.flatnonzero(counts).tolist() if n]

    @cached_property
    def _sieve(self) -> npt.NDArray[np.bool_]:
        seen = np.zeros(1 << _SIEVE, np.bool_)
        seen[self._index.hashes >> np.uint64(64 - _SIEVE)] = True
        return seen

    def found_in(self, text: bytes) -> dict[bytes, tuple[int, list[int]]]:
        """Every token that occurs in a text of at most `LONGEST` bytes: its hash, and the places
        of its equals in the table, in order."""
        sums = _prefixes(np.frombuffer(text, np.uint8))
        found: dict[bytes, tuple[int, list[int]]] = {}
        for size in self._lengths:
            if size > len(text):
                break
            hashes = (sums[size:] - sums[:-size]) * _powers.down[: len(sums) - size]
            at = np.flatnonzero(self._sieve[hashes >> np.uint64(64 - _SIEVE)])
            at = at[self._index.has(hashes[at])]
            for start, value in zip(at.tolist(), hashes[at].tolist(), strict=True):
                part = text[start : start + size]
                if part not in found and (places := self._places(part, value)):
                    found[part] = value, places
        return found

    def _places(self, text: bytes, value: int) -> list[int]:
        return [i for i in self._index.run(value) if self.texts.raw(i) == text]

    def id_at(self, place: int) -> int:
        return place if self._ids is None else int(self._ids[place])

    @cached_property
    def _twins(self) -> frozenset[int]:
        """Places of tokens whose hash others have too."""
        h = self._index.hashes
        same = h[1:] == h[:-1]
        paired = np.concatenate([[False], same]) | np.concatenate([same, [False]])
        return frozenset(self._index.numbers[paired].tolist())

    def first(self, place: int) -> int:
        """The id of the first token with the text of the one at `place`."""
        return self[self.texts[place]] if place in self._twins else self.id_at(place)

    def places(self, text: str) -> list[int]:
        """Where the tokens with this text are in the table."""
        raw = text.encode("utf-8", "surrogatepass")
        if not 0 < len(raw) <= LONGEST:
            return []
        value = int(_prefixes(np.frombuffer(raw, np.uint8))[-1])
        return self._places(raw, value)

    def __getitem__(self, text: str) -> int:
        places = self.places(text)
        if not places:
            raise KeyError(text)
        return self.id_at(places[0])

    def __len__(self) -> int:
        return len(self.texts)

    def __iter__(self) -> Iterator[str]:
        return iter(self.texts)


class MergeIndex:
    """The merges of a vocabulary, by the token they make. A merge is a string `left right`."""

    def __init__(self, lines: StringArray, index: SortedHashes, cuts: Numbers) -> None:
        """`cuts` are the lengths of the left parts."""
        self._lines, self._index, self._cuts = lines, index, cuts

    def __len__(self) -> int:
        return len(self._lines)

    def usable(self, found: Mapping[bytes, tuple[int, list[int]]]) -> list[tuple[bytes, bytes]]:
        """The merges of which all three tokens were found, in order."""
        ranked: list[tuple[int, bytes, bytes]] = []
        values = np.array([value for value, _ in found.values()], np.uint64)
        firsts = self._index.hashes.searchsorted(values).tolist()
        lasts = self._index.hashes.searchsorted(values, "right").tolist()
        for token, a, b in zip(found, firsts, lasts, strict=True):
            for rank in self._index.numbers[a:b].tolist() if a < b else ():
                line, cut = self._lines.raw(rank), int(self._cuts[rank])
                left, right = line[:cut], line[cut + 1 :]
                if left in found and right in found and left + right == token:
                    ranked.append((rank, left, right))
        return [(left, right) for _, left, right in sorted(ranked)]


# -- building -------------------------------------------------------------------------------------


def index_tokens(texts: StringArray) -> SortedHashes | None:
    """The index of tokens; None for those that need looking at one by one: not UTF-8, endlessly
    long, or many alike."""
    if not texts.is_utf8():
        return None
    hashes = hash_strings(texts.data, texts.starts, texts.ends)
    if hashes is None:
        return None
    found = SortedHashes.of(hashes)
    return found if found.longest_run <= _MOST_EQUAL else None


def index_merges(
    lines: StringArray, cuts: Numbers | None = None
) -> tuple[SortedHashes, Numbers] | None:
    """The index of merges by what they make, and their cuts (at the first space unless given);
    None where one is not two tokens, or cannot be indexed."""
    data, starts, ends = lines.data, lines.starts, lines.ends
    if not len(lines):
        return SortedHashes.of(np.zeros(0, np.uint64)), np.zeros(0, np.uint16)
    if not lines.is_utf8():
        return None
    if cuts is None:
        first = int(starts[0])
        spaces = np.flatnonzero(np.frombuffer(data, np.uint8)[first : int(ends[-1])] == 0x20)
        spaces = np.append(spaces + first, np.iinfo(np.int64).max)
        cuts = spaces[np.searchsorted(spaces, starts)] - starts
    if (cuts < 1).any() or (starts + cuts + 1 >= ends).any():
        return None
    left = hash_strings(data, starts, starts + cuts)
    right = hash_strings(data, starts + cuts + 1, ends)
    if left is None or right is None:
        return None
    return SortedHashes.of(left + _powers.up[cuts] * right), cuts.astype(np.uint16)
