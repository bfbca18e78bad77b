"""Decompositions: each computes what its op's reference computes, of primitive ops alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rlx.ir.ops  # noqa: F401
from rlx.ir.attrs import MaskKind
from rlx.ir.graph import Graph
from rlx.ir.interp import evaluate
from rlx.ir.op import REGISTRY
from rlx.ir.quant.scheme import QuantScheme, encode
from rlx.ir.verify import verify
from rlx.passes.legalize import legalize

RNG = np.random.default_rng(7)

# What a backend must run itself: the ops without a decomposition.
_PRIMITIVES = """
    input param state constant state_update
    neg abs exp expm1 log log1p sqrt sin cos tanh erf floor ceil round trunc bitwise_not cast
    add sub mul div pow maximum minimum mod floor_div atan2 where eq ne lt le gt ge
    logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor shift_left shift_right
    sum prod max min any all argmax argmin top_k sample sort argsort searchsorted
    cholesky qr eigh eig svd slogdet
    reshape transpose narrow slice expand concat gather take_along scatter scatter_add
    iota dim_value contiguous matmul solve real imag complex cond while_loop scan custom
    quantize_blocks
"""
PRIMITIVES = _PRIMITIVES.split()
COLLECTIVES = {"psum", "pmean", "pmax", "pmin", "all_gather", "axis_index"}  # resolved by vmap


def op_names() -> set[str]:
    """Our own ops. Packed forms, which a backend makes of an op it runs, are not looked at."""
    found = {name: cls for name, cls in REGISTRY.items() if not cls.is_block}
    found = {k: cls for k, cls in found.items() if cls.__module__.startswith("rlx.ir.")}
    return {k for k, cls in found.items() if "pack" not in cls.group}


def decomposed() -> set[str]:
    return {k for k in op_names() - COLLECTIVES if REGISTRY[k].has_decomposition()}


def test_every_op_is_primitive_or_has_a_decomposition() -> None:
    assert decomposed().isdisjoint(PRIMITIVES)
    assert op_names() == decomposed() | set(PRIMITIVES) | COLLECTIVES


def f(*dims: int, dtype: Any = np.float32, scale: float = 1.0) -> np.ndarray:
    return (RNG.standard_normal(dims) * scale).astype(dtype)


def ints(high: int, *dims: int) -> np.ndarray:
    return RNG.integers(0, high, dims).astype(np.int32)


SPECIAL = np.array([0.0, -0.0, 1e-30, -1e-30, 0.5, -3.0, 30.0, -30.0, 100.0, -100.0], np.float32)
EDGES = np.array([np.nan, np.inf, -np.inf], np.float32)
UNARY = (
    "sigmoid silu gelu normal_cdf gelu_tanh gelu_quick softplus relu square sign tan "
    "leaky_relu elu relu6 hard_sigmoid hard_swish"
)
INVERSE = "asin acos atan sinh cosh asinh acosh atanh exp2 log2 log10"
QUESTIONS = "is_nan is_inf is_finite signbit logical_not"

Case = tuple[str, list[np.ndarray], dict[str, Any]]


def unary_cases() -> Iterable[Case]:
    for kind in UNARY.split():
        yield kind, [np.concatenate([SPECIAL, f(20)])], {}
        yield kind, [f(3, 5, dtype=np.float16)], {}
        yield kind, [np.arange(-4, 5, dtype=np.int32)], {}
    for kind in QUESTIONS.split():
        yield kind, [np.concatenate([SPECIAL, EDGES])], {}
        yield kind, [np.arange(-2, 3, dtype=np.int8)], {}
    yield "relu", [EDGES], {}
    yield "sign", [EDGES], {}
    yield "sign", [np.arange(5, dtype=np.uint8)], {}
    yield "leaky_relu", [f(9)], {"alpha": 0.3}
    yield "elu", [f(9)], {"alpha": 2.0}
    yield "clamp", [np.concatenate([SPECIAL, EDGES])], {"low": -1.0, "high": 2.5}
    yield "clamp", [np.arange(-5, 6, dtype=np.int8)], {"low": -2.0, "high": 300.0}
    yield "reciprocal", [f(20)], {}
    yield "rsqrt", [np.abs(f(20)) + 0.1], {}


def function_cases() -> Iterable[Case]:
    for kind in INVERSE.split():
        yield kind, [np.concatenate([SPECIAL, EDGES, f(20)])], {}
        yield kind, [f(3, 5, dtype=np.float16)], {}
        yield kind, [np.arange(-4, 5, dtype=np.int32)], {}
    both = np.concatenate([SPECIAL, EDGES])
    for kind in ("hypot", "logaddexp", "copysign"):
        yield kind, [both[:, None], both], {}
        yield kind, [f(3, 1, dtype=np.float16), f(5, dtype=np.float16)], {}
        yield kind, [f(5, dtype=ml_dtypes.bfloat16), f(2, 5)], {}
        yield kind, [np.array([70000, -3]), f(2, dtype=np.float16)], {}
        yield kind, [ints(9, 4), ints(9, 4)], {}


def reduce_cases() -> Iterable[Case]:
    yield "mean", [f(3, 4, 5)], {"axis": (0, 2), "keepdims": True}
    yield "mean", [f(3, 4)], {}
    yield "mean", [ints(9, 3, 4)], {"axis": (1,)}
    yield "mean", [f(6, 4, dtype=ml_dtypes.bfloat16)], {"axis": (0,)}
    yield "mean", [(f(3, 4) + 1j * f(3, 4)).astype(np.complex64)], {"axis": (1,)}
    for kind in ("softmax", "log_softmax"):
        yield kind, [f(3, 4, 5, scale=20)], {"axis": 1}
        yield kind, [f(3, 4, dtype=np.float16)], {}
        yield kind, [ints(5, 2, 6)], {}
    for flags in ({}, {"exclusive": True}, {"reverse": True}, {"exclusive": True, "reverse": True}):
        yield "cumsum", [f(3, 4, 5)], {"axis": 1, **flags}
        yield "cumsum", [ints(9, 2, 6)], {"axis": -1, **flags}
    yield "cumprod", [f(3, 4, 5)], {"axis": 1, "exclusive": True}
    yield "cumprod", [(f(3, 4) + 1j * f(3, 4)).astype(np.complex64)], {"axis": 0}
    yield "cumsum", [f(3, 4) > 0], {"axis": 0}
    yield "cumsum", [(f(3, 4) + 1j * f(3, 4)).astype(np.complex64)], {"axis": 0}


def layout_cases() -> Iterable[Case]:
    for mode in ("constant", "edge", "reflect"):
        yield "pad", [f(4, 5)], {"low": (1, 0), "high": (2, 3), "value": 0.0, "mode": mode}
    yield "pad", [ints(9, 3)], {"low": (2,), "high": (0,), "value": 7.0}
    yield "flip", [f(3, 4, 5)], {"axis": (0, -1)}
    for how in ("mul", "minimum", "maximum"):
        given = [f(3, 4, 2), ints(4, 9) - 2, f(3, 9, 2)]
        yield "scatter_reduce", given, {"axis": 1, "how": how}
        yield "scatter_reduce", [ints(9, 4), ints(4, 5), ints(9, 5)], {"how": how}


def matmul_cases() -> Iterable[Case]:
    yield (
        "dot_general",
        [f(2, 3, 4, 5), f(5, 2, 6, 4)],
        {"lhs_contract": (3, 2), "rhs_contract": (0, 3), "lhs_batch": (0,), "rhs_batch": (1,)},
    )
    yield "dot_general", [f(3, 4), f(5, 4)], {"lhs_contract": (1,), "rhs_contract": (1,)}
    yield "lora_matmul", [f(2, 3, 8), f(8, 6), f(8, 2), f(2, 6)], {"scale": 0.5}
    yield "grouped_matmul", [f(7, 4), f(3, 4, 5), ints(3, 7)], {}
    for name in ("int8", "int8_b32_asym", "int4_b32", "int4_b32_asym", "fp8_e4m3", "fp8_e5m2"):
        yield from quant_cases(QuantScheme.parse(name))


def quant_cases(scheme: QuantScheme) -> Iterable[Case]:
    parts = [p for p in encode(scheme, f(3, 6, 64)) if p is not None]
    one = [p[0] for p in parts]
    yield "dequant_matmul", [f(2, 5, 64), *one], {"scheme": scheme}
    yield "dequant_matmul", [f(5, 64, dtype=np.float16), *one], {"scheme": scheme}
    yield "dequant_matmul_transposed", [f(2, 5, 6), *one], {"scheme": scheme}
    yield "dequant_gather", [one[0], ints(6, 2, 3), *one[1:]], {"scheme": scheme}
    yield "dequant_moe_weights", [parts[0], ints(3, 4), *parts[1:]], {"scheme": scheme}
    yield "dequant_grouped_matmul", [f(4, 64), parts[0], ints(3, 4), *parts[1:]], {"scheme": scheme}


def norm_cases() -> Iterable[Case]:
    for kind in ("rms_norm", "layer_norm"):
        for dtype in (np.float32, np.float16):
            x, gains = f(2, 3, 8, dtype=dtype), [f(8, dtype=dtype), f(8, dtype=dtype)]
            yield kind, [x, gains[0]], {}
            yield kind, [x, *gains], {"eps": 1e-3}
            yield f"fused_residual_{kind}", [x, x[::-1].copy(), *gains], {}
    yield "group_norm", [f(2, 6, 4, 3), f(6), f(6)], {"groups": 3}
    yield "l2_norm", [f(3, 4, 5)], {"axis": 1}
    yield "l2_norm", [f(3, 4, dtype=np.float16)], {}


def attention_cases() -> Iterable[Case]:
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    q, k, v = f(2, 3, 32), f(2, 5, 16), f(2, 5, 16)
    for kind in ("none", "causal", MaskKind.SLIDING_WINDOW(2), MaskKind.LOCAL(1)):
        yield "attention", [q, k, v], {**sizes, "mask_kind": kind, "softcap": 3.0}
    keep = f(2, 1, 3, 5) > 0.5
    keep[0, 0, 1] = False  # a query without any key
    yield "attention", [q, k, v, keep], {**sizes, "mask_kind": "custom", "scale": 0.3}
    yield "attention", [q, k, v, keep], {**sizes, "mask_kind": "local(2)"}
    bias = np.where(keep, f(2, 1, 3, 5), -np.inf).astype(np.float32)
    yield "attention", [q, k, v, bias], {**sizes, "mask_kind": "bias"}
    heads = [f(2, 4, 3, 8, dtype=np.float16), f(2, 2, 5, 8, dtype=np.float16)]
    layouts = {"q_layout": "bhsd", "kv_layout": "bhsd"}
    yield "attention", [*heads, heads[1] * 2], {**sizes, **layouts}
    pool = [f(1, 2, 12, 4, scale=2.0), f(1, 2, 12, 4)]
    table = np.array([[2, 0], [1, 1]], np.int32)
    places = [np.array([1, 0, 0], np.int32), np.array([2, 5, 3], np.int32)]
    paged = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "page": 4}
    for extra in ({}, {"window": 3, "softcap": 2.0}):
        yield "paged_attention", [f(1, 3, 16), *pool, table, *places], {**paged, **extra}
    tables = [f(9, 4), f(9, 4)]
    for interleaved in (False, True):
        options = {"head_dim": 8, "interleaved": interleaved}
        yield "rope", [f(2, 3, 16), *tables], {**options, "offset": 2}
        yield "rope", [f(2, 3, 2, 10), *tables, ints(9, 3)], {**options, "head_dim": 10, "n_rot": 8}
        yield "rope", [f(2, 4, 3, 8), *tables, ints(9, 2, 3)], {**options, "layout": "bhsd"}
        yield "fused_qk_norm_rope", [f(2, 3, 16), f(8), *tables], options


def conv_cases() -> Iterable[Case]:
    yield "conv", [f(2, 4, 9), f(6, 2, 3), f(6)], {"padding": (1, 2), "groups": 2, "stride": (2,)}
    yield "conv", [f(1, 3, 7, 8), f(4, 3, 2, 3)], {"dilation": (2, 1), "padding": (1,)}
    yield "conv", [f(1, 2, 5, dtype=np.float16), f(3, 2, 1, dtype=np.float16)], {}
    options = {"stride": (3,), "padding": (1,), "output_padding": (1,)}
    yield "conv_transpose", [f(2, 4, 5), f(4, 3, 4), f(3)], options
    yield "conv_transpose", [f(1, 4, 3, 4), f(4, 2, 2, 3)], {"groups": 2, "dilation": (1, 2)}
    yield "conv_transpose", [f(1, 2, 6), f(2, 1, 2)], {"padding": (3,), "stride": (2,)}
    yield "depthwise_conv1d_causal", [f(2, 5, 3), f(3, 4), f(2, 3, 3)], {}
    yield "max_pool", [f(1, 2, 7, 8)], {"kernel": (3, 2), "stride": (2,), "padding": (1,)}
    yield "max_pool", [ints(9, 1, 2, 6)], {"kernel": (2,)}
    for flag in (True, False):
        options = {"kernel": (3,), "stride": (2,), "padding": (1,), "count_include_pad": flag}
        yield "avg_pool", [f(1, 2, 7, 8)], options
    yield "resize", [f(1, 2, 5, 3)], {"sizes": (7, 2)}
    for flag in (True, False):
        options = {"sizes": (7, 2), "mode": "linear", "align_corners": flag}
        yield "resize", [f(1, 2, 5, 3)], options


def scan_cases() -> Iterable[Case]:
    u, delta = f(2, 4, 3), np.abs(f(2, 4, 3))
    rest = [f(3, 5), f(2, 4, 5), f(2, 4, 5)]
    yield "selective_scan", [u, delta, *rest], {}
    yield (
        "selective_scan",
        [u, delta, *rest, f(3), f(2, 3, 5)],
        {"has_d": True, "has_state": True},
    )
    halves = [v.astype(np.float16) for v in (u, delta, *rest)]
    yield "selective_scan", halves, {}
    heads = [f(2, 4, 2, 3, scale=0.5) for _ in range(3)]
    gates = [-np.abs(f(2, 4, 2)), np.abs(f(2, 4, 2))]
    yield "gated_delta_net", [*heads, *gates], {"state_size": 3}
    yield "gated_delta_net", [*heads, *gates, f(2, 2, 3, 3)], {}
    yield "lstm", [f(4, 2, 12), f(3, 12), f(2, 3), f(2, 3)], {}
    yield "lstm", [f(4, 2, 12), f(3, 12), f(2, 3), f(2, 3)], {"reverse": True}
    yield "gru", [f(4, 2, 9), f(3, 9), f(2, 3)], {}
    yield "gru", [f(4, 2, 9), f(3, 9), f(2, 3), f(3)], {"reverse": True}


def quantize_cases() -> Iterable[Case]:
    x = np.concatenate([f(3, 6, scale=4), np.array([[np.nan, np.inf, -np.inf, 0, 1e9, 0.5]])])
    x = x.astype(np.float32)
    scale, zp = np.float32(0.1).reshape(()), np.int8(3).reshape(())
    for kind in ("quantize", "fake_quantize"):
        yield kind, [x, scale], {}
        yield kind, [x, scale, zp], {}
        yield kind, [x, np.abs(f(6)) + 0.1], {"axis": 1, "dtype": "i32"}
        yield kind, [x, scale], {"dtype": "f8e4m3"}
    yield "fake_quantize", [f(3, 6, dtype=np.float16), scale, zp], {}
    q = RNG.integers(-128, 128, (3, 4)).astype(np.int8)
    yield "dequantize", [q, np.abs(f(3)), np.array([1, -2, 100], np.int8)], {"axis": 0}
    yield "dequantize", [q, scale.astype(np.float16)], {}


def fft_cases() -> Iterable[Case]:
    z = (f(3, 6) + 1j * f(3, 6)).astype(np.complex64)
    for inverse in (False, True):
        yield "fft", [z], {"axis": 0, "inverse": inverse}
        yield "fft", [f(2, 5)], {"inverse": inverse}
    yield "rfft", [f(2, 7, 3)], {"axis": 1}
    for n in (6, 7):
        yield "irfft", [z[:, :4]], {"n": n}


def fused_cases() -> Iterable[Case]:
    for dtype in (np.float32, np.float16):
        x, w, b, r = (f(*d, dtype=dtype) for d in ((2, 3, 8), (8, 6), (6,), (2, 3, 6)))
        both = {"has_bias": True, "has_residual": True, "activation": "gelu"}
        yield "fused_matmul_bias_act", [x, w, b, r], both
        yield "fused_matmul_bias_act", [x, w, r], {"has_residual": True}
        yield "fused_swiglu", [x, w, f(8, 6, dtype=dtype)], {}
    yield "fused_gated_act", [f(2, 3, 8)], {"activation": "gelu_tanh"}
    counter = [ints(2**31, 5).astype(np.uint32) for _ in range(4)]
    yield "philox", [*counter, np.uint32(7), np.uint32(2**32 - 5)], {}
    yield from layer_cases()
    body = Graph("region")
    a, b = body.input("a", [3, 4]), body.input("b", [4])
    body.set_outputs(body.tanh(a) * b, body.sum(a, axis=(1,), keepdims=True))
    yield "elementwise_region", [f(3, 4), f(4)], {"body": body}


def derivative_cases() -> Iterable[Case]:
    """Calls of a subgraph; their other bodies are for differentiation alone."""
    body = Graph("body")
    a, b = body.input("a", [3, 4]), body.input("b", [4])
    body.set_outputs(body.tanh(a) * b, body.sum(a))
    given = [f(3, 4), f(4)]
    yield "stop_gradient", [f(3, 4)], {}
    yield "optimization_barrier", given, {}
    yield "checkpoint", given, {"body": body}
    yield "custom_jvp", given, {"body": body, "rule": body}
    yield "custom_vjp", given, {"body": body, "forward": body, "backward": body}


def layer_cases() -> Iterable[Case]:
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "mask_kind": "causal"}
    base = [f(2, 3, 12), f(12, 32), f(16, 12), f(12), f(5, 2), f(5, 2)]
    yield "fused_attention_block", base, heads
    flags = {"has_beta": True, "has_qkv_bias": True, "has_qk_norm": True, "has_out_bias": True}
    extra = [f(12), f(32), f(4), f(4), f(12)]
    yield "fused_attention_block", [*base, *extra], {**heads, **flags, "norm": "layer"}
    ffn = [f(12), f(12, 20), f(12, 20), f(20, 12)]
    yield "fused_transformer_layer", [*base, *ffn], heads
    plain = [f(12), f(12, 20), f(20, 12), f(20), f(12)]
    options = {"gated": False, "has_ffn_bias": True, "activation": "gelu"}
    yield "fused_transformer_layer", [*base, *plain], {**heads, **options}


def backward_cases() -> Iterable[Case]:
    labels = ints(7, 2, 3)
    for dtype in (np.float32, np.float16):
        x, rows = f(2, 3, 7, dtype=dtype), [f(2, 3), f(2, 3)]
        yield "softmax_cross_entropy", [x, labels], {"ignore_index": 3}
        yield "softmax_cross_entropy_backward", [x, labels, *rows], {"ignore_index": 3}
        x, gamma, dy = f(2, 3, 7, dtype=dtype), f(7), f(2, 3, 7, dtype=dtype)
        yield "rms_norm_backward", [x, gamma, dy], {}
        yield "layer_norm_backward", [x, gamma, dy, x], {"has_beta": True}
        dy = f(2, 4, 5, 3, dtype=dtype)
        yield "gather_backward", [dy, ints(6, 4, 5)], {"size": 6, "axis": 1}
        x, dy = f(2, 4, 9, 8, dtype=dtype), f(2, 6, 5, 8, dtype=dtype)
        more = {"kernel": (3, 3), "stride": (2, 1), "padding": (1,), "groups": 2}
        yield "conv_weight_backward", [x, dy], more
        yield "max_pool_backward", [x, f(2, 4, 4, 4, dtype=dtype)], {"kernel": (2,)}
        heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 3}
        q, k, v = (f(2, n, h * 3, dtype=dtype) for n, h in ((3, 4), (5, 2), (5, 2)))
        yield "attention_with_lse", [q, k, v], {**heads, "mask_kind": "causal"}
        yield "attention_with_lse", [q, k, v, f(4)], {**heads, "has_sinks": True, "softcap": 2.0}
        saved = [f(2, 3, 12, dtype=dtype), f(2, 4, 3), f(2, 3, 12, dtype=dtype)]
        yield "attention_backward", [q, k, v, *saved], {**heads, "mask_kind": "causal"}
        bias = {"mask_kind": "bias", "wants_bias": True, "softcap": 2.0}
        yield "attention_backward", [q, k, v, *saved, f(4, 1, 5)], {**heads, **bias}


def integer_cases() -> Iterable[Case]:
    rng = np.random.default_rng(11)
    for kind, zero in ((np.uint8, 9), (np.int8, -5)):
        x = rng.integers(np.iinfo(kind).min, np.iinfo(kind).max, (2, 8, 9, 8)).astype(kind)
        w = rng.integers(-128, 128, (6, 4, 3, 3)).astype(np.int8)
        scale, point = rng.uniform(1e-4, 1e-3, 6).astype(np.float32), np.array(zero, kind)
        more = {"stride": (2, 1), "padding": (1,), "groups": 2}
        yield "conv_integer", [x, w, point], more
        bias = rng.integers(-999, 999, 6).astype(np.int32)
        given = [x, w, point, scale, np.array(3, np.int8)]
        yield "qlinear_conv", given, more
        yield "qlinear_conv", [*given, bias], {**more, "activation": "relu"}


GROUPS: list[Callable[[], Iterable[Case]]] = [
    unary_cases, reduce_cases, layout_cases, matmul_cases, norm_cases, attention_cases,
    conv_cases, scan_cases, quantize_cases, fft_cases, fused_cases, function_cases,
    derivative_cases, backward_cases, integer_cases,
]  # fmt: skip
CASES = [case for group in GROUPS for case in group()]


def test_every_decomposition_has_a_case() -> None:
    assert {kind for kind, _, _ in CASES} == decomposed()


@pytest.mark.parametrize("case", CASES, ids=[f"{k}-{i}" for i, (k, _, _) in enumerate(CASES)])
def test_decomposition_computes_the_op(case: Case) -> None:
    kind, arrays, attributes = case
    graph = Graph("case")
    values = [graph.input(f"x{i}", a.shape, a.dtype) for i, a in enumerate(arrays)]
    made = graph.apply(kind, *values, **attributes)
    graph.set_outputs(made)
    legal = legalize(graph.copy(), PRIMITIVES)
    verify(legal, after="legalize")
    for expected, found in zip(evaluate(graph, arrays), evaluate(legal, arrays), strict=True):
        assert found.dtype == expected.dtype
        # f32 sums of up to 64 terms in another order; one rounding of a 16-bit result may tip over
        narrow = expected.dtype.itemsize < 4 and expected.dtype.kind not in "iub"
        tolerance = 2e-3 if narrow else 1e-5
        wide = np.complex128 if expected.dtype.kind == "c" else np.float64
        np.testing.assert_allclose(
            found.astype(wide), expected.astype(wide), rtol=tolerance, atol=tolerance
        )


def test_decompositions_work_with_symbolic_sizes() -> None:
    graph = Graph("symbolic")
    x = graph.input("x", ["batch", 3, "n"])
    table = graph.input("table", ["rows_", 4])
    w = graph.param("w", [4, 3, 3])
    y = graph.conv(x, w, stride=(2,), padding=(1,))
    graph.set_outputs(
        graph.max_pool(y, kernel=(2,)),
        graph.resize(x, sizes=("n",), mode="linear"),
        graph.flip(graph.mean(x, axis=(0,)), axis=(1,)),
        graph.rfft(x, axis=2),
        graph.cumsum(x, axis=0),
        graph.pad(table, low=(1, 0), high=(0, 2), mode="reflect"),
        names=list("abcdef"),
    )
    legal = legalize(graph.copy(), PRIMITIVES)
    verify(legal, after="legalize")
    arrays = {"x": f(2, 3, 9), "table": f(5, 4), "w": f(4, 3, 3)}
    for expected, found in zip(evaluate(graph, arrays), evaluate(legal, arrays), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
