"""The oracle of batching: the op on one element of the batch after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from cases import Arg, Case
from comparison import compare

from rlx.ir.dim import sym
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph
from rlx.ir.interp import evaluate
from rlx.passes.batching import batch

Array = Any
SIZE = 3


@dataclass(frozen=True)
class Mapped:
    """Which operands are mapped, and over which of their axes; is the size of the batch known?"""

    axes: Mapping[str, int]
    is_symbolic: bool = False
    size: int = SIZE


def operands_of(case: Case) -> list[str]:
    return [*case.args, *case.consts]


def ranks_of(case: Case) -> dict[str, int]:
    return {n.name: n.output.shape.rank for n in case.graph().nodes if n.op.is_source and n.name}


def ways(case: Case) -> list[Mapped]:
    """All operands mapped; then each of them alone, over the last axis and an axis between."""
    names, ranks = operands_of(case), ranks_of(case)
    found = [Mapped(dict.fromkeys(names, 0))]
    if len(names) == 1:
        return [*found, Mapped({names[0]: ranks[names[0]]}, is_symbolic=True)]
    for i, name in enumerate(names):
        found.append(Mapped({name: (i + 1) % (ranks[name] + 1)}, is_symbolic=i % 2 == 0))
    return found


def body_of(case: Case) -> Graph:
    """The graph of the case, its params as inputs."""
    args = {k: Arg(v.shape, DType.of(v.dtype).name) for k, v in case.consts.items()}
    return replace(case, args={**case.args, **args}, consts={}).graph()


def data_of(case: Case, n: int, way: Mapped) -> dict[str, Array]:
    """Operands with the batch stacked on: each element has data of its own."""
    data: dict[str, Array] = {**case.data(n), **case.consts}
    for name, axis in way.axes.items():
        if name in case.args:
            parts = [
                replace(case, label=f"{case.label} {i}").data(n)[name] for i in range(way.size)
            ]
        else:
            parts = [_other(case, data[name], i) for i in range(way.size)]
        one = data[name]
        empty = np.empty((*one.shape[:axis], 0, *one.shape[axis:]), one.dtype)
        data[name] = np.stack(parts, axis) if parts else empty
    return data


def _other(case: Case, const: Array, i: int) -> Array:
    """A constant of another element: the same rows in another order, or another top_k."""
    if case.op == "sample":
        return const + np.array([0, i, 0, 0], const.dtype)
    if not const.ndim:  # a zero point
        return const + const.dtype.type(i)
    return np.roll(const, i, axis=0)


def batched_graph(body: Graph, way: Mapped) -> tuple[Graph, list[bool]]:
    g = Graph(f"batch of {body.name}")
    size = sym("batch") if way.is_symbolic else way.size
    values, axes = [], []
    for node in body.sources("input"):
        dims, axis = list(node.output.shape.dims), way.axes.get(node.name)
        if axis is not None:
            dims.insert(axis, size)
        values.append(g.input(node.name, dims, node.output.shape.dtype))
        axes.append(axis)
    outputs, flags = batch(g, body, values, axes, size)
    return g.set_outputs(*outputs), flags


def one_by_one(body: Graph, data: Mapping[str, Array], way: Mapped, sizes: Any) -> list[Array]:
    """The results of each element, stacked on axis 0."""
    rows = []
    for i in range(way.size):
        own = {k: np.take(data[k], i, axis) for k, axis in way.axes.items()}
        rows.append(evaluate(body, {**data, **own}, sizes))
    return [np.stack(parts) for parts in zip(*rows, strict=True)]


def check(case: Case, n: int, way: Mapped, run: Any = evaluate) -> None:
    body = body_of(case)
    data = data_of(case, n, way)
    sizes = {"n": n} if "n" in body.symbols() else {}
    if not way.size:
        _check_empty(body, data, way, sizes, run)
        return
    expected = one_by_one(body, data, way, sizes or None)
    graph, flags = batched_graph(body, way)
    if way.is_symbolic:
        sizes["batch"] = way.size
    sizes = {k: v for k, v in sizes.items() if k in graph.symbols()}
    found = run(graph, data, sizes or None)
    for got, want, is_mapped in zip(found, expected, flags, strict=True):
        if not is_mapped:
            got = np.broadcast_to(got, want.shape)
        compare(case, got, want)


def _check_empty(body: Graph, data: Mapping[str, Array], way: Mapped, sizes: Any, run: Any) -> None:
    graph, flags = batched_graph(body, way)
    found = run(graph, data, {k: v for k, v in sizes.items() if k in graph.symbols()} or None)
    for got, value, is_mapped in zip(found, graph.outputs, flags, strict=True):
        assert got.dtype == value.shape.dtype.numpy
        assert not is_mapped or got.shape == (0, *value.shape.bind(sizes).dims[1:])
