"""Jitted functions inside others, as methods, as arguments, in threads; guards and their words."""

from __future__ import annotations

import functools
import threading
from typing import Any

import numpy as np
import pytest

import rlx
import rlx.numpy as rnp

rng = np.random.default_rng(5)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def draw(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


@rlx.jit
def product(x: Any, w: Any) -> Any:
    return rnp.tanh(x @ w) if x.shape[0] > 4 else x @ w


def test_a_jitted_function_inside_another_is_inlined() -> None:
    captured = rnp.asarray(draw(3))

    @rlx.jit(static="times")
    def scaled(x: Any, times: int) -> Any:
        return x * times + captured

    @rlx.jit
    def f(x: Any, w: Any) -> Any:
        return scaled(product(x, w), 3)

    for rows in (3, 4, 6):
        x, w = draw(rows, 3), draw(3, 3)
        y = np.tanh(x @ w) if rows > 4 else x @ w
        np.testing.assert_allclose(np.asarray(f(x, w)), y * 3 + np.asarray(captured), **CLOSE)
    assert len(f.variants()) == 2  # the guard of the inner function
    assert "x_0 > 4" in str(f.variants()[0])
    assert product.variants() == [] and scaled.variants() == []


def test_arguments_of_an_inner_function_are_arrays_and_copies() -> None:
    @rlx.jit
    def inner(x: Any, p: Any) -> Any:
        assert isinstance(p["a"], rlx.Array)
        p["b"] = x
        return x + p["a"]

    def outer(x: Any) -> Any:
        p = {"a": 1.5}
        y = inner(x, p)
        assert list(p) == ["a"]
        return y

    x = draw(3)
    np.testing.assert_allclose(np.asarray(rlx.jit(outer)(x)), x + 1.5, rtol=1e-6)


def test_the_callers_containers_do_not_change() -> None:
    @rlx.jit
    def f(p: Any) -> Any:
        p["c"] = p["a"] * 2
        p["list"].append(p["a"])
        return p

    given = {"a": draw(2), "list": []}
    found = f(given)
    assert sorted(given) == ["a", "list"] and given["list"] == []
    assert sorted(found) == ["a", "c", "list"] and len(found["list"]) == 1


class Model:
    def __init__(self, w: np.ndarray) -> None:
        self.w, self.scale = rnp.asarray(w), 2

    @rlx.jit
    def __call__(self, x: Any) -> Any:
        return x @ self.w * self.scale

    @rlx.jit(static="n")
    def keep(self, x: Any, n: int = 1) -> Any:
        self.kept = x * n
        return x


def test_methods_see_what_their_instance_has_now() -> None:
    x, w = draw(2, 3), draw(3, 3)
    model, other = Model(w), Model(w + 1)
    for n in (2, 5):
        y = draw(n, 3)
        np.testing.assert_allclose(np.asarray(model(y)), y @ w * 2, **CLOSE)
    np.testing.assert_allclose(np.asarray(other(x)), x @ (w + 1) * 2, **CLOSE)
    before = len(Model.__call__.variants())
    assert before == 2  # one for each instance
    model.scale, model.w = 3, rnp.asarray(w * 2)
    np.testing.assert_allclose(np.asarray(model(x)), x @ w * 6, **CLOSE)
    with pytest.raises(rlx.InputError, match=r"self\.kept"):
        model.keep(x, n=2)
    assert not hasattr(model, "kept")


def test_partials_and_functions_as_static_arguments() -> None:
    w = draw(3, 3)
    x = draw(2, 3)
    for f in (functools.partial(product, w=w), rlx.jit(functools.partial(product, w=w))):
        np.testing.assert_allclose(np.asarray(f(x)), x @ w, **CLOSE)
    applied = rlx.jit(lambda f, x: f(x), static="f")
    double = rlx.jit(lambda x: x * 2)
    assert np.array_equal(np.asarray(applied(double, x)), x * 2)
    assert np.array_equal(np.asarray(applied(rnp.exp, x * 0)), x * 0 + 1)


def test_recursion_ends_by_static_arguments_or_is_an_error() -> None:
    @rlx.jit(static="n")
    def factorial(x: Any, n: int) -> Any:
        return x if n == 0 else factorial(x, n - 1) * n

    @rlx.jit
    def endless(x: Any) -> Any:
        return endless(x) + 1

    x = draw(3)
    np.testing.assert_allclose(np.asarray(factorial(x, 4)), x * 24, rtol=1e-6)
    with pytest.raises(rlx.InputError, match="without an end"):
        endless(x)


def test_threads_share_a_function() -> None:
    f = rlx.jit(lambda x: rnp.exp(x) * 2)
    wrong: list[Any] = []

    def work(seed: int) -> None:
        local = np.random.default_rng(seed)
        for _ in range(50):
            x = local.standard_normal(int(local.integers(1, 20))).astype(np.float32)
            if not np.allclose(np.asarray(f(x)), np.exp(x) * 2, rtol=1e-5):
                wrong.append(x)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(f.variants()) == 2  # sizes of 1 have one of their own


def check(f: Any, *calls: tuple[np.ndarray, ...]) -> Any:
    """`f` jitted gives what it gives outside, or an error where that is one."""
    jitted = rlx.jit(f)
    for args in calls:
        try:
            expected = np.asarray(f(*[rnp.asarray(a) for a in args]))
        except (rlx.RlxError, ValueError):
            with pytest.raises(rlx.RlxError):
                jitted(*args)
            continue
        found = np.asarray(jitted(*args))
        assert found.shape == expected.shape and found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, **CLOSE)
    return jitted


@pytest.mark.parametrize(
    ("function", "shapes", "traces"),
    [
        (lambda x: rnp.reshape(x, (-1, 4)) * 1, [[(8,)], [(12,)], [(9,)], [(4,)]], 1),
        (lambda x: rnp.reshape(x, (x.shape[0] // 2, 2)) + 1, [[(8,)], [(12,)], [(9,)]], 1),
        (lambda x: rnp.reshape(x, (x.size,)), [[(4, 3)], [(5, 2)], [(0, 3)], [(1, 3)]], 3),
        (lambda x: rnp.sum(x) / x.shape[0], [[(8,)], [(12,)], [(9,)]], 1),
        (lambda x: x * (x.shape[0] % 3), [[(8,)], [(12,)], [(9,)]], 1),
        (lambda x: x * {3: 1.0, 4: 2.0}.get(x.shape[0], 0.5), [[(3,)], [(4,)], [(5,)]], 3),
        (lambda x: x * 2 if x.shape[0] == 4.0 else x * 3, [[(4,)], [(5,)]], 2),
        (lambda x, y: x[1:] + y, [[(8,), (7,)], [(4,), (3,)], [(2,), (3,)], [(4,), (2,)]], 2),
        (
            lambda x, y, z: rnp.concat([x, y]) + z,
            [[(3,), (4,), (7,)], [(2,), (2,), (4,)], [(2,), (3,), (4,)]],
            1,
        ),
        (
            lambda x, y, z: x + y * z,
            [[(4, 4), (4, 4), (4,)], [(3, 4), (3, 4), (4,)], [(4, 4), (1, 4), (4,)]],
            2,
        ),
        (lambda x, y: x[: min(x.shape[0], y.shape[0])] * 2, [[(4,), (5,)], [(5,), (4,)]], 2),
        (lambda x: x @ x, [[(3, 3)], [(4, 4)], [(3, 4)]], 1),
        (lambda x, y: x[:, None] * y, [[(4,), (4,)], [(3,), (5,)]], 1),
    ],
)
def test_guards_are_sound_and_few(function: Any, shapes: Any, traces: int) -> None:
    jitted = check(function, *[tuple([draw(*s) for s in call]) for call in shapes])
    assert len(jitted.variants()) == traces, "\n".join(map(str, jitted.variants()))


def test_code_that_catches_an_error_is_guarded() -> None:
    def f(x: Any, y: Any) -> Any:
        try:
            return rnp.sum(x @ y)
        except rlx.ShapeError:
            return rnp.sum(x)

    jitted = rlx.jit(f)
    for shapes in (((3, 4), (5, 6)), ((3, 5), (5, 6)), ((2, 4), (4, 4)), ((3, 4), (5, 7))):
        x, y = (draw(*s) for s in shapes)
        expected = (x @ y).sum() if shapes[0][1] == shapes[1][0] else x.sum()
        np.testing.assert_allclose(np.asarray(jitted(x, y)), expected, rtol=1e-4, atol=1e-4)


def test_an_error_of_shapes_shows_the_sizes_and_the_line() -> None:
    def f(x: Any, y: Any) -> Any:
        return x + y

    line = f.__code__.co_firstlineno + 1
    calls: list[int] = []
    counted = rlx.jit(lambda x, y: calls.append(1) or f(x, y))
    with pytest.raises(rlx.ShapeError, match=rf"(?s)5.*4.*test_jit_nested.py:{line}"):
        counted(draw(4), draw(5))
    assert calls == [1]  # it is not tried again


def test_variants_say_why_they_exist() -> None:
    f = rlx.jit(lambda x, y: x + y if x.shape[0] < 9 else x - y)
    for n in (3, 4, 10):
        f(draw(n), draw(n))
    f(draw(3).astype(np.float64), draw(3))
    f(draw(1), draw(1))
    reasons = [v.reason for v in f.variants()]
    assert reasons[0] == "first call"
    assert "guard x_0 < 9" in reasons[1] and "looked at" in reasons[1]
    assert "size of 0, 1" in reasons[2] and "types" in reasons[3]
    assert "equal for add" in f.variants()[0].guards[1]
    assert f.variants()[0].sizes == 2 and f.variants()[0].calls == 2
    f.clear_cache()
    assert f.variants() == []
    assert np.asarray(f(draw(3), draw(3))).shape == (3,)


@pytest.mark.parametrize("stage", ["mir", "lir", "program", "llvm", "asm"])
def test_every_stage_can_be_looked_at(stage: str) -> None:
    f = rlx.jit(lambda x: rnp.exp(x) * 2)
    text = f.inspect(draw(4, 5), stage=stage)
    assert {"mir": "x_0", "lir": "arena", "llvm": "define"}.get(stage, "") in text and text
    with pytest.raises(rlx.OptionError, match="no such stage"):
        f.inspect(draw(4, 5), stage="text")
