"""Packed weights on a GPU: they are laid out by `split_blocks` once, products read them so."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from rlx.backends.cuda.batch_invariance import is_asked
from rlx.backends.cuda.kernels.gemm.epilogue import Epilogue
from rlx.backends.cuda.kernels.gemm.gemv import gemv_for
from rlx.backends.cuda.kernels.gemm.lower_norm import norm_before
from rlx.backends.cuda.kernels.gemm.many_rows import ManyRows, are_fixed
from rlx.backends.cuda.kernels.gemm.plan import HOPPER, plan_product
from rlx.backends.cuda.kernels.gemm.planes import Planes
from rlx.backends.cuda.kernels.gemm.problem import MOST_ROWS, is_aligned, row_stride
from rlx.backends.cuda.kernels.gemm.row_norm import RowNorm
from rlx.backends.cuda.kernels.qgemm import row_planes
from rlx.backends.cuda.kernels.qgemm.decode_rows import DecodeRows
from rlx.backends.cuda.kernels.qgemm.digits import RECORD, takes_bytes
from rlx.backends.cuda.kernels.qgemm.few_packed_rows import (
    FEW_ROWS,
    few_packed_rows_for,
    takes_digits,
)
from rlx.backends.cuda.kernels.qgemm.fragments import unit_of
from rlx.backends.cuda.kernels.qgemm.packed_gemm import (
    PackedGemm,
    blocks_of,
    decodes,
    plan_packed,
)
from rlx.backends.cuda.kernels.qgemm.packed_rows import PackedRows
from rlx.backends.cuda.kernels.qgemm.split_digits import SplitDigits
from rlx.backends.cuda.kernels.qgemm.stream_gemv import stream_gemv_for
from rlx.backends.cuda.kernels.qgemm.unpack_weight import UnpackWeight
from rlx.backends.cuda.lowering import (
    Context,
    Counters,
    KernelArg,
    KernelLaunch,
    Layouts,
    lowers,
)
from rlx.backends.cuda.tensor_map import Matrix, TensorMap
from rlx.backends.kernel_args import NodeNumber, Pointer, Scratch, Status
from rlx.errors import ShapeError
from rlx.ir.dim import Dim, upper_bound
from rlx.ir.dtype import DType, f16, f32, u8
from rlx.ir.graph import Graph
from rlx.ir.lir import aligned
from rlx.ir.node import Node, Value
from rlx.ir.op import Array, Op, lookup, op
from rlx.ir.ops._common import require_indices, rounded
from rlx.ir.ops.matmul import widened
from rlx.ir.quant.scheme import GGUF_SCHEMES, QuantScheme
from rlx.ir.shape import Shape

_FLOATS = ("f32", "bf16", "f16")
_PACKED = ("dequant_matmul", "dequant_gather", "dequant_grouped_matmul")


@op("split_blocks", runs_in_prepare=True)
class SplitBlocks(Op):
    """Rows of blocks [n, row], or of integers and their scales, as rows of parts: see
    `row_planes`."""

    scheme: QuantScheme

    def infer(self, w: Shape, *sides: Shape) -> Shape:
        k = self.scheme.row_elements(int(w.dims[1]))  # type: ignore[arg-type]
        name = row_planes.layout_of(self.scheme)
        if w.rank != 2 or not row_planes.suits(name, k):
            raise ShapeError("no such layout of a weight", got=f"{w} {self.scheme}")
        return Shape((w.dims[0], row_planes.offsets(name, k)[1]), u8)

    def reference(self, w: Array, *sides: Array) -> Array:
        if sides:
            return row_planes.join_sides(self.scheme, w, *sides)
        return row_planes.split_blocks(self.scheme.name, w)


@op("packed_planes_matmul", is_anchor=True)
class PackedPlanesMatMul(Op):
    """`dequant_matmul` of a weight in rows of parts, plus a residual where there is one. With a
    `gate`, an activation, the first half of the rows is the gate of the second; `wide`: in f32,
    whatever x is."""

    scheme: QuantScheme
    gate: str = ""
    wide: bool = False

    def infer(self, x: Shape, w: Shape, residual: Shape | None = None) -> Shape:
        made = x.with_dims((*x.dims[:-1], w.dims[0] // 2 if self.gate else w.dims[0]))
        return made.with_dtype(f32) if self.wide else made

    def reference(self, x: Array, w: Array, residual: Array | None = None) -> Array:
        dtype = f32 if self.wide else DType.of(x.dtype)
        decoded = row_planes.decoded(self.scheme.name, w, x.shape[-1])
        wide, weights = widened(dtype, x, decoded)
        made = wide @ weights.T
        if self.gate:
            act: Any = lookup("fused_gated_act")(activation=self.gate)
            made = act.reference(made)
        return rounded(made if residual is None else made + residual, dtype)


@op("packed_planes_grouped_matmul", is_anchor=True)
class PackedPlanesGroupedMatMul(Op):
    """`dequant_grouped_matmul` of weights [experts · N, row] in rows of parts."""

    scheme: QuantScheme
    experts: int

    def infer(self, x: Shape, w: Shape, expert: Shape) -> Shape:
        return x.with_dims((x.dims[0], w.dims[0] // self.experts))

    def reference(self, x: Array, w: Array, expert: Array) -> Array:
        require_indices(expert, self.experts, "expert")
        dtype = DType.of(x.dtype)
        decoded = row_planes.decoded(self.scheme.name, w, x.shape[-1])
        wide, weights = widened(dtype, x, decoded.reshape(self.experts, -1, x.shape[-1]))
        return rounded(np.einsum("tk,tnk->tn", wide, weights[expert]), dtype)


@op("packed_planes_gather")
class PackedPlanesGather(Op):
    """`dequant_gather` of a table in rows of parts."""

    scheme: QuantScheme
    k: int

    def infer(self, table: Shape, ids: Shape) -> Shape:
        return Shape((*ids.dims, self.k), f32)

    def reference(self, table: Array, ids: Array) -> Array:
        require_indices(ids, table.shape[0], "ids")
        rows = row_planes.decoded(self.scheme.name, table[ids.reshape(-1)], self.k)
        return rows.reshape(*ids.shape, self.k)


def _is_packed(node: Node) -> bool:
    """Whether the weight is a param that can be laid out before the first run."""
    record: Any = node.op
    weight = node.inputs[0 if record.name == "dequant_gather" else 1]
    scheme: QuantScheme = record.scheme
    name, sides = row_planes.layout_of(scheme), _sides(node)
    if not all(map(_is_param_only, (weight, *sides))):
        return False
    row = weight.shape.dims[-1]
    floats = all(v.dtype.name in _FLOATS for v in (node.inputs[0], node.output) if v is not weight)
    if record.name == "dequant_gather":
        floats = True
    return floats and isinstance(row, int) and row_planes.suits(name, scheme.row_elements(row))


def _sides(node: Node) -> tuple[Value, ...]:
    """Scales, and zero points, that lie beside the weight."""
    return node.inputs[3 if node.op.name == "dequant_grouped_matmul" else 2 :]


def _is_param_only(value: Value) -> bool:
    """Whether a weight is a param, or made of params: several that were joined."""
    op = value.node.op
    if op.is_source:
        return op.name in ("param", "constant")
    return bool(value.node.inputs) and all(map(_is_param_only, value.node.inputs))


@lowers(*_PACKED, when=_is_packed)
def lower_unchanged(node: Node, ctx: Context) -> list[KernelLaunch]:
    """Templates have the other ops in their place; a graph that did not pass by runs on the
    host."""
    return [KernelLaunch(None)]


def lay_out_packed(graph: Graph) -> Graph:
    """Put products of laid out weights in the place of those that have kernels."""
    made: dict[Value, Value] = {}
    order: list[Node] = []

    def split(weight: Value, scheme: QuantScheme, sides: tuple[Value, ...]) -> Value:
        if weight not in made:
            with graph.origin(weight.node.origin.touched("layout")):
                count, parts = len(graph.nodes), [weight, *sides]
                if weight.shape.rank == 3:  # those of experts, one behind the other
                    parts = [graph.reshape(p, shape=(-1, p.shape.dims[2])) for p in parts]
                made[weight] = graph.append(lookup("split_blocks")(scheme=scheme), tuple(parts))
            order.extend(graph.nodes[count:])
            del graph.nodes[count:]
        return made[weight]

    for node in list(graph.nodes):
        if node.op.name in _PACKED and _is_packed(node):
            record: Any = node.op
            sides, layout = _sides(node), GGUF_SCHEMES[row_planes.layout_of(record.scheme)]
            if record.name == "dequant_grouped_matmul":
                x, w, ids = node.inputs[:3]
                node.inputs = (x, split(w, record.scheme, sides), ids)
                node.op = PackedPlanesGroupedMatMul(
                    scheme=layout,
                    experts=int(w.shape.dims[0]),  # type: ignore[arg-type]
                )
            elif record.name == "dequant_matmul":
                node.inputs = (node.inputs[0], split(node.inputs[1], record.scheme, sides))
                node.op = PackedPlanesMatMul(scheme=layout)
            else:
                k = record.scheme.row_elements(node.inputs[0].shape.dims[1])
                node.inputs = (split(node.inputs[0], record.scheme, sides), node.inputs[1])
                node.op = PackedPlanesGather(scheme=layout, k=k)
        order.append(node)
    graph.nodes = order
    for position, node in enumerate(order):
        node.id = position
    return graph


_LARGE = 1 << 24  # numbers of a weight that streams through shared memory for one row
_MOST_UNPACKED = 256 << 20  # bytes of a weight in scratch memory


def _unpacks(m: int, k: int, n: int) -> bool:
    """Whether a weight is decoded once for all rows."""
    return not is_asked() and m > FEW_ROWS and n % 2 == 0 and 2 * n * k <= _MOST_UNPACKED


def _scratch(node: Node) -> int:
    """Digits of x; x in f16; or the decoded weight and its scales, and what a product of f16
    needs."""
    x, w = node.inputs[:2]
    record: Any = node.op
    m = upper_bound(prod(x.shape.dims[:-1], start=1), node.graph.live)
    k, n = int(x.shape.dims[-1]), int(node.output.shape.dims[-1])  # type: ignore[arg-type]
    if decodes(node, m):
        return plan_packed(m, k, n, bool(record.gate)).bytes
    if takes_digits(node, m):
        return m * (k // 32) * RECORD
    n = int(w.shape.dims[0])  # type: ignore[arg-type]
    if not m or not _unpacks(m, k, n):
        return 0
    return _plan_at(k, n) + plan_product(m, k, n, x.dtype, f16, groups=True, planes=1).bytes


def _plan_at(k: int, n: int) -> int:
    """Where scratch memory of the product begins."""
    return aligned(2 * n * k) + aligned(4 * n)


def _unpacked(node: Node, ctx: Context, stride: Dim, m: Dim, k: int, n: int) -> list[KernelLaunch]:
    """The product with the weight in f16: it and x keep 11 bits. Gates and residuals are fused into
    products of few rows alone, so there are none here."""
    x, w = node.inputs[:2]
    record: Any = node.op
    most = ctx.upper(m)
    plan = plan_product(most, k, n, x.dtype, f16, groups=True, planes=1)
    scales = Scratch(node, aligned(2 * n * k))
    kernel = UnpackWeight(PackedRows(record.scheme.name), k)
    unpack = KernelLaunch(
        kernel, [Pointer(w), Scratch(node), scales, n], blocks=-(-n // kernel.rows)
    )
    rows = ManyRows(
        node, plan, x, stride, m, most, k, n, f16, Epilogue(node.output.dtype),
        [Pointer(node.output)], _plan_at(k, n),
    )  # fmt: skip
    return [unpack, *rows.launches([Scratch(node)], column_scales=scales)]


def _few(node: Node, ctx: Context, epilogue: Epilogue, args: list[KernelArg]) -> list[KernelLaunch]:
    """The product of a few rows. They are split before if weights are large, by the norm if there
    is one, else by its blocks."""
    x, w = node.inputs[:2]
    record: Any = node.op
    m, k, n = args[5], int(x.shape.dims[-1]), int(args[4])  # type: ignore[arg-type]
    most, norm = ctx.upper(m), ctx.norms.get(x)  # type: ignore[arg-type]
    is_large = int(w.shape.dims[0]) * k >= _LARGE  # type: ignore[arg-type]
    splits = norm is not None or (is_large and takes_digits(node, most))
    group = m if isinstance(m, int) and m <= MOST_ROWS else MOST_ROWS
    few = few_packed_rows_for(record.scheme.name, group, k, n, epilogue, m != group, splits)
    blocks = -(-most // group) * few.blocks(n)
    if not splits:
        return [KernelLaunch(few, args, blocks=blocks)]
    if norm is None:
        split = SplitDigits(k)
        first = KernelLaunch(split, [*args[:2], Scratch(node), m], blocks=split.blocks(most))
    else:
        made: Any = norm.op
        given, gamma = norm.inputs
        kernel = RowNorm(
            given.dtype, gamma.dtype, k, made.eps, are_fixed([gamma], ctx), digits=True
        )
        first = KernelLaunch(
            kernel, [Pointer(given), k, Pointer(gamma), Scratch(node), m], blocks=most
        )
    rest = [Scratch(node), k // 32 * RECORD, *args[2:]]
    return [first, KernelLaunch(few, rest, blocks=blocks)]


def _decoded(node: Node, ctx: Context, stride: Dim, m: Dim, k: int, n: int) -> list[KernelLaunch]:
    """The product by warps that decode weights to f16; x is rounded to f16, too."""
    x, w, *residual = node.inputs
    record: Any = node.op
    scheme, most, pair = record.scheme.name, ctx.upper(m), bool(record.gate)
    plan = plan_packed(most, k, n, pair)
    rows, scales = Scratch(node), Scratch(node, plan.scales_at)
    norm, unit = ctx.norms.get(x), unit_of(scheme)
    if norm is None:
        planes = Planes(x.dtype, f16, 1, k, True, unit)
        args: list[KernelArg] = [Pointer(x), stride, rows, 0, scales, m]
        first = KernelLaunch(planes, args, blocks=planes.blocks(most))
    else:
        made: Any = norm.op
        given, gamma = norm.inputs
        normed = RowNorm(given.dtype, gamma.dtype, k, made.eps, are_fixed([gamma], ctx), unit=unit)
        args = [Pointer(given), k, Pointer(gamma), rows, m, scales]
        first = KernelLaunch(normed, args, blocks=most)
    added = residual[0].dtype if residual else None
    epilogue = Epilogue(node.output.dtype, record.gate or "none", residual=added, pair=pair)
    kernel = PackedGemm(scheme, k, n, plan.width, plan.splits, epilogue)
    divided: list[KernelArg] = [0, 0]
    if plan.splits > 1:
        divided = [Scratch(node, plan.partial_at), Counters(plan.tiles)]
    blocks = blocks_of(plan)
    args = [
        TensorMap(rows, Matrix(f16, most, k, k, plan.width)), scales, Pointer(w),
        Pointer(w, n * w.shape.dims[1]) if pair else 0, *divided, m, blocks,
        *[Pointer(v) for v in (node.output, *residual)],
    ]  # fmt: skip
    return [first, KernelLaunch(kernel, args, blocks=blocks)]


def _reads(node: Node, layouts: Layouts) -> bool:
    x = node.inputs[0]
    return row_stride(x, layouts) is not None and is_aligned(x, layouts)


@lowers("packed_planes_matmul", strided=_reads, scratch=_scratch)
def lower_packed_matmul(node: Node, ctx: Context) -> list[KernelLaunch]:
    x, w, *residual = node.inputs
    record: Any = node.op
    m, k, n = prod(x.shape.dims[:-1], start=1), x.shape.dims[-1], node.output.shape.dims[-1]
    stride = row_stride(x, ctx)
    assert isinstance(k, int) and isinstance(n, int) and stride is not None
    if not ctx.upper(m):
        return []
    if ctx.cpu == HOPPER and decodes(node, ctx.upper(m)):
        return _decoded(node, ctx, stride, m, k, n)
    if ctx.cpu == HOPPER and _unpacks(ctx.upper(m), k, n):
        return _unpacked(node, ctx, stride, m, k, n)
    group = m if isinstance(m, int) and m <= MOST_ROWS else MOST_ROWS
    scheme, added = record.scheme.name, residual[0].dtype if residual else None
    weight = PackedRows(scheme)
    epilogue = Epilogue(
        node.output.dtype, record.gate or "none", residual=added, pair=bool(record.gate)
    )
    fixed = is_asked()
    has_bytes = x.dtype is f32 and takes_bytes(node) and not fixed
    few = group > 1 and has_bytes
    norm, given, more = (None, x, []) if few else norm_before(x, ctx)
    second = Pointer(w, n * w.shape.dims[1]) if record.gate else 0
    ends = [Pointer(v) for v in (node.output, *residual)]
    args = [Pointer(given), stride, Pointer(w), second, n, m, *ends, *more]
    if ctx.cpu == HOPPER and m == 1 and has_bytes and (
        n * k * (2 if record.gate else 1) >= _LARGE
    ):  # fmt: skip
        stream = stream_gemv_for(scheme, k, n, epilogue, norm)
        if stream is not None:
            return [KernelLaunch(stream, args, blocks=stream.blocks)]
    if few:
        return _few(node, ctx, epilogue, args)
    groups = -(-ctx.upper(m) // group)
    many = m != group or fixed  # else one row is multiplied as integers, and only that
    kernel = gemv_for(weight, x.dtype, group, k, n, epilogue, many, norm)
    return [KernelLaunch(kernel, args, blocks=groups * kernel.blocks(n))]


@lowers("packed_planes_gather", strided=False)
def lower_packed_gather(node: Node, ctx: Context) -> list[KernelLaunch]:
    table, ids = node.inputs
    record: Any = node.op
    kernel = DecodeRows(PackedRows(record.scheme.name), ids.dtype, record.k)
    count = ids.shape.num_elements
    if not ctx.upper(count):
        return []
    args = [
        Pointer(table), Pointer(ids), Pointer(node.output), count, table.shape.dims[0], Status(),
        NodeNumber(node),
    ]  # fmt: skip
    return [KernelLaunch(kernel, args, blocks=-(-ctx.upper(count) // kernel.rows))]
