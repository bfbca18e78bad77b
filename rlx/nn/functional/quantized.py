"""Quantised weights: packed once, multiplied without being unpacked."""

from __future__ import annotations

from typing import Any

import numpy as np

import rlx.numpy as rnp
from rlx.errors import InputError
from rlx.ir.dtype import DType, i8
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.ir.quant.scheme import QuantScheme, encode
from rlx.nn.functional.convolution import Axes, Geometry, geometry_of
from rlx.nn.functional.operands import ArrayLike, Sizes, call, fixed, require_rank, sizes_of
from rlx.numpy.array import Array, Tracer
from rlx.numpy.dispatch import as_array


class QuantizedWeight:
    """A weight [..., out, in] in packed rows, made by `quantize`. A tree of its arrays for
    `rlx.jit`."""

    __slots__ = ("data", "scale", "scheme", "zero_point")

    def __init__(
        self, data: Array, scheme: QuantScheme, scale: Array | None = None,
        zero_point: Array | None = None,
    ) -> None:  # fmt: skip
        self.data, self.scheme, self.scale, self.zero_point = data, scheme, scale, zero_point

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., out, in] of the weight that was packed."""
        *rows, width = self.data.shape
        return (*rows, self.scheme.row_elements(int(width)))

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The keys, the last of which is not an array, and the arrays (`rlx.numpy.tree`)."""
        names = ("data", "scale", "zero_point", self.scheme)
        return names, (self.data, self.scale, self.zero_point)

    @classmethod
    def tree_unflatten(cls, keys: tuple[Any, ...], children: list[Any]) -> QuantizedWeight:
        data, scale, zero_point = children
        return cls(data, keys[-1], scale, zero_point)

    def __repr__(self) -> str:
        return f"QuantizedWeight({self.scheme}, {list(self.data.shape)} {self.data.dtype})"


def quantize(weight: ArrayLike, scheme: str | QuantScheme = "q8_0") -> QuantizedWeight:
    """A float weight [out, in], or one of several experts [E, out, in], in blocks of fewer bits:
    GGUF types such as "q8_0", "q4_k", or "int8", "int4_b32", "fp8_e4m3"."""
    made = require_rank(weight, (2, 3), "quantize", "a weight [out, in] or [E, out, in]")
    if isinstance(made, Tracer):
        raise InputError(
            "weights are quantised before they are used", where="quantize", got=repr(made),
            hint="quantize outside rlx.jit, and pass the result as an argument",
        )  # fmt: skip
    chosen = scheme if isinstance(scheme, QuantScheme) else QuantScheme.parse(scheme)
    packed = encode(chosen, made.data)
    sides = [None if p is None else Array(np.asarray(p)) for p in (packed.scale, packed.zp)]
    return QuantizedWeight(Array(np.ascontiguousarray(packed.data)), chosen, *sides)


def dequantize_weight(weight: QuantizedWeight) -> Array:
    """The weight as f32."""
    parts = (weight.data, weight.scale, weight.zero_point)
    flat = [None if p is None else rnp.reshape(p, (-1, p.shape[-1])) for p in parts]
    assert flat[0] is not None
    table = QuantizedWeight(flat[0], weight.scheme, flat[1], flat[2])
    rows = np.arange(int(flat[0].shape[0]), dtype=np.int32)
    return rnp.reshape(quantized_embedding(Array(rows), table), weight.shape)


def _parts(g: Graph, values: tuple[Value | None, ...], sizes: tuple[Sizes, ...]) -> list[Value]:
    pairs = zip(values, sizes, strict=True)
    return [fixed(g, v, s) for v, s in pairs if v is not None]


def _sizes(weight: QuantizedWeight) -> tuple[Sizes, ...]:
    parts = (weight.data, weight.scale, weight.zero_point)
    return tuple([() if p is None else sizes_of(p) for p in parts])


def _product(
    g: Graph, x: Value, data: Value, scale: Value | None, zero: Value | None, bias: Value | None,
    scheme: QuantScheme, sizes: tuple[Sizes, ...], width: int,
) -> Any:  # fmt: skip
    x = fixed(g, x, (*[None] * (x.shape.rank - 1), width))
    y = g.dequant_matmul(x, *_parts(g, (data, scale, zero), sizes), scheme=scheme)
    return y if bias is None else g.add(y, fixed(g, bias, sizes[0][:1]))


def quantized_linear(x: ArrayLike, weight: QuantizedWeight, bias: ArrayLike | None = None) -> Array:
    """x · weightᵀ + bias with a packed weight, which is read as it is."""
    operands = [x, weight.data, weight.scale, weight.zero_point, bias]
    width = weight.shape[-1]
    if int(as_array(x).shape[-1]) != width:
        raise InputError(
            "x does not fit the weight", where="quantized_linear",
            got=str(list(as_array(x).shape)), expected=f"[..., {width}]",
        )  # fmt: skip
    return call(_product, operands, weight.scheme, _sizes(weight), width)


def _grouped(
    g: Graph, x: Value, expert: Value, data: Value, scale: Value | None, zero: Value | None,
    scheme: QuantScheme, sizes: tuple[Sizes, ...], width: int,
) -> Any:  # fmt: skip
    x = fixed(g, x, (None, width))
    table, *more = _parts(g, (data, scale, zero), sizes)
    return g.dequant_grouped_matmul(x, table, expert, *more, scheme=scheme)


def quantized_grouped_matmul(x: ArrayLike, weight: QuantizedWeight, expert: ArrayLike) -> Array:
    """Row t of x [T, in] times the transposed weight of its expert: a packed weight [E, out, in],
    expert [T]."""
    operands = [x, expert, weight.data, weight.scale, weight.zero_point]
    return call(_grouped, operands, weight.scheme, _sizes(weight), weight.shape[-1])


def _lookup(
    g: Graph, ids: Value, data: Value, scale: Value | None, zero: Value | None,
    scheme: QuantScheme, sizes: tuple[Sizes, ...],
) -> Any:  # fmt: skip
    table, *more = _parts(g, (data, scale, zero), sizes)
    return g.dequant_gather(table, ids, *more, scheme=scheme)


def quantized_embedding(ids: ArrayLike, weight: QuantizedWeight) -> Array:
    """Rows `ids` of a packed table, as f32."""
    operands = [ids, weight.data, weight.scale, weight.zero_point]
    return call(_lookup, operands, weight.scheme, _sizes(weight))


def _blocks(g: Graph, x: Value, scheme: QuantScheme, width: int) -> Any:
    x = fixed(g, x, (*[None] * (x.shape.rank - 1), width))
    return g.quantize_blocks(x, scheme=scheme)


def quantize_blocks(x: ArrayLike, scheme: str = "q8_0") -> Array:
    """Rows x [..., in] packed in blocks, bytes [..., row]: also inside `rlx.jit`, as for the keys
    and values of a cache."""
    made = as_array(x)
    return call(_blocks, [made], QuantScheme.parse(scheme), int(made.shape[-1]))


def _rounded(
    g: Graph, x: Value, scale: Value, zero: Value | None, op: str, dtype: DType, axis: int | None
) -> Any:
    more = () if zero is None else (zero,)
    if op == "dequantize":
        return g.dequantize(x, scale, *more, axis=axis)
    return getattr(g, op)(x, scale, *more, dtype=dtype, axis=axis)


def quantize_linear(
    x: ArrayLike, scale: ArrayLike, zero_point: ArrayLike | None = None, dtype: Any = i8,
    axis: int | None = None,
) -> Array:  # fmt: skip
    """round(x / scale) + zero_point in an 8-bit type; a scale for all, or per index of an axis."""
    return call(_rounded, [x, scale, zero_point], "quantize", DType.of(dtype), axis)


def dequantize_linear(
    x: ArrayLike, scale: ArrayLike, zero_point: ArrayLike | None = None, axis: int | None = None
) -> Array:
    """(x − zero_point) · scale: the inverse of `quantize_linear`."""
    return call(_rounded, [x, scale, zero_point], "dequantize", i8, axis)


def fake_quantize(
    x: ArrayLike, scale: ArrayLike, zero_point: ArrayLike | None = None, dtype: Any = i8,
    axis: int | None = None,
) -> Array:  # fmt: skip
    """x with the error that storing it in `dtype` would bring."""
    return call(_rounded, [x, scale, zero_point], "fake_quantize", DType.of(dtype), axis)


def _integer_conv(
    g: Graph, x: Value, w: Value, x_zero: Value, scale: Value | None, y_zero: Value | None,
    bias: Value | None, dims: Sizes, geometry: Geometry, activation: str,
) -> Any:  # fmt: skip
    w = fixed(g, w, dims)
    x = fixed(g, x, (None, int(dims[1] or 0) * geometry.groups, *[None] * (len(dims) - 2)))
    if scale is None or y_zero is None:
        return g.conv_integer(x, w, x_zero, **geometry.inner())
    each = g.expand(fixed(g, scale, (None,) * scale.shape.rank), shape=(dims[0] or 0,))
    more = None if bias is None else fixed(g, bias, dims[:1])
    return g.qlinear_conv(
        x, w, x_zero, each, y_zero, more, activation=activation, **geometry.inner()
    )


def conv_integer(
    x: ArrayLike, weight: ArrayLike, x_zero_point: ArrayLike, stride: Axes = 1,
    padding: Axes | str = 0, dilation: Axes = 1, groups: int = 1,
) -> Array:  # fmt: skip
    """The convolution of x − x_zero_point (u8 or i8, [B, C, …] over one or two axes) with an i8
    weight, as i32."""
    w = require_rank(weight, (3, 4), "conv_integer", "a weight [O, C/groups, kernel…]")
    at = geometry_of(w, w.ndim - 2, stride, padding, dilation, groups, "conv_integer")
    sizes = sizes_of(w, *range(w.ndim))
    return call(_integer_conv, [x, w, x_zero_point, None, None, None], sizes, at, "none")


def qlinear_conv(
    x: ArrayLike, weight: ArrayLike, x_zero_point: ArrayLike, scale: ArrayLike,
    y_zero_point: ArrayLike, bias: ArrayLike | None = None, stride: Axes = 1,
    padding: Axes | str = 0, dilation: Axes = 1, groups: int = 1, activation: str = "none",
) -> Array:  # fmt: skip
    """A `conv_integer` whose sums become 8-bit integers again: (sums + bias) · scale, rounded half
    to even, plus `y_zero_point`, clamped to its type. `scale` is that of x times that of the
    weight over that of the result, one for all or one for each filter; `bias` is i32."""
    w = require_rank(weight, (3, 4), "qlinear_conv", "a weight [O, C/groups, kernel…]")
    at = geometry_of(w, w.ndim - 2, stride, padding, dilation, groups, "qlinear_conv")
    operands = [x, w, x_zero_point, scale, y_zero_point, bias]
    return call(_integer_conv, operands, sizes_of(w, *range(w.ndim)), at, activation)
