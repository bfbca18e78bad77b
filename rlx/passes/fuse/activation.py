"""Activations written in primitives become the op that computes them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from rlx.ir.op import REGISTRY, Op
from rlx.ir.ops.activation import activations
from rlx.passes.pattern import Match, OpPattern, op
from rlx.passes.rewrite import Result, Rule


@lru_cache(maxsize=1)
def activation_kinds() -> frozenset[str]:
    """Ops that fused kernels may apply to a product."""
    return frozenset(activations()) - {"none"}


def is_default(record: Op) -> bool:
    """Whether an activation has its default attributes: its name alone says all of it."""
    return not record.fields or record == REGISTRY[record.name]()


def _becomes(kind: str) -> Callable[[Match], Result]:
    def result(m: Match) -> Result:
        if not m.x.shape.dtype.is_float or m.if_same(m.x) is None:
            return None
        return m.g.apply(kind, m.x)

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
    """The orders in which 0.5 · x · gate is written."""
    return [
        op("mul", op("mul", "x", 0.5), gate),
        op("mul", op("mul", "x", gate), 0.5),
        op("mul", "x", op("mul", gate, 0.5)),
    ]


_ERF_GATES = [op("add", op("erf", arg), 1) for arg in _scaled(math.sqrt(0.5))]
_TANH_GATES = [op("add", op("tanh", arg), 1) for arg in _TANH_ARGUMENTS]
_ONE_PLUS_EXP = op("add", op("exp", op("neg", "x")), 1)


def _rules(name: str, kind: str, patterns: list[OpPattern]) -> list[Rule]:
    return [Rule(name, p, _becomes(kind), owns=True) for p in patterns]


ACTIVATION: tuple[Rule, ...] = (
    *_rules(
        "sigmoid written out",
        "sigmoid",
        [op("reciprocal", _ONE_PLUS_EXP), op("div", 1, _ONE_PLUS_EXP)],
    ),
    *_rules(
        "silu written out",
        "silu",
        [op("mul", "x", op("sigmoid", "x")), op("div", "x", _ONE_PLUS_EXP)],
    ),
    *_rules("gelu written out", "gelu", [p for gate in _ERF_GATES for p in _half_of_x_times(gate)]),
    *_rules(
        "gelu_tanh written out",
        "gelu_tanh",
        [p for gate in _TANH_GATES for p in _half_of_x_times(gate)],
    ),
    *_rules(
        "gelu_quick written out",
        "gelu_quick",
        [op("mul", "x", op("sigmoid", op("mul", "x", 1.702)))],
    ),
)
