"""Packed weights in native code: decoding, integer products, decoded products, and their parts."""

from __future__ import annotations

import mmap
from pathlib import Path

import gguf.quants as gguf_quants
import numpy as np
import pytest
from program_support import HOST, TARGETS, V3, Native, check, compare, kernels_for, reference
from qmatmul_support import (
    INTEGER,
    SCHEMES,
    activation_bound,
    named,
    random_weight,
    rounding_bound,
    weight_params,
)

import rlx
from rlx.backends.cpu.prepare import give_back, prepare_params
from rlx.backends.cpu.qmatmul_rewrite import pack_quantised
from rlx.codegen.qmatmul.product import has_integer_path, row_layout
from rlx.codegen.target import Target
from rlx.errors import InputError
from rlx.formats.mapped import MappedFile
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph
from rlx.ir.quant import GGUF_SCHEMES, QuantScheme, decode
from rlx.ir.quant_rows import RowLayout, dequantized_rows, quantize_rows
from rlx.ir.quant_strips import pack_strips, strip_layout, unpack_strips
from rlx.ir.shape import Shape
from rlx.ir.verify import verify

ROWS = (1, 2, 7, 64)
HALVES = (0, 0x8000, 1, 0x3FF, 0x400, 0x3C00, 0xBC00, 0x7BFF, 0x7C00, 0xFC00, 0x7E00)
# gguf has no decoder for these; rlx.ir.quant is checked against their definition elsewhere.
ALONE = ("Q8_1", "Q8_K", "Q1_0")


def columns(scheme: QuantScheme) -> int:
    """Enough for several blocks, and for whole groups of them and less."""
    block = scheme.block or scheme.block_size
    return 768 if block == 256 else -(-288 // block) * block


def graph_of(scheme: QuantScheme, x: np.ndarray, parts: list[np.ndarray]) -> Graph:
    g = Graph("product")
    rows = g.input("x", Shape(x.shape, x.dtype))
    g.set_outputs(g.dequant_matmul(rows, *weight_params(g, parts), scheme=scheme))
    return g


def edge_blocks(scheme: QuantScheme) -> np.ndarray:
    """Blocks of one repeated byte, and random ones with special f16 numbers at every offset."""
    size = scheme.bytes_per_block
    rng = np.random.default_rng(size)
    flat = np.repeat(np.array([0, 0xFF, 0x80, 0x7F, 0x55], np.uint8), size).reshape(-1, size)
    rows = [flat, rng.integers(0, 256, (40, size), dtype=np.uint8)]
    for half in HALVES if size > 4 else ():
        blocks = rng.integers(0, 256, (size - 1, size), dtype=np.uint8)
        for offset in range(size - 1):
            blocks[offset, offset : offset + 2] = [half & 0xFF, half >> 8]
        rows.append(blocks)
    return np.concatenate(rows)


def same_bits(got: np.ndarray, want: np.ndarray) -> None:
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(
        got[~nan].view(np.uint32), want.astype(np.float32)[~nan].view(np.uint32)
    )


# -- decoding ---------------------------------------------------------------------------------


def gather_graph(scheme: QuantScheme, parts: list[np.ndarray], ids: np.ndarray) -> Graph:
    g = Graph("gather")
    table, *sides = weight_params(g, parts)
    rows = g.dequant_gather(table, g.input("ids", Shape(ids.shape, ids.dtype)), *sides,
                            scheme=scheme)  # fmt: skip
    g.set_outputs(rows)
    return g


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_every_type_decodes_to_the_same_bits(scheme):
    if scheme.ggml_type is not None:
        parts = [edge_blocks(scheme)]
    else:
        parts = random_weight(scheme, (19,), columns(scheme), np.random.default_rng(3))
    ids = np.arange(len(parts[0]), dtype=np.int64)[::-1].reshape(1, -1)
    graph = gather_graph(scheme, parts, ids)
    if scheme.ggml_type is not None and scheme.name not in ALONE:
        kind = gguf_quants.GGMLQuantizationType[scheme.name]
        with np.errstate(all="ignore"):
            want = gguf_quants.dequantize(parts[0], kind)
    else:
        want = decode(scheme, *parts)
    for target in TARGETS:
        (got,) = Native(graph, target, 2, {}).run({"ids": ids, **named(parts)})
        same_bits(got[0, ::-1], want.reshape(len(parts[0]), -1))


@pytest.mark.parametrize("index", ["i32", "i64", "u8"])
def test_gather_takes_any_index_and_names_one_out_of_range(index):
    scheme = GGUF_SCHEMES["Q4_K"]
    parts = random_weight(scheme, (10,), 512, np.random.default_rng(0))
    ids = np.array([[3, 9, 0], [9, 9, 1]], DType.of(index).numpy)
    graph = gather_graph(scheme, parts, ids)
    compare(graph, {"ids": ids, **named(parts)}, 0.0)
    ids[1, 1] = 10
    native = Native(graph, HOST, 2, {})
    native.run({"ids": ids, **named(parts)})
    assert native.made.status[0] != 0, "an index out of range went unseen"
    with pytest.raises(InputError):
        reference(graph, {"ids": ids, **named(parts)})


# -- layouts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("scheme", INTEGER, ids=str)
def test_strips_hold_every_weight_once(scheme, pair):
    rng = np.random.default_rng(1)
    for n, blocks in ((37, 3), (16, 2), (5, 1)):
        k = blocks * max(scheme.block or scheme.block_size, 32)
        rows = 2 * n if pair else n
        w, *sides = random_weight(scheme, (2, rows), k, rng)
        scale, zp = [*sides, None, None][:2]
        packed = pack_strips(scheme, w, scale, zp, pair)
        want = decode(scheme, w, scale, zp)
        got = unpack_strips(scheme, packed, n, k, pair)
        np.testing.assert_array_equal(got, want.reshape(2, 2, n, k) if pair else want)
        # What is repacked takes the bytes of its rows, but for rows that fill up the last strip
        # and lines that groups of blocks begin.
        layout = strip_layout(scheme, k)
        filled = packed.shape[1] * 16
        assert packed.nbytes - 2 * scheme.stored_bytes(filled, k) <= 2 * packed.shape[1] * 4 * 64
        assert layout.strip_bytes % 64 == 0


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.cpu)
@pytest.mark.parametrize("scheme", INTEGER, ids=str)
def test_repacking_natively_gives_the_same_strips(scheme, target):
    k = columns(scheme)
    for dims, pair in (((37,), False), ((2, 18), False), ((2, 34), True)):
        parts = random_weight(scheme, dims, k, np.random.default_rng(2))
        g = Graph("pack")
        g.set_outputs(g.pack_quant(*weight_params(g, parts), scheme=scheme, pair=pair))
        compare(g, named(parts), 0.0, setups=[(target, 1), (target, 3)])


@pytest.mark.parametrize("layout", ["block32x8", "block64x4", "block0x8", "super256x8"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_quantised_rows_are_those_of_the_reference(layout, dtype):
    rng = np.random.default_rng(5)
    for rows, k in ((1, 512), (2, 256), (7, 512), (21, 256), (8, 768), (0, 256)):
        x = rng.standard_normal((rows, k)) * 10 ** rng.uniform(-3, 3, (rows, 1))
        if rows:
            x[0, :64], x[-1, 70] = 0, 1e-42
        x = x.astype(DType.of(dtype).numpy)
        g = Graph("rows")
        g.set_outputs(g.quantize_rows(g.input("x", Shape(x.shape, dtype)), layout=layout))
        parsed = RowLayout.parse(layout, "test")
        want = quantize_rows(parsed, x)
        for target in TARGETS:
            # Rows that only fill up a tile hold anything, so the numbers are compared.
            (got,) = Native(g, target, 2, {}).run({"x": x})
            numbers = dequantized_rows(parsed, got, rows, k)
            np.testing.assert_array_equal(numbers, dequantized_rows(parsed, want, rows, k))
            if rows == 8 or rows == 1:
                np.testing.assert_array_equal(got[:rows], want[:rows])


# -- products ---------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.cpu)
@pytest.mark.parametrize("scheme", INTEGER, ids=str)
def test_integer_products_err_by_eight_bit_activations_alone(scheme, target):
    k, n = columns(scheme), 37
    rng = np.random.default_rng(7)
    parts = random_weight(scheme, (n,), k, rng)
    weights = decode(scheme, *parts).astype(np.float64)
    layout = row_layout(scheme, target)
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


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_decoded_products_are_exact_but_for_rounding(scheme):
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


def test_rows_may_be_live_and_absent():
    scheme = GGUF_SCHEMES["Q4_K"]
    rng = np.random.default_rng(9)
    parts = random_weight(scheme, (40,), 512, rng)
    for rewrite in (True, False):
        g = Graph("live")
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
    graph = graph_of(scheme, x, parts)
    graph = pack_quantised(graph, HOST) if rewrite else graph
    # One rounding to the narrow type; where the exact value lies halfway, to either side.
    step = 2.0**-10 if dtype == "f16" else 2.0**-7
    compare(graph, {"x": x, **named(parts)}, step, setups=[(t, 2) for t in TARGETS])


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


# -- what follows a product -------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.cpu)
@pytest.mark.parametrize("name", ["Q4_K", "Q8_0", "int8"])
def test_epilogues_join_the_product(name, target, rows):
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
    kinds = [node.op.name for node in packed.nodes if not node.op.is_source]
    assert kinds.count("packed_dequant_matmul") == 3
    assert kinds.count("quantize_rows") == 1, "x is quantised once"
    assert not {"add", "gelu", "fused_gated_act"} & set(kinds)
    # Against the same integers, so only f32 rounding is left: of gelu and silu, some units.
    compare(packed, arrays, 2e-6, setups=[(target, 1), (target, 2)])
    # Against f32 activations: steps of 1/127 of a maximum average out over 512 columns.
    for got, want in zip(reference(packed, arrays), reference(g, arrays), strict=True):
        check(got, want, 0.02)


def test_an_encoder_layer_has_no_step_beside_its_products_and_norm():
    """Regions that only finish a product, and biases of pieces of a joined one, go into it."""
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
    kinds = [n.op.name for n in f.template.result.graph.nodes if not n.op.is_source]
    product = ["quantize_rows", "packed_dequant_matmul"]
    assert kinds == [*product * 2, "fused_residual_layer_norm", *product, "narrow", "narrow"]
    f.set_params(params)
    r = rlx.Session("reference").compile(g).set_params(params)
    rows = rng.standard_normal((5, 64)).astype(np.float32)
    for got, want in zip(f.run(x=rows), r.run(x=rows), strict=True):
        check(got, want, 0.03)  # three layers of activations with steps of 1/127 of a maximum


def test_a_product_with_another_reader_is_left_alone():
    scheme = GGUF_SCHEMES["Q4_0"]
    parts = random_weight(scheme, (32,), 64, np.random.default_rng(0))
    g = Graph("shared")
    product = g.dequant_matmul(g.input("x", (3, 64)), *weight_params(g, parts), scheme=scheme)
    g.set_outputs(g.relu(product), product)
    packed = pack_quantised(g, HOST)
    assert [n.op.name for n in packed.nodes if not n.op.is_source][-1] == "relu"


def test_weights_that_are_not_parameters_are_decoded():
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
@pytest.mark.parametrize("name", ["Q4_K", "Q8_0", "int8_b32", "int4_asym", "Q6_K"])
def test_routed_rows_against_strips(name, tokens):
    scheme = QuantScheme.parse(name)
    for target in TARGETS:
        g, arrays = expert_graph(scheme, tokens, 3, tokens)
        packed = pack_quantised(g, target)
        assert "packed_dequant_grouped" in [n.op.name for n in packed.nodes]
        compare(packed, arrays, 1e-6, setups=[(target, 1), (target, 2), (target, 3)])


@pytest.mark.parametrize("name", ["Q4_K", "IQ2_XS", "TQ1_0", "int4_b32_asym", "fp8_e4m3"])
def test_routed_rows_against_decoded_weights(name):
    scheme = QuantScheme.parse(name)
    for tokens in (1, 30):
        g, arrays = expert_graph(scheme, tokens, 3, tokens)
        compare(g, arrays, 2e-6)


def test_an_expert_nobody_chose_is_not_read():
    """Strips of unused experts may be anything: here memory that would give NaN."""
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


@pytest.mark.parametrize("name", ["x86-64-v2", "sapphirerapids", "neoverse-n1", "aarch64"])
def test_kernels_of_other_targets_compile(name):
    target = Target.named(name)
    for scheme in (GGUF_SCHEMES["Q4_K"], GGUF_SCHEMES["IQ4_NL"], QuantScheme.int8()):
        parts = random_weight(scheme, (32,), 512, np.random.default_rng(0))
        g = graph_of(scheme, np.zeros((4, 512), np.float32), parts)
        graph = pack_quantised(g, target)
        assert kernels_for(graph, name) == (3 if has_integer_path(scheme, 512, target) else 1)


def test_which_targets_multiply_integers():
    scheme = GGUF_SCHEMES["Q4_K"]
    fast = [n for n in Target.names() if has_integer_path(scheme, 256, Target.named(n))]
    assert {"x86-64-v2", "x86-64-v3", "znver4", "neoverse-n1", "apple-m1"} <= set(fast)
    assert not {"x86-64", "generic", "aarch64"} & set(fast)
    assert not has_integer_path(GGUF_SCHEMES["IQ2_XS"], 256, V3)
    # A row that is one block sums up in 32 bits: 255 * 127 * 2^16 is the most that fits.
    assert has_integer_path(QuantScheme.int8(), 1 << 16, V3)
    assert not has_integer_path(QuantScheme.int8(), (1 << 16) + 16, V3)


# -- prepare ----------------------------------------------------------------------------------


def test_prepare_repacks_natively_and_hands_the_file_back(tmp_path):
    """A mapped weight is resident once: as strips, no longer as pages of the file."""
    scheme, n, k = GGUF_SCHEMES["Q8_0"], 8192, 2048
    (rows,) = random_weight(scheme, (n,), k, np.random.default_rng(0))
    path = tmp_path / "weight"
    path.write_bytes(b"header" + rows.tobytes())
    w = MappedFile(path).view(6, rows.shape, DType.of("u8"))
    g = Graph("prepare")
    packed = g.pack_quant(g.param("w", Shape(w.shape, "u8")), scheme=scheme)
    g.set_outputs({"packed": packed})
    (strips,) = prepare_params(g, {"w": w})
    np.testing.assert_array_equal(strips, pack_strips(scheme, rows, None, None))
    assert strips.ctypes.data % 64 == 0, "lines of strips must be lines of the cache"
    before = mapped_bytes(path)
    assert int(w[::4096].sum()) == int(rows[::4096].sum())  # the file can still be read
    give_back(w)
    assert before == mapped_bytes(path) == 0
    writable = rows.copy()
    give_back(writable)
    np.testing.assert_array_equal(writable, rows)


def mapped_bytes(path) -> int:
    """Bytes of a file that are resident in this process, but for pages at its ends."""
    found, counting = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0] and not line.startswith("VmFlags"):
            counting = str(path) in line
        elif counting and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return max(0, found - 2 * mmap.PAGESIZE)


def test_a_whole_graph_on_the_device():
    """Embedding, a gated product, and a head that shares the table: rows in, logits out."""
    scheme = GGUF_SCHEMES["Q4_K"]
    rng = np.random.default_rng(1)
    table, gate, up = (random_weight(scheme, (n,), 256, rng)[0] for n in (300, 512, 512))
    down = random_weight(GGUF_SCHEMES["Q6_K"], (256,), 512, rng)[0]
    params = {"table": table, "gate": gate, "up": up, "down": down}
    g = rlx.Graph("tiny")
    values = {name: g.param(name, Shape(a.shape, "u8")) for name, a in params.items()}
    x = g.dequant_gather(values["table"], g.input("ids", Shape(("batch", "seq"), "i32")),
                         scheme=scheme)  # fmt: skip
    inner = g.mul(
        g.silu(g.dequant_matmul(x, values["gate"], scheme=scheme)),
        g.dequant_matmul(x, values["up"], scheme=scheme),
    )
    x = g.add(x, g.dequant_matmul(inner, values["down"], scheme=GGUF_SCHEMES["Q6_K"]))
    g.set_outputs({"logits": g.dequant_matmul(x, values["table"], scheme=scheme)})
    results = {}
    for device in ("cpu", "reference"):
        f = rlx.Session(device).compile(g)
        f.set_params(params)
        ids = np.array([[3, 299, 0, 17, 5]], np.int32)
        results[device] = [f.run(ids=ids[:, :count])[0] for count in (1, 5)]
    for got, want in zip(results["cpu"], results["reference"], strict=True):
        # Three products in a row, each with activations of 8 bits.
        check(got, want, 0.02)
