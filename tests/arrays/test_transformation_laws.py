"""Laws of `grad`, `vjp`, `jvp`, `vmap`, `jit` and `checkpoint`, on functions drawn at random.

A function is a chain of steps from matrices [n, m] to matrices of that shape; n and m may be 0. All
of it runs in f64 on the reference device: two ways to one number differ by some hundred roundings,
each of 1e-16 of the largest element.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rlx
import rlx.numpy as rnp
from rlx.nn import functional as F

Function = Callable[[Any], Any]
EXACT = 1e-10


@rlx.custom_jvp
def softplus(x: Any) -> Any:
    return rnp.logaddexp(x, 0.0)


@softplus.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return softplus(primals[0]), tangents[0] * F.sigmoid(primals[0])


def rows_in_turn(x: Any) -> Any:
    def step(carry: Any, row: Any) -> Any:
        carry = rnp.tanh(0.5 * carry + row)
        return carry, carry * row

    return rlx.scan(step, rnp.zeros(x.shape[1], dtype="f8"), x)[1]


def mixed(x: Any) -> Any:
    """A square matrix of numbers that depend on the size alone, from the right."""
    m = x.shape[1]
    at = rnp.arange(m, dtype="f8")
    return x @ rnp.cos(at[:, None] + 2 * at)


def shifted(x: Any) -> Any:
    wide = rnp.concat([x, x * 2, x], axis=0)
    return wide[x.shape[0] : 2 * x.shape[0]] - wide[: x.shape[0]] * 0.3


STEPS: dict[str, Function] = {
    "sin": rnp.sin,
    "square": lambda x: x * x,
    "softmax": lambda x: F.softmax(x, axis=-1),
    "norm": lambda x: F.layer_norm(x, rnp.ones(x.shape[1], dtype="f8")) if x.shape[1] else x,
    "cumsum": lambda x: rnp.cumulative_sum(x, axis=0) * 0.3,
    "matmul": mixed,
    "gram": lambda x: x @ (rnp.matrix_transpose(x) @ x) * 0.1,
    "slices": shifted,
    "broadcast": lambda x: x + rnp.sum(x, axis=0) * rnp.sum(x, axis=1, keepdims=True) * 0.1,
    "where": lambda x: rnp.where(x > 0.2, x * x, 0.3 * x),
    "sort": lambda x: rnp.sort(x, axis=0) * x,
    "flip": lambda x: rnp.flip(x, axis=1) * x,
    "scan": rows_in_turn,
    "fori_loop": lambda x: rlx.fori_loop(0, 3, lambda i, y: rnp.sin(y + i), x),
    "cond": lambda x: rlx.cond(rnp.sum(x) > 0, lambda y: y * y, lambda y: 2 * y, x),
    "custom_jvp": softplus,
    "checkpoint": rlx.checkpoint(lambda x: rnp.tanh(x) * x),
    "jit": rlx.jit(lambda x: rnp.exp(-x * x)),
}


@st.composite
def functions(draw: Any, most: int = 4) -> Function:
    names = draw(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=most))

    def function(x: Any) -> Any:
        return reduce(lambda y, name: STEPS[name](y), names, x)

    function.__name__ = " ".join(names)
    return function


def total(f: Function) -> Function:
    return lambda x: rnp.sum(f(x))


def close(found: Any, expected: Any) -> None:
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype == np.float64
    size = 1 + np.max(np.abs(expected), initial=0.0)
    np.testing.assert_allclose(found, expected, rtol=0, atol=EXACT * size)


DIMS = st.tuples(st.integers(0, 3), st.integers(0, 3))


def normal(seed: int, count: int, dims: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, *dims))


# -- the laws: of a function, a point, and two directions ------------------------------------------


def jvp_is_linear(f: Function, x: Any, s: Any, t: Any) -> None:
    y, ds = rlx.jvp(f, (x,), (s,))
    _, dt = rlx.jvp(f, (x,), (t,))
    _, both = rlx.jvp(f, (x,), (2.0 * s - 3.0 * t,))
    close(y, f(rnp.asarray(x)))
    close(both, 2.0 * np.asarray(ds) - 3.0 * np.asarray(dt))


def vjp_is_the_transpose_of_jvp(f: Function, x: Any, s: Any, t: Any) -> None:
    _, pullback = rlx.vjp(f, x)
    moved = rlx.jvp(f, (x,), (t,))[1]
    close(np.sum(np.asarray(pullback(s)[0]) * t), np.sum(s * np.asarray(moved)))


def jvp_is_the_difference(f: Function, x: Any, s: Any, t: Any) -> None:
    """Of order 4, with a step of 1e-3: kinks of `where`, `sort` and `cond` are too rare to meet."""
    h = 1e-3

    def at(k: int) -> np.ndarray:
        return np.asarray(f(rnp.asarray(x + k * h * t)))

    expected = (8 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12 * h)
    found = np.asarray(rlx.jvp(f, (x,), (t,))[1])
    size = 1 + np.max(np.abs(expected), initial=0.0)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * size**2)


def grad_and_vmap_commute(f: Function, x: Any, s: Any, t: Any) -> None:
    batch = np.stack([x, s, t])
    each = rlx.vmap(rlx.grad(total(f)))(batch)
    close(each, rlx.grad(total(rlx.vmap(f)))(batch))
    close(each, np.stack([np.asarray(rlx.grad(total(f))(row)) for row in batch]))


def jvp_and_vmap_commute(f: Function, x: Any, s: Any, t: Any) -> None:
    xs, ts = np.stack([x, s], axis=-1), np.stack([t, x], axis=-1)
    outer = rlx.vmap(f, in_axes=2, out_axes=1)
    found = rlx.jvp(outer, (xs,), (ts,))[1]
    inner = rlx.vmap(lambda x, t: rlx.jvp(f, (x,), (t,))[1], in_axes=-1, out_axes=1)(xs, ts)
    close(found, inner)
    close(np.asarray(inner)[:, 1], rlx.jvp(f, (s,), (x,))[1])


def jit_changes_nothing(f: Function, x: Any, s: Any, t: Any) -> None:
    def gradient(x: Any) -> Any:
        return rlx.grad(total(f))(x)

    def tangent(x: Any) -> Any:
        return rlx.jvp(f, (x,), (t,))[1]

    for transformed in (gradient, tangent, rlx.jacrev(f)):
        close(rlx.jit(transformed)(x), transformed(x))
    close(rlx.grad(total(rlx.jit(f)))(x), gradient(x))
    close(rlx.jit(rlx.vmap(rlx.jit(gradient)))(np.stack([x, s]))[1], gradient(s))


def both_jacobians_are_equal(f: Function, x: Any, s: Any, t: Any) -> None:
    found = rlx.jacfwd(f)(x)
    assert found.shape == (*x.shape, *x.shape)
    close(found, rlx.jacrev(f)(x))
    close(np.einsum("ijkl,kl->ij", np.asarray(found), t), rlx.jvp(f, (x,), (t,))[1])


def hessian_is_symmetric(f: Function, x: Any, s: Any, t: Any) -> None:
    found = np.asarray(rlx.hessian(total(f))(x))
    close(found, found.transpose(2, 3, 0, 1))
    close(rlx.hvp(total(f), (x,), (t,)), np.einsum("ijkl,kl->ij", found, t))
    close(rlx.grad(lambda x: rnp.sum(rlx.grad(total(f))(x) * t))(x), np.einsum("ijkl,ij", found, t))


def checkpoint_gives_the_same_bits(f: Function, x: Any, s: Any, t: Any) -> None:
    expected = np.asarray(rlx.grad(total(f))(x))
    for policy in ("nothing", "matmuls"):
        again = rlx.grad(total(rlx.checkpoint(f, policy=policy)))(x)
        assert np.array_equal(np.asarray(again), expected)


LAWS = [
    jvp_is_linear, vjp_is_the_transpose_of_jvp, jvp_is_the_difference, grad_and_vmap_commute,
    jvp_and_vmap_commute, jit_changes_nothing, both_jacobians_are_equal, hessian_is_symmetric,
    checkpoint_gives_the_same_bits,
]  # fmt: skip


def examples(count: int) -> Any:
    return settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))


COUNTS = [8, pytest.param(150, marks=pytest.mark.nightly)]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_law(law: Callable[..., None], count: int) -> None:
    @examples(count)
    @given(functions(), DIMS, st.integers(0, 2**32 - 1))
    def holds(f: Function, dims: tuple[int, int], seed: int) -> None:
        with rlx.default_device("reference"):
            law(f, *normal(seed, 3, dims))

    holds()


# -- any order -------------------------------------------------------------------------------------


class Mapped:
    """A transformation that maps a function over one more axis in front: by `vmap`, or a loop."""

    @staticmethod
    def fast(f: Function) -> Function:
        return rlx.vmap(f)

    @staticmethod
    def slow(f: Function) -> Function:
        def looped(x: Any) -> Any:
            return rnp.stack([f(x[i]) for i in range(2)])

        return looped


TRANSFORMS: dict[str, Function] = {
    "grad": lambda f: rlx.grad(total(f)),
    "jvp": lambda f: lambda x: rlx.jvp(f, (x,), (rnp.cos(rlx.stop_gradient(x)),))[1],
    "vjp": lambda f: lambda x: rlx.vjp(f, x)[1](rnp.sin(rlx.stop_gradient(x)))[0],
    "value": lambda f: lambda x: rlx.value_and_grad(total(f))(x)[1] * x,
}
SAME: dict[str, Function] = {
    "jit": rlx.jit,
    "checkpoint": rlx.checkpoint,
    "checkpoint of matmuls": lambda f: rlx.checkpoint(f, policy="matmuls"),
    "nothing": lambda f: f,
}


@pytest.mark.parametrize("count", [12, pytest.param(200, marks=pytest.mark.nightly)])
def test_any_order_of_transformations(count: int) -> None:
    """With `jit` and `checkpoint` between them, and loops in place of `vmap`."""
    transforms = st.lists(st.sampled_from([*TRANSFORMS, "vmap"]), min_size=1, max_size=3)
    wraps = st.lists(st.sampled_from(sorted(SAME)), min_size=4, max_size=4)

    @examples(count)
    @given(functions(2), transforms, wraps, DIMS, st.integers(0, 2**32 - 1))
    def holds(
        f: Function, names: list[str], between: list[str], dims: tuple[int, int], seed: int
    ) -> None:
        fast, slow = SAME[between[0]](f), f
        for name, wrap in zip(names, between[1:], strict=False):
            if name == "vmap":
                fast, slow = SAME[wrap](Mapped.fast(fast)), Mapped.slow(slow)
            else:
                fast, slow = SAME[wrap](TRANSFORMS[name](fast)), TRANSFORMS[name](slow)
        (x,) = normal(seed, 1, ((2,) * names.count("vmap")) + dims)
        with rlx.default_device("reference"):
            close(fast(rnp.asarray(x)), slow(rnp.asarray(x)))

    holds()
