"""Cheap values of the forward part that the backward part computes again, instead of keeping them.

`silu(gate) * up` needs silu(gate) again for the cotangent of `up`, thousands of nodes later, where
the cotangent of `gate` reads `gate` itself. An elementwise function of one operand is computed
where it is used if its operand lives as long anyway: what is kept is one array and not two, the
region there reads as much as before, and the bits are the same.
"""

from __future__ import annotations

from rlx.ir.node import Node, Value
from rlx.passes.rewrite import Editor

MOST_COPIES = 2


def recompute_far(editor: Editor, span: int) -> None:
    """Give users of cheap values that are more than `span` nodes away copies of their own."""
    for node in [n for n in editor.graph.nodes if _is_cheap(n)]:
        (x,), value = node.inputs, node.output
        far = [u for u in dict.fromkeys(editor.users[value]) if u.id - node.id > span]
        if not far or len(far) > MOST_COPIES or value in editor.returned or x in editor.stale:
            continue
        end = max(u.id for u in editor.users[x])
        if all(_takes(user, value) and user.id <= end for user in far):
            for user in far:
                _copy(editor, node, user)


def _is_cheap(node: Node) -> bool:
    """An elementwise function of one array, which is no argument: those live on anyway."""
    if not node.op.is_elementwise or len(node.inputs) != 1:
        return False
    x = node.inputs[0]
    return x.shape.rank > 1 and not x.node.op.is_source


def _takes(user: Node, value: Value) -> bool:
    """Whether a loop nest around `user` has an element of `value` for each of its own."""
    return user.op.is_elementwise and user.outputs[0].shape.same_dims(value.shape)


def _copy(editor: Editor, node: Node, user: Node) -> None:
    with editor.building(user):
        again = editor.graph.append_node(node.op, list(node.inputs)).output
    editor.redirect(user, node.output, again)
