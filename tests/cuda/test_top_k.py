"""The k greatest elements of rows too long to be compared with each other."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from fake_driver import FakeDriver, installed, make_stand_in

from rlx.ir.graph import Graph
from rlx.ir.interp import evaluate
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.template import make_template
from rlx.specialize.options import CompileOptions


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("dtype", ["f32", "i64"])
def test_long_rows(dtype: str, largest: bool) -> None:
    """Equal elements and NaNs among them; results are the reference's bit for bit."""
    g = Graph("top_k")
    g.set_outputs(*g.top_k(g.input("x", [2, 3000, 2], dtype), k=7, axis=1, largest=largest))
    rng = np.random.default_rng(3)
    x: Any = rng.integers(-90, 90, (2, 3000, 2)).astype(g.nodes[0].output.dtype.numpy)
    if dtype == "f32":
        x[0, [5, 2000], 0] = np.nan
        x[1, 17, 1] = -0.0
    with installed(FakeDriver()):
        made = CompiledGraph(make_template(g, CompileOptions(), make_stand_in()))
        got = made.run(x=x)
    for a, b in zip(got, evaluate(g, {"x": x}), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("size", [1025, 3000, 5121])
@pytest.mark.parametrize("dtype", ["f32", "i64"])
def test_rows_that_are_sorted(dtype: str, size: int) -> None:
    """Runs are merged, some alone, some shorter than the others; and k is too large to find the
    best one after the other."""
    g = Graph("sort")
    x = g.input("x", [2, size, 2], dtype)
    outputs = [g.sort(x, axis=1, descending=d) for d in (False, True)]
    outputs += [g.argsort(x, axis=1, descending=d) for d in (False, True)]
    outputs += [v for d in (False, True) for v in g.top_k(x, k=700, axis=1, largest=d)]
    g.set_outputs(*outputs)
    rng = np.random.default_rng(3)
    data: Any = rng.integers(-90, 90, (2, size, 2)).astype(x.dtype.numpy)
    if dtype == "f32":
        data[0, [5, 1000], 0] = np.nan
        data[1, 17, 1] = -0.0
    with installed(FakeDriver()):
        made = CompiledGraph(make_template(g, CompileOptions(), make_stand_in()))
        got = made.run(x=data)
    for a, b in zip(got, evaluate(g, {"x": data}), strict=True):
        np.testing.assert_array_equal(a, b)
