"""Kernels of blocks in their own right: what a graph is lowered to, and results at sizes that the
parity table does not have."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "parity"))
from fake_driver import FakeDriver, installed, make_stand_in
from test_ptx import assemble, needs_ptxas, ptx_of

import rlx
from rlx.backends.cuda import round_rows
from rlx.backends.cuda.backend import CudaBackend
from rlx.backends.cuda.kernel import GpuKernel
from rlx.backends.cuda.kernels.attention import lower_attention
from rlx.backends.cuda.kernels.attention.attention_problem import AttentionForm
from rlx.backends.cuda.kernels.attention.decode_attention import DecodeAttention
from rlx.backends.cuda.kernels.attention.flash_attention import FlashAttention
from rlx.backends.cuda.kernels.attention.group_attention import GroupAttention
from rlx.backends.cuda.kernels.experts import lower_experts
from rlx.backends.cuda.kernels.experts.expert_groups import ExpertGroupGemm
from rlx.backends.cuda.kernels.experts.grouped_gemm import GroupedGemm
from rlx.backends.cuda.kernels.experts.sort_rows import SortRows
from rlx.backends.cuda.kernels.gemm import many_rows, plan
from rlx.backends.cuda.kernels.gemm.epilogue import Epilogue
from rlx.backends.cuda.kernels.gemm.few_rows import FewRows, few_rows_for
from rlx.backends.cuda.kernels.gemm.gemm import LARGE, SMALL, Gemm
from rlx.backends.cuda.kernels.gemm.gemv import Norm, gemv_for
from rlx.backends.cuda.kernels.gemm.group_gemm import GroupGemm, GroupTile
from rlx.backends.cuda.kernels.gemm.split_rows import SplitRows
from rlx.backends.cuda.kernels.gemm.weight_rows import FloatRows
from rlx.backends.cuda.kernels.qgemm import row_planes
from rlx.backends.cuda.kernels.qgemm.digits import HAVE_BYTES
from rlx.backends.cuda.kernels.qgemm.packed_rows import PackedRows
from rlx.backends.cuda.kernels.qgemm.unpack_weight import UnpackWeight
from rlx.backends.cuda.kernels.recurrent.cells import CellSteps
from rlx.backends.cuda.kernels.recurrent.delta_net import DeltaNet
from rlx.backends.cuda.kernels.recurrent.selective_scan import SelectiveScan
from rlx.backends.cuda.kernels.sampling.draw_token import DrawToken
from rlx.backends.cuda.lower_program import LoweredProgram as Program
from rlx.backends.cuda.tensor_map import MapStore, Matrix
from rlx.ir.dtype import DType, bf16, f16, f32, i32
from rlx.ir.graph import Graph
from rlx.ir.interp import evaluate
from rlx.ir.op import lookup
from rlx.ir.quant.blocks import LAYOUTS
from rlx.ir.quant.scheme import GGUF_SCHEMES, QuantScheme, decode, encode
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.template import make_template
from rlx.specialize.options import CompileOptions

OWN = [n for n in row_planes.PARTS if n not in row_planes.RUNS]
UNPACKED = ["IQ4_XS", "Q3_K", "Q4_1", "Q2_K"]  # with runs of 32 and 16, with minima and without


@pytest.fixture(scope="module")
def backend() -> Iterator[CudaBackend]:
    with installed(FakeDriver()):
        yield make_stand_in()


def graph_of(build: Any) -> Graph:
    g = Graph("test")
    out = build(g)
    g.set_outputs(*(out if isinstance(out, tuple) else [out]))
    return g


def compiled(backend: CudaBackend, build: Any, **options: Any) -> CompiledGraph:
    return CompiledGraph(make_template(graph_of(build), CompileOptions(**options), backend))


def labels(backend: CudaBackend, build: Any, cpu: str = "sm_90a", **options: Any) -> list[str]:
    template = make_template(graph_of(build), CompileOptions(**options), backend)
    return [x.label for x in Program(template.plan({}), cpu, backend.gpu.multiprocessors).launches]


def draw(seed: int, *dims: int) -> Any:
    return np.random.default_rng(seed).standard_normal(dims).astype(np.float32)


# -- products ------------------------------------------------------------------------------------


def product(m: Any, n: int, k: int, w: str = "bf16") -> Any:
    def build(g: Graph) -> Any:
        return g.matmul(g.input("x", [m, k]), g.transpose(g.param("w", [n, k], w), (1, 0)))

    return build


def test_a_product_takes_the_kernel_of_its_size(backend: CudaBackend) -> None:
    assert labels(backend, product(1, 64, 256)) == ["gemv(1x256)"]
    assert labels(backend, product(8, 64, 256)) == ["gemv(8x256)"]
    assert labels(backend, product(9, 64, 256)) == ["planes(3)", "gemm(64x64x256)"]
    assert labels(backend, product(200, 64, 256)) == ["planes(2)", "gemm(64x64x256)"]
    assert labels(backend, product(200, 64, 256), "sm_80") == ["planes(2)", "gemm(64x64x256)"]
    assert labels(backend, product(1, 64, 250)) == ["region(cast, mul, sum)"]


@pytest.mark.parametrize("w", ["bf16", "f16"])
@pytest.mark.parametrize(("m", "n", "k"), [(3, 37, 1032), (150, 133, 72), (65, 24, 2048)])
def test_products_of_ragged_sizes(backend: CudaBackend, m: int, n: int, k: int, w: str) -> None:
    """24 units of f32 in the last place of the largest result: bf16 planes hold 16 bits of x when
    there are more than 128 rows, a rounding of 2⁻¹⁸ for each of k products."""
    made, element = compiled(backend, product(m, n, k, w)), bf16 if w == "bf16" else f16
    x, weight = draw(1, m, k) * 100, draw(2, n, k).astype(element.numpy)
    made.set_param("w", weight)
    want = x.astype(np.float64) @ weight.astype(np.float64).T
    got = made.run(x=x)[0]
    allowed = (2**-18 if m > 128 and w == "bf16" else 2**-20) * np.abs(want).max()
    assert np.abs(got - want).max() <= allowed


@pytest.mark.parametrize("k", [9 * 2048, 17 * 2048])
def test_one_row_whose_last_group_of_steps_is_not_full(backend: CudaBackend, k: int) -> None:
    """All lanes have as many steps of 8 numbers, 9 or 17; they are loaded 8 at a time, and what is
    past the end counts nothing. The tolerance is 2⁻²⁰ of the largest, for sums of 34816 f32."""
    made = compiled(backend, product(1, 4, k))
    x, weight = draw(1, 1, k), draw(2, 4, k).astype(bf16.numpy)
    made.set_param("w", weight)
    want = x.astype(np.float64) @ weight.astype(np.float64).T
    assert np.abs(made.run(x=x)[0] - want).max() <= 2**-20 * np.abs(want).max()


@pytest.mark.parametrize(("m", "n", "k"), [(2, 37, 1056), (8, 16, 64), (5, 24, 3104)])
def test_a_few_rows_by_tensor_cores(backend: CudaBackend, m: int, n: int, k: int) -> None:
    """x is three bf16 numbers, 24 bits: 24 units in the last place of the largest result."""
    made = compiled(backend, product(m, n, k))
    [launch] = Program(made.template.plan({}), "sm_90a", backend.gpu.multiprocessors).launches
    assert isinstance(launch.kernel, FewRows)
    x, weight = draw(1, m, k) * 100, draw(2, n, k).astype(bf16.numpy)
    made.set_param("w", weight)
    want = x.astype(np.float64) @ weight.astype(np.float64).T
    assert np.abs(made.run(x=x)[0] - want).max() <= 2**-20 * np.abs(want).max()


def test_a_few_rows_with_a_gate_and_a_residual(backend: CudaBackend) -> None:
    def build(g: Graph) -> Any:
        x = g.input("x", [6, 64])
        gate, up = (g.transpose(g.param(n, [40, 64], "bf16"), (1, 0)) for n in ("gate", "up"))
        y = g.fused_swiglu(x, gate, up)
        down = g.transpose(g.param("down", [48, 64], "bf16"), (1, 0))
        bias, more = g.param("bias", [48]), g.input("more", [6, 48])
        return y, g.add(g.relu(g.add(g.matmul(x, down), bias)), more)

    graph = graph_of(build)
    made = compiled(backend, build)
    params: dict[str, Any] = {
        n: draw(i, 40, 64).astype(bf16.numpy) for i, n in enumerate(("gate", "up"))
    }
    params |= {"down": draw(5, 48, 64)}
    params = {n: a.astype(bf16.numpy) for n, a in params.items()} | {"bias": draw(6, 48)}
    made.set_params(params)
    data = {"x": draw(7, 6, 64), "more": draw(8, 6, 48)}
    for got, want in zip(made.run(data), evaluate(graph, {**data, **params}), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())


def test_few_tiles_divide_the_columns_of_x(backend: CudaBackend) -> None:
    made = compiled(backend, product(16, 40, 2048))
    [_, launch] = Program(made.template.plan({}), "sm_90a", backend.gpu.multiprocessors).launches
    assert isinstance(launch.kernel, GroupGemm)
    assert launch.blocks == launch.kernel.splits > 1
    x, weight = draw(3, 16, 2048), draw(4, 40, 2048).astype(bf16.numpy)
    made.set_param("w", weight)
    want = x.astype(np.float64) @ weight.astype(np.float64).T
    for _ in range(2):  # counters are 0 again after a run
        np.testing.assert_allclose(made.run(x=x)[0], want, rtol=0, atol=2e-6 * np.abs(want).max())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "tile", "element"),
    [
        ("plain", (128, 64, 1), "bf16"), ("plain", (64, 128, 2), "f32"),
        ("pair", (128, 64, 2), "f32"), ("pair", (64, 128, 1), "bf16"),
        ("added", (128, 64, 1), "f32"), ("added", (64, 128, 2), "bf16"),
    ],
)  # fmt: skip
def test_blocks_take_several_tiles_of_ragged_products(
    backend: CudaBackend, kind: str, tile: tuple[int, int, int], element: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Three blocks for all tiles. bf16 rounds the result by 2⁻⁹ at most; f32 is two planes of bf16,
    which drop 2⁻¹⁷ of x."""
    m, n, k = 200, 136, 264
    monkeypatch.setattr(plan, "_cheapest", lambda *_: (GroupTile(*tile[:2]), tile[2]))
    monkeypatch.setattr(many_rows, "BLOCKS", 3)
    x, r = (draw(i, m, d).astype(ml_dtypes.bfloat16) for i, d in ((1, k), (2, n)))
    w, u = (draw(i, n, k).astype(ml_dtypes.bfloat16) for i in (3, 4))
    b = draw(5, n).astype(ml_dtypes.bfloat16)
    if element == "f32":
        x, r, b = (draw(6, *v.shape) for v in (x, r, b))

    def build(g: Graph) -> Any:
        rows = g.input("x", [m, k], element)
        weight = g.transpose(g.param("w", [n, k], "bf16"), (1, 0))
        if kind == "plain":
            return g.matmul(rows, weight)
        if kind == "pair":
            up = g.transpose(g.param("u", [n, k], "bf16"), (1, 0))
            return g.fused_swiglu(rows, weight, up, activation="silu")
        bias, more = g.param("b", [n], element), g.input("r", [m, n], element)
        flags = {"has_bias": True, "has_residual": True}
        return g.fused_matmul_bias_act(rows, weight, bias, more, activation="none", **flags)

    assert labels(backend, build)[-1] == f"gemm({tile[0]}x{tile[1]}x{k})"
    made = compiled(backend, build)
    known = {"w": w, "u": u, "b": b, "x": x, "r": r}
    params, inputs = {"plain": ("w", "x"), "pair": ("wu", "x"), "added": ("wb", "xr")}[kind]
    made.set_params({name: known[name] for name in params})
    got = made.run(**{name: known[name] for name in inputs})[0]
    wide = {name: v.astype(np.float64) for name, v in known.items()}
    want = wide["x"] @ wide["w"].T
    if kind == "pair":
        want = want / (1 + np.exp(-want)) * (wide["x"] @ wide["u"].T)
    if kind == "added":
        want = want + wide["b"] + wide["r"]
    off = np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want)
    assert off < (2**-9 if element == "bf16" else 2**-17)


@pytest.mark.parametrize("form", ["groups", "warps"])
def test_packed_experts_are_decoded_some_at_a_time(
    backend: CudaBackend, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of five at a time; f16 rounds weights and x by 2⁻¹² each at most. Older GPUs multiply by
    single warps."""
    monkeypatch.setattr(lower_experts, "_MOST_UNPACKED", 2 * 2 * 40 * 256)
    if form == "warps":
        monkeypatch.setattr(lower_experts, "HOPPER", "none")
    scheme, weights = GGUF_SCHEMES["Q8_0"], draw(1, 5, 40, 256)
    packed = encode(scheme, weights).data

    def build(g: Graph) -> Any:
        x, ids = g.input("x", [150, 256]), g.input("e", [150], "i32")
        return g.dequant_grouped_matmul(
            x, g.param("w", list(packed.shape), "u8"), ids, scheme=scheme
        )

    names = labels(backend, build)
    assert names[:2] == ["sort_rows(5)", "planes(2)"]
    assert names[2:] == ["unpack(Q8_0)", "expert gemm(64x64x256)"] * 3
    made = compiled(backend, build).set_param("w", packed)
    x, ids = draw(2, 150, 256), np.random.default_rng(3).integers(0, 5, 150).astype(np.int32)
    want = np.einsum("tk,tnk->tn", x.astype(np.float64), decode(scheme, packed)[ids])
    got = made.run(x=x, e=ids)[0]
    assert np.linalg.norm(got - want) < 2**-11 * np.linalg.norm(want)


@pytest.mark.parametrize(
    "name",
    ["int8", "int8_b32", "int4_b64", "int8_asym", "int4_b32_asym", "int8_b48", "int4_b16_asym"],
)
@pytest.mark.parametrize("rows", [1, 5])
def test_integers_with_scales_beside_them(backend: CudaBackend, name: str, rows: int) -> None:
    """They are laid out as types of GGUF that have such parts; zero points become minima."""
    k, scheme = 192, QuantScheme.parse(name)
    packed = encode(scheme, draw(1, 38, k))
    parts = [p for p in (packed.data, packed.scale, packed.zp) if p is not None]

    def build(g: Graph) -> Any:
        names = ("w", "scale", "zero")
        w, *sides = (
            g.param(n, list(p.shape), DType.of(p.dtype)) for n, p in zip(names, parts, strict=False)
        )
        x, ids = g.input("x", [rows, k]), g.input("i", [3], "i32")
        return (
            g.dequant_matmul(x, w, *sides, scheme=scheme),
            g.dequant_gather(w, ids, *sides, scheme=scheme),
        )

    assert sorted(labels(backend, build)) == ["dequant_gather", f"gemv({rows}x{k})"]
    made = compiled(backend, build)
    made.set_params(dict(zip(("w", "scale", "zero"), parts, strict=False)))
    x, ids, weights = draw(9, rows, k), np.array([37, 0, 7], np.int32), decode(scheme, *parts)
    got = made.run(x=x, i=ids)
    np.testing.assert_allclose(got[1], weights[ids], rtol=0, atol=2**-20 * np.abs(weights).max())
    want = x.astype(np.float64) @ weights.astype(np.float64).T
    assert np.linalg.norm(got[0] - want) < 2**-18 * np.linalg.norm(want)


# -- products of two f32 matrices ------------------------------------------------------------------


def strided_product(kind: str) -> tuple[Any, tuple[int, ...], tuple[int, ...], str]:
    """A graph, the shapes of its inputs, and what it computes as einsum says it."""
    forms: dict[str, Any] = {
        "rows": (lambda g, x, w: g.matmul(x, w), (70, 100), (100, 42), "mk,kn->mn"),
        "laid out": (
            lambda g, x, w: g.matmul(x, g.transpose(w, (1, 0))),
            (3, 50, 72), (66, 72), "amk,nk->amn",
        ),
        "gradient of a weight": (
            lambda g, x, w: g.matmul(g.transpose(x, (1, 0)), w), (330, 37), (330, 50), "km,kn->mn"
        ),
        "scores": (
            lambda g, x, w: g.matmul(g.transpose(x, (0, 2, 1, 3)), g.transpose(w, (0, 2, 3, 1))),
            (2, 60, 3, 16), (2, 70, 3, 16), "bmhk,bnhk->bhmn",
        ),
        "sums of values": (
            lambda g, x, w: g.matmul(x, g.transpose(w, (0, 2, 1, 3))),
            (2, 3, 60, 50), (2, 50, 3, 18), "bhmk,bkhn->bhmn",
        ),
        "gradient of values": (
            lambda g, x, w: g.matmul(g.transpose(x, (0, 1, 3, 2)), w),
            (2, 2, 150, 40), (2, 2, 150, 24), "bhkm,bhkn->bhmn",
        ),
    }  # fmt: skip
    found: tuple[Any, tuple[int, ...], tuple[int, ...], str] = forms[kind]
    return found


@pytest.mark.parametrize(
    "kind", ["rows", "laid out", "gradient of a weight", "scores", "sums of values",
             "gradient of values"],
)  # fmt: skip
def test_products_of_f32_matrices(backend: CudaBackend, kind: str) -> None:
    """Numbers of two parts have 22 bits of a row's largest: two roundings of 2⁻²³ in each of the
    products, beside the sums' own. Rows of very different sizes keep theirs."""
    build, left, right, formula = strided_product(kind)
    made = compiled(backend, lambda g: build(g, g.input("x", left), g.input("w", right)))
    kernels = [x.label.split("(")[0] for x in made.executable.program.launches]
    alike = kind not in ("rows", "sums of values")  # numbers of rows follow each other, or neither
    assert kernels == (["split", "gemm"] if alike else ["split", "split", "gemm"])
    x, w = draw(1, *left), draw(2, *right)
    if kind == "rows":
        x *= 10.0 ** (np.arange(70) % 30 - 15)[:, None]
    want = np.einsum(formula, x.astype(np.float64), w.astype(np.float64))
    largest = np.einsum(formula, np.abs(x), np.abs(w))
    for _ in range(2):
        [got] = made.run(x=x, w=w)
        assert (np.abs(got - want) <= 2**-20 * largest.max(axis=-1, keepdims=True)).all()


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("kind", ["scores", "sums of values", "gradient of values"])
def test_products_of_pairs_of_16_bits(backend: CudaBackend, kind: str, dtype: str) -> None:
    """Sums are in f32, then they are rounded once."""
    build, left, right, formula = strided_product(kind)
    made = compiled(
        backend, lambda g: build(g, g.input("x", left, dtype), g.input("w", right, dtype))
    )
    kernels = [x.label.split("(")[0] for x in made.executable.program.launches]
    assert kernels[-1] == "gemm"
    assert set(kernels[:-1]) == {"split"}
    element = DType.of(dtype).numpy
    x, w = draw(1, *left).astype(element), draw(2, *right).astype(element)
    want = np.einsum(formula, x.astype(np.float64), w.astype(np.float64))
    largest = np.einsum(formula, np.abs(x).astype(np.float64), np.abs(w).astype(np.float64))
    [got] = made.run(x=x, w=w)
    bits = 8 if dtype == "bf16" else 11
    allowed = 2.0**-bits * np.abs(want) + 2**-20 * largest.max(axis=-1, keepdims=True)
    assert (np.abs(got.astype(np.float64) - want) <= allowed).all()


def test_f32_products_with_bias_and_gelu(backend: CudaBackend) -> None:
    def build(g: Graph) -> Any:
        x, w, b = g.input("x", ["n", 64]), g.input("w", [48, 64]), g.input("b", [48])
        return g.gelu(g.add(g.matmul(x, g.transpose(w, (1, 0))), b))

    made = compiled(backend, build, binding={"n": rlx.UpTo(170)})
    w, b = draw(2, 48, 64), draw(3, 48)
    for n in (170, 3):
        x = draw(n, n, 64)
        [want] = evaluate(graph_of(build), {"x": x, "w": w, "b": b}, {"n": n})
        [got] = made.run(x=x, w=w, b=b)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    labels = [x.label.split("(")[0] for x in made.executable.program.launches]
    assert labels == ["split", "gemm"]


@pytest.mark.parametrize(("heads", "mask"), [(2, "none"), (4, "causal")])
def test_f32_attention_of_many_queries_is_two_products(
    backend: CudaBackend, heads: int, mask: str
) -> None:
    """22 bits of each number of q, k, v and of the weights."""

    def build(g: Graph) -> Any:
        q, k, v = (g.input(n, [2, 64, (heads if n == "q" else 2) * 48]) for n in "qkv")
        options = {"num_heads": heads, "num_kv_heads": 2, "head_dim": 48, "mask_kind": mask}
        return g.attention(q, k, v, **options)

    made = compiled(backend, build)
    kernels = [x.label.split("(")[0] for x in made.executable.program.launches]
    assert kernels.count("gemm") == 2 and "attention" not in kernels, kernels
    given = {n: draw(i, 2, 64, (heads if n == "q" else 2) * 48) for i, n in enumerate("qkv")}
    [want] = evaluate(graph_of(build), given)
    [got] = made.run(given)
    np.testing.assert_allclose(got, want, rtol=0, atol=2**-18)


def test_tensor_maps_follow_the_buffers_of_a_run(backend: CudaBackend) -> None:
    """x is read where it lies, by a map of that place; the weight's map is encoded once."""
    memory = backend.allocator
    store = MapStore(memory)
    matrix = Matrix(bf16, 40, 64, 64, 64)
    first, second = store.address(matrix, 1 << 20), store.address(matrix, 2 << 20)
    assert first != second == store.address(matrix, 2 << 20)
    assert first % 64 == second % 64 == 0
    store.make_room(1 << 20)
    assert store.address(matrix, 3 << 20) == first  # all that was known is forgotten

    def build(g: Graph) -> Any:
        return g.matmul(g.input("x", [20, 64], "bf16"), g.transpose(w(g), (1, 0)))

    def w(g: Graph) -> Any:
        return g.param("w", [24, 64], "bf16")

    made, weight = compiled(backend, build), draw(1, 24, 64).astype(bf16.numpy)
    made.set_param("w", weight)
    held = []
    for seed in (2, 3, 2):
        x = draw(seed, 20, 64).astype(bf16.numpy)
        held.append(memory.put(x))
        want = x.astype(np.float64) @ weight.astype(np.float64).T
        got = made.run(x=held[-1])[0].astype(np.float64)
        np.testing.assert_allclose(got, want, rtol=2**-8, atol=1e-6)  # bf16 rounds the result


def test_dynamic_rows_run_in_tiles_of_the_most(backend: CudaBackend) -> None:
    made = compiled(backend, product("n", 40, 64), binding={"n": rlx.UpTo(200)})
    weight = draw(5, 40, 64).astype(bf16.numpy)
    made.set_param("w", weight)
    for n in (1, 64, 129, 200):
        x = draw(n, n, 64)
        want = x.astype(np.float64) @ weight.astype(np.float64).T
        np.testing.assert_allclose(made.run(x=x)[0], want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_a_norm_is_computed_by_the_product_that_reads_it(backend: CudaBackend) -> None:
    def build(g: Graph) -> Any:
        x, r = g.input("x", [1, 256]), g.input("r", [1, 256])
        y, total = g.fused_residual_rms_norm(x, r, g.param("gamma", [256]), eps=1e-5)
        z = g.matmul(y, g.transpose(g.param("w", [24, 256], "bf16"), (1, 0)))
        return z, g.add(total, 1.0)

    names = labels(backend, build)
    assert names[0] == "gemv(1x256)", names
    made = compiled(backend, build)
    x, r, gamma = draw(1, 1, 256), draw(2, 1, 256), draw(3, 256)
    weight = draw(4, 24, 256).astype(bf16.numpy)
    made.set_params({"gamma": gamma, "w": weight})
    total = (x + r).astype(np.float64)
    normed = total / np.sqrt((total**2).mean() + 1e-5) * gamma
    got = made.run(x=x, r=r)
    np.testing.assert_allclose(got[0], normed @ weight.astype(np.float64).T, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(got[1], total + 1, rtol=1e-6)


def block_of(g: Graph, h: Any, i: int, size: int = 64) -> Any:
    """A residual, a norm and a gated product, as layers of models have them."""
    w = [g.param(f"{n}{i}", [size, size], "bf16") for n in ("o", "gate", "up")]
    o, gate, up = (g.transpose(v, (1, 0)) for v in w)
    h = g.add(h, g.matmul(h, o))
    y = g.rms_norm(h, g.param(f"gamma{i}", [size]), eps=1e-5)
    return h, g.mul(g.silu(g.matmul(y, gate)), g.matmul(y, up))


def test_a_product_of_one_row_adds_the_residual(backend: CudaBackend) -> None:
    """The norm behind it reads the sum, and is computed by the next product: two launches."""
    for rows, want in ((1, ["gemv(1x64)", "gemv(1x64)"]), (8, ["gemv(8x64)", "gemv(8x64)"])):

        def build(g: Graph, rows: int = rows) -> Any:
            h, z = block_of(g, g.input("x", [rows, 64]), 0)
            return z, g.mul(h, 2.0)

        names = [n for n in labels(backend, build) if n.startswith("gemv")]
        assert names == want
        assert not any(n.startswith("region(add") for n in labels(backend, build))
        made = compiled(backend, build)
        weights = {
            n: draw(i, 64, 64).astype(bf16.numpy) for i, n in enumerate(("o0", "gate0", "up0"))
        }
        gamma, x = draw(7, 64), draw(8, rows, 64)
        made.set_params({**weights, "gamma0": gamma})
        o, gate, up = (w.astype(np.float64).T for w in weights.values())
        h = x + x.astype(np.float64) @ o
        y = h / np.sqrt((h**2).mean(-1, keepdims=True) + 1e-5) * gamma
        a = y @ gate
        got = made.run(x=x)
        # roundings of f32 in sums of 64 products
        np.testing.assert_allclose(got[0], a / (1 + np.exp(-a)) * (y @ up), rtol=2e-5, atol=2e-4)
        np.testing.assert_allclose(got[1], 2 * h, rtol=1e-5, atol=1e-5)


def layer(g: Graph, rows: int) -> Any:
    """A layer of a dense model: 2 heads of 64 numbers, on one of keys."""
    x, cache = g.input("x", [1, rows, 64]), [g.input(n, [1, rows, 64], "f16") for n in "kv"]

    def weight(name: str, n: int, k: int) -> Any:
        return g.transpose(g.param(name, [n, k], "bf16"), (1, 0))

    h = g.add(x, 1.0)
    q = g.matmul(g.rms_norm(h, g.param("g0", [64]), eps=1e-5), weight("q", 128, 64))
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 64}
    o = g.attention(q, *cache, **sizes, mask_kind="causal")
    h = g.add(h, g.matmul(o, weight("o", 64, 128)))
    y = g.rms_norm(h, g.param("g1", [64]), eps=1e-5)
    z = g.mul(g.silu(g.matmul(y, weight("gate", 72, 64))), g.matmul(y, weight("up", 72, 64)))
    h = g.add(h, g.matmul(z, weight("down", 64, 72)))
    last = g.rms_norm(h, g.param("g2", [64]), eps=1e-5)
    return g.matmul(last, weight("head", 64, 64)), g.mul(h, 2.0)


def expected_layer(given: dict[str, Any]) -> list[Any]:
    a = {n: v.astype(np.float64) for n, v in given.items()}

    def norm(h: Any, gamma: Any) -> Any:
        return h / np.sqrt((h**2).mean(-1, keepdims=True) + 1e-5) * gamma

    h = a["x"] + 1
    q = (norm(h, a["g0"]) @ a["q"].T).reshape(1, -1, 2, 64)
    o = expected(q, a["k"][:, :, None], a["v"][:, :, None], group=2).reshape(1, -1, 128)
    h = h + o @ a["o"].T
    y = norm(h, a["g1"])
    gate = y @ a["gate"].T
    h = h + (gate / (1 + np.exp(-gate)) * (y @ a["up"].T)) @ a["down"].T
    return [norm(h, a["g2"]) @ a["head"].T, 2 * h]


def test_what_products_read_is_rounded_by_what_makes_it(
    backend: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No launch converts: norms, attention and gates write bf16, products add residuals in f32.
    Five roundings of 2⁻⁹ at most on the way; the residual stream keeps what they do not touch."""
    rows = 40
    monkeypatch.setattr(round_rows, "_EXACT_ROWS", rows - 1)
    names = labels(backend, lambda g: layer(g, rows))
    assert [n.split("(")[0] for n in names[1:]] == [
        "rms_norm", "gemm", "attention", "gemm", "rms_norm", "gemm", "gemm", "rms_norm", "gemm",
        "region",
    ]  # fmt: skip
    made = compiled(backend, lambda g: layer(g, rows))
    sizes = {"q": (128, 64), "o": (64, 128), "gate": (72, 64), "up": (72, 64), "down": (64, 72)}
    sizes["head"] = (64, 64)
    params = {n: (draw(i, *d) / 8).astype(bf16.numpy) for i, (n, d) in enumerate(sizes.items())}
    params |= {f"g{i}": draw(20 + i, 64) for i in range(3)}
    inputs = {"x": draw(9, 1, rows, 64)}
    inputs |= {n: draw(i, 1, rows, 64).astype(np.float16) for n, i in (("k", 7), ("v", 8))}
    made.set_params(params)
    wanted = expected_layer({**params, **inputs})
    for got, want in zip(made.run(inputs), wanted, strict=True):
        assert np.linalg.norm(got - want) / np.linalg.norm(want) < 2**-7
    monkeypatch.setattr(round_rows, "_EXACT_ROWS", rows)
    assert "planes(3)" in labels(backend, lambda g: layer(g, rows))  # few rows keep all bits


def test_only_the_first_kernel_of_a_run_waits_before_it_starts(backend: CudaBackend) -> None:
    """The others read their args before they wait for the one in front, and a decode loop changes
    args between two runs."""
    made = compiled(backend, lambda g: block_of(g, g.input("x", [1, 64]), 0))
    executable: Any = backend.compile(made.template.plan({}), CompileOptions())
    assert [grid.overlaps for grid in executable._grids] == [False, True]


# -- packed weights ------------------------------------------------------------------------------

PACKED = ["Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4"]


def drawn_blocks(name: str, n: int, k: int, seed: int) -> Any:
    """Rows of encoded normal numbers; of MXFP4, which has no encoder, random bits with exponents
    about that of 1."""
    scheme, rng = GGUF_SCHEMES[name], np.random.default_rng(seed)
    if name != "MXFP4":
        return encode(scheme, rng.standard_normal((n, k)).astype(np.float32)).data
    packed = rng.integers(0, 256, (n, scheme.row_bytes(k)), dtype=np.uint8)
    packed[:, ::17] = rng.integers(120, 130, (n, k // 32))
    return packed


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K"])
def test_packed_products_of_one_row_have_gate_and_residual(backend: CudaBackend, name: str) -> None:
    scheme = GGUF_SCHEMES[name]
    joined, down = (encode(scheme, draw(i, n, 256) * 0.1).data for i, n in ((1, 512), (2, 256)))

    def build(g: Graph) -> Any:
        x, r = g.input("x", [1, 256]), g.input("r", [1, 256])
        w, v = (g.param(n, list(a.shape), "u8") for n, a in (("w", joined), ("v", down)))
        y = g.fused_gated_act(g.dequant_matmul(x, w, scheme=scheme))
        h = g.add(g.dequant_matmul(y, v, scheme=scheme), r)
        return g.rms_norm(h, g.param("gamma", [256]), eps=1e-5), g.mul(h, 2.0)

    names = labels(backend, build)
    assert [n for n in names if "gemv" in n] == ["gemv(1x256)"] * 2
    assert not any("silu" in n for n in names)
    made = compiled(backend, build)
    made.set_params({"w": joined, "v": down, "gamma": np.ones(256, np.float32)})
    x, r = draw(3, 1, 256), draw(4, 1, 256)
    a, b = np.split(x.astype(np.float64) @ decode(scheme, joined).astype(np.float64).T, 2, axis=1)
    h = (a / (1 + np.exp(-a)) * b) @ decode(scheme, down).astype(np.float64).T + r
    want = h / np.sqrt((h**2).mean() + 1e-5)
    got = made.run(x=x, r=r)
    np.testing.assert_allclose(got[1], 2 * h, rtol=0, atol=4e-6 * np.abs(h).max())
    np.testing.assert_allclose(got[0], want, rtol=0, atol=4e-6 * np.abs(want).max())


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("rows", [1, 5, 11])
def test_packed_weights_are_decoded_on_the_device(
    backend: CudaBackend, name: str, rows: int
) -> None:
    """Blocks of random bits; a product differs from the sum in f64 by roundings of f32 alone."""
    scheme, rng = GGUF_SCHEMES[name], np.random.default_rng(rows)
    if name in ("Q8_0", "Q4_0", "MXFP4"):
        packed = drawn_blocks(name, 19, 512, rows)
    else:
        packed = rng.integers(0, 256, (19, scheme.row_bytes(512)), dtype=np.uint8)
        for at in (0, 2) if name in ("Q4_K", "Q5_K") else (208,):
            for start in range(at, packed.shape[1], scheme.row_bytes(256)):
                packed[:, start : start + 2] = np.array([0.01], np.float16).view(np.uint8)

    def build(g: Graph) -> Any:
        w = g.param("w", list(packed.shape), "u8")
        return (
            g.dequant_matmul(g.input("x", [rows, 512]), w, scheme=scheme),
            g.dequant_gather(w, g.input("i", [3], "i32"), scheme=scheme),
        )

    assert sorted(labels(backend, build)) == ["dequant_gather", f"gemv({min(rows, 8)}x512)"]
    made = compiled(backend, build).set_param("w", packed)
    x, ids = draw(9, rows, 512), np.array([18, 0, 7], np.int32)
    weights = decode(scheme, packed)
    got = made.run(x=x, i=ids)
    np.testing.assert_array_equal(got[1], weights[ids])
    want = x.astype(np.float64) @ weights.astype(np.float64).T
    np.testing.assert_allclose(got[0], want, rtol=0, atol=2e-6 * np.abs(want).max())
    for wrong in (19, -1):  # as on the other devices
        with pytest.raises(rlx.InputError, match="out of range"):
            made.run(x=x, i=np.array([0, wrong, 1], np.int32))


def random_records(name: str, n: int, k: int) -> Any:
    """Random bits whose scales of blocks are small numbers."""
    rng = np.random.default_rng(len(name))
    packed = rng.integers(0, 256, (n, GGUF_SCHEMES[name].row_bytes(k)), dtype=np.uint8)
    records = packed.reshape(-1).view(LAYOUTS[name])
    for field in ("d", "dmin", "m"):
        if field in (records.dtype.names or ()) and records[field].dtype.kind == "f":
            records[field] = rng.uniform(-0.02, 0.02, records[field].shape)
    if name == "IQ1_M":  # a quarter of the scale is in the top bits of each word
        bits = rng.uniform(0, 0.02, len(records)).astype(np.float16).view(np.uint16)
        for i in range(4):
            word = records["scales"][:, i] & 0xFFF
            records["scales"][:, i] = word | (bits >> 4 * i & 15) << 12
    return packed


@pytest.mark.parametrize("name", row_planes.RUNS)
@pytest.mark.parametrize("rows", [1, 5])
def test_other_types_are_unpacked_to_bytes(backend: CudaBackend, name: str, rows: int) -> None:
    """The numbers are those of the blocks; products differ from sums in f64 by roundings of f32."""
    scheme, packed = GGUF_SCHEMES[name], random_records(name, 19, 512)
    weights = decode(scheme, packed)
    parts = row_planes.split_blocks(name, packed)
    np.testing.assert_array_equal(row_planes.decoded(name, parts, 512), weights)

    def build(g: Graph) -> Any:
        w = g.param("w", list(packed.shape), "u8")
        return (
            g.dequant_matmul(g.input("x", [rows, 512]), w, scheme=scheme),
            g.dequant_gather(w, g.input("i", [3], "i32"), scheme=scheme),
        )

    assert sorted(labels(backend, build)) == ["dequant_gather", f"gemv({rows}x512)"]
    made = compiled(backend, build).set_param("w", packed)
    x, ids = draw(9, rows, 512), np.array([18, 0, 7], np.int32)
    got = made.run(x=x, i=ids)
    np.testing.assert_allclose(got[1], weights[ids], rtol=2**-22, atol=2**-22 * weights.max())
    want = x.astype(np.float64) @ weights.astype(np.float64).T
    np.testing.assert_allclose(got[0], want, rtol=0, atol=2e-6 * np.abs(want).max())


@pytest.mark.parametrize(
    ("name", "k"),
    [
        *((name, 512) for name in UNPACKED),
        ("Q8_0", 256),
        ("Q8_0", 4352),
        ("Q4_0", 512),
        ("Q4_K", 768),
        ("Q5_K", 256),
        ("Q6_K", 512),
        ("MXFP4", 256),
    ],
)
def test_packed_weights_are_decoded_once_for_many_rows(
    backend: CudaBackend, name: str, k: int
) -> None:
    """x and the weight are rounded to the 11 bits of f16, by at most 2⁻¹² each, half of that in the
    mean. Rows far outside the exponents of f16 are no worse. Types without a kernel of their own
    are decoded by a launch, MXFP4 too, whose scales go beyond those of f16."""
    scheme = GGUF_SCHEMES[name]
    draws = name in UNPACKED
    packed = encode(scheme, draw(7, 38, k)).data if draws else drawn_blocks(name, 38, k, 7)

    def build(g: Graph) -> Any:
        w = g.param("w", list(packed.shape), "u8")
        return g.dequant_matmul(g.input("x", [40, k]), w, scheme=scheme)

    names = labels(backend, build)
    plain = [f"unpack({name})", "planes(1)", f"gemm(64x64x{k})"]
    assert names == (["planes(1)", f"gemm(128x64x{k})"] if name in HAVE_BYTES else plain)
    made = compiled(backend, build).set_param("w", packed)
    x = draw(9, 40, k) * np.float32(10.0) ** np.arange(-20, 20)[:, None].astype(np.float32)
    want = x.astype(np.float64) @ decode(scheme, packed).astype(np.float64).T
    rows = np.sqrt((want**2).mean(1, keepdims=True))
    off = (made.run(x=x)[0] - want) / rows
    assert np.sqrt((off**2).mean(1)).max() < 2**-11


@pytest.mark.parametrize("name", PACKED)
def test_rows_of_parts_stand_for_the_same_numbers(name: str) -> None:
    scheme, packed = GGUF_SCHEMES[name], drawn_blocks(name, 5, 768, 3)
    rows, weights = row_planes.split_blocks(name, packed), decode(scheme, packed)
    # the two multiply the scales of k-quants in another order
    got = row_planes.decoded(name, rows, 768)
    np.testing.assert_allclose(got, weights, rtol=0, atol=1e-6 * np.abs(weights).max())
    x, ids = draw(4, 2, 768), np.array([[4, 0, 2]], np.int32)
    product = lookup("packed_planes_matmul")(scheme=scheme).reference(x, rows)
    want = x @ weights.T
    np.testing.assert_allclose(product, want, rtol=0, atol=3e-6 * np.abs(want).max())
    found = lookup("packed_planes_gather")(scheme=scheme, k=768).reference(rows, ids)
    np.testing.assert_allclose(found, got[ids], rtol=0)


def test_parts_of_a_row_are_aligned() -> None:
    for name in row_planes.PARTS:
        places, size = row_planes.offsets(name, 768)
        assert all(at % 16 == 0 for at in (*places.values(), size)), name
        assert not row_planes.suits(name, 144)


@pytest.mark.parametrize(
    ("name", "k"), [("Q8_0", 288), ("Q4_0", 96), ("MXFP4", 2880), ("Q5_1", 160), ("NVFP4", 320)]
)
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_rows_of_blocks_of_32(backend: CudaBackend, name: str, k: int, rows: int) -> None:
    """Rows need be no multiples of 256. Many rows round x and weights to f16."""
    scheme = GGUF_SCHEMES[name]
    packed = encode(scheme, draw(1, 38, k)).data
    weights = decode(scheme, packed)

    def build(g: Graph) -> Any:
        w = g.param("w", list(packed.shape), "u8")
        return (
            g.dequant_matmul(g.input("x", [rows, k]), w, scheme=scheme),
            g.dequant_gather(w, g.input("i", [3], "i32"), scheme=scheme),
        )

    made = compiled(backend, build).set_param("w", packed)
    x, ids = draw(9, rows, k), np.array([37, 0, 7], np.int32)
    got = made.run(x=x, i=ids)
    np.testing.assert_allclose(got[1], weights[ids], rtol=2**-22, atol=2**-22 * weights.max())
    want = x.astype(np.float64) @ weights.astype(np.float64).T
    most = 2**-11 if rows > 16 else 2**-19
    assert np.linalg.norm(got[0] - want) < most * np.linalg.norm(want)
    assert not any("dequant(" in x.label for x in made.executable.program.launches)


# -- attention, the KV cache and sampling --------------------------------------------------------


def attend(rows: Any, keys: Any, dim: int, kv: str, **options: Any) -> Any:
    def build(g: Graph) -> Any:
        q = g.input("q", [1, rows, 4, dim])
        k, v = (g.input(n, [1, keys, 2, dim], kv) for n in "kv")
        sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": dim}
        return g.attention(q, k, v, **sizes, mask_kind="causal", **options)

    return build


def expected(q: Any, k: Any, v: Any, group: int = 2) -> Any:
    """Causal attention in f64, head by head."""
    rows, keys, dim = q.shape[1], k.shape[1], q.shape[3]
    hidden = np.arange(keys) > np.arange(keys - rows, keys)[:, None]
    made = np.zeros(q.shape)
    for h in range(q.shape[2]):
        scores = q[0, :, h].astype(np.float64) @ k[0, :, h // group].astype(np.float64).T / dim**0.5
        weights = np.exp(np.where(hidden, -np.inf, scores))
        values = v[0, :, h // group].astype(np.float64)
        made[0, :, h] = weights @ values / weights.sum(1, keepdims=True)
    return made


@pytest.mark.parametrize(("rows", "keys", "dim"), [(1, 300, 96), (70, 150, 32), (5, 130, 48)])
@pytest.mark.parametrize("kv", ["f16", "bf16"])
@pytest.mark.parametrize("groups", [1, 2])
def test_attention_of_other_sizes(
    backend: CudaBackend, rows: int, keys: int, dim: int, kv: str, groups: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Two groups of warps share the keys where there are few blocks."""
    monkeypatch.setattr(lower_attention, "_BLOCKS", 256 if groups == 2 else 0)
    made = compiled(backend, attend(rows, keys, dim, kv))
    element = np.float16 if kv == "f16" else ml_dtypes.bfloat16
    q, k, v = draw(1, 1, rows, 4, dim), draw(2, 1, keys, 2, dim), draw(3, 1, keys, 2, dim)
    k, v = k.astype(element), v.astype(element)
    # two halves of bf16 hold 16 bits of a query and of a weight, those of f16 22
    off = 3e-5 if kv == "bf16" and rows > 1 else 3e-6
    np.testing.assert_allclose(made.run(q=q, k=k, v=v)[0], expected(q, k, v), rtol=0, atol=off)


def attend_halves(rows: int, keys: int, heads: int, kv: int, dim: int, **options: Any) -> Any:
    """Queries in 16 bits: keys as [1, keys, kv, dim] or, with `bhsd`, [1, kv, keys, dim]."""
    bhsd = options.get("kv_layout") == "bhsd"

    def build(g: Graph) -> Any:
        dims = [1, kv, keys, dim] if bhsd else [1, keys, kv, dim]
        q, k, v = (
            g.input(n, d, "bf16")
            for n, d in (("q", [1, rows, heads, dim]), ("k", dims), ("v", dims))
        )
        sizes = {"num_heads": heads, "num_kv_heads": kv, "head_dim": dim}
        more = [g.input("sinks", [heads])] if options.get("has_sinks") else []
        return g.attention(q, k, v, *more, **sizes, **options)

    return build


@pytest.mark.slow
@pytest.mark.parametrize("tile", [(64,), (128,), (64, True)])
@pytest.mark.parametrize(
    "options",
    [
        {"mask_kind": "causal"},
        {"mask_kind": "none", "kv_layout": "bhsd"},
        {"mask_kind": rlx.MaskKind.SLIDING_WINDOW(70), "has_sinks": True},
        {"mask_kind": "causal", "softcap": 3.0, "kv_layout": "bhsd"},
    ],
    ids=["causal", "all", "window", "softcap"],
)
def test_attention_by_groups_of_warps(
    backend: CudaBackend, tile: tuple[Any, ...], options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Three tiles of keys, some of which are masked, some not there. bf16 rounds weights and
    results by 2⁻⁹ each at most: together by less than √2 of that."""
    rows, keys, dim = 150, 333, tile[0]
    monkeypatch.setattr(
        lower_attention, "_group_kernel", lambda form, *_: GroupAttention(form, *tile)
    )
    build = attend_halves(rows, keys, 4, 2, dim, **options)
    [name] = labels(backend, build)
    assert name == GroupAttention(name, *tile).label  # type: ignore[arg-type]
    names = {"q": (rows, 4), "k": (keys, 2), "v": (keys, 2)}
    given = {n: draw(i, 1, *d, dim).astype(bf16.numpy) for i, (n, d) in enumerate(names.items())}
    if options.get("kv_layout") == "bhsd":
        given = {n: a if n == "q" else a.transpose(0, 2, 1, 3).copy() for n, a in given.items()}
    if options.get("has_sinks"):
        given["sinks"] = draw(5, 4)
    want = lookup("attention")(num_heads=4, num_kv_heads=2, head_dim=dim, **options).reference(
        *(a.astype(np.float64) for a in given.values())
    )
    got = compiled(backend, build).run(given)[0].astype(np.float64)
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 2**-8.5
    np.testing.assert_allclose(got, want, rtol=0, atol=2**-7 * np.abs(want).max())


def test_long_keys_are_divided_and_combined_by_the_last_block(backend: CudaBackend) -> None:
    build = attend(1, "n", 16, "f16")
    made = compiled(backend, build, binding={"n": rlx.UpTo(400)})
    q = draw(1, 1, 1, 4, 16)
    for n in (1, 3, 400, 77):
        k, v = (draw(s, 1, n, 2, 16).astype(np.float16) for s in (n, n + 1))
        np.testing.assert_allclose(made.run(q=q, k=k, v=v)[0], expected(q, k, v), rtol=0, atol=3e-6)
    [launch] = Program(made.template.plan({}), "sm_90a", backend.gpu.multiprocessors).launches
    assert isinstance(launch.kernel, DecodeAttention)
    assert launch.kernel.splits == 400 // 64


def cached(g: Graph) -> Any:
    """Rotated keys and plain values, cast and appended, as models do it."""
    joined, v = g.input("x", [1, 1, 64]), g.input("y", [1, 1, 32])
    q, k = (g.narrow(joined, axis=2, start=32 * i, length=32) for i in range(2))
    cos, sin = g.param("cos", [16, 8]), g.param("sin", [16, 8])
    q, k = (g.rope(t, cos, sin, head_dim=16, offset="past") for t in (q, k))
    states = []
    for name, t in (("k", k), ("v", v)):
        rows = g.transpose(g.reshape(g.cast(t, "f16"), [1, 1, 2, 16]), (0, 2, 1, 3))
        state = g.state(name, [1, 2, 16, 16], "f16")
        states.append(g.state_update(state, rows, axis=2, start="past"))
    return q, *(g.sum(g.cast(s, "f32"), axis=2) for s in states)


def test_keys_and_values_are_appended_in_one_launch(backend: CudaBackend) -> None:
    options = {"binding": {"past": rlx.UpTo(15)}}
    names = labels(backend, cached, **options)
    assert names == ["rope", *["region(cast)", "region(sum)"] * 2]
    made = compiled(backend, cached, **options)
    oracle = CompiledGraph(
        make_template(graph_of(cached), CompileOptions(**options), rlx.Device("reference").backend)
    )
    for graph in (made, oracle):
        graph.set_params({"cos": np.cos(draw(1, 16, 8)), "sin": np.sin(draw(1, 16, 8))})
    for past in range(3):
        given = {"x": draw(past, 1, 1, 64), "y": draw(past + 9, 1, 1, 32)}
        got, want = (f.run(given, sizes={"past": past}) for f in (made, oracle))
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-6)  # f16 rounds to 2⁻¹¹


# -- code ----------------------------------------------------------------------------------------

SPLIT = [name for name in (*OWN, *UNPACKED) if PackedRows(name).record]
HOT: list[GpuKernel] = [
    gemv_for(FloatRows(bf16), f32, 1, 1024, 4096, Epilogue(f32)),
    gemv_for(FloatRows(bf16), f32, 1, 1024, 3072, Epilogue(f32, "silu", pair=True)),
    gemv_for(FloatRows(bf16), f32, 1, 1024, 4096, Epilogue(f32), norm=Norm(1e-6, True)),
    gemv_for(FloatRows(bf16), f32, 8, 4096, 4096, Epilogue(f32)),
    few_rows_for(8, 1024, 4096, Epilogue(f32)),
    few_rows_for(8, 1024, 151936, Epilogue(f32)),
    few_rows_for(4, 3072, 1024, Epilogue(f32, residual=f32)),
    few_rows_for(8, 1024, 3072, Epilogue(f32, "silu", pair=True)),
    *(
        gemv_for(weight, f32, 1, k, n, Epilogue(f32))
        for weight in (FloatRows(bf16), *map(PackedRows, SPLIT))
        for n, k in ((4096, 4096), (151936, 1024), (28672, 4096), (4096, 14336))
    ),
    Gemm(LARGE, bf16, 2, 1024, 4096, False, False, 1, Epilogue(f32)),
    *(
        GroupGemm(GroupTile(m, n), bf16, planes, 1024, 4096, False, False, splits, epilogue, True)
        for m, n, planes, splits, epilogue in (
            (128, 256, 1, 1, Epilogue(bf16)),
            (128, 256, 2, 1, Epilogue(f32)),
            (128, 256, 2, 1, Epilogue(f32, "silu", pair=True)),
            (128, 192, 2, 2, Epilogue(f32, residual=f32)),
            (128, 64, 1, 4, Epilogue(bf16, "gelu", bias=f32)),
            (64, 256, 3, 1, Epilogue(f32)),
            (64, 128, 3, 2, Epilogue(bf16, "silu", pair=True)),
        )
    ),
    GroupGemm(
        GroupTile(128, 128), f16, 1, 3 * 384, 1536, True, True, 1, Epilogue(f32, "gelu", bias=f32)
    ),
    GroupGemm(GroupTile(128, 256), f16, 1, 192, 128, True, True, 1, Epilogue(f32), batched=True),
    *(SplitRows(384, True, by_columns, True) for by_columns in (False, True)),
    *(UnpackWeight(PackedRows(name), k) for name in (*OWN, *UNPACKED) for k in (1024, 14336)),
    FlashAttention(AttentionForm(f32, bf16, f32, 16, 8, 128, 0, None, 0.088, 0.0, "", None), 2),
    *(
        GroupAttention(
            AttentionForm(q, kv, out, 16, 8, 128, 0, behind, 0.088, 0.0, "", None), keys, shares
        )
        for q, kv, out, behind, keys, shares in (
            (bf16, bf16, bf16, None, 128, False),
            (f32, f16, bf16, None, 64, True),
            (f32, f16, f32, 1024, 128, False),
        )
    ),
    DecodeAttention(AttentionForm(f32, f16, f32, 16, 8, 128, 0, None, 0.088, 0.0, "", None), 16),
    DrawToken(151936, None),
    *(DeltaNet(*[f32] * 8, n, one, True) for n in (64, 128) for one in (True, False)),
    *(SelectiveScan(*[f32] * 8, n, one) for n in (16, 128) for one in (True, False)),
    *(CellSteps(c, hidden, c == "gru", False) for c in ("lstm", "gru") for hidden in (128, 1024)),
    SortRows(i32, 128, 64),
    *(
        gemv_for(weight, f32, 1, k, 8 * n, Epilogue(f32), many=True, experts=i32)
        for weight in (FloatRows(bf16), *map(PackedRows, (*OWN, *UNPACKED)))
        for n, k in ((768, 2048), (2048, 768), (14336, 4096))
    ),
    *(
        ExpertGroupGemm(
            GroupTile(m, n),
            element,
            planes,
            2048,
            768,
            element is f16,
            element is f16,
            1,
            Epilogue(f32),
        )
        for m in (64, 128)
        for n in (64, 192, 256)
        for element, planes in ((bf16, 1), (bf16, 2), (f16, 2))
    ),
    *(
        GroupedGemm(
            tile,
            element,
            planes,
            2048,
            768,
            False,
            element is f16,
            1,
            Epilogue(f32),
            column_scaled=element is f16,
        )
        for tile in (LARGE, SMALL)
        for element, planes in ((bf16, 1), (bf16, 2), (bf16, 3), (f16, 2))
    ),
]


@needs_ptxas
@pytest.mark.parametrize("kernel", HOT, ids=lambda k: k.label)
def test_hot_kernels_do_not_spill(kernel: GpuKernel) -> None:
    said = assemble(ptx_of(kernel), "sm_90a")
    numbers = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores", said)
    assert numbers is not None
    assert set(numbers.groups()) == {"0"}
    assert "serializ" not in said  # wgmma runs beside the code


def test_weights_are_loaded_before_the_kernel_in_front_has_ended() -> None:
    ptx = ptx_of(HOT[0])
    wait = ptx.index("griddepcontrol.wait")
    assert ptx[:wait].count("ld.global.v4") == 16  # 16 rows of a warp
    assert "griddepcontrol" not in ptx_of(HOT[0], (8, 0))
