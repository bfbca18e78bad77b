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
from rlx.ir.op import REGISTRY
from rlx.ir.quant.scheme import QuantScheme
from rlx.passes.grad import jvp_graph, vjp_graph
from rlx.passes.grad.rules import (
    JVP,
    LINEAR,
    LINEARIZE,
    MULTILINEAR,
    NOT_DIFFERENTIABLE,
    VJP,
    adjoint,
    is_differentiable,
    load_rules,
)

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
ELSEWHERE = {
    "cond": "its bodies are f32", "scan": "its body is f32", "while_loop": "its body is f32",
    "fake_quantize": "its derivative is not that of its steps",
}  # fmt: skip
"""Ops whose cases differences cannot check, and why: the first three have f64 cases in
test_derivatives_of_loops.py, the last has a test below."""


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
    if id not in {*NOT_DETERMINED, *NARROW} and case.op not in ELSEWHERE and has_derivative(case)
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


def test_fake_quantize_is_straight_through() -> None:
    """ct inside of the range, and 0 outside; for the scale q − x / scale inside, and q outside."""
    g = Graph("learned step")
    x, scale = g.input("x", [6], "f64"), g.input("scale", [], "f64")
    g.set_outputs(g.fake_quantize(x, scale, dtype="i8"))
    data = {"x": np.array([-70.0, -63.2, 0.2, 0.4, 63.6, 90.0]), "scale": np.array(0.5)}
    ct = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    found = pulled_back(g, data, ["x", "scale"], {"output_0": ct})
    assert np.array_equal(found["x"], [0, 2, 3, 4, 5, 0])
    q = np.array([-128, -126, 0, 1, 127, 127])
    inside = np.array([0, 1, 1, 1, 1, 0])
    assert np.allclose(found["scale"], np.sum(ct * (q - inside * data["x"] / 0.5)))


NO_RULE = {
    "quantize_blocks": "its results are bytes", "quantize_weight": "a packed weight",
    "state_update": "writes a state", "sample": "its results are integers",
}  # fmt: skip
"""Ops with float operands and no derivative, and why."""
REFUSED_BY_REASON = {"quantize_weight", "state_update"}


def has_float_result(name: str) -> bool:
    """Whether a result of an op without a rule may be a float."""
    cls = REGISTRY[name]
    found = [c for c in cases() if c.op == name]
    if not found:
        return not cls.is_source
    return any(has_derivative(case) for case in found)


def test_every_op_has_a_rule() -> None:
    """A new op needs a derivative, a rule or a decomposition; or its reason stands above, or no
    result of its cases is a float."""
    load_rules()
    without = {
        name for name, cls in REGISTRY.items()
        if name not in VJP and name not in JVP and name not in LINEARIZE
        and not (cls.has_zero_derivative or cls.has_decomposition())
        and not (cls.is_block or cls.is_source) and cls.__module__.startswith("rlx.ir.")
    }  # fmt: skip
    assert {name for name in without if has_float_result(name)} <= set(NO_RULE)
    assert set(NO_RULE) <= without, "an op that has a rule now"
    assert set(NOT_DIFFERENTIABLE) == REFUSED_BY_REASON
    ruled = {*VJP, *JVP, *LINEARIZE, *LINEAR, *MULTILINEAR} - {"custom"}
    assert {n for n in ruled if not n.startswith("test_")} <= set(REGISTRY)  # ops of other tests


def test_an_op_without_a_rule_is_named() -> None:
    g = Graph("packing")
    x = g.input("x", [4, 256], "f32")
    _, scale = g.quantize_weight(x, scheme=QuantScheme.int8())
    g.set_outputs(g.sum(scale))
    with pytest.raises(UnsupportedError, match=r"\[quantize_weight\] a packed weight has no"):
        vjp_graph(g, ["x"])
