"""Gathering, scattering, joining, padding, running sums and writes to states, natively."""

from __future__ import annotations

import numpy as np
import pytest
from program_support import HOST, SETUPS, Native, compare, kernels_for, reference
from region_support import BOTH, ONE, assert_close, graph_for, named, plain

from rlx.ir.dtype import ALL, DType
from rlx.ir.graph import Graph

INDICES = np.array([0, 2, -1, 2, 1])


@pytest.mark.parametrize("dtype", ["f32", "f16", "i8", "c64", "bool", "f8e4m3", "u64", "bf16"])
def test_gather(dtype: str) -> None:
    x = plain(dtype, 3, 5, 4)
    for axis in (0, 1, 2):
        for integer in ("i32", "i64", "i8"):
            element = DType.of(integer).numpy
            for indices in (INDICES, INDICES[:4].reshape(2, 2), INDICES[1]):
                arrays = [x, np.asarray(indices, element)]
                assert assert_close(
                    lambda g, x, i, a=axis: g.gather(x, i, axis=a), arrays, setups=ONE
                )
        dims = [3, 5, 4]
        dims[axis] = 7
        where = np.random.default_rng(1).integers(-3, 3, dims).astype(np.int32)
        assert assert_close(lambda g, x, i, a=axis: g.take_along(x, i, axis=a), [x, where])


def test_gather_of_long_rows_and_unsigned_indices() -> None:
    table = plain("f32", 100, 300)
    ids = np.random.default_rng(0).integers(0, 100, (4, 9))
    for element in (np.int32, np.uint8, np.uint64):
        assert assert_close(lambda g, x, i: g.gather(x, i), [table, ids.astype(element)])
    none = np.zeros((0, 2), np.int32)
    assert assert_close(lambda g, x, i: g.gather(x, i), [table, none])


def test_take_along_broadcasts() -> None:
    x, where = plain("f32", 1, 5, 3), np.array([[[4, -1, 0]], [[1, 1, 2]]], np.int64)
    assert assert_close(lambda g, x, i: g.take_along(x, i, axis=1), [x, where])


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("wrong", [7, -8, 2**40])
def test_an_index_out_of_range_is_reported_and_harmless(wrong: int, workers: int) -> None:
    arrays = [plain("f32", 7, 40), np.array([3, 0, wrong, 1])]
    updates = plain("f32", 4, 40)
    cases = [
        (lambda g, x, i: g.gather(x, i), arrays),
        (lambda g, x, i: g.gather(g.transpose(x, axes=(1, 0)), i, axis=1), arrays),
        (lambda g, x, i: g.take_along(x, g.reshape(i, shape=(4, 1)), axis=0), arrays),
        (lambda g, x, i, u: g.scatter(x, i, u), [*arrays, updates]),
        (lambda g, x, i, u: g.scatter_add(x, i, u), [*arrays, updates]),
        (lambda g, x, i, u: g.scatter_reduce(x, i, u), [*arrays, updates]),
    ]
    for build, operands in cases:
        native = Native(graph_for(build, operands), HOST, workers, {})
        native.linked.status[0] = 0
        native.run(named(operands))
        node = native.lir.graph.nodes[int(native.linked.status[0]) - 1]
        assert node.op.name.split("_")[0] in ("gather", "take", "scatter")
        good = [operands[0], np.array([3, 0, 6, -7]), *operands[2:]]
        native.linked.status[0] = 0
        native.run(named(good))
        assert native.linked.status[0] == 0


def test_nothing_to_gather_from() -> None:
    operands = [np.zeros((0, 5), np.float32), np.array([0])]
    native = Native(graph_for(lambda g, x, i: g.gather(x, i), operands), HOST, 2, {})
    native.linked.status[0] = 0
    native.run(named(operands))
    assert native.linked.status[0] > 0


def test_gather_inside_a_region() -> None:
    """Rows of a table scaled by what another index finds."""
    arrays = [plain("f32", 9, 40), np.array([[1, 8], [0, -1]], np.int32), plain("f32", 9)]

    def build(g, table, ids, scale):
        body = Graph("body")
        xs = [body.input(f"x{i}", v.shape) for i, v in enumerate((table, ids, scale))]
        rows = body.gather(xs[0], xs[1])
        factors = body.reshape(body.gather(xs[2], xs[1]), shape=(2, 2, 1))
        scaled = body.mul(rows, factors)
        body.set_outputs(scaled, body.sum(scaled, axis=(2,)))
        return g.elementwise_region([table, ids, scale], body=body)

    graph = graph_for(build, arrays)
    compare(graph, named(arrays), 1e-6, setups=BOTH)


@pytest.mark.parametrize("dtype", ["f32", "f16", "i8", "c64", "f8e4m3", "bf16", "f64", "u16"])
def test_scatter(dtype: str) -> None:
    x = plain(dtype, 3, 5, 4)
    # of f8 and 16-bit types each sum is one rounding of an f32 one
    within = {"f32": 4, "f64": 4, "c64": 4}.get(dtype, 1)
    for axis in (0, 1, 2):
        dims = [3, 5, 4]
        dims[axis] = 5
        operands = [x, INDICES, plain(dtype, *dims, seed=3)]
        assert assert_close(lambda g, *v, a=axis: g.scatter(*v, axis=a), operands)
        assert assert_close(lambda g, *v, a=axis: g.scatter_add(*v, axis=a), operands, within)


@pytest.mark.parametrize("dtype", ["f32", "f16", "i8", "f8e4m3", "bf16", "f64", "u16"])
@pytest.mark.parametrize("how", ["mul", "minimum", "maximum"])
def test_scatter_reduce(dtype: str, how: str) -> None:
    """Each result is rounded to the type, here and in the reference: equal."""
    for axis in (0, 1, 2):
        dims = [3, 5, 4]
        dims[axis] = 5
        operands = [plain(dtype, 3, 5, 4), INDICES, plain(dtype, *dims, seed=3)]
        assert assert_close(lambda g, *v, a=axis: g.scatter_reduce(*v, axis=a, how=how), operands)


def test_scatter_into_long_rows() -> None:
    ids = np.random.default_rng(0).integers(0, 30, 200).astype(np.int32)
    operands = [plain("f32", 30, 700), ids, plain("f32", 200, 700, seed=1)]
    assert assert_close(lambda g, *v: g.scatter(*v), operands, 0, SETUPS)
    graph = graph_for(lambda g, *v: g.scatter_add(*v), operands)
    compare(graph, named(operands), 1e-6)
    first, second = [Native(graph, HOST, n, {}).run(named(operands)) for n in (1, 2)]
    np.testing.assert_array_equal(first[0], second[0])  # one order, however many workers


@pytest.mark.parametrize("dtype", ["f32", "f16", "i8", "c64", "bool", "u64"])
def test_concat_and_pad(dtype: str) -> None:
    parts = [plain(dtype, 3, 5, 4, seed=i) for i in range(3)]
    for axis in (0, 1, -1):
        assert assert_close(lambda g, *v, a=axis: g.concat(*v, axis=a), parts)
    empty = plain(dtype, 3, 0, 4)
    assert assert_close(lambda g, *v: g.concat(*v, axis=1), [parts[0], empty, parts[1]])
    for mode in ("constant", "edge", "reflect"):
        how = {"low": (1, 0, 2), "high": (2, 1, 3), "mode": mode}
        value = 1.0 if mode == "constant" else 0.0
        assert assert_close(lambda g, x, h=how, v=value: g.pad(x, value=v, **h), parts[:1])


def test_concat_of_types_and_views() -> None:
    arrays = [plain("f16", 3, 5), plain("f32", 3, 2), plain("i32", 3, 1)]
    assert assert_close(lambda g, *v: g.concat(*v, axis=1), arrays)
    x = plain("f32", 6, 4)

    def build(g, x):
        turned = g.transpose(x, axes=(1, 0))
        return g.concat(turned, g.narrow(turned, axis=1, start=2, length=3), axis=1)

    assert assert_close(build, [x])


def test_pad_keeps_every_nan() -> None:
    codes = np.arange(0x7F80_0001, 0x7F80_0001 + 40, dtype=np.uint32).view(np.float32)
    graph = graph_for(lambda g, x: (g.pad(x, low=(2,), high=(1,)), g.contiguous(x)), [codes])
    padded, copied = Native(graph, HOST, 2, {}).run(named([codes]))
    np.testing.assert_array_equal(padded[2:-1].view(np.uint32), codes.view(np.uint32))
    np.testing.assert_array_equal(copied.view(np.uint32), codes.view(np.uint32))


@pytest.mark.parametrize("dtype", [d.name for d in ALL])
def test_cumsum(dtype: str) -> None:
    for axis in (0, 1, 2):
        for exclusive in (False, True):
            for reverse in (False, True):
                how = {"axis": axis, "exclusive": exclusive, "reverse": reverse}
                x = plain(dtype, 3, 5, 40)
                assert assert_close(lambda g, x, h=how: g.cumsum(x, **h), [x], 1, ONE)
    if dtype == "f32":
        long = np.random.default_rng(0).random((2, 100_000), np.float32)
        assert assert_close(lambda g, x: g.cumsum(x), [long], 1)


def test_state_update() -> None:
    g = Graph()
    cache = g.state("cache", (2, 10, 6), "f16")
    new = g.input("new", (2, "seq", 6), "f16")
    g.set_outputs(g.state_update(cache, new, axis=1, start="past"))
    native = Native(g, HOST, 2, {"seq": 4, "past": 8})
    for seq, past in ((3, 0), (1, 9), (4, 3)):
        before = plain("f16", 2, 10, 6)
        state, update = before.copy(), plain("f16", 2, seq, 6, seed=2)
        [after] = native.run({"cache": state, "new": update}, {"seq": seq, "past": past})
        before[:, past : past + seq] = update
        np.testing.assert_array_equal(state, before)
        np.testing.assert_array_equal(after, before)


def test_symbolic_sizes() -> None:
    dims = [["rows", 8], ["batch", "seq"]]
    table, ids = plain("f32", 6, 8), np.array([[5, 0, 2]], np.int32)

    def build(g, table, ids):
        found = g.gather(table, ids)
        joined = g.concat(found, found, axis=1)
        padded = g.pad(found, low=(0, 2, 0), high=(0, 1, 1), mode="reflect")
        return joined, padded, g.cumsum(joined, axis=1)

    graph = graph_for(build, [table, ids], [[6, 8], dims[1]])
    sizes, bounds = {"batch": 1, "seq": 3}, {"batch": 2, "seq": 9}
    native = Native(graph, HOST, 2, bounds)
    found = native.run(named([table, ids]), sizes)
    for got, want in zip(found, reference(graph, named([table, ids]), sizes), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("target", ["x86-64", "x86-64-v3", "aarch64"])
def test_other_targets(target: str) -> None:
    g = Graph()
    x, ids = g.input("x", (6, 50)), g.input("ids", (3,), "i32")
    rows = g.gather(x, ids)
    half = g.cast(x, "f16")
    results = [
        rows,
        g.gather(half, ids, axis=1),
        g.scatter(x, ids, rows),
        g.scatter_add(half, ids, g.cast(rows, "f16")),
        g.concat(x, rows),
        g.cumsum(x),
        g.cumsum(half, axis=0),
        g.pad(half, low=(1, 1), high=(0, 2), mode="edge"),
    ]
    assert kernels_for(g.set_outputs(results), target) >= 8
