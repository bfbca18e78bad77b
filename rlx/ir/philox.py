"""Philox4x32-10, a counter-based random number generator.

J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any

_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
_MULTIPLY = np.uint64(MULTIPLIERS[0]), np.uint64(MULTIPLIERS[1])
_WEYL = np.uint64(WEYL[0]), np.uint64(WEYL[1])
ROUNDS = 10


def philox4x32(counter: Array, key: Array) -> Array:
    """Four 32-bit words for counters `[..., 4]` and keys `[..., 2]` of 32-bit words."""
    c0, c1, c2, c3 = (np.asarray(counter)[..., i].astype(np.uint64) for i in range(4))
    k0, k1 = (np.asarray(key)[..., i].astype(np.uint64) for i in range(2))
    for _ in range(ROUNDS):
        a, b = c0 * _MULTIPLY[0], c2 * _MULTIPLY[1]
        c0, c1, c2, c3 = (b >> _SHIFT) ^ c1 ^ k0, b & _LOW, (a >> _SHIFT) ^ c3 ^ k1, a & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def draw_words(seed: int, counter: int, rows: int) -> Array:
    """One 32-bit word per row: word 0 of Philox with key `seed` at counter (counter, row)."""
    row = np.arange(rows, dtype=np.uint64)
    step = np.full(rows, counter, np.uint64)
    words = np.stack([step & _LOW, step >> _SHIFT, row & _LOW, row >> _SHIFT], axis=-1)
    key = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint64)
    return philox4x32(words, key)[:, 0]


def uniform(words: Array) -> Array:
    """All 32 bits of each word as f64 in [0, 1): word · 2⁻³²."""
    return np.asarray(words).astype(np.float64) * 2.0**-32
