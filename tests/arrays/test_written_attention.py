"""Attention written out in a jitted function becomes the attention op, where its sizes suit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlx
import rlx.numpy as rnp

Data = np.ndarray[Any, Any]


def normal(seed: int, *shape: int) -> Data:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def expected(q: Data, k: Data, v: Data, scale: float, mask: Data | float = 0.0) -> Data:
    """In f64."""
    scores = q.astype(np.float64) @ k.astype(np.float64).swapaxes(-1, -2) * scale + mask
    e = np.exp(scores - scores.max(-1, keepdims=True))
    found: Data = e / e.sum(-1, keepdims=True) @ v
    return found


def is_fused(f: Any, *given: Any) -> bool:
    plan = f.inspect(*given, stage="lir")
    return "= attention(" in plan and "softmax" not in plan and "matmul" not in plan


def heads(rows: int = 5, keys: int = 9, width: int = 16) -> tuple[Data, Data, Data]:
    q, k, v = ((2, 4, n, width) for n in (rows, keys, keys))
    return normal(0, *q), normal(1, *k), normal(2, *v)


def fixed_sizes(f: Any) -> set[str]:
    guards = [g for variant in f.variants() for g in variant.guards]
    return {g.partition(" (")[0] for g in guards if "a number for attention" in g}


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "scaled": lambda q, k, v: rnp.softmax(q @ k.mT * 0.25) @ v,
    "queries scaled": lambda q, k, v: rnp.softmax((q / 4.0) @ k.mT) @ v,
    "by the width": lambda q, k, v: rnp.softmax(q @ k.mT * q.shape[-1] ** -0.5) @ v,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_written_out(name: str) -> None:
    f = rlx.jit(FUNCTIONS[name])
    for rows, keys in ((5, 9), (1, 30), (40, 40)):
        given = heads(rows, keys)
        # sums of 16 and of up to 40 products of numbers near 1, in f32: some 10 ulp of 1
        np.testing.assert_allclose(np.asarray(f(*given)), expected(*given, 0.25), atol=2e-6)
        assert is_fused(f, *given)
    assert len(f.variants()) == 2  # lengths are symbolic, and 1 has a trace of its own
    assert fixed_sizes(f) >= {"q_1 == 4", "v_3 == 16"}  # q_3: looked at by one of them


@pytest.mark.parametrize("low", [-math.inf, -1e9])
def test_bool_masks(low: float) -> None:
    f = rlx.jit(lambda q, k, v, m: rnp.softmax(rnp.where(m, q @ k.mT * 0.25, low)) @ v)
    given = heads(12, 20)
    mask = np.random.default_rng(3).random((12, 20)) > 0.4
    mask[:, 0] = True  # every query sees a key
    wanted = expected(*given, 0.25, np.where(mask, 0.0, -np.inf))
    np.testing.assert_allclose(np.asarray(f(*given, mask)), wanted, atol=2e-6)
    assert is_fused(f, *given, mask)


def test_added_and_causal_masks() -> None:
    bias = normal(4, 12, 20)
    given = heads(12, 20)
    f = rlx.jit(lambda q, k, v, m: rnp.softmax(q @ k.mT * 0.25 + m) @ v)
    wanted = expected(*given, 0.25, bias)
    np.testing.assert_allclose(np.asarray(f(*given, bias)), wanted, atol=2e-6)
    assert is_fused(f, *given, bias)

    def causal(q: rlx.Array, k: rlx.Array, v: rlx.Array) -> rlx.Array:
        rows, keys = rnp.arange(q.shape[2])[:, None], rnp.arange(k.shape[2])
        return rnp.softmax(rnp.where(keys <= rows, q @ k.mT * 0.25, -rnp.inf)) @ v

    given = heads(11, 11)
    wanted = expected(*given, 0.25, np.where(np.tri(11, dtype=bool), 0.0, -np.inf))
    g = rlx.jit(causal)
    np.testing.assert_allclose(np.asarray(g(*given)), wanted, atol=2e-6)
    assert is_fused(g, *given)


@pytest.mark.parametrize("lead", [(), (3,)])
def test_one_head(lead: tuple[int, ...]) -> None:
    given = normal(0, *lead, 7, 10), normal(1, *lead, 6, 10), normal(2, *lead, 6, 10)
    f = rlx.jit(lambda q, k, v: rnp.softmax(q @ k.mT) @ v)
    # scores of some 3, whose rounding the exponential multiplies
    np.testing.assert_allclose(np.asarray(f(*given)), expected(*given, 1.0), atol=5e-6)
    assert is_fused(f, *given)


def test_in_a_loop() -> None:
    """Layers of self-attention, whose weights a scan runs over."""

    def layers(x: rlx.Array, w: rlx.Array) -> rlx.Array:
        def layer(x: rlx.Array, w: rlx.Array) -> tuple[rlx.Array, rlx.Array]:
            q = x @ w
            return x + rnp.softmax(q @ x.mT * 0.25) @ x, x[0, 0]

        return rlx.scan(layer, x, w)[0]

    x, w = normal(0, 9, 16), normal(1, 3, 16, 16) / 4
    wanted = x.astype(np.float64)
    for each in w:
        wanted = wanted + expected(wanted @ each, wanted, wanted, 0.25)
    f = rlx.jit(layers)
    # three layers pass errors on: some 10 ulp of numbers up to 10
    np.testing.assert_allclose(np.asarray(f(x, w)), wanted, atol=2e-5)
    assert fixed_sizes(f)
    assert f.inspect(x, w, stage="program").count("gemm") == 1  # of three products a layer


UNFUSED: dict[str, tuple[Callable[..., Any], int, int]] = {  # a function, widths of q and of v
    "weights returned": (lambda q, k, v: ((w := rnp.softmax(q @ k.mT)) @ v, w), 16, 16),
    "weights used twice": (lambda q, k, v: (w := rnp.softmax(q @ k.mT)) @ v + rnp.sum(w), 16, 16),
    "values of another width": (lambda q, k, v: rnp.softmax(q @ k.mT) @ v, 16, 8),
    "softmax over queries": (lambda q, k, v: rnp.softmax(q @ k.mT, axis=-2) @ v, 16, 16),
    "wide heads": (lambda q, k, v: rnp.softmax(q @ k.mT) @ v, 512, 512),
}


@pytest.mark.parametrize("name", UNFUSED)
def test_sizes_stay_symbolic_elsewhere(name: str) -> None:
    function, width, other = UNFUSED[name]
    f = rlx.jit(function)
    given = normal(0, 2, 4, 5, width) / 4, normal(1, 2, 4, 9, width), normal(2, 2, 4, 9, other)
    f(*given)
    assert not fixed_sizes(f)
    assert not is_fused(f, *given)
