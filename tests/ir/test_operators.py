"""Operators and indexing of values against NumPy, which is the oracle."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.ir.node import Value

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4) - 7.5
Y = np.float32([[1.5, -2, 3, 4]])
I = np.arange(12, dtype=np.int32).reshape(3, 4) - 5
STAGES = {"hir": rlx.GraphModule.hir, "mir": rlx.GraphModule.mir}


def ran(build: Callable[..., Any], *arrays: np.ndarray, module: Any = None) -> np.ndarray:
    g = module or rlx.GraphModule.mir("test")
    values = [g.input(f"x{i}", a.shape, a.dtype) for i, a in enumerate(arrays)]
    g.set_outputs(build(*values))
    (result,) = rlx.evaluate(g.into_mir(), list(arrays))
    return np.asarray(result)


ARITHMETIC = [
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod,
    operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge,
]  # fmt: skip
BITS = [operator.and_, operator.or_, operator.xor]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("f", ARITHMETIC, ids=lambda f: f.__name__)
def test_binary_operators(f: Callable[[Any, Any], Any], stage: str) -> None:
    new = STAGES[stage]
    for left, right in ((X, Y), (X, X)):
        np.testing.assert_array_equal(ran(f, left, right, module=new("m")), f(left, right))
    two = np.float32(2)
    np.testing.assert_array_equal(ran(lambda x: f(x, 2), X, module=new("m")), f(X, two))
    np.testing.assert_array_equal(ran(lambda x: f(2, x), X, module=new("m")), f(two, X))
    np.testing.assert_array_equal(ran(lambda x: f(Y, x), X, module=new("m")), f(Y, X))
    np.testing.assert_array_equal(ran(lambda x: f(two, x), X, module=new("m")), f(two, X))


@pytest.mark.parametrize("f", BITS, ids=lambda f: f.__name__)
def test_bits_and_flags(f: Callable[[Any, Any], Any]) -> None:
    np.testing.assert_array_equal(ran(f, I, I[:1]), f(I, I[:1]))
    np.testing.assert_array_equal(ran(lambda x: f(6, x), I), f(np.int32(6), I))
    np.testing.assert_array_equal(ran(lambda x: f(x > 0, x < 3), I), f(I > 0, I < 3))


def test_other_operators() -> None:
    np.testing.assert_array_equal(ran(operator.neg, X), -X)
    np.testing.assert_array_equal(ran(abs, X), abs(X))
    np.testing.assert_array_equal(ran(operator.pos, X * 2), X * 2)
    np.testing.assert_array_equal(ran(operator.invert, I), ~I)
    np.testing.assert_array_equal(ran(lambda x: ~(x > 0), I), ~(I > 0))
    np.testing.assert_array_equal(ran(lambda x: x << 1, I), I << 1)
    np.testing.assert_array_equal(ran(lambda x: x >> 1, I), I >> 1)
    np.testing.assert_array_equal(ran(lambda x: 1 << (x & 3), I), 1 << (I & 3))
    np.testing.assert_allclose(ran(lambda x: x**2, X), X**2)
    np.testing.assert_allclose(ran(lambda x: 2**x, X), np.float32(2) ** X)
    np.testing.assert_allclose(ran(lambda x, y: x @ y, X, Y[0]), X @ Y[0])
    np.testing.assert_allclose(ran(lambda x: X[0].T @ x, X), X[0].T @ X)
    np.testing.assert_array_equal(ran(lambda x: x.T, X), X.T)
    np.testing.assert_array_equal(ran(lambda x: x.mT, X), X.swapaxes(1, 2))
    np.testing.assert_array_equal(ran(lambda x: x.swapaxes(0, -1), X), X.swapaxes(0, -1))
    np.testing.assert_array_equal(ran(lambda x: x.transpose(1, 0, 2), X), X.transpose(1, 0, 2))
    np.testing.assert_array_equal(ran(lambda x: x.transpose((2, 0, 1)), X), X.transpose(2, 0, 1))
    np.testing.assert_array_equal(ran(lambda x: x.reshape(4, -1), X), X.reshape(4, -1))
    np.testing.assert_array_equal(ran(lambda x: x.reshape([6, 4]), X), X.reshape(6, 4))
    assert ran(lambda x: x.astype("f16"), X).dtype == np.float16


def test_shapes_are_indexed_like_numpys_and_nodes_know_the_line() -> None:
    g = rlx.GraphModule.hir("shapes")
    x = g.input("x", ["n", 3, 4])
    assert (x.shape[-1], x.shape[:2], [*x.shape], len(x.shape), x.ndim) == (
        4, (rlx.sym("n"), 3), [rlx.sym("n"), 3, 4], 3, 3,
    )  # fmt: skip
    assert x.reshape(-1).reshape(x.shape).shape is x.shape
    assert g.reshape(x.reshape(-1), x.shape).shape is x.shape
    assert x[0, :, :1].expand(*x.shape).shape is x.shape
    for made in (x + 1, x == 0, x[1:], x.T, x.softmax(), x.linear(g.param("w", [4, 2]))):
        assert made.node.origin.file == __file__, made.node


def test_where_of_a_comparison_chooses() -> None:
    found = ran(lambda x: x.graph.where(x == 0, 5, x), I)
    np.testing.assert_array_equal(found, np.where(I == 0, 5, I))


INDICES: list[Any] = [
    0, -1, slice(1, None), slice(None, -1), slice(0, 1), (slice(None), 1), (0, 2, 3), (..., 1),
    (slice(None), ..., slice(1, 3)), None, (None, 1), (slice(1, None), None), (..., None),
    (1, None, ..., None, -2), (slice(None), slice(None, None, 2)),
    (slice(None), slice(None, None, -1)),
    (slice(None), slice(2, 0, -1), slice(0, 4, 3)), (1, slice(None, None, -1)), ..., (),
    [1, 0, 1], (slice(None), [2, 0]), (..., [[0, 3], [-1, 1]]),
    (None, slice(None), np.array([1, 1])),
    (slice(1, 2), [0], slice(1, None)),
]  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_indexing_is_numpys(index: Any) -> None:
    np.testing.assert_array_equal(ran(lambda x: x[index], X), X[index])


def test_a_value_indexes_and_symbolic_axes_count_from_the_end() -> None:
    ids = np.int32([[2, 0], [1, 1]])
    np.testing.assert_array_equal(ran(lambda x, i: x[:, i], X, ids), X[:, ids])
    g = rlx.Graph("symbolic")
    x = g.input("x", ["batch", "seq", 4])
    assert str(x[:, -1].shape) == "[batch, 4] f32"
    assert str(x[:, 1:].shape) == "[batch, seq - 1, 4] f32"
    apart = rlx.Graph("apart").input("x", ["batch", "seq", 4])
    assert str(apart[:, : rlx.sym("past")].shape) == "[batch, past, 4] f32"
    g.set_outputs(x[:, -1], x[1:, :-1, None])
    last, rest = rlx.evaluate(g, [X])
    np.testing.assert_array_equal(last, X[:, -1])
    np.testing.assert_array_equal(rest, X[1:, :-1, None])
    assert x[:] is x and x[...] is x


@pytest.mark.parametrize(
    ("index", "error"),
    [
        ((0, 0, 0, 0), "too many indices"), ((..., ...), "more than one ellipsis"),
        (([0], [1]), "goes with slices"), ((0, [1]), "goes with slices"), ("a", "not an index"),
        (1.0, "not an index"), (True, "not an index"), ([True, False], "not an index"),
        (2, "past the end"), (slice(0, 9), "past the end"),
        (-3, r"got -3 for axis 0 of .*; expected -2 … 1"),
    ],
)  # fmt: skip
def test_wrong_indices_raise(index: Any, error: str) -> None:
    with pytest.raises(rlx.RlxError, match=error):
        ran(lambda x: x[index], X)


def test_a_value_has_no_truth() -> None:
    g = rlx.Graph("truth")
    a, b = g.input("a", [2]), g.input("b", [2])
    for ask in (
        lambda: bool(a), lambda: a and b, lambda: not a, lambda: a == b or b, lambda: b in [a],
        lambda: [a].index(b), lambda: (a,) == (b,), lambda: 1 if a > 0 else 2,
    ):  # fmt: skip
        with pytest.raises(rlx.BoolConversionError, match="not known while its graph is built"):
            ask()
    with pytest.raises(rlx.InputError, match="not a sequence"):
        list(a)  # type: ignore[call-overload]
    with pytest.raises(rlx.InputError, match="does not change"):
        a[0] = 1.0
    with pytest.raises(rlx.InputError, match="no elements until"):
        np.asarray(a)
    with pytest.raises(TypeError):
        np.exp(a)  # type: ignore[call-overload]


def test_identity_is_what_dicts_and_sets_go_by() -> None:
    g = rlx.Graph("keys")
    values = [g.input(f"x{i}", [1]) for i in range(5000)]
    before = len(g)
    table = {v: i for i, v in enumerate(values)}
    assert [table[v] for v in values] == list(range(5000))
    assert len({*values, *values}) == 5000 and {*values} == {*reversed(values)}
    assert values[7] in table and values[7] in values[7:] and values.index(values[0]) == 0
    assert (values[0] == None) is False and (values[0] != "x") is True  # noqa: E711
    assert len(g) == before, "no lookup built a node"
    assert len({hash(v) for v in values}) == 5000
    assert isinstance(values[0] == values[1], Value) and len(g) == before + 1
