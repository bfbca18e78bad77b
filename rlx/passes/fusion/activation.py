"""Recognises decomposed activations.

One pattern is the decomposition of the op itself; other common forms are listed here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from rlx.ir.dtype import f32
from rlx.ir.node import Value
from rlx.ir.op import REGISTRY, Op, on_register
from rlx.ir.ops.composite import decomposed
from rlx.ir.shape import Shape
from rlx.passes.pattern import Match, OpPattern, Part, number, op
from rlx.passes.rewrite import Result, Rule


def _becomes(name: str) -> Callable[[Match], Result]:
    def result(m: Match) -> Result:
        if not m.x.shape.dtype.is_float or m.if_same(m.x) is None:
            return None
        return m.g.apply(name, m.x)

    return result


def _scaled(factor: float) -> list[OpPattern]:
    """x · factor, also written as x / (1/factor)."""
    return [op("mul", "x", factor), op("div", "x", 1 / factor)]


_ROOT = math.sqrt(2 / math.pi)
_CUBES: list[Any] = [op("mul", "x", op("square", "x")), op("pow", "x", 3)]

# the part of gelu_tanh inside tanh: √(2/π)·(x + 0.044715·x³)
_TANH_ARGUMENTS: list[OpPattern] = [
    *(op("mul", op("add", "x", op("mul", cube, 0.044715)), _ROOT) for cube in _CUBES),
    # √(2/π)·x·(1 + 0.044715·x²)
    op("mul", op("mul", "x", _ROOT), op("add", op("mul", op("square", "x"), 0.044715), 1)),
    op("mul", op("mul", "x", op("add", op("mul", op("square", "x"), 0.044715), 1)), _ROOT),
]


def _half_of_x_times(gate: OpPattern) -> list[OpPattern]:
    """0.5 · x · gate, in any order."""
    return [
        op("mul", op("mul", "x", 0.5), gate),
        op("mul", op("mul", "x", gate), 0.5),
        op("mul", "x", op("mul", gate, 0.5)),
    ]


_ERF_GATES = [op("add", op("erf", arg), 1) for arg in _scaled(math.sqrt(0.5))]
_TANH_GATES = [op("add", op("tanh", arg), 1) for arg in _TANH_ARGUMENTS]
_ONE_PLUS_EXP = op("add", op("exp", op("neg", "x")), 1)


def _rules(name: str, patterns: list[OpPattern]) -> list[Rule]:
    return [Rule(f"decomposed {name}", p, _becomes(name), owns=True) for p in patterns]


_OTHERS: dict[str, list[OpPattern]] = {
    "sigmoid": [op("reciprocal", _ONE_PLUS_EXP), op("div", 1, _ONE_PLUS_EXP)],
    "silu": [op("div", "x", _ONE_PLUS_EXP)],
    "gelu": [p for gate in _ERF_GATES for p in _half_of_x_times(gate)],
    "gelu_tanh": [p for gate in _TANH_GATES for p in _half_of_x_times(gate)],
}


def formula_pattern(record: Op) -> OpPattern:
    """The decomposition of an elementwise op of one real tensor, as a pattern of `x`."""
    graph = decomposed(record, (Shape([1], f32),))
    assert graph is not None

    def part(value: Value) -> Part:
        node = value.node
        if node.op.name == "input":
            return "x"
        known = number(value)
        if known is not None:
            return known
        same = node.op.__eq__ if node.op.fields else None  # attributes must match too
        return op(node.op.name, *map(part, node.inputs), when=same)

    pattern = part(graph.outputs[0])
    assert isinstance(pattern, OpPattern)
    return pattern


def _rules_for(name: str) -> list[Rule]:
    own = [formula_pattern(REGISTRY[name]())] if REGISTRY[name].fuses_formula else []
    return _rules(name, own + _OTHERS.get(name, []))


# A list, since ops registered later add their rules.
ACTIVATION: list[Rule] = [rule for name in _OTHERS for rule in _rules_for(name)]


def _add_rules(cls: type[Op]) -> None:
    if cls.fuses_formula and cls.name not in _OTHERS:
        ACTIVATION.extend(_rules_for(cls.name))


on_register(_add_rules)
