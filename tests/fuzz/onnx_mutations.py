"""Damaged ONNX models: bytes changed, and structures that parse but say something else."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from onnx import AttributeProto, ModelProto, helper
from test_formats_fuzz import damaged

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "importers"))
from onnx_models import drawn, model, network, value
from quantised_models import qdq_network

_NUMBERS = [0, 1, -1, 2, 3, 7, -7, 255, 2**20, 2**31 - 1, 2**31, -(2**31), 2**40, 2**62, -(2**63)]
_REALS = [0.0, 1.0, -1.0, 1e-30, 1e30, float("inf"), float("nan")]


def seeds() -> list[Any]:
    """Small models of many operators."""
    node = helper.make_node
    body = helper.make_graph(
        [node("Add", ["v", "v"], ["w"]), node("Identity", ["c"], ["d"])], "body",
        [value("i", [], np.int64), value("c", [], np.bool_), value("v", ["n"])],
        [value("d", [], np.bool_), value("w", ["n"])],
    )  # fmt: skip
    loop = model(
        [node("Loop", ["k", "yes", "x"], ["y"], body=body)], [value("x", ["n"])],
        [value("y", None)], {"k": np.array(3), "yes": np.array(True)},
    )  # fmt: skip
    shapes = model(
        [
            node("Shape", ["x"], ["s"]), node("Slice", ["s", "a", "b"], ["t"]),
            node("Concat", ["t", "m"], ["u"], axis=0), node("Reshape", ["x", "u"], ["r"]),
            node("Transpose", ["r"], ["p"], perm=[1, 0]), node("Softmax", ["p"], ["q"], axis=-1),
            node("Pad", ["q", "pads"], ["z"]), node("Split", ["z"], ["e", "f"], num_outputs=2),
            node("Gather", ["e", "i"], ["g"], axis=0), node("Tile", ["g", "reps"], ["y"]),
        ],
        [value("x", ["n", 4])], [value("y", None)],
        {"a": np.array([0]), "b": np.array([1]), "m": np.array([-1]),
         "pads": np.array([0, 1, 0, 1]), "i": np.array([0, 1]), "reps": np.array([1, 2])},
    )  # fmt: skip
    quantised = model(
        [
            node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
            node("MatMulInteger", ["q", "w", "z"], ["p"]), node("Cast", ["p"], ["f"], to=1),
            node("Mul", ["f", "s"], ["h"]), node("Resize", ["h", "", "scales"], ["y"]),
        ],
        [value("x", ["n", 4])], [value("y", None)],
        {"w": np.arange(12, dtype=np.int8).reshape(4, 3), "scales": np.array([1.0, 2.0], "f4")},
    )  # fmt: skip
    recurrent = model(
        [
            node("LSTM", ["x", "w", "r"], ["a", "h"], hidden_size=2),
            node("Squeeze", ["a", "one"], ["b"]), node("TopK", ["b", "k"], ["v", "i"]),
            node("ReduceSum", ["v", "one"], ["y"]),
        ],
        [value("x", [3, "n", 4])], [value("y", None)],
        {"w": drawn(1, 8, 4), "r": drawn(1, 8, 2), "one": np.array([1]), "k": np.array([1])},
    )  # fmt: skip
    text = model(
        [node("StringNormalizer", ["t"], ["u"], stopwords=["a"]), node("StringSplit", ["u"],
         ["y", "n"], delimiter=" ")], [value("t", ["n"], str)], [value("y", None, str)],
    )  # fmt: skip
    return [
        network(), loop, shapes, quantised, recurrent, text, qdq_network(), _branches(),
        _transformer(), _classic(),
    ]  # fmt: skip


def _branches() -> Any:
    """Subgraphs that read values around them, a sequence and an optional."""
    node = helper.make_node
    yes = helper.make_graph([node("Mul", ["x", "x"], ["p"])], "yes", [], [value("p", None)])
    no = helper.make_graph([node("Neg", ["x"], ["q"])], "no", [], [value("q", None)])
    body = helper.make_graph(
        [node("Add", ["s", "e"], ["t"]), node("Identity", ["t"], ["o"])], "body",
        [value("s", [2]), value("e", [2])], [value("t", [2]), value("o", [2])],
    )  # fmt: skip
    return model(
        [
            node("If", ["c"], ["a"], then_branch=yes, else_branch=no),
            node("Scan", ["zero", "a"], ["last", "all"], body=body, num_scan_inputs=1),
            node("SplitToSequence", ["all"], ["parts"], axis=0, keepdims=0),
            node("Optional", ["parts"], ["maybe"]), node("OptionalGetElement", ["maybe"], ["got"]),
            node("SequenceAt", ["got", "k"], ["one"]), node("Add", ["one", "last"], ["y"]),
        ],
        [value("x", ["n", 2])], [value("y", None)],
        {"c": np.array(True), "zero": np.zeros(2, "f4"), "k": np.array(1)},
    )  # fmt: skip


def _transformer() -> Any:
    """Operators of Microsoft's domain."""

    def node(kind: str, given: list[str], made: list[str], **more: Any) -> Any:
        return helper.make_node(kind, given, made, domain="com.microsoft", **more)

    made = model(
        [
            node("SkipLayerNormalization", ["x", "x", "g"], ["a"], epsilon=1e-5),
            node("MultiHeadAttention", ["a", "a", "a"], ["b"], num_heads=2),
            node("MatMulNBits", ["b", "w", "s"], ["c"], K=16, N=8, bits=4, block_size=16),
            node("FastGelu", ["c"], ["d"]), node("FusedMatMul", ["d", "m"], ["y"], transB=1),
        ],
        [value("x", ["n", 3, 16])], [value("y", None)],
        {"g": np.ones(16, "f4"), "w": np.arange(64, dtype=np.uint8).reshape(8, 1, 8),
         "s": np.full((8, 1), 0.1, "f4"), "m": drawn(4, 8)},
    )  # fmt: skip
    made.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return made


def _classic() -> Any:
    """Operators of `ai.onnx.ml`: two trees, and a normaliser."""
    domain = "ai.onnx.ml"
    trees = helper.make_node(
        "TreeEnsembleRegressor", ["n"], ["y"], domain=domain, n_targets=1,
        nodes_treeids=[0, 0, 0, 1, 1, 1], nodes_nodeids=[0, 1, 2, 0, 1, 2],
        nodes_featureids=[0, 0, 0, 1, 0, 0], nodes_values=[0.5, 0.0, 0.0, 0.1, 0.0, 0.0],
        nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"] * 2, nodes_truenodeids=[1, 0, 0, 1, 0, 0],
        nodes_falsenodeids=[2, 0, 0, 2, 0, 0], target_treeids=[0, 0, 1, 1],
        target_nodeids=[1, 2, 1, 2], target_ids=[0, 0, 0, 0], target_weights=[1.0, 2.0, 3.0, 4.0],
    )  # fmt: skip
    made = model(
        [helper.make_node("Normalizer", ["x"], ["n"], domain=domain, norm="L2"), trees],
        [value("x", ["n", 2])], [value("y", None)], {},
    )  # fmt: skip
    made.opset_import.append(helper.make_opsetid(domain, 3))
    return made


def mutated(rng: random.Random, whole: list[Any]) -> bytes:
    """A damaged model."""
    proto = rng.choice(whole)
    if rng.random() < 0.4:
        return damaged(proto.SerializeToString(), rng)
    made = ModelProto()
    made.CopyFrom(proto)
    for _ in range(rng.choice([1, 1, 2, 3])):
        _change(rng, made)
    return made.SerializeToString()


def _change(rng: random.Random, made: Any) -> None:
    nodes = list(_nodes(made.graph))
    if not nodes:
        return
    node = rng.choice(nodes)
    kind = rng.randrange(9)
    if kind == 0 and node.attribute:
        _change_attribute(rng, rng.choice(node.attribute))
    elif kind == 1:
        node.op_type = rng.choice(nodes).op_type
    elif kind == 2 and node.input:
        names = [n for other in nodes for n in (*other.input, *other.output)]
        node.input[rng.randrange(len(node.input))] = rng.choice([*names, "", "nowhere"])
    elif kind == 3 and node.input:
        del node.input[rng.randrange(len(node.input))]
    elif kind == 4 and made.graph.initializer:
        _change_tensor(rng, rng.choice(made.graph.initializer))
    elif kind == 5 and node.attribute:
        del node.attribute[rng.randrange(len(node.attribute))]
    elif kind == 6 and made.graph.input:
        dims = rng.choice(made.graph.input).type.tensor_type.shape.dim
        if dims:
            rng.choice(dims).dim_value = rng.choice(_NUMBERS)
    elif kind == 7:
        made.opset_import[0].version = rng.choice([0, 1, 5, 7, 9, 11, 13, 16, 18, 28, 999])
    else:
        node.attribute.append(
            helper.make_attribute(rng.choice(["axis", "pads", "perm", "mode", "to"]),
                                  rng.choice([1, -5, [1, 2], 2**40, "linear", 0.5]))
        )  # fmt: skip


def _nodes(graph: Any) -> Iterator[Any]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield from _nodes(attribute.g)


def _change_attribute(rng: random.Random, attribute: Any) -> None:
    if attribute.type == AttributeProto.INTS and attribute.ints:
        attribute.ints[rng.randrange(len(attribute.ints))] = rng.choice(_NUMBERS)
    elif attribute.type == AttributeProto.INT:
        attribute.i = rng.choice(_NUMBERS)
    elif attribute.type == AttributeProto.FLOAT:
        attribute.f = rng.choice(_REALS)
    elif attribute.type == AttributeProto.STRING:
        attribute.s = rng.choice([b"", b"linear", b"\xff", b"SAME_UPPER"])
    else:
        attribute.type = rng.randrange(12)


def _change_tensor(rng: random.Random, tensor: Any) -> None:
    kind = rng.randrange(3)
    if kind == 0 and tensor.dims:
        tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice(_NUMBERS)
    elif kind == 1:
        tensor.data_type = rng.randrange(30)
    elif tensor.raw_data:
        data = bytearray(tensor.raw_data)
        for _ in range(rng.randrange(1, 9)):
            data[rng.randrange(len(data))] = rng.choice([0, 1, 127, 128, 255])
        tensor.raw_data = bytes(data)
