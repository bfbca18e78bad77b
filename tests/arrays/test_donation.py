"""Donated arguments: results in their memory where that is safe, right values where it is not."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

import rlx
import rlx.numpy as rnp

rng = np.random.default_rng(11)


def draw(*shape: int) -> rlx.Array:
    """An array that nothing else shares."""
    return rnp.asarray(rng.standard_normal(shape).astype(np.float32)) + 0


def address(x: rlx.Array) -> int:
    return int(x.data.__array_interface__["data"][0])


@rlx.jit(donate="cache")
def write(cache: rlx.Array, at: Any, rows: Any) -> rlx.Array:
    return cache.at[at].set(rows)


def test_an_update_is_in_place_and_allocates_nothing() -> None:
    for rows in (1000, 60_000):  # the second is 15 MB
        cache, at = draw(rows, 64), np.array([3, 5])
        expected, where = np.array(cache), address(cache)
        expected[at] = 1
        write(draw(rows, 64), at, np.ones((2, 64), np.float32))  # compiles for the sizes
        tracemalloc.start()
        cache = write(cache, at, np.ones((2, 64), np.float32))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert address(cache) == where and peak < 100_000
        assert np.array_equal(np.asarray(cache), expected)
    assert len(write.variants()) == 1


def test_a_donated_array_cannot_be_used() -> None:
    cache = draw(8, 4)
    write(cache, np.array([0]), np.zeros((1, 4), np.float32))
    for use in (lambda: cache + 1, lambda: np.asarray(cache), lambda: cache.shape):
        with pytest.raises(rlx.InputError, match="a donated array was used"):
            use()
    assert "donated" in repr(cache)


def test_trees_are_updated_in_place() -> None:
    @rlx.jit(donate=["params", "moments"])
    def step(params: Any, moments: Any, grads: Any) -> Any:
        moments = {k: m * 0.9 + grads[k] * 0.1 for k, m in moments.items()}
        return {k: p - moments[k] * 0.1 for k, p in params.items()}, moments

    def tree() -> dict[str, rlx.Array]:
        return {"w": draw(30, 20), "b": draw(20)}

    params, moments, grads = tree(), tree(), tree()
    start = [{k: np.array(x) for k, x in t.items()} for t in (params, moments, grads)]
    before = [{k: address(x) for k, x in t.items()} for t in (params, moments)]
    found = step(params, moments, grads)
    assert [{k: address(x) for k, x in t.items()} for t in found] == before
    for k in start[0]:
        moment = start[1][k] * np.float32(0.9) + start[2][k] * np.float32(0.1)
        # one rounding more or less where a product and a sum are fused
        np.testing.assert_allclose(np.asarray(found[1][k]), moment, rtol=1e-6, atol=1e-7)
        expected = start[0][k] - moment * np.float32(0.1)
        np.testing.assert_allclose(np.asarray(found[0][k]), expected, rtol=1e-6, atol=1e-7)
    assert np.array_equal(np.asarray(grads["w"]), start[2]["w"])


@pytest.mark.parametrize(
    ("function", "expected", "in_place"),
    [
        (lambda x: x[::-1] + x, lambda x: x[::-1] + x, None),
        (lambda x: rnp.sum(x) + x, lambda x: x.sum() + x, None),
        (lambda x: (x * 2, rnp.sum(x[1:] * 3)), lambda x: (x * 2, (x[1:] * 3).sum()), None),
        (lambda x: (x, x + 1), lambda x: (x, x + 1), None),
        (lambda x: x, lambda x: x, True),
        (lambda x: rnp.sum(x), lambda x: x.sum(), False),  # no result of its shape
        (lambda x: x.at[rnp.asarray([0, 1])].set(x[2:4]), lambda x: _moved(x), False),
    ],
)
def test_values_are_right_whether_or_not_it_is_safe(
    function: Any, expected: Any, in_place: bool | None
) -> None:
    for n in (50, 70_001):  # by one worker, and by all
        x = draw(n)
        start, where = np.array(x), address(x)
        found = rlx.jit(function, donate="x")(x)
        wanted = expected(start)
        if not isinstance(found, tuple):
            found, wanted = (found,), (wanted,)
        for a, b in zip(found, wanted, strict=True):
            # sums of 70,000 numbers in another order
            np.testing.assert_allclose(np.asarray(a), b, rtol=1e-4, atol=1e-2 if n > 50 else 1e-5)
        if in_place is not None:
            assert (address(found[0]) == where) is in_place


def _moved(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x[[0, 1]] = x[2:4]
    return x


def test_memory_that_others_see_is_copied_first() -> None:
    double = rlx.jit(lambda x: x * 2, donate="x")
    x = draw(10)
    start, view = np.array(x), x[2:]
    found = double(x)
    assert np.array_equal(np.asarray(found), start * 2)
    assert np.array_equal(np.asarray(view), start[2:])
    array = np.ones(10, np.float32)  # a user's array, which stays usable
    assert np.array_equal(np.asarray(double(array)), array * 2) and array.sum() == 10
    both = rlx.jit(lambda x, y: x + y * 3, donate=["x", "y"])
    x = draw(10)
    start = np.array(x)
    np.testing.assert_allclose(np.asarray(both(x, x)), start * 4, rtol=1e-6)
    kept = draw(10)
    add = rlx.jit(lambda x: x + kept, donate="x")
    start = np.array(kept)
    np.testing.assert_allclose(np.asarray(add(draw(10) * 0)), start, rtol=1e-6)
    assert np.array_equal(np.asarray(kept), start)


def test_names_of_donated_arguments_are_checked() -> None:
    with pytest.raises(rlx.OptionError, match="donated"):
        rlx.jit(lambda x: x, donate="y")
    with pytest.raises(rlx.OptionError, match="donated"):
        rlx.jit(lambda x: x, static="x", donate="x")


def test_other_devices_give_the_same_values() -> None:
    x = draw(6)
    start = np.array(x)
    found = rlx.jit(lambda x: x * 2 + 1, donate="x", device="reference")(x)
    np.testing.assert_allclose(np.asarray(found), start * 2 + 1, rtol=1e-6)
