"""The commands that take ONNX files: inspect, profile, compile and bench."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from rlx.onnx import load_compiled


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """y = relu(x·w): x [batch, 3], w [3, 5]."""
    w = numpy_helper.from_array(np.arange(15, dtype=np.float32).reshape(3, 5) - 7, "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Relu", ["p"], ["y"])]
    x = helper.make_tensor_value_info("x", 1, ["batch", 3])
    y = helper.make_tensor_value_info("y", 1, ["batch", 5])
    graph = helper.make_graph(nodes, "net", [x], [y], [w])
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), tmp_path / "net.onnx")
    return tmp_path / "net.onnx"


def test_a_summary(rlx: Any, file: Path) -> None:
    found = json.loads(rlx("inspect", file, "--json").stdout)
    assert found["inputs"] == "x: float[batch, 3]" and found["outputs"] == "y: float[batch, 5]"
    assert found["weight_bytes"] == 60 and found["operators"] == "MatMul 1, Relu 1"


def test_a_stage_and_a_report(rlx: Any, file: Path, tmp_path: Path) -> None:
    assert "[batch, 3] f32" in rlx("inspect", file, "--stage", "mir").stdout
    assert "[7, 5] f32" in rlx("inspect", file, "--stage", "lir", "--bind", "batch=7").stdout
    page = tmp_path / "report.html"
    done = rlx("inspect", file, "--bind", "batch=7", "--html", page)
    assert f"wrote {page}" in done.stderr and "net.onnx" in page.read_text()


def test_kernels_and_times(rlx: Any, file: Path) -> None:
    found = json.loads(rlx("profile", file, "--bind", "batch=64", "--json").stdout)
    (part,) = [part for name, part in found.items() if name != "model"]
    assert sum(k["flops"] for k in part["kernels"]) >= 2 * 64 * 3 * 5
    timed = json.loads(rlx("bench", file, "--bind", "batch=64", "--json").stdout)
    assert timed["inputs"] == {"x": [64, 3]} and 0 < timed["seconds"] < timed["first_seconds"]


def test_a_compiled_file_says_for_which_sizes(rlx: Any, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "net.rlx"
    done = rlx("compile", file, "--out", out, "--bind", "batch=4")
    assert "net.rlx: for x [4, 3]; " in " ".join(done.stderr.split())
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    (y,) = load_compiled(out).run(x=x)
    w = np.arange(15, dtype=np.float32).reshape(3, 5) - 7
    np.testing.assert_allclose(y, np.maximum(x @ w, 0))  # whole numbers, which f32 has exactly


def test_sizes_that_the_file_does_not_have(rlx: Any, file: Path) -> None:
    done = rlx("compile", file, "--out", "never.rlx", "--bind", "size=4")
    assert done.exit_code == 1
    assert "no such dimension; got size; expected batch" in " ".join(done.stderr.split())
    assert not Path("never.rlx").exists()
