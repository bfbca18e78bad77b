"""Descriptions can be pickled and copied; what holds machine code says what to do instead."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from small_model import CLOSE, build, expected, inputs, weights

import rlx
from rlx import Session
from rlx.errors import UnsupportedError

COPIES: list[Callable[[Any], Any]] = [lambda o: pickle.loads(pickle.dumps(o)), copy.deepcopy]


@pytest.mark.parametrize("duplicate", COPIES, ids=["pickle", "deepcopy"])
def test_modules_graphs_and_values(duplicate: Callable[[Any], Any]) -> None:
    module = build()
    x = inputs(1, 3)
    for each in (module, module.lower(), module.lower().into_graph()):
        f = Session("cpu").compile(duplicate(each)).set_params(weights())
        np.testing.assert_allclose(f(x=x), expected(x, weights()), **CLOSE)
    graph = module.lower().into_graph()
    value = duplicate(graph.outputs[0])
    assert value.graph is not graph and value.graph.same_as(graph)


def test_a_plan_is_pickled_as_its_file() -> None:
    f = Session("cpu").compile(build(), binding={"batch": 1, "seq": 3})
    lir = f.executable.lir
    copied = pickle.loads(pickle.dumps(lir))
    assert rlx.print_graph(copied.graph) == rlx.print_graph(lir.graph)
    assert copied.arena_size == lir.arena_size


HELD: dict[str, tuple[Callable[[Any], Any], str]] = {
    "compiled graph": (lambda f: f, "pickle the GraphModule and compile it in each process"),
    "executable": (lambda f: f.executable, "pickle the GraphModule"),
    "params": (lambda f: f.params, "pickle the arrays"),
    "pipeline": (lambda f: rlx.ModelCompilePipeline("cpu"), "make one in each process"),
}


@pytest.mark.parametrize("duplicate", [*COPIES, copy.copy], ids=["pickle", "deepcopy", "copy"])
@pytest.mark.parametrize("case", HELD)
def test_machine_code_stays_here(case: str, duplicate: Callable[[Any], Any]) -> None:
    take, hint = HELD[case]
    held = take(Session("cpu").compile(build(), binding={"batch": 1, "seq": 3}))
    with pytest.raises(UnsupportedError, match="cannot be pickled or copied") as e:
        duplicate(held)
    assert hint in e.value.hint
