"""The oracles of derivatives: differences for forward mode, forward mode for reverse mode.

The product of a cotangent and a tangent is Re Σ ct · t. A pullback is the transpose of the Jacobian
exactly when ⟨ct, J t⟩ = ⟨Jᵀ ct, t⟩ for all ct and t.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlx.ir.graph import Graph
from rlx.ir.interp import evaluate
from rlx.passes.grad import jvp_graph, vjp_graph

Array = Any
Arrays = Mapping[str, Array]

STEP = 1e-4
"""Of differences of order 4: in f64 the rounding is 1e-16 / STEP, the truncation STEP⁴."""
NEAR = 1e-8  # of a directional derivative and its differences, relative to the largest element
EXACT = 1e-11  # of two computations of one number, some thousand roundings in f64


def draw(like: Array, rng: np.random.Generator) -> Array:
    x = rng.normal(size=like.shape)
    if like.dtype.kind == "c":
        x = x + 1j * rng.normal(size=like.shape)
    return x.astype(like.dtype)


def product(a: Array, b: Array) -> float:
    return float(np.real(np.sum(np.multiply(a, b))))


def size(a: Array) -> float:
    return float(np.max(np.abs(a), initial=0.0))


def moving(arrays: Sequence[Array]) -> list[int]:
    return [i for i, a in enumerate(arrays) if a.dtype.kind in "fc"]


def differences(graph: Graph, data: Arrays, tangents: Arrays) -> list[Array]:
    """The directional derivatives of the float outputs."""

    def at(steps: float) -> list[Array]:
        moved = {k: data[k] + steps * STEP * t for k, t in tangents.items()}
        found = evaluate(graph, {**data, **moved})
        return [found[i] for i in moving(found)]

    around = zip(at(1), at(-1), at(2), at(-2), strict=True)
    return [(8 * (a - b) - (c - d)) / (12 * STEP) for a, b, c, d in around]


def tangents_of(graph: Graph, data: Arrays, tangents: Arrays) -> list[Array]:
    """The same by forward mode."""
    made = jvp_graph(graph, list(tangents))
    given = {f"d_{k}": t for k, t in tangents.items()}
    return evaluate(made, {**data, **given})[len(graph.outputs) :]


def pulled_back(graph: Graph, data: Arrays, wrt: Sequence[str], cts: Arrays) -> dict[str, Array]:
    made = vjp_graph(graph, list(wrt))
    found = evaluate(made, {**data, **{f"d_{k}": ct for k, ct in cts.items()}})
    return dict(zip(wrt, found[len(graph.outputs) :], strict=True))


def check_forward(graph: Graph, data: Arrays, wrt: Sequence[str], near: float = NEAR) -> None:
    rng = np.random.default_rng(0)
    tangents = {k: draw(data[k], rng) for k in wrt}
    expected = differences(graph, data, tangents)
    for found, want in zip(tangents_of(graph, data, tangents), expected, strict=True):
        assert size(found - want) <= near * (1 + size(want)), (size(found - want), size(want))


def check_reverse(graph: Graph, data: Arrays, wrt: Sequence[str], exact: float = EXACT) -> None:
    rng = np.random.default_rng(1)
    tangents = {k: draw(data[k], rng) for k in wrt}
    moved = tangents_of(graph, data, tangents)
    outputs = evaluate(graph, data)
    names = [graph.output_names[i] for i in moving(outputs)]
    cts = {k: draw(t, rng) for k, t in zip(names, moved, strict=True)}
    found = pulled_back(graph, data, wrt, cts)
    left = [product(ct, t) for ct, t in zip(cts.values(), moved, strict=True)]
    right = [product(found[k], t) for k, t in tangents.items()]
    terms = sum(np.sum(np.abs(ct * t)) for ct, t in zip(cts.values(), moved, strict=True))
    assert abs(sum(left) - sum(right)) <= exact * (1 + terms), (sum(left), sum(right))


def check(graph: Graph, data: Arrays, wrt: Sequence[str], near: float = NEAR) -> None:
    """Both modes."""
    check_forward(graph, data, wrt, near)
    check_reverse(graph, data, wrt)


def check_second(graph: Graph, data: Arrays, wrt: Sequence[str], near: float = NEAR) -> None:
    """Both modes of the pullback, by the point and by the cotangents."""
    outputs = evaluate(graph, data)
    rng = np.random.default_rng(2)
    cts = {f"d_{graph.output_names[i]}": draw(outputs[i], rng) for i in moving(outputs)}
    pullback = vjp_graph(graph, list(wrt))
    pullback.set_outputs(pullback.outputs[len(outputs) :], names=[f"back_{k}" for k in wrt])
    check(pullback, {**data, **cts}, [*wrt, *cts], near)
