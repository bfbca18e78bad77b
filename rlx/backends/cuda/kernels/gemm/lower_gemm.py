"""Lowering of matmuls: kernels of blocks where operands lie well, loop nests for the rest.

Weights that only depend on params are laid out once, so that the columns of a row follow each
other: `lay_out_weights` rewrites the template for that.
"""

from __future__ import annotations

from rlx.backends.cuda.kernels.gemm.gemv import MOST_ROWS, gemv_for
from rlx.backends.cuda.kernels.gemm.problem import Product, is_product, product_of
from rlx.backends.cuda.kernels.gemm.weight_rows import FloatRows
from rlx.backends.cuda.lower_loops import lower_region, scratch_bytes
from rlx.backends.cuda.lowering import Context, KernelLaunch, lowers
from rlx.backends.kernel_args import NodeArg, Pointer
from rlx.ir.graph import Graph
from rlx.ir.node import Node, Value
from rlx.ir.op import lookup
from rlx.passes.rewrite import param_only_nodes
from rlx.passes.views import find_views

_PRODUCTS = ("matmul", "fused_matmul_bias_act", "fused_swiglu")


@lowers("matmul", scratch=scratch_bytes)
@lowers("fused_matmul_bias_act", "fused_swiglu", when=is_product, scratch=scratch_bytes)
def lower_product(node: Node, ctx: Context) -> list[KernelLaunch]:
    product = product_of(node, ctx)
    if product is not None and _suits_gemv(product):
        return [_gemv(product)]
    return lower_region(node, ctx)


def _suits_gemv(p: Product) -> bool:
    """A few rows, and rows of the weight that can be loaded 16 bytes at a time."""
    per = 16 // p.weights[0].dtype.bytes
    rows_follow = p.stride_k == 1 and (p.stride_n == p.k or p.n == 1)
    return isinstance(p.m, int) and p.m <= MOST_ROWS and rows_follow and p.k % per == 0


def _gemv(p: Product) -> KernelLaunch:
    assert isinstance(p.m, int)
    weight = FloatRows(p.weights[0].dtype)
    kernel = gemv_for(weight, p.x.dtype, p.m, p.k, p.n, p.epilogue)
    second: NodeArg = Pointer(p.weights[1]) if p.epilogue.pair else 0
    args = [Pointer(p.x), p.x_stride, Pointer(p.weights[0]), second, p.n, *p.epilogue_args]
    return KernelLaunch(kernel, args, blocks=-(-p.n // kernel.outputs))


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
