"""`rlx.jit`: one trace for all sizes, guards, trees, static arguments, errors."""

from __future__ import annotations

import random
from dataclasses import dataclass
from operator import eq, ge, gt, le, lt
from typing import Any

import numpy as np
import pytest

import rlx
import rlx.numpy as rnp
from rlx.ir.dim import evaluate, sym
from rlx.numpy.unify import decided

rng = np.random.default_rng(0)


def draw(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def test_one_trace_serves_all_sizes() -> None:
    calls = []

    @rlx.jit
    def f(x: rlx.Array, w: rlx.Array) -> rlx.Array:
        calls.append(1)
        return rnp.tanh(x @ w) + rnp.sum(x, axis=-1, keepdims=True)

    for rows, inner, columns in ((2, 3, 4), (5, 3, 4), (7, 8, 9), (3, 3, 3)):
        x, w = draw(rows, inner), draw(inner, columns)
        expected = np.tanh(x @ w) + x.sum(-1, keepdims=True)
        np.testing.assert_allclose(np.asarray(f(x, w)), expected, rtol=1e-5, atol=1e-5)
    assert len(f.variants()) == 1
    assert len(calls) == 1  # `x @ w` makes two sizes one symbol while it is traced


def test_sizes_that_are_not_proven_equal_are_checked() -> None:
    f = rlx.jit(lambda x, y: x + y)
    assert f(draw(4), draw(4)).shape == (4,)
    assert f(draw(6), draw(6)).shape == (6,)
    assert len(f.variants()) == 1
    assert f(draw(4), draw(1)).shape == (4,)  # broadcasts: another trace
    assert len(f.variants()) == 2
    with pytest.raises(rlx.ShapeError):
        f(draw(4), draw(5))


def test_a_batch_beside_sizes_that_cannot_be_solved_stays_symbolic() -> None:
    """Halves of a size, rounded up and down, are added to the size itself as in a U-net."""

    @rlx.jit
    def f(x: rlx.Array) -> rlx.Array:
        return x + rnp.concat((x[:, ::2], x[:, 1::2]), axis=1)

    for rows in (2, 5, 1, 9):
        x = draw(rows, 7)
        np.testing.assert_array_equal(f(x), x + np.concatenate((x[:, ::2], x[:, 1::2]), axis=1))
    assert len(f.variants()) == 2  # one row is a number in any trace
    x = draw(3, 10)
    np.testing.assert_array_equal(f(x), x + np.concatenate((x[:, ::2], x[:, 1::2]), axis=1))
    assert len(f.variants()) == 3


def test_sizes_that_happen_to_be_equal_are_not_assumed_so() -> None:
    f = rlx.jit(lambda x, y: (rnp.sum(x), rnp.sum(y)))
    f(draw(4), draw(4))
    f(draw(4), draw(9))
    assert len(f.variants()) == 1


def test_what_holds_for_all_sizes_is_no_guard() -> None:
    """A comparison is left out only where every small size gives the same answer."""
    compare = {"==": eq, "<": lt, "<=": le, ">": gt, ">=": ge}
    x, y = sym("x_0"), sym("y_0")
    pairs = [{"x_0": a, "y_0": b} for a in range(2, 14) for b in range(2, 14)]
    numbers, left_out = random.Random(0), 0
    for _ in range(300):
        difference: Any = numbers.randint(-3, 3)
        for _ in range(numbers.randint(1, 3)):
            quotient = (y * numbers.randint(1, 3) + x + numbers.randint(-2, 3)) // 3
            term = numbers.choice([x, y, x * y, quotient, x // 2, (x // 2 + y) // 5])
            difference = term * numbers.choice([-3, -2, -1, 1, 2, 3]) + difference
        values = {evaluate(difference, sizes) for sizes in pairs}
        for comparison, function in compare.items():
            if decided(difference, comparison):
                assert len({function(v, 0) for v in values}) == 1, f"{difference} {comparison} 0"
                left_out += 1
    assert left_out > 100

    halves = rlx.jit(lambda x: x[: x.shape[0] // 2] + x[-(x.shape[0] // 2) :])
    given = draw(9)
    np.testing.assert_array_equal(np.asarray(halves(given)), given[:4] + given[-4:])
    assert halves.variants()[0].guards == ()


def test_a_size_that_python_looks_at_becomes_a_guard() -> None:
    @rlx.jit
    def f(x: rlx.Array) -> rlx.Array:
        return x * 2 if x.shape[0] > 4 else x * 3

    for n in (3, 5, 2, 9):
        x = draw(n)
        assert np.array_equal(np.asarray(f(x)), x * (2 if n > 4 else 3))
    assert [v.calls for v in f.variants()] == [2, 2]
    assert "x_0 > 4" in str(f.variants()[1])


def test_a_loop_over_a_size_is_traced_for_each() -> None:
    @rlx.jit
    def f(x: rlx.Array) -> rlx.Array:
        total = x[0]
        for i in range(1, x.shape[0]):
            total = total + x[i]
        return total

    for n in (2, 3, 3):
        x = draw(n, 4)
        np.testing.assert_allclose(np.asarray(f(x)), x.sum(0), rtol=1e-5, atol=1e-6)
    assert len(f.variants()) == 2


def test_sizes_can_be_results_and_shapes() -> None:
    @rlx.jit
    def f(x: rlx.Array) -> Any:
        n, m = x.shape
        return rnp.reshape(x, (n * m,)), n * m + 1

    for shape in ((2, 3), (4, 5)):
        flat, count = f(draw(*shape))
        assert flat.shape == (shape[0] * shape[1],) and count == shape[0] * shape[1] + 1
    assert len(f.variants()) == 1


@dataclass
class Pair:
    a: Any
    b: Any


def test_arguments_and_results_are_trees() -> None:
    @rlx.jit
    def f(params: dict[str, Any], xs: list[Any]) -> Pair:
        return Pair(params["w"] * xs[0], {"none": None, "both": (xs[0] + xs[1], "text")})

    x, y, w = draw(3), draw(3), draw(3)
    got = f({"w": w}, [x, y])
    assert isinstance(got, Pair) and got.b["none"] is None and got.b["both"][1] == "text"
    assert np.array_equal(np.asarray(got.a), w * x)
    assert np.array_equal(np.asarray(got.b["both"][0]), x + y)
    assert np.array_equal(np.asarray(f(xs=[x, y], params={"w": w}).a), w * x)


def test_static_arguments_are_values() -> None:
    @rlx.jit(static=["power", "name"])
    def f(x: rlx.Array, power: int, name: str = "a") -> rlx.Array:
        for _ in range(power - 1):
            x = x * x
        return x + 1 if name == "b" else x

    x = draw(4)
    assert np.array_equal(np.asarray(f(x, 2)), x * x)
    assert np.array_equal(np.asarray(f(x, power=2, name="b")), x * x + 1)
    assert len(f.variants()) == 2
    with pytest.raises(rlx.InputError, match="hashable"):
        f(x, [2])
    with pytest.raises(rlx.OptionError, match="no such argument"):
        rlx.jit(lambda x: x, static=["y"])


def test_arrays_from_outside_are_captured_not_copied() -> None:
    w = rnp.asarray(draw(4))
    f = rlx.jit(lambda x: x * w + 1.5)
    x = draw(3, 4)
    np.testing.assert_allclose(np.asarray(f(x)), x * np.asarray(w) + 1.5, rtol=1e-6)
    f(draw(5, 4))
    assert len(f.variants()) == 1
    with pytest.raises(rlx.ShapeError):
        f(draw(3, 5))


def test_results_that_are_arguments_or_numbers() -> None:
    f = rlx.jit(lambda x: (x, 3, x[:, 0]))
    x = draw(2, 3)
    same, three, column = f(x)
    assert np.array_equal(np.asarray(same), x) and three == 3
    assert np.array_equal(np.asarray(column), x[:, 0])
    assert rlx.jit(lambda x: 7)(x) == 7


def test_fixed_sizes_are_constants() -> None:
    f = rlx.jit(lambda x: x + 1, fixed=["x"])
    f(draw(3))
    f(draw(4))
    assert len(f.variants()) == 2
    assert "[3]" in f.variants()[0].arguments[0]


def test_truth_of_a_traced_array_is_an_error() -> None:
    with pytest.raises(rlx.BoolConversionError, match="not known"):
        rlx.jit(lambda x: x if x[0] > 0 else -x)(draw(3))


def test_leaked_tracers_are_errors() -> None:
    kept = []

    @rlx.jit
    def f(x: rlx.Array) -> rlx.Array:
        kept.append(x)
        return x + 1

    f(draw(3))
    with pytest.raises(rlx.InputError, match="after its function returned"):
        kept[0] + 1
    with pytest.raises(rlx.InputError, match="not an array"):
        f("text")


def test_looking_inside() -> None:
    f = rlx.jit(lambda x: rnp.exp(x) * 2)
    x = draw(4, 5)
    assert "exp" in f.inspect(x) and "x_0" in f.inspect(x)
    assert len(f.lower(x)) > 1
    assert str(f.profile(x))


def test_the_reference_device_gives_the_same() -> None:
    def f(x: rlx.Array) -> rlx.Array:
        return rnp.softmax(x * 2, axis=-1)

    x = draw(3, 5)
    ours, oracle = rlx.jit(f)(x), rlx.jit(f, device="reference")(x)
    np.testing.assert_allclose(np.asarray(ours), np.asarray(oracle), rtol=1e-5)


def test_calls_that_look_alike_are_told_apart() -> None:
    """The short way to a trace finds what the long way found, whatever the order of a dict."""
    f = rlx.jit(lambda p, q=None: p["a"] * 2 - p["b"] if q is None else p["a"] * q)
    a, b = draw(3), draw(3)
    for _ in range(3):
        for p in ({"a": a, "b": b}, {"b": b, "a": a}):
            assert np.array_equal(np.asarray(f(p)), a * 2 - b)
            assert np.array_equal(np.asarray(f(p=p)), a * 2 - b)
            assert np.array_equal(np.asarray(f(p, 3.0)), a * 3)
            assert np.array_equal(np.asarray(f(p, q=b)), a * b)
        assert np.array_equal(np.asarray(f({"a": a, "b": a})), a * 2 - a)
    same = rlx.jit(lambda xs, n: [x * n for x in xs], static="n")
    for _ in range(2):
        for n in (1, 2, 1.5, True, -0.0, 0.0):
            found = np.asarray(same((a, b), n)[1])
            assert found.tobytes() == (b * np.float32(n)).tobytes()
            assert len(same([a], n)) == 1 and len(same([a, b, a], n)) == 3
    big = a.astype(a.dtype.newbyteorder())
    for _ in range(2):
        assert np.array_equal(np.asarray(f({"a": big, "b": b})), a * 2 - b)
