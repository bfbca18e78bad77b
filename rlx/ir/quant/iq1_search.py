"""Encoders of IQ1_S and IQ1_M: ternary points, moved by ±1/8, and scales by least squares.

A weight is s · (g + δ) with g in -1, 0, 1 and δ = ±1/8, one for 32 weights (IQ1_S) or for eight
(IQ1_M). The codebook has 2048 of the 6561 points of eight weights. The error of a point is a sum of
two halves with 81 possible values each; the points near the rounded weights are compared.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from rlx.ir.quant.blocks import (
    F32,
    Array,
    BestScale,
    as_f16,
    dots,
    encoder,
    reciprocal,
    require_f16,
)
from rlx.ir.quant.iq import grid
from rlx.ir.quant.iq_search import small_matmuls

_DELTA = np.float32(0.125)
_AT_ONCE = 128  # superblocks
_NEIGHBOURS = 12  # of 2048: 32 lower the error by half a percent
# A scale is one of these times the root mean square of its run, before it is fitted.
_FACTORS = np.linspace(0.7, 2.1, 8, dtype=np.float32)
_POWERS = np.float32(3) ** np.arange(8, dtype=np.float32)


@cache
def _points() -> F32:
    return grid("IQ1_S").view(np.int8).reshape(-1, 8).astype(np.float32) * _DELTA


@cache
def _table() -> F32:
    """(g², -2 g) of the 81 points of each half of a group: [16, 162]."""
    half = (np.arange(81)[:, None] // 3 ** np.arange(4) % 3 - 1).astype(np.float32).T
    table = np.zeros((2, 2, 4, 2, 81), np.float32)
    for i in range(2):
        table[0, i, :, i], table[1, i, :, i] = half**2, -2 * half
    return table.reshape(16, 162)


@cache
def _neighbours() -> tuple[Array, Array]:
    """The nearest points of each cell [6561, n], and where `_table` has their halves [.., 2 n]."""
    points = _points()
    cells = (np.arange(6561)[:, None] // 3 ** np.arange(8) % 3 - 1).astype(np.float32)
    distance = (points**2).sum(axis=1) - 2 * cells @ points.T
    unique = (distance * len(points) + np.arange(len(points))).astype(np.int32)  # of ties the first
    index = np.partition(unique, _NEIGHBOURS, axis=1)[:, :_NEIGHBOURS] % len(points)
    whole = ((points + 1) @ _POWERS).astype(np.intp)[index]
    return index.astype(np.uint16), np.concatenate([whole % 81, whole // 81 + 81], axis=1)


def _nearest(x: F32, w: F32, scale: F32) -> tuple[F32, Array]:
    """For groups x [n, 8] and scales [n]: the change of the squared error, and the points."""
    each = scale[:, None]
    digits = x * reciprocal(each)
    np.rint(digits, out=digits)
    np.clip(digits, np.float32(-1), np.float32(1), out=digits)
    cell = (np.einsum("ij,j->i", digits, _POWERS) + np.float32(3280)).astype(np.intp)
    index, halves = _neighbours()
    table = small_matmuls(np.concatenate([w * each, w * x], axis=1), _table())
    where = halves.take(cell, axis=0)
    where += np.arange(0, table.size, 162)[:, None]
    parts = table.reshape(-1).take(where, mode="clip")
    scores = parts[:, :_NEIGHBOURS] + parts[:, _NEIGHBOURS:]
    best = scores.argmin(axis=1)
    cost = scores.reshape(-1).take(np.arange(0, scores.size, _NEIGHBOURS) + best) * scale
    return cost, index.reshape(-1).take(cell * _NEIGHBOURS + best)


def _ideal(x: F32, w: F32) -> F32:
    """A scale for each run, a row of x: that of ternary weights, whatever points there are."""
    x, w = np.ascontiguousarray(x.T), np.ascontiguousarray(w.T)
    size, best = np.sqrt(dots(w * x, x) / w.sum(axis=0)), BestScale(x, w)
    for factor in _FACTORS:
        q = np.rint(x * reciprocal(size * factor))
        best.try_codes(np.clip(q, np.float32(-1), np.float32(1), out=q))
    return best.scale


class _Groups:
    """Groups of eight weights, and what a scale and a δ for each make of them."""

    def __init__(self, x: F32, w: F32) -> None:
        self.x, self.w = x.reshape(-1, 8), w.reshape(-1, 8)
        self._sums, self._moments = self.w.sum(axis=1), np.einsum("ij,ij->i", self.w, self.x)

    def fit(self, scale: F32, delta: F32) -> tuple[F32, Array]:
        """The change of the squared error, and the best points, of each group."""
        cost, points = _nearest(self.x - (delta * scale)[:, None], self.w, scale)
        cost += scale * delta * (scale * delta * self._sums - 2 * self._moments)
        return cost, points


def _search(x: F32, w: F32 | None, run: int, together: int) -> tuple[F32, Array, Array, Array]:
    """`_search_part` of some superblocks at a time: a search takes several times their memory."""
    require_f16("an IQ1 type", as_f16(np.abs(x).max(keepdims=True) / np.float32(15)))
    w = np.ones_like(x) if w is None else w
    parts = [slice(i, i + _AT_ONCE) for i in range(0, len(x), _AT_ONCE)]
    found = zip(*(_search_part(x[p], w[p], run, together) for p in parts), strict=True)
    d, scales, index, down = (np.concatenate(arrays) for arrays in found)
    return d, scales, index, down


def _search_part(x: F32, w: F32, run: int, together: int) -> tuple[F32, Array, Array, Array]:
    """d [n], l of each run, points of each group, and where δ is negative, [n, 256 / together]."""
    groups, per_run = _Groups(x, w), run // 8
    ideal = _ideal(x.reshape(-1, run), w.reshape(-1, run)).reshape(len(x), -1)
    d = as_f16(ideal.max(axis=1, keepdims=True) / np.float32(15))

    def spread(scales: F32) -> F32:
        """The scale of each group."""
        return np.repeat(d * (2 * scales + 1), per_run, axis=1).reshape(-1)

    scales = np.rint((ideal * reciprocal(d) - 1) * np.float32(0.5)).clip(0, 7)
    first, scale = scales, spread(scales)
    both = [groups.fit(scale, np.full_like(scale, delta)) for delta in (_DELTA, -_DELTA)]
    up, low = (cost.reshape(-1, together // 8).sum(axis=1) for cost, _ in both)
    down = np.repeat(low < up, together // 8)
    delta = np.where(down, -_DELTA, _DELTA)
    index = np.where(down, both[1][1], both[0][1])
    best = np.where(down, both[1][0], both[0][0]).reshape(-1, per_run).sum(axis=1)
    for step in (-1, 1):
        tried = (first + np.float32(step)).clip(0, 7)
        cost, points = groups.fit(spread(tried), delta)
        cost = cost.reshape(-1, per_run).sum(axis=1)
        better = cost < best
        best = np.where(better, cost, best)
        scales = np.where(better.reshape(scales.shape), tried, scales)
        index = np.where(np.repeat(better, per_run), points, index)
    q = ((_points().take(index, axis=0)) + delta[:, None]).reshape(x.shape)
    q *= np.repeat(2 * scales + 1, run, axis=1)
    wq = w * q
    fitted = as_f16(np.einsum("ij,ij->i", wq, x) * reciprocal(np.einsum("ij,ij->i", wq, q)))
    d = np.where(fitted > 0, fitted, d[:, 0])
    minus = down.reshape(len(x), 32)[:, :: together // 8]
    return d, scales.astype(np.uint8), index.reshape(len(x), 32), minus


_THREES = np.array([0, 3, 6, 9], np.uint16)


@encoder("IQ1_S")
def to_iq1_s(x: F32, b: Array, w: F32 | None) -> None:
    b["d"], scales, index, down = _search(x, w, 32, 32)
    b["qs"] = index & 255
    high = np.bitwise_or.reduce((index >> 8).reshape(-1, 8, 4) << _THREES, axis=2)
    b["qh"] = high | scales.astype(np.uint16) << 12 | down.astype(np.uint16) << 15


@encoder("IQ1_M")
def to_iq1_m(x: F32, b: Array, w: F32 | None) -> None:
    d, scales, index, down = _search(x, w, 16, 8)
    b["qs"] = index & 255
    high = (index >> 8).astype(np.uint8) | down.view(np.uint8) << np.uint8(3)
    b["qh"] = high[:, ::2] | high[:, 1::2] << np.uint8(4)
    words = np.bitwise_or.reduce(scales.astype(np.uint16).reshape(-1, 4, 4) << _THREES, axis=2)
    bits = d.astype(np.float16).view(np.uint16)[:, None] >> np.array([0, 4, 8, 12], np.uint16)
    b["scales"] = words | (bits & 15) << 12
