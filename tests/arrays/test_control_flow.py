"""Control flow on trees: outside `rlx.jit`, inside it, and the errors of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlx
import rlx.numpy as rnp
from rlx.numpy.tree import flatten

rng = np.random.default_rng(7)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # f32 sums of a few dozen terms in another order


def draw(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def check(f: Callable[..., Any], expected: Any, *args: Any) -> Any:
    """`f` outside and inside `rlx.jit` against what NumPy gives; returns the jitted function."""
    jitted = rlx.jit(f)
    for found in (f(*[rnp.asarray(a) for a in args]), jitted(*args)):
        leaves, structure = flatten(found)
        wanted, expected_structure = flatten(expected)
        assert structure == expected_structure
        for a, b in zip(leaves, wanted, strict=True):
            assert np.asarray(a).shape == np.shape(b)
            np.testing.assert_allclose(np.asarray(a), b, **CLOSE)
    return jitted


def numpy_scan(x: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    carry, sums = np.zeros(len(w), np.float32), []
    for row in x:
        sums.append(carry.sum())
        carry = np.tanh(carry @ w + row)
    return carry, np.array(sums, np.float32)


def test_scan_carries_and_stacks_for_every_length() -> None:
    def f(x: rlx.Array, w: rlx.Array) -> Any:
        return rlx.scan(lambda c, r: (rnp.tanh(c @ w + r), rnp.sum(c)), rnp.zeros(3), x)

    x, w = draw(5, 3), draw(3, 3)
    jitted = check(f, numpy_scan(x, w), x, w)
    for length in (2, 9):
        x = draw(length, 3)
        for a, b in zip(jitted(x, w), numpy_scan(x, w), strict=True):
            np.testing.assert_allclose(np.asarray(a), b, **CLOSE)
    assert len(jitted.variants()) == 1
    assert len(jitted.lower(x, w)) < 20  # not unrolled


def test_scan_in_reverse_keeps_results_at_their_index() -> None:
    x = draw(6)
    before = np.concatenate([np.cumsum(x[::-1])[::-1][1:], [0]])
    check(lambda x: rlx.scan(lambda c, r: (c + r, c), 0.0, x, reverse=True), (x.sum(), before), x)


def test_scan_over_trees_with_a_length_and_without_elements() -> None:
    def f(x: rlx.Array, y: rlx.Array) -> Any:
        return rlx.scan(lambda c, r: (c, {"sum": r[0] + r[1][0]}), None, (x, [y]))

    x, y = draw(4), draw(4)
    check(f, (None, {"sum": x + y}), x, y)
    check(lambda: rlx.scan(lambda c, _: (c * 2, c), 1.0, None, 4), (16.0, np.array([1, 2, 4, 8])))
    empty = np.zeros((0, 3), np.float32)
    check(lambda x: rlx.scan(lambda c, r: (c + 1, r[0]), 1.0, x), (1.0, np.zeros(0)), empty)


def test_cond_runs_one_branch() -> None:
    def f(x: rlx.Array) -> Any:
        scale = rnp.max(x)  # a value from around the branches
        return rlx.cond(
            rnp.sum(x) > 0, lambda y: {"a": y * 2, "n": 1}, lambda y: {"a": y / scale, "n": 2}, x
        )

    x = np.abs(draw(4))
    jitted = check(f, {"a": x * 2, "n": 1}, x)
    check(f, {"a": -x / (-x).max(), "n": 2}, -x)
    assert jitted(-np.abs(draw(7)))["n"] == 2
    assert len(jitted.variants()) == 1


def test_switch_takes_the_nearest_branch() -> None:
    def f(x: rlx.Array, n: rlx.Array) -> Any:
        return rlx.switch(n, [lambda y: y + 1, lambda y: y * 2, lambda y: -y], x)

    x = draw(3)
    for n, expected in ((-3, x + 1), (0, x + 1), (1, x * 2), (2, -x), (9, -x)):
        check(f, expected, x, np.array(n))


def test_while_and_fori_loops() -> None:
    def powers(x: rlx.Array) -> Any:
        return rlx.while_loop(lambda s: s[1] < 5, lambda s: (s[0] * x, s[1] + 1), (x, 0))

    x = draw(4)
    check(powers, (x**6, 5), x)

    def weighted(x: rlx.Array) -> Any:
        return rlx.fori_loop(0, x.shape[0], lambda i, c: c + x[i] * i, rnp.zeros(3))

    jitted = None
    for length in (4, 7):
        x = draw(length, 3)
        expected = (x * np.arange(length)[:, None]).sum(0)
        jitted = jitted or check(weighted, expected, x)
        np.testing.assert_allclose(np.asarray(jitted(x)), expected, **CLOSE)
    assert jitted is not None and len(jitted.variants()) == 1
    counted = rlx.jit(lambda n: rlx.fori_loop(1, n, lambda i, c: c * i, 1))
    assert [int(counted(n)) for n in (0, 1, 5)] == [1, 1, 24]  # the bound is data: one trace
    assert len(counted.variants()) == 1


def test_map_and_loops_inside_each_other() -> None:
    x = draw(3, 4)
    shifted = np.exp(x - x.max(-1, keepdims=True))
    check(lambda x: rlx.map(rnp.softmax, x), shifted / shifted.sum(-1, keepdims=True), x)

    def nested(x: rlx.Array) -> Any:
        def row(c: Any, r: Any) -> Any:
            inner = rlx.scan(lambda a, b: (a + b * c, a), 0.0, r)[0]
            return rlx.cond(c > 1, lambda: c - 1, lambda: c + 1), inner

        return rlx.scan(row, 1.0, x)

    check(nested, (2.0, x.sum(-1) * np.array([1, 2, 1])), x)


def test_a_jitted_function_is_a_body() -> None:
    step = rlx.jit(lambda c, r: (c + r, c * 2))
    x = draw(5)
    check(lambda x: rlx.scan(step, 0.0, x), (x.sum(), 2 * (np.cumsum(x) - x)), x)


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda x: rlx.scan(lambda c, r: (c + 1.5, c), 0, x), rlx.DTypeError, r"f32.*i64"),
        (
            lambda x: rlx.scan(lambda c, r: (rnp.concat([c, c]), c), x, x),
            rlx.ShapeError,
            r"\[6\] f32 after an iteration; expected \[3\] f32 before",
        ),
        (lambda x: rlx.scan(lambda c, r: ((c, c), c), 0, x), rlx.InputError, "changes its tree"),
        (lambda x: rlx.scan(lambda c, r: c, 0, x), rlx.InputError, "returns .carry, y"),
        (lambda x: rlx.scan(lambda c, r: (c, c), 0, None), rlx.InputError, "length="),
        (lambda x: rlx.scan(lambda c, r: (c, c), 0, (x, x[1:])), rlx.ShapeError, "in length"),
        (lambda x: rlx.scan(lambda c, r: (c, "text"), 0, x), rlx.InputError, "not an array"),
        (lambda x: rlx.scan(3, 0, x), rlx.InputError, "not a function"),
    ],
)
def test_errors_are_the_same_outside_and_inside(
    function: Callable[..., Any], error: type[Exception], message: str
) -> None:
    x = draw(3)
    for call in (function, rlx.jit(function)):
        with pytest.raises(error, match=message):
            call(rnp.asarray(x))


def test_errors_of_traced_branches_and_loops() -> None:
    x = draw(3)
    for function, error, message in (
        (lambda x: rlx.cond(x[0] > 0, lambda: x, lambda: x[1:]), rlx.ShapeError, r"\[2\].*\[3\]"),
        (lambda x: rlx.cond(x[0] > 0, lambda: x, lambda: (x,)), rlx.InputError, "different trees"),
        (lambda x: rlx.cond(x > 0, lambda: x, lambda: x), rlx.DTypeError, "one truth value"),
        (
            lambda x: rlx.while_loop(lambda c: c, lambda c: c + 1, 0),
            rlx.DTypeError,
            "one truth value",
        ),
    ):
        with pytest.raises(error, match=message):
            rlx.jit(function)(x)


def test_a_traced_array_that_leaves_its_body_is_an_error() -> None:
    kept: list[Any] = []

    def step(c: Any, r: Any) -> Any:
        kept.append(r)
        return c + r, None

    def f(x: rlx.Array) -> Any:
        rlx.scan(step, 0.0, x)
        return kept[-1] + 1

    with pytest.raises(rlx.InputError, match="after its function returned"):
        rlx.jit(f)(draw(3))
