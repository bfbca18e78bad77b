"""Batch invariance on the stand-in: rows have the same bits alone, beside others, and in chunks.

What the simulator cannot show, the order in which an instruction of a tensor core adds, is the same
instruction in all cases; `checks_on_gpu.py` compares a model's tokens and logits on a GPU.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from fake_driver import FakeDriver, installed, make_stand_in
from test_paged import data_of, graph_of
from test_ptx import assemble, needs_ptxas, ptx_of

import rlx
from rlx.backends.cuda.backend import CudaBackend
from rlx.backends.cuda.kernels.attention.attention_problem import AttentionForm
from rlx.backends.cuda.kernels.attention.fixed_attention import fixed_flash
from rlx.backends.cuda.kernels.gemm import plan
from rlx.backends.cuda.kernels.gemm.epilogue import Epilogue
from rlx.backends.cuda.kernels.gemm.group_gemm import GroupGemm, GroupTile
from rlx.backends.cuda.kernels.gemm.plan import fixed_parts
from rlx.ir.dtype import DType
from rlx.ir.dtype import bf16 as BF16
from rlx.ir.dtype import f16 as F16
from rlx.ir.dtype import f32 as F32
from rlx.ir.graph import Graph
from rlx.ir.interp import evaluate
from rlx.ir.quant.scheme import GGUF_SCHEMES, encode
from rlx.models.model_runner import compile_options
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.template import make_template
from rlx.specialize.compile_profile import CompileProfile
from rlx.specialize.options import CompileOptions

INVARIANT = CompileProfile(batch_invariant=True)


@pytest.fixture(scope="module")
def backend() -> Iterator[CudaBackend]:
    with installed(FakeDriver()):
        yield make_stand_in()


def compiled(backend: CudaBackend, graph: Graph, **options: Any) -> CompiledGraph:
    options = {"profile": INVARIANT, **options}
    return CompiledGraph(make_template(graph, CompileOptions(**options), backend))


def labels(made: CompiledGraph) -> list[str]:
    program: Any = made.executable.program  # type: ignore[attr-defined]
    return [launch.label for launch in program.launches]


# -- products --------------------------------------------------------------------------------------


def row_bytes(weight: str, k: int) -> int:
    return GGUF_SCHEMES[weight].row_bytes(k)


def product(rows: Any, n: int, k: int, weight: str, more: str) -> Graph:
    g = Graph("product")
    x = g.input("x", [rows, k])
    if weight in GGUF_SCHEMES:
        made = g.dequant_matmul(x, g.param("w", [n, row_bytes(weight, k)], "u8"), scheme=weight)
    else:
        w = g.transpose(g.param("w", [n, k], weight), (1, 0))
        if more == "pair":
            up = g.transpose(g.param("up", [n, k], weight), (1, 0))
            made = g.mul(g.silu(g.matmul(x, w)), g.matmul(x, up))
        else:
            made = g.matmul(x, w)
    if more == "residual":
        made = g.add(made, g.input("r", [rows, n]))
    if more == "norm":
        made = g.rms_norm(made, g.param("gamma", [n]), eps=1e-5)
    g.set_outputs(made)
    return g


def weights(graph: Graph) -> dict[str, Any]:
    rng, found = np.random.default_rng(7), dict[str, Any]()
    for node in graph.sources("param"):
        dims = [int(d) for d in node.output.shape.dims]  # type: ignore[arg-type]
        if node.output.dtype.name == "u8":
            scheme: Any = next(n for n in graph.nodes if n.op.name == "dequant_matmul").op
            numbers = rng.standard_normal((dims[0], 512)).astype("f")
            found[node.name] = encode(scheme.scheme, numbers).data
        else:
            found[node.name] = rng.standard_normal(dims).astype(node.output.dtype.numpy)
    return found


CASES = [
    ("bf16", 96, 1024, ""),
    ("bf16", 96, 1024, "residual"),
    ("bf16", 64, 512, "pair"),
    ("f16", 96, 1024, ""),
    ("f16", 40, 520, "norm"),
    ("f32", 24, 640, "residual"),
    ("f32", 24, 634, ""),  # rows of 2,536 bytes: a loop nest
    ("Q8_0", 24, 512, "residual"),
    ("Q4_K", 24, 512, ""),
]


@pytest.mark.parametrize(("weight", "n", "k", "more"), CASES)
def test_rows_of_a_product(backend: CudaBackend, weight: str, n: int, k: int, more: str) -> None:
    """Exactly 1, 3 and 8 rows, and any number up to 150, of which the last tile is not full."""
    rng, wanted = np.random.default_rng(1), None
    data = {"x": rng.standard_normal((150, k)).astype("f")}
    data["r"] = rng.standard_normal((150, n)).astype("f")
    for rows, counts in (("n", (150, 70, 9, 1)), (1, (1,)), (3, (3,)), (8, (8,))):
        graph = product(rows, n, k, weight, more)
        binding = {"n": rlx.UpTo(150)} if rows == "n" else {}
        made = compiled(backend, graph, binding=binding).set_params(weights(graph))
        for count in counts:
            for first in (0, 150 - count):
                names = [v.name for v in graph.sources("input")]
                part = {name: data[name][first : first + count] for name in names}
                [got] = made.run(part)
                if wanted is None:
                    wanted = got
                    [oracle] = evaluate(graph, {**part, **weights(graph)}, {"n": count})
                    error = np.linalg.norm(got - oracle) / np.linalg.norm(oracle)
                    assert error < 2**-8, error  # bf16 where only a product reads it
                np.testing.assert_array_equal(got, wanted[first : first + count])


def test_by_default_kernels_depend_on_the_rows(backend: CudaBackend) -> None:
    """So the option is one: a row alone is multiplied by another kernel."""
    found = [
        labels(compiled(backend, product(rows, 96, 1024, "bf16", ""), profile=profile))
        for profile in (CompileProfile(), INVARIANT)
        for rows in (1, 64)
    ]
    assert found[0] == ["gemv(1x1024)"]
    assert found[0] != found[1]
    assert [x.split("(")[0] for x in found[2]] == [x.split("(")[0] for x in found[3]]


def test_parts_are_summed_up_by_one_block_or_by_several(
    backend: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = product("n", 96, 1024, "bf16", "residual")
    x = np.random.default_rng(2).standard_normal((2, 140, 1024)).astype("f")
    data, found, kernels = {"x": x[0], "r": x[1, :, :96]}, [], []
    for cost in (-(10**9), 10**9):  # of another part in the same block
        monkeypatch.setattr(plan, "_NEXT_PART", cost)
        made = compiled(backend, graph, binding={"n": rlx.UpTo(140)}).set_params(weights(graph))
        found.append(made.run(data)[0])
        program: Any = made.executable.program  # type: ignore[attr-defined]
        kernels.append(next(x.kernel for x in program.launches if "gemm" in x.label))
    assert [(k.parts, k.splits) for k in kernels] == [(4, 1), (1, 4)]
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(("columns", "k"), [(1024, 3072), (4096, 1024), (64, 64), (151936, 1024)])
def test_parts_of_a_sum_are_not_empty(columns: int, k: int) -> None:
    parts, steps = fixed_parts(columns, k), k // 64
    each = -(-steps // parts)
    assert 1 <= parts <= 8
    assert (parts - 1) * each < steps <= parts * each
    # a tile of 64 columns is the least that a block has: few rows fill a GPU if k is long
    assert parts * -(-columns // 64) >= 128 or each <= 8 or parts == 8


# -- attention -------------------------------------------------------------------------------------

PARTS = [(2, 5, 1), (0, 127, 1), (1, 3, 70), (3, 0, 1), (0, 60, 7)]


@pytest.mark.parametrize(
    ("kv", "heads", "kv_heads", "dim", "more"),
    [
        ("f16", 2, 1, 64, {}),
        ("bf16", 8, 2, 32, {"window": 50}),
        ("f16", 6, 2, 48, {"softcap": 4.0, "window": 9}),
        ("q8_0", 4, 2, 64, {}),
        ("f32", 4, 2, 32, {"window": 70}),
    ],
)
def test_tokens_of_pages(
    backend: CudaBackend, monkeypatch: pytest.MonkeyPatch, kv: str, heads: int, kv_heads: int,
    dim: int, more: Any,
) -> None:  # fmt: skip
    """Single tokens, runs, chunks of a run; by executables for exactly one and for many. Pieces of
    64 keys, so that there are two."""
    from rlx.backends.cuda.kernels.attention import fixed_attention

    monkeypatch.setattr(fixed_attention, "_PIECE", 64)
    monkeypatch.setattr(fixed_attention, "_ALONE", 8)
    graph = graph_of(kv, heads, kv_heads, dim, **more)
    many = compiled(backend, graph, binding={"n": rlx.UpTo(100)})
    alone = compiled(backend, graph_of(kv, heads, kv_heads, dim, tokens=1, **more))
    assert labels(many) == labels(alone) == ["paged(decode)" if kv == "f32" else "paged(fixed)"]
    data = data_of(graph, 80, PARTS)
    for _ in range(2):  # counters are 0 again after a run
        [whole] = many.run(data)
    [want] = evaluate(graph, data)
    # queries and weights in 16 bits twice: 22 bits, or 16 of bf16; Q8_0 is rounded to f16
    allowed = {"f16": 2**-19, "bf16": 2**-15, "q8_0": 2**-10, "f32": 2**-19}[kv]
    assert np.abs(whole - want).max() <= allowed * np.abs(want).max()

    def part(places: Any) -> dict[str, Any]:
        own = {name: data[name][places] for name in ("rows", "positions")}
        return {**data, **own, "q": data["q"][:, places]}

    run = range(2, 72)
    for places in (run, range(2, 30), range(30, 72), range(31, 60), range(2), range(70, 80), [79]):
        [got] = many.run(part(list(places)))
        np.testing.assert_array_equal(got[0], whole[0, list(places)])
    for place in (0, 1, 2, 33, 71, 72, 79):
        [got] = alone.run(part([place]))
        np.testing.assert_array_equal(got[0, 0], whole[0, place])


@pytest.mark.parametrize(("kv", "rows"), [("f16", (130, 40, 1)), ("f32", (60, 20, 1))])
def test_queries_of_one_sequence(backend: CudaBackend, kv: str, rows: tuple[int, ...]) -> None:
    """A prompt at once, its last part after the rest is in the KV cache, and the last token."""
    rng, keys = np.random.default_rng(3), rows[0]
    data = {n: rng.standard_normal((1, keys, 2, 64)) for n in "qkv"}
    wanted = None
    for count in rows:
        g = Graph("attention")
        q = g.input("q", [1, count, 2, 64])
        cache = [g.input(n, [1, keys, 2, 64], kv) for n in "kv"]
        g.set_outputs(
            g.attention(q, *cache, num_heads=2, num_kv_heads=2, head_dim=64, mask_kind="causal")
        )
        given = {n: data[n].astype(DType.of(kv).numpy) for n in "kv"}
        given["q"] = data["q"][:, keys - count :].astype("f")
        [got] = compiled(backend, g).run(given)
        if wanted is None:
            wanted = got
            [oracle] = evaluate(g, given)
            np.testing.assert_allclose(got, oracle, rtol=0, atol=4e-6)  # 22 bits, sums of 130
        np.testing.assert_array_equal(got, wanted[:, keys - count :])


# -- the option ------------------------------------------------------------------------------------


def test_programs_have_keys_of_their_own(backend: CudaBackend) -> None:
    invariant = backend.for_profile(INVARIANT)
    assert invariant is backend.for_profile(INVARIANT) is not backend
    assert backend.for_profile(CompileProfile()) is backend
    assert invariant.allocator is backend.allocator
    assert invariant.target_key != backend.target_key
    assert INVARIANT.profile_key != CompileProfile().profile_key


def test_the_option_is_checked() -> None:
    assert CompileProfile.from_toml("batch_invariant = true") == INVARIANT
    assert "batch_invariant" not in CompileProfile().key_material()  # keys are those from before
    with pytest.raises(rlx.OptionError, match="batch_invariant"):
        CompileProfile(batch_invariant=1)  # type: ignore[arg-type]
    with pytest.raises(rlx.OptionError, match="neither True nor False"):
        compile_options(None, "yes")  # type: ignore[arg-type]
    assert compile_options(2, True).profile == INVARIANT
    cpu = rlx.Device("cpu").backend
    assert cpu.for_profile(INVARIANT) is cpu


# -- code ------------------------------------------------------------------------------------------

_FORM = AttentionForm(F32, F16, F32, 16, 8, 128, 0, None, 0.1, 0.0, "", None)


@needs_ptxas
@pytest.mark.parametrize(
    "kernel",
    [
        GroupGemm(GroupTile(128, 128), BF16, 1, 3072, 1024, False, False, 1,
                  Epilogue(F32, residual=F32), True, parts=8),
        GroupGemm(GroupTile(64, 256), BF16, 1, 1024, 3072, False, False, 1,
                  Epilogue(BF16, "silu", pair=True), True, parts=2),
        GroupGemm(GroupTile(64, 64), F16, 2, 2048, 1024, True, False, 1, Epilogue(F32), parts=8),
        fixed_flash(_FORM, 64, 554, 40960, 32),
        fixed_flash(replace(_FORM, coarse=True, out=BF16), 64, 554, 2048, 32),
        fixed_flash(replace(_FORM, dim=64, softcap=5.0, behind=100, sinks=F32), 64, 8, 2048, 32),
        fixed_flash(replace(_FORM, q8=True, coarse=True), 64, 64, 2048, 32),
    ],
    ids=lambda kernel: f"{kernel.label}",
)  # fmt: skip
def test_kernels_are_assembled_without_spills(kernel: Any) -> None:
    said = assemble(ptx_of(kernel), "sm_90a")
    numbers = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores", said)
    assert numbers is not None
    most = 16 if "(fixed)" in kernel.label and not kernel.form.coarse else 0  # queries twice
    assert max(map(int, numbers.groups())) <= most, said
