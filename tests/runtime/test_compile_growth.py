"""Compile time follows what is different in a graph, and is linear in its nodes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlx import Session
from rlx.backends.cpu.barriers import Accesses, insert_barriers
from rlx.ir.graph import Graph
from rlx.llvm import jit
from rlx.passes.fusion.region import MIN_SHARED, fuse_regions
from rlx.passes.rewrite import Editor

X = np.linspace(-2, 2, 24, dtype=np.float32).reshape(2, 12)

pytestmark = pytest.mark.slow


def chain(nodes: int) -> Graph:
    """y = sin(y · c) with another c each time."""
    g = Graph("chain")
    y = g.input("x", [2, 12])
    for i in range(nodes // 2):
        y = g.sin(y * (0.9 + i / nodes))
    return g.set_outputs(y)


def chain_of(nodes: int) -> list[np.ndarray]:
    y = X
    for i in range(nodes // 2):
        y = np.sin(y * np.float32(0.9 + i / nodes))
    return [y]


def wide(nodes: int) -> Graph:
    """Σ sin(x · c), all products first: a region each."""
    g = Graph("wide")
    x = g.input("x", [2, 12])
    waves = [g.sin(x * float(i + 1)) for i in range(nodes // 3)]
    total = waves[0]
    for wave in waves[1:]:
        total = total + wave
    return g.set_outputs(total)


def wide_of(nodes: int) -> list[np.ndarray]:
    total = np.zeros_like(X)
    for i in range(nodes // 3):
        total = total + np.sin(X * np.float32(i + 1))
    return [total]


def fan(nodes: int) -> Graph:
    """sin(x · c), every one an output."""
    g = Graph("fan")
    x = g.input("x", [2, 12])
    return g.set_outputs([g.sin(x * float(i + 1)) for i in range(nodes // 2)])


def fan_of(nodes: int) -> list[np.ndarray]:
    return [np.sin(X * np.float32(i + 1)) for i in range(nodes // 2)]


SHAPES = {"chain": (chain, chain_of), "wide": (wide, wide_of), "fan": (fan, fan_of)}


def arrays(result: object) -> list[np.ndarray]:
    return list(result) if isinstance(result, (tuple, list)) else [np.asarray(result)]


@pytest.mark.parametrize("shape", SHAPES)
def test_regions_that_differ_in_constants_share_their_kernels(shape: str) -> None:
    graph, reference = SHAPES[shape]
    session = Session("cpu")
    counts = {}
    # a body has up to 64 nodes: enough of them to be shared, and twice as many
    for nodes in (64 * 2 * MIN_SHARED, 2 * 64 * 2 * MIN_SHARED):
        before = jit.counters.compilations + jit.counters.memory_hits + jit.counters.disk_hits
        f = session.compile(graph(nodes))
        after = jit.counters.compilations + jit.counters.memory_hits + jit.counters.disk_hits
        counts[nodes] = after - before
        # rounding of a sum of n terms below 1, and of sin within 2 ulp
        atol = 2e-6 + (nodes * 3e-7 if shape != "fan" else 0)
        for got, expected in zip(arrays(f.run(x=X)), reference(nodes), strict=True):
            np.testing.assert_allclose(got, expected, rtol=0, atol=atol)
    few, many = counts.values()
    assert many <= few <= 12, counts


def test_few_regions_keep_their_constants() -> None:
    """Up to MIN_SHARED − 1 different bodies nothing is gained: constants stay literals."""
    kept, shared = (fuse_regions(fan(2 * count)) for count in (MIN_SHARED - 1, MIN_SHARED))
    for graph, operands, bodies in ((kept, 1, MIN_SHARED - 1), (shared, 2, 1)):
        regions = [n for n in graph.nodes if n.op.name == "elementwise_region"]
        assert {len(n.inputs) for n in regions} == {operands}
        assert len({n.op for n in regions}) == bodies


def test_constants_that_all_regions_share_stay_literals() -> None:
    g = Graph("same")
    x = g.input("x", [2, 12])
    g.set_outputs([g.sin(x * float(i + 1) + 0.5) for i in range(MIN_SHARED)])
    regions = [n for n in fuse_regions(g).nodes if n.op.name == "elementwise_region"]
    assert {len(n.inputs) for n in regions} == {2}
    (body,) = {n.op.body for n in regions}  # type: ignore[attr-defined]
    constants = [n.op.data.array.item() for n in body.graph.nodes if n.op.name == "constant"]
    assert constants == [0.5]


def calls(work: Callable[[], object]) -> int:
    """How many Python functions `work` enters."""
    count = 0

    def note(_frame: object, event: str, _arg: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_placing_barriers_is_linear() -> None:
    """Independent launches need no barrier; each looks at those before it, but not one by one."""

    def work(count: int) -> int:
        arena: Any = SimpleNamespace(
            slot_kinds=["arena"] * count,
            offsets=[128 * i for i in range(count)],
            sizes=[64] * count,
            scratch={},
        )
        launches = [Accesses([i - 1] * (i % 2), [i], -1, False, False) for i in range(count)]
        found: list[bool] = []
        entered = calls(lambda: found.extend(insert_barriers(launches, arena)))
        # each odd launch reads what the one before it wrote
        assert found == [i % 2 == 0 and i + 1 < count for i in range(count)]
        alone = [Accesses([], [i], -1, False, False) for i in range(count)]
        entered += calls(lambda: found.extend(insert_barriers(alone, arena)))
        assert not any(found[count:])
        return entered

    few, many = work(256), work(1024)
    assert many / few < 4.4, (few, many)


def test_replacing_every_output_is_linear() -> None:
    def seconds(count: int) -> float:
        times = []
        for _ in range(3):
            g = fan(2 * count)
            editor = Editor(g, "test")
            x = g.nodes[0].output
            start = time.perf_counter()
            for value in list(g.outputs):
                editor.replace(value, x)
            times.append(time.perf_counter() - start)
            assert g.outputs == [x] * count
        return min(times)

    few, many = seconds(500), seconds(4000)
    assert many / few < 24, (few, many)  # 8 when linear, 64 when quadratic
