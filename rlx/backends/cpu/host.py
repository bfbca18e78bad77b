"""Ops that Python does, in the midst of a native run: those of users, by their reference."""

from __future__ import annotations

from rlx.backends.cpu.lowering import Context, Pointer, Step, lowers
from rlx.ir.node import Node


@lowers("custom")
def lower_custom(node: Node, ctx: Context) -> list[Step]:
    words = [Pointer(v) for v in (*node.inputs, *node.outputs)]
    return [Step(None, words, node.inputs, node.outputs, host=node)]
