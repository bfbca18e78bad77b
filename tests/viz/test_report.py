"""The records and the page of a report; tests/browser opens the page."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.backends.cpu.backend import CpuBackend
from rlx.errors import OptionError, UnsupportedError
from rlx.llvm.target import Target
from rlx.viz.report import Report, make_report, write_page
from rlx.viz.report.page import embedded_json, page

HOSTILE = '</script><script>alert("1")</script><!--\u2028&amp;<img src=x onerror=alert(1)>'
BATCH, INTO, WIDE, OUT = 4, 64, 96, 16


def two_layers(g: rlx.GraphModule) -> Any:
    x = g.input("x", ["batch", INTO])
    with g.block("net"):
        for i in range(2):
            with g.block(f"layer.{i}"):
                x = g.rms_norm(x, g.param(f"norm.{i}", [INTO]))
                wide = g.linear(x, g.param(f"up.{i}", [INTO, WIDE]), activation="gelu")
                x = x + g.linear(wide, g.param(f"down.{i}", [WIDE, INTO]))
    return {"y": g.linear(x, g.param("head", [INTO, OUT]))}


@pytest.fixture(scope="module")
def module() -> rlx.GraphModule:
    return rlx.GraphModule.define("two", two_layers)


@pytest.fixture(scope="module")
def options() -> rlx.CompileOptions:
    return rlx.CompileOptions(binding=rlx.DimBinding(batch=BATCH), threads=1)


@pytest.fixture(scope="module")
def report(module: rlx.GraphModule, options: rlx.CompileOptions) -> Report:
    return make_report(module, options, facts=[("made by", "a test")])


def test_blocks_are_a_tree_of_all_stages(report: Report) -> None:
    paths = [b.path for b in report.blocks]
    assert paths[0] == ""
    assert report.blocks[0].name == "two"
    inner = report.blocks[paths.index("net.layer.1")]
    assert inner.name == "layer.1"  # a number belongs to the name before it
    assert report.blocks[inner.parent].path == "net"
    assert all(b.parent < i for i, b in enumerate(report.blocks))
    for stage in ("hir", "mir", "lir"):
        held = sorted(i for b in report.blocks for i in getattr(b, stage))
        assert held == list(range(len(getattr(report, stage))))  # every statement in one block
    ops = [report.hir[i].op for i in inner.hir]
    assert ops.count("hir.linear") == 2


def test_statements_say_shape_origin_and_place(
    report: Report, module: rlx.GraphModule, options: rlx.CompileOptions
) -> None:
    lir = rlx.Session("cpu").template(module, options).plan({})
    assert len(report.lir) == len(lir.graph)
    for node, statement in zip(lir.graph.nodes, report.lir, strict=True):
        assert (statement.id, statement.op, statement.name) == (node.id, node.op.name, node.name)
        for value, result in zip(node.outputs, statement.results, strict=True):
            slot = lir.slots[value]
            assert f"{result.shape} {result.dtype}" == str(value.shape)
            assert result.place is not None
            assert (result.place.kind, result.place.offset) == (slot.kind, slot.offset)
            assert (result.place.first, result.place.last) == (slot.first, slot.last)
    (wide,) = [s for s in report.hir if s.name == "up.0"]
    assert wide.source
    assert wide.at.startswith("test_report.py:")
    assert wide.results[0].place is None
    assert {s.phase for s in report.lir if not s.source} <= {"steady_state", "epilogue"}
    assert any("lower_hir" in s.via for s in report.mir)


def test_the_arena_is_the_plan(report: Report) -> None:
    assert report.arena.positions == len(report.lir)
    names = {v.name for v in report.arena.values}
    assert "x" in names
    assert max(v.offset + v.size for v in report.arena.values) <= report.arena.size


def test_kernels_are_measured(report: Report) -> None:
    measured = report.measured
    assert measured is not None
    assert measured.weights == "zeros"
    uses = measured.kernels
    assert [u.seconds for u in uses] == sorted((u.seconds for u in uses), reverse=True)
    # two products and their activations in each layer, one more at the end
    products = 2 * BATCH * (2 * (INTO * WIDE + WIDE * INTO) + INTO * OUT)
    found = sum(u.flops for u in uses if "matmul" in u.op)
    assert products <= found <= 1.1 * products
    assert {r.name for r in measured.roofs} >= {"memory", "cache", "f32"}
    assert all(r.gb > 0 or r.gflops > 0 for r in measured.roofs)
    layers = {b for u in uses for b in u.blocks if b.startswith("net.layer")}
    assert layers
    assert all(b.startswith("net.layer.*") for b in layers)
    spent = sum(s.seconds for s in report.lir)
    assert spent == pytest.approx(sum(u.seconds for u in uses), rel=1e-6)


def test_compile_time_is_reported_part_by_part(report: Report) -> None:
    parts = [s.part for s in report.spent]
    assert list(dict.fromkeys(parts)) == ["passes", "plan", "code", "llvm", "program", "weights"]
    passes = [s.name for s in report.spent if s.part == "passes"]
    assert passes[0] == "lower_hir"
    assert "fuse.regions" in passes
    kernels = next(value for name, value in report.facts if name == "program")
    assert kernels.endswith(f"of {parts.count('llvm')} kernels")
    llvm = [s for s in report.spent if s.part == "llvm"]
    assert all(s.seconds > 0 and re.match(r"\d+ lines of IR, \d+ bytes", s.note) for s in llvm)


def test_fusion_and_dispatch(report: Report) -> None:
    assert any(f.count and not f.reason for f in report.fused)
    assert all("*" in b for f in report.fused for b in f.blocks if b.startswith("net.layer"))
    assert "native" in {d.outcome for d in report.dispatch}
    assert ("made by", "a test") in report.facts
    assert ("sizes", f"batch = {BATCH}") in report.facts


def test_given_weights_and_other_devices(
    module: rlx.GraphModule, options: rlx.CompileOptions
) -> None:
    shapes = {n.name: n.output.shape for n in module.into_graph().sources("param")}
    params = {n: np.ones(s.static_dims, np.float32) for n, s in shapes.items()}
    found = make_report(module, options, device="reference", params=params)
    assert found.measured is not None
    assert found.measured.weights == "those of the model"
    assert found.measured.roofs == []
    assert [s.part for s in found.spent if s.part == "llvm"] == []
    other = "x86-64-v3" if not Target.host().is_x86 else "armv8"
    elsewhere = make_report(module, options, device=CpuBackend(Target.named(other)))
    assert elsewhere.measured is None
    assert any(s.part == "llvm" for s in elsewhere.spent)
    with pytest.raises(OptionError, match="sizes are open; got batch"):
        make_report(module)


def test_data_cannot_end_its_element() -> None:
    text = embedded_json({"name": HOSTILE, "lone": "\ud800"})
    assert text.isascii()
    assert not set("<>&") & set(text)
    assert json.loads(text) == {"name": HOSTILE, "lone": "\ud800"}


def test_the_page_holds_all_and_fetches_nothing(report: Report, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    write_page(file, report)
    text = file.read_text(encoding="utf-8")
    assert re.findall(r"""\s(?:src|href)=["'](?!#|data:)""", text.split("<script")[0]) == []
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert policy[1].startswith("default-src 'none';")
    assert "unsafe-eval" not in policy[1]
    script = text[text.rindex("<script>") + len("<script>") : text.rindex("</script>")]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"'sha256-{digest}'" in policy[1]
    data = text.split('id="data">')[1].split("</script>")[0]
    assert json.loads(data)["arena"]["size"] == report.arena.size
    assert len(text) < 2_000_000


def test_names_are_text(options: rlx.CompileOptions) -> None:
    def build(g: rlx.GraphModule) -> Any:
        with g.block(HOSTILE):
            return {HOSTILE: g.linear(g.input(HOSTILE, [2, 8]), g.param("w" + HOSTILE, [8, 8]))}

    text = page(make_report(rlx.GraphModule.define(HOSTILE, build), name=HOSTILE))
    assert "<script>alert" not in text
    assert "<img" not in text
    assert text.count("<script") == 3  # data, library and page


def test_the_library_may_be_missing(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bokeh", None)
    with pytest.raises(UnsupportedError, match="hint: pip install bokeh"):
        page(report)
