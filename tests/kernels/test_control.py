"""Branches and loops in the native program, against the references of the ops."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from program_support import SETUPS, Native, check, reference

import rlx
from rlx.backends.cpu.kernels.control import (
    Branch,
    BranchIfFalse,
    CopyResults,
    LoopHeader,
    LoopPreheader,
)
from rlx.backends.cpu.kernels.spec import unit_of
from rlx.backends.cpu.thread_pool import get_thread_pool
from rlx.errors import InputError
from rlx.ir.graph import Graph
from rlx.ir.ops.control import make_body
from rlx.ir.ops.custom import custom_op
from rlx.llvm.elf import ObjectFile
from rlx.llvm.target import Target

ROOT = Path(__file__).resolve().parents[2]
# Bodies here make a few dozen roundings of f32, of 6e-8 each, and loops let errors decay or add
# them up over at most ten rounds.
CLOSE = 3e-6
rng = np.random.default_rng(7)


def normal(*dims: int) -> np.ndarray:
    return rng.standard_normal(dims, np.float32)


def same(
    graph: Graph,
    inputs: Mapping[str, np.ndarray],
    sizes: Mapping[str, int] | None = None,
    bounds: Mapping[str, int] | None = None,
    tolerance: float = CLOSE,
) -> None:
    """Native against reference: step by step for all workers, and by workers of a pool."""
    expected = reference(graph, inputs, sizes)
    for target, workers in SETUPS:
        native = Native(graph, target, workers, bounds or sizes or {})
        ways: list[Callable | None] = [None]
        ways += [get_thread_pool(workers).run] * (get_thread_pool(workers).workers == workers)
        for way in ways:
            for _ in range(2):  # the second run finds the cells and args of the first
                for got, want in zip(native.run(inputs, sizes, way), expected, strict=True):
                    check(got, want, tolerance)


# -- scan -------------------------------------------------------------------------------------


def cell(b: Graph, h, x, w):
    new = b.tanh(b.matmul(h, w) + x)
    return [new, new * h]


def recurrent(reverse: bool, length: object = "n") -> Graph:
    g = Graph("recurrent")
    h, xs, w = g.input("h", [3, 5]), g.input("xs", [length, 3, 5]), g.input("w", [5, 5])
    body = make_body(cell, [3, 5], [3, 5], [5, 5])
    g.set_outputs(*g.scan(h, xs, w, body=body, n_carry=1, n_xs=1, reverse=reverse))
    return g


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [0, 1, 2, 5, 6])
def test_scan_over_a_dynamic_length(length, reverse):
    inputs = {"h": normal(3, 5), "xs": normal(length, 3, 5), "w": normal(5, 5)}
    same(recurrent(reverse), inputs, {"n": length}, {"n": 6})


def test_scan_of_a_fixed_length():
    inputs = {"h": normal(3, 5), "xs": normal(4, 3, 5), "w": normal(5, 5)}
    same(recurrent(False, 4), inputs)


@pytest.mark.parametrize("length", [1, 7, 30])
def test_values_that_change_places_and_one_that_stays(length):
    """a, b, c -> b, a + b, c: the second is read from where the first will be written."""
    g = Graph("fibonacci")
    a, b, c = (g.input(n, [2], "i64") for n in "abc")
    body = make_body(lambda g, a, b, c: [b, a + b, c], *[a.shape] * 3)
    g.set_outputs(*g.scan(a, b, c, body=body, n_carry=3, n_xs=0, length=length))
    inputs = {"a": np.array([0, 1]), "b": np.array([1, 1]), "c": np.array([8, 9])}
    same(g, inputs, tolerance=0)
    numbers = [0, 1]
    while len(numbers) < length + 2:
        numbers.append(numbers[-1] + numbers[-2])
    results = Native(g, *SETUPS[0], {}).run(inputs)
    assert [int(r[0]) for r in results] == [numbers[length], numbers[length + 1], 8]


def test_scan_without_carried_values():
    """Rows of dynamic width, two operands, results of another type and rank."""
    g = Graph("rows")
    xs, ks = g.input("xs", ["n", "m", 4]), g.input("ks", ["n"], "i32")
    body = make_body(
        lambda b, x, k: [b.sum(x, axis=(1,)), b.argmax(x, axis=-1) + k, b.gt(k, 1)],
        ["m", 4],
        ks.shape.with_dims(()),
    )
    g.set_outputs(*g.scan(xs, ks, body=body, n_carry=0, n_xs=2))
    for n, m in [(3, 5), (1, 1), (0, 2), (4, 0)]:
        inputs = {"xs": normal(n, m, 4), "ks": np.arange(n, dtype=np.int32)}
        same(g, inputs, {"n": n, "m": m}, {"n": 4, "m": 5})


def test_scan_over_views_and_with_views_as_results():
    g = Graph("views")
    x, h = g.input("x", [3, 4, 6]), g.input("h", [6])
    xs = g.transpose(x, axes=(1, 0, 2))

    def body(b, h, x):
        half = b.narrow(b.reshape(x, [9, 2]), axis=1, start=1, length=1)
        return [b.sum(x, axis=(0,)) + h, b.transpose(x, axes=(1, 0)), half]

    made = make_body(body, [6], [3, 6])
    g.set_outputs(*g.scan(h, xs, body=made, n_carry=1, n_xs=1))
    same(g, {"x": normal(3, 4, 6), "h": normal(6)})


def test_a_body_without_steps():
    g = Graph("idle")
    body = make_body(lambda b, x: [x], [3])
    g.set_outputs(g.scan(g.input("x", [3]), body=body, n_carry=1, n_xs=0, length=1000))
    same(g, {"x": normal(3)}, tolerance=0)


# -- while_loop -------------------------------------------------------------------------------


def halving(limit: int = 0, must_end: bool = False) -> Graph:
    """Halve x while its sum is above a bound, counting."""
    g = Graph("halving")
    x, n, bound = g.input("x", [17]), g.input("n", [], "i32"), g.input("bound", [])
    shapes = [x.shape, n.shape, bound.shape]
    g.set_outputs(
        *g.while_loop(
            x, n, bound, n_carry=2, max_iterations=limit, must_end=must_end,
            condition=make_body(lambda b, x, n, bound: b.gt(b.sum(x), bound), *shapes),
            body=make_body(lambda b, x, n, bound: [x * 0.5, n + 1], *shapes),
        )
    )  # fmt: skip
    return g


@pytest.mark.parametrize("limit", [0, 1, 4, 5])
@pytest.mark.parametrize("rounds", [0, 1, 4, 7])
def test_while_loop(rounds, limit):
    x = np.full(17, 1.0, np.float32)
    inputs = {"x": x, "n": np.array(10, np.int32), "bound": np.float32(17 / 2.0**rounds + 1e-3)}
    done = min(rounds, limit or rounds)
    got, count = reference(halving(limit), inputs)
    assert count == 10 + done and got[3] == 0.5**done
    same(halving(limit), inputs, tolerance=0)


def test_a_loop_that_must_end():
    x, limit = np.full(17, 1.0, np.float32), 4
    graph = halving(limit, must_end=True)
    for rounds in (0, 1, limit):
        bound = np.float32(17 / 2.0**rounds + 1e-3)
        same(graph, {"x": x, "n": np.array(10, np.int32), "bound": bound}, tolerance=0)
    longer = {"x": x, "n": np.array(10, np.int32), "bound": np.float32(17 / 2.0**5 + 1e-3)}
    with pytest.raises(InputError, match="does not end"):
        reference(graph, longer)
    f = rlx.Session("cpu").compile(graph)
    for _ in range(2):  # a program that raised runs again
        with pytest.raises(InputError, match="does not end"):
            f.run(longer)
        assert f.run(longer | {"bound": np.float32(99)})[1] == 10


def test_a_loop_longer_than_the_patience_of_python():
    """200,000 rounds come back to Python some times; the count shows that none is lost."""
    g = Graph("long")
    n, last = g.input("n", [], "i32"), g.input("last", [], "i32")
    shapes = [n.shape, last.shape]
    condition = make_body(lambda b, n, last: b.lt(n, last), *shapes)
    body = make_body(lambda b, n, last: n + 1, *shapes)
    g.set_outputs(g.while_loop(n, last, condition=condition, body=body, n_carry=1))
    f = rlx.Session("cpu").compile(g)
    [got] = f.run(n=np.int32(3), last=np.int32(200_003))
    assert got == 200_003


def test_interrupt_of_a_loop_without_end():
    code = """
        import numpy as np, rlx, signal
        from rlx.ir.ops.control import make_body
        g = rlx.Graph("endless")
        x, flag = g.input("x", [4]), g.input("flag", [], "bool")
        shapes = [x.shape, flag.shape]
        g.set_outputs(g.while_loop(
            x, flag, n_carry=1,
            condition=make_body(lambda b, x, flag: flag, *shapes),
            body=make_body(lambda b, x, flag: x * 0.5, *shapes),
        ))
        f = rlx.Session("cpu").compile(g)
        x = np.ones(4, np.float32)
        f.run(x=x, flag=np.array(False))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print("ready", flush=True)
        try:
            f.run(x=x, flag=np.array(True))
        except KeyboardInterrupt:
            print("stopped", f.run(x=x, flag=np.array(False))[0], flush=True)
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert child.stdout.readline() == "ready\n", child.stderr.read()
    time.sleep(0.2)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=30)
    assert out.strip() == "stopped [1. 1. 1. 1.]", out + err


# -- cond -------------------------------------------------------------------------------------


def test_cond_runs_one_branch():
    g = Graph("choice")
    flag, x, w = g.input("flag", [], "bool"), g.input("x", ["n", 6]), g.input("w", [6, 6])
    shapes = [x.shape, w.shape]
    then = make_body(lambda b, x, w: [b.softmax(b.matmul(x, w)), x], *shapes)
    other = make_body(lambda b, x, w: [b.relu(x), b.expand(b.constant(2.0), ["n", 6])], *shapes)
    y, z = g.cond(flag, x, w, then=then, otherwise=other)
    g.set_outputs(y + z, z)
    for n, flag in itertools.product([0, 1, 5], [False, True]):
        same(g, {"flag": np.array(flag), "x": normal(n, 6), "w": normal(6, 6)}, {"n": n}, {"n": 6})


def test_neighbours_of_a_branch_wait_for_it():
    """The predicate and the operands are computed right before, the result is used right after, and
    one of the branches has no step at all where the tensors are empty."""
    g = Graph("neighbours")
    x, e = g.input("x", [64, 48]), g.input("e", [0, 3])
    y = g.exp(x)
    flag = g.gt(g.sum(y), 1e6)
    made = [make_body(f, y.shape, e.shape) for f in (_twice, _negative)]
    z, f = g.cond(flag, y, e, then=made[0], otherwise=made[1])
    shapes = [e.shape]
    empty = [make_body(lambda b, e: e, *shapes), make_body(lambda b, e: e * 2.0, *shapes)]
    g.set_outputs(g.sum(z, axis=(0,)), g.cond(flag, f, then=empty[0], otherwise=empty[1]), z * y)
    same(g, {"x": normal(64, 48), "e": normal(0, 3)})


def _twice(b, y, e):
    return [y + y, e]


def _negative(b, y, e):
    return [b.neg(y), b.exp(e)]


# -- loops in loops ---------------------------------------------------------------------------


def test_scan_in_a_branch_in_a_while_loop():
    g = Graph("nested")
    h, n = g.input("h", [2, 4]), g.input("n", [], "i32")
    xs, w = g.input("xs", ["s", 2, 4]), g.input("w", [4, 4])
    shapes = [h.shape, n.shape, xs.shape, w.shape]

    def scanned(b, h, xs, w):
        body = make_body(lambda b, h, x, w: [b.tanh(b.matmul(h, w) + x)], [2, 4], [2, 4], [4, 4])
        return b.scan(h, xs, w, body=body, n_carry=1, n_xs=1)

    def turn(b, h, n, xs, w):
        flag = b.eq(b.bitwise_and(n, 1), 0)
        inner = [h.shape, xs.shape, w.shape]
        then = make_body(scanned, *inner)
        otherwise = make_body(lambda b, h, xs, w: h * -0.5, *inner)
        return [b.cond(flag, h, xs, w, then=then, otherwise=otherwise), n + 1]

    condition = make_body(lambda b, h, n, xs, w: b.lt(n, 5), *shapes)
    body = make_body(turn, *shapes)
    g.set_outputs(*g.while_loop(h, n, xs, w, condition=condition, body=body, n_carry=2))
    for s, start in [(3, 0), (4, 1), (0, 0), (2, 5)]:
        inputs = {"h": normal(2, 4), "n": np.array(start, np.int32)}
        inputs |= {"xs": normal(s, 2, 4), "w": normal(4, 4)}
        same(g, inputs, {"s": s}, {"s": 4})


@pytest.mark.parametrize("outer, inner", [(1, 1), (3, 4), (2, 0), (4, 3)])
@pytest.mark.parametrize("reverse", [False, True])
def test_scan_of_scan(outer, inner, reverse):
    """The inner loop scans a slice of the outer one, writes one, and both use what is carried."""
    g = Graph("grid")
    h, xs = g.input("h", [3]), g.input("xs", ["a", "b", 3])
    table = g.input("table", [3, 3])

    def row(b, h, xs, table):
        body = make_body(
            lambda b, h, x, k, t: [b.tanh(b.matmul(x, t) + h), b.sum(h * k)],
            [3], [3], [3], [3, 3],
        )  # fmt: skip
        new, sums = b.scan(h, xs, h, table, body=body, n_carry=1, n_xs=1, reverse=not reverse)
        return [new, sums, new - h]

    body = make_body(row, [3], ["b", 3], [3, 3])
    g.set_outputs(*g.scan(h, xs, table, body=body, n_carry=1, n_xs=1, reverse=reverse))
    inputs = {"h": normal(3), "xs": normal(outer, inner, 3), "table": normal(3, 3)}
    same(g, inputs, {"a": outer, "b": inner}, {"a": 4, "b": 4})


# -- with the rest of the device --------------------------------------------------------------


def test_custom_op_in_a_loop():
    seen = []

    def remember(x, y):
        seen.append(float(x[0]))
        return x * 2, x[0] + y

    both = custom_op("test.control.both", infer=lambda x, y: (x, y), reference=remember)
    g = Graph("mixed")
    h, xs = g.input("h", [3]), g.input("xs", ["n", 2])

    def step(b, h, x):
        doubled, moved = both(b, h, x)
        return [doubled + 1.0, moved]

    body = make_body(step, [3], [2])
    g.set_outputs(*g.scan(h, xs, body=body, n_carry=1, n_xs=1))
    f = rlx.Session("cpu").compile(g)
    xs = normal(4, 2)
    last, ys = f.run(h=np.array([1, 2, 3], np.float32), xs=xs)
    assert seen == [1.0, 3.0, 7.0, 15.0]
    assert last.tolist() == [31, 47, 63]
    np.testing.assert_array_equal(ys, xs + np.float32([[1], [3], [7], [15]]))


def test_bad_index_in_a_loop_names_the_node():
    g = Graph("lookup")
    ids, table = g.input("ids", ["n"], "i32"), g.input("table", [5, 2])
    body = make_body(lambda b, i, t: [b.gather(t, i, axis=0)], ids.shape.with_dims(()), [5, 2])
    g.set_outputs(g.scan(ids, table, body=body, n_carry=0, n_xs=1))
    f = rlx.Session("cpu").compile(g)
    table = normal(5, 2)
    [got] = f.run(ids=np.array([4, 0], np.int32), table=table)
    np.testing.assert_array_equal(got, table[[4, 0]])
    with pytest.raises(rlx.InputError, match="out of range") as caught:
        f.run(ids=np.array([1, 5], np.int32), table=table)
    assert "gather" in str(caught.value)


def test_sizes_of_a_nested_graph_are_checked():
    g = Graph("narrowed")
    xs = g.input("xs", [3, 8])
    body = make_body(lambda b, x: [b.narrow(x, axis=0, start=2, length="n") * 2.0], [8])
    g.set_outputs(g.scan(xs, body=body, n_carry=0, n_xs=1))
    f = rlx.Session("cpu").compile(g, {"binding": rlx.DimBinding().set_live("n", 8)})
    x = normal(3, 8)
    np.testing.assert_array_equal(f.run(xs=x, sizes={"n": 6})[0], x[:, 2:] * 2)
    with pytest.raises(rlx.BindingError, match="past the end"):
        f.run(xs=x, sizes={"n": 7})


def test_profile_and_check_of_a_loop(monkeypatch):
    f = rlx.Session("cpu").compile(recurrent(False))
    inputs = {"h": normal(3, 5), "xs": normal(6, 3, 5), "w": normal(5, 5)}
    rows = f.profile(inputs, repeat=1).rows
    # six products of [3, 5] and [5, 5], with the addition fused to them
    assert sum(r.flops for r in rows if "gemm" in r.label) == 6 * (2 * 3 * 5 * 5 + 3 * 5)
    assert {r.node.split()[1] for r in rows} == {"scan"}
    monkeypatch.setenv("RLX_CHECK_NAN", "1")
    f = rlx.Session("cpu").compile(recurrent(False))
    got = f.run(inputs)
    for a, b in zip(got, reference(recurrent(False), inputs, {"n": 6}), strict=True):
        check(a, b, CLOSE)
    inputs["xs"][4, 1, 2] = np.nan
    with pytest.raises(rlx.NumericsError, match="scan"):
        f.run(inputs)


def test_the_body_stands_in_the_program_once():
    lengths = set()
    for n in (2, 1000):
        g = recurrent(False, n)
        native = Native(g, *SETUPS[0], {})
        lengths.add(len(native.linked.program))
        labels = [s.label for s in native.launches]
        assert labels.count("loopheader") == 1 and labels.count("gemm") == 1
    assert len(lengths) == 1


@pytest.mark.parametrize("name", ["x86-64", "x86-64-v4", "aarch64", "apple-m1"])
def test_kernels_for_other_machines(name):
    target = Target.named(name)
    for spec in (LoopPreheader(), LoopHeader(), Branch(), BranchIfFalse(), CopyResults()):
        assert ObjectFile(unit_of(spec, target).compile()).machine.arch == target.arch
