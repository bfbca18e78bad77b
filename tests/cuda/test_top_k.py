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
