"""What decompositions share: element types and sizes as values of a graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlx.ir.dim import Dim
from rlx.ir.dtype import DType, f32

if TYPE_CHECKING:
    from rlx.ir.graph import Graph
    from rlx.ir.node import Value


def wide(g: Graph, x: Value) -> Value:
    """`x` in the precision that fused ops compute in: 16- and 8-bit floats as f32."""
    narrow = x.shape.dtype.is_float and x.shape.dtype.bytes < 4
    return cast(g, x, f32) if narrow else x


def cast(g: Graph, x: Value, dtype: DType) -> Value:
    """`x` in `dtype`; no op where it has that type."""
    return x if x.shape.dtype is dtype else g.cast(x, dtype)


def real_type(element: DType) -> DType:
    """The element type of a function of real numbers: f32 for integers and bools."""
    return element if element.is_float else f32


def as_real(g: Graph, x: Value) -> Value:
    """`x` as real numbers: integers become f32, narrow floats are computed in f32."""
    return wide(g, cast(g, x, real_type(x.shape.dtype)))


def activate(g: Graph, x: Value, activation: str | None) -> Value:
    return x if activation in (None, "none") else g.apply(activation, x)


def size_value(g: Graph, size: Dim, like: Value) -> Any:
    """A size as a number of the element type of `like`, known now or at run time."""
    if isinstance(size, int):
        return g.constant(size, like.shape.dtype)
    return g.dim_value(dim=size, dtype=like.shape.dtype)
