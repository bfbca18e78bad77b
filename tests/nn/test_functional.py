"""Functions of `rlx.nn.functional` against PyTorch's, at once and inside `rlx.jit`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nn_cases import FUNCTIONS, Case

import rlx
import rlx.numpy as rnp
from rlx import random
from rlx.ir.op import REGISTRY
from rlx.nn import functional as F

GOLDENS = np.load(Path(__file__).parent.parent / "goldens" / "nn.npz")
KEY = random.key(7)
Array = Any

# f32 results of sums of up to 100 products of numbers around 1, in another order: each rounding is
# 6e-8 of a partial sum, and some dozens of them add up
TOLERANCE = {"rtol": 2e-5, "atol": 3e-6}


def _close(found: Any, expected: Array) -> None:
    y = np.asarray(found)
    assert y.shape == expected.shape
    np.testing.assert_allclose(y.astype(np.float64), expected.astype(np.float64), **TOLERANCE)


@pytest.mark.parametrize("case", FUNCTIONS, ids=lambda c: c.name)
def test_functions_give_the_numbers_of_pytorch(case: Case) -> None:
    inputs = case.arrays()

    def run(*arrays: Array) -> Any:
        return eval(case.expression, {"F": F, **dict(zip(inputs, arrays, strict=True))})

    expected = GOLDENS[f"{case.name}/y"]
    arrays = [rnp.asarray(a) for a in inputs.values()]
    _close(run(*arrays), expected)
    _close(rlx.jit(run)(*arrays), expected)


def test_a_new_shape_needs_no_new_trace() -> None:
    @rlx.jit
    def net(x: Array, w: Array, b: Array) -> Array:
        y = F.conv2d(x, w, b, padding=1)
        return F.softmax(F.max_pool2d(F.gelu(F.group_norm(y, 2)), 2), 1)

    rng = np.random.default_rng(0)
    w, b = rng.normal(size=(4, 3, 3, 3)).astype("f4"), rng.normal(size=4).astype("f4")
    for shape in ((2, 3, 8, 6), (5, 3, 7, 9), (3, 3, 20, 10)):
        x = rng.normal(size=shape).astype("f4")
        y = F.conv2d(x, w, b, padding=1)
        expected = F.softmax(F.max_pool2d(F.gelu(F.group_norm(y, 2)), 2), 1)
        np.testing.assert_allclose(np.asarray(net(x, w, b)), np.asarray(expected), rtol=1e-5)
    assert len(net.variants()) == 1


# -- what PyTorch does not have, or has otherwise ---------------------------------------------


def _heads(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def _attention(
    q: Array, k: Array, v: Array, keep: Array, cap: float = 0.0, sink: Any = None
) -> Array:
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    scores = cap * np.tanh(scores / cap) if cap else scores
    weights = np.exp(np.where(keep, scores, -np.inf))
    total = weights.sum(-1, keepdims=True)
    total = total if sink is None else total + np.exp(sink)[:, None, None]
    return weights / total @ v


def test_attention_windows_caps_and_sinks() -> None:
    q, k, v = _heads(2, 3, 6, 4), _heads(2, 3, 8, 4), _heads(2, 3, 8, 4) + 1
    back = np.arange(2, 8)[:, None] - np.arange(8)[None]
    for options, keep in (
        ({"is_causal": True}, back >= 0),
        ({"is_causal": True, "window": 3}, (back >= 0) & (back < 3)),
        ({"window": 2}, abs(back) <= 2),
    ):
        y = F.scaled_dot_product_attention(q, k, v, **options)
        np.testing.assert_allclose(np.asarray(y), _attention(q, k, v, keep), rtol=1e-5, atol=1e-6)
    y = F.scaled_dot_product_attention(q, k, v, softcap=2.0)
    np.testing.assert_allclose(np.asarray(y), _attention(q, k, v, True, 2.0), rtol=1e-5, atol=1e-6)
    sinks = _heads(3)
    y = F.scaled_dot_product_attention(q, k, v, sinks=sinks)
    expected = _attention(q, k, v, True, sink=sinks)
    np.testing.assert_allclose(np.asarray(y), expected, rtol=1e-5, atol=1e-6)
    mask = np.arange(8) != 4
    y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=True)
    expected = _attention(q, k, v, (back >= 0) & mask)
    np.testing.assert_allclose(np.asarray(y), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_turns_pairs_by_their_position(interleaved: bool) -> None:
    x = _heads(2, 3, 5, 8)
    cos, sin = F.rope_tables(20, 8, 100.0)
    positions = np.array([3, 0, 19, 7, 7])
    angles = positions[:, None] * 100.0 ** (-np.arange(4) / 4)
    pairs = x.reshape(2, 3, 5, 4, 2) if interleaved else np.stack([x[..., :4], x[..., 4:]], -1)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles)
    parts = [turned.real, turned.imag]
    expected = np.stack(parts, -1).reshape(x.shape) if interleaved else np.concatenate(parts, -1)
    y = F.rope(x, cos, sin, positions, interleaved=interleaved)
    np.testing.assert_allclose(np.asarray(y), expected, rtol=1e-5, atol=2e-6)
    plain = F.rope(x, cos, sin, interleaved=interleaved)
    counted = F.rope(x, cos, sin, np.arange(5), interleaved=interleaved)
    assert np.array_equal(np.asarray(plain), np.asarray(counted))


def test_update_cache_writes_from_a_position_on() -> None:
    cache, new = np.zeros((2, 3, 8, 4), np.float32), _heads(2, 3, 2, 4)
    write = rlx.jit(lambda c, n, at: F.update_cache(c, n, at))
    expected = cache.copy()
    expected[:, :, 5:7] = new
    for made in (F.update_cache(cache, new, 5), write(cache, new, np.int32(5))):
        assert np.array_equal(np.asarray(made), expected)
    mask = np.asarray(F.cache_mask(new, cache, 5))
    assert np.array_equal(mask, np.arange(8) <= np.array([[5], [6]]))


def test_gated_activations_are_halves() -> None:
    x = _heads(3, 8)
    a, b = x[:, :4], x[:, 4:]
    y = np.asarray(F.swiglu(x))
    np.testing.assert_allclose(y, a / (1 + np.exp(-a)) * b, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(F.geglu(x)), np.asarray(F.gelu(a)) * b, rtol=1e-6)
    np.testing.assert_allclose(np.asarray(F.gelu_tanh(a)), np.asarray(F.gelu(a, "tanh")))
    quick = a / (1 + np.exp(-1.702 * a))
    np.testing.assert_allclose(np.asarray(F.gelu(a, "quick")), quick, rtol=1e-5)
    with pytest.raises(rlx.ShapeError, match="two halves"):
        F.glu(x[:, :3])


def test_l2_normalize_and_batch_statistics() -> None:
    x = _heads(3, 4, 5)
    expected = x / np.sqrt((x * x).sum(1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(np.asarray(F.l2_normalize(x, 1)), expected, rtol=1e-5)
    mean, var = F.batch_statistics(x)
    np.testing.assert_allclose(np.asarray(mean), x.mean((0, 2)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.asarray(var), x.var((0, 2)), rtol=1e-5)


def test_adapters_and_experts() -> None:
    x, w, a, b = _heads(2, 5, 6), _heads(4, 6), _heads(2, 6), _heads(4, 2)
    y = F.lora_linear(x, w, a, b, scale=0.5)
    np.testing.assert_allclose(np.asarray(y), x @ w.T + 0.5 * (x @ a.T @ b.T), rtol=1e-4, atol=1e-5)
    rows, experts = x.reshape(10, 6), _heads(3, 6, 4)
    chosen = np.arange(10) % 3
    expected = np.stack([r @ experts[e] for r, e in zip(rows, chosen, strict=True)])
    y = F.grouped_matmul(rows, experts, chosen)
    np.testing.assert_allclose(np.asarray(y), expected, rtol=1e-5, atol=1e-6)


def test_a_mixture_of_experts_weighs_its_experts() -> None:
    x, router = _heads(2, 5, 6), _heads(3, 6)
    gate, up, down = _heads(3, 6, 8), _heads(3, 6, 8) + 0.1, _heads(3, 8, 6)
    scores = np.exp(x @ router.T)
    scores /= scores.sum(-1, keepdims=True)
    best = np.argsort(-scores, -1)[..., :2]
    top = np.take_along_axis(scores, best, -1)
    top = top / top.sum(-1, keepdims=True)
    expected = np.zeros_like(x)
    for i in np.ndindex(2, 5):
        for s, e in zip(top[i], best[i], strict=True):
            h = x[i] @ gate[e]
            expected[i] += s * ((h / (1 + np.exp(-h)) * (x[i] @ up[e])) @ down[e])
    for run in (F.mixture_of_experts, rlx.jit(F.mixture_of_experts, static="k")):
        y = run(x, router, gate, up, down, k=2)
        np.testing.assert_allclose(np.asarray(y), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scheme", ["q8_0", "q4_k", "int8", "int4_b32", "fp8_e4m3"])
def test_quantised_products_read_packed_weights(scheme: str) -> None:
    w, x, bias = _heads(8, 256), _heads(2, 3, 256), _heads(8)
    packed = F.quantize(w, scheme)
    whole = np.asarray(F.dequantize_weight(packed))
    assert whole.shape == w.shape and packed.shape == w.shape
    assert np.abs(whole - w).max() < 0.5  # blocks of numbers around 1, 4 bits at least
    expected = x @ whole.T + bias
    linear = rlx.jit(lambda x, w, b: F.linear(x, w, b))
    for y in (F.linear(x, packed, bias), linear(x, packed, bias)):
        # activations are rounded to 8 bits: 1/254 of the largest, over sums of 256 products
        np.testing.assert_allclose(np.asarray(y), expected, rtol=0.02, atol=0.3)
    ids = np.array([[1, 7], [0, 1]])
    assert np.array_equal(np.asarray(F.embedding(ids, packed)), whole[ids])
    with pytest.raises(rlx.InputError, match="does not fit"):
        F.linear(x[..., :32], packed)


@pytest.mark.parametrize("scheme", ["q8_0", "int8_b32"])
def test_quantised_experts(scheme: str) -> None:
    x, w, expert = _heads(6, 64), _heads(3, 4, 64), np.array([2, 0, 1, 1, 0, 2], np.int32)
    packed = F.quantize(w, scheme)
    whole = np.asarray(F.dequantize_weight(packed))
    assert whole.shape == packed.shape == w.shape
    expected = np.einsum("tk,tnk->tn", x, whole[expert])
    y = F.quantized_grouped_matmul(x, packed, expert)
    # activations are rounded to 8 bits: 1/254 of the largest, over sums of 64 products
    np.testing.assert_allclose(np.asarray(y), expected, atol=0.15)


@pytest.mark.parametrize("dtype", ["f64", "f16", "bf16"])
def test_results_keep_the_element_type(dtype: str) -> None:
    # one rounding of operands and result each: 2⁻¹¹ and 2⁻⁸ of sums of up to 100 numbers around 1
    tolerance = {"f64": 2e-5, "f16": 0.02, "bf16": 0.15}[dtype]
    names = ("mish", "softplus", "softmax", "layer norm", "group norm", "conv2d", "max_pool2d",
             "adaptive_avg_pool2d", "attention", "cross entropy", "bce logits")  # fmt: skip
    for case in FUNCTIONS:
        if case.name in names:
            inputs = case.arrays()
            given = {k: rnp.asarray(v) for k, v in inputs.items()}
            given = {k: v.astype(dtype) if v.dtype is rnp.float32 else v for k, v in given.items()}
            y = eval(case.expression, {"F": F, **given})
            assert str(y.dtype) == dtype, case.name
            wide = np.asarray(y).astype(np.float64)
            np.testing.assert_allclose(
                wide, GOLDENS[f"{case.name}/y"], rtol=tolerance, atol=tolerance, err_msg=case.name
            )


def test_no_elements() -> None:
    for made, shape in (
        (F.relu(np.zeros((0, 3), np.float32)), (0, 3)),
        (F.conv2d(np.zeros((0, 3, 5, 5), np.float32), _heads(4, 3, 3, 3)), (0, 4, 3, 3)),
        (F.linear(np.zeros((0, 3), np.float32), _heads(4, 3), _heads(4)), (0, 4)),
        (F.embedding(np.zeros(0, np.int64), _heads(3, 4)), (0, 4)),
        (F.dropout(np.zeros((0, 3), np.float32), 0.5, KEY), (0, 3)),
        (random.normal(KEY, (0, 3)), (0, 3)),
    ):
        assert made.shape == shape


def test_attention_to_packed_keys_and_values() -> None:
    q, k, v = _heads(2, 4, 3, 32), _heads(2, 2, 5, 32), _heads(2, 2, 5, 32) + 1
    exact = np.asarray(F.scaled_dot_product_attention(q, k, v, is_causal=True))

    @rlx.jit
    def packed(q: Array, k: Array, v: Array) -> Array:
        k, v = F.quantize_blocks(k), F.quantize_blocks(v)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, kv_scheme="q8_0")

    # 8 bits: 1/254 of the largest, of keys (through scores around 3) and of values
    np.testing.assert_allclose(np.asarray(packed(q, k, v)), exact, atol=0.05)


def test_every_op_has_a_function() -> None:
    folder = Path(rlx.__file__).parent
    rooms = [p for r in ("numpy", "random", "nn") for p in (folder / r).rglob("*.py")]
    words = set(re.findall(r"\w+", "\n".join(p.read_text("utf-8") for p in rooms)))
    made_by_passes = {
        "dequant_moe_weights", "elementwise_region", "param", "state_update", "custom",
        "quantize_weight",
    }  # fmt: skip
    made_by_passes |= {n for n in REGISTRY if n.endswith("_backward")} | {
        "attention_with_lse", "normal_cdf", "optimization_barrier", "dequant_matmul_transposed",
    }  # fmt: skip
    ops = {n for n, c in REGISTRY.items() if c.__module__.startswith("rlx.ir.ops.")}
    left = {n for n in ops - words - made_by_passes if not n.startswith("fused_")}
    assert not left


def test_convolutions_of_bytes() -> None:
    rng = np.random.default_rng(7)
    x = rng.integers(0, 256, (2, 8, 9, 7)).astype(np.uint8)
    w, zero = rng.integers(-128, 128, (6, 4, 3, 3)).astype(np.int8), np.uint8(117)
    exact = F.conv2d(
        x.astype(np.float64) - 117, w.astype(np.float64), stride=2, padding=1, groups=2
    )
    sums = F.conv_integer(x, w, zero, stride=2, padding=1, groups=2)
    assert np.asarray(sums).dtype == np.int32
    np.testing.assert_array_equal(sums, exact)
    bias = rng.integers(-999, 999, 6).astype(np.int32)
    scale, point = np.float32(2.0**-9), np.int8(5)  # a power of two: products are exact
    found = F.qlinear_conv(
        x, w, zero, scale, point, bias, stride=2, padding=1, groups=2, activation="relu"
    )
    whole = np.rint((np.asarray(exact) + bias[:, None, None]) * 2.0**-9).clip(0) + 5
    np.testing.assert_array_equal(found, whole.clip(-128, 127).astype(np.int8))


def test_eight_bit_numbers() -> None:
    x, scale, zero = _heads(3, 4), np.float32(0.05), np.int8(3)
    q = np.asarray(F.quantize_linear(x, scale, zero))
    expected = np.clip(np.rint(x / scale) + 3, -128, 127)
    assert q.dtype == np.int8 and np.array_equal(q, expected)
    back = np.asarray(F.dequantize_linear(q, scale, zero))
    np.testing.assert_allclose(back, (expected - 3) * scale, rtol=1e-6)
    assert np.array_equal(np.asarray(F.fake_quantize(x, scale, zero)), back)


def test_recurrences_of_states() -> None:
    u, delta = _heads(2, 5, 3), abs(_heads(2, 5, 3)) + 0.1
    a, b, c, d = -abs(_heads(3, 4)), _heads(2, 5, 4), _heads(2, 5, 4) + 1, _heads(3)
    h, expected = np.zeros((2, 3, 4)), np.zeros_like(u)
    for t in range(5):
        step = delta[:, t, :, None]
        h = np.exp(step * a) * h + step * b[:, t, None] * u[:, t, :, None]
        expected[:, t] = (h * c[:, t, None]).sum(-1) + d * u[:, t]
    y, last = F.selective_scan(u, delta, a, b, c, d)
    np.testing.assert_allclose(np.asarray(y), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.asarray(last), h, rtol=1e-4, atol=1e-5)
    w = _heads(3, 4)
    padded = np.concatenate([np.zeros((2, 3, 3), np.float32), u], 1)
    expected = sum(padded[:, j : j + 5] * w[:, j] for j in range(4))
    np.testing.assert_allclose(np.asarray(F.causal_conv1d(u, w)), expected, rtol=1e-5, atol=1e-6)


def test_the_gated_delta_rule() -> None:
    q, k, v = _heads(1, 4, 2, 8), _heads(1, 4, 2, 8) / 3, _heads(1, 4, 2, 8) + 1
    gate, beta = -abs(_heads(1, 4, 2)), 1 / (1 + np.exp(-_heads(1, 4, 2)))
    s, expected = np.zeros((2, 8, 8)), np.zeros((4, 2, 8))
    for t in range(4):
        s = np.exp(gate[0, t])[:, None, None] * s
        off = (v[0, t] - np.einsum("hn,hnm->hm", k[0, t], s)) * beta[0, t][:, None]
        s = s + k[0, t][:, :, None] * off[:, None]
        expected[t] = np.einsum("hn,hnm->hm", q[0, t] / np.sqrt(8), s)
    y, last = F.gated_delta_net(q, k, v, gate, beta)
    np.testing.assert_allclose(np.asarray(y)[0], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.asarray(last)[0], s, rtol=1e-4, atol=1e-5)


def test_random_functions_take_keys() -> None:
    x = np.ones((2000, 8), np.float32)
    y = np.asarray(F.dropout(x, 0.25, KEY))
    assert set(np.unique(y)) == {np.float32(0), np.float32(1 / 0.75)}
    assert abs(y.mean() - 1) < 5 * np.sqrt(1 / 3 / y.size)
    assert np.array_equal(np.asarray(rlx.jit(lambda x, k: F.dropout(x, 0.25, k))(x, KEY)), y)
    whole = np.asarray(F.dropout(np.ones((50, 4, 3, 3), np.float32), 0.5, KEY, axes=2))
    assert np.array_equal(whole.max((2, 3)), whole.min((2, 3)))
    assert np.array_equal(np.asarray(F.dropout(x, 0.25, training=False)), x)
    assert not np.asarray(F.dropout(x, 1.0, KEY)).any()
    with pytest.raises(rlx.InputError, match="draws random numbers"):
        F.dropout(x, 0.25)
    logits = np.log(np.tile(np.array([0.1, 0.2, 0.7], np.float32), (20000, 1)))
    drawn = np.asarray(F.gumbel_softmax(logits, KEY, hard=True))
    assert np.array_equal(drawn.sum(-1), np.ones(20000))
    assert np.abs(drawn.mean(0) - [0.1, 0.2, 0.7]).max() < 5 * 0.5 / np.sqrt(20000)
    tokens = np.asarray(F.sample(logits, KEY, top_k=2))
    share = np.bincount(tokens, minlength=3) / 20000
    assert np.abs(share - [0, 2 / 9, 7 / 9]).max() < 5 * 0.5 / np.sqrt(20000)
    assert (np.asarray(F.sample(logits[:9], KEY, temperature=0.0)) == 2).all()


def test_top_k_and_routes() -> None:
    x = _heads(4, 9)
    values, at = F.top_k(x, 3)
    assert np.array_equal(np.asarray(values), -np.sort(-x, -1)[:, :3])
    assert np.array_equal(np.take_along_axis(x, np.asarray(at), -1), np.asarray(values))
    scores, chosen = F.route_top_k(x, 2, "sigmoid", normalize=False)
    assert np.array_equal(np.asarray(chosen), np.asarray(at)[:, :2])
    np.testing.assert_allclose(
        np.asarray(scores), 1 / (1 + np.exp(-np.asarray(values)[:, :2])), rtol=1e-5
    )


def test_wrong_calls_are_typed_errors() -> None:
    x = _heads(2, 4, 6, 6)
    for wrong in (
        lambda: F.conv2d(x, _heads(3, 5, 3, 3)),
        lambda: F.conv2d(x[0], _heads(3, 4, 3, 3)),
        lambda: F.conv2d(x, _heads(3, 4, 3, 3), stride=2, padding="same"),
        lambda: F.conv2d(x, _heads(3, 4, 3, 3), padding="full"),
        lambda: F.conv2d(x, _heads(3, 4, 3, 3), _heads(4)),
        lambda: F.max_pool2d(x, (2, 2, 2)),
        lambda: F.linear(x, _heads(3, 4, 6)),
        lambda: F.linear(x, _heads(3, 5)),
        lambda: F.embedding(x, _heads(3, 5)),
        lambda: F.cross_entropy(_heads(3, 5), _heads(4)),
        lambda: F.cross_entropy(_heads(3, 5), np.arange(3), reduction="median"),
        lambda: F.scaled_dot_product_attention(x, _heads(2, 3, 6, 6), _heads(2, 3, 6, 6)),
        lambda: F.scaled_dot_product_attention(x, x, x, x[0, 0] > 0, window=3),
        lambda: F.group_norm(x, 3),
        lambda: F.interpolate(x),
        lambda: F.interpolate(x, 3, mode="cubic"),
        lambda: F.pad(x, (1,)),
        lambda: F.gelu(x, "best"),
        lambda: F.quantize(x),
        lambda: F.quantize(_heads(4, 33)),
        lambda: F.rope_tables(4, 7),
        lambda: F.update_cache(x, x, np.float32(1)),
    ):
        with pytest.raises(rlx.RlxError):
            wrong()
