"""A layer whose weight is an input, often a transposed view: nothing is copied, and one row has the
bits that it has among others."""

from __future__ import annotations

import numpy as np
import pytest

import rlx
from rlx import Graph

rng = np.random.default_rng(0)


def layer(n: int, k: int, dtype: str, transposed: bool, act: str, residual: bool) -> rlx.Graph:
    g = Graph("layer")
    x, bias = g.input("x", ["count", k]), g.input("bias", [n], dtype)
    w = g.input("w", [n, k] if transposed else [k, n], dtype)
    kernel = g.transpose(w, (1, 0)) if transposed else w
    more = [g.input("r", ["count", n])] if residual else []
    y = g.fused_matmul_bias_act(
        x, kernel, bias, *more, has_bias=True, has_residual=residual, activation=act
    )
    return g.set_outputs(y)


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(
    ("n", "k", "act", "residual"),
    [
        (64, 48, "none", False),
        (37, 65, "gelu", True),
        (5, 7, "relu", True),
        (1030, 3, "silu", False),
    ],
)
def test_one_row_has_the_bits_of_many(
    n: int, k: int, act: str, residual: bool, dtype: str, transposed: bool
) -> None:
    graph = layer(n, k, dtype, transposed, act, residual)
    ours, oracle = rlx.Session("cpu").compile(graph), rlx.Session("reference").compile(graph)
    element = rlx.DType.of(dtype).numpy
    given = {
        "x": rng.standard_normal((4, k), np.float32),
        "w": rng.standard_normal((n, k) if transposed else (k, n)).astype(element),
        "bias": rng.standard_normal(n).astype(element),
    }
    if residual:
        given["r"] = rng.standard_normal((4, n), np.float32)
    (many,), (expected,) = ours.run(given), oracle.run(given)
    # sums of k products of numbers near 1, in another order: sqrt(k) · ulp of the largest, and the
    # activation's 16 ulp (docs/ops.md)
    largest = np.abs(np.asarray(expected, np.float64)).max()
    assert np.abs(many.astype(np.float64) - expected).max() <= 32 * 2.0**-24 * max(largest, 1)
    for i in range(4):
        rows = {name: a[i : i + 1] if name in "xr" else a for name, a in given.items()}
        assert np.array_equal(ours.run(rows)[0][0], many[i])


def test_a_transposed_weight_is_not_copied() -> None:
    for count in (1, 3):
        compiled = rlx.Session("cpu").compile(
            layer(64, 32, "f32", True, "relu", False), binding={"count": count}
        )
        assert "contiguous" not in {n.op.name for n in compiled.executable.lir.graph.nodes}
