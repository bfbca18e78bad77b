"""What the lowerings of several blocks share."""

from __future__ import annotations

from rlx.ir.dim import Dim
from rlx.ir.dtype import DType, f32
from rlx.ir.graph import Graph
from rlx.ir.node import Value


def wide(g: Graph, x: Value) -> Value:
    """`x` in the precision that fused ops compute in: 16- and 8-bit floats as f32."""
    narrow = x.shape.dtype.is_float and x.shape.dtype.bytes < 4
    return cast(g, x, f32) if narrow else x


def cast(g: Graph, x: Value, dtype: DType) -> Value:
    """`x` in `dtype`; no op where it has that type."""
    return x if x.shape.dtype is dtype else g.cast(x, dtype)


def activate(g: Graph, x: Value, activation: str | None) -> Value:
    return x if activation in (None, "none") else g.apply(activation, x)


def weight(g: Graph, w: Value, transposed: bool) -> Value:
    """A weight as [K, N], also where it was given as [N, K]."""
    return g.transpose(w, axes=(1, 0)) if transposed else w


def product(
    g: Graph,
    x: Value,
    w: Value,
    bias: Value | None,
    activation: str | None,
    strassen: bool = False,
) -> Value:
    """activation(x·w + bias), fused where there is anything to fuse."""
    act = activation or "none"
    if bias is None and act == "none" and not strassen:
        return g.matmul(x, w)
    operands = (x, w) if bias is None else (x, w, bias)
    return g.fused_matmul_bias_act(
        *operands, activation=act, has_bias=bias is not None, strassen=strassen
    )


def product_parts(
    g: Graph, x: Value, w: Value, bias: Value | None, activation: str | None
) -> Value:
    """activation(x·w + bias) of primitives."""
    y = g.matmul(x, w)
    return activate(g, y if bias is None else g.add(y, bias), activation)


def leading(x: Value) -> Dim:
    """The number of rows of `x`: all axes but the last as one."""
    return x.shape.with_dims(x.shape.dims[:-1]).num_elements
