"""Lowering of loop nests: regions, single elementwise, layout, reduction and norm ops, strided
copies, and matrix products, which are sums of products over one more axis."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

from rlx.backends.cuda.batch_invariance import is_asked
from rlx.backends.cuda.builder import THREADS
from rlx.backends.cuda.lowering import TABLE, Context, KernelLaunch, lowers
from rlx.backends.cuda.nest_kernel import NestKernel
from rlx.backends.kernel_args import NodeArg, Pointer, nest_arg
from rlx.ir.dim import Dim
from rlx.ir.dtype import DType, f32, promote
from rlx.ir.graph import Graph
from rlx.ir.lir import contiguous_strides
from rlx.ir.node import UNKNOWN, Node, Value
from rlx.ir.op import Op
from rlx.ir.ops.composite import decomposed
from rlx.ir.shape import Shape
from rlx.llvm.nest.elements import NAMES, has_vector_code
from rlx.loops.decompose import graph_of
from rlx.loops.schedule import (
    Address,
    ArgSource,
    RegionKernels,
    ScheduledNest,
    schedule_region,
)
from rlx.loops.strided_copies import copy_nests
from rlx.loops.trace import FOLDS, MOVES

Strides = tuple[Dim, ...]
_FEW = 512  # rows that do not fill a GPU if each has a warp


@lru_cache(maxsize=4096)
def region_kernels(
    op: Op, shapes: tuple[Shape, ...], strides: tuple[Strides, ...]
) -> RegionKernels:
    graph = _GRAPHS.get(op.name, _region_graph)(op, shapes)
    return schedule_region(graph, strides)


def _region_graph(op: Op, shapes: tuple[Shape, ...]) -> Graph:
    return graph_of(op, shapes, has_vector_code)


# -- matrix products -------------------------------------------------------------------------------


def _matmul_graph(op: Op, shapes: tuple[Shape, ...]) -> Graph:
    """a [… m k] · b [… k n] as the sum over k of a [… m 1 k] · bᵀ [… 1 n k]."""
    g = Graph(op.name)
    with g.origin(UNKNOWN):
        g.outputs = [_products(g, *(g.input(f"x{i}", s) for i, s in enumerate(shapes)))]
    return g


def _grouped_graph(op: Op, shapes: tuple[Shape, ...]) -> Graph:
    """x [t k] · w [expert[t], k, n], the weights gathered one element at a time."""
    g = Graph(op.name)
    with g.origin(UNKNOWN):
        x, w, expert = (g.input(f"x{i}", s) for i, s in enumerate(shapes))
        dtype = promote(x.dtype, w.dtype)
        rows, size = x.shape.dims
        y = g.transpose(g.gather(w, expert, axis=0), (0, 2, 1))
        left = g.reshape(x, [rows, 1, size])
        g.outputs = [_sum_of_products(g, left, y, dtype)]
    return g


def _fused_graph(op: Op, shapes: tuple[Shape, ...]) -> Graph:
    """A fused product by its decomposition, the matmuls in it as sums of products."""
    whole = decomposed(op, shapes)
    assert whole is not None
    g = Graph(op.name)
    values: dict[Value, Value] = {}
    with g.origin(UNKNOWN):
        for node in whole.nodes:
            given = [values[v] for v in node.inputs]
            if node.op.name == "input":
                made = g.input(node.name, node.output.shape)
            elif node.op.name == "matmul":
                made = _products(g, *given)
            else:
                made = g.append_node(node.op, given).output
            values[node.output] = made
        g.outputs = [values[v] for v in whole.outputs]
    return g


def _products(g: Graph, a: Value, b: Value) -> Value:
    dtype = promote(a.dtype, b.dtype)
    x = g.reshape(a, [*a.shape.dims[:-1], 1, a.shape.dims[-1]]) if b.shape.rank > 1 else a
    y = b
    if b.shape.rank > 1:
        y = g.transpose(b, (*range(b.shape.rank - 2), b.shape.rank - 1, b.shape.rank - 2))
        if a.shape.rank > 1:
            y = g.reshape(y, [*y.shape.dims[:-2], 1, *y.shape.dims[-2:]])
    return _sum_of_products(g, x, y, dtype)


def _sum_of_products(g: Graph, x: Value, y: Value, dtype: DType) -> Value:
    """The sum over the last axis; narrow floats are summed in f32, integers wrap in any type."""
    wide = f32 if dtype.is_float and dtype.bits < 32 else dtype
    left, right = (v if v.dtype is wide else g.cast(v, wide) for v in (x, y))
    total = g.sum(g.mul(left, right), axis=-1)
    return total if dtype is wide else g.cast(total, dtype)


_GRAPHS = {
    "matmul": _matmul_graph,
    "grouped_matmul": _grouped_graph,
    "fused_matmul_bias_act": _fused_graph,
    "fused_swiglu": _fused_graph,
    "wide_matmul": _fused_graph,
}


# -- regions ---------------------------------------------------------------------------------------


def _is_empty(node: Node) -> bool:
    """Whether all results are empty."""
    return all(0 in v.shape.dims for v in node.outputs)


def scratch_bytes(node: Node) -> int:
    """Temporaries are the same whatever the strides of the operands."""
    if _is_empty(node):
        return 0
    shapes = tuple(v.shape for v in node.inputs)
    region = region_kernels(node.op, shapes, tuple(contiguous_strides(s) for s in shapes))
    return region.offsets(node.graph.live)[-1]


_NAMES = (NAMES | MOVES | FOLDS | {"elementwise_region", *_GRAPHS}) - {"constant"}


@TABLE.lowers_regions(*sorted(_NAMES), has_code=has_vector_code, scratch=scratch_bytes)
def lower_region(node: Node, ctx: Context) -> list[KernelLaunch]:
    if _is_empty(node):
        return []
    shapes = tuple(v.shape for v in node.inputs)
    region = region_kernels(node.op, shapes, tuple(ctx.strides(v) for v in node.inputs))
    offsets = region.offsets(ctx.lir.live)
    return [launch_for(node, ctx, k, offsets) for k in region.kernels]


def launch_for(
    node: Node,
    ctx: Context,
    scheduled: ScheduledNest,
    offsets: Sequence[int] = (0,),
    operands: Sequence[Value] = (),
) -> KernelLaunch:
    """The launch of a nest; `offsets` are those of temporaries in scratch, `operands` replace those
    of the node."""
    nest = scheduled.nest
    items = [*nest.rows, *(() if nest.reduces else nest.spaces[0])]
    count = prod(ctx.upper(scheduled.dim(size)) for size in items)
    args = [_arg(node, source, offsets, operands) for source in scheduled.args]
    # the order of a sum depends on it
    few = node.op.name not in _GRAPHS if is_asked() else count <= _FEW
    kernel = _kernel(scheduled, nest.reduces and few and _is_long(scheduled, ctx))
    return KernelLaunch(kernel, args, count * kernel.threads_per_item)


def _arg(
    node: Node, source: ArgSource, offsets: Sequence[int], operands: Sequence[Value]
) -> NodeArg:
    if operands and isinstance(source, Address) and source.buffer.kind == "operand":
        return Pointer(operands[source.buffer.number], source.offset)
    return nest_arg(node, source, offsets)


@lru_cache(maxsize=4096)
def _kernel(scheduled: ScheduledNest, few: bool) -> NestKernel:
    return NestKernel(scheduled.nest, scheduled.columns, few)


def _is_long(scheduled: ScheduledNest, ctx: Context) -> bool:
    """Whether rows keep the threads of a block busy."""
    lasts = [space[-1] for space in scheduled.nest.spaces]
    return any(ctx.upper(scheduled.dim(size)) >= THREADS for size in lasts)


# -- strided copies --------------------------------------------------------------------------------


@lowers("concat", "pad")
def lower_copies(node: Node, ctx: Context) -> list[KernelLaunch]:
    return [launch_for(node, ctx, nest) for nest in copy_nests(node, ctx.strides)]
