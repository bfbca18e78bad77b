"""Lowering of loop nests: regions, single elementwise, layout, reduction and norm ops, strided
copies, and matrix products, which are sums of products over one more axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Any

from rlx.backends.cuda.builder import THREADS
from rlx.backends.cuda.lowering import TABLE, Context, KernelLaunch, lowers
from rlx.backends.cuda.nest_kernel import NestKernel
from rlx.backends.kernel_args import NodeArg, Pointer, nest_arg
from rlx.ir.dim import Dim
from rlx.ir.dtype import DType, f32, promote
from rlx.ir.graph import Graph
from rlx.ir.lir import aligned, contiguous_strides
from rlx.ir.node import UNKNOWN, Node, Value
from rlx.ir.op import Op, on_register
from rlx.ir.ops.composite import decomposed
from rlx.ir.shape import Shape, normalize_axis
from rlx.llvm.nest.elements import NAMES, has_vector_code
from rlx.loops.decompose import graph_of, is_decomposed
from rlx.loops.nest import Quantity
from rlx.loops.partition import partition
from rlx.loops.schedule import Address, ArgSource, ScheduledNest, schedule
from rlx.loops.strided_copies import StridedView, copy, fill
from rlx.loops.trace import FOLDS, MOVES, Buffer, Source
from rlx.support.records import dataclass

Strides = tuple[Dim, ...]
_FEW = 512  # rows that do not fill a GPU if each has a warp
_RESULT = Buffer("result")


@dataclass
class RegionKernels:
    """The kernels of a region for operands of given strides, and the temporaries between them."""

    kernels: list[ScheduledNest]
    temporaries: list[Shape]


@lru_cache(maxsize=4096)
def region_kernels(
    op: Op, shapes: tuple[Shape, ...], strides: tuple[Strides, ...]
) -> RegionKernels:
    graph = _GRAPHS.get(op.name, _region_graph)(op, shapes)
    inputs = [n.output for n in graph.sources("input")]
    operands = {
        v: Source(Buffer("operand", i), v.shape.dtype, s)
        for i, (v, s) in enumerate(zip(inputs, strides, strict=True))
    }
    plan = partition(graph, operands)
    return RegionKernels([schedule(k) for k in plan.kernels], [v.shape for v in plan.temporaries])


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
    return _offsets(region, node.graph.live)[-1]


def _offsets(region: RegionKernels, live: dict[str, int]) -> list[int]:
    """Offset of each temporary in scratch memory, and the end."""
    offsets = [0]
    for shape in region.temporaries:
        offsets.append(offsets[-1] + aligned(shape.upper_bytes(live)))
    return offsets


_NAMES = (NAMES | MOVES | FOLDS | {"elementwise_region", *_GRAPHS}) - {"constant"}


@lowers(*sorted(_NAMES), scratch=scratch_bytes)
def lower_region(node: Node, ctx: Context) -> list[KernelLaunch]:
    if _is_empty(node):
        return []
    shapes = tuple(v.shape for v in node.inputs)
    region = region_kernels(node.op, shapes, tuple(ctx.strides(v) for v in node.inputs))
    offsets = _offsets(region, ctx.lir.live)
    return [launch_for(node, ctx, k, offsets) for k in region.kernels]


def _is_region(node: Node) -> bool:
    """Whether the decomposition covers the node's attributes."""
    return decomposed(node.op, tuple([v.shape for v in node.inputs])) is not None


def _lower_decomposed(cls: type[Op]) -> None:
    """Ops that regions compute by their decomposition: those there are, and those to come."""
    if is_decomposed(cls, has_vector_code) and cls.has_decomposition() and cls.name not in TABLE:
        when = None if cls.runs_as_region else _is_region
        lowers(cls.name, when=when, scratch=scratch_bytes)(lower_region)


on_register(_lower_decomposed)


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
    count = prod(ctx.upper(_dim(scheduled, size)) for size in items)
    args = [_arg(node, source, offsets, operands) for source in scheduled.args]
    kernel = _kernel(scheduled, nest.reduces and count <= _FEW and _is_long(scheduled, ctx))
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
    return any(ctx.upper(_dim(scheduled, size)) >= THREADS for size in lasts)


def _dim(scheduled: ScheduledNest, size: Quantity) -> Dim:
    found = size if isinstance(size, int) else scheduled.args[size.index]
    assert not isinstance(found, (str, Address))
    return found


# -- strided copies --------------------------------------------------------------------------------


def _operand(node: Node, ctx: Context, number: int) -> StridedView:
    value = node.inputs[number]
    return StridedView(Buffer("operand", number), value.dtype, ctx.strides(value))


@lowers("concat")
def lower_concat(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    out = node.output.shape
    at = normalize_axis(op.axis, out.rank)
    strides = contiguous_strides(out)
    made: list[KernelLaunch] = []
    start: Dim = 0
    for number, value in enumerate(node.inputs):
        dims = value.shape.dims
        if 0 not in dims:
            target = StridedView(_RESULT, out.dtype, strides, start * strides[at])
            made.append(launch_for(node, ctx, copy(dims, _operand(node, ctx, number), target)))
        start = start + dims[at]
    return made


@lowers("pad")
def lower_pad(node: Node, ctx: Context) -> list[KernelLaunch]:
    """Copy the operand to the interior, then make the borders axis by axis: those of a later axis
    include the borders of earlier ones."""
    op: Any = node.op
    x, out = node.inputs[0].shape, node.output.shape
    if 0 in out.dims:
        return []
    strides = contiguous_strides(out)
    kernels = []
    if 0 not in x.dims:
        target = StridedView(_RESULT, out.dtype, strides, _offset(strides, op.low))
        kernels.append(copy(x.dims, _operand(node, ctx, 0), target))
    for at in range(x.rank):
        kernels += _borders(op, x, out, at)
    return [launch_for(node, ctx, k) for k in kernels]


def _offset(strides: Strides, starts: Sequence[Dim]) -> Dim:
    total: Dim = 0
    for stride, start in zip(strides, starts, strict=True):
        total = total + stride * start
    return total


def _borders(op: Any, x: Shape, out: Shape, at: int) -> Iterator[ScheduledNest]:
    """The two borders along one axis. Axes before it are complete, later ones hold the operand's
    elements only."""
    strides = contiguous_strides(out)
    low, size, high = op.low[at], x.dims[at], op.high[at]
    inner = low + size - 1  # the last element of the operand
    for width, start, edge, mirrored in (
        (low, 0, low, 2 * low),
        (high, inner + 1, inner, inner - 1),
    ):
        dims = (*out.dims[:at], width, *x.dims[at + 1 :])
        if 0 in dims:
            continue
        starts = (*[0] * at, start, *op.low[at + 1 :])
        target = StridedView(_RESULT, out.dtype, strides, _offset(strides, starts))
        if op.mode == "constant":
            yield fill(dims, op.value, target)
            continue
        is_edge = op.mode == "edge"
        along = 0 if is_edge else strides[at] * -1
        first = _offset(strides, (*starts[:at], edge if is_edge else mirrored, *starts[at + 1 :]))
        source = StridedView(_RESULT, out.dtype, (*strides[:at], along, *strides[at + 1 :]), first)
        yield copy(dims, source, target)
