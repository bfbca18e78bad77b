"""Attention over a paged KV cache on the stand-in: runs, single tokens, Q8_0, bad indices."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from fake_driver import FakeDriver, installed, make_stand_in

import rlx
from rlx.backends.cuda.backend import CudaBackend
from rlx.backends.cuda.lower_program import LoweredProgram as Program
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph
from rlx.ir.interp import evaluate
from rlx.ir.quant.scheme import GGUF_SCHEMES, encode
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.template import make_template
from rlx.specialize.options import CompileOptions

BF16 = DType.of("bf16").numpy
PAGE, PAGES, CACHE = 16, 8, 40  # tokens of a page, pages of a sequence, of the cache


@pytest.fixture(scope="module")
def backend() -> Iterator[CudaBackend]:
    with installed(FakeDriver()):
        yield make_stand_in()


def graph_of(kv: str, heads: int, kv_heads: int, dim: int, tokens: Any = "n", **more: Any) -> Graph:
    g = Graph("paged")
    q8 = kv == "q8_0"
    width = dim // 32 * 34 if q8 else dim
    cache = [g.input(n, [1, kv_heads, CACHE * PAGE, width], "u8" if q8 else kv) for n in "kv"]
    table = g.input("table", [4, PAGES], "i32")
    rows, positions = (g.input(n, [tokens], "i32") for n in ("rows", "positions"))
    out = g.paged_attention(
        g.input("q", [1, tokens, heads * dim]), *cache, table, rows, positions, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=dim, page=PAGE, kv_scheme="Q8_0" if q8 else None, **more,
    )  # fmt: skip
    g.set_outputs(out)
    return g


def data_of(g: Graph, count: int, parts: list[tuple[int, int, int]]) -> dict[str, Any]:
    """`parts` are (sequence, first position, tokens)."""
    rng = np.random.default_rng(count)
    found: dict[str, Any] = {}
    for node in g.nodes:
        if node.op.name == "input" and node.name in "qkv":
            dims = [count if not isinstance(d, int) else d for d in node.output.shape.dims]
            if node.output.dtype.name == "u8":
                numbers = rng.standard_normal((*dims[:-1], dims[-1] // 34 * 32)).astype("f")
                found[node.name] = encode(GGUF_SCHEMES["Q8_0"], numbers).data
            else:
                found[node.name] = rng.standard_normal(dims).astype(node.output.dtype.numpy)
    places = [(row, first + i) for row, first, tokens in parts for i in range(tokens)]
    assert len(places) == count
    found["table"] = rng.permutation(CACHE)[: 4 * PAGES].reshape(4, PAGES).astype(np.int32)
    found["rows"], found["positions"] = np.array(places, np.int32).T.copy()
    return found


def compiled(backend: CudaBackend, graph: Graph, **options: Any) -> CompiledGraph:
    return CompiledGraph(make_template(graph, CompileOptions(**options), backend))


MIXED = [(2, 5, 1), (0, 127, 1), (1, 3, 70), (3, 0, 1), (0, 60, 7)]


@pytest.mark.parametrize(
    ("kv", "heads", "kv_heads", "dim", "more"),
    [
        ("f16", 2, 1, 64, {}),
        ("bf16", 8, 2, 32, {"window": 50}),
        ("f16", 6, 2, 48, {"softcap": 4.0, "window": 9}),  # three heads of a key head: 21 tokens
        ("q8_0", 4, 2, 64, {}),
    ],
)
def test_runs_and_single_tokens(
    backend: CudaBackend, kv: str, heads: int, kv_heads: int, dim: int, more: Any
) -> None:
    """Weights are two 16-bit numbers each (22 bits with f16, 16 with bf16). Keys of Q8_0 in runs
    are rounded to f16, 2⁻¹² of each number and of its product."""
    graph = graph_of(kv, heads, kv_heads, dim, **more)
    made = compiled(backend, graph, binding={"n": rlx.UpTo(100)})
    labels = [
        x.label
        for x in Program(made.template.plan({}), "sm_90a", backend.gpu.multiprocessors).launches
    ]
    assert labels == ["paged(flash)", "paged(decode)"]
    allowed = {"f16": 2**-19, "bf16": 2**-15, "q8_0": 2**-10}[kv]
    for parts in (MIXED, [(1, 2, 1)], [(3, 10, 100)], [(0, 0, 2), (1, 7, 3)]):
        data = data_of(graph, sum(n for _, _, n in parts), parts)
        [want] = evaluate(graph, data)
        for _ in range(2):  # counters are 0 again after a run
            [got] = made.run(data)
            assert np.abs(got - want).max() <= allowed * np.abs(want).max()


def test_few_tokens_divide_their_keys_among_all_blocks(backend: CudaBackend) -> None:
    graph = graph_of("f16", 4, 2, 32, tokens=3)
    made = compiled(backend, graph)
    [launch] = Program(made.template.plan({}), "sm_90a", backend.gpu.multiprocessors).launches
    kernel: Any = launch.kernel
    assert (launch.label, kernel.most) == ("paged(decode)", 2)  # 128 keys are two parts
    data = data_of(graph, 3, [(0, 127, 1), (1, 0, 1), (2, 64, 1)])
    np.testing.assert_allclose(made.run(data)[0], evaluate(graph, data)[0], rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("name", "index", "value"),
    [("rows", 0, 4), ("rows", 1, -1), ("positions", 2, PAGE * PAGES), ("table", (1, 0), CACHE)],
)
def test_a_bad_index_is_an_error(backend: CudaBackend, name: str, index: Any, value: int) -> None:
    graph = graph_of("f16", 2, 1, 32)
    made = compiled(backend, graph, binding={"n": rlx.UpTo(40)})
    for parts in ([(0, 3, 1), (1, 4, 1), (0, 8, 1)], [(1, 4, 40)]):
        data = data_of(graph, sum(n for _, _, n in parts), parts)
        made.run(data)
        data[name][index] = value
        with pytest.raises(rlx.InputError, match="out of range"):
            made.run(data)


def test_between_products_of_bf16_the_result_is_rounded(backend: CudaBackend) -> None:
    """More than 128 rows that one product reads: queries, weights and results have 8 to 11 bits."""
    graph = graph_of("f16", 4, 2, 32)
    out = graph.outputs[0]
    w = graph.transpose(graph.param("w", [16, 128], "bf16"), (1, 0))
    graph.set_outputs(graph.matmul(out, w))
    made = compiled(backend, graph, binding={"n": rlx.UpTo(150)})
    launches = Program(made.template.plan({}), "sm_90a", backend.gpu.multiprocessors).launches
    assert [x.label for x in launches][:2] == ["paged(flash)", "paged(decode)"]
    assert len(launches) == 3  # no planes of x
    weight = np.random.default_rng(0).standard_normal((16, 128)).astype(BF16)
    made.set_param("w", weight)
    data = data_of(graph, 130, [(2, 5, 60), (0, 7, 1), (1, 3, 69)])
    [want] = evaluate(graph, {**data, "w": weight})
    [got] = made.run(data)
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 2**-8
