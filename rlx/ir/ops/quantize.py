"""Quantisation: per tensor, per channel (`axis`) and per block, to integers or 8-bit floats.

real = (q - zp) * scale. In block schemes every block of a row stores its own scale.
`quantize_weight` packs a float weight; the quantisation pass inserts it and `prepare` runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.errors import AttributeValueError, DTypeError, ShapeError
from rlx.ir import dtype as dt
from rlx.ir.dim import Dim, same
from rlx.ir.dtype import DType, f32
from rlx.ir.op import Array, Cost, Op, op
from rlx.ir.ops._common import cast, compute, quiet, require_float, rounded, upcast, wide
from rlx.ir.quant.scheme import GGUF_SCHEMES, QuantScheme, encode
from rlx.ir.shape import Shape, normalize_axis

if TYPE_CHECKING:
    from rlx.ir.graph import Graph
    from rlx.ir.node import Value


TARGETS = (dt.i8, dt.u8, dt.i16, dt.u16, dt.i32, dt.f8e4m3, dt.f8e5m2)
LARGEST = {dt.f8e4m3: 448.0, dt.f8e5m2: 57344.0}


def _require_target(dtype: DType, where: str) -> None:
    if dtype not in TARGETS:
        raise AttributeValueError(
            "not a type to quantise to", where=f"{where}.dtype", got=dtype,
            expected=", ".join(t.name for t in TARGETS),
        )  # fmt: skip


def _require_parameters(
    x: Shape, scale: Shape, zp: Shape | None, axis: int | None, stored: DType
) -> None:
    """A scale, and a zero point of the stored type, for the tensor or for each entry of `axis`."""
    require_float(scale, "scale")
    if axis is None:
        fits = scale.dims in ((), (1,))
        expected = "one element: [] or [1]"
    else:
        size = x.dims[normalize_axis(axis, x.rank)]
        fits = scale.rank == 1 and same(scale.dims[0], size)
        expected = f"[{size}]"
    if not fits:
        raise ShapeError(
            "scale does not fit x", got=f"{scale} for {x}, axis={axis}", expected=expected,
            hint="give axis= for one scale per channel",
        )  # fmt: skip
    if zp is None:
        return
    if stored.is_float:
        raise DTypeError("fp8 has no zero point", got=zp, expected="scale alone")
    if zp.dtype is not stored:
        raise DTypeError("zp has the wrong element type", got=zp, expected=stored)
    if not zp.same_dims(scale):
        raise ShapeError("zp and scale differ in shape", got=zp, expected=list(scale.dims))


def _along(parameter: Array, axis: int | None, rank: int) -> Array:
    """A scale or zero point, shaped to broadcast against a tensor of that rank."""
    if axis is None:
        return parameter.reshape(())
    return parameter.reshape((-1,) + (1,) * (rank - 1 - axis % rank))


def _encode(x: Array, scale: Array, zp: Array | None, axis: int | None, dtype: DType) -> Array:
    """x / scale, rounded half to even and clamped to the range of `dtype`; NaN becomes `zp`."""
    scaled = x / _along(scale, axis, x.ndim)
    if dtype.is_float:
        limit = LARGEST[dtype]
        return np.clip(scaled, -limit, limit).astype(dtype.numpy)  # np.clip keeps NaN
    bounds = np.iinfo(dtype.numpy)
    # f64 represents every i32 exactly
    whole = np.where(np.isnan(scaled), 0.0, np.rint(scaled.astype(np.float64)))
    if zp is not None:
        whole = whole + _along(zp, axis, x.ndim)
    return np.clip(whole, bounds.min, bounds.max).astype(dtype.numpy)


def _decode(q: Array, scale: Array, zp: Array | None, axis: int | None) -> Array:
    """(q - zp) * scale, the difference exact."""
    if zp is not None:
        q = q.astype(np.int64) - _along(zp, axis, q.ndim)
    return q.astype(scale.dtype) * _along(scale, axis, q.ndim)


def along_value(g: Graph, v: Value, axis: int | None, rank: int) -> Value:
    """A scale or zero point, shaped to broadcast against a tensor of that rank."""
    after = 0 if axis is None else rank - 1 - axis % rank
    dims = () if axis is None else (v.shape.dims[0], *[1] * after)
    return g.reshape(v, shape=dims)


def _encoded(
    g: Graph, op: Quantize | FakeQuantize, x: Value, scale: Value, zp: Value | None
) -> Value:
    rank = x.shape.rank
    scaled = g.div(wide(g, x), along_value(g, wide(g, scale), op.axis, rank))
    if op.dtype.is_float:
        limit = float(LARGEST[op.dtype])
        return g.cast(g.clamp(scaled, low=-limit, high=limit), op.dtype)
    # f64 represents every i32 exactly
    whole = g.round(cast(g, scaled, dt.f64))
    whole = g.where(g.is_nan(whole), g.constant(0.0, dt.f64), whole)
    if zp is not None:
        whole = g.add(whole, cast(g, along_value(g, zp, op.axis, rank), dt.f64))
    bounds = np.iinfo(op.dtype.numpy)
    whole = g.clamp(whole, low=float(bounds.min), high=float(bounds.max))
    return g.cast(whole, op.dtype)


def _decoded(g: Graph, op: Any, q: Value, scale: Value, zp: Value | None) -> Value:
    rank = q.shape.rank
    if zp is not None:
        q = g.sub(cast(g, q, dt.i64), cast(g, along_value(g, zp, op.axis, rank), dt.i64))
    return g.mul(cast(g, q, scale.shape.dtype), along_value(g, scale, op.axis, rank))


def _cost(inputs: Sequence[Shape], outputs: Sequence[Shape], per_element: int) -> Cost:
    traffic = outputs[0].size_bytes
    for shape in inputs:
        traffic = traffic + shape.size_bytes
    return Cost(outputs[0].num_elements * per_element, traffic)


@op("quantize", runs_as_region=True, has_zero_derivative=True)
class Quantize(Op):
    """clamp(round(x / scale) + zp) to `dtype`; ties go to the even neighbour, NaN to zp."""

    dtype: DType = dt.i8
    axis: int | None = None

    def check(self) -> None:
        _require_target(self.dtype, self.name)

    def infer(self, x: Shape, scale: Shape, zp: Shape | None = None) -> Shape:
        require_float(x, "x")
        _require_parameters(x, scale, zp, self.axis, self.dtype)
        return x.with_dtype(self.dtype)

    def reference(self, x: Array, scale: Array, zp: Array | None = None) -> Array:
        x, scale = upcast(x, scale)
        with quiet():
            return _encode(x, scale, zp, self.axis, self.dtype)

    def decompose(self, g: Graph, x: Value, scale: Value, zp: Value | None = None) -> Any:
        return _encoded(g, self, x, scale, zp)

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        return _cost(inputs, outputs, 4)


@op("dequantize", runs_as_region=True)
class Dequantize(Op):
    """(x - zp) * scale, in the element type of the scale."""

    axis: int | None = None

    def infer(self, x: Shape, scale: Shape, zp: Shape | None = None) -> Shape:
        if x.dtype not in TARGETS:
            raise DTypeError(
                "x is not a quantised tensor", got=x, expected=", ".join(t.name for t in TARGETS)
            )
        _require_parameters(x, scale, zp, self.axis, x.dtype)
        return x.with_dtype(scale.dtype)

    def reference(self, x: Array, scale: Array, zp: Array | None = None) -> Array:
        dtype = DType.of(scale.dtype)
        scale = compute(scale)
        with quiet():
            return rounded(_decode(x, scale, zp, self.axis), dtype)

    def decompose(self, g: Graph, x: Value, scale: Value, zp: Value | None = None) -> Any:
        return cast(g, _decoded(g, self, x, wide(g, scale), zp), scale.shape.dtype)

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        return _cost(inputs, outputs, 2)


@op("fake_quantize", runs_as_region=True)
class FakeQuantize(Op):
    """dequantize(quantize(x)): x with the error that storing it as `dtype` would bring."""

    dtype: DType = dt.i8
    axis: int | None = None

    def check(self) -> None:
        _require_target(self.dtype, self.name)

    def infer(self, x: Shape, scale: Shape, zp: Shape | None = None) -> Shape:
        require_float(x, "x")
        _require_parameters(x, scale, zp, self.axis, self.dtype)
        return x

    def reference(self, x: Array, scale: Array, zp: Array | None = None) -> Array:
        dtype = DType.of(x.dtype)
        x, scale = upcast(x, scale)
        with quiet():
            q = _encode(x, scale, zp, self.axis, self.dtype)
            return rounded(_decode(q, scale, zp, self.axis), dtype)

    def decompose(self, g: Graph, x: Value, scale: Value, zp: Value | None = None) -> Any:
        q = _encoded(g, self, x, scale, zp)
        return cast(g, _decoded(g, self, q, wide(g, scale), zp), x.shape.dtype)

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        return _cost(inputs, outputs, 6)


@op("quantize_blocks")
class QuantizeBlocks(Op):
    """Rows x [..., K] packed in blocks with their own scale: bytes [..., row bytes]."""

    scheme: QuantScheme = GGUF_SCHEMES["Q8_0"]

    def check(self) -> None:
        if self.scheme.name != "Q8_0":
            raise AttributeValueError(
                "not a scheme to pack activations in", where=f"{self.name}.scheme",
                got=self.scheme, expected="Q8_0",
            )  # fmt: skip

    def infer(self, x: Shape) -> Shape:
        require_float(x, "x")
        width = x.dims[-1] if x.rank else None
        if not isinstance(width, int):
            raise ShapeError("rows of no known length", got=x, expected="[..., K], K a number")
        return Shape((*x.dims[:-1], self.scheme.row_bytes(width)), dt.u8)

    def reference(self, x: Array) -> Array:
        with quiet():
            return encode(self.scheme, x).data

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        return Cost(inputs[0].num_elements * 6, inputs[0].size_bytes + outputs[0].size_bytes)


@op("quantize_weight", group="qpack", runs_in_prepare=True)
class QuantizeWeight(Op):
    """w [..., N, K] as `dequant_matmul` takes it: packed rows, and separate scale and zero point if
    the scheme has them."""

    scheme: QuantScheme

    def infer(self, w: Shape) -> tuple[Shape, ...]:
        require_float(w, "w")
        k = w.dims[-1] if w.rank > 1 else None
        if not isinstance(k, int):
            raise ShapeError("not a weight", got=w, expected="[..., N, K]")
        scheme, outer = self.scheme, w.dims[:-1]
        packed = DType.of(scheme.packed_dtype)
        found = [Shape((*outer, scheme.row_bytes(k) // packed.bytes), packed)]
        groups: tuple[Dim, ...] = (*outer, k // scheme.block if scheme.block else 1)
        if scheme.has_scale:
            found.append(Shape(groups, f32))
        if scheme.zero_point_dtype is not None:
            found.append(Shape(groups, DType.of(scheme.zero_point_dtype)))
        return tuple(found)

    def reference(self, w: Array) -> tuple[Array, ...]:
        return tuple(part for part in encode(self.scheme, w) if part is not None)

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        moved = inputs[0].size_bytes
        for shape in outputs:
            moved = moved + shape.size_bytes
        return Cost(inputs[0].num_elements * 8, moved)
