"""Softmax cross-entropy and its backward, which may overwrite the logits."""

from __future__ import annotations

import numpy as np
import pytest
from differences import cotangent
from run_op import infer, run

from rlx import CompileOptions, Graph, Session
from rlx.errors import DTypeError, ShapeError
from rlx.ir.dtype import i32
from rlx.ir.shape import Shape

RNG = np.random.default_rng(5)


def by_hand(x: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    lse = np.log(np.exp(x).sum(-1))
    return lse - np.take_along_axis(x, labels[..., None], -1)[..., 0], lse


def test_the_loss_of_each_row() -> None:
    x, labels = RNG.standard_normal((2, 3, 7)), RNG.integers(0, 7, (2, 3))
    loss, lse = run("softmax_cross_entropy", x, labels)
    np.testing.assert_allclose([loss, lse], by_hand(x, labels), rtol=1e-12)
    labels[1, 1] = -100
    ignored = run("softmax_cross_entropy", x, labels, ignore_index=-100)
    assert ignored[0][1, 1] == 0
    assert np.array_equal(ignored[1], lse)
    keeps = labels != -100
    assert np.array_equal(ignored[0][keeps], loss[keeps])


def test_large_and_infinite_logits() -> None:
    x = np.array([[1e4, 0, -np.inf], [-np.inf] * 3, [0, np.nan, 1]], np.float32)
    loss, lse = run("softmax_cross_entropy", x, np.zeros(3, np.int64))
    assert (loss[0], lse[0]) == (0, 1e4)
    assert lse[1] == -np.inf
    assert np.isnan(loss[2])


def test_backward_against_central_differences() -> None:
    x, labels = RNG.standard_normal((4, 6)), np.array([0, 5, 3, 3])
    dloss = RNG.standard_normal(4)
    lse = by_hand(x, labels)[1]
    want = cotangent(lambda x: by_hand(x, labels)[0], [x], 0, dloss)
    found = run("softmax_cross_entropy_backward", x, labels, lse, dloss)
    np.testing.assert_allclose(found, want, atol=1e-9)
    found = run("softmax_cross_entropy_backward", x, labels, lse, dloss, ignore_index=3)
    np.testing.assert_allclose(found[:2], want[:2], atol=1e-9)
    assert not found[2:].any()


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(DTypeError, match="labels"):
        infer("softmax_cross_entropy", ["n", 4], ["n"])
    with pytest.raises(ShapeError, match="labels"):
        infer("softmax_cross_entropy", ["n", 4], Shape(["n", 4], i32))
    with pytest.raises(ShapeError, match="lse"):
        infer("softmax_cross_entropy_backward", ["n", 4], Shape(["n"], i32), ["m"], ["n"])
    with pytest.raises(ShapeError, match="classes"):
        infer("softmax_cross_entropy", [], Shape([], i32))


def test_no_second_array_of_the_size_of_the_logits() -> None:
    g = Graph("step")
    x, w = g.input("x", [64, 8]), g.param("w", [8, 5000])
    labels = g.input("labels", [64], "i32")
    logits = g.matmul(x, w)
    loss, lse = g.softmax_cross_entropy(logits, labels)
    dlogits = g.softmax_cross_entropy_backward(logits, labels, lse, g.expand(1 / 64, [64]))
    g.set_outputs(g.sum(loss), g.matmul(g.transpose(x, (1, 0)), dlogits))
    f = Session("cpu").compile(g, CompileOptions(threads=2))
    arrays = RNG.standard_normal((64, 8)), RNG.standard_normal((8, 5000))
    a, b = (v.astype(np.float32) for v in arrays)
    ids = RNG.integers(0, 5000, 64).astype(np.int32)
    f.set_params({"w": b})
    loss, dw = f.run(x=a, labels=ids)
    z = arrays[0] @ arrays[1]
    p = np.exp(z - by_hand(z, ids)[1][:, None])
    p[np.arange(64), ids] -= 1
    np.testing.assert_allclose(loss, by_hand(z, ids)[0].sum(), rtol=1e-4)
    np.testing.assert_allclose(dw, arrays[0].T @ p / 64, atol=1e-5)
    assert f.manifest.arena_size < 1.5 * 64 * 5000 * 4
