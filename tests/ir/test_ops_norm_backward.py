"""Backward of norms over the last axis."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from differences import cotangent
from run_op import infer, run

from rlx import CompileOptions, Graph, Session
from rlx.errors import ShapeError

RNG = np.random.default_rng(3)


def norm(centered: bool, eps: float, x: Any, gamma: Any, beta: Any) -> Any:
    x = x - x.mean(-1, keepdims=True) if centered else x
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * gamma + beta


@pytest.mark.parametrize("centered", [False, True])
def test_backward_against_central_differences(centered: bool) -> None:
    name = f"{'layer' if centered else 'rms'}_norm_backward"
    x, gamma, beta = RNG.standard_normal((2, 3, 5)), *RNG.standard_normal((2, 5))
    dy, dsum = RNG.standard_normal((2, 2, 3, 5))

    def forward(*arrays: Any) -> Any:
        return norm(centered, 0.1, *arrays)

    want = [cotangent(forward, [x, gamma, beta], i, dy) for i in range(3)]
    found = run(name, x, gamma, dy, eps=0.1, has_beta=True)
    for a, b in zip(found, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-8)
    plain = run(name, x, gamma, dy, eps=0.1)
    assert len(plain) == 2
    added = run(name, x, gamma, dy, dsum, eps=0.1)
    np.testing.assert_allclose(added[0], want[0] + dsum, atol=1e-8)
    one = run(name, x[0, 0], gamma, dy[0, 0], eps=0.1)
    np.testing.assert_allclose(one[0], want[0][0, 0], atol=1e-8)


def test_sums_over_rows_have_the_same_bits_for_any_number_of_workers() -> None:
    g = Graph("norm")
    x, dy = (g.input(name, [1000, 70]) for name in ("x", "dy"))
    g.set_outputs(*g.layer_norm_backward(x, g.input("gamma", [70]), dy, has_beta=True))
    given = {n: RNG.standard_normal((1000, 70), np.float32) for n in ("x", "dy")}
    given["gamma"] = RNG.standard_normal(70, np.float32)
    one, two = (Session("cpu").compile(g, CompileOptions(threads=n)).run(**given) for n in (1, 2))
    for a, b in zip(one, two, strict=True):
        assert np.array_equal(a, b)


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(ShapeError, match="gamma"):
        infer("rms_norm_backward", ["n", 4], [5], ["n", 4])
    with pytest.raises(ShapeError, match="dy"):
        infer("rms_norm_backward", ["n", 4], [4], ["m", 4])
    with pytest.raises(ShapeError, match="dsum"):
        infer("layer_norm_backward", ["n", 4], [4], ["n", 4], [4])
