"""Fused ops against their formulas in f64."""

from __future__ import annotations

import math

import numpy as np
import pytest
from run_op import cost, infer, run

from rlx.errors import AttributeValueError, DTypeError, InputError, ShapeError
from rlx.ir.dtype import f16, i32
from rlx.ir.graph import Graph
from rlx.ir.interp import evaluate
from rlx.ir.ops.activation import activations
from rlx.ir.shape import Shape

rng = np.random.default_rng(19)
# a few f64 operations on numbers around 1
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def normal(*dims, dtype=np.float64):
    return rng.standard_normal(dims).astype(dtype)


def by_value(function):
    return np.vectorize(function, otypes=[np.float64])


ACTIVATIONS = {
    "none": lambda x: x,
    "relu": by_value(lambda v: max(v, 0.0)),
    "silu": by_value(lambda v: v / (1 + math.exp(-v))),
    "sigmoid": by_value(lambda v: 1 / (1 + math.exp(-v))),
    "tanh": by_value(math.tanh),
    "gelu": by_value(lambda v: v * (1 + math.erf(v / math.sqrt(2))) / 2),
    "gelu_tanh": by_value(
        lambda v: v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))) / 2
    ),
    "gelu_quick": by_value(lambda v: v / (1 + math.exp(-1.702 * v))),
    "leaky_relu": by_value(lambda v: v if v >= 0 else 0.01 * v),
    "square": by_value(lambda v: v * v),
}


def rms(x, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)


def standard(x, eps):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)


# -- activations ------------------------------------------------------------------------------


def test_activations_are_the_real_unary_ops():
    found = activations()
    assert set(ACTIVATIONS) <= set(found)
    assert not {"is_nan", "logical_not", "bitwise_not", "cast", "add", "softmax"} & set(found)


@pytest.mark.parametrize(
    "name", ["fused_matmul_bias_act", "fused_swiglu", "fused_gated_act", "fused_transformer_layer"]
)
@pytest.mark.parametrize("bad", ["swoosh", "add", "is_nan", "cast"])
def test_unknown_activations_are_listed(name, bad):
    shapes = {"fused_swiglu": ([2, 4], [4, 4], [4, 4]), "fused_gated_act": ([2, 4],)}
    heads = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 2}
    attributes = heads if name == "fused_transformer_layer" else {}
    with pytest.raises(AttributeValueError) as error:
        infer(name, *shapes.get(name, ([2, 4], [4, 4])), activation=bad, **attributes)
    assert error.value.where == f"{name}.activation"
    assert repr(bad) in str(error.value)
    assert "silu" in error.value.expected


# -- matmul, bias, activation, residual ------------------------------------------------------


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
def test_fused_matmul_bias_act(activation, has_bias, has_residual):
    x, w, bias, residual = normal(2, 3, 5), normal(5, 4), normal(4), normal(2, 3, 4)
    rest = [bias] * has_bias + [residual] * has_residual
    flags = {"has_bias": has_bias, "has_residual": has_residual}
    found = run("fused_matmul_bias_act", x, w, *rest, activation=activation, **flags)
    expected = ACTIVATIONS[activation](np.einsum("bsk,kn->bsn", x, w) + bias * has_bias)
    np.testing.assert_allclose(found, expected + residual * has_residual, **EXACT)


def test_fused_matmul_rounds_once():
    # 2049 + 2046 + 0.5 is nearest to 4096; step by step f16 gives 2048, 4094 and 4094 again
    x, w = np.array([[2048, 1]], np.float16), np.ones((2, 1), np.float16)
    bias, residual = np.array([2046], np.float16), np.array([[0.5]], np.float16)
    found = run("fused_matmul_bias_act", x, w, bias, residual, has_bias=True, has_residual=True)
    assert found.dtype == np.float16
    assert found[0, 0] == 4096.0


def test_fused_matmul_shapes_and_cost():
    flags = {"has_bias": True, "has_residual": True}
    shapes = ["batch", "seq", 8], [8, 4], [4], ["batch", "seq", 4]
    assert infer("fused_matmul_bias_act", *shapes, **flags) == "[batch, seq, 4] f32"
    half = Shape(["rows", 8], f16), Shape([8, 4], f16)
    assert infer("fused_matmul_bias_act", *half) == "[rows, 4] f16"
    assert infer("fused_matmul_bias_act", *half, [4], has_bias=True) == "[rows, 4] f32"
    found = cost("fused_matmul_bias_act", [6, 8], [8, 4], [4], has_bias=True)
    assert found.flops == 2 * 6 * 8 * 4 + 6 * 4
    assert found.bytes == 4 * (48 + 32 + 4 + 24)
    assert cost("fused_matmul_bias_act", [6, 8], [8, 4], activation="relu").flops == 384 + 24


@pytest.mark.parametrize(
    ("shapes", "attributes", "kind", "part"),
    [
        (([2, 8], [8, 4], [4]), {}, ShapeError, "hint: set has_bias"),
        (([2, 8], [8, 4]), {"has_residual": True}, ShapeError, "got 0 after w"),
        (([2, 8], [8, 4], [5]), {"has_bias": True}, ShapeError, "bias does not fit"),
        (([2, 8], [8, 4], [2, 4]), {"has_bias": True}, ShapeError, "expected [4]"),
        (([2, 8], [8, 4], [4]), {"has_residual": True}, ShapeError, "residual does not fit"),
        (([2, 8], [8], [1]), {"has_bias": True}, ShapeError, "w has no output channels"),
        (([2, 8], [7, 4]), {}, ShapeError, "got 8; expected 7"),
        ((Shape([2, 8], i32), [8, 4]), {}, DTypeError, "x must be of a float type"),
    ],
)
def test_fused_matmul_refuses(shapes, attributes, kind, part):
    with pytest.raises(kind) as error:
        infer("fused_matmul_bias_act", *shapes, **attributes)
    assert part in str(error.value)


# -- residual and norm ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "norm", "eps"),
    [("fused_residual_rms_norm", rms, 1e-6), ("fused_residual_layer_norm", standard, 1e-5)],
)
@pytest.mark.parametrize("has_beta", [False, True])
def test_residual_norms_give_the_norm_and_the_sum(name, norm, eps, has_beta):
    x, residual, gamma, beta = normal(2, 3, 8), normal(2, 3, 8), normal(8), normal(8)
    rest = [beta] * has_beta
    normed, total = run(name, x, residual, gamma, *rest)
    np.testing.assert_array_equal(total, x + residual)
    np.testing.assert_allclose(
        normed, norm(x + residual, eps) * gamma + beta * has_beta, rtol=1e-12, atol=1e-12
    )
    wide, _ = run(name, x, residual, gamma, *rest, eps=0.5)
    expected = norm(x + residual, 0.5) * gamma + beta * has_beta
    np.testing.assert_allclose(wide, expected, **EXACT)


def test_residual_norm_types_symbols_and_errors():
    half = Shape(["rows", 8], f16)
    found = infer("fused_residual_rms_norm", half, half, [8])
    assert found == ["[rows, 8] f32", "[rows, 8] f16"]
    with pytest.raises(ShapeError, match="x and residual differ in shape"):
        infer("fused_residual_rms_norm", ["rows", 8], ["seq", 8], [8])
    with pytest.raises(ShapeError, match="gamma does not fit"):
        infer("fused_residual_layer_norm", [2, 8], [2, 8], [4])
    with pytest.raises(AttributeValueError, match=r"fused_residual_layer_norm\.eps"):
        infer("fused_residual_layer_norm", [2, 8], [2, 8], [8], eps=-1)
    assert cost("fused_residual_rms_norm", [2, 8], [2, 8], [8]).bytes == 4 * (4 * 16 + 8)


# -- gates ------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "none"])
def test_gates(activation):
    x, gate, up = normal(2, 3, 5), normal(5, 4), normal(5, 4)
    first, second = np.einsum("bsk,kn->bsn", x, gate), np.einsum("bsk,kn->bsn", x, up)
    expected = ACTIVATIONS[activation](first) * second
    found = run("fused_swiglu", x, gate, up, activation=activation)
    np.testing.assert_allclose(found, expected, **EXACT)
    joined = np.concatenate([first, second], axis=-1)
    found = run("fused_gated_act", joined, activation=activation)
    np.testing.assert_allclose(found, expected, **EXACT)


def test_gates_shapes_and_errors():
    assert infer("fused_swiglu", ["batch", "seq", 8], [8, 6], [8, 6]) == "[batch, seq, 6] f32"
    assert infer("fused_gated_act", Shape(["rows", 12], f16)) == "[rows, 6] f16"
    assert infer("fused_gated_act", ["rows", "2 * n"]) == "[rows, n] f32"
    with pytest.raises(ShapeError, match="w_gate and w_up differ"):
        infer("fused_swiglu", [2, 8], [8, 6], [8, 5])
    for odd in ([2, 7], ["rows", "n"], []):
        with pytest.raises(ShapeError, match="no two halves"):
            infer("fused_gated_act", odd)
    swiglu = cost("fused_swiglu", [3, 8], [8, 6], [8, 6], activation="none")
    assert swiglu.flops == 2 * 2 * 3 * 8 * 6 + 18
    assert cost("fused_gated_act", [3, 12], activation="none") == (18, 4 * (36 + 18))


# -- heads: norm and rope ---------------------------------------------------------------------


def turned(x, cos, sin, interleaved):
    """x [B, S, H, D] with token s turned by row s."""
    n = 2 * cos.shape[1]
    out = x.copy()
    c, t = cos[: x.shape[1], None, :], sin[: x.shape[1], None, :]
    first, second = (slice(0, n, 2), slice(1, n, 2)) if interleaved else _halves(n)
    out[..., first] = x[..., first] * c - x[..., second] * t
    out[..., second] = x[..., second] * c + x[..., first] * t
    return out


def _halves(n):
    return slice(0, n // 2), slice(n // 2, n)


@pytest.mark.parametrize("layout_name", ["flat", "bshd", "bhsd"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("n_rot", [0, 4])
def test_fused_qk_norm_rope(layout_name, interleaved, n_rot):
    x, gamma = normal(2, 3, 2, 6), normal(6)
    angles = rng.uniform(0, 7, (7, (n_rot or 6) // 2))
    cos, sin = np.cos(angles), np.sin(angles)
    expected = turned(rms(x, 1e-3) * gamma, cos[2:], sin[2:], interleaved)
    reshape = {
        "flat": lambda a: a.reshape(2, 3, 12),
        "bshd": lambda a: a,
        "bhsd": lambda a: a.transpose(0, 2, 1, 3).copy(),
    }[layout_name]
    attributes = {"head_dim": 6, "n_rot": n_rot, "interleaved": interleaved, "eps": 1e-3}
    layout = "bhsd" if layout_name == "bhsd" else "bshd"
    operands = reshape(x), gamma, cos, sin
    found = run("fused_qk_norm_rope", *operands, **attributes, offset=2, layout=layout)
    np.testing.assert_allclose(found, reshape(expected), **EXACT)
    positions = np.array([2, 3, 4], np.int32)
    placed = run("fused_qk_norm_rope", *operands, positions, **attributes, layout=layout)
    np.testing.assert_array_equal(placed, found)


def test_fused_qk_norm_rope_refuses():
    table = [9, 3]
    with pytest.raises(ShapeError, match=r"gamma does not fit x; got \[12\]"):
        infer("fused_qk_norm_rope", [2, 3, 12], [12], table, table, head_dim=6)
    with pytest.raises(ShapeError, match="columns of cos"):
        infer("fused_qk_norm_rope", [2, 3, 12], [6], [9, 2], [9, 2], head_dim=6)
    with pytest.raises(AttributeValueError, match=r"fused_qk_norm_rope\.n_rot"):
        infer("fused_qk_norm_rope", [2, 3, 12], [6], table, table, head_dim=6, n_rot=5)
    half = Shape(["batch", "seq", 12], f16)
    found = infer("fused_qk_norm_rope", half, [6], table, table, head_dim=6, offset="past_seq")
    assert found == "[batch, seq, 12] f32"


# -- whole sub-layers -------------------------------------------------------------------------

E, H, KV, D, F, B, S = 10, 4, 2, 6, 7, 2, 5
BASE = {"num_heads": H, "num_kv_heads": KV, "head_dim": D}


def all_parts():
    """Every operand that a layer can have, in the order in which it takes them."""
    angles = rng.uniform(0, 7, (8, 2))
    width = (H + 2 * KV) * D
    parts = {
        "x": (B, S, E), "wqkv": (E, width), "wo": (H * D, E), "gamma": (E,),
        "cos": np.cos(angles), "sin": np.sin(angles), "beta": (E,), "qkv_bias": (width,),
        "q_gamma": (D,), "k_gamma": (D,), "out_bias": (E,), "mask": (H, S, S),
        "ffn_gamma": (E,), "ffn_beta": (E,), "w_gate": (E, F), "w_up": (E, F), "w_down": (F, E),
        "gate_bias": (F,), "up_bias": (F,), "down_bias": (E,),
    }  # fmt: skip
    return {n: normal(*p) if isinstance(p, tuple) else p for n, p in parts.items()}


ATTENTION_OPTIONAL = {
    "has_rope": ("cos", "sin"),
    "has_beta": ("beta", "ffn_beta"),
    "has_qkv_bias": ("qkv_bias",),
    "has_qk_norm": ("q_gamma", "k_gamma"),
    "has_out_bias": ("out_bias",),
}


def present(parts, flags, ffn):
    """The operands that are there with these flags."""
    gone = {n for f, names in ATTENTION_OPTIONAL.items() if not flags[f] for n in names}
    if flags.get("mask_kind") not in ("bias", "custom"):
        gone.add("mask")
    if not ffn:
        gone |= {n for n in parts if n.startswith(("ffn", "w_", "gate", "up", "down"))}
    else:
        gone |= set() if flags["gated"] else {"w_gate", "gate_bias"}
        gone |= set() if flags["has_ffn_bias"] else {"gate_bias", "up_bias", "down_bias"}
    return {n: a for n, a in parts.items() if n not in gone}


def attention_block(p, flags):
    norm = rms if flags.get("norm", "rms") == "rms" else standard
    h = norm(p["x"], 1e-4) * p["gamma"] + p.get("beta", 0)
    joined = h @ p["wqkv"] + p.get("qkv_bias", 0)
    q = joined[..., : H * D].reshape(B, S, H, D)
    k = joined[..., H * D : (H + KV) * D].reshape(B, S, KV, D)
    v = joined[..., (H + KV) * D :].reshape(B, S, KV, D)
    if "q_gamma" in p:
        q, k = rms(q, 1e-4) * p["q_gamma"], rms(k, 1e-4) * p["k_gamma"]
    if "cos" in p:
        interleaved = flags.get("interleaved", False)
        q, k = (turned(t, p["cos"], p["sin"], interleaved) for t in (q, k))
    out = np.zeros((B, S, H, D))
    for b, i, h in np.ndindex(B, S, H):
        scores = k[b, :, h // (H // KV)] @ q[b, i, h] / math.sqrt(D)
        if flags.get("mask_kind") == "causal":
            scores[i + 1 :] = -np.inf
        elif flags.get("mask_kind") == "bias":
            scores = scores + p["mask"][h, i]
        elif flags.get("mask_kind") == "custom":
            scores[~p["mask"][h, i]] = -np.inf
        weights = np.exp(scores - scores.max())
        out[b, i, h] = weights / weights.sum() @ v[b, :, h // (H // KV)]
    return p["x"] + out.reshape(B, S, H * D) @ p["wo"] + p.get("out_bias", 0)


def layer(p, flags):
    y = attention_block(p, flags)
    norm = rms if flags.get("norm", "rms") == "rms" else standard
    h = norm(y, 1e-4) * p["ffn_gamma"] + p.get("ffn_beta", 0)
    act = ACTIVATIONS[flags["activation"]]
    up = h @ p["w_up"] + p.get("up_bias", 0)
    if flags["gated"]:
        hidden = act(h @ p["w_gate"] + p.get("gate_bias", 0)) * up
    else:
        hidden = act(up)
    return y + hidden @ p["w_down"] + p.get("down_bias", 0)


PLAIN = dict.fromkeys(ATTENTION_OPTIONAL, False)
FULL = dict.fromkeys(ATTENTION_OPTIONAL, True)
VARIANTS = [
    {**PLAIN},
    {**PLAIN, "has_rope": True, "mask_kind": "causal"},
    {**PLAIN, "has_rope": True, "interleaved": True, "has_qkv_bias": True, "mask_kind": "bias"},
    {**PLAIN, "has_qk_norm": True, "has_out_bias": True, "mask_kind": "custom"},
    {**FULL, "norm": "layer", "mask_kind": "causal"},
    {**FULL, "mask_kind": "bias"},
]
FFNS = [
    {"activation": "silu", "gated": True, "has_ffn_bias": False},
    {"activation": "gelu_tanh", "gated": True, "has_ffn_bias": True},
    {"activation": "gelu", "gated": False, "has_ffn_bias": True},
]


def operands(flags, ffn):
    parts = present(all_parts(), flags, ffn)
    if flags.get("mask_kind") == "custom":
        parts["mask"] = rng.random((H, S, S)) < 0.7
        parts["mask"][..., 0] = True  # a query that sees nothing is tested with attention itself
    attributes = {**BASE, **flags, "eps": 1e-4, "n_rot": 4 if flags["has_rope"] else 0}
    return parts, attributes


@pytest.mark.parametrize("flags", VARIANTS)
def test_fused_attention_block(flags):
    parts, attributes = operands(flags, ffn=False)
    found = run("fused_attention_block", *parts.values(), **attributes)
    np.testing.assert_allclose(found, attention_block(parts, flags), **EXACT)


@pytest.mark.parametrize("flags", VARIANTS)
@pytest.mark.parametrize("ffn", FFNS)
def test_fused_transformer_layer(flags, ffn):
    flags = {**flags, **ffn}
    parts, attributes = operands(flags, ffn=True)
    found = run("fused_transformer_layer", *parts.values(), **attributes)
    np.testing.assert_allclose(found, layer(parts, flags), rtol=1e-11, atol=1e-11)


def test_layers_in_half_precision_round_once():
    flags = {**FULL, **FFNS[0], "mask_kind": "causal"}
    parts, attributes = operands(flags, ffn=True)
    half = {n: (a / 4).astype(np.float16) for n, a in parts.items()}
    found = run("fused_transformer_layer", *half.values(), **attributes)
    assert found.dtype == np.float16
    expected = layer({n: a.astype(np.float64) for n, a in half.items()}, flags)
    # f32 in between (1e-5 after some twenty steps), half a unit of f16 at the end
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=2.0**-11 * 1.05, atol=2e-5)


def shapes_of(flags, ffn, **changes):
    parts, attributes = operands(flags, ffn)
    shapes = {n: Shape(a.shape, "bool" if a.dtype == bool else "f32") for n, a in parts.items()}
    return {**shapes, **changes}, attributes


def test_layers_infer_symbols_and_cost():
    flags = {**PLAIN, "has_rope": True, "mask_kind": "causal", **FFNS[0]}
    x = Shape(["batch", "seq", E])
    shapes, attributes = shapes_of(flags, True, x=x)
    assert infer("fused_transformer_layer", *shapes.values(), **attributes) == str(x)
    shapes, attributes = shapes_of(flags, True)
    found = cost("fused_transformer_layer", *shapes.values(), **attributes)
    weights = E * (H + 2 * KV) * D + H * D * E + 3 * E * F
    pairs = S * (S + 1) // 2
    products = 2 * B * S * weights + 4 * B * H * D * pairs
    norms, sums, rotations = 2 * 4 * E, 2 * E, 3 * (H + KV) * D
    gate = 8 + 1  # silu, and the product with up
    assert found.flops == products + B * S * (norms + sums + rotations + gate * F)
    assert found.bytes == 4 * (weights + 2 * B * S * E + 2 * E + 2 * 8 * 2)


@pytest.mark.parametrize(
    ("changes", "attributes", "kind", "part"),
    [
        (
            {"wqkv": [E, 47]},
            {},
            ShapeError,
            "wqkv does not fit; got [10, 47] f32; expected [10, 48]",
        ),
        ({"wo": [E, E]}, {}, ShapeError, "wo does not fit"),
        ({"gamma": ["n"]}, {}, ShapeError, "gamma does not fit"),
        ({"w_gate": [E, F + 1]}, {}, ShapeError, "w_gate does not fit"),
        ({"w_down": [F]}, {}, ShapeError, "w_down does not fit; got [7] f32; expected [7, 10]"),
        ({"x": [S, E]}, {}, ShapeError, "x has the wrong rank"),
        ({"x": Shape([B, S, E], i32)}, {}, DTypeError, "x must be of a float type"),
        ({"cos": [8, 3]}, {}, ShapeError, "columns of cos"),
        ({}, {"offset": 4}, ShapeError, "the tables end before the last position"),
        ({}, {"has_beta": True}, ShapeError, "expected x, wqkv, wo, gamma, cos, sin, beta"),
        ({}, {"mask_kind": "bias"}, ShapeError, "wrong number of operands"),
        ({}, {"norm": "batch"}, AttributeValueError, "fused_transformer_layer.norm"),
        ({}, {"num_kv_heads": 3}, AttributeValueError, "a multiple of 3"),
        ({}, {"n_rot": 5}, AttributeValueError, "fused_transformer_layer.n_rot"),
        ({}, {"softcap": -1.0}, AttributeValueError, "fused_transformer_layer.softcap"),
    ],
)
def test_layers_refuse(changes, attributes, kind, part):
    flags = {**PLAIN, "has_rope": True, "mask_kind": "causal", **FFNS[0]}
    changed = {n: Shape.of(s) for n, s in changes.items()}
    shapes, base = shapes_of(flags, True, **changed)
    with pytest.raises(kind) as error:
        infer("fused_transformer_layer", *shapes.values(), **{**base, **attributes})
    assert part in str(error.value)


# -- regions ----------------------------------------------------------------------------------


def softened(*dims):
    """body(x, y) = (x·y + 1, the row sums of exp(x))"""
    body = Graph("body")
    x, y = body.input("x", dims), body.input("y", dims[-1:])
    return body.set_outputs(body.add(body.mul(x, y), 1.0), body.sum(body.exp(x), axis=(1,)))


def test_region_evaluates_its_body():
    x, y = normal(3, 4, dtype=np.float32), normal(4, dtype=np.float32)
    first, second = run("elementwise_region", x, y, body=softened(3, 4))
    np.testing.assert_allclose(first, x.astype(np.float64) * y + 1, rtol=0, atol=1e-6)
    np.testing.assert_allclose(second, np.exp(x.astype(np.float64)).sum(1), rtol=1e-6)
    body = Graph("body")
    single = run("elementwise_region", x, body=body.set_outputs(body.neg(body.input("a", [3, 4]))))
    np.testing.assert_array_equal(single, -x)


def test_region_with_symbols():
    g = Graph()
    x, y = g.input("x", ["rows", 4]), g.input("y", [4])
    outputs = g.elementwise_region(x, y, body=softened("rows", 4))
    assert [str(v.shape) for v in outputs] == ["[rows, 4] f32", "[rows] f32"]
    g.set_outputs(*outputs)
    array = normal(5, 4, dtype=np.float32)
    first, second = evaluate(g, [array, np.ones(4, np.float32)])
    np.testing.assert_array_equal(first, array + np.float32(1))
    assert second.shape == (5,)


def test_region_cost_and_errors():
    found = cost("elementwise_region", [3, 4], [4], body=softened(3, 4))
    assert found.bytes == 4 * (12 + 4 + 12 + 3)
    assert found.flops >= 12 + 12 + 12 + 12
    with pytest.raises(ShapeError, match="wrong number"):
        infer("elementwise_region", [3, 4], body=softened(3, 4))
    with pytest.raises(ShapeError, match="number 0 differs"):
        infer("elementwise_region", [2, 4], [4], body=softened(3, 4))
    with pytest.raises(DTypeError, match="number 1 differs"):
        infer("elementwise_region", [3, 4], Shape([4], f16), body=softened(3, 4))
    with pytest.raises(ShapeError, match="at least one result"):
        infer("elementwise_region", body=Graph("empty"))
    hidden = Graph("hidden")
    hidden.set_outputs(hidden.neg(hidden.param("w", [2])))
    with pytest.raises(InputError, match="has a param of its own"):
        infer("elementwise_region", body=hidden)
    with pytest.raises(AttributeValueError, match="not a graph"):
        infer("elementwise_region", [3], body=3)
