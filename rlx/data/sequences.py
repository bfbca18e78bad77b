"""Sequences of different lengths as rectangles: padded, or several packed into one row."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rlx.data.sources import Data
from rlx.errors import InputError, OptionError


def pad(
    sequences: Sequence[Any], length: int | None = None, *, value: Any = 0, multiple: int = 1,
) -> tuple[Data, Data]:  # fmt: skip
    """Sequences with `value` behind them, up to the longest or to `length`, and to a multiple of
    `multiple`; and which elements are theirs, as booleans."""
    rows = [np.asarray(s) for s in sequences]
    longest = max((len(r) for r in rows), default=0)
    wanted = longest if length is None else length
    if longest > wanted:
        raise InputError(
            "a sequence that is too long", where="pad", got=longest, expected=f"at most {wanted}"
        )
    wanted = -(-wanted // multiple) * multiple
    made = np.full((len(rows), wanted), value, _type_of(rows))
    mask = np.zeros(made.shape, bool)
    for i, row in enumerate(rows):
        made[i, : len(row)], mask[i, : len(row)] = row, True
    return made, mask


class Packed(NamedTuple):
    """Rows of several sequences. Segments count them from 1 in each row and are 0 where nothing is;
    positions begin at 0 with each sequence."""

    tokens: Data
    segments: Data
    positions: Data


def pack(
    sequences: Sequence[Any], length: int, *, value: Any = 0, too_long: str = "error"
) -> Packed:
    """Sequences packed into rows of `length`, few of them: best fit, the longest first. One longer
    than a row is an error, or `too_long` is "split" or "cut"."""
    if too_long not in ("error", "split", "cut"):
        raise OptionError("no such way", where="pack", got=too_long, expected="error, split, cut")
    parts = [row for s in sequences for row in _fitting(np.asarray(s), length, too_long)]
    rows = pack_rows([len(p) for p in parts], length)
    tokens = np.full((len(rows), length), value, _type_of(parts))
    segments, positions = (np.zeros(tokens.shape, np.int32) for _ in range(2))
    for i, chosen in enumerate(rows):
        at = 0
        for k, part in enumerate(parts[j] for j in chosen):
            where = slice(at, at + len(part))
            tokens[i, where], segments[i, where] = part, k + 1
            positions[i, where] = np.arange(len(part))
            at += len(part)
    return Packed(tokens, segments, positions)


def _fitting(row: Data, length: int, too_long: str) -> list[Data]:
    if len(row) <= length:
        return [row] if len(row) else []
    if too_long == "error":
        raise InputError(
            "a sequence that is too long", where="pack", got=len(row), expected=f"at most {length}",
            hint='too_long="split" or "cut"',
        )  # fmt: skip
    return [row[i : i + length] for i in range(0, len(row) if too_long == "split" else 1, length)]


def pack_rows(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Which sequences share a row, by their lengths: best fit, the longest first."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # what is left in a row, and the row; sorted
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect_left(room, (lengths[i], 0))
        left, row = room.pop(at) if at < len(room) else (capacity, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(i)
        insort(room, (left - lengths[i], row))
    return rows


def _type_of(rows: Sequence[Data]) -> Any:
    filled = [r for r in rows if len(r)]
    return np.result_type(*filled) if filled else np.dtype(np.int32)
