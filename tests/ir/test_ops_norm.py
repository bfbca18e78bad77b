"""Norms against their definitions, row by row in Python floats."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from run_op import cost, infer, run

from rlx.errors import AttributeValueError, DTypeError, ShapeError
from rlx.ir.dtype import f16, i32
from rlx.ir.shape import Shape

rng = np.random.default_rng(13)


def normal(*dims, dtype=np.float64):
    return rng.standard_normal(dims).astype(dtype)


def layer_norm_row(row, eps):
    mean = math.fsum(row) / len(row)
    variance = math.fsum((v - mean) ** 2 for v in row) / len(row)
    return [(v - mean) / math.sqrt(variance + eps) for v in row]


def rms_norm_row(row, eps):
    return [v / math.sqrt(math.fsum(u * u for u in row) / len(row) + eps) for v in row]


ROWS = {"layer_norm": (layer_norm_row, 1e-5), "rms_norm": (rms_norm_row, 1e-6)}


@pytest.mark.parametrize("name", list(ROWS))
@pytest.mark.parametrize("has_beta", [False, True])
@pytest.mark.parametrize("eps", [None, 0.1])
def test_norms_over_the_last_axis(name, has_beta, eps):
    row_norm, default = ROWS[name]
    x, gamma, beta = normal(2, 3, 7) + 0.5, normal(7), normal(7)
    operands = (x, gamma, beta) if has_beta else (x, gamma)
    found = run(name, *operands, **({} if eps is None else {"eps": eps}))
    for at in np.ndindex(2, 3):
        expected = np.array(row_norm(x[at].tolist(), eps or default)) * gamma
        expected = expected + beta if has_beta else expected
        np.testing.assert_allclose(found[at], expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("name", list(ROWS))
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_narrow_types_are_computed_in_f32_and_rounded_once(name, dtype):
    # squares of 300 overflow f16; a sum of 64 of them overflows it by far
    x = (300 * normal(4, 64)).astype(dtype)
    gamma = normal(64).astype(dtype)
    found = run(name, x, gamma)
    assert found.dtype == dtype
    row_norm, eps = ROWS[name]
    for i in range(4):
        row = x[i].astype(np.float64).tolist()
        exact = np.array(row_norm(row, eps)) * gamma.astype(np.float64)
        nearest = exact.astype(dtype)
        # the f32 error, 1e-6 relative, can move a value at most to the neighbouring one
        unit = np.abs(np.nextafter(nearest, dtype(np.inf)) - nearest).astype(np.float64)
        assert np.all(np.abs(found[i].astype(np.float64) - exact) <= unit * 0.51)


def test_the_result_promotes_all_operands():
    assert infer("rms_norm", Shape(["rows", 8], f16), [8]) == "[rows, 8] f32"
    assert infer("layer_norm", Shape(["rows", 8], f16), Shape([8], f16), [8]) == "[rows, 8] f32"
    assert run("rms_norm", normal(2, 8, dtype=np.float16), normal(8)).dtype == np.float64


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("places", [(), (5,), (2, 3)])
def test_group_norm(groups, places):
    x, gamma, beta = normal(2, 6, *places) - 1, normal(6), normal(6)
    found = run("group_norm", x, gamma, beta, groups=groups, eps=1e-3)
    size = 6 // groups
    for b in range(2):
        for g in range(groups):
            part = x[b, g * size : (g + 1) * size]
            normed = np.reshape(layer_norm_row(part.ravel().tolist(), 1e-3), part.shape)
            for c in range(size):
                at = g * size + c
                expected = normed[c] * gamma[at] + beta[at]
                np.testing.assert_allclose(found[b, at], expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_l2_norm(axis):
    x = normal(3, 4, 5)
    found = run("l2_norm", x, axis=axis, eps=1e-2)
    for at in np.ndindex(x.shape):
        line = tuple(slice(None) if i == axis % 3 else k for i, k in enumerate(at))
        length = math.sqrt(math.fsum(v * v for v in x[line].tolist()) + 1e-2)
        assert found[at] == pytest.approx(x[at] / length, rel=1e-14)


def test_zeros_and_empty_tensors():
    zeros = np.zeros((2, 4), np.float32)
    ones = np.ones(4, np.float32)
    assert not run("rms_norm", zeros, ones).any()
    assert not run("layer_norm", zeros, ones).any()
    assert not run("l2_norm", zeros).any()
    assert run("layer_norm", zeros[:0], ones).shape == (0, 4)
    assert run("layer_norm", zeros[:, :0], ones[:0]).shape == (2, 0)
    empty = run("group_norm", np.zeros((2, 4, 0), np.float32), ones, ones, groups=2)
    assert empty.shape == (2, 4, 0)


def test_symbols_and_cost():
    assert infer("layer_norm", ["batch", "seq", "d"], ["d"], ["d"]) == "[batch, seq, d] f32"
    shapes = ["batch", "2 * c", "h", "w"], ["2 * c"], ["2 * c"]
    assert infer("group_norm", *shapes, groups=2) == "[batch, 2 * c, h, w] f32"
    assert infer("l2_norm", ["batch", 8], axis=0) == "[batch, 8] f32"
    found = cost("rms_norm", [10, 8], [8])
    assert found.bytes == 4 * (80 + 8 + 80)
    assert found.flops == 4 * 80


@pytest.mark.parametrize(
    ("name", "shapes", "attributes", "kind", "part"),
    [
        ("rms_norm", ([2, 8], [7]), {}, ShapeError, "gamma does not fit x; got [7] f32; expected"),
        ("rms_norm", (["n", "d"], ["e"]), {}, ShapeError, "expected [d]"),
        ("rms_norm", ([2, 8], [8], [1]), {}, ShapeError, "beta does not fit x"),
        ("rms_norm", ([], [1]), {}, ShapeError, "x is a scalar"),
        ("rms_norm", (Shape([2, 8], i32), [8]), {}, DTypeError, "x must be of a float type"),
        ("layer_norm", ([2, 8], Shape([8], i32)), {}, DTypeError, "gamma must be of a float type"),
        ("layer_norm", ([2, 8], [8]), {"eps": -1.0}, AttributeValueError, "layer_norm.eps"),
        ("rms_norm", ([2, 8], [8]), {"eps": math.nan}, AttributeValueError, "rms_norm.eps"),
        ("group_norm", ([2, 8], [8], [8]), {"groups": 3}, ShapeError, "a multiple of 3"),
        ("group_norm", ([2, "c"], ["c"], ["c"]), {"groups": 2}, ShapeError, "c channels"),
        ("group_norm", ([8], [8], [8]), {"groups": 2}, ShapeError, "x has no channels"),
        ("group_norm", ([2, 8], [8], [8]), {"groups": 0}, AttributeValueError, "got 0"),
        ("group_norm", ([2, 8], [4], [8]), {"groups": 2}, ShapeError, "gamma does not fit"),
        ("l2_norm", ([2, 8],), {"axis": 2}, ShapeError, "axis out of range"),
        ("l2_norm", ([],), {}, ShapeError, "x is a scalar"),
    ],
)
def test_refuses(name, shapes, attributes, kind, part):
    with pytest.raises(kind) as error:
        infer(name, *shapes, **attributes)
    assert part in str(error.value)
