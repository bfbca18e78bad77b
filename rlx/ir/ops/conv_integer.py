"""Convolutions of 8-bit integers, with sums in 32 bits: `conv_integer` and `qlinear_conv`.

`x` is u8 or i8 with a zero point of its own, `w` is i8 with none: real weights are `w` times a
scale. Padding counts as the zero point of x, that is, as real zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.errors import AttributeValueError, DTypeError, ShapeError
from rlx.ir.dim import same
from rlx.ir.dtype import DType, f32, f64, i8, i32, u8
from rlx.ir.op import Array, Cost, Op, op
from rlx.ir.ops._common import require_rank, require_same
from rlx.ir.ops.conv import Conv, Window
from rlx.ir.shape import Shape

if TYPE_CHECKING:
    from rlx.ir.graph import Graph
    from rlx.ir.node import Value

EXACT_TERMS = 2**24 // (255 * 128)
"""Products of two bytes whose sum f32 has exactly."""


def integer_range(dtype: DType) -> tuple[float, float]:
    """The least and the largest number of an 8-bit type."""
    limits = np.iinfo(dtype.numpy)
    return float(limits.min), float(limits.max)


class _Base(Op):
    """What both share: the geometry of `conv`, and checks of x, w and the zero point."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def check(self) -> None:
        self.plain.check()

    @property
    def plain(self) -> Conv:
        """The same convolution of floats."""
        return Conv(self.stride, self.padding, self.dilation, self.groups)

    def window(self, w: Sequence[Any]) -> Window:
        """The geometry, from the dimensions of the weight."""
        return self.plain.window(w)

    def _sums(self, x: Shape, w: Shape, x_zero: Shape) -> Shape:
        """The shape of the sums."""
        _require_type(x, (u8, i8), "x")
        _require_type(w, (i8,), "w")
        _require_scalar(x_zero, x.dtype, "x_zero")
        return self.plain.infer(x.with_dtype(f32), w.with_dtype(f32)).with_dtype(i32)

    def _total(self, x: Array, w: Array, x_zero: Array) -> Array:
        centred = x.astype(np.float64) - x_zero.reshape(()).astype(np.float64)
        return self.plain.reference(centred, w.astype(np.float64)).astype(np.int64)

    def _float_sums(self, g: Graph, x: Value, w: Value, x_zero: Value) -> Value:
        """The sums in a float type that has them exactly."""
        terms = prod(w.shape.static_dims[1:]) if w.shape.is_static else EXACT_TERMS + 1
        wide = f32 if terms <= EXACT_TERMS else f64
        centred = g.sub(g.cast(x, wide), g.cast(g.reshape(x_zero, shape=()), wide))
        made: Value = g.append(self.plain, (centred, g.cast(w, wide)))
        return made

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        """A multiply and an add per output element and tap."""
        taps = prod(inputs[1].dims[1:], start=1)
        traffic = outputs[0].size_bytes
        for shape in inputs:
            traffic = traffic + shape.size_bytes
        return Cost(outputs[0].num_elements * taps * 2, traffic)


@op("conv_integer")
class ConvInteger(_Base):
    """Sums of (x − x_zero) · w in i32; x `[B, C, *n]` u8 or i8, w `[O, C/groups, *kernel]` i8."""

    stride: tuple[int, ...] = (1,)
    padding: tuple[int, ...] = (0,)
    dilation: tuple[int, ...] = (1,)
    groups: int = 1

    def infer(self, x: Shape, w: Shape, x_zero: Shape) -> Shape:
        return self._sums(x, w, x_zero)

    def reference(self, x: Array, w: Array, x_zero: Array) -> Array:
        return self._total(x, w, x_zero).astype(np.int32)

    def decompose(self, g: Graph, x: Value, w: Value, x_zero: Value) -> Any:
        return g.cast(self._float_sums(g, x, w, x_zero), i32)


@op("qlinear_conv")
class QLinearConv(_Base):
    """A `conv_integer` whose sums become 8-bit integers again: (sums + bias) · scale, rounded half
    to even, plus `y_zero`, clamped to its type.

    `scale [O]` is that of x times that of w over that of the result; `bias [O]` is i32, in units of
    x times w. With `activation="relu"` nothing is below `y_zero`.

    With a `residual` of the result's shape, both are dequantised and added, the activation follows,
    and the sum is quantised with `sum_zero`. `factors [3]` are the scales of the result, of the
    residual and of the sum.
    """

    stride: tuple[int, ...] = (1,)
    padding: tuple[int, ...] = (0,)
    dilation: tuple[int, ...] = (1,)
    groups: int = 1
    activation: str = "none"

    def check(self) -> None:
        super().check()
        if self.activation not in ("none", "relu"):
            raise AttributeValueError(
                "unknown activation", where="qlinear_conv.activation", got=self.activation,
                expected="none or relu",
            )  # fmt: skip

    def infer(
        self, x: Shape, w: Shape, x_zero: Shape, scale: Shape, y_zero: Shape,
        bias: Shape | None = None, residual: Shape | None = None, r_zero: Shape | None = None,
        factors: Shape | None = None, sum_zero: Shape | None = None,
    ) -> Shape:  # fmt: skip
        _require_type(y_zero, (u8, i8), "y_zero")
        _require_scalar(y_zero, y_zero.dtype, "y_zero")
        _require_channels(scale, w, f32, "scale")
        if bias is not None:
            _require_channels(bias, w, i32, "bias")
        made = self._sums(x, w, x_zero).with_dtype(y_zero.dtype)
        if residual is None:
            return made
        if r_zero is None or factors is None or sum_zero is None:
            raise ShapeError(
                "operands of a residual are missing", where=self.name,
                expected="residual, r_zero, factors, sum_zero",
            )  # fmt: skip
        for given, what in ((residual, "residual"), (sum_zero, "sum_zero")):
            _require_type(given, (u8, i8), what)
        _require_scalar(r_zero, residual.dtype, "r_zero")
        _require_scalar(sum_zero, sum_zero.dtype, "sum_zero")
        _require_type(factors, (f32,), "factors")
        if factors.dims != (3,):
            raise ShapeError("factors are not three", got=factors, expected="[3]")
        if not residual.same_dims(made):
            raise ShapeError("residual does not fit the result", got=residual, expected=made)
        return made.with_dtype(sum_zero.dtype)

    def reference(
        self, x: Array, w: Array, x_zero: Array, scale: Array, y_zero: Array,
        bias: Array | None = None, residual: Array | None = None, r_zero: Array | None = None,
        factors: Array | None = None, sum_zero: Array | None = None,
    ) -> Array:  # fmt: skip
        column = (1, -1, *[1] * (x.ndim - 2))
        total = self._total(x, w, x_zero)
        if bias is not None:
            total = total + bias.reshape(column).astype(np.int64)
        real = total.astype(np.float32) * scale.reshape(column)
        if residual is None or r_zero is None or factors is None or sum_zero is None:
            return _codes(real, y_zero, self.activation == "relu")
        codes = _codes(real, y_zero, False).astype(np.int32) - y_zero.reshape(()).astype(np.int32)
        other = residual.astype(np.int32) - r_zero.reshape(()).astype(np.int32)
        own, its, whole = factors
        sums = codes.astype(np.float32) * own + other.astype(np.float32) * its
        return _codes(sums / whole, sum_zero, self.activation == "relu")

    def decompose(
        self, g: Graph, x: Value, w: Value, x_zero: Value, scale: Value, y_zero: Value,
        bias: Value | None = None, residual: Value | None = None, r_zero: Value | None = None,
        factors: Value | None = None, sum_zero: Value | None = None,
    ) -> Any:  # fmt: skip
        column = (1, w.shape.dims[0], *[1] * (x.shape.rank - 2))
        total = self._float_sums(g, x, w, x_zero)
        if bias is not None:
            wide = f64 if total.shape.dtype is f64 else i32
            whole = g.cast(g.reshape(bias, shape=column), wide)
            total = g.add(g.cast(total, wide), whole)
        real = g.mul(g.cast(total, f32), g.reshape(scale, shape=column))
        if residual is None or r_zero is None or factors is None or sum_zero is None:
            return _quantised(g, real, y_zero, self.activation == "relu")
        codes = _quantised(g, real, y_zero, False)
        scales = [
            g.reshape(g.narrow(factors, axis=0, start=n, length=1), shape=()) for n in range(3)
        ]
        sums = g.add(
            g.mul(_centred(g, codes, y_zero), scales[0]),
            g.mul(_centred(g, residual, r_zero), scales[1]),
        )
        return _quantised(g, g.div(sums, scales[2]), sum_zero, self.activation == "relu")


def _codes(real: Array, zero: Array, relu: bool) -> Array:
    """Numbers rounded and moved by a zero point, in its type."""
    offset = float(zero.reshape(()))
    low, high = integer_range(DType.of(zero.dtype))
    least = max(low - offset, 0.0) if relu else low - offset
    kept = np.clip(np.rint(real), least, high - offset) + offset
    return np.where(np.isnan(kept), offset, kept).astype(zero.dtype)


def _quantised(g: Graph, real: Value, zero: Value, relu: bool) -> Value:
    """The same in a graph."""
    offset = g.cast(g.reshape(zero, shape=()), f32)
    made = g.round(real)
    made = g.where(g.is_nan(made), g.constant(0.0, f32), made)
    if relu:
        made = g.relu(made)
    low, high = integer_range(zero.shape.dtype)
    codes: Value = g.cast(g.clamp(g.add(made, offset), low=low, high=high), zero.shape.dtype)
    return codes


def _centred(g: Graph, x: Value, zero: Value) -> Value:
    """Bytes without their zero point, as floats."""
    made: Value = g.sub(g.cast(x, f32), g.cast(g.reshape(zero, shape=()), f32))
    return made


def _require_type(shape: Shape, types: tuple[DType, ...], what: str) -> None:
    if shape.dtype not in types:
        expected = " or ".join(t.name for t in types)
        raise DTypeError(f"{what} has the wrong element type", got=shape, expected=expected)


def _require_scalar(shape: Shape, dtype: DType, what: str) -> None:
    _require_type(shape, (dtype,), what)
    if not all(same(d, 1) for d in shape.dims):
        raise ShapeError(f"{what} is not one number", got=shape, expected="[] or [1]")


def _require_channels(shape: Shape, w: Shape, dtype: DType, what: str) -> None:
    _require_type(shape, (dtype,), what)
    require_rank(shape, 1, what)
    require_same(shape.dims[0], w.dims[0], what)
