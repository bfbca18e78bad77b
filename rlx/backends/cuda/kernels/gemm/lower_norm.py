"""Lowering of RMS norms: where one product of one row reads the result, its kernel computes it.

Every block of the product needs the whole row, which is small: it adds up the squares itself, while
its weights are on their way. The norm then needs no launch. Of many rows that one product with
packed weights reads, the launch that rounds or splits them computes it.
"""

from __future__ import annotations

from math import prod
from typing import Any

from rlx.backends.cuda.batch_invariance import is_asked
from rlx.backends.cuda.kernels.gemm.gemv import Norm
from rlx.backends.cuda.kernels.gemm.plan import HOPPER
from rlx.backends.cuda.kernels.gemm.problem import is_aligned, product_of, suits_gemv
from rlx.backends.cuda.kernels.qgemm.few_packed_rows import takes_digits
from rlx.backends.cuda.kernels.qgemm.packed_gemm import decodes
from rlx.backends.cuda.lower_loops import lower_region, scratch_bytes
from rlx.backends.cuda.lowering import Context, KernelArg, KernelLaunch, lowers
from rlx.backends.cuda.merge import overlap
from rlx.backends.kernel_args import Pointer
from rlx.ir.node import Node, Value

_PRODUCTS = ("matmul", "fused_matmul_bias_act", "fused_swiglu")


@lowers("rms_norm", "fused_residual_rms_norm", scratch=scratch_bytes)
def lower_norm(node: Node, ctx: Context) -> list[KernelLaunch]:
    if is_left_to_reader(node, ctx):
        return []
    return lower_region(node, ctx)


def is_left_to_reader(node: Node, ctx: Context) -> bool:
    """Whether the reader of the result computes the norm, which it finds in `ctx.norms`."""
    found = not is_asked() and _can_fuse(node, ctx)
    if found:
        ctx.norms[node.outputs[0]] = node
    return found


def _can_fuse(node: Node, ctx: Context) -> bool:
    """Whether the only reader is a product of one row, or one that rounds many, and nothing
    overwrites the operands of the norm, or reads its second result, before that."""
    inputs, results = node.inputs, node.outputs
    count = 3 if node.op.name == "fused_residual_rms_norm" else 2
    if len(inputs) != count or any(v.dtype.name != "f32" for v in (*inputs, *results[1:])):
        return False
    readers = ctx.users(results[0])
    if any(v is results[0] for v in ctx.lir.outputs):
        return False
    if len(readers) != 1 or not (_is_row(readers[0], node, ctx) or _rounds(readers[0], node, ctx)):
        return False
    if not all(ctx.is_plain(v) and is_aligned(v, ctx) for v in inputs):
        return False
    first, last = ctx.position(node), ctx.position(readers[0])
    between = [n for n in ctx.lir.graph.nodes[first + 1 : last + 1] if not n.op.is_view]
    written = [v for n in between for v in n.outputs] + list(results[1:])
    if any(overlap(ctx.lir, a, b) for a in written for b in inputs):
        return False
    if any(_is_scratch(ctx, n, v) for n in between for v in inputs):
        return False
    if any(overlap(ctx.lir, a, b) for n in between for a in n.outputs for b in results[1:]):
        return False
    same_phase = ctx.lir.phases.get(node) is ctx.lir.phases.get(readers[0])
    return same_phase and all(ctx.position(n) > last for v in results[1:] for n in ctx.users(v))


def _is_row(reader: Node, node: Node, ctx: Context) -> bool:
    """Whether the reader is a product of one row with weights that are read by rows."""
    if reader.inputs[0] is not node.outputs[0]:
        return False
    if prod(reader.inputs[0].shape.dims[:-1], start=1) != 1:
        return False
    if reader.op.name == "packed_planes_matmul":
        return True
    product = product_of(reader, ctx) if reader.op.name in _PRODUCTS else None
    return product is not None and suits_gemv(product)


def _rounds(reader: Node, node: Node, ctx: Context) -> bool:
    """Whether the reader is a product of packed weights and of many rows that are rounded to f16
    before, or of a few that are split."""
    if reader.inputs[0] is not node.outputs[0] or len(node.outputs) > 1:
        return False
    if reader.op.name != "packed_planes_matmul":
        return False
    m = ctx.upper(prod(reader.inputs[0].shape.dims[:-1], start=1))
    return takes_digits(reader, m) or (ctx.cpu == HOPPER and decodes(reader, m))


def _is_scratch(ctx: Context, node: Node, value: Value) -> bool:
    """Whether the scratch memory of a node may be that of a value."""
    _, slot = ctx.lir.home(value)
    first, size = ctx.lir.scratch.get(node.id, (0, 0))
    if slot.kind != "arena" or slot.offset is None or not size:
        return False
    last = slot.offset + value.shape.upper_bytes(ctx.lir.live)
    return first < last and slot.offset < first + size


def norm_before(x: Value, ctx: Context) -> tuple[Norm | None, Value, list[KernelArg]]:
    """The norm that the reader of x computes, what x is then, and args for it."""
    node = ctx.norms.get(x)
    if node is None:
        return None, x, []
    op: Any = node.op
    residual = node.inputs[1] if node.op.name != "rms_norm" else None
    norm = Norm(op.eps, residual is not None)
    args: list[KernelArg] = [Pointer(node.inputs[-1])]
    if residual is not None:
        args += [Pointer(residual), Pointer(node.outputs[1])]
    return norm, node.inputs[0], args
