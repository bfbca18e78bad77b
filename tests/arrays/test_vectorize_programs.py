"""`vmap` of programs: control flow, random keys, collectives, wrappers; a loop is the oracle.

In f64 on the reference device, where a batch and a loop differ by some roundings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import rlx
import rlx.numpy as rnp
from rlx import random

rng = np.random.default_rng(11)
X = rng.normal(size=(4, 3))
Y = rng.normal(size=(4, 3))
W = rng.normal(size=(3, 3))
N = np.array([0, 3, 1, 5])


@pytest.fixture(autouse=True)
def on_the_reference() -> Iterator[None]:
    with rlx.default_device("reference"):
        yield


def same(found: Any, expected: Any) -> None:
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def looped(f: Callable[..., Any], *args: Any) -> np.ndarray:
    return np.stack(
        [np.asarray(f(*[rnp.asarray(a[i]) for a in args])) for i in range(len(args[0]))]
    )


def check(f: Callable[..., Any], *args: Any) -> None:
    """Mapped outside `jit` and inside; with its gradient where the first argument is a float."""
    same(rlx.vmap(f)(*args), looped(f, *args))
    same(rlx.jit(rlx.vmap(f))(*args), looped(f, *args))


def check_with_gradient(f: Callable[..., Any], *args: Any) -> None:
    check(f, *args)
    check(rlx.grad(lambda *a: rnp.sum(f(*a))), *args)
    check(lambda *a: rlx.jvp(lambda x: f(x, *a[1:]), (a[0],), (rnp.cos(a[0]),))[1], *args)


# -- control flow ---------------------------------------------------------------------------------


def test_cond_by_a_predicate_of_each_example() -> None:
    check_with_gradient(
        lambda x, y: rlx.cond(rnp.sum(x) > 0, lambda a: a * y, lambda a: rnp.sin(a), x), X, Y
    )
    trees = rlx.vmap(
        lambda x: rlx.cond(x[0] > 0, lambda: {"a": x, "n": 1}, lambda: {"a": -x, "n": 2})
    )
    found = trees(X)
    same(found["a"], np.where(X[:, :1] > 0, X, -X))
    assert np.array_equal(np.asarray(found["n"]), np.where(X[:, 0] > 0, 1, 2))


def test_cond_by_one_predicate_runs_one_branch() -> None:
    def f(x: Any, flag: Any) -> Any:
        return rlx.cond(flag, lambda a: rnp.exp(a), lambda a: a, x)

    mapped = rlx.vmap(f, in_axes=(0, None))
    same(mapped(X, rnp.asarray(True)), np.exp(X))
    assert "cond" in rlx.jit(mapped).inspect(X, rnp.asarray(True))


def test_switch() -> None:
    steps = [rnp.sin, lambda x: x * x, lambda x: -x]
    check(lambda i, x: rlx.switch(i, steps, x), np.array([0, 2, 1, 7]), X)


def test_scan() -> None:
    def f(x: Any, w: Any) -> Any:
        def step(h: Any, row: Any) -> Any:
            h = rnp.tanh(W @ h + row * w)
            return h, h * x

        last, rows = rlx.scan(step, x, rnp.stack([x, w, x * w]), reverse=True)
        return rnp.sum(rows, axis=0) + last

    check_with_gradient(f, X, Y)
    rows = rlx.vmap(lambda x: rlx.scan(lambda n, v: (n + 1, v * x), 0, rnp.asarray(Y))[1])(X)
    same(rows, Y[None] * X[:, None])  # the count is the same for all examples


def test_a_carry_that_becomes_mapped() -> None:
    """Neither start depends on the example; the second carry does after two iterations."""

    def f(x: Any) -> Any:
        def step(carry: Any, _: Any) -> Any:
            a, b = carry
            return (x, a), b

        return rlx.scan(step, (rnp.zeros(3, dtype="f8"), rnp.ones(3, dtype="f8")), None, length=4)[
            1
        ]

    check_with_gradient(f, X)


def test_fori_loop_and_while_loop_of_each_example() -> None:
    check_with_gradient(lambda x: rlx.fori_loop(0, 4, lambda i, v: rnp.sin(v) * (i + 1), x), X)
    check(lambda n, x: rlx.fori_loop(0, n, lambda i, v: rnp.sin(v) + i, x), N, X)

    def doubled(x: Any, n: Any) -> Any:
        def more(carry: Any) -> Any:
            return rnp.logical_and(carry[1] < n, rnp.sum(carry[0]) < 50)

        return rlx.while_loop(more, lambda c: (c[0] * 1.5 + x, c[1] + 1), (x, 0))[0]

    check(doubled, X, N)
    check(lambda x, n: rlx.jvp(lambda x: doubled(x, n), (x,), (x * 2,))[1], X, N)
    one = rlx.vmap(lambda x: rlx.while_loop(lambda n: n < 5, lambda n: n * 2, 1) * x)
    same(one(X), 8 * X)


def test_loops_in_mapped_loops() -> None:
    def f(x: Any) -> Any:
        def row(h: Any, v: Any) -> Any:
            inner = rlx.fori_loop(0, 2, lambda i, u: rnp.sin(u) * v, h)
            return rlx.cond(rnp.sum(inner) > 0, lambda: inner, lambda: h - v), inner

        return rlx.scan(row, x, rnp.stack([x, x + 1, x * x]))[1]

    check_with_gradient(f, X)
    twice = rlx.vmap(rlx.vmap(lambda x: f(x) * 2), in_axes=1, out_axes=1)
    batch = np.stack([X, Y], axis=1)  # [4, 2, 3]: the inner one maps the 4
    same(twice(batch), np.stack([2 * looped(f, X), 2 * looped(f, Y)], axis=1))


def test_map_is_mapped() -> None:
    check(lambda x: rlx.map(lambda v: v * x, rnp.asarray(Y)), X)


# -- random numbers -------------------------------------------------------------------------------


def test_random_keys() -> None:
    keys = random.split(random.key(3), 4)
    for draw in (
        lambda k: random.normal(k, (5,)), lambda k: random.uniform(k, (2, 3)),
        lambda k: random.randint(k, (7,), 0, 100), lambda k: random.permutation(k, 6),
        lambda k: random.split(k, 2), lambda k: random.bernoulli(k, 0.3, (9,)),
    ):  # fmt: skip
        found = rlx.vmap(draw)(keys)
        rows = [np.asarray(draw(keys[i])) for i in range(4)]
        assert np.array_equal(np.asarray(found), np.stack(rows))
    folded = rlx.vmap(lambda i: random.normal(random.fold_in(random.key(0), i), (2,)))(N)
    rows = [np.asarray(random.normal(random.fold_in(random.key(0), int(i)), (2,))) for i in N]
    assert np.array_equal(np.asarray(folded), np.stack(rows))
    same_for_all = rlx.vmap(lambda x: x + random.normal(random.key(1), (3,)))(X)
    noise = np.asarray(random.normal(random.key(1), (3,)))
    same(same_for_all, X + noise)


# -- collectives ----------------------------------------------------------------------------------


def test_collectives() -> None:
    def f(x: Any, n: Any) -> Any:
        return {
            "psum": rlx.psum({"x": x, "n": n}, "i"), "pmean": rlx.pmean(x, "i"),
            "pmax": rlx.pmax(x, "i"), "pmin": rlx.pmin(x, "i"),
            "all": rlx.all_gather(x, "i"), "last": rlx.all_gather(x, "i", axis=-1),
            "index": rlx.axis_index("i"), "size": rlx.psum(1, "i"),
        }  # fmt: skip

    found = rlx.vmap(f, axis_name="i")(X, N)
    repeated = {
        "pmean": X.mean(0), "pmax": X.max(0), "pmin": X.min(0), "all": X, "last": X.T,
        "size": np.array(4),
    }  # fmt: skip
    for name, one in repeated.items():
        same(found[name], np.stack([one] * 4))
    same(found["psum"]["x"], np.stack([X.sum(0)] * 4))
    assert np.array_equal(np.asarray(found["psum"]["n"]), [9] * 4)
    assert np.array_equal(np.asarray(found["index"]), np.arange(4))
    shared = rlx.vmap(lambda x: rlx.psum(x, "i"), axis_name="i", out_axes=None)
    same(shared(X), X.sum(0))


def test_collectives_of_nested_axes() -> None:
    batch = rng.normal(size=(2, 4, 3))

    def f(x: Any) -> Any:
        own = x - rlx.pmean(x, "inner") + rlx.pmax(x, "outer")
        number = rlx.axis_index("outer") * 10 + rlx.axis_index("inner")
        return own, number, rlx.psum(x, ("inner", "outer")), rlx.all_gather(x, "outer")

    mapped = rlx.vmap(rlx.vmap(f, axis_name="inner"), axis_name="outer")
    for run in (mapped, rlx.jit(mapped)):
        own, number, total, gathered = run(batch)
        same(own, batch - batch.mean(1, keepdims=True) + batch.max(0, keepdims=True))
        assert np.array_equal(np.asarray(number), np.arange(2)[:, None] * 10 + np.arange(4))
        same(total, np.broadcast_to(batch.sum((0, 1)), batch.shape))
        same(gathered, np.broadcast_to(batch.transpose(1, 0, 2), (2, 4, 2, 3)))


def centred(x: Any) -> Any:
    """A function of all examples, each result of all of them."""
    mean = rlx.pmean(x, "i")
    spread = rlx.psum((x - mean) ** 2, "i")
    rows = rlx.all_gather(rnp.sin(x), "i")
    at = rlx.axis_index("i")
    return (x - mean) / rnp.sqrt(spread + 1) + rows[at - 1] * rlx.pmax(x, "i")


def centred_together(x: Any) -> Any:
    mean = rnp.mean(x, axis=0)
    spread = rnp.sum((x - mean) ** 2, axis=0)
    rows = rnp.roll(rnp.sin(x), 1, axis=0)
    return (x - mean) / rnp.sqrt(spread + 1) + rows * rnp.max(x, axis=0)


def test_derivatives_of_collectives() -> None:
    """Around the map, and within: there each example has the loss of all."""
    mapped = rlx.vmap(centred, axis_name="i")
    same(mapped(X), centred_together(rnp.asarray(X)))
    whole = rlx.grad(lambda x: rnp.sum(centred_together(x) * Y))(X)
    same(rlx.grad(lambda x: rnp.sum(mapped(x) * Y))(X), whole)
    same(rlx.jvp(mapped, (X,), (Y,))[1], rlx.jvp(centred_together, (X,), (Y,))[1])
    within = rlx.vmap(rlx.grad(lambda x, y: rnp.sum(centred(x) * y)), axis_name="i")
    same(within(X, Y), whole)
    tangent = rlx.vmap(lambda x, y: rlx.jvp(centred, (x,), (y,))[1], axis_name="i")
    same(tangent(X, Y), rlx.jvp(mapped, (X,), (Y,))[1])
    same(rlx.jit(within)(X, Y), whole)
    step = 1e-5
    ends = [np.asarray(centred_together(rnp.asarray(X + s * Y))) for s in (step, -step)]
    change = np.asarray(rlx.jvp(mapped, (X,), (Y,))[1])
    np.testing.assert_allclose(change, (ends[0] - ends[1]) / (2 * step), rtol=1e-6, atol=1e-8)


def test_collectives_inside_of_loops_and_branches() -> None:
    def f(x: Any) -> Any:
        def step(h: Any, _: Any) -> Any:
            h = h + rlx.psum(h * x, "i") * 0.1
            return h, rlx.axis_index("i")

        h, at = rlx.scan(step, x, None, length=3)
        return rlx.cond(at[0] > 1, lambda: h, lambda: rlx.pmean(h, "i"))

    h = X.copy()
    for _ in range(3):
        h = h + (h * X).sum(0) * 0.1
    expected = np.where(np.arange(4)[:, None] > 1, h, h.mean(0))
    same(rlx.vmap(f, axis_name="i")(X), expected)
    same(rlx.vmap(rlx.checkpoint(f), axis_name="i")(X), expected)

    def counted(_: Any) -> Any:
        return rlx.scan(lambda n, _: (n + rlx.axis_index("i"), n), 0, None, length=2)[0]

    alone = rlx.vmap(counted, axis_name="i")
    assert np.array_equal(np.asarray(alone(X)), 2 * np.arange(4))  # mapped by its index alone


def test_an_axis_that_nothing_maps_is_an_error() -> None:
    with pytest.raises(rlx.InputError, match=r"\[psum\] no mapped axis of that name; got 'k'.*'i'"):
        rlx.vmap(lambda x: rlx.psum(x, "k"), axis_name="i")(X)
    with pytest.raises(rlx.InputError, match=r"\[axis_index\] no mapped axis"):
        rlx.jit(lambda x: x + rlx.axis_index("i"))(X)
    with pytest.raises(rlx.InputError, match=r"\[pmean\] no mapped axis"):
        rlx.pmean(X, "i")


# -- wrappers -------------------------------------------------------------------------------------


@rlx.custom_vjp
def scaled(x: Any, w: Any) -> Any:
    return x * w


scaled.defvjp(lambda x, w: (x * w, (x, w)), lambda kept, ct: (ct * kept[1], 7 * ct * kept[0]))


@rlx.custom_jvp
def risen(x: Any, w: Any) -> Any:
    return rnp.exp(x) * w


@risen.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (x, w), (tx, tw) = primals, tangents
    return risen(x, w), risen(x, w) * tx + 5 * rnp.exp(x) * tw


@pytest.mark.parametrize("f", [scaled, risen], ids=["custom_vjp", "custom_jvp"])
def test_custom_rules_are_mapped(f: Any) -> None:
    def gradient(x: Any, w: Any) -> Any:
        return rnp.stack(rlx.grad(lambda x, w: rnp.sum(f(x, w)), (0, 1))(x, w))

    check(lambda x, w: f(x, w), X, Y)
    check(gradient, X, Y)
    shared = rlx.grad(lambda x, w: rnp.sum(rlx.vmap(f, in_axes=(0, None))(x, w)), (0, 1))(X, Y[0])
    rows = looped(lambda x: gradient(x, rnp.asarray(Y[0])), X)
    same(shared[0], rows[:, 0])
    same(shared[1], rows[:, 1].sum(0))  # the examples' cotangents of what they share


def test_checkpoint_jit_and_stop_gradient_are_mapped() -> None:
    check_with_gradient(lambda x, y: rlx.checkpoint(lambda a: rnp.tanh(a @ W) * y)(x), X, Y)
    check_with_gradient(lambda x, y: rlx.jit(lambda a: rnp.tanh(a @ W) * y)(x), X, Y)
    check_with_gradient(lambda x: rlx.stop_gradient(rnp.sin(x)) * x, X)


def test_custom_ops_are_mapped_one_by_one_or_by_their_rule() -> None:
    made = rlx.custom_op(
        "test.flipped", infer=lambda x: x, reference=lambda x: x[::-1],
        gradient=lambda g, inputs, outputs, grads: g.flip(grads[0], axis=0),
    )  # fmt: skip
    ruled = rlx.custom_op(
        "test.flipped_at_once", infer=lambda x: x, reference=lambda x: x[..., ::-1],
        batching=lambda g, inputs, mapped, size: made_at_once(g, inputs[0]),
    )  # fmt: skip

    def made_at_once(g: Any, x: Any) -> Any:
        return ruled(g, x)

    from rlx.ir.graph import Graph
    from rlx.ir.interp import evaluate
    from rlx.passes.batching import batch

    for op, loops in ((made, True), (ruled, False)):
        body = Graph("one")
        body.set_outputs(op(body, body.input("x", [3], "f64")))
        g = Graph("all")
        (y,), _ = batch(g, body, [g.input("x", [4, 3], "f64")], [0], 4)
        g.set_outputs(y)
        assert any(n.op.name == "scan" for n in g.nodes) == loops
        same(evaluate(g, {"x": X})[0], X[:, ::-1])


# -- sizes ----------------------------------------------------------------------------------------


def test_batches_of_one_and_none() -> None:
    def f(x: Any) -> Any:
        return rlx.scan(lambda h, v: (h + v, rnp.sort(h) @ W), x, rnp.stack([x, x]))[1]

    for count in (0, 1):
        found = rlx.vmap(f)(X[:count])
        assert found.shape == (count, 2, 3)
        same(found, looped(f, X)[:count])


def test_one_trace_serves_all_batches_of_a_loop() -> None:
    f = rlx.jit(rlx.vmap(lambda x: rlx.fori_loop(0, 3, lambda i, v: rnp.sin(v), x)))
    for n in (2, 3, 9):
        x = rng.normal(size=(n, 5))
        same(f(x), np.sin(np.sin(np.sin(x))))
    assert len(f.variants()) == 1
