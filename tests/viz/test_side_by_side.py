"""Kernels of one graph for two targets beside each other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlx import CompileOptions, DimBinding, GraphModule
from rlx.backends.registry import Device, backend_for_target
from rlx.errors import OptionError, UnsupportedError
from rlx.runtime.stages import Stages
from rlx.viz.side_by_side import as_page, as_text, pairs


def network(g: GraphModule) -> object:
    h = g.linear(g.input("x", ["batch", 8]), g.param("w", [8, 4]), activation="tanh")
    return g.softmax(h, axis=-1)


def stages(target: str) -> Stages:
    backend = backend_for_target(Device.of("cpu"), target)
    binding = DimBinding().set("batch", 8)
    return Stages(GraphModule.define("net", network), backend, CompileOptions(binding=binding))


def test_both_languages_of_both_targets() -> None:
    found = pairs(stages("x86-64-v3"), stages("sm_90a"), None)
    assert [p.language for p in found] == ["llvm", "asm"] * 2  # the product, then softmax
    for ir, code in zip(found[::2], found[1::2], strict=True):
        assert ir.left and ir.right and code.left and code.right
        assert ir.left.title.startswith("x86-64-v3: ")
        assert ir.right.title.startswith("sm_90a: ")
        assert ir.left.text.startswith("define ")
        assert "define ptx_kernel" in ir.right.text
        assert re.search(r"%[xyz]mm\d", code.left.text)
        assert ".target sm_90a" in code.right.text
    titles = [found[2].left, found[2].right]
    assert all(side and "softmax" in side.title for side in titles)


def test_columns_fit_and_nothing_is_cut_in_a_file() -> None:
    found = pairs(stages("x86-64-v3"), stages("sm_90a"), "asm")
    narrow = as_text(found, 80).splitlines()
    assert max(map(len, narrow)) <= 80
    assert any("…" in line for line in narrow)
    whole = as_text(found)
    assert "…" not in whole
    for pair in found:
        assert pair.right is not None
        assert all(line in whole for line in pair.right.text.splitlines())


def test_what_has_no_counterpart_stands_alone() -> None:
    def alone(g: GraphModule) -> object:
        return g.exp(g.input("x", ["batch", 8]))

    binding = DimBinding().set("batch", 8)
    other = Stages(
        GraphModule.define("net", alone),
        backend_for_target(Device.of("cpu"), "sm_80"),
        CompileOptions(binding=binding),
    )
    found = pairs(stages("x86-64-v3"), other, "llvm")
    assert [(p.left is None, p.right is None) for p in found] == [(False, True)] * 2 + [
        (True, False)
    ]
    assert "(part of another kernel)" in as_text(found)


def test_a_page_shows_names_as_text() -> None:
    page = as_page("<b>net</b>", pairs(stages("x86-64-v3"), stages("sm_90a"), "llvm"))
    assert "<b>" not in page
    assert "&lt;8 x float&gt;" in page
    assert "<script" not in page


def test_code_for_an_absent_gpu_does_not_run() -> None:
    backend = backend_for_target(Device.of("cpu"), "sm_90a")
    with pytest.raises(UnsupportedError, match="shown only"):
        backend.compile(stages("sm_90a").lir, CompileOptions())
    with pytest.raises(OptionError, match="unknown target"):
        backend_for_target(Device.of("cpu"), "sm_70")
    with pytest.raises(OptionError, match="no code to compare"):
        pairs(stages("x86-64-v3"), stages("sm_90a"), "lir")


def test_the_command(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from rlx.cli.app import app
    from rlx.ir.text import print_graph

    file, page = tmp_path / "net.mir", tmp_path / "net.html"
    file.write_text(print_graph(GraphModule.define("net", network).into_graph()))
    command = ["inspect", str(file), "--bind", "batch=8", "--beside", "sm_90a"]
    shown = CliRunner().invoke(app, [*command, "--stage", "asm", "-o", "-"])
    assert shown.exit_code == 0, shown.output
    assert ".target sm_90a" in shown.output
    assert CliRunner().invoke(app, [*command, "--html", str(page)]).exit_code == 0
    assert "LLVM IR" in page.read_text()
    assert CliRunner().invoke(app, [*command, "--stage", "lir"]).exit_code != 0
