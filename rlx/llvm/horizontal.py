"""Horizontal reductions of many vectors at once, and transposition in registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import add

from rlx.llvm.builder import Function, Value

Join = Callable[[Value, Value], Value]


def reduce_lanes(f: Function, vectors: Sequence[Value], size: int, join: Join = add) -> list[Value]:
    """The sum over the lanes of each vector, as vectors of `size` sums.

    Each step reduces two vectors to one, so n sums cost n - 1 additions, not n log n.
    """
    lanes = vectors[0].type.lanes
    count = 1 << (len(vectors) - 1).bit_length()
    now = [*vectors, *[vectors[-1]] * (count - len(vectors))]
    segment = lanes
    while segment > 1:
        if len(now) > 1:
            now = [_pair(f, a, b, segment, join) for a, b in zip(now[::2], now[1::2], strict=True)]
        else:
            now = [_halve(f, now[0], segment, join)]
        segment //= 2
    return _cut(f, now, size)[: len(vectors) // size]


def _pair(f: Function, a: Value, b: Value, segment: int, join: Join) -> Value:
    """Each segment of a, then each of b, reduced to half its length."""
    low = [s + i for s in range(0, 2 * a.type.lanes, segment) for i in range(segment // 2)]
    return join(f.shuffle(a, b, low), f.shuffle(a, b, [i + segment // 2 for i in low]))


def _halve(f: Function, a: Value, segment: int, join: Join) -> Value:
    low = [s + i for s in range(0, a.type.lanes, segment) for i in range(segment // 2)]
    if len(low) == 1:
        return join(f.extract(a, 0), f.extract(a, 1))
    return join(f.shuffle(a, None, low), f.shuffle(a, None, [i + segment // 2 for i in low]))


def _cut(f: Function, sums: Sequence[Value], size: int) -> list[Value]:
    """The sums regrouped as vectors of `size` lanes."""
    lanes = sums[0].type.lanes
    if lanes >= size:
        return [f.slice(v, i, size) for v in sums for i in range(0, lanes, size)]
    joined = list(sums)
    while joined[0].type.lanes < size:
        joined = [f.concat(a, b) for a, b in zip(joined[::2], joined[1::2], strict=True)]
    return joined


def transpose_squares(f: Function, rows: Sequence[Value]) -> list[Value]:
    """Transposes squares of len(rows) rows and as many neighbouring lanes, each in its place.

    Squares of four lanes at first, by interleaving: those are parts of a register, within which a
    shuffle of two registers is one instruction. Then they change places.
    """
    size, lanes = len(rows), rows[0].type.lanes
    small = min(size, 4)
    now = [x for i in range(0, size, small) for x in _transpose_small(f, rows[i : i + small])]
    apart = small
    while apart < size:
        low = [i if not i & apart else i - apart + lanes for i in range(lanes)]
        high = [i + apart for i in low]
        for i in range(size):
            if not i & apart:
                a, b = now[i], now[i + apart]
                now[i], now[i + apart] = f.shuffle(a, b, low), f.shuffle(a, b, high)
        apart *= 2
    return now


def _transpose_small(f: Function, rows: Sequence[Value]) -> list[Value]:
    """Squares of one, two or four rows."""
    size, lanes = len(rows), rows[0].type.lanes
    low = [s + i // 2 + i % 2 * lanes for s in range(0, lanes, size) for i in range(size)]
    high = [i + size // 2 for i in low]
    groups = [[row] for row in rows]
    while len(groups) > 1:
        # rows half of them apart are interleaved until one group has them all
        half = len(groups) // 2
        both = zip(groups[:half], groups[half:], strict=True)
        groups = [
            [f.shuffle(x, y, order) for x, y in zip(a, b, strict=True) for order in (low, high)]
            for a, b in both
        ]
    return groups[0]
