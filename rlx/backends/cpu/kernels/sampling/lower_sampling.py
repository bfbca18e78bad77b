"""Lowering of top-k along an axis and of token sampling."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from rlx.backends.cpu.kernels.loops.lower_region import launch_for
from rlx.backends.cpu.kernels.sampling.sample import Sample
from rlx.backends.cpu.kernels.sampling.top_k import TopK
from rlx.backends.cpu.lowering import Context, KernelArg, KernelLaunch, Pointer, Scratch, lowers
from rlx.ir.dim import Dim, upper_bound
from rlx.ir.lir import aligned, contiguous_strides
from rlx.ir.node import Node, Value
from rlx.ir.shape import Shape, normalize_axis
from rlx.llvm.target import Target
from rlx.loops.strided_copies import StridedView, copy
from rlx.loops.trace import Buffer
from rlx.support.machine import usable_cores


def _axis_last(items: tuple[Dim, ...], axis: int) -> tuple[Dim, ...]:
    """The items with that of the axis last."""
    return (*items[:axis], *items[axis + 1 :], items[axis])


def _axis(node: Node) -> int:
    op: Any = node.op
    return normalize_axis(op.axis, node.inputs[0].shape.rank)


def _is_last(node: Node) -> bool:
    return _axis(node) == node.inputs[0].shape.rank - 1


def _axis_last_shapes(node: Node) -> list[Shape]:
    """The shapes of operand and results with the axis last."""
    shapes = [v.shape for v in (*node.inputs, *node.outputs)]
    return [s.with_dims(_axis_last(s.dims, _axis(node))) for s in shapes]


def _heap_bytes(node: Node) -> int:
    op: Any = node.op
    return aligned(op.k * TopK(node.inputs[0].dtype, op.largest).entry_bytes())


def _offsets(node: Node) -> list[int]:
    """Scratch offsets of the transposed tensors, and the end."""
    offsets = [0]
    for shape in [] if _is_last(node) else _axis_last_shapes(node):
        offsets.append(offsets[-1] + aligned(shape.upper_bytes(node.graph.live)))
    return offsets


def _top_k_scratch(node: Node, target: Target, threads: int) -> int:
    return _offsets(node)[-1] + max(threads, usable_cores()) * _heap_bytes(node)


@lowers("top_k", scratch=_top_k_scratch)
def lower_top_k(node: Node, ctx: Context) -> list[KernelLaunch]:
    if 0 in node.outputs[0].shape.dims:
        return []
    op: Any = node.op
    x, offsets = node.inputs[0], _offsets(node)
    last, axis_last = _is_last(node), _axis_last_shapes(node)
    *others, size = axis_last[0].dims
    pointers: list[KernelArg] = [Scratch(node, at) for at in offsets[:-1]]
    if last:
        pointers = [Pointer(v) for v in (x, *node.outputs)]
    heap = [Scratch(node, offsets[-1]), _heap_bytes(node)]
    args = [*pointers, prod(others, start=1), size, op.k, *heap]
    cost = op.cost([x.shape], [v.shape for v in node.outputs])
    step = KernelLaunch(
        TopK(x.dtype, op.largest), args, node.inputs if last else [],
        node.outputs if last else [], uses_scratch=True, flops=cost.flops, bytes=cost.bytes,
    )  # fmt: skip
    if last:
        return [step]
    to_last = launch_for(
        node, ctx, _transpose_copy(node, axis_last[0], x, "operand", 0, False), offsets
    )
    from_last = [
        launch_for(node, ctx, _transpose_copy(node, shape, v, "result", j, True), offsets)
        for j, (shape, v) in enumerate(zip(axis_last[1:], node.outputs, strict=True))
    ]
    return [to_last, step, *from_last]


def _transpose_copy(
    node: Node, axis_last: Shape, value: Value, kind: str, number: int, back: bool
) -> Any:
    """A copy between a tensor and its transpose with the axis last."""
    strides = contiguous_strides(value.shape)
    own = StridedView(Buffer(kind, number), value.dtype, _axis_last(strides, _axis(node)))
    temporary = Buffer("temporary", number + 1 if back else 0)
    other = StridedView(temporary, value.dtype, contiguous_strides(axis_last))
    return copy(axis_last.dims, other, own) if back else copy(axis_last.dims, own, other)


# -- sample -----------------------------------------------------------------------------------


def _row_bytes(node: Node) -> int:
    """Scratch bytes of each worker for one row of tokens."""
    logits = node.inputs[0].shape
    each = Sample(logits.dtype, False).entry_bytes()
    return aligned(upper_bound(logits.dims[-1], node.graph.live) * each)


def _sample_scratch(node: Node, target: Target, threads: int) -> int:
    return max(threads, usable_cores()) * _row_bytes(node)


@lowers("sample", scratch=_sample_scratch)
def lower_sample(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    logits, rng, *settings = node.inputs
    *others, size = logits.shape.dims
    args: list[KernelArg] = [Pointer(v) for v in (logits, rng, *node.outputs)]
    args += [prod(others, start=1), size, Scratch(node), _row_bytes(node)]
    if settings:
        args.append(Pointer(settings[0]))
    else:
        numbers = np.array([op.temperature, op.top_k, op.top_p, op.min_p], np.float32)
        args += [int(bits) for bits in numbers.view(np.uint32)]
    cost = op.cost([v.shape for v in node.inputs], [v.shape for v in node.outputs])
    spec = Sample(logits.dtype, bool(settings), rng.shape.rank > 1)
    step = KernelLaunch(spec, args, node.inputs, node.outputs, uses_scratch=True)
    step.flops, step.bytes = cost.flops, cost.bytes
    return [step]
