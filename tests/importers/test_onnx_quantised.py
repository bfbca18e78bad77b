"""Quantised networks: in QDQ form, and of operators on integers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quantised_models
from onnx import helper
from onnx_models import model, value
from quantised_models import qdq_input, qdq_network

from rlx.errors import RlxError
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


def _with_sum(relu: bool, swapped: bool, others: bool) -> Any:
    """Two convolutions of one tensor, added."""
    w = quantised_models.Writer(9)
    x = w.quantised("x", 0.02, 128)
    parts = []
    for name, scale, zero, kind in (("u", 0.031, -7, np.int8), ("v", 0.023, 120, np.uint8)):
        y = w.node("Conv", [x, *w.weights(name, (8, 3, 3, 3), 0, 0.02)], f"{name}c", pads=[1] * 4)
        parts.append(w.quantised(y, scale, zero, kind))
    y = w.node("Add", parts[:: -1 if swapped else 1], "a")
    if relu:
        y = w.node("Relu", [y], "r")
    w.quantised(y, 0.037, 11)
    outputs = [value(f"{y}.q", None, np.uint8)]
    if others:
        outputs += [value("uc.q", None, np.int8), value("vc.q", None, np.uint8)]
    dims = ["batch", *quantised_models.SHAPE[1:]]
    return model(w.nodes, [value("x", dims)], outputs, w.constants)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_a_sum_is_part_of_its_convolution(relu: bool, swapped: bool) -> None:
    fused = backend.prepare(_with_sum(relu, swapped, others=False))
    found = fused.run([qdq_input()])[0]
    nodes = fuse_quantized.fuse_quantized(
        fused.model.file.graph.nodes, [a.name for a in fused.model.outputs],
        fused.model.file.graph.initializers,
    )  # fmt: skip
    assert [n.op_type for n in nodes] == ["QuantizeLinear", "QLinearConv", "QLinearConvAdd"]
    plain = backend.prepare(_with_sum(relu, swapped, others=True))  # whose bytes are results, too
    want = plain.run([qdq_input()])[0]
    np.testing.assert_array_equal(found, want)
    assert len(np.unique(want)) > 60
    # and so says the formula of the operators
    u, v = (np.asarray(a).astype(np.float32) for a in plain.run([qdq_input()])[1:])
    total = (u + 7) * np.float32(0.031) + (v - 120) * np.float32(0.023)
    total = np.maximum(total, 0) if relu else total
    exact = np.clip(np.rint(total / np.float32(0.037)) + 11, 0, 255)
    np.testing.assert_array_equal(found, exact)


def test_a_sum_with_a_broadcast_tensor() -> None:
    """The other tensor has another shape, which only tracing shows."""
    w = quantised_models.Writer(4)
    x = w.quantised("x", 0.02, 128)
    y = w.node("Conv", [x, *w.weights("u", (3, 3, 1, 1), 0, 0.02)], "uc")
    y = w.quantised(y, 0.03, 5)
    mean = w.quantised(w.node("GlobalAveragePool", [x], "p"), 0.01, 128)
    y = w.node("Add", [y, mean], "a")
    w.quantised(y, 0.04, 9)
    given = [value("x", ["batch", *quantised_models.SHAPE[1:]])]
    fused = backend.prepare(model(w.nodes, given, [value("a.q", None, np.uint8)], w.constants))
    outputs = [value(n, None, np.uint8) for n in ("a.q", "uc.q", "p.q")]
    plain = backend.prepare(model(w.nodes, given, outputs, w.constants))
    want, *_ = plain.run([qdq_input()])
    np.testing.assert_array_equal(fused.run([qdq_input()])[0], want)


@pytest.mark.parametrize("kind", ["Add", "Relu", "QuantizeLinear"])
@pytest.mark.parametrize("count", [0, 1, 3, 4])
def test_damaged_nodes_of_a_sum_are_typed_errors(kind: str, count: int) -> None:
    proto = _with_sum(relu=True, swapped=False, others=False)
    node = [n for n in proto.graph.node if n.op_type == kind][-1]
    given = (list(node.input) * 4)[:count]
    intact = given == list(node.input)
    node.ClearField("input")
    node.input.extend(given)
    if intact:
        assert backend.prepare(proto).run([qdq_input()])
        return
    with pytest.raises(RlxError):
        backend.prepare(proto).run([qdq_input()])
