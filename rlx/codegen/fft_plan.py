"""How a Fourier transform of a given length is done, and the tables for it.

A length whose prime factors are small is a sequence of passes, one per factor. Any other becomes a
convolution with a chirp, of a length that is (Bluestein): jk = (j² + k² − (j − k)²) / 2.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from rlx.support.records import dataclass

LARGEST_FACTOR = 61
Table = npt.NDArray[np.float32]


def factors(n: int) -> list[int]:
    """Radices of the passes: fours first, then the other prime factors in order."""
    found, rest = [], n
    for p in (4, 2, 3, 5):
        while rest % p == 0:
            found.append(p)
            rest //= p
    p = 7
    while p * p <= rest:
        while rest % p == 0:
            found.append(p)
            rest //= p
        p += 2
    return found + [rest] * (rest > 1)


def is_direct(n: int) -> bool:
    return all(p <= LARGEST_FACTOR for p in factors(n))


@dataclass(frozen=True)
class Pass:
    """One factor: `groups` sets of twiddles, each for `run` neighbouring butterflies."""

    radix: int
    groups: int
    run: int
    table: int  # where its twiddles begin, in complex numbers


@cache
def passes(n: int) -> tuple[Pass, ...]:
    found, run, table = [], 1, 0
    for radix in factors(n):
        groups = n // (run * radix)
        found.append(Pass(radix, groups, run, table))
        table += groups * (radix - 1)
        run *= radix
    return tuple(found)


def roots(n: int, powers: npt.NDArray[np.int64]) -> npt.NDArray[np.complex128]:
    """exp(−2πi·p/n); the angle is reduced in integers first."""
    found: npt.NDArray[np.complex128] = np.exp(-2j * np.pi * (powers % n) / n)
    return found


def twiddles(n: int) -> Table:
    """For each pass, group g and j = 1 … radix − 1: exp(−2πi·g·j / (radix·groups))."""
    parts = [
        roots(p.radix * p.groups, np.arange(p.groups)[:, None] * np.arange(1, p.radix)).ravel()
        for p in passes(n)
    ]
    return as_pairs(np.concatenate([*parts, np.ones(1)]))


def as_pairs(values: npt.NDArray[np.complex128]) -> Table:
    """Complex numbers as neighbouring f32 parts."""
    return values.astype(np.complex64).view(np.float32)


@dataclass(frozen=True)
class Chirp:
    """Bluestein's convolution: its length and tables."""

    length: int
    chirp: Table  # exp(−πi·j²/n)
    kernel: Table  # the transform of the opposite chirp, over the length


@cache
def chirp(n: int) -> Chirp:
    length = 1
    while length < 2 * n - 1:
        length *= 2
    j = np.arange(n)
    w = roots(2 * n, j * j)
    other = np.zeros(length, np.complex128)
    other[:n] = w.conj()
    other[length - n + 1 :] = w[1:][::-1].conj()
    return Chirp(length, as_pairs(w), as_pairs(np.fft.fft(other) / length))


def working_length(n: int) -> int:
    """Complex numbers that a transform of `n` needs room for."""
    return n if is_direct(n) else chirp(n).length
