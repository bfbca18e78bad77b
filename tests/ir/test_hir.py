"""Building HIR: tensors by name, flags, the way out to MIR, blocks of one's own, and errors."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.errors import (
    AttributeValueError,
    DTypeError,
    InputError,
    OptionError,
    RlxError,
    ShapeError,
)
from rlx.ir.graph import Graph
from rlx.ir.hir import REGISTERED, Block, HirModule, block
from rlx.ir.interp import evaluate
from rlx.ir.methods import BlockMethods, ValueMethods
from rlx.ir.node import Value
from rlx.ir.op import REGISTRY, make_op


@pytest.fixture
def m() -> HirModule:
    return HirModule("m")


# -- building ---------------------------------------------------------------------------------


def test_every_block_of_the_specification_is_there(m: HirModule) -> None:
    stated = """linear linear_fused shared_linear_pair swiglu_ffn rms_norm residual_rms_norm
        attention rope depthwise_conv1d_causal dequant_matmul gated_delta_net gated_delta_net_carry
        layer_norm gelu_ffn geglu_ffn embedding lm_head moe_ffn lora_linear conv2d"""
    for name in stated.split():
        assert REGISTRY[f"hir.{name}"].is_block
        method = getattr(m, name)
        assert method.__name__ == name and method.__doc__
    for source in ("input", "param", "constant", "state"):
        assert callable(getattr(m, source))


def test_tensors_by_position_and_by_name_make_the_same_node(m: HirModule) -> None:
    x, w, b = m.input("x", ["batch", 4]), m.param("w", [4, 3]), m.param("b", [3])
    ways = [
        m.linear(x, w, b, "gelu"),
        m.linear(x, w, bias=b, activation="gelu"),
        m.linear(x=x, w=w, bias=b, activation="gelu"),
        m.linear(x, activation="gelu", bias=b, w=w),
    ]
    assert {(v.node.op, v.node.inputs) for v in ways} == {(ways[0].node.op, (x, w, b))}


def test_numbers_after_the_required_tensors_are_attributes(m: HirModule) -> None:
    x, gamma = m.input("x", [2, 4]), m.param("gamma", [4])
    assert m.rms_norm(x, gamma, 1e-3).node.op.eps == 1e-3
    assert m.rms_norm(x, gamma, None, 1e-3).node.op.eps == 1e-3
    assert len(m.rms_norm(x, gamma, gamma, 1e-3).node.inputs) == 3


def test_flags_say_which_tensor_is_absent(m: HirModule) -> None:
    x, up, down = m.input("x", [2, 4]), m.param("up", [4, 8]), m.param("down", [8, 4])
    b = m.param("b", [4])
    node = m.gelu_ffn(x, up, down, None, b).node
    assert node.inputs == (x, up, down, b)
    assert (node.op.has_up_bias, node.op.has_down_bias) == (False, True)
    assert node.op.operand_names(4) == ["x", "up_w", "down_w", "down_bias"]
    assert node.op.spread([x, up, down, b]) == [x, up, down, None, b]


def test_arrays_become_constants(m: HirModule) -> None:
    x = m.input("x", ["batch", 2])
    w = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
    graph = m.set_outputs(m.linear(x, w, bias=np.ones(3, np.float32))).lower()
    (y,) = evaluate(graph, [np.ones((1, 2), np.float32)])
    assert y.tolist() == [[6.0, 8.0, 10.0]]


def test_mir_ops_and_operators_work_on_hir_values(m: HirModule) -> None:
    x = m.input("x", ["batch", 4])
    y = m.linear(x, m.param("w", [4, 4])) + x * 2.0
    assert m.softmax(y).node.kind == "softmax"
    assert [v.graph is m for v in (x, y)] == [True, True]


def test_mir_reaches_the_op_behind_a_block(m: HirModule) -> None:
    x, gamma = m.input("x", [2, 4]), m.param("gamma", [4])
    assert m.rms_norm(x, gamma).node.kind == "hir.rms_norm"
    assert m.mir("rms_norm", [x, gamma], eps=0.5, name="n").node.name == "n"
    assert m.mir("rms_norm", (x, gamma)).node.kind == "rms_norm"
    assert m.mir("exp", x).node.kind == "exp"
    assert m.mir("concat", [x, x], axis=1).shape.dims == (2, 8)
    assert m.mir(make_op("sum", {"axis": (0,)}), x, shape=[4]).shape.dims == (4,)
    assert m.mir("iota", shape=(3,)).shape.dims == (3,)
    for op, hint in (("hir.linear", "linear"), ("input", "input")):
        with pytest.raises(InputError, match=rf"(?s)not a MIR op.*call \.{hint}"):
            m.mir(op, [x])
    with pytest.raises(InputError, match="a record has its attributes"):
        m.mir(make_op("sum", {}), x, axis=(0,))
    with pytest.raises(OptionError, match="unknown op"):
        m.mir("nonsense", x)


def test_a_stated_shape_is_checked(m: HirModule) -> None:
    x, w = m.input("x", ["batch", 4]), m.param("w", [4, 3])
    assert m.linear(x, w, shape=["batch", 3]).shape.dims[1] == 3
    with pytest.raises(ShapeError, match="not the stated shape"):
        m.linear(x, w, shape=["batch", 4])


def test_symbolic_shapes(m: HirModule) -> None:
    x = m.input("x", ["batch", "seq", 8])
    y, total = m.residual_rms_norm(x, x, m.param("g", [8]))
    assert y.shape is total.shape is x.shape
    heads = m.attention(x, x, x, num_heads=2, mask_kind="causal")
    assert str(heads.shape) == "[batch, seq, 8] f32"
    rows = m.input("rows", ["rows", 8])
    pair = m.shared_linear_pair(rows, m.param("a", [8, 2]), m.param("b", [8, "n"]))
    assert [str(v.shape) for v in pair] == ["[rows, 2] f32", "[rows, n] f32"]


def test_blocks_repeat_one_record(m: HirModule) -> None:
    x, g = m.input("x", ["batch", 8]), m.param("g", [8])
    a, b = m.rms_norm(x, g, eps=1e-5), m.rms_norm(x, g, eps=1e-5)
    assert a.node.op is b.node.op


def test_reference_and_cost_of_a_block(m: HirModule) -> None:
    record = REGISTERED["swiglu_ffn"]()
    x, up, gate, down = (np.ones(s, np.float32) for s in ([2, 3], [3, 4], [3, 4], [4, 3]))
    y = record.reference(x, up, gate, down)
    hidden = 3 / (1 + np.exp(-3)) * 3  # silu(3) · 3, summed over 4 hidden places
    assert np.allclose(y, 4 * hidden, rtol=1e-6)
    shapes = [rlx.Shape(a.shape) for a in (x, up, gate, down)]
    assert record.cost(shapes, [shapes[0]]).flops >= 2 * 2 * (3 * 4 * 2 + 4 * 3)


# -- errors -----------------------------------------------------------------------------------


def fails(kind: type[RlxError], build: Any) -> str:
    with pytest.raises(kind) as caught:
        build(HirModule("m"))
    return str(caught.value)


BAD: dict[str, tuple[type[RlxError], Any, list[str]]] = {
    "sizes": (
        ShapeError,
        lambda m: m.linear(m.input("x", ["batch", 4]), m.param("w", [5, 3]), activation="relu"),
        ["[linear]", "x [batch, 4] f32", "w [5, 3] f32", "got 4; expected 5"],
    ),
    "symbols": (
        ShapeError,
        lambda m: m.residual_rms_norm(m.input("x", ["a", 4]), m.input("y", ["b", 4]), np.ones(4)),
        ["[residual_rms_norm]", "x [a, 4] f32", "y [b, 4] f32"],
    ),
    "heads": (
        ShapeError,
        lambda m: m.attention(*[m.input(n, [1, 3, 10]) for n in "qkv"], num_heads=4),
        ["[attention]", "heads of q [1, 3, 10] f32"],
    ),
    "mask": (
        ShapeError,
        lambda m: m.attention(*[m.input(n, [1, 3, 8]) for n in "qkv"], 2, mask_kind="custom"),
        ["[attention]", "mask kind custom needs a mask"],
    ),
    "dtype": (
        DTypeError,
        lambda m: m.embedding(m.input("ids", [3]), m.param("table", [5, 4])),
        ["[embedding]", "in its gather", "ids [3] f32"],
    ),
    "taps": (
        ShapeError,
        lambda m: m.depthwise_conv1d_causal(
            m.input("x", [1, 5, 2]), m.param("w", [2, 4]), m.input("l", [1, 3, 2]), kernel_size=3
        ),
        ["[depthwise_conv1d_causal]", "got [2, 4] f32; expected [channels, 3]"],
    ),
    "attribute": (
        AttributeValueError,
        lambda m: m.linear(m.input("x", [2, 2]), m.param("w", [2, 2]), activation="gulu"),
        ["[linear.activation]", "'gulu'", "gelu"],
    ),
    "negative eps": (
        AttributeValueError,
        lambda m: m.rms_norm(m.input("x", [2]), m.param("g", [2]), eps=-1.0),
        ["[rms_norm.eps]", "-1.0"],
    ),
    "type of an attribute": (
        AttributeValueError,
        lambda m: m.rms_norm(m.input("x", [2]), m.param("g", [2]), eps="small"),
        ["[rms_norm.eps]", "not a number; got 'small'"],
    ),
    "missing attribute": (
        InputError,
        lambda m: m.rope(m.input("x", [1, 2, 4]), np.ones((4, 2)), np.ones((4, 2))),
        ["[rope]", "missing argument", "head_dim"],
    ),
    "missing tensor": (
        InputError,
        lambda m: m.linear(m.input("x", [2, 2])),
        ["[linear]", "missing tensor; got no w"],
    ),
    "given twice": (
        InputError,
        lambda m: m.linear(m.input("x", [2, 2]), m.param("w", [2, 2]), w=3),
        ["[linear]", "given twice; got w"],
    ),
    "attribute twice": (
        InputError,
        lambda m: m.linear(m.input("x", [2, 2]), np.ones((2, 2)), "relu", activation="relu"),
        ["[linear]", "given twice; got activation"],
    ),
    "too many": (
        InputError,
        lambda m: m.rms_norm(m.input("x", [2]), m.param("g", [2]), 1e-5, 7),
        ["[rms_norm]", "too many arguments", "rms_norm(x, gamma, beta=None, eps)"],
    ),
    "unknown argument": (
        InputError,
        lambda m: m.rms_norm(m.input("x", [2]), m.param("g", [2]), epsilon=1e-5),
        ["[rms_norm]", "unknown argument; got epsilon"],
    ),
    "zero point without scale": (
        InputError,
        lambda m: m.dequant_matmul(
            m.input("x", [2, 32]), m.param("w", [2, 34], "u8"), zp=np.ones(2), scheme="Q8_0"
        ),
        ["[dequant_matmul]", "zp needs scale"],
    ),
    "unknown scoring": (
        AttributeValueError,
        lambda m: m.moe_ffn(*[m.input(n, [2, 2]) for n in "abcde"], top_k=1, scoring="hard"),
        ["[moe_ffn.scoring]", "'hard'"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_use_names_the_block_the_tensors_and_the_line(name: str) -> None:
    kind, build, parts = BAD[name]
    message = fails(kind, build)
    for part in (*parts, "test_hir.py:"):
        assert part in message, message


def test_a_failed_block_leaves_nothing_behind(m: HirModule) -> None:
    x, w = m.input("x", [2, 4]), m.param("w", [5, 3])
    with pytest.raises(ShapeError):
        m.linear(x, w)
    assert len(m) == 2


def test_the_error_names_the_scope(m: HirModule) -> None:
    with m.block("layers.3"), pytest.raises(ShapeError, match=r"block layers\.3"):
        m.linear(m.input("x", [2, 4]), m.param("w", [5, 3]))


# -- blocks of one's own ----------------------------------------------------------------------


def test_a_block_of_ones_own(m: HirModule) -> None:
    @block("scaled_sum")
    class ScaledSum(Block):
        """a · scale + b, b optional"""

        scale: float = 2.0

        def fusable(self, g: Graph, a: Value, b: Value | None = None) -> Value:
            y = g.mul(a, self.scale)
            return y if b is None else g.add(y, b)

    try:
        a, b = m.input("a", ["n"]), m.input("b", ["n"])
        m.set_outputs(m.scaled_sum(a, b, scale=3.0), m.scaled_sum(a))
        one, two = np.float32([1, 2]), np.float32([10, 20])
        results = evaluate(m.lower("fusable"), [one, two])
        assert [r.tolist() for r in results] == [[13.0, 26.0], [2.0, 4.0]]
        with pytest.raises(OptionError, match="a block of that name exists; got scaled_sum"):
            block("scaled_sum")(type("Other", (Block,), {"fusable": lambda self, g, a: a}))
    finally:
        del REGISTRY["hir.scaled_sum"], REGISTERED["scaled_sum"]
        del BlockMethods.scaled_sum, ValueMethods.scaled_sum


# -- the package ------------------------------------------------------------------------------


def test_type_checkers_see_the_names_that_are_there() -> None:
    stub = Path(rlx.__file__).with_suffix(".pyi")
    tree = ast.parse(stub.read_text(encoding="utf-8"))
    stated = {
        alias.asname: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    assert stated == rlx._HOME | dict.fromkeys(rlx._ROOMS, "rlx")


def test_public_names_are_listed_and_unknown_ones_refused() -> None:
    assert {"Graph", "GraphModule", "HirModule", "derive_phases"} <= set(dir(rlx))
    with pytest.raises(AttributeError, match="'rlx' has no attribute 'nothing'"):
        rlx.nothing  # noqa: B018


def test_import_is_lazy() -> None:
    code = "import sys, rlx; assert 'numpy' not in sys.modules; assert rlx.sym('a') is not None"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(rlx.__file__).parents[1])
