"""Quantised GEMM in AMX's tiles, emulated in memory and the CPU's own: the bits of AVX-512 VNNI."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from program_support import EMULATED, TILED, WITHOUT_TILES, Native
from qgemm_support import (
    INTEGER,
    columns,
    graph_of,
    named,
    random_weight,
    rounding_bound,
    weight_params,
)

from rlx.backends.cpu.kernels.gemm.epilogue import Epilogue
from rlx.backends.cpu.kernels.qgemm.pack_quantised import pack_quantised
from rlx.backends.cpu.kernels.qgemm.qgemm import QuantGemm, QuantGroupedGemm, row_layout
from rlx.backends.cpu.kernels.qgemm.unpacked_gemm import ACC_ROWS
from rlx.backends.cpu.kernels.spec import unit_of
from rlx.backends.cpu.layouts.quant_rows import dequantized_rows, quantize_rows
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph
from rlx.ir.quant.scheme import QuantScheme, decode
from rlx.ir.verify import verify
from rlx.llvm.target import Target

SAPPHIRE = Target.named("sapphirerapids")
runs_here = pytest.mark.skipif(
    not (WITHOUT_TILES.avx512 and WITHOUT_TILES.vnni),
    reason="a single row takes vpdpbusd of 512 bits",
)
QUICK = {"Q8_0", "Q4_0", "Q4_K", "Q6_K", "Q2_K", "NVFP4", "int8", "int4_asym", "int8_b64_asym"}
SCHEMES = [
    pytest.param(s, id=str(s), marks=() if str(s) in QUICK else pytest.mark.nightly)
    for s in INTEGER
]
ROWS = (1, 2, 5, 16, 17, 31, 32, 50)  # one, parts of a tile, tiles, two tiles, and one row more


def on(target: Target, make: Callable[[], Graph], inputs: dict[str, np.ndarray], workers: int = 2):
    graph = pack_quantised(make(), target)
    verify(graph)
    [got] = Native(graph, target, workers, {}).run(inputs)
    return got


def same_bits(make: Callable[[], Graph], inputs: dict[str, np.ndarray]) -> np.ndarray:
    """The result with tiles, which is that without to the bit."""
    want = on(WITHOUT_TILES, make, inputs)
    for target in TILED:
        assert on(target, make, inputs).tobytes() == want.tobytes()
    return want


@runs_here
@pytest.mark.parametrize("scheme", SCHEMES)
def test_products_have_the_bits_of_vnni(scheme):
    rng = np.random.default_rng(21)
    for k, n in ((columns(scheme), 37), (512, 16)):
        parts = random_weight(scheme, (n,), k, rng)
        for rows in ROWS:
            x = rng.standard_normal((rows, k)).astype(np.float32)
            same_bits(lambda: graph_of(scheme, x, parts), {"x": x, **named(parts)})  # noqa: B023


@runs_here
@pytest.mark.parametrize("scheme", SCHEMES)
def test_products_are_those_of_the_codes(scheme):
    """Against what codes of 8 bits give in f64."""
    k, rows = columns(scheme), 23
    rng = np.random.default_rng(22)
    parts = random_weight(scheme, (20,), k, rng)
    layout = row_layout(scheme, k, EMULATED)
    assert layout.matrix
    x = rng.standard_normal((rows, k)).astype(np.float32)
    got = on(EMULATED, lambda: graph_of(scheme, x, parts), {"x": x, **named(parts)})
    codes = dequantized_rows(layout, quantize_rows(layout, x), rows, k).astype(np.float64)
    want = codes @ decode(scheme, *parts).astype(np.float64).T
    assert (np.abs(got - want) <= rounding_bound(scheme, layout, codes, parts)).all()


@runs_here
@pytest.mark.parametrize(
    ("name", "k"),
    [
        ("int8", 16), ("int8", 80), ("int8", 1000 - 1000 % 16), ("int4", 48), ("int8_b48", 144),
        ("int8_b96", 192), ("int8_b384", 1536), ("int4_b32", 1504), ("Q8_0", 32), ("Q8_0", 1984),
        ("Q4_0", 1536), ("Q4_K", 1280),
    ],
)  # fmt: skip
def test_blocks_and_lengths_that_are_no_multiple_of_a_tile(name, k):
    """Tiles of fewer codes, what is left of a row, several runs of unpacked blocks."""
    scheme, rng = QuantScheme.parse(name), np.random.default_rng(23)
    parts = random_weight(scheme, (21,), k, rng)
    x = rng.standard_normal((35, k)).astype(np.float32)
    same_bits(lambda: graph_of(scheme, x, parts), {"x": x, **named(parts)})


@runs_here
@pytest.mark.parametrize("name", ["Q4_K", "int8"])
def test_more_rows_than_accumulators(name):
    scheme, rng = QuantScheme.parse(name), np.random.default_rng(24)
    parts = random_weight(scheme, (20,), 512, rng)
    x = rng.standard_normal((2 * ACC_ROWS + 19, 512)).astype(np.float32)
    same_bits(lambda: graph_of(scheme, x, parts), {"x": x, **named(parts)})


@runs_here
@pytest.mark.parametrize("name", ["Q8_0", "Q6_K", "IQ4_XS", "int8"])
def test_the_largest_products(name):
    """Codes of any value, rows of one magnitude: sums of a block are the largest that there are."""
    scheme, k = QuantScheme.parse(name), 512
    parts = random_weight(scheme, (16,), k, np.random.default_rng(25))
    if name == "int8":
        parts[0][:8], parts[0][8:] = -128, 127
    else:  # all bits of codes and of scales, but for those of the f16 scale, alike
        blocks = parts[0].reshape(-1, scheme.bytes_per_block)
        kept = blocks.copy()
        blocks[::2], blocks[1::2] = 0xFF, 0x80
        at = {"Q8_0": 0, "Q6_K": 208, "IQ4_XS": 0}[name]
        blocks[:, at : at + 2] = kept[:, at : at + 2]
    for value in (-3.0, 3.0):
        x = np.full((18, k), value, np.float32)
        same_bits(lambda: graph_of(scheme, x, parts), {"x": x, **named(parts)})  # noqa: B023


@runs_here
@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "int8"])
def test_gate_and_up(name):
    """A panel of two column tiles."""
    scheme, k, rng = QuantScheme.parse(name), 512, np.random.default_rng(26)
    parts = random_weight(scheme, (74,), k, rng)
    x = rng.standard_normal((37, k)).astype(np.float32)

    def make() -> Graph:
        g = Graph("gated")
        product = g.dequant_matmul(g.input("x", x.shape), *weight_params(g, parts), scheme=scheme)
        g.set_outputs(g.fused_gated_act(product, activation="silu"))
        return g

    [gemm] = [n for n in pack_quantised(make(), EMULATED).nodes if "matmul" in n.op.name]
    assert gemm.op.pair
    same_bits(make, {"x": x, **named(parts)})


@runs_here
@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "int8"])
def test_experts(name):
    """Chunks of one row, of less than a tile, of more, and none."""
    scheme, k, n, experts = QuantScheme.parse(name), 512, 20, 5
    rng = np.random.default_rng(27)
    parts = random_weight(scheme, (experts, n), k, rng)
    x = rng.standard_normal((60, k)).astype(np.float32)
    route = rng.permutation(np.repeat([0, 1, 2, 4], [1, 7, 35, 17])).astype(np.int32)

    def make() -> Graph:
        g = Graph("experts")
        rows, to = g.input("x", x.shape), g.input("e", route.shape, "i32")
        w, *sides = weight_params(g, parts)
        g.set_outputs(g.dequant_grouped_matmul(rows, w, to, *sides, scheme=scheme))
        return g

    assert "packed_dequant_grouped" in [n.op.name for n in pack_quantised(make(), EMULATED).nodes]
    same_bits(make, {"x": x, "e": route, **named(parts)})


# -- code ---------------------------------------------------------------------------------------


def functions(scheme: QuantScheme, kind: type[QuantGemm] = QuantGemm) -> dict[str, list[str]]:
    """Instructions of each function for Sapphire Rapids."""
    spec = kind(scheme, row_layout(scheme, 512, SAPPHIRE), Epilogue(DType.of("f32")))
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in unit_of(spec, SAPPHIRE).assembly().splitlines():
        if match := re.fullmatch(r"(\w+):.*", line):
            current = found.setdefault(match[1], [])
        elif line.startswith("\t") and not line.startswith("\t."):
            current.append(line.strip())
    return found


def opcodes(lines: Sequence[str]) -> list[str]:
    return [line.split()[0] for line in lines]


@pytest.mark.parametrize(
    ("name", "products"),
    [
        ("Q8_0", {"multiply1": {"tdpbssd"}}),
        ("Q4_0", {"multiply1": {"tdpbssd"}}),
        ("Q4_K", {"multiply1": {"tdpbsud", "tdpbssd"}, "multiply2": {"tdpbsud", "tdpbssd"}}),
        ("Q2_K", {"multiply1": {"tdpbsud"}, "multiply2": {"tdpbsud"}}),
        ("int8", {"multiply1": {"tdpbssd"}, "multiply4": {"tdpbssd"}}),
    ],
)
def test_instructions(name, products):
    code = functions(QuantScheme.parse(name))
    for function, expected in products.items():
        found = opcodes(code[function])
        assert {op for op in found if op.startswith("tdp")} == expected
        # Each operand is loaded, each tile of sums stored, where the kernel says; none is spilled.
        sums = {line.split("%tmm")[-1] for line in code[function] if line.startswith("tdp")}
        stored = {re.findall(r"%tmm(\d)", x)[0] for x in code[function] if "tilestored" in x}
        assert stored == sums
    kernel = opcodes(code["kernel"])
    assert kernel.count("ldtilecfg") == kernel.count("tilerelease") == 1
    assert "vpdpbusd" in opcodes(code["tile1"]), "a single row takes vectors"
    assert not [op for op in opcodes(code["tile1"]) if op.startswith(("tdp", "tile"))]


def test_wide_tiles_of_rows_load_each_operand_once():
    """Q4_K: four products from two tiles of rows and two of weights, each for 64 codes of k."""
    found = opcodes(functions(QuantScheme.parse("Q4_K"))["multiply2"])
    assert [found.count(op) for op in ("tileloadd", "tdpbsud", "tdpbssd", "tilestored")] == [
        16, 8, 8, 4,
    ]  # fmt: skip


def test_experts_take_tiles():
    code = functions(QuantScheme.parse("Q4_K"), QuantGroupedGemm)
    assert "tdpbssd" in opcodes(code["multiply2"])


@pytest.mark.parametrize("name", ["znver4", "alderlake", "x86-64-v4", "neoverse-v2"])
def test_no_tiles_elsewhere(name):
    for scheme in INTEGER:
        assert not row_layout(scheme, 512, Target.named(name)).matrix
