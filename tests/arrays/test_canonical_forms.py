"""Eager ops on operands of any layout: what kernels read, and how few kernels there are."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx.numpy as rnp
from rlx import ShapeError
from rlx.llvm.jit import counters
from rlx.numpy import canonical, dispatch


@pytest.fixture(params=["small", "large"])
def limits(request, monkeypatch):
    """Arrays of a few elements go the way of large ones too."""
    if request.param == "large":
        monkeypatch.setattr(canonical, "SMALL", 1)
        monkeypatch.setattr(canonical, "_FIXED_INNER", 3)
    monkeypatch.setattr(dispatch, "_calls", {})
    monkeypatch.setattr(dispatch, "_compiled", {})


def layout(data, rng, kind):
    """The same elements in another layout."""
    order = rng.permutation(data.ndim)
    moved = np.empty([data.shape[a] for a in order], data.dtype).transpose(np.argsort(order))
    if kind == "permuted":
        moved[...] = data
    elif kind == "sliced":
        wide = np.empty([2 * n + 1 for n in data.shape], data.dtype)
        moved = wide[(*[slice(1, 2 * n + 1, 2) for n in data.shape], ...)]
        moved[...] = data
    elif kind == "reversed":
        moved = np.flip(np.flip(data).copy())
    elif kind == "frozen":
        moved = data.copy()
        moved.flags.writeable = False
    else:
        moved = data
    return moved


KINDS = ("plain", "permuted", "sliced", "reversed", "frozen")


def operand(rng, shape, kind):
    """Whole numbers as f32: sums and products of a few are exact."""
    return layout(rng.integers(-8, 9, shape).astype(np.float32), rng, kind)


def test_small_arrays_ask_for_little_memory():
    """Memory is planned for the bounds: those of three axes are not all the longest there is."""
    few = set()
    for shape in np.ndindex(4, 4, 4):
        sizes = [(1, 2, 33, 500)[i] for i in shape]
        if np.prod(sizes) <= canonical.SMALL:
            bounds = canonical.along(np.zeros(sizes, np.float32), 1, 1).bounds()
            few.add(bounds)
            assert all(n <= b for n, b in zip(sizes, bounds, strict=False) if len(bounds) == 3)
            assert np.prod(bounds) <= 1 << 20
    assert len(few) <= 6


@pytest.mark.usefixtures("limits")
def test_operands_of_any_layout_broadcast():
    rng = np.random.default_rng(0)

    for _ in range(250):
        shape = rng.integers(1, 6, rng.integers(0, 5))
        shapes = [
            [1 if rng.random() < 0.3 else n for n in shape[rng.integers(0, len(shape) + 1) :]]
            for _ in range(3)
        ]
        a, b, c = (operand(rng, s, rng.choice(KINDS)) for s in shapes)
        expected = np.where(a > 0, b, c) - a * b
        found = rnp.where(rnp.asarray(a) > 0, b, c) - rnp.asarray(a) * b
        np.testing.assert_array_equal(np.asarray(found), expected, f"{shapes}")
        assert found.shape == expected.shape


@pytest.mark.usefixtures("limits")
def test_any_axes_of_any_layout_are_reduced():
    rng = np.random.default_rng(1)

    for _ in range(250):
        shape = rng.integers(1, 6, rng.integers(1, 5))
        x = operand(rng, shape, rng.choice(KINDS))
        axes = tuple(int(a) for a in rng.permutation(x.ndim)[: rng.integers(1, x.ndim + 1)])
        keepdims = bool(rng.integers(0, 2))
        made = rnp.asarray(x)
        for ours, theirs in ((rnp.sum, np.sum), (rnp.max, np.max), (rnp.any, np.any)):
            found, expected = ours(made, axis=axes, keepdims=keepdims), None
            expected = theirs(x, axis=axes, keepdims=keepdims)
            np.testing.assert_array_equal(np.asarray(found), expected, f"{shape} {axes}")
        found = rnp.argmax(made, axis=axes[0], keepdims=keepdims)
        expected = np.argmax(x, axes[0], keepdims=keepdims)
        np.testing.assert_array_equal(np.asarray(found), expected)
        # the variance of whole numbers up to 8: at most 64, rounded a few times
        found, expected = rnp.var(made, axis=axes), np.var(x.astype(np.float64), axis=axes)
        np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("limits")
def test_along_any_axis_of_any_layout():
    rng = np.random.default_rng(4)

    for _ in range(100):
        shape = rng.integers(1, 6, rng.integers(1, 5))
        x = operand(rng, shape, rng.choice(KINDS))
        made, axis = rnp.asarray(x), int(rng.integers(-x.ndim, x.ndim))
        found = rnp.cumulative_sum(made, axis=axis)
        np.testing.assert_array_equal(np.asarray(found), np.cumsum(x, axis), f"{shape} {axis}")
        found = rnp.cumulative_prod(made, axis=axis, include_initial=True)
        first = np.ones([1 if a == axis % x.ndim else n for a, n in enumerate(shape)])
        expected = np.concatenate([first, np.cumprod(x, axis)], axis)
        np.testing.assert_array_equal(np.asarray(found), expected, f"{shape} {axis}")
        e = np.exp(x.astype(np.float64))
        expected = e / e.sum(axis, keepdims=True)
        # an exponential, a sum of at most 5 and a division in f32: some ulp of at most 1
        np.testing.assert_allclose(np.asarray(rnp.softmax(made, axis)), expected, atol=1e-6)
        found = rnp.log_softmax(made, axis)
        # logarithms of at most 17 in size
        np.testing.assert_allclose(np.asarray(found), np.log(expected), atol=1e-5)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_sizes_of_zero(data):
    shape = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    axes = tuple(data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1)))
    x = np.ones(shape, np.float32)
    made = rnp.asarray(x)

    np.testing.assert_array_equal(np.asarray(made * 2 + made), x * 3)
    for ours, theirs in ((rnp.sum, np.sum), (rnp.prod, np.prod), (rnp.all, np.all)):
        found, expected = np.asarray(ours(made, axis=axes)), theirs(x, axis=axes)
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == expected.dtype


def test_large_arrays_of_many_layouts():
    rng = np.random.default_rng(2)
    wide = operand(rng, (300, 70, 11), "plain")

    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        a, b = wide.transpose(order), operand(rng, wide.shape, "plain").transpose(order)
        row = operand(rng, a.shape[-1:], "plain")
        made = rnp.asarray(a)
        np.testing.assert_array_equal(np.asarray(made * b + row), a * b + row)
        for axis in (0, 1, 2, (0, 2), (0, 1, 2)):
            # sums of at most 231,000 whole numbers up to 8 are below 2^24: exact
            found = np.asarray(rnp.sum(made, axis=axis))
            np.testing.assert_array_equal(found, a.sum(axis=axis), f"{order} {axis}")


def test_results_have_the_layout_of_their_operands():
    x = np.ones((200, 100), np.float32).T

    assert (rnp.asarray(x) + 1).data.strides == x.strides


def test_shapes_share_kernels():
    def compute(shape):
        x = rnp.asarray(np.ones(shape, np.float32))
        y = rnp.exp2(x) * 3 - x * rnp.asarray(np.ones(shape[-1:], np.float32))
        return rnp.sum(y, axis=-1), rnp.max(y)

    compute((3, 4))
    compute((1, 1))  # nothing broadcasts

    before = counters.compilations + counters.disk_hits
    for shape in ((3, 5), (4, 4), (2, 3, 4), (7,), (1, 9), (5, 1), (2, 2, 2, 2), (31, 33)):
        compute(shape)
    assert counters.compilations + counters.disk_hits == before

    large = [(3000, 500), (500, 500), (7, 300, 700)]
    compute(large[0])
    before = counters.compilations + counters.disk_hits
    for shape in large[1:]:
        compute(shape)
    assert counters.compilations + counters.disk_hits == before


def test_sizes_along_an_axis_share_kernels():
    def compute(shape, axis):
        x = rnp.asarray(np.ones(shape, np.float32))
        y = rnp.softmax(x, axis)
        # a row of n ones: each is 1 / n, and the n-th sum is 1, but for rounding
        last = np.asarray(rnp.cumulative_sum(y, axis=axis)).take(-1, axis)
        np.testing.assert_allclose(last, 1, rtol=1e-5)

    known = [((3, 50), -1), ((50, 3), 0), ((5,), 0), ((3000, 500), 1), ((300, 700), 0)]
    for shape, axis in known:
        compute(shape, axis)
    before = counters.compilations + counters.disk_hits
    for shape, axis in [((3, 51), 1), ((2, 4, 9), 2), ((51, 3), 0), ((1, 7, 5), 1), ((9,), 0)]:
        compute(shape, axis)
    for shape, axis in [((2500, 400), 1), ((3, 1000, 410), 2), ((290, 600), 0)]:
        compute(shape, axis)
    assert counters.compilations + counters.disk_hits == before


def test_threads_may_compile_the_same_op():
    failed = []

    def work():
        try:
            x = np.arange(2.0, 9.0, dtype=np.float32)
            np.testing.assert_array_equal(np.asarray(rnp.hypot(x, 0 * x)), x)
        except AssertionError as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_shapes_that_do_not_broadcast():
    with pytest.raises(ShapeError, match="do not broadcast"):
        rnp.asarray([1.0, 2.0]) + rnp.asarray([1.0, 2.0, 3.0])
