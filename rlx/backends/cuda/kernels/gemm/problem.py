"""A matrix product as kernels see it: sizes, strides and element types of its operands."""

from __future__ import annotations

from math import prod
from typing import Any

from rlx.backends.cuda.kernels.gemm.epilogue import Epilogue
from rlx.backends.cuda.lowering import Layouts, is_multiple
from rlx.backends.kernel_args import NodeArg, Pointer
from rlx.ir.dim import Dim, same
from rlx.ir.node import Node, Value
from rlx.support.records import dataclass

_FLOATS = ("f32", "bf16", "f16")
ALIGNMENT = 16  # bytes of a load


@dataclass(frozen=True)
class Product:
    """x [m, k] · w [k, n], with an epilogue. Strides are in elements."""

    node: Node
    x: Value
    weights: tuple[Value, ...]  # one, or gate and up
    m: Dim
    k: int
    n: int
    x_stride: Dim  # between rows; columns follow each other
    stride_k: int  # of the weights; one of the two is 1
    stride_n: int
    epilogue: Epilogue
    extras: tuple[Value, ...]

    @property
    def epilogue_args(self) -> list[NodeArg]:
        return [Pointer(self.node.output), *(Pointer(v) for v in self.extras)]


def is_product(node: Node) -> bool:
    """Whether the node is rows times a matrix of floats, by its types and ranks alone."""
    x, w = node.inputs[0].shape, node.inputs[1].shape
    floats = all(v.dtype.name in _FLOATS for v in (*node.inputs, *node.outputs))
    return floats and w.rank == 2 and x.rank >= 2 and all(isinstance(d, int) for d in w.dims)


def product_of(node: Node, ctx: Layouts) -> Product | None:
    """The product of a node; None if its operands do not lie as kernels want them."""
    if not is_product(node):
        return None
    op: Any = node.op
    pair = op.name == "fused_swiglu"
    weights = node.inputs[1:3] if pair else node.inputs[1:2]
    extras = node.inputs[1 + len(weights) :]
    activation = getattr(op, "activation", "none")
    bias = residual = None
    if op.name in ("fused_matmul_bias_act", "wide_matmul"):
        there = op.extras(*extras)
        bias, residual = (None if v is None else v.dtype for v in there)
    x = node.inputs[0]
    k, n = (int(d) for d in weights[0].shape.dims)  # type: ignore[arg-type]
    x_stride, strides = row_stride(x, ctx), {ctx.strides(w) for w in weights}
    if x_stride is None or len(strides) > 1 or 0 in x.shape.dims or not k or not n:
        return None
    if not all(_is_plain(v, ctx) for v in extras):
        return None
    stride_k, stride_n = strides.pop()
    if not isinstance(stride_k, int) or not isinstance(stride_n, int):
        return None
    if not all(is_aligned(v, ctx) for v in (x, *weights)):
        return None
    return Product(
        node, x, tuple(weights), prod(x.shape.dims[:-1], start=1), k, n, x_stride, stride_k,
        stride_n, Epilogue(node.output.dtype, activation, bias, residual, pair), tuple(extras),
    )  # fmt: skip


MOST_ROWS = 8  # of x that are multiplied at the bandwidth of memory


def suits_gemv(p: Product, m: Dim | None = None) -> bool:
    """A few rows, and rows of the weight that can be loaded 16 bytes at a time."""
    per, rows = 16 // p.weights[0].dtype.bytes, p.m if m is None else m
    rows_follow = p.stride_k == 1 and (p.stride_n == p.k or p.n == 1)
    return isinstance(rows, int) and rows <= MOST_ROWS and rows_follow and p.k % per == 0


def row_stride(x: Value, ctx: Layouts) -> Dim | None:
    """How far apart the rows of x as [m, k] are; None if no one stride tells, or if columns do not
    follow each other, or rows do not begin at aligned addresses."""
    *outer, k = x.shape.dims
    *strides, last = ctx.strides(x)
    if last != 1 and k != 1:
        return None
    stride: Dim | None = None
    size: Dim = 1  # rows that the axes behind cover
    for dim, step in zip(reversed(outer), reversed(strides), strict=True):
        if dim == 1:
            continue
        if stride is None:
            stride = step
        elif not same(step, stride * size):
            return None
        size = size * dim
    found = k if stride is None else stride
    return found if is_multiple(found, ALIGNMENT // x.dtype.bytes) else None


def is_aligned(value: Value, ctx: Layouts) -> bool:
    """Whether the first element lies at a multiple of 16 bytes."""
    return is_multiple(ctx.offset(value), ALIGNMENT // value.dtype.bytes)


def _is_plain(value: Value, ctx: Layouts) -> bool:
    return ctx.is_plain(value)
