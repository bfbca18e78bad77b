"""GEMM of two bf16 matrices in AMX's tiles: emulated in memory and the CPU's own, and the code of
Sapphire Rapids."""

from __future__ import annotations

import re

import numpy as np
import pytest
from gemm_support import draw
from program_support import EMULATED, TILED, Native

from rlx.backends.cpu.kernels.gemm.bf16_gemm import Bf16Gemm
from rlx.backends.cpu.kernels.gemm.epilogue import Epilogue
from rlx.backends.cpu.kernels.gemm.pack_weights import pack_weights
from rlx.backends.cpu.kernels.spec import unit_of
from rlx.backends.cpu.layouts.pack import PackMatMul, unpack
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph
from rlx.ir.interp import evaluate
from rlx.llvm.target import Target
from rlx.passes.prepare import split_prepare

SAPPHIRE = Target.named("sapphirerapids")
BF16 = DType.of("bf16")
# A tile and less, parts of panels and of tiles of k, more than a block of rows and of k
SIZES = [(1, 32, 32), (5, 100, 40), (16, 31, 31), (37, 300, 70), (161, 520, 33)]


def product(x: np.ndarray, w: np.ndarray) -> Graph:
    g = Graph("product")
    rows = g.input("x", x.shape, DType.of(x.dtype))
    g.set_outputs(g.matmul(rows, g.param("w", w.shape, DType.of(w.dtype))))
    return g


def packed_names(graph: Graph) -> list[str]:
    return [n.op.layout for n in graph.nodes if n.op.name == "packed_matmul"]


def run(graph: Graph, arrays: dict[str, np.ndarray], workers: int = 2) -> np.ndarray:
    results = []
    for target in TILED:
        packed = pack_weights(graph.copy(), target)
        assert packed_names(packed) == ["tiles32"]
        main, prepare = split_prepare(packed)
        made = dict(zip(prepare.output_names, evaluate(prepare, {"w": arrays["w"]}), strict=True))
        results += Native(main, target, workers, {}).run({**arrays, **made})
    assert len({got.tobytes() for got in results}) == 1, "the CPU's tiles against emulated ones"
    return results[0]


def sums(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """f32 sums in the order of `tdpbf16ps`. In f64 a product is exact, and so is its sum with an
    f32 of about its size: rounding that to f32 is an fma."""
    k = x.shape[1]
    x = np.pad(x.astype(np.float64), ((0, 0), (0, -k % 32)))
    w = np.pad(w.astype(np.float64), ((0, -k % 32), (0, 0)))
    total = np.zeros((len(x), w.shape[1]), np.float32)
    for start in range(0, x.shape[1], 32):
        parts = np.zeros((2, *total.shape), np.float32)
        for i in range(32):
            parts[i % 2] = parts[i % 2] + x[:, start + i, None] * w[start + i]
        total += parts[0] + parts[1]
    return total


@pytest.mark.parametrize(("m", "k", "n"), SIZES)
def test_sums_to_the_bit(m, k, n):
    x, w = draw(1, m, k, dtype="bf16"), draw(2, k, n, dtype="bf16")
    got = run(product(x, w), {"x": x, "w": w})
    np.testing.assert_array_equal(got, sums(x, w).astype(BF16.numpy))


def test_epilogue_in_f32():
    """Bias, activation and residual before the only rounding to bf16."""
    m, k, n = 20, 72, 35
    x, w = draw(1, m, k, dtype="bf16"), draw(2, k, n, dtype="bf16")
    bias, residual = draw(3, n, dtype="bf16"), draw(4, m, n, dtype="bf16")
    g = Graph("fused")
    rows, added = g.input("x", x.shape, BF16), g.input("r", residual.shape, BF16)
    weights = g.param("w", w.shape, BF16), g.param("b", bias.shape, BF16)
    out = g.fused_matmul_bias_act(
        rows, *weights, added, activation="relu", has_bias=True, has_residual=True
    )
    g.set_outputs(out)
    got = run(g, {"x": x, "w": w, "b": bias, "r": residual})
    want = np.maximum(sums(x, w) + bias.astype(np.float32), 0) + residual.astype(np.float32)
    np.testing.assert_array_equal(got, want.astype(BF16.numpy))


def test_infinities_and_nan_stay_in_their_rows_and_columns():
    """The zeros that fill up k and columns meet none of them."""
    x, w = draw(1, 3, 40, dtype="bf16"), draw(2, 40, 20, dtype="bf16")
    x[1, 39], w[38, 19] = np.inf, np.nan
    got = run(product(x, w), {"x": x, "w": w}).astype(np.float32)
    assert np.isfinite(got[[0, 2], :19]).all() and np.isinf(got[1, :19]).all()
    assert np.isnan(got[:, 19]).all()


@pytest.mark.parametrize(("x", "w"), [("f32", "bf16"), ("bf16", "f32"), ("f16", "f16")])
def test_operands_that_would_be_rounded_take_f32(x, w):
    graph = pack_weights(product(draw(1, 4, 64, dtype=x), draw(2, 64, 32, dtype=w)), EMULATED)
    assert packed_names(graph) and not packed_names(graph)[0].startswith("tiles")


def test_other_targets_take_f32():
    for name in ("znver4", "x86-64-v3", "alderlake", "neoverse-v2"):
        graph = product(draw(1, 4, 64, dtype="bf16"), draw(2, 64, 32, dtype="bf16"))
        assert packed_names(pack_weights(graph, Target.named(name)))[0].startswith("panel")


def test_layout():
    """Pairs of k of each column, columns and k filled up with zeros."""
    w = np.arange(3 * 5, dtype=np.float32).reshape(3, 5)
    packed = PackMatMul("tiles32").reference(w)
    assert packed.shape == (1, 32, 32)
    pairs = packed.reshape(16, 32, 2)
    np.testing.assert_array_equal(pairs[0, :5], w[:2].T)
    np.testing.assert_array_equal(pairs[1, :5, 0], w[2])
    assert np.count_nonzero(packed) == w.size - 1
    np.testing.assert_array_equal(unpack(packed, "tiles32", 5)[0][:3], w)


def test_instructions():
    """Four products of two operands each for four loads; sums alone are stored, none is spilled."""
    text = unit_of(Bf16Gemm(BF16, BF16, Epilogue(BF16)), SAPPHIRE).assembly()
    [body] = re.findall(r"^multiply2:(.*?)\.Lfunc_end", text, re.MULTILINE | re.DOTALL)
    found = re.findall(r"\t(t(?:ile|dp)\w+)", body)
    assert found.count("tdpbf16ps") == 4 and found.count("tilestored") == 4
    products = re.findall(r"tdpbf16ps\s+%tmm(\d), %tmm(\d), %tmm(\d)", body)
    assert sorted(products) == sorted(
        (str(6 + s), str(4 + r), str(2 * r + s)) for r in (0, 1) for s in (0, 1)
    )
    assert sorted(re.findall(r"tilestored\s+%tmm(\d)", body)) == ["0", "1", "2", "3"]
    assert text.count("ldtilecfg") == text.count("tilerelease") == 1
