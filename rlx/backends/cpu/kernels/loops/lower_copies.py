"""Lowering of ops that are strided copies: concat, pad, and contiguous writes to states."""

from __future__ import annotations

from rlx.backends.carried_state import is_written
from rlx.backends.cpu.kernels.loops.indexing import write_at
from rlx.backends.cpu.kernels.loops.lower_region import launch_for
from rlx.backends.cpu.lowering import Context, KernelLaunch, lowers
from rlx.ir.node import Node
from rlx.loops.strided_copies import copy_nests


@lowers("concat", "pad", strided=True)
def lower_copies(node: Node, ctx: Context) -> list[KernelLaunch]:
    cost = node.op.cost([v.shape for v in node.inputs], [v.shape for v in node.outputs])
    launches = [launch_for(node, ctx, nest) for nest in copy_nests(node, ctx.strides)]
    for launch in launches:
        launch.bytes = cost.bytes // len(launches)
    return launches


@lowers("state_update", strided=lambda node: len(node.inputs) == 2)
def lower_state_update(node: Node, ctx: Context) -> list[KernelLaunch]:
    if 0 in node.inputs[1].shape.dims or is_written(node, ctx):
        return []
    return [write_at(node)] if len(node.inputs) > 2 else lower_copies(node, ctx)
