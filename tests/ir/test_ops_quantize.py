"""Quantise, dequantise and both at once, value by value."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from run_op import cost, infer, run

from rlx.errors import AttributeValueError, DTypeError, ShapeError
from rlx.ir.dtype import f16, i8
from rlx.ir.shape import Shape

rng = np.random.default_rng(11)
LIMITS = {
    "i8": (-128, 127),
    "u8": (0, 255),
    "i16": (-(2**15), 2**15 - 1),
    "u16": (0, 2**16 - 1),
    "i32": (-(2**31), 2**31 - 1),
}
NUMPY = {"i8": np.int8, "u8": np.uint8, "i16": np.int16, "u16": np.uint16, "i32": np.int32}
one = np.array(1.0, np.float32)


def stored(x, scale, zp, low, high):
    """One value by the definition; Python's round takes halves to the even neighbour."""
    steps = float(np.float32(x) / np.float32(scale))
    if math.isnan(steps):
        whole = 0
    elif math.isinf(steps):
        whole = math.copysign(10**12, steps)
    else:
        whole = round(steps)
    return int(min(max(whole + zp, low), high))


def test_halves_go_to_the_even_neighbour():
    x = np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5], np.float32)
    assert run("quantize", x, one).tolist() == [-2, -2, 0, 0, 2, 2, 4]


@pytest.mark.parametrize("dtype", list(LIMITS))
def test_values_beyond_the_range_saturate(dtype):
    x = np.array([-np.inf, -1e30, -1.0, 0.0, 1e30, np.inf, np.nan], np.float32)
    low, high = LIMITS[dtype]
    found = run("quantize", x, one, dtype=dtype)
    assert found.dtype == NUMPY[dtype]
    assert found.tolist() == [low, low, max(low, -1), 0, high, high, 0]


@pytest.mark.parametrize("dtype", list(LIMITS))
@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_quantize_and_back_value_by_value(dtype, axis):
    low, high = LIMITS[dtype]
    x = (rng.standard_normal((3, 4, 5)) * 300).astype(np.float32)
    x[0, 0, 0] = np.nan
    size = () if axis is None else (x.shape[axis],)
    scale = np.asarray(rng.uniform(0.5, 3, size), np.float32)
    zp = np.asarray(rng.integers(0, 20, size), NUMPY[dtype])
    q = run("quantize", x, scale, zp, dtype=dtype, axis=axis)
    back = run("dequantize", q, scale, zp, axis=axis)
    fake = run("fake_quantize", x, scale, zp, dtype=dtype, axis=axis)
    for at in np.ndindex(x.shape):
        channel = () if axis is None else (at[axis],)
        s, z = scale[channel], int(zp[channel])
        assert q[at] == stored(x[at], s, z, low, high)
        assert back[at] == np.float32(np.float32(int(q[at]) - z) * s)
        assert fake[at] == back[at]


def test_without_a_zero_point():
    x = np.array([[1.0, -3.0], [2.0, 500.0]], np.float32)
    scale = np.array([0.5, 2.0], np.float32)
    q = run("quantize", x, scale, axis=1)
    assert q.tolist() == [[2, -2], [4, 127]]  # -1.5 is half way: to the even -2
    assert run("dequantize", q, scale, axis=1).tolist() == [[1.0, -4.0], [2.0, 254.0]]


@pytest.mark.parametrize(
    ("dtype", "numpy", "limit"),
    [
        ("f8e4m3", ml_dtypes.float8_e4m3fn, 448.0),
        ("f8e5m2", ml_dtypes.float8_e5m2, 57344.0),
    ],
)
def test_fp8_saturates_and_keeps_nan(dtype, numpy, limit):
    x = np.array([0.3, 1e9, -np.inf, np.nan], np.float32)
    scale = np.array([2.0], np.float32)
    q = run("quantize", x, scale, dtype=dtype)
    assert q.dtype == numpy
    # 0.15 = 1.2 · 2⁻³: with 3 mantissa bits 1.25 · 2⁻³, with 2 bits 1.25 · 2⁻³ too
    assert q.astype(np.float32)[:3].tolist() == [0.15625, limit, -limit]
    assert np.isnan(q.astype(np.float32)[3])
    assert run("dequantize", q, scale)[:2].tolist() == [0.3125, 2 * limit]
    assert run("fake_quantize", x, scale, dtype=dtype)[0] == np.float32(0.3125)


def test_half_precision_results():
    x = np.array([1.3, -0.7], np.float16)
    scale = np.array(0.1, np.float16)
    q = run("quantize", x, scale)
    assert q.tolist() == [13, -7]
    back = run("dequantize", q, scale)
    assert back.dtype == np.float16
    assert back.tolist() == [np.float16(13 * float(scale)), np.float16(-7 * float(scale))]
    assert run("fake_quantize", x.astype(ml_dtypes.bfloat16), one).dtype == ml_dtypes.bfloat16


def test_i32_differences_are_exact():
    # 2**24 + 1 is not an f32, the difference to the zero point is
    q = np.array([2**24 + 1], np.int32)
    zp = np.array([2**24], np.int32)
    assert run("dequantize", q, np.array([0.5], np.float32), zp).tolist() == [0.5]


def test_quantize_infers_symbols_and_costs():
    x = Shape(["batch", "seq", 8], f16)
    assert infer("quantize", x, [8], axis=2) == "[batch, seq, 8] i8"
    assert infer("quantize", x, ["seq"], axis=1, dtype="u8") == "[batch, seq, 8] u8"
    assert infer("dequantize", Shape(["n"], i8), Shape([], f16)) == "[n] f16"
    assert infer("fake_quantize", x, []) == "[batch, seq, 8] f16"
    found = cost("quantize", [10, 8], [8], axis=1)
    assert found.bytes == 10 * 8 * 4 + 8 * 4 + 10 * 8
    assert found.flops == 4 * 10 * 8


@pytest.mark.parametrize(
    ("name", "shapes", "attributes", "kind", "part"),
    [
        ("quantize", ([3, 4], [3]), {}, ShapeError, "expected one element: [] or [1]"),
        ("quantize", ([3, 4], [3]), {"axis": 1}, ShapeError, "expected [4]"),
        ("quantize", (["n", 4], ["m"]), {"axis": 0}, ShapeError, "expected [n]"),
        ("quantize", ([3, 4], [3]), {"axis": 2}, ShapeError, "axis out of range"),
        ("quantize", (Shape([3], i8), []), {}, DTypeError, "x must be of a float type"),
        ("quantize", ([3], Shape([], i8)), {}, DTypeError, "scale must be of a float type"),
        ("quantize", ([3], [], Shape([], "u8")), {}, DTypeError, "expected i8"),
        ("quantize", ([3], [1], Shape([], i8)), {}, ShapeError, "zp and scale differ"),
        ("quantize", ([3], []), {"dtype": "i64"}, AttributeValueError, "quantize.dtype"),
        ("quantize", ([3], []), {"dtype": "f16"}, AttributeValueError, "got f16; expected i8"),
        ("fake_quantize", ([3], []), {"dtype": "bool"}, AttributeValueError, "got bool"),
        ("dequantize", ([3], []), {}, DTypeError, "not a quantised tensor"),
        (
            "quantize",
            ([3], [], Shape([], "f8e4m3")),
            {"dtype": "f8e4m3"},
            DTypeError,
            "fp8 has no zero point",
        ),
    ],
)
def test_refuses(name, shapes, attributes, kind, part):
    with pytest.raises(kind) as error:
        infer(name, *shapes, **attributes)
    assert part in str(error.value)


# -- blocks -----------------------------------------------------------------------------------


def test_blocks_hold_their_scale_and_round_halves_away_from_zero():
    x = np.zeros((2, 64), np.float32)
    x[0, :5] = [127, 0.5, -0.5, 1.5, 0.49999997]
    x[1, 32:34] = [-254, 3]
    found = run("quantize_blocks", x).reshape(2, 2, 34)
    scales = found[..., :2].copy().view(np.float16)[..., 0]
    assert scales.tolist() == [[1, 0], [0, 2]]
    codes = found[..., 2:].view(np.int8)
    assert codes[0, 0, :5].tolist() == [127, 1, -1, 2, 0]
    assert codes[1, 1, :2].tolist() == [-127, 2]
    assert not codes[0, 1].any() and not codes[1, 0].any()


def test_blocks_infer_and_refuse():
    assert infer("quantize_blocks", Shape(["seq", 96], f16)) == "[seq, 102] u8"
    for shape, part in (
        ([3, 40], "got 40 columns; expected a multiple of 32"),
        ([3, "n"], "rows of no known length"),
    ):
        with pytest.raises(ShapeError, match=part):
            infer("quantize_blocks", shape)
    with pytest.raises(AttributeValueError, match="expected Q8_0"):
        infer("quantize_blocks", [3, 64], scheme="Q4_0")
