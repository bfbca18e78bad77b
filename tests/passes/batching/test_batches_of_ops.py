"""`vmap` of every op is a loop: the cases of the parity table, mapped over any axis of any operand.

The oracle is the reference of the op on one element of the batch after the other. A result may be
as far from it as the case allows, as a product of a batch sums in another order.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "parity"))
from batch_checks import Mapped, check, operands_of, ways
from cases import Case, cases

import rlx
from rlx.backends.registry import Device
from rlx.ir.graph import Graph
from rlx.ir.op import REGISTRY
from rlx.passes.batching import batch
from rlx.passes.batching.rules import RULES, load_rules
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.template import make_template
from rlx.specialize.options import CompileOptions

OF_OP: dict[str, list[Case]] = defaultdict(list)
for _case in cases():
    OF_OP[_case.op].append(_case)

REFUSED = {"state_update": "elements cannot write to one state each"}
"""Ops that cannot be mapped, and why."""


@pytest.mark.parametrize("op", sorted(OF_OP))
def test_a_batch_is_a_loop(op: str) -> None:
    for case in OF_OP[op]:
        for way in ways(case):
            check(case, max(n for n in case.sizes if n < 9), way)


@pytest.mark.nightly
@pytest.mark.parametrize("op", sorted(OF_OP))
def test_a_batch_is_a_loop_at_other_sizes(op: str) -> None:
    for case in OF_OP[op]:
        for n in case.sizes:
            for way in ways(case):
                for size in (0, 1, 2):
                    check(case, n, replace(way, size=size))


def compiled(graph: Graph, data: Any, sizes: Any) -> list[np.ndarray]:
    template = make_template(graph, CompileOptions(), Device("cpu").backend)
    return CompiledGraph(template).run(data, sizes=sizes)


@pytest.mark.nightly
@pytest.mark.parametrize("op", sorted(OF_OP))
def test_a_batch_is_a_loop_on_the_cpu(op: str) -> None:
    """One element type of each case: f32 where there is one."""
    for case in OF_OP[op]:
        if case.dtype in ("f32", "c64") or OF_OP[op][0].dtype == case.dtype:
            for way in ways(case):
                check(case, max(n for n in case.sizes if n < 9), way, compiled)


def test_every_op_has_a_rule() -> None:
    """A new op needs a rule or a decomposition, or its reason stands above."""
    load_rules()
    without = set()
    for name, cls in REGISTRY.items():
        trait = "elementwise" if cls.is_elementwise else "reduction" if cls.is_reduction else ""
        has_rule = name in RULES or trait in RULES or cls.has_decomposition()
        if not (has_rule or cls.is_block or cls.is_source) and cls.__module__.startswith("rlx."):
            without.add(name)
    no_operands = {"iota", "dim_value"}  # so never mapped
    assert without - no_operands == set(REFUSED)
    assert set(RULES) - {"elementwise", "reduction"} <= set(REGISTRY)


def test_a_write_to_a_state_is_an_error() -> None:
    body = Graph("counting")
    x = body.input("x", [4])
    body.state_update(body.state("total", [4]), x)
    body.set_outputs(x)
    g = Graph("batch")
    with pytest.raises(rlx.UnsupportedError, match=r"\[state_update\] a write to a state"):
        batch(g, body, [g.input("x", [3, 4])], [0], 3)
    _, flags = batch(g, body, [g.input("y", [4])], [None], 3)
    assert flags == [False]  # the same for all elements: one write
    assert any(node.op.name == "state_update" for node in g.nodes)


def test_the_oracle_sees_a_wrong_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(op: Any, g: Graph, inputs: Any, mapped: Any, over: Any) -> Any:
        return g.append_node(op.replace(axis=0), inputs).outputs, [True]

    load_rules()
    monkeypatch.setitem(RULES, "softmax", wrong)
    case = next(c for c in OF_OP["softmax"] if c.dtype == "f32")
    with pytest.raises(AssertionError):
        check(case, 5, Mapped(dict.fromkeys(operands_of(case), 0)))
