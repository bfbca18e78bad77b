"""What the lowerings of several blocks share."""

from __future__ import annotations

from rlx.ir.dim import Dim
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.ir.ops._common import activate


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
