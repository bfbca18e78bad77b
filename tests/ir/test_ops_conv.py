"""Convolutions, pooling and resizing against explicit loops in float64.

Operands are multiples of 1/8 below 4, so f32 sums of a few dozen products are exact and results are
compared for equality, except where something is divided.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from applied import apply, inferred

from rlx.errors import AttributeValueError, DTypeError, ShapeError
from rlx.ir.op import lookup
from rlx.ir.shape import Shape


def eighths(seed: int, *shape: int) -> np.ndarray:
    return (np.random.default_rng(seed).integers(-24, 25, shape) / 8).astype(np.float32)


def conv2d_loops(
    x: np.ndarray,
    w: np.ndarray,
    stride: tuple[int, int],
    low: tuple[int, int],
    high: tuple[int, int],
    dilation: tuple[int, int],
    groups: int,
) -> np.ndarray:
    batch, _, height, width = x.shape
    out, per_group, kh, kw = w.shape
    rows = (height + low[0] + high[0] - dilation[0] * (kh - 1) - 1) // stride[0] + 1
    columns = (width + low[1] + high[1] - dilation[1] * (kw - 1) - 1) // stride[1] + 1
    y = np.zeros((batch, out, rows, columns))
    for b, o, r, c in np.ndindex(*y.shape):
        group = o // (out // groups)
        for i, p, q in product(range(per_group), range(kh), range(kw)):
            row = r * stride[0] + p * dilation[0] - low[0]
            column = c * stride[1] + q * dilation[1] - low[1]
            if 0 <= row < height and 0 <= column < width:
                y[b, o, r, c] += float(x[b, group * per_group + i, row, column]) * w[o, i, p, q]
    return y


CASES_2D: list[dict[str, Any]] = [
    {},
    {"stride": 2},
    {"padding": 1},
    {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 2)},
    {"padding": (0, 1, 2, 3)},
    {"groups": 2, "padding": 1},
    {"groups": 4, "stride": 2, "dilation": 2, "padding": 2},
]


def spread(value: Any, rank: int) -> tuple[int, ...]:
    return (value,) * rank if isinstance(value, int) else value


def pads(value: Any, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    full = spread(value, rank)
    return (full[:rank], full[rank:]) if len(full) == 2 * rank else (full, full)


@pytest.mark.parametrize("case", CASES_2D, ids=str)
def test_conv_2d_is_seven_loops(case: dict[str, Any]) -> None:
    groups = case.get("groups", 1)
    x, w, bias = eighths(0, 2, 4, 6, 5), eighths(1, 8, 4 // groups, 3, 2), eighths(2, 8)
    low, high = pads(case.get("padding", 0), 2)
    expected = conv2d_loops(
        x, w, spread(case.get("stride", 1), 2), low, high,
        spread(case.get("dilation", 1), 2), groups,
    )  # fmt: skip
    assert np.array_equal(apply("conv", [x, w], **case), expected)
    with_bias = expected + bias[:, None, None]
    assert np.array_equal(apply("conv", [x, w, bias], **case), with_bias)


@pytest.mark.parametrize(
    "case", [{}, {"stride": 3}, {"padding": (2, 0)}, {"padding": 1, "dilation": 2, "groups": 2}],
    ids=str,
)  # fmt: skip
def test_conv_1d(case: dict[str, Any]) -> None:
    groups = case.get("groups", 1)
    x, w = eighths(3, 2, 4, 9), eighths(4, 6, 4 // groups, 3)
    low, high = pads(case.get("padding", 0), 1)
    stride, dilation = case.get("stride", 1), case.get("dilation", 1)
    expected = conv2d_loops(
        x[:, :, None], w[:, :, None], (1, stride), (0, *low), (0, *high), (1, dilation), groups
    )[:, :, 0]
    assert np.array_equal(apply("conv", [x, w], **case), expected)


def test_conv_of_16_bit_tensors_sums_in_f32_and_rounds_once() -> None:
    x, w = eighths(5, 1, 16, 8), eighths(6, 4, 16, 3)
    for element in (np.float16, ml_dtypes.bfloat16):
        y = apply("conv", [x.astype(element), w.astype(element)])
        exact = conv2d_loops(
            x[:, :, None], w[:, :, None], (1, 1), (0, 0), (0, 0), (1, 1), 1
        )[:, :, 0]  # fmt: skip
        assert y.dtype == element
        assert np.array_equal(y, exact.astype(np.float32).astype(element))


def test_conv_of_nothing() -> None:
    assert apply("conv", [eighths(0, 0, 3, 5), eighths(1, 2, 3, 2)]).shape == (0, 2, 4)
    empty = apply("conv", [eighths(0, 1, 0, 5), eighths(1, 2, 0, 2), eighths(2, 2)])
    assert np.array_equal(empty, np.broadcast_to(eighths(2, 2)[:, None], (1, 2, 4)))


def test_conv_output_sizes_are_symbolic() -> None:
    y = inferred("conv", ["batch", 80, "frames"], [384, 80, 3], stride=2, padding=1)
    assert str(y) == "[batch, 384, ((frames + 1) // 2)] f32"
    for frames in (1, 2, 7, 8):
        bound = y.bind({"batch": 1, "frames": frames})
        assert bound.dims[2] == (frames + 2 - 3) // 2 + 1
    x, w = eighths(0, 2, 4, 7), eighths(1, 6, 4, 3)
    got = apply("conv", [x, w], dims=[["batch", 4, "frames"], [6, 4, 3]], stride=2, padding=1)
    assert np.array_equal(got, apply("conv", [x, w], stride=2, padding=1))


def test_conv_errors() -> None:
    with pytest.raises(ShapeError, match="channels of x and w"):
        inferred("conv", [1, 4, 8], [6, 3, 3])
    with pytest.raises(ShapeError, match="output channels do not split"):
        inferred("conv", [1, 4, 8], [5, 2, 3], groups=2)
    with pytest.raises(ShapeError, match="kernel is larger than the padded input"):
        inferred("conv", [1, 4, 2], [6, 4, 3])
    with pytest.raises(ShapeError, match="x has the wrong rank"):
        inferred("conv", [4, 8], [6, 4, 3])
    with pytest.raises(ShapeError, match="w has the wrong rank"):
        inferred("conv", [1, 4, 8], [6, 4, 3, 3])
    with pytest.raises(ShapeError, match="bias"):
        inferred("conv", [1, 4, 8], [6, 4, 3], [5])
    with pytest.raises(ShapeError, match="kernel size is a positive int"):
        inferred("conv", [1, 4, 8], [6, 4, "k"])
    with pytest.raises(DTypeError, match="x must be of a float type"):
        inferred("conv", Shape([1, 4, 8], "i8"), Shape([6, 4, 3], "i8"))
    with pytest.raises(AttributeValueError, match=r"\[conv.stride\] out of range"):
        inferred("conv", [1, 4, 8], [6, 4, 3], stride=0)
    with pytest.raises(AttributeValueError, match="dilation does not fit"):
        inferred("conv", [1, 4, 8], [6, 4, 3], dilation=(1, 1, 1))


def test_conv_cost_counts_two_per_tap() -> None:
    shapes = [Shape([2, 4, 6, 5]), Shape([8, 2, 3, 3])]
    record = lookup("conv")(groups=2)
    (y,) = [record.infer(*shapes)]
    assert record.cost(shapes, [y]).flops == 2 * (2 * 8 * 4 * 3) * (2 * 3 * 3)


def transposed_loops(
    x: np.ndarray, w: np.ndarray, stride: tuple[int, int], low: tuple[int, int],
    high: tuple[int, int], dilation: tuple[int, int], groups: int, extra: tuple[int, int],
) -> np.ndarray:  # fmt: skip
    batch, channels, height, width = x.shape
    _, per_group, kh, kw = w.shape
    rows = (height - 1) * stride[0] - low[0] - high[0] + dilation[0] * (kh - 1) + 1 + extra[0]
    columns = (width - 1) * stride[1] - low[1] - high[1] + dilation[1] * (kw - 1) + 1 + extra[1]
    y = np.zeros((batch, per_group * groups, rows, columns))
    for b, c, i, j in np.ndindex(*x.shape):
        group = c // (channels // groups)
        for o, p, q in product(range(per_group), range(kh), range(kw)):
            row = i * stride[0] + p * dilation[0] - low[0]
            column = j * stride[1] + q * dilation[1] - low[1]
            if 0 <= row < rows and 0 <= column < columns:
                y[b, group * per_group + o, row, column] += float(x[b, c, i, j]) * w[c, o, p, q]
    return y


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"stride": 2, "output_padding": 1},
        {"stride": (2, 3), "padding": (1, 0), "dilation": (1, 2)},
        {"groups": 2, "padding": (0, 1, 1, 0)},
    ],
    ids=str,
)
def test_conv_transpose_is_seven_loops(case: dict[str, Any]) -> None:
    groups = case.get("groups", 1)
    x, w, bias = eighths(7, 2, 4, 3, 4), eighths(8, 4, 3, 3, 2), eighths(9, 3 * groups)
    low, high = pads(case.get("padding", 0), 2)
    expected = transposed_loops(
        x, w, spread(case.get("stride", 1), 2), low, high, spread(case.get("dilation", 1), 2),
        groups, spread(case.get("output_padding", 0), 2),
    )  # fmt: skip
    got = apply("conv_transpose", [x, w, bias], **case)
    assert np.array_equal(got, expected + bias[:, None, None])


def test_conv_transpose_is_the_adjoint_of_conv() -> None:
    x, w = eighths(0, 1, 3, 9), eighths(1, 5, 3, 4)
    y = apply("conv", [x, w], stride=2, padding=1)
    back = eighths(2, *y.shape)
    assert y.shape == (1, 5, 4)
    # <conv(x), r> = <x, conv_transpose(r)>; exact in f64 for eighths
    left = (y.astype(np.float64) * back).sum()
    up = apply("conv_transpose", [back, w], stride=2, padding=1, output_padding=1)
    assert up.shape == x.shape
    assert left == (x.astype(np.float64) * up).sum()


def test_conv_transpose_in_one_dimension_and_errors() -> None:
    x, w = eighths(0, 2, 4, 5), eighths(1, 4, 3, 2)
    expected = transposed_loops(
        x[:, :, None], w[:, :, None], (1, 2), (0, 0), (0, 0), (1, 1), 1, (0, 0)
    )
    got = apply("conv_transpose", [x, w], dims=[["b", 4, "n"], [4, 3, 2]], stride=2)
    assert np.array_equal(got, expected[:, :, 0])
    with pytest.raises(ShapeError, match="channels of x and w"):
        inferred("conv_transpose", [1, 4, 8], [6, 3, 3])
    with pytest.raises(ShapeError, match="input channels do not split"):
        inferred("conv_transpose", [1, 4, 8], [4, 3, 3], groups=3)
    with pytest.raises(ShapeError, match="nothing is left"):
        inferred("conv_transpose", [1, 4, 1], [4, 3, 1], padding=1)


def test_depthwise_conv1d_causal_step_by_step() -> None:
    x, w, left = eighths(0, 2, 7, 3), eighths(1, 3, 4), eighths(2, 2, 3, 3)
    got = apply("depthwise_conv1d_causal", [x, w, left], dims=[["b", "s", 3], [3, 4], ["b", 3, 3]])
    for b, s, c in np.ndindex(*x.shape):
        total = 0.0
        for j in range(4):
            at = s - 3 + j  # tap 3 is the token itself
            total += float(w[c, j]) * float(x[b, at, c] if at >= 0 else left[b, 3 + at, c])
        assert got[b, s, c] == total


def test_depthwise_conv1d_causal_in_two_parts_is_the_whole() -> None:
    x, w, left = eighths(0, 1, 8, 3), eighths(1, 3, 4), eighths(2, 1, 3, 3)
    whole = apply("depthwise_conv1d_causal", [x, w, left])
    first = apply("depthwise_conv1d_causal", [x[:, :2], w, left])
    context = np.concatenate([left, x[:, :2]], axis=1)[:, -3:]
    second = apply("depthwise_conv1d_causal", [x[:, 2:], w, context])
    assert np.array_equal(np.concatenate([first, second], axis=1), whole)


def test_depthwise_conv1d_causal_errors() -> None:
    with pytest.raises(ShapeError, match="channels of w"):
        inferred("depthwise_conv1d_causal", ["b", "s", 3], [4, 4], ["b", 3, 3])
    with pytest.raises(ShapeError, match="left_pad axis 1"):
        inferred("depthwise_conv1d_causal", ["b", "s", 3], [3, 4], ["b", 4, 3])
    with pytest.raises(ShapeError, match="left_pad axis 0"):
        inferred("depthwise_conv1d_causal", ["b", "s", 3], [3, 4], ["c", 3, 3])
    with pytest.raises(ShapeError, match="kernel size is a positive int"):
        inferred("depthwise_conv1d_causal", ["b", "s", 3], [3, "k"], ["b", 3, 3])


def pool_loops(
    x: np.ndarray, kernel: tuple[int, int], stride: tuple[int, int], low: tuple[int, int],
    high: tuple[int, int],
) -> list[tuple[tuple[int, ...], list[float]]]:  # fmt: skip
    """(output index, the real elements under that window) for every window."""
    rows = (x.shape[2] + low[0] + high[0] - kernel[0]) // stride[0] + 1
    columns = (x.shape[3] + low[1] + high[1] - kernel[1]) // stride[1] + 1
    found = []
    for b, c, r, q in np.ndindex(*x.shape[:2], rows, columns):
        inside = [
            float(x[b, c, i, j])
            for i in range(r * stride[0] - low[0], r * stride[0] - low[0] + kernel[0])
            for j in range(q * stride[1] - low[1], q * stride[1] - low[1] + kernel[1])
            if 0 <= i < x.shape[2] and 0 <= j < x.shape[3]
        ]
        found.append(((b, c, r, q), inside))
    return found


POOLS: list[dict[str, Any]] = [
    {"kernel": 2},
    {"kernel": (3, 2), "stride": (1, 2), "padding": (1, 0)},
    {"kernel": 3, "stride": 2, "padding": (1, 0, 2, 1)},
]


@pytest.mark.parametrize("case", POOLS, ids=str)
def test_pools_against_loops(case: dict[str, Any]) -> None:
    x = eighths(0, 2, 3, 6, 7)
    kernel = spread(case["kernel"], 2)
    low, high = pads(case.get("padding", 0), 2)
    found = pool_loops(x, kernel, spread(case.get("stride", kernel), 2), low, high)
    largest = apply("max_pool", [x], **case)
    mean = apply("avg_pool", [x], **case)
    real_mean = apply("avg_pool", [x], count_include_pad=False, **case)
    assert largest.size == mean.size == real_mean.size == len(found)
    for at, inside in found:
        assert largest[at] == max(inside)
        # the sums are exact, one division rounds
        assert mean[at] == np.float32(sum(inside)) / np.float32(np.prod(kernel))
        assert real_mean[at] == np.float32(sum(inside)) / np.float32(len(inside))


def test_pools_in_one_dimension_of_integers_nan_and_symbols() -> None:
    x = np.int32([[[3, -7, -2, -9, 4]]])
    assert apply("max_pool", [x], kernel=2, padding=(1, 0)).tolist() == [[[3, -2, 4]]]
    assert apply("max_pool", [-np.abs(x)], kernel=2, padding=(1, 0)).tolist() == [[[-3, -2, -4]]]
    nan = np.float32([[[1, np.nan, 3, 4]]])
    y = apply("max_pool", [nan], dims=[["b", 1, "n"]], kernel=2)
    assert np.isnan(y[0, 0, 0])
    assert y[0, 0, 1] == 4
    assert str(inferred("avg_pool", ["b", 8, "n"], kernel=4)) == "[b, 8, ((n) // 4)] f32"


def test_pool_errors() -> None:
    with pytest.raises(ShapeError, match="kernel is larger"):
        inferred("max_pool", [1, 1, 2], kernel=3)
    with pytest.raises(AttributeValueError, match="padding of a whole window"):
        inferred("max_pool", [1, 1, 9], kernel=2, padding=2)
    with pytest.raises(AttributeValueError, match="kernel does not fit"):
        inferred("max_pool", [1, 1, 9], kernel=(2, 2, 2))
    with pytest.raises(DTypeError, match="x must be of a float type"):
        inferred("avg_pool", Shape([1, 1, 9], "i32"), kernel=2)
    with pytest.raises(DTypeError, match="cannot be ordered"):
        inferred("max_pool", Shape([1, 1, 9], "c64"), kernel=2)


@pytest.mark.parametrize(("n", "size"), [(4, 8), (4, 6), (5, 3), (7, 7), (1, 3), (6, 1)])
def test_resize_nearest(n: int, size: int) -> None:
    x = np.arange(n, dtype=np.int32).reshape(1, 1, n)
    got = apply("resize", [x], sizes=(size,))
    assert got.ravel().tolist() == [int(np.floor(i * n / size)) for i in range(size)]


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize(("n", "size"), [(4, 8), (5, 3), (7, 7), (1, 3), (6, 1)])
def test_resize_linear_one_axis(n: int, size: int, align: bool) -> None:
    x = eighths(0, 2, 3, n)
    got = apply("resize", [x], sizes=(size,), mode="linear", align_corners=align)
    for i in range(size):
        if align:
            at = i * (n - 1) / (size - 1) if size > 1 else 0.0
        else:
            at = min(max((i + 0.5) * n / size - 0.5, 0.0), n - 1.0)
        below = min(int(at), n - 1)
        above, part = min(below + 1, n - 1), at - below
        exact = x[..., below] * (1 - part) + x[..., above] * part
        # the weight and three f32 operations on numbers up to 3 each round: 4 · 3 · 2⁻²⁴
        assert np.abs(got[..., i] - exact).max() <= 8e-7


def test_resize_two_axes_and_symbolic_sizes() -> None:
    x = eighths(0, 1, 2, 3, 4)
    y = inferred("resize", ["b", 2, "h", "w"], sizes=("2 * h", "2 * w"), mode="linear")
    assert str(y) == "[b, 2, 2 * h, 2 * w] f32"
    dims = [["b", 2, "h", "w"]]
    both = apply("resize", [x], dims=dims, sizes=("2 * h", "2 * w"), mode="linear")
    for c in range(2):  # one axis after the other, each as the channels of a 1-D resize
        rows = apply("resize", [x[:, c].swapaxes(1, 2)], sizes=(6,), mode="linear")
        columns = apply("resize", [rows.swapaxes(1, 2)], sizes=(8,), mode="linear")
        assert np.array_equal(both[:, c], columns)


def test_resize_errors() -> None:
    with pytest.raises(AttributeValueError, match="unknown mode"):
        inferred("resize", [1, 1, 4], sizes=(8,), mode="cubic")
    with pytest.raises(AttributeValueError, match="align_corners"):
        inferred("resize", [1, 1, 4], sizes=(8,), align_corners=True)
    with pytest.raises(ShapeError, match="sizes do not fit"):
        inferred("resize", [1, 1, 4], sizes=(8, 8))
    with pytest.raises(ShapeError, match="nothing to resize"):
        inferred("resize", [1, 1, 0], sizes=(8,))
    with pytest.raises(DTypeError, match="float type"):
        inferred("resize", Shape([1, 1, 4], "i32"), sizes=(8,), mode="linear")
