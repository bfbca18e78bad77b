"""Encoders of IQ2 and IQ3: the codebook points and scales with the least (weighted) squared error.

A run of 16 or 32 weights has a scale d · (2 l + 1), d of the superblock. For a scale the best point
of each group of eight or four weights is found exactly: the error of all points is one matmul.

    Σ w (|x| - s g)² = Σ w x² + s · (s w, w |x|) · (g², -2 g)

1. A scale for each run, from points near the rounded weights (a table of 6561 or 4096 cells).
2. d from the largest of them; for each run the best of three integers l, with exact points.
3. The least-squares d for these points, and exact points for it.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from rlx.ir.quant.blocks import F32, Array, BestScale, as_f16, bits_of, encoder, reciprocal
from rlx.ir.quant.iq import SHAPES, grid

_SCORES = 1 << 18  # at once: they stay in a core's cache
_PRODUCTS = 1 << 18  # of one matmul: with more, OpenBLAS starts threads, which wait for each other


class _Book(NamedTuple):
    """A codebook and how weights are rounded to it."""

    points: F32  # [points, dims]
    squares: F32  # [dims, points]
    doubles: F32  # -2 g, [dims, points]
    norms: F32  # |g|², [1, points]
    nearest: Array  # index of a point for each cell of rounded weights
    slope: np.float32  # weight / scale · slope + offset is the number of its level
    offset: np.float32
    top: int  # the last level


@cache
def _book(name: str) -> _Book:
    dims, levels = SHAPES[name]
    points = grid(name).view(np.int8).reshape(-1, dims).astype(np.float32)
    columns = np.ascontiguousarray(points.T)
    norms = (columns**2).sum(axis=0, keepdims=True)
    cells = np.arange(len(levels) ** dims)
    digits = cells[:, None] // len(levels) ** np.arange(dims) % len(levels)
    at = np.array(levels, np.float32)[digits]
    nearest = (norms - 2 * at @ columns).argmin(axis=1).astype(np.uint16)
    step = (levels[-1] - levels[0]) / (len(levels) - 1)
    slope, offset = np.float32(1 / step), np.float32(-levels[0] / step)
    top = len(levels) - 1
    return _Book(points, columns**2, -2 * columns, norms, nearest, slope, offset, top)


class _Found(NamedTuple):
    d: F32  # [n]
    scales: Array  # l of each run, [n, runs]
    points: Array  # the index of one for each group, [n, groups]


def _search(name: str, x: F32, w: F32 | None, run: int, unit: float, steps: F32) -> _Found:
    """d, l and points for the magnitudes x [n, 256]; a scale is d · unit · (2 l + 1)."""
    book = _book(name)
    runs = x.shape[1] // run
    ideal = _ideal(book, x, w, run, steps).reshape(len(x), runs)
    d = as_f16(ideal.max(axis=1, keepdims=True) / np.float32(31 * unit))
    middle = np.rint((ideal * reciprocal(d * np.float32(unit)) - 1) * np.float32(0.5))
    best = np.full(ideal.shape, np.inf, np.float32)
    scales, index = (
        np.zeros_like(ideal),
        np.zeros((len(x), x.shape[1] // book.points.shape[1]), np.uint16),
    )
    for delta in (0, -1, 1):
        tried = (middle + np.float32(delta)).clip(0, 15)
        cost, points = _nearest(book, x, w, d * np.float32(unit) * (2 * tried + 1))
        better = cost < best
        np.copyto(best, cost, where=better)
        np.copyto(scales, tried, where=better)
        np.copyto(index, points, where=np.repeat(better, points.shape[1] // runs, axis=1))
    odd = 2 * scales + 1
    d = _refitted(book, x, w, index, np.float32(unit) * odd, d)
    _, index = _nearest(book, x, w, d * np.float32(unit) * odd)
    return _Found(d[:, 0], scales.astype(np.uint8), index)


def _ideal(book: _Book, x: F32, w: F32 | None, run: int, steps: F32) -> F32:
    """A scale for each run, not yet rounded."""
    dims = book.points.shape[1]
    columns = np.ascontiguousarray(x.reshape(-1, run).T)
    best = BestScale(columns, None if w is None else np.ascontiguousarray(w.reshape(-1, run).T))
    inverse, q = reciprocal(columns.max(axis=0)), np.empty_like(columns)
    powers = (np.float32(book.top + 1) ** np.arange(dims)).astype(np.float32)
    for step in steps:
        np.multiply(columns, inverse * (step * book.slope), out=q)
        q += book.offset
        np.rint(q, out=q)
        np.clip(q, np.float32(0), np.float32(book.top), out=q)
        cells = np.einsum("gdn,d->gn", q.reshape(run // dims, dims, -1), powers)
        points = book.points.take(book.nearest.take(cells.astype(np.uint16)), axis=0)
        best.try_codes(np.ascontiguousarray(points.transpose(0, 2, 1)).reshape(columns.shape))
    return best.scale


def _nearest(book: _Book, x: F32, w: F32 | None, scale: F32) -> tuple[F32, Array]:
    """The best points for the scales [n, runs], and the change of the squared error of each run."""
    dims = book.points.shape[1]
    groups = x.reshape(-1, dims)
    each = np.repeat(scale.reshape(-1), len(groups) // scale.size)
    if w is None:
        features = np.concatenate([groups, each[:, None]], axis=1)
        table = np.concatenate([book.doubles, book.norms])
    else:
        importance = w.reshape(-1, dims)
        features = np.concatenate([importance * groups, importance * each[:, None]], axis=1)
        table = np.concatenate([book.doubles, book.squares])
    index, cost = np.empty(len(groups), np.uint16), np.empty(len(groups), np.float32)
    step = max(1, _SCORES // len(book.points))
    for i in range(0, len(groups), step):
        found = small_matmuls(features[i : i + step], table)
        best = found.argmin(axis=1)
        index[i : i + step] = best
        cost[i : i + step] = np.take_along_axis(found, best[:, None], axis=1)[:, 0]
    cost *= each
    return cost.reshape(*scale.shape, -1).sum(axis=2), index.reshape(len(x), -1)


def small_matmuls(a: F32, b: F32) -> F32:
    """a @ b as a stack of matmuls that are each too small for BLAS to start threads of its own."""
    rows = max(1, _PRODUCTS // b.size)
    count = -(-len(a) // rows)
    stack = np.zeros((count, rows, a.shape[1]), np.float32)
    stack.reshape(-1, a.shape[1])[: len(a)] = a
    found: F32 = (stack @ b).reshape(-1, b.shape[1])[: len(a)]
    return found


def _refitted(book: _Book, x: F32, w: F32 | None, index: Array, scale: F32, d: F32) -> F32:
    """The least-squares d for the points and the scales [n, runs] beside it."""
    values = book.points.take(index, axis=0).reshape(*scale.shape, -1)
    values *= scale[..., None]
    values = values.reshape(x.shape)
    weighed = values if w is None else values * w
    xq, qq = np.einsum("ij,ij->i", x, weighed), np.einsum("ij,ij->i", values, weighed)
    fitted = as_f16(xq * reciprocal(qq))[:, None]
    best: F32 = np.where(fitted > 0, fitted, d)
    return best


# -- signs ----------------------------------------------------------------------------------------


def _signs(x: F32) -> tuple[F32, Array]:
    """Magnitudes, and a byte of sign bits for each eight weights."""
    return np.abs(x), np.packbits(x < 0, axis=1, bitorder="little")


def _even_signs(x: F32, w: F32 | None) -> tuple[F32, Array]:
    """The same with an even number of minus signs: the weight that loses least by it is flipped,
    and its magnitude becomes negative."""
    magnitudes, signs = _signs(x)
    groups = magnitudes.reshape(-1, 8)
    loss = groups if w is None else groups * w.reshape(-1, 8)
    odd = np.flatnonzero(_PARITY.take(signs.reshape(-1)))
    flipped = loss[odd].argmin(axis=1)
    groups[odd, flipped] *= -1
    signs.reshape(-1)[odd] ^= np.uint8(1) << flipped.astype(np.uint8)
    return magnitudes, signs


_PARITY = bits_of(np.arange(256, dtype=np.uint8)).reshape(256, 8).sum(axis=1) % 2

# The level that the peak of a run maps to.
_TWO_BITS = np.linspace(30, 60, 9, dtype=np.float32)
_THREE_BITS = np.linspace(45, 70, 9, dtype=np.float32)
_THREE_BITS_S = np.linspace(10, 17, 9, dtype=np.float32)
_SEVENS = np.array([0, 7, 14, 21], np.uint32)


def _joined_signs(signs: Array, scales: Array) -> Array:
    """Four bytes of even signs less their top bits, and a scale above them: u32 [n, 8]."""
    bits = (signs.reshape(*scales.shape, 4) & 127).astype(np.uint32) << _SEVENS
    joined: Array = np.bitwise_or.reduce(bits, axis=2) | scales.astype(np.uint32) << 28
    return joined


def _nibbles(scales: Array) -> Array:
    packed: Array = scales[:, ::2] | scales[:, 1::2] << np.uint8(4)
    return packed


@encoder("IQ2_XXS")
def to_iq2_xxs(x: F32, b: Array, w: F32 | None) -> None:
    magnitudes, signs = _even_signs(x, w)
    d, scales, index = _search("IQ2_XXS", magnitudes, w, 32, 1 / 8, _TWO_BITS)
    b["d"] = d
    b["qs"]["index"] = index.reshape(-1, 8, 4)
    b["qs"]["aux"] = _joined_signs(signs, scales)


@encoder("IQ2_XS")
def to_iq2_xs(x: F32, b: Array, w: F32 | None) -> None:
    magnitudes, signs = _even_signs(x, w)
    d, scales, index = _search("IQ2_XS", magnitudes, w, 16, 1 / 8, _TWO_BITS)
    b["d"], b["scales"] = d, _nibbles(scales)
    b["qs"] = index | (signs & 127).astype(np.uint16) << 9


@encoder("IQ2_S")
def to_iq2_s(x: F32, b: Array, w: F32 | None) -> None:
    magnitudes, b["signs"] = _signs(x)
    b["d"], scales, index = _search("IQ2_S", magnitudes, w, 16, 1 / 8, _TWO_BITS)
    b["scales"] = _nibbles(scales)
    b["qs"] = index & 255
    high = (index >> 8).astype(np.uint8).reshape(len(x), 8, 4)
    b["qh"] = np.bitwise_or.reduce(high << np.array([0, 2, 4, 6], np.uint8), axis=2)


@encoder("IQ3_XXS")
def to_iq3_xxs(x: F32, b: Array, w: F32 | None) -> None:
    magnitudes, signs = _even_signs(x, w)
    b["d"], scales, b["qs"] = _search("IQ3_XXS", magnitudes, w, 32, 1 / 4, _THREE_BITS)
    b["aux"] = _joined_signs(signs, scales)


@encoder("IQ3_S")
def to_iq3_s(x: F32, b: Array, w: F32 | None) -> None:
    magnitudes, b["signs"] = _signs(x)
    b["d"], scales, index = _search("IQ3_S", magnitudes, w, 32, 1.0, _THREE_BITS_S)
    b["scales"] = _nibbles(scales)
    b["qs"] = index & 255
    b["qh"] = np.packbits((index >> 8).astype(np.uint8), axis=1, bitorder="little")
