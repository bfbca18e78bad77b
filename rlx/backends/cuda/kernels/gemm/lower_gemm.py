"""Lowering of matmuls: kernels of blocks where operands lie well, loop nests for the rest.

Weights that only depend on params are laid out once, so that the columns of a row follow each
other: `lay_out_weights` rewrites the template for that.
"""

from __future__ import annotations

from math import prod

from rlx.backends.cuda.batch_invariance import is_asked
from rlx.backends.cuda.kernels.gemm.f32_product import f32_scratch, lower_f32
from rlx.backends.cuda.kernels.gemm.few_rows import FEW, STEP, few_rows_for
from rlx.backends.cuda.kernels.gemm.gemv import gemv_for
from rlx.backends.cuda.kernels.gemm.lower_norm import norm_before
from rlx.backends.cuda.kernels.gemm.many_rows import (
    ManyRows,
    are_added_in_pairs,
    are_fixed,
    can_be_mapped,
)
from rlx.backends.cuda.kernels.gemm.plan import HOPPER, plan_product
from rlx.backends.cuda.kernels.gemm.problem import (
    MOST_ROWS,
    Product,
    is_product,
    product_of,
    suits_gemv,
)
from rlx.backends.cuda.kernels.gemm.weight_rows import FloatRows
from rlx.backends.cuda.lower_loops import lower_region, scratch_bytes
from rlx.backends.cuda.lowering import Context, KernelArg, KernelLaunch, lowers
from rlx.backends.kernel_args import Pointer
from rlx.ir.dim import upper_bound
from rlx.ir.graph import Graph
from rlx.ir.node import Node, Value
from rlx.ir.op import lookup
from rlx.passes.rewrite import param_only_nodes
from rlx.passes.views import find_views

_PRODUCTS = ("matmul", "fused_matmul_bias_act", "fused_swiglu")


def _scratch(node: Node) -> int:
    """Temporaries of nests, or planes and partial results."""
    nests = max(scratch_bytes(node), f32_scratch(node))
    if not is_product(node):
        return nests
    m = upper_bound(prod(node.inputs[0].shape.dims[:-1], start=1), node.graph.live)
    k, n = (int(d) for d in node.inputs[1].shape.dims)  # type: ignore[arg-type]
    if not m or not k or not n:
        return nests
    types, pair = (node.inputs[0].dtype, node.inputs[1].dtype), node.op.name == "fused_swiglu"
    plans = [plan_product(m, k, n, *types, pair, groups) for groups in (False, True)]
    return max(nests, *(plan.bytes for plan in plans))


@lowers("matmul", scratch=_scratch)
@lowers("fused_matmul_bias_act", "fused_swiglu", "wide_matmul", when=is_product, scratch=_scratch)
def lower_product(node: Node, ctx: Context) -> list[KernelLaunch]:
    product = product_of(node, ctx)
    if is_asked():
        return _lower_fixed(node, product, ctx)
    if product is not None and suits_gemv(product):
        return [_gemv(product, ctx)]
    if product is not None and _suits_gemm(product):
        return _gemm(product, ctx)
    wide = lower_f32(node, ctx)
    if wide is not None:
        return wide
    if product is not None and suits_gemv(product, MOST_ROWS):
        return [_gemv_groups(product, ctx)]
    return lower_region(node, ctx)


def _lower_fixed(node: Node, p: Product | None, ctx: Context) -> list[KernelLaunch]:
    """By kernels that add up in the same order for any number of rows."""
    if p is not None and _suits_gemm(p):
        return _gemm(p, ctx)
    if p is not None and suits_gemv(p):
        return [_gemv(p, ctx)]
    if p is not None and suits_gemv(p, MOST_ROWS):
        return [_gemv_groups(p, ctx)]
    return lower_region(node, ctx)


def _gemv(p: Product, ctx: Context) -> KernelLaunch:
    assert isinstance(p.m, int)
    if 1 < p.m <= FEW and _suits_few_rows(p) and not is_asked():
        few = few_rows_for(p.m, p.k, p.n, p.epilogue)
        return KernelLaunch(few, _gemv_args(p, p.x), blocks=few.blocks(p.n))
    weight = FloatRows(p.weights[0].dtype)
    norm, x, more = norm_before(p.x, ctx)
    kernel = gemv_for(weight, p.x.dtype, p.m, p.k, p.n, p.epilogue, norm=norm)
    return KernelLaunch(kernel, [*_gemv_args(p, x), *more], blocks=kernel.blocks(p.n))


def _suits_few_rows(p: Product) -> bool:
    return p.weights[0].dtype.name == "bf16" and p.x.dtype.name == "f32" and p.k % STEP == 0


def _gemv_args(p: Product, x: Value) -> list[KernelArg]:
    second: KernelArg = Pointer(p.weights[1]) if p.epilogue.pair else 0
    return [Pointer(x), p.x_stride, Pointer(p.weights[0]), second, p.n, p.m, *p.epilogue_args]


def _gemv_groups(p: Product, ctx: Context) -> KernelLaunch:
    """Many rows of f32, some at a time: weights come from the cache after the first group."""
    weight, m = FloatRows(p.weights[0].dtype), MOST_ROWS
    kernel = gemv_for(weight, p.x.dtype, m, p.k, p.n, p.epilogue, many=True)
    groups = -(-ctx.upper(p.m) // m)
    return KernelLaunch(kernel, _gemv_args(p, p.x), blocks=groups * kernel.blocks(p.n))


# -- many rows -------------------------------------------------------------------------------------


def _suits_gemm(p: Product) -> bool:
    """16-bit weights whose rows, or columns, are multiples of 16 bytes."""
    if p.weights[0].dtype.bytes != 2 or p.k % 8:
        return False
    if p.stride_k == 1 and (p.stride_n == p.k or p.n == 1):
        return True
    return p.stride_n == 1 and p.stride_k == p.n and p.n % 8 == 0 and p.k * p.n < 1 << 31


def _gemm(p: Product, ctx: Context) -> list[KernelLaunch]:
    m, w = ctx.upper(p.m), p.weights[0].dtype
    groups = ctx.cpu == HOPPER and p.stride_k == 1 and are_added_in_pairs(p.n, p.extras, ctx)
    if p.x.dtype is w and not can_be_mapped(p.x, p.x_stride, p.m, ctx):
        groups = False
    if not all(isinstance(ctx.offset(v), int) for v in p.weights):
        groups = False
    plan = plan_product(m, p.k, p.n, p.x.dtype, w, p.epilogue.pair, groups)
    rows = ManyRows(
        p.node, plan, p.x, p.x_stride, p.m, m, p.k, p.n, w, p.epilogue, p.epilogue_args,
        fixed=are_fixed(p.weights, ctx),
    )  # fmt: skip
    return rows.launches([Pointer(v) for v in p.weights], by_rows=p.stride_k != 1)


# -- weights ---------------------------------------------------------------------------------------


def lay_out_weights(graph: Graph) -> Graph:
    """Weights [k, n] that lie row by row are transposed once, when params are prepared."""
    param_only, views = param_only_nodes(graph.nodes), find_views(graph.nodes)
    made: dict[Value, Value] = {}
    order: list[Node] = []

    def laid_out(value: Value) -> Value:
        if value not in made:
            count = len(graph.nodes)
            with graph.origin(value.node.origin.touched("layout")):
                rows = graph.append(lookup("transpose")(axes=(1, 0)), (value,))
                rows = graph.append(lookup("contiguous")(), (rows,))
                made[value] = graph.append(lookup("transpose")(axes=(1, 0)), (rows,))
            order.extend(graph.nodes[count:])
            del graph.nodes[count:]
        return made[value]

    for node in list(graph.nodes):
        if node.op.name in _PRODUCTS and is_product(node):
            last = 3 if node.op.name == "fused_swiglu" else 2
            inputs = list(node.inputs)
            for i in range(1, last):
                v = inputs[i]
                placed = views.get(v)
                if v.node in param_only and (placed is None or placed[1].strides[0] != 1):
                    inputs[i] = laid_out(v)
            node.inputs = tuple(inputs)
        order.append(node)
    graph.nodes = order
    for position, node in enumerate(order):
        node.id = position
    return graph
