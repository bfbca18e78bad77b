"""Quantised networks: in QDQ form, and of operators on integers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper
from onnx_models import model, value
from quantised_models import qdq_input, qdq_network

from rlx.formats.onnx import OnnxNode
from rlx.onnx import backend, fuse_quantized

GOLDENS = np.load(Path(__file__).resolve().parents[1] / "goldens" / "onnx.npz")


def ops_of(prepared: Any) -> list[str]:
    """The ops that run, of all segments."""
    found = []
    for segment in prepared.model.program.segments.values():
        for trace in segment.traces:
            found += [n.op.name for n in trace.graph.nodes]
    return found


def test_a_network_in_qdq_form_runs_on_integers() -> None:
    prepared = backend.prepare(qdq_network())
    (found,) = prepared.run([qdq_input()])
    ops = ops_of(prepared)
    assert ops.count("qlinear_conv") == 4 and "conv" not in ops and "matmul" not in ops
    # of the last quantised tensor, whose scale is 0.02, ONNX Runtime may round another way
    assert np.abs(found - GOLDENS["qdq_network.y"]).max() <= 0.02 * 1.001
    assert np.abs(found).max() > 1


def test_fused_or_not_the_results_are_a_step_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    (fused,) = backend.prepare(qdq_network()).run([qdq_input()])
    monkeypatch.setattr("rlx.onnx.program.fuse_quantized", lambda nodes, *_: tuple(nodes))
    prepared = backend.prepare(qdq_network())
    (plain,) = prepared.run([qdq_input()])
    assert "qlinear_conv" not in ops_of(prepared)
    assert np.abs(fused - plain).max() <= 0.02 * 1.001


def test_another_batch_runs_with_the_same_trace() -> None:
    prepared = backend.prepare(qdq_network())
    both = prepared.run([qdq_input()])[0]
    for i in range(2):
        np.testing.assert_array_equal(prepared.run([qdq_input()[i : i + 1]])[0][0], both[i])
    (segment,) = prepared.model.program.segments.values()
    assert len(segment.traces) == 1


def _small(**changes: Any) -> tuple[list[OnnxNode], dict[str, Any]]:
    """Nodes of one convolution in QDQ form, with some of its constants changed."""
    constants = {
        "xs": np.float32(0.1), "xz": np.uint8(3), "w": np.ones((4, 2, 1, 1), np.int8),
        "ws": np.full(4, 0.5, np.float32), "wz": np.zeros(4, np.int8),
        "b": np.zeros(4, np.int32), "bs": np.full(4, 0.05, np.float32),
        "bz": np.zeros(4, np.int32), "ys": np.float32(0.2), "yz": np.uint8(9),
    }  # fmt: skip
    constants |= {k: v for k, v in changes.items() if k in constants}
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "xs", "xz"], ["x"]),
        helper.make_node(
            "DequantizeLinear", ["w", "ws", "wz"], ["wd"], axis=changes.get("axis", 0)
        ),
        helper.make_node("DequantizeLinear", ["b", "bs", "bz"], ["bd"], axis=0),
        helper.make_node("Conv", ["x", "wd", "bd"], ["c"]),
        helper.make_node("QuantizeLinear", ["c", "ys", "yz"], ["y"]),
    ]
    return nodes, constants


@pytest.mark.parametrize(
    ("changes", "outputs"),
    [
        ({"bs": np.full(4, 0.06, np.float32)}, ["y"]),  # not units of x times w
        ({"bz": np.ones(4, np.int32)}, ["y"]),
        ({"axis": 1}, ["y"]),  # scales of channels that come in
        ({"yz": np.int16(9)}, ["y"]),
        ({"xs": np.full(2, 0.1, np.float32), "xz": np.zeros(2, np.uint8)}, ["y"]),
        ({}, ["y", "c"]),  # someone else reads the floats
    ],
)
def test_what_is_not_fused(changes: dict[str, Any], outputs: list[str]) -> None:
    nodes, constants = _small(**changes)
    proto = model(nodes, [value("q", [1, 2, 3, 3], np.uint8)], [value(o, None) for o in outputs],
                  constants)  # fmt: skip
    graph = backend.prepare(proto).model.file.graph
    kept = fuse_quantized.fuse_quantized(graph.nodes, outputs, graph.initializers)
    assert "QLinearConv" not in [n.op_type for n in kept]
    plain, constants = _small()
    proto = model(plain, [value("q", [1, 2, 3, 3], np.uint8)], [value("y", None)], constants)
    graph = backend.prepare(proto).model.file.graph
    fused = fuse_quantized.fuse_quantized(graph.nodes, ["y"], graph.initializers)
    assert [n.op_type for n in fused] == ["QLinearConv"]


@pytest.mark.parametrize("kind", [np.uint8, np.int8])
def test_matmul_integer_with_constant_weights(kind: Any) -> None:
    rng = np.random.default_rng(2)
    info = np.iinfo(kind)
    w = rng.integers(info.min, info.max, (70, 33), endpoint=True).astype(kind)
    zero = kind(130 if kind is np.uint8 else 0)
    weights = np.clip(w.astype(int), int(zero) - 128, int(zero) + 127).astype(kind)
    proto = model(
        [helper.make_node("MatMulInteger", ["a", "w", "az", "wz"], ["y"])],
        [value("a", ["rows", 5, 70], np.uint8)], [value("y", ["rows", 5, 33], np.int32)],
        {"w": weights, "az": np.uint8(77), "wz": zero},
    )  # fmt: skip
    prepared = backend.prepare(proto)
    for rows in (1, 4):
        a = rng.integers(0, 256, (rows, 5, 70)).astype(np.uint8)
        (found,) = prepared.run([a])
        exact = (a.astype(np.int64) - 77) @ (weights.astype(np.int64) - int(zero))
        np.testing.assert_array_equal(found, exact)
    assert "conv_integer" in ops_of(prepared)


def test_weights_that_do_not_fit_bytes_are_multiplied_as_floats() -> None:
    rng = np.random.default_rng(3)
    w = rng.integers(0, 256, (300, 7)).astype(np.uint8)
    proto = model(
        [helper.make_node("MatMulInteger", ["a", "w", "", "wz"], ["y"])],
        [value("a", [4, 300], np.uint8)], [value("y", [4, 7], np.int32)],
        {"w": w, "wz": np.uint8(3)},
    )  # fmt: skip
    prepared = backend.prepare(proto)
    a = rng.integers(0, 256, (4, 300)).astype(np.uint8)
    np.testing.assert_array_equal(
        prepared.run([a])[0], a.astype(np.int64) @ (w.astype(np.int64) - 3)
    )
    assert "conv_integer" not in ops_of(prepared)


def test_a_convolution_of_many_terms_is_exact() -> None:
    """Sums above 2^24, which f32 has not all of, and weights with a zero point that fits."""
    rng = np.random.default_rng(4)
    w = rng.integers(200, 256, (6, 256, 3, 3)).astype(np.uint8)
    x = rng.integers(200, 256, (1, 256, 8, 8)).astype(np.uint8)
    for zero, kernel in ((np.uint8(128), "conv_integer"), (np.uint8(0), "conv")):
        proto = model(
            [helper.make_node("ConvInteger", ["x", "w", "xz", "wz"], ["y"])],
            [value("x", [1, 256, 8, 8], np.uint8)], [value("y", [1, 6, 6, 6], np.int32)],
            {"w": w, "xz": np.uint8(1), "wz": zero},
        )  # fmt: skip
        prepared = backend.prepare(proto)
        (found,) = prepared.run([x])
        wide = np.lib.stride_tricks.sliding_window_view(x.astype(np.int64) - 1, (3, 3), axis=(2, 3))
        exact = np.einsum("bchwij,ocij->bohw", wide, w.astype(np.int64) - int(zero))
        np.testing.assert_array_equal(found, exact)
        assert kernel in ops_of(prepared) and np.abs(exact).max() > 2**24
