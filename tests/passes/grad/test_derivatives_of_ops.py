"""The derivatives of every op: the cases of the parity table, in f64.

Forward mode against differences, reverse mode against forward mode, and the pullback, itself a
graph, the same way once more: second derivatives.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "parity"))
from cases import Arg, Case, cases
from derivative_checks import check, check_second, pulled_back, tangents_of

from rlx.errors import UnsupportedError
from rlx.ir.graph import Graph
from rlx.ir.interp import evaluate
from rlx.passes.grad import jvp_graph, vjp_graph
from rlx.passes.grad.rules import adjoint, is_differentiable

WIDE = {"f32": "f64", "c64": "c128"}
WITHIN = {  # domains where the table's data leaves them
    "asin": (-0.9, 0.9), "acos": (-0.9, 0.9), "atanh": (-0.9, 0.9), "acosh": (1.2, 3.0),
    "log": (0.3, 3), "log2": (0.3, 3), "log10": (0.3, 3), "log1p": (-0.7, 3), "sqrt": (0.3, 3),
    "rsqrt": (0.3, 3), "reciprocal": (0.3, 3), "tan": (-1.2, 1.2), "div": (0.5, 2),
    "mod": (0.5, 2), "pow": (0.5, 2),
}  # fmt: skip
NOT_DETERMINED = [
    "qr-f32-7-4-True", "qr-c64-7-4-True", "svd-f32-7-4", "svd-f32-4-7", "svd-c64-7-4",
    "svd-c64-4-7",
]  # fmt: skip
NARROW = ("cast-f32-to-f16", "cast-f32-to-bf16", "cast-f32-to-f8e4m3", "cast-f32-to-c64")
BODIES = ("cond", "scan", "while_loop")  # of f32: test_derivatives_of_loops.py


def apart(dims: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Matrices of full rank whose eigenvalues are far from each other."""
    x = rng.uniform(-1, 1, dims) + 1j * rng.uniform(-1, 1, dims)
    return x + 3 * np.eye(*dims[-2:]) * np.arange(1, dims[-1] + 1)


def of_symmetric(case: Case) -> Case:
    """Of the symmetric part: what the factorisation of one triangle is a function of."""

    def build(g: Graph, x: Any) -> Any:
        return case.build(g, g.mul(g.add(x, adjoint(g, x)), 0.5))

    return replace(case, build=build)


def widened(case: Case) -> Case:
    """The case with f64 and c128 in place of f32 and c64, and no infinities."""

    def arg(a: Arg) -> Arg:
        low, high = WITHIN.get(case.op, (a.low, a.high))
        data = a.data
        if case.op in ("qr", "eig"):
            data = apart if a.dtype == "c64" else lambda dims, rng: apart(dims, rng).real
        wide = WIDE.get(a.dtype, a.dtype)
        return replace(a, dtype=wide, special=False, low=low, high=high, data=data)

    if case.op in ("cholesky", "eigh"):
        case = of_symmetric(case)
    return replace(case, args={k: arg(a) for k, a in case.args.items()})


@cache
def table() -> dict[str, Case]:
    found = {}
    for case in cases():
        types = {a.dtype for a in case.args.values()}
        if types & WIDE.keys() and not types & {"f16", "bf16", "f8e4m3", "f8e5m2"}:
            found[case.id] = widened(case)
    return found


def of(case: Case) -> tuple[Graph, dict[str, Any], list[str]]:
    size = max(n for n in case.sizes if n < 9)
    wrt = [k for k, a in case.args.items() if a.dtype in ("f64", "c128")]
    return case.graph(), {**case.data(size), **case.consts}, wrt


def has_derivative(case: Case) -> bool:
    return any(is_differentiable(v.shape.dtype) for v in case.graph().outputs)


COMPARED = [
    id for id, case in table().items()
    if id not in {*NOT_DETERMINED, *NARROW} and case.op not in BODIES and has_derivative(case)
]  # fmt: skip


@pytest.mark.parametrize("id", COMPARED)
def test_first_derivatives(id: str) -> None:
    check(*of(table()[id]))


@pytest.mark.parametrize("id", COMPARED)
def test_second_derivatives(id: str) -> None:
    check_second(*of(table()[id]))


@pytest.mark.parametrize("id", NOT_DETERMINED)
def test_a_factor_that_is_not_determined_has_no_derivative(id: str) -> None:
    graph, _, wrt = of(table()[id])
    for derivative in (vjp_graph, jvp_graph):
        with pytest.raises(UnsupportedError, match="does not determine all of"):
            derivative(graph, wrt)


@pytest.mark.parametrize("id", NARROW)
def test_cast_to_a_narrow_type(id: str) -> None:
    """It rounds, and differences would see the steps; the derivative is that of the real line."""
    graph, data, wrt = of(table()[id])
    (x,) = wrt
    (tangent,) = tangents_of(graph, data, {x: data[x]})
    assert np.array_equal(tangent, evaluate(graph, data)[0])
    ct = np.ones_like(tangent)
    assert np.array_equal(pulled_back(graph, data, wrt, {"output_0": ct})[x], ct.real)
