"""Native kernel, decomposition or neither: what becomes of each op on a device, and the report."""

from __future__ import annotations

import pytest
from pass_support import assert_same_results, op_names

from rlx.errors import UnsupportedError
from rlx.ir.graph import Graph
from rlx.ir.quant.scheme import QuantScheme
from rlx.ir.verify import verify
from rlx.passes.legalize import legalize
from rlx.passes.report import DispatchReport

_PRIMITIVE_KINDS = {"max", "sub", "exp", "sum", "div", "mul", "add", "erf", "scan", "where", "neg"}


def gelu_graph() -> Graph:
    g = Graph("gelu")
    with g.block("mlp"):
        y = g.gelu(g.input("x", ["n", 4]))
        z = g.softmax(y)
    return g.set_outputs(z)


def test_the_dispatch_report_has_the_outcome_of_each_op() -> None:
    report = DispatchReport()
    after = legalize(gelu_graph(), {"gelu", *_PRIMITIVE_KINDS}, report=report)
    rows = {r.op: r for r in report.rows}
    assert rows["gelu"].outcome == "native"
    assert (rows["softmax"].outcome, rows["softmax"].nodes) == ("rewritten", 1)
    assert rows["softmax"].why == "no native kernel"
    assert rows["exp"].outcome == "native"
    assert "softmax" not in op_names(after)
    text = str(report)
    assert text.index("softmax") < text.index("exp")  # troubles first


def test_the_policy_chooses_and_the_report_tells() -> None:
    report = DispatchReport()

    def choose(kind: str, has_native: bool, has_common: bool) -> str:
        return "common" if kind == "gelu" else "native"

    after = legalize(gelu_graph(), lambda n: True, choose, report)
    assert op_names(after) == ["mul", "mul", "erf", "add", "mul", "softmax"]
    (row,) = [r for r in report.rows if r.op == "gelu"]
    assert (row.outcome, row.why) == ("common", "chosen by the dispatch policy")
    assert_same_results(gelu_graph(), after)


def test_what_cannot_run_fails_with_the_report() -> None:
    g = Graph("unsupported")
    with g.block("router"):
        values, _ = g.top_k(g.input("x", ["n", 4]), k=2)
    g.set_outputs(g.exp(values))
    with pytest.raises(UnsupportedError) as caught:
        legalize(g, {"exp"})
    error = caught.value
    assert error.got == "top_k"
    assert "router" in str(error)
    assert "no native kernel and no decomposition" in str(error)
    assert error.hint.startswith("give the op a decomposition")
    report: DispatchReport = error.report  # type: ignore[attr-defined]
    assert [r.op for r in report.unsupported] == ["top_k"]


def test_a_forced_kernel_that_is_not_there_fails() -> None:
    def choose(kind: str, has_native: bool, has_common: bool) -> str:
        return "native" if has_native else "unsupported"

    with pytest.raises(UnsupportedError, match="asks for a native kernel, which does not exist"):
        legalize(gelu_graph(), {"softmax"}, choose)


def test_gguf_blocks_need_a_kernel() -> None:
    scheme = QuantScheme.parse("Q4_0")
    g = Graph("gguf")
    x, w = g.input("x", ["n", 32]), g.param("w", scheme.packed_shape(4, 32), "u8")
    g.set_outputs(g.dequant_matmul(x, w, scheme=scheme))
    with pytest.raises(UnsupportedError, match="dequant_moe_weights"):
        legalize(g, lambda n: not n.op.has_decomposition())


def test_nested_graphs_are_legal_too() -> None:
    body = Graph("step")
    h, x = body.input("h", [4]), body.input("x", [4])
    body.set_outputs(body.gelu(h + x), names=["h"])
    g = Graph("loop")
    g.set_outputs(g.scan(g.input("h", [4]), g.input("xs", ["n", 4]), body=body, n_carry=1, n_xs=1))
    before = g.copy()
    report = DispatchReport()
    after = legalize(g, _PRIMITIVE_KINDS, report=report)
    verify(after, after="legalize")
    (scan,) = [n for n in after.nodes if n.op.name == "scan"]
    assert "gelu" not in op_names(scan.op.body.graph)  # type: ignore[attr-defined]
    assert report.outcome("gelu") == {"rewritten"}
    assert report.outcome("erf") == {"native"}
    assert_same_results(before, after)
