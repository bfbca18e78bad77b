"""`vmap` on functions, Jacobians and Hessians."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlx
import rlx.numpy as rnp

rng = np.random.default_rng(5)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # f32 sums of a few terms


def draw(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def close(found: Any, expected: Any) -> None:
    assert np.shape(found) == np.shape(expected)
    np.testing.assert_allclose(np.asarray(found), expected, **CLOSE)


def layer(x: Any, w: Any) -> Any:
    return rnp.tanh(x @ w)


@pytest.mark.parametrize("wrap", [lambda f: f, rlx.jit], ids=["eager", "jit"])
def test_axes_of_arguments_and_results(wrap: Any) -> None:
    x, w = draw(4, 5), draw(5, 3)
    close(wrap(rlx.vmap(layer, in_axes=(0, None)))(x, w), np.tanh(x @ w))
    close(wrap(rlx.vmap(layer, in_axes=(1, None), out_axes=1))(x.T, w), np.tanh(x @ w).T)
    ws = draw(4, 5, 3)
    close(wrap(rlx.vmap(layer))(x, ws), np.tanh(np.einsum("bi,bij->bj", x, ws)))
    twice = rlx.vmap(rlx.vmap(layer, in_axes=(0, None)), in_axes=(None, 0))
    close(wrap(twice)(x, ws), np.tanh(np.einsum("xi,bij->bxj", x, ws)))


def test_trees_and_arguments_by_name() -> None:
    x, b = draw(4, 3), draw(3)

    def f(p: Any, scale: Any) -> Any:
        return {"y": p["x"] * scale + p["b"]}

    scales = np.arange(4, dtype=np.float32)
    found = rlx.vmap(f, in_axes=({"x": 0, "b": None},))({"x": x, "b": b}, scale=scales)
    close(found["y"], x * scales[:, None] + b)
    close(rlx.vmap(lambda: rnp.ones(2), axis_size=3)(), np.ones((3, 2)))


def test_one_trace_serves_all_batches() -> None:
    w = draw(5, 3)
    per_example = rlx.jit(rlx.vmap(rlx.grad(lambda w, x: rnp.sum(layer(x, w))), in_axes=(None, 0)))
    for n in (2, 7, 30):
        x = draw(n, 5)
        slope = 1 - np.tanh(x @ w) ** 2
        close(per_example(w, x), np.einsum("bi,bj->bij", x, slope))
    assert len(per_example.variants()) == 1


def test_jacobians_and_hessians() -> None:
    x, w = draw(3), draw(3, 2)
    slope = 1 - np.tanh(x @ w) ** 2
    for jacobian in (rlx.jacfwd, rlx.jacrev):
        close(jacobian(layer)(x, w), slope[:, None] * w.T)
        by_x, by_w = rlx.jit(jacobian(layer, (0, 1)))(x, w)
        close(by_x, slope[:, None] * w.T)
        close(by_w, np.einsum("j,jk,i->jik", slope, np.eye(2), x))
        tree = jacobian(lambda p: {"s": p["a"] * p["b"]})({"a": 2.0, "b": rnp.asarray(x)})
        close(tree["s"]["a"], x)
        close(tree["s"]["b"], 2 * np.eye(3))
    cubes = rlx.hessian(lambda x: rnp.sum(x**3) + x[0] * x[1])(x)
    expected = np.diag(6 * x)
    expected[0, 1] = expected[1, 0] = 1
    close(cubes, expected)


def test_errors_say_what_was_expected() -> None:
    x, w = draw(4, 5), draw(5, 3)
    with pytest.raises(rlx.ShapeError, match="mapped axes differ in size"):
        rlx.vmap(layer)(x, w)
    with pytest.raises(rlx.ShapeError, match="no such axis to map"):
        rlx.vmap(layer, in_axes=(2, None))(x, w)
    with pytest.raises(rlx.InputError, match="not an axis per argument"):
        rlx.vmap(layer, in_axes=(0,))(x, w)
    with pytest.raises(rlx.InputError, match="nothing is mapped"):
        rlx.vmap(layer, in_axes=None)(x, w)
    with pytest.raises(rlx.ShapeError, match="a result differs between examples"):
        rlx.vmap(layer, in_axes=(0, None), out_axes=None)(x, w)
    with pytest.raises(rlx.InputError, match="the axes do not fit the tree"):
        rlx.vmap(lambda p: p["x"], in_axes=({"y": 0},))({"x": x})
