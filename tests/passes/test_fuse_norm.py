"""Decomposed norms, softmax and rotary embedding are recognised; residual add + norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pass_support import fused, op_names, reasons

from rlx.ir.blocks.attention import Rope
from rlx.ir.graph import Graph
from rlx.ir.node import Value

Build = Callable[[Graph, Value, Value], Any]
LAST: dict[str, Any] = {"axis": (-1,), "keepdims": True}


def rms(g: Graph, x: Value, gamma: Value) -> Any:
    return x * g.rsqrt(g.mean(g.square(x), **LAST) + 1e-6) * gamma


def layer(g: Graph, x: Value, gamma: Value) -> Any:
    d = x - g.mean(x, **LAST)
    return d * g.rsqrt(g.mean(g.square(d), **LAST) + 1e-5) * gamma


RMS: list[Build] = [
    rms,
    lambda g, x, w: w * (g.rsqrt(g.mean(x * x, **LAST) + 1e-6) * x),
    lambda g, x, w: x / g.sqrt(g.mean(g.pow(x, 2.0), **LAST) + 1e-6) * w,
    lambda g, x, w: x * g.reciprocal(g.sqrt(1e-6 + g.mean(g.square(x), **LAST))) * w,
    lambda g, x, w: x * g.rsqrt(g.sum(g.square(x), **LAST) / 6.0 + 1e-6) * w,
]
LAYER: list[Build] = [
    layer,
    lambda g, x, w: w * ((x - g.mean(x, **LAST)) / g.sqrt(_variance(g, x) + 1e-5)),
]


def _variance(g: Graph, x: Value) -> Value:
    return g.mean(g.square(x - g.mean(x, **LAST)), **LAST)  # type: ignore[no-any-return]


def graph_of(build: Build, dtype: str = "f32") -> tuple[Graph, Value, Value]:
    g = Graph("norm")
    x, gamma = g.input("x", ["batch", "n", 6], dtype), g.param("gamma", [6], dtype)
    return g, x, build(g, x, gamma)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("has_beta", [False, True])
@pytest.mark.parametrize(
    ("kind", "build"), [("rms_norm", b) for b in RMS] + [("layer_norm", b) for b in LAYER]
)
def test_norms_written_out(kind: str, build: Build, has_beta: bool, dtype: str) -> None:
    g, _, y = graph_of(build, dtype)
    if has_beta:
        y = y + g.param("beta", [6], dtype)
    g.set_outputs(y)
    after, _ = fused(g, "activations")
    assert op_names(after) == [kind]
    record: Any = after.outputs[0].node.op
    assert record.eps == (1e-6 if kind == "rms_norm" else 1e-5)


def test_a_norm_in_f32_of_16_bit_operands_reads_them_as_they_are() -> None:
    g = Graph("cast")
    x, gamma = g.input("x", ["n", 6], "bf16"), g.param("gamma", [6], "bf16")
    y = rms(g, g.cast(x, "f32"), g.cast(gamma, "f32"))
    g.set_outputs(g.cast(y, "bf16"))
    after, _ = fused(g, "activations", "precision", exact=True)
    assert op_names(after) == ["rms_norm"]


def test_l2_norm_written_out() -> None:
    g = Graph("l2")
    x = g.input("x", ["n", 6])
    g.set_outputs(x * g.rsqrt(g.sum(g.square(x), axis=(0,), keepdims=True) + 1e-6))
    after, _ = fused(g, "activations")
    assert op_names(after) == ["l2_norm"]


@pytest.mark.parametrize("axis", [-1, 0])
def test_softmax_written_out(axis: int) -> None:
    g = Graph("softmax")
    x = g.input("x", ["n", 6])
    how: dict[str, Any] = {"axis": (axis,), "keepdims": True}
    low = x - g.max(x, **how)
    e = g.exp(low)
    g.set_outputs(e / g.sum(e, **how))
    assert op_names(fused(g, "activations")[0]) == ["softmax"]
    g.set_outputs(e * g.reciprocal(g.sum(e, **how)))
    assert op_names(fused(g, "activations")[0]) == ["softmax"]
    g.set_outputs(low - g.log(g.sum(e, **how)))
    assert op_names(fused(g, "activations")[0]) == ["log_softmax"]


def _other_axis(g: Graph, x: Value, w: Value) -> Any:
    return x * g.rsqrt(g.mean(g.square(x), axis=(1,), keepdims=True) + 1e-6) * w


def _two_axes(g: Graph, x: Value, w: Value) -> Any:
    return x * g.rsqrt(g.mean(g.square(x), axis=(1, 2), keepdims=True) + 1e-6) * w


def _other_x(g: Graph, x: Value, w: Value) -> Any:
    return g.exp(x) * g.rsqrt(g.mean(g.square(x), **LAST) + 1e-6) * w


def _gamma_per_row(g: Graph, x: Value, w: Value) -> Any:
    return rms(g, x, g.input("rows", ["n", 1]))


def _wrong_count(g: Graph, x: Value, w: Value) -> Any:
    return x * g.rsqrt(g.sum(g.square(x), **LAST) / 5.0 + 1e-6) * w


def _negative_eps(g: Graph, x: Value, w: Value) -> Any:
    return x * g.rsqrt(g.mean(g.square(x), **LAST) + -1e-9) * w


@pytest.mark.parametrize(
    "build", [_other_axis, _two_axes, _other_x, _gamma_per_row, _wrong_count, _negative_eps]
)
def test_not_a_norm(build: Build) -> None:
    g, _, y = graph_of(build)
    g.set_outputs(y)
    after, _ = fused(g, "activations")
    assert "rms_norm" not in op_names(after)


def test_gamma_of_a_wider_type_is_not_fused() -> None:
    g = Graph("wide")
    x = g.input("x", ["n", 6], "f16")
    g.set_outputs(rms(g, x, g.param("gamma", [6])))
    after, report = fused(g, "activations", exact=True)
    assert "rms_norm" not in op_names(after)
    assert reasons(report, "decomposed rms_norm") == ["gamma is wider than f16"]


def test_a_statistic_that_is_used_elsewhere_keeps_the_norm_apart() -> None:
    g = Graph("stat")
    x, gamma = g.input("x", ["n", 6]), g.param("gamma", [6])
    r = g.rsqrt(g.mean(g.square(x), **LAST) + 1e-6)
    g.set_outputs(x * r * gamma, r)
    after, report = fused(g, "activations")
    assert "rms_norm" not in op_names(after)
    assert "the rsqrt inside is a graph output" in reasons(report, "decomposed rms_norm")


# -- residual + norm ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("has_beta", [False, True])
@pytest.mark.parametrize("sum_is", ["inside", "used", "returned"])
def test_a_norm_of_a_sum_gives_both(dtype: str, kind: str, has_beta: bool, sum_is: str) -> None:
    g = Graph("residual")
    x, r = (g.input(n, ["batch", "seq", 6], dtype) for n in "xr")
    total = x + r
    gains = [g.param(n, [6], dtype) for n in ("gamma", "beta")[: 1 + has_beta]]
    y = g.apply(kind, total, *gains, eps=1e-4)
    outputs = [y]
    if sum_is == "used":
        outputs.append(g.exp(total))
    if sum_is == "returned":
        outputs.append(total)
    g.set_outputs(outputs)
    after, report = fused(g, "residual")
    expected = [f"fused_residual_{kind}", *(["exp"] if sum_is == "used" else [])]
    assert op_names(after) == expected
    assert report.count("residual + norm") == 1


def test_the_sum_of_one_layer_is_the_residual_of_the_next() -> None:
    g = Graph("stream")
    stream = g.input("x", ["n", 6])
    h = stream
    for i in range(3):
        h = g.matmul(g.rms_norm(stream, g.param(f"g{i}", [6])), g.param(f"w{i}", [6, 6]))
        stream = stream + h
    g.set_outputs(g.rms_norm(stream, g.param("last", [6])))
    after, report = fused(g, "residual")
    assert report.count("residual + norm") == 3
    assert op_names(after).count("fused_residual_rms_norm") == 3
    assert op_names(after).count("rms_norm") == 1


def test_two_norms_of_one_sum() -> None:
    g = Graph("parallel")
    x, r = (g.input(n, ["n", 6]) for n in "xr")
    total = x + r
    g.set_outputs(*[g.rms_norm(total, g.param(n, [6])) for n in "ab"])
    after, _ = fused(g, "residual")
    assert op_names(after) == ["fused_residual_rms_norm", "rms_norm"]


def test_sums_that_are_no_residual() -> None:
    g = Graph("bias")
    x, gamma = g.input("x", ["n", 6]), g.param("gamma", [6])
    g.set_outputs(g.rms_norm(x + g.param("b", [6]), gamma))
    after, report = fused(g, "residual")
    assert op_names(after) == ["add", "rms_norm"]
    assert "broadcasts" in reasons(report, "residual + norm")[0]
    h = Graph("mixed")
    x, r = h.input("x", ["n", 6]), h.input("r", ["n", 6], "f16")
    h.set_outputs(h.rms_norm(x + r, h.param("gamma", [6])))
    after, report = fused(h, "residual")
    assert op_names(after) == ["add", "rms_norm"]
    assert "mixes f32 and f16" in reasons(report, "residual + norm")[0]


def test_gamma_that_depends_on_the_sum_would_make_a_cycle() -> None:
    g = Graph("cycle")
    x, r = (g.input(n, [1, 6]) for n in "xr")
    total = x + r
    gamma = g.reshape(g.exp(total), shape=(6,))
    g.set_outputs(g.rms_norm(total, gamma))
    after, report = fused(g, "residual")
    assert op_names(after) == ["add", "exp", "reshape", "rms_norm"]
    assert reasons(report, "residual + norm") == ["gamma or beta depends on the sum"]


# -- rope --------------------------------------------------------------------------------------


def rotated(
    g: Graph, x: Value, interleaved: bool, n_rot: int, positions: Value | None, layout: str
) -> Any:
    """Rotary embedding in primitives, as the HIR block spells it."""
    block = Rope(
        head_dim=8, n_rot=n_rot, interleaved=interleaved, offset=2 if positions is None else 0,
        layout=layout,
    )  # fmt: skip
    half = (n_rot or 8) // 2
    return block.fusable(g, x, g.param("cos", [16, half]), g.param("sin", [16, half]), positions)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("n_rot", [0, 4])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("given", ["offset", "[S]", "[B, S]"])
def test_rope_written_out(given: str, interleaved: bool, n_rot: int, layout: str) -> None:
    g = Graph("rope")
    dims = ["batch", "seq", 3, 8] if layout == "bshd" else ["batch", 3, "seq", 8]
    x = g.input("x", dims)
    shapes = {"[S]": ["seq"], "[B, S]": ["batch", "seq"]}
    positions = g.input("at", shapes[given], "i32") if given in shapes else None
    g.set_outputs(rotated(g, x, interleaved, n_rot, positions, layout))
    after, _ = fused(g, "rope")
    assert op_names(after) == ["rope"]
    record: Any = after.outputs[0].node.op
    assert (record.n_rot, record.interleaved, record.layout) == (n_rot, interleaved, layout)
    assert record.offset == (2 if positions is None else 0)


def test_a_norm_of_each_head_before_rope() -> None:
    for layout in ("bshd", "bhsd"):
        g = Graph("qk")
        dims = ["batch", "seq", 3, 8] if layout == "bshd" else ["batch", 3, "seq", 8]
        normed = g.rms_norm(g.input("x", dims), g.param("gamma", [8]), eps=1e-5)
        g.set_outputs(rotated(g, normed, False, 0, None, layout))
        after, report = fused(g, "rope")
        assert op_names(after) == ["fused_qk_norm_rope"]
        assert report.count("qk norm + rope") == 1


def test_views_between_norm_and_rope_go_before_both() -> None:
    g = Graph("views")
    x = g.input("x", ["batch", "seq", 3, 8])
    tables = [g.param(n, [16, 4]) for n in ("cos", "sin")]
    normed = g.rms_norm(x, g.param("gamma", [8]))
    flat = g.reshape(normed, shape=("batch", "seq", 24))
    turned = g.transpose(normed, axes=(0, 2, 1, 3))
    g.set_outputs(g.rope(flat, *tables, head_dim=8))
    assert op_names(fused(g, "rope")[0]) == ["reshape", "fused_qk_norm_rope"]
    g.set_outputs(g.rope(turned, *tables, head_dim=8, layout="bhsd"))
    assert op_names(fused(g, "rope")[0]) == ["transpose", "fused_qk_norm_rope"]


def test_a_norm_with_another_user_or_over_all_heads_stays() -> None:
    g = Graph("stays")
    x = g.input("x", ["batch", "seq", 24])
    tables = [g.param(n, [16, 4]) for n in ("cos", "sin")]
    whole = g.rms_norm(x, g.param("wide", [24]))
    g.set_outputs(g.rope(whole, *tables, head_dim=8))
    after, report = fused(g, "rope")
    assert op_names(after) == ["rms_norm", "rope"]
    assert reasons(report, "qk norm + rope") == ["the norm is not of each head"]
    normed = g.rms_norm(g.reshape(x, shape=("batch", "seq", 3, 8)), g.param("gamma", [8]))
    g.set_outputs(g.rope(normed, *tables, head_dim=8), normed)
    after, report = fused(g, "rope")
    assert "fused_qk_norm_rope" not in op_names(after)
    assert reasons(report, "qk norm + rope") == ["the rms_norm has another user"]


def test_rotations_that_are_not_rope() -> None:
    g = Graph("wrong")
    x = g.input("x", ["batch", "seq", 2, 8])
    a, b = (g.narrow(x, axis=3, start=s, length=4) for s in (0, 4))
    cos, sin = (g.reshape(g.param(n, [5, 4]), shape=(1, 5, 1, 4)) for n in ("cos", "sin"))
    x5 = g.input("y", [2, 5, 2, 8])
    c, d = (g.narrow(x5, axis=3, start=s, length=4) for s in (0, 4))
    wrong_sign = g.concat(c * cos + d * sin, d * cos - c * sin, axis=3)
    swapped = g.concat(d * cos - c * sin, c * cos + d * sin, axis=3)
    g.set_outputs(wrong_sign, swapped, a, b)
    after, _ = fused(g, "rope")
    assert "rope" not in op_names(after)
