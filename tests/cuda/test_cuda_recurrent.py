"""LSTM and GRU whose blocks wait for each other: blocks one at a time, in random order."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import fake_driver
from fake_driver import FakeDriver, installed, make_stand_in
from simulator import run_in_turns, run_kernel

import rlx
from rlx.backends.cuda.kernels.recurrent.cells import CellSteps
from rlx.ir.graph import Graph
from rlx.ir.interp import evaluate
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.template import make_template
from rlx.specialize.options import CompileOptions

HIDDEN, ROWS = 20, 2  # units of three blocks


def cell(name: str, reverse: bool = False, rows: Any = ROWS, hidden: int = HIDDEN) -> Graph:
    g = Graph(name)
    gates = 4 if name == "lstm" else 3
    x, r = g.input("x", ["n", rows, gates * hidden]), g.input("r", [hidden, gates * hidden])
    states = [g.input(s, [rows, hidden]) for s in ("hc" if name == "lstm" else "h")]
    more = [g.input("bias", [hidden])] if name == "gru" else []
    g.set_outputs(*getattr(g, name)(x, r, *states, *more, reverse=reverse))
    return g


def data_of(graph: Graph, n: int) -> dict[str, Any]:
    rng = np.random.default_rng(n)
    found = {}
    for node in graph.sources("input"):
        dims = [n if isinstance(d, rlx.ir.dim.Expr) else d for d in node.output.shape.dims]
        found[node.name] = rng.uniform(-0.5, 0.5, dims).astype(np.float32)
    return found


@pytest.mark.parametrize("name", ["lstm", "gru"])
@pytest.mark.parametrize("reverse", [False, True])
def test_steps_in_any_order(name: str, reverse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that an earlier launch has left are not taken for those of this one, whatever its
    number of steps. What is handed over has 22 bits, in at most 5 steps."""
    seeds = iter(range(1000))

    def run(kernel: Any, blocks: int, args: int, inside: Any) -> None:
        if isinstance(kernel, CellSteps):
            run_in_turns(kernel, blocks, args, inside, next(seeds))
        else:
            run_kernel(kernel, blocks, args, inside)

    monkeypatch.setattr(fake_driver, "run_kernel", run)
    graph = cell(name, reverse)
    with installed(FakeDriver()):
        options = CompileOptions(binding={"n": rlx.UpTo(5)})
        made = CompiledGraph(make_template(graph, options, make_stand_in()))
        for n in (3, 1, 4, 2, 1, 1, 5, 3, 2):
            data = data_of(graph, n)
            for got, want in zip(made.run(data), evaluate(graph, data), strict=True):
                np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)
    assert next(seeds) == 9


@pytest.mark.parametrize(
    ("rows", "hidden"),
    [("m", 20), (2, 36), (2, 22), (33, 20)],
    ids=["rows", "units", "odd", "many"],
)
def test_others_are_loops(rows: Any, hidden: int) -> None:
    """Rows whose number differs from run to run, more blocks than the four multiprocessors of the
    stand-in can hold at once, rows that are not aligned, and many rows."""
    graph = cell("lstm", rows=rows, hidden=hidden)
    with installed(FakeDriver()):
        report = make_template(graph, CompileOptions(), make_stand_in()).result.dispatch_report
        assert report.outcome("lstm") == {"rewritten"}
        assert report.outcome("scan") == {"native"}
