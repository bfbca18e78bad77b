"""Attention of f32 by tensor cores on the stand-in: masks, sizes, numbers of any size."""

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
from test_ptx import assemble, needs_ptxas, ptx_of

import rlx
from rlx.backends.cuda.backend import CudaBackend
from rlx.backends.cuda.kernels.attention.attention_problem import AttentionForm
from rlx.backends.cuda.kernels.attention.f32_attention import F32Attention
from rlx.ir.dtype import f32 as F32
from rlx.ir.graph import Graph
from rlx.ir.interp import evaluate
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.template import make_template
from rlx.specialize.options import CompileOptions


@pytest.fixture(scope="module")
def backend() -> Iterator[CudaBackend]:
    with installed(FakeDriver()):
        yield make_stand_in()


def graph_of(
    rows: Any, keys: Any, heads: int, kv_heads: int, dim: int, extra: str = "", **how: Any
) -> Graph:
    g = Graph("attention")
    q = g.input("q", [2, rows, heads * dim])
    k, v = (g.input(n, [2, keys, kv_heads * dim]) for n in "kv")
    more = []
    if extra == "mask":
        more, how = [g.input("mask", [2, 1, rows, keys])], {**how, "mask_kind": "bias"}
    if extra == "bool":
        more, how = [g.input("mask", [2, 1, 1, keys], "bool")], {**how, "mask_kind": "custom"}
    g.set_outputs(g.attention(q, k, v, *more, num_heads=heads, num_kv_heads=kv_heads,
                              head_dim=dim, **how))  # fmt: skip
    return g


def compiled(backend: CudaBackend, graph: Graph, **options: Any) -> CompiledGraph:
    return CompiledGraph(make_template(graph, CompileOptions(**options), backend))


def labels(made: CompiledGraph) -> list[str]:
    program: Any = made.executable.program  # type: ignore[attr-defined]
    return [x.label for x in program.launches]


def data_of(graph: Graph, sizes: dict[str, int]) -> dict[str, Any]:
    rng, found = np.random.default_rng(4), dict[str, Any]()
    for node in graph.sources("input"):
        dims = [d if isinstance(d, int) else sizes[str(d)] for d in node.output.shape.dims]
        drawn = rng.standard_normal(dims).astype(np.float32)
        found[node.name] = drawn > -0.5 if node.output.dtype.name == "bool" else drawn
    return found


@pytest.mark.parametrize(
    ("rows", "keys", "heads", "kv_heads", "dim", "extra", "how"),
    [
        (128, 128, 3, 3, 32, "", {}),
        (70, 70, 4, 2, 64, "", {"mask_kind": "causal"}),
        (33, 150, 2, 1, 32, "", {"mask_kind": "causal", "softcap": 3.0}),
        (40, 90, 2, 2, 32, "mask", {}),
        (65, 65, 2, 2, 32, "bool", {}),
        (100, 100, 2, 2, 64, "", {"mask_kind": rlx.MaskKind.SLIDING_WINDOW(20)}),
    ],
)
def test_forms(
    backend: CudaBackend, rows: int, keys: int, heads: int, kv_heads: int, dim: int, extra: str,
    how: Any,
) -> None:  # fmt: skip
    """22 bits of each number of q, k, v and of the weights."""
    graph = graph_of(rows, keys, heads, kv_heads, dim, extra, **how)
    made = compiled(backend, graph)
    assert labels(made) == ["attention(f32)"]
    given = data_of(graph, {})
    [want] = evaluate(graph, given)
    [got] = made.run(given)
    np.testing.assert_allclose(got, want, rtol=0, atol=2**-18)


def test_numbers_of_any_size_keep_their_bits(backend: CudaBackend) -> None:
    """Values of 1e9 in some keys, 1e-9 in others; queries and keys whose products are of size 1,
    though half of them are beyond what 16 bits reach."""
    graph = graph_of(40, 130, 2, 2, 32)
    given = data_of(graph, {})
    given["q"] *= 1e7
    given["k"] *= 1e-7
    given["k"][:, ::3] *= 1e-4
    for scale, part in ((1e9, slice(0, 1)), (1e-12, slice(1, 2))):
        given["v"][part] *= scale
    given["v"][1, 64:] *= 1e-3
    [want] = evaluate(graph, given)
    [got] = compiled(backend, graph).run(given)
    for ours, theirs in zip(got, want, strict=True):
        assert np.abs(ours - theirs).max() <= 2**-18 * np.abs(theirs).max()


def test_any_number_of_queries_and_keys(backend: CudaBackend) -> None:
    graph = graph_of("n", "n", 2, 2, 32, mask_kind="causal")
    made = compiled(backend, graph, binding={"n": rlx.UpTo(140)})
    assert labels(made) == ["attention(f32)"]
    for n in (140, 64, 1):
        given = data_of(graph, {"n": n})
        [want] = evaluate(graph, given, {"n": n})
        [got] = made.run(given)
        np.testing.assert_allclose(got, want, rtol=0, atol=2**-18)


_FORM = AttentionForm(F32, F32, F32, 12, 12, 32, None, None, 0.17, 0.0, "", None)


@needs_ptxas
@pytest.mark.parametrize(
    "form",
    [_FORM, replace(_FORM, dim=64), replace(_FORM, dim=64, ahead=0, mask="f32", softcap=2.0)],
    ids=["32", "64", "64 mask"],
)
def test_kernels_are_assembled_without_spills(form: AttentionForm) -> None:
    said = assemble(ptx_of(F32Attention(form)), "sm_90a")
    found = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores", said)
    assert found is not None
    assert found.groups() == ("0", "0"), said
