"""Attention from scratch: three ways to write it, what the compiler makes of each, and their speed.

python examples/attention.py [TOKENS]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np

import rlx
import rlx.numpy as rnp
from rlx.nn import functional as F

HEADS, DIM = 8, 64
Attention = Callable[[rlx.Array, rlx.Array, rlx.Array], rlx.Array]


def textbook(q: rlx.Array, k: rlx.Array, v: rlx.Array) -> rlx.Array:
    """softmax(q kᵀ / √d) v with a causal mask: the scores of all pairs are made."""
    scores = q @ k.mT / DIM**0.5
    length = q.shape[-2]
    later = rnp.arange(length)[None, :] > rnp.arange(length)[:, None]
    return rnp.softmax(rnp.where(later, -rnp.inf, scores), axis=-1) @ v


def online(q: rlx.Array, k: rlx.Array, v: rlx.Array) -> rlx.Array:
    """One key after the other, as a loop: the softmax is corrected whenever a score is the highest
    so far. No scores are kept; flash attention does this with blocks of keys."""
    rows = rnp.arange(q.shape[-2])[:, None]

    def step(
        carry: tuple[rlx.Array, rlx.Array, rlx.Array], given: tuple[rlx.Array, ...]
    ) -> tuple[tuple[rlx.Array, rlx.Array, rlx.Array], None]:
        highest, total, mixed = carry
        key, value, number = given  # [heads, dim] each, and the key's position
        score = rnp.sum(q * key[:, None, :], axis=-1, keepdims=True) / DIM**0.5
        score = rnp.where(number > rows, -rnp.inf, score)
        new = rnp.maximum(highest, score)
        shrink, weight = rnp.exp(highest - new), rnp.exp(score - new)
        return (new, total * shrink + weight, mixed * shrink + weight * value[:, None, :]), None

    start = rnp.full_like(q[..., :1], -1e30), rnp.zeros_like(q[..., :1]), rnp.zeros_like(q)
    keys, values = rnp.moveaxis(k, -2, 0), rnp.moveaxis(v, -2, 0)
    (_, total, mixed), _ = rlx.scan(step, start, (keys, values, rnp.arange(k.shape[-2])))
    return mixed / total


def fused(q: rlx.Array, k: rlx.Array, v: rlx.Array) -> rlx.Array:
    """The op of the library: one kernel, in blocks, with as little memory as `online`."""
    return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]


def seconds(function: Attention, *given: rlx.Array) -> float:
    """The least time of a few calls."""
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        function(*given)
        best = min(best, time.perf_counter() - began)
    return best


def main() -> None:
    length = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    rng = np.random.default_rng(0)
    q, k, v = (rnp.asarray(rng.standard_normal((HEADS, length, DIM), np.float32)) for _ in range(3))
    expected = None
    for function in (textbook, online, fused):
        jitted = rlx.jit(function)
        result = np.asarray(jitted(q, k, v))
        expected = result if expected is None else expected
        away = np.abs(result - expected).max()
        kernels = len(jitted.profile(q, k, v).by_kernel())
        spent = 1e3 * seconds(jitted, q, k, v)
        print(f"{function.__name__:9s} {spent:8.2f} ms  {kernels:2d} kernels  apart by {away:.1e}")
    print("\nWhat is recorded of the textbook's, with symbolic sizes:\n")
    print(rlx.jit(textbook).inspect(q, k, v))


if __name__ == "__main__":
    main()
