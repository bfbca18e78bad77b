"""Lowering of LSTM and GRU: one launch that repeats itself.

Weights are put into blocks, once by `prepare` where they are constant, else in every run."""

from __future__ import annotations

from typing import Any

from rlx.backends.cpu.kernels.control import LoopPreheader
from rlx.backends.cpu.kernels.recurrent.cells import CELL_BYTES, GATES, RecurrentStep
from rlx.backends.cpu.layouts.recurrent_blocks import BlockedRecurrence
from rlx.backends.cpu.lowering import Context, KernelArg, KernelLaunch, Pointer, Scratch, lowers
from rlx.ir.dtype import f32
from rlx.ir.graph import Graph
from rlx.ir.node import Node, Value
from rlx.ir.op import Cost
from rlx.llvm.target import Target
from rlx.passes.rewrite import Editor
from rlx.support.machine import usable_cores

CELLS = frozenset(GATES)


def _has_kernel(node: Node) -> bool:
    x_gates, r = node.inputs[:2]
    return x_gates.shape.dtype is f32 and r.shape.is_static and r.shape.static_dims[0] > 0


def block_weights(graph: Graph, target: Target) -> Graph:
    """Put the recurrent weights of LSTM and GRU into blocks of units."""
    editor, lanes = Editor(graph, "recurrent_blocks"), target.lanes(32)
    for node in list(graph.nodes):
        if node.op.name in CELLS and _has_kernel(node):
            x_gates, r, *rest = node.inputs
            op: Any = node.op
            with editor.building(node):
                blocks = _blocked(graph, r, op.gates, lanes)
                made = BlockedRecurrence(op.name, r.shape.static_dims[0], op.reverse)
                results = graph.append_node(made, [x_gates, blocks, *rest]).outputs
            for old, new in zip(node.outputs, results, strict=True):
                editor.replace(old, new)
    return editor.finish()


def _blocked(g: Graph, r: Value, gates: int, lanes: int) -> Value:
    """[H, gates · H] as [H / lanes, H, gates, lanes]."""
    hidden = r.shape.static_dims[0]
    more = -hidden % lanes
    made = g.reshape(r, shape=(hidden, gates, hidden))
    if more:
        made = g.pad(made, low=(0, 0, 0), high=(0, 0, more))
    made = g.reshape(made, shape=(hidden, gates, (hidden + more) // lanes, lanes))
    return g.contiguous(g.transpose(made, axes=(2, 0, 1, 3)))


def _scratch(node: Node, target: Target, threads: int) -> int:
    return max(threads, usable_cores()) * CELL_BYTES  # planning may know of fewer than run later


@lowers("blocked_recurrence", scratch=_scratch)
def lower_blocked(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    return _launches(node, op.cell, op.hidden, op.reverse, blocked=True)


@lowers("lstm", "gru", scratch=_scratch, when=_has_kernel)
def lower_plain(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    hidden = node.inputs[1].shape.static_dims[0]
    return _launches(node, op.name, hidden, op.reverse, blocked=False)


def _step_cost(node: Node) -> Cost:
    """Of one call of the kernel: a sequence of one step."""
    x_gates, *inputs = (v.shape for v in node.inputs)
    y, *last = (v.shape for v in node.outputs)
    first, one = (s.with_dims((1, *s.dims[1:])) for s in (x_gates, y))
    return node.op.cost([first, *inputs], [one, *last])


def _launches(
    node: Node, cell: str, hidden: int, reverse: bool, blocked: bool
) -> list[KernelLaunch]:
    has_bias = cell == "gru" and len(node.inputs) == 4
    spec = RecurrentStep(cell, hidden, has_bias, reverse, blocked)
    steps, batch = node.inputs[0].shape.dims[:2]
    cells: list[KernelArg] = [Scratch(node), CELL_BYTES]
    operands: list[KernelArg] = [Pointer(v) for v in (*node.inputs, *node.outputs)]
    cost = _step_cost(node)
    return [
        KernelLaunch(
            LoopPreheader(), cells, node.inputs, node.outputs, uses_scratch=True, bytes=CELL_BYTES
        ),
        KernelLaunch(
            spec, [*operands, *cells, steps, batch], jump=True, fence=True,
            flops=cost.flops, bytes=cost.bytes,
        ),
    ]  # fmt: skip
