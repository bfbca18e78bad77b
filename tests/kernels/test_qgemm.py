"""GEMMs with quantised weights: integer dot products, dequantised, of experts, fused epilogues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from kernel_support import RUNNABLE
from program_support import HOST, TARGETS, V3, Native, check, compare, kernels_for, reference
from qgemm_support import (
    QUICK_AND_GRIDS,
    SCHEMES,
    activation_bound,
    columns,
    graph_of,
    named,
    random_weight,
    rounding_bound,
    weight_params,
)

import rlx
from rlx.backends.cpu.kernels.gemm.epilogue import Epilogue
from rlx.backends.cpu.kernels.qgemm import dot, qgemm, unpacked_gemm
from rlx.backends.cpu.kernels.qgemm.dot_arm import Dotprod, Matrix, Neon
from rlx.backends.cpu.kernels.qgemm.pack_quantised import pack_quantised
from rlx.backends.cpu.kernels.qgemm.qgemm import (
    ROW_BLOCK_BYTES,
    QuantGemm,
    has_integer_path,
    row_layout,
)
from rlx.backends.cpu.kernels.qgemm.unpacked_gemm import ACC_ROWS
from rlx.backends.cpu.kernels.spec import unit_of
from rlx.backends.cpu.layouts.quant_grids import GRID_WORDS
from rlx.backends.cpu.layouts.quant_rows import dequantized_rows, quantize_rows
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph
from rlx.ir.quant.scheme import GGUF_SCHEMES, QuantScheme, decode
from rlx.ir.shape import Shape
from rlx.ir.verify import verify
from rlx.llvm.builder import Type, Value, i32
from rlx.llvm.target import Target

ROWS = (1, 2, 7, 64)


def slow(name: str):
    return pytest.param(name, marks=pytest.mark.slow)


MULTIPLYING = [t for t in map(Target.named, RUNNABLE) if dot.dot_kind(t) is not None]


# -- GEMM -------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.cpu)
@pytest.mark.parametrize("scheme", QUICK_AND_GRIDS)
def test_integer_matmuls_err_by_eight_bit_activations_alone(scheme, target):
    k, n = columns(scheme), 37
    rng = np.random.default_rng(7)
    parts = random_weight(scheme, (n,), k, rng)
    weights = decode(scheme, *parts).astype(np.float64)
    layout = row_layout(scheme, k, target)
    for rows in ROWS:
        x = rng.standard_normal((rows, k)).astype(np.float32)
        graph = pack_quantised(graph_of(scheme, x, parts), target)
        assert "packed_dequant_matmul" in [node.op.name for node in graph.nodes]
        verify(graph)
        (got,) = Native(graph, target, 2, {}).run({"x": x, **named(parts)})
        codes = dequantized_rows(layout, quantize_rows(layout, x), rows, k).astype(np.float64)
        slack = rounding_bound(scheme, layout, codes, parts)
        assert (np.abs(got - codes @ weights.T) <= slack).all(), "integer sums are not exact"
        exact = x.astype(np.float64) @ weights.T
        allowed = activation_bound(scheme, layout, x.astype(np.float64), parts)
        assert (np.abs(got - exact) <= allowed + slack).all()


def check_product(scheme, layout, parts, x, target):
    """Rows of x times packed weights, against the codes that rows become."""
    x = x.astype(np.float32)
    graph = pack_quantised(graph_of(scheme, x, parts), target)
    (got,) = Native(graph, target, 2, {}).run({"x": x, **named(parts)})
    codes = dequantized_rows(layout, quantize_rows(layout, x), *x.shape).astype(np.float64)
    slack = rounding_bound(scheme, layout, codes, parts)
    assert (np.abs(got - codes @ decode(scheme, *parts).astype(np.float64).T) <= slack).all()


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.cpu)
@pytest.mark.parametrize("left_over", [0, 1, 13])
def test_rows_of_several_chunks(left_over, target):
    scheme, k = GGUF_SCHEMES["Q4_K"], 2048
    rng = np.random.default_rng(12)
    parts = random_weight(scheme, (37,), k, rng)
    layout = row_layout(scheme, k, target)
    rows = 2 * (ROW_BLOCK_BYTES // layout.row_bytes(k)) + left_over
    check_product(scheme, layout, parts, rng.standard_normal((rows, k)), target)


@pytest.mark.parametrize("target", MULTIPLYING, ids=lambda t: t.cpu)
@pytest.mark.parametrize(
    "name",
    [
        "Q8_0",
        "Q4_1",
        "Q6_K",
        "IQ4_XS",
        slow("IQ2_S"),
        slow("IQ3_S"),
        slow("IQ1_M"),
        "TQ1_0",
        "int8",
        "int8_b64",
        "int4_asym",
    ],
)
def test_many_rows_of_long_k(name, target):
    """Where weights are unpacked: several runs of blocks, parts of rows, and one row left over."""
    scheme, k, rows = QuantScheme.parse(name), 1536, ACC_ROWS + 5
    rng = np.random.default_rng(13)
    parts = random_weight(scheme, (20,), k, rng)
    layout = row_layout(scheme, k, target)
    check_product(scheme, layout, parts, rng.standard_normal((rows, k)), target)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.cpu)
@pytest.mark.parametrize(
    "name",
    [
        n if n in ("IQ2_XS", "IQ3_S", "IQ1_M") else pytest.param(n, marks=pytest.mark.nightly)
        for n in GRID_WORDS
    ],
)
def test_grid_types_in_drawn_shapes(name, target):
    """One row, tiles of four and eight, what is left over of them, padded columns, odd blocks."""
    scheme = GGUF_SCHEMES[name]
    rng = np.random.default_rng(list(GRID_WORDS).index(name))
    for _ in range(6):
        rows, n = int(rng.integers(1, 30)), int(rng.integers(4, 90))
        k = 256 * int(rng.integers(1, 6))
        parts = random_weight(scheme, (n,), k, rng)
        layout = row_layout(scheme, k, target)
        check_product(scheme, layout, parts, rng.standard_normal((rows, k)), target)


@pytest.mark.parametrize("target", MULTIPLYING, ids=lambda t: t.cpu)
def test_int8_weights_of_any_size(target):
    """Sums of 16 bits hold what the quantiser makes, and not these: they must not be taken."""
    scheme, k = QuantScheme.parse("int8_b64"), 256
    rng = np.random.default_rng(14)
    x = rng.uniform(0.9, 1.0, (13, k))
    x[1::2] *= -1
    codes = rng.integers(-32, 33, (40, k)).astype(np.int8)
    codes[3], codes[17] = -128, 127
    codes[33, 64:128:16], codes[33, 65:128:16] = 127, 127
    parts = [codes, rng.uniform(0.5, 1.0, (40, k // 64)).astype(np.float32)]
    check_product(scheme, row_layout(scheme, k, target), parts, x, target)


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.cpu)
@pytest.mark.parametrize("name", ["Q3_K", "TQ2_0", "NVFP4"])
def test_rows_that_leave_a_narrower_tile(name, target):
    """Unpacked weights for whole tiles, packed ones for one row or four at the end."""
    scheme = GGUF_SCHEMES[name]
    rng = np.random.default_rng(15)
    parts = random_weight(scheme, (20,), 512, rng)
    layout = row_layout(scheme, 512, target)
    for rows in (4, 5, 8, 9, 12, 13, 17):
        check_product(scheme, layout, parts, rng.standard_normal((rows, 512)), target)


@pytest.mark.parametrize("target", MULTIPLYING, ids=lambda t: t.cpu)
@pytest.mark.parametrize("name", ["Q8_0", "int8"])
def test_the_largest_products_of_bytes_do_not_saturate(name, target):
    """Codes of -128 and 127 times rows of one magnitude, which are codes of 127."""
    scheme, k = QuantScheme.parse(name), 256
    parts = random_weight(scheme, (16,), k, np.random.default_rng(16))
    extremes = np.array([-128, 127, 0], np.int8).repeat(5)[:, None].repeat(k, 1)
    if name == "int8":
        parts[0][:15] = extremes
    else:
        codes = parts[0].reshape(16, -1, scheme.bytes_per_block)[:15, :, 2:]
        codes[...] = extremes.view(np.uint8).reshape(15, -1, 32)
    layout = row_layout(scheme, k, target)
    for rows in (1, 5):
        check_product(scheme, layout, parts, np.full((rows, k), -3.0), target)
        check_product(scheme, layout, parts, np.full((rows, k), 3.0), target)


@pytest.mark.parametrize("target", MULTIPLYING, ids=lambda t: t.cpu)
@pytest.mark.parametrize("name", ["Q6_K", "Q3_K", "IQ4_XS", slow("IQ2_XXS"), slow("IQ2_XS")])
def test_the_largest_products_of_superblocks_fit(name, target):
    """All codes the least, or the greatest, under scales as large as they get: sums of 16 bits,
    products of codes and scales, and what rows have added, which is taken off again."""
    scheme = GGUF_SCHEMES[name]
    parts = random_weight(scheme, (20,), 512, np.random.default_rng(17))
    blocks = parts[0].reshape(20, -1, scheme.bytes_per_block)
    at = {"Q6_K": slice(208, 210), "Q3_K": slice(108, 110)}.get(name, slice(0, 2))
    kept = blocks[..., at].copy()
    scales = {"Q6_K": slice(192, 208), "Q3_K": slice(96, 108)}.get(name)
    for row in range(16):
        codes, scale = row & 1 and 0xFF, (0, 0x7F, 0x80, 0xFF)[row >> 1 & 3]
        blocks[row] = codes
        if scales is not None:
            blocks[row, :, scales] = scale
        elif name == "IQ4_XS":
            blocks[row, :, 2:8] = scale
    if name.startswith("IQ2"):  # the point of 43s, or as many as there are, signs of all kinds
        blocks[:16] = _largest_points(name, scheme, blocks.shape[1])
    blocks[..., at] = kept
    layout = row_layout(scheme, 512, target)
    signs = np.sign(decode(scheme, *parts)[:16])
    for rows in (np.full((5, 512), -3.0), np.full((1, 512), 3.0), 2.0 * signs, -signs):
        check_product(scheme, layout, parts, rows, target)


def _largest_points(name: str, scheme: QuantScheme, count: int) -> np.ndarray:
    """Blocks of one repeated word of 16 bits, those with the largest weights."""
    words = np.arange(1 << 16, dtype=np.uint16)[:: 1 if name == "IQ2_XS" else 257]
    made = np.zeros((len(words), scheme.bytes_per_block), np.uint8)
    made[:, :2] = np.array([0x3C00], np.uint16).view(np.uint8)
    made[:, 2:66] = np.tile(words[:, None], 32).view(np.uint8)
    made[:, 66:] = 0xFF
    sums = np.abs(decode(scheme, made)).sum(axis=1)
    return made[np.argsort(-sums, kind="stable")[: 16 * count]].reshape(16, count, -1)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_dequantised_gemms_are_exact_but_for_rounding(scheme):
    k, n = columns(scheme), 70
    rng = np.random.default_rng(8)
    parts = random_weight(scheme, (n,), k, rng)
    weights = decode(scheme, *parts).astype(np.float64)
    targets = TARGETS if scheme.name in ("Q4_K", "IQ3_S", "int4_b32_asym") else [HOST]
    for rows in ROWS:
        x = rng.standard_normal((rows, k)).astype(np.float32)
        # Errors of a sum in f32 add up like steps of a random walk, each 2^-24 of what is summed
        # so far; the worst case, with sqrt(k) replaced by k, does not occur.
        slack = (np.sqrt(k) + 8) * 2.0**-24 * (np.abs(x) @ np.abs(weights).T)
        for target in targets:
            native = Native(graph_of(scheme, x, parts), target, 2, {})
            (got,) = native.run({"x": x, **named(parts)})
            assert (np.abs(got - x.astype(np.float64) @ weights.T) <= slack).all()


def test_rows_may_be_dynamic_and_absent():
    scheme = GGUF_SCHEMES["Q4_K"]
    rng = np.random.default_rng(9)
    parts = random_weight(scheme, (40,), 512, rng)
    for rewrite in (True, False):
        g = Graph("dynamic")
        x = g.input("x", Shape(("batch", "seq", 512)))
        g.set_outputs(g.dequant_matmul(x, *weight_params(g, parts), scheme=scheme))
        graph = pack_quantised(g, HOST) if rewrite else g
        bounds = {"batch": 2, "seq": 9}
        for batch, seq in ((1, 1), (2, 9), (1, 5), (2, 0)):
            rows = rng.standard_normal((batch, seq, 512)).astype(np.float32)
            sizes = {"batch": batch, "seq": seq}
            given = {"x": rows, **named(parts)}
            compare(graph, given, 1e-6, sizes, [(HOST, 2)], bounds)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("rewrite", [True, False])
def test_narrow_activations(dtype, rewrite):
    scheme = GGUF_SCHEMES["Q8_0"]
    rng = np.random.default_rng(10)
    parts = random_weight(scheme, (33,), 128, rng)
    x = rng.standard_normal((5, 128)).astype(DType.of(dtype).numpy)
    # One rounding to the narrow type; where the exact value lies halfway, to either side.
    step = 2.0**-10 if dtype == "f16" else 2.0**-7
    for target in TARGETS:
        graph = graph_of(scheme, x, parts)
        graph = pack_quantised(graph, target) if rewrite else graph
        compare(graph, {"x": x, **named(parts)}, step, setups=[(target, 2)])


@pytest.mark.parametrize(("cache", "coarse"), [("f16", True), ("f32", False)])
def test_attention_between_quantised_matmuls_is_coarse(cache, coarse):
    """Only where keys and values are narrow, and the result becomes codes."""
    scheme = GGUF_SCHEMES["Q8_0"]
    parts = random_weight(scheme, (32,), 64, np.random.default_rng(12))
    g = Graph("attention")
    q, k, v = (
        g.input(n, (1, 8, 64), dtype=t) for n, t in zip("qkv", ("f32", cache, cache), strict=True)
    )
    sizes = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 32}
    inner, last = (g.attention(q, k, v, **sizes, scale=s) for s in (1.0, 2.0))
    g.set_outputs(g.dequant_matmul(inner, *weight_params(g, parts), scheme=scheme), last)
    packed = pack_quantised(g, HOST)
    flags = {n.op.scale: n.op.coarse for n in packed.nodes if n.op.name == "attention"}
    assert flags == {1.0: coarse, 2.0: False}


def test_nan_and_infinity_stay_in_their_row():
    scheme = GGUF_SCHEMES["Q6_K"]
    rng = np.random.default_rng(11)
    parts = random_weight(scheme, (20,), 256, rng)
    x = rng.standard_normal((4, 256)).astype(np.float32)
    x[1, 5], x[2, 9] = np.nan, np.inf
    for target in TARGETS:
        graph = pack_quantised(graph_of(scheme, x, parts), target)
        (got,) = Native(graph, target, 1, {}).run({"x": x, **named(parts)})
        assert np.isnan(got[1]).all() and not np.isfinite(got[2]).any()
        assert np.isfinite(got[[0, 3]]).all()


def test_no_columns_give_zeros():
    scheme = GGUF_SCHEMES["Q8_0"]
    parts = [np.zeros((20, 0), np.uint8)]
    x = np.zeros((3, 0), np.float32)
    for graph in (graph_of(scheme, x, parts), pack_quantised(graph_of(scheme, x, parts), HOST)):
        (got,) = Native(graph, HOST, 2, {}).run({"x": x, **named(parts)})
        np.testing.assert_array_equal(got, np.zeros((3, 20), np.float32))


# -- epilogues --------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.cpu)
@pytest.mark.parametrize("name", ["Q4_K", "Q8_0", slow("IQ3_S"), "int8"])
def test_epilogues_join_the_matmul(name, target, rows):
    scheme = QuantScheme.parse(name)
    rng = np.random.default_rng(12)
    k, n = 512, 70
    first, second = (random_weight(scheme, (n,), k, rng) for _ in range(2))
    arrays = {
        "x": rng.standard_normal((rows, k)).astype(np.float32),
        "bias": rng.standard_normal(n).astype(np.float32),
        "residual": rng.standard_normal((rows, n)).astype(np.float32),
        **named(first),
        **named(second, "u"),
    }
    g = Graph("epilogues")
    x = g.input("x", arrays["x"].shape)
    w, u = weight_params(g, first), weight_params(g, second, "u")
    bias, residual = g.param("bias", (n,)), g.input("residual", (rows, n))
    biased = g.add(g.dequant_matmul(x, *w, scheme=scheme), bias)
    joined = [g.concat(a, b, axis=0) for a, b in zip(w, u, strict=True)]
    gated = g.fused_gated_act(g.dequant_matmul(x, *joined, scheme=scheme), activation="silu")
    g.set_outputs(g.add(g.gelu(biased), residual), gated, g.dequant_matmul(x, *u, scheme=scheme))
    packed = pack_quantised(g.copy(), target)
    op_names = [node.op.name for node in packed.nodes if not node.op.is_source]
    assert op_names.count("packed_dequant_matmul") == 3
    assert op_names.count("quantize_rows") == 1, "x is quantised once"
    assert not {"add", "gelu", "fused_gated_act"} & set(op_names)
    # Against the same integers, so only f32 rounding is left: of gelu and silu, some units.
    compare(packed, arrays, 2e-6, setups=[(target, 1), (target, 2)])
    # Against f32 activations: steps of 1/127 of a maximum average out over 512 columns.
    for got, want in zip(reference(packed, arrays), reference(g, arrays), strict=True):
        check(got, want, 0.02)


def test_an_encoder_layer_has_no_launch_beside_its_gemms_and_norm():
    """Regions that only finish a GEMM, and biases of parts of a joined one, become its epilogue."""
    scheme = QuantScheme.int8()
    rng = np.random.default_rng(13)
    g, params = rlx.Graph("encoder"), {}

    def weight(name: str, n: int, k: int):
        parts = random_weight(scheme, (n,), k, rng)
        params.update(named(parts, name))
        return weight_params(g, parts, name)

    def vector(name: str, n: int):
        params[name] = rng.standard_normal(n).astype(np.float32)
        return g.param(name, [n])

    def linear(x, name: str, n: int, k: int):
        return g.add(g.dequant_matmul(x, *weight(name, n, k), scheme=scheme), vector(f"b{name}", n))

    x = g.input("x", ["batch", 64])
    x = g.add(x, linear(g.gelu(linear(x, "up", 128, 64)), "down", 64, 128))
    x = g.layer_norm(x, vector("gamma", 64), vector("beta", 64))
    g.set_outputs({"q": linear(x, "q", 64, 64), "k": linear(x, "k", 64, 64)})
    f = rlx.Session("cpu").compile(g)
    op_names = [n.op.name for n in f.template.result.graph.nodes if not n.op.is_source]
    qgemm = ["quantize_rows", "packed_dequant_matmul"]
    assert op_names == [*qgemm * 2, "fused_residual_layer_norm", *qgemm, "narrow", "narrow"]
    f.set_params(params)
    r = rlx.Session("reference").compile(g).set_params(params)
    rows = rng.standard_normal((5, 64)).astype(np.float32)
    for got, want in zip(f.run(x=rows), r.run(x=rows), strict=True):
        check(got, want, 0.03)  # three layers of activations with steps of 1/127 of a maximum


def test_a_matmul_with_another_reader_is_left_alone():
    scheme = GGUF_SCHEMES["Q4_0"]
    parts = random_weight(scheme, (32,), 64, np.random.default_rng(0))
    g = Graph("shared")
    product = g.dequant_matmul(g.input("x", (3, 64)), *weight_params(g, parts), scheme=scheme)
    g.set_outputs(g.relu(product), product)
    packed = pack_quantised(g, HOST)
    assert [n.op.name for n in packed.nodes if not n.op.is_source][-1] == "relu"


def test_weights_that_are_not_parameters_are_dequantised():
    scheme = GGUF_SCHEMES["Q4_0"]
    parts = random_weight(scheme, (32,), 64, np.random.default_rng(0))
    g = Graph("given")
    w = g.input("w0", Shape(parts[0].shape, "u8"))
    g.set_outputs(g.dequant_matmul(g.input("x", (3, 64)), w, scheme=scheme))
    packed = pack_quantised(g, HOST)
    assert [n.op.name for n in packed.nodes if not n.op.is_source] == ["dequant_matmul"]


# -- experts ----------------------------------------------------------------------------------


def expert_graph(scheme: QuantScheme, tokens: int, experts: int, seed: int):
    rng = np.random.default_rng(seed)
    k, n = columns(scheme), 37
    parts = random_weight(scheme, (experts, n), k, rng)
    x = rng.standard_normal((tokens, k)).astype(np.float32)
    expert = rng.integers(0, experts, tokens).astype(np.int32)
    g = Graph("experts")
    rows, route = g.input("x", x.shape), g.input("e", Shape(expert.shape, "i32"))
    w, *sides = weight_params(g, parts)
    g.set_outputs(g.dequant_grouped_matmul(rows, w, route, *sides, scheme=scheme))
    return g, {"x": x, "e": expert, **named(parts)}


@pytest.mark.parametrize("tokens", [1, 9, 40])
@pytest.mark.parametrize(
    "name",
    ["Q4_K", "Q8_0", "int8_b32", "int4_asym", "Q6_K", slow("IQ2_XXS"), "NVFP4", "TQ1_0"],
)
def test_routed_rows_against_column_tiles(name, tokens):
    scheme = QuantScheme.parse(name)
    for target in TARGETS:
        g, arrays = expert_graph(scheme, tokens, 3, tokens)
        packed = pack_quantised(g, target)
        assert "packed_dequant_grouped" in [n.op.name for n in packed.nodes]
        compare(packed, arrays, 1e-6, setups=[(target, 1), (target, 2), (target, 3)])


@pytest.mark.parametrize("name", ["Q4_K", "IQ2_XS", "TQ1_0", "int4_b32_asym", "fp8_e4m3"])
def test_routed_rows_against_dequantised_weights(name):
    scheme = QuantScheme.parse(name)
    for tokens in (1, 30):
        g, arrays = expert_graph(scheme, tokens, 3, tokens)
        compare(g, arrays, 2e-6)


def test_an_expert_nobody_chose_is_not_read():
    """Column tiles of unused experts may be anything: here memory that would give NaN."""
    scheme = GGUF_SCHEMES["Q8_0"]
    g, arrays = expert_graph(scheme, 4, 3, 0)
    arrays["e"][:] = 1
    blocks = arrays["w0"].reshape(3, -1, 34)
    blocks[[0, 2], :, :2] = 0xFF
    packed = pack_quantised(g, HOST)
    (got,) = Native(packed, HOST, 2, {}).run(arrays)
    assert np.isfinite(got).all()


def test_weights_of_chosen_experts():
    for name in ("Q5_K", "IQ4_NL", "int8_asym", "F16"):
        scheme = QuantScheme.parse(name)
        parts = random_weight(scheme, (3, 21), columns(scheme), np.random.default_rng(4))
        g = Graph("experts")
        w, *sides = weight_params(g, parts)
        route = g.input("e", Shape((2,), "i64"))
        g.set_outputs(g.dequant_moe_weights(w, route, *sides, scheme=scheme))
        compare(g, {"e": np.array([2, 0]), **named(parts)}, 0.0)


# -- targets ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["x86-64-v2", "sapphirerapids", "alderlake", "neoverse-n1", "neoverse-v2", "aarch64"]
)
@pytest.mark.parametrize("schemes", ["Q4_K IQ4_NL int8", slow("IQ2_XS IQ3_S IQ1_M")])
def test_kernels_of_other_targets_compile(name, schemes):
    target = Target.named(name)
    for scheme in map(QuantScheme.parse, schemes.split()):
        parts = random_weight(scheme, (32,), 512, np.random.default_rng(0))
        g = graph_of(scheme, np.zeros((4, 512), np.float32), parts)
        graph = pack_quantised(g, target)
        assert kernels_for(graph, name) == (3 if has_integer_path(scheme, 512, target) else 1)


class Signed(Dotprod):
    """AArch64's way with bytes, written out so that it runs here."""

    def step(self, total: Value, codes: Value, x: Value) -> Value:
        products = codes.to(i32) * x.bits(self.bytes).to(i32)
        parts = [self.f.shuffle(products, None, range(j, 16, 4)) for j in range(4)]
        return total + parts[0] + parts[1] + parts[2] + parts[3]

    def lookup(self, table: Sequence[int], indices: Value) -> Value:
        values = self.f.const(list(table), self.bytes)
        return self.f.intrinsic("llvm.x86.ssse3.pshuf.b.128", self.bytes, values, indices)


@pytest.mark.skipif(not HOST.is_x86, reason="the stand-in is made of x86 instructions")
@pytest.mark.parametrize(
    "name",
    [
        *["Q8_0", "IQ4_NL", "MXFP4", "NVFP4", "TQ1_0", "IQ4_XS", slow("IQ2_XS")],
        *["Q4_K", "Q6_K", "int8_asym"],
    ],
)
def test_signed_bytes_need_no_offset(name, monkeypatch):
    monkeypatch.setattr(dot, "dot_kind", lambda target: Signed)
    # A target of another name, so that no kernel of the real one is taken or left.
    target = replace(Target.named("x86-64-v2"), cpu="nehalem")
    scheme = QuantScheme.parse(name)
    rng = np.random.default_rng(14)
    parts = random_weight(scheme, (20,), columns(scheme), rng)
    x = rng.standard_normal((5, columns(scheme))).astype(np.float32)
    graph = pack_quantised(graph_of(scheme, x, parts), target)
    compare(graph, {"x": x, **named(parts)}, 1e-6, setups=[(target, 1)])


class SignedMatrix(Matrix, Signed):
    """i8mm's matrix products, written out."""

    def _call(self, name: str, result: Type, *args: Value) -> Value:
        if not name.startswith("llvm.aarch64.neon.smmla"):
            return super()._call(name, result, *args)
        f, (total, rows, columns) = self.f, args
        for k in range(8):
            a = f.shuffle(rows.to(i32), None, [k, k, 8 + k, 8 + k])
            total = total + a * f.shuffle(columns.to(i32), None, [k, 8 + k, k, 8 + k])
        return total


@pytest.mark.skipif(not HOST.is_x86, reason="the stand-in is made of x86 instructions")
@pytest.mark.parametrize(
    "name", ["Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K", "IQ4_XS", "int8", "int4", "TQ1_0"]
)
def test_matrix_products_of_bytes(name, monkeypatch):
    """Tiles of 2 x 2 sums, rows in pairs of words: the same numbers, to the bit, as single rows."""
    for module in (dot, qgemm, unpacked_gemm):
        monkeypatch.setattr(module, "dot_kind", lambda target: SignedMatrix)
    target = replace(Target.named("x86-64-v2"), cpu="nehalem", features=("+ssse3", "+sse4.1"))
    scheme = QuantScheme.parse(name)
    rng = np.random.default_rng(15)
    parts = random_weight(scheme, (20,), 512, rng)
    layout = row_layout(scheme, 512, target)
    assert layout.paired == (name not in ("int4", "TQ1_0")), "these read other words"
    x = rng.standard_normal((9, 512)).astype(np.float32)
    check_product(scheme, layout, parts, x, target)
    graph = pack_quantised(graph_of(scheme, x, parts), target)
    (many,) = Native(graph, target, 1, {}).run({"x": x, **named(parts)})
    for r in (0, 3, 8):
        alone = pack_quantised(graph_of(scheme, x[r : r + 1], parts), target)
        (one,) = Native(alone, target, 1, {}).run({"x": x[r : r + 1], **named(parts)})
        np.testing.assert_array_equal(one[0], many[r])


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "Q6_K", "int8_asym"])
def test_vnni_of_256_bits(name):
    """AVX-VNNI's kernels, here by the same instructions of AVX-512."""
    scheme = QuantScheme.parse(name)
    alder = Target.named("alderlake")
    layout = row_layout(scheme, 512, alder)
    text = unit_of(QuantGemm(scheme, layout, Epilogue(DType.of("f32"))), alder).assembly()
    assert "{vex} vpdpbusd" in text or "{vex}\tvpdpbusd" in text
    assert "%zmm" not in text and "pmaddubsw" not in text
    features = ("+avx512f", "+avx512vl", "+avx512vnni")
    if not all(HOST.has(f[1:]) for f in features):
        pytest.skip("no vpdpbusd here")
    target = replace(V3, features=(*V3.features, *features))
    assert target.vector_bits == 256 and dot.dot_kind(target) is dot.Vnni
    rng = np.random.default_rng(16)
    parts = random_weight(scheme, (20,), 512, rng)
    for rows in (1, 9):
        check_product(scheme, layout, parts, rng.standard_normal((rows, 512)), target)


def test_which_targets_multiply_integers():
    scheme = GGUF_SCHEMES["Q4_K"]
    fast = [n for n in Target.names() if has_integer_path(scheme, 256, Target.named(n))]
    assert {"x86-64-v2", "x86-64-v3", "znver4", "aarch64", "neoverse-n1", "apple-m1"} <= set(fast)
    assert not {"x86-64", "generic"} & set(fast)
    kinds = {n: dot.dot_kind(Target.named(n)) for n in fast}
    assert kinds["aarch64"] is Neon and kinds["apple-m1"] is Dotprod
    assert kinds["apple-m2"] is kinds["neoverse-v1"] is Matrix
    assert kinds["alderlake"] is kinds["sapphirerapids"] is dot.Vnni
    assert has_integer_path(GGUF_SCHEMES["IQ2_XS"], 256, V3)
    assert not has_integer_path(GGUF_SCHEMES["Q8_K"], 256, V3)
    # A row that is one block sums up in 32 bits: 255 * 127 * 2^16 is the most that fits.
    assert has_integer_path(QuantScheme.int8(), 1 << 16, V3)
    assert not has_integer_path(QuantScheme.int8(), (1 << 16) + 16, V3)
