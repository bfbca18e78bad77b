"""Fused ops whose backward part is a fused op too: attention, norms, cross-entropy, rope.

Forward mode, and second derivatives, go through the decompositions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx.ir.attrs import MaskKind
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.ir.op import Op, lookup
from rlx.ir.ops._common import wide
from rlx.ir.ops.attention import transposed_heads
from rlx.passes.grad.forward import push_forward
from rlx.passes.grad.reverse import decomposed, linearize
from rlx.passes.grad.rules import (
    DECOMPOSED_FORWARD,
    Grads,
    Pullback,
    add_any,
    in_type,
    jvp,
    linearized,
    unbroadcast,
    vjp,
)

Values = Sequence[Value]
DECOMPOSED_FORWARD |= {
    "rms_norm", "layer_norm", "fused_residual_rms_norm", "fused_residual_layer_norm",
    "softmax_cross_entropy",
}  # fmt: skip


def _through_body(
    op: Op, g: Graph, inputs: Values, wanted: Sequence[bool]
) -> tuple[Values, Pullback]:
    body = decomposed(op, inputs)
    assert body is not None
    return linearize(g, body, inputs, wanted)


# -- attention ------------------------------------------------------------------------------------


@linearized("attention")
def _attention(
    op: Any, g: Graph, inputs: Values, wanted: Sequence[bool]
) -> tuple[Values, Pullback]:
    """Forward keeps the log-sum-exp of each row of scores, and not the scores."""
    if op.kv_scheme is not None:
        return _through_body(op, g, inputs, wanted)
    given = {f: v for f, v in op.attributes().items() if f != "kv_scheme"}
    out, lse = g.append_node(lookup("attention_with_lse")(**given), inputs).outputs
    mask, sinks = op.extras(*_padded(inputs[3:], 2))
    wants_bias = op.mask_kind == MaskKind.BIAS and wanted[3]
    wants_sinks = sinks is not None and wanted[-1]
    given = {f: v for f, v in given.items() if f in lookup("attention_backward").fields}
    back = lookup("attention_backward")(**given, wants_bias=wants_bias)

    def backward(grads: Grads) -> Grads:
        (ct,) = grads
        masks = [] if mask is None else [mask]
        found = g.append_node(back, [*inputs[:3], out, lse, ct, *masks]).outputs
        results: list[Value | None] = [*found[:3], *[None] * len(inputs[3:])]
        if wants_bias:
            results[3] = found[3]
        if wants_sinks:
            results[-1] = _sinks(op, g, sinks, (out, lse, ct))
        return results

    return [out], backward


def _padded(values: Values, count: int) -> list[Value | None]:
    return [*values, *[None] * (count - len(values))]


def _sinks(op: Any, g: Graph, sinks: Value, saved: Values) -> Value:
    """A sink has the weight exp(sink − lse) in each row, and a value of zero: what it takes is
    −weight · Σ ct · out."""
    out, lse, ct = saved
    heads = op.num_heads
    column = g.reshape(wide(g, sinks), shape=(heads, 1))
    weight = g.exp(g.sub(column, wide(g, lse)))
    rows = [transposed_heads(g, v, op.head_dim, op.q_layout) for v in (out, ct)]
    taken = g.mul(weight, g.sum(g.mul(*rows), axis=(-1,)))
    return unbroadcast(g, g.reshape(g.neg(g.sum(taken, axis=(0, 2))), (heads,)), sinks.shape)


@linearized("rope")
def _rope(op: Any, g: Graph, inputs: Values, wanted: Sequence[bool]) -> tuple[Values, Pullback]:
    """Rotated back: by −sin."""
    if wanted[1] or wanted[2]:
        return _through_body(op, g, inputs, wanted)
    _, cos, sin, *positions = inputs

    def backward(grads: Grads) -> Grads:
        back = g.append_node(op, [grads[0], cos, g.neg(sin), *positions]).output
        return [back, *[None] * (len(inputs) - 1)]

    return g.append_node(op, inputs).outputs, backward


@jvp("rope")
def _rope_jvp(op: Any, g: Graph, inputs: Values, outputs: Values, tangents: Grads) -> Grads:
    if tangents[1] is None and tangents[2] is None:
        return [g.append_node(op, [tangents[0], *inputs[1:]]).output]
    body = decomposed(op, inputs)
    assert body is not None
    return push_forward(g, body, inputs, tangents)[1]


# -- norms ----------------------------------------------------------------------------------------


@vjp("rms_norm", "layer_norm")
def _norm(op: Any, g: Graph, inputs: Values, outputs: Values, grads: Grads) -> Grads:
    x, gamma, *beta = inputs
    back = lookup(f"{op.name}_backward")(eps=op.eps, has_beta=bool(beta))
    found = g.append_node(back, [x, gamma, grads[0]]).outputs
    return _in_types(g, found, inputs)


@vjp("fused_residual_rms_norm", "fused_residual_layer_norm")
def _residual_norm(op: Any, g: Graph, inputs: Values, outputs: Values, grads: Grads) -> Grads:
    """Both terms of the sum get its cotangent."""
    gamma, *beta = inputs[2:]
    dy, dsum = grads
    found: Sequence[Value | None] = [dsum, *[None] * (1 + len(beta))]
    if dy is not None:
        back = lookup(f"{op.norm.name}_backward")(eps=op.eps, has_beta=bool(beta))
        sums = [] if dsum is None else [dsum]
        found = g.append_node(back, [outputs[1], gamma, dy, *sums]).outputs
    return _in_types(g, [found[0], *found], inputs)


def _in_types(g: Graph, grads: Grads, like: Values) -> list[Value | None]:
    pairs = zip(grads, like, strict=True)
    return [None if ct is None else in_type(g, ct, v.shape.dtype) for ct, v in pairs]


# -- cross-entropy --------------------------------------------------------------------------------


@vjp("softmax_cross_entropy")
def _cross_entropy(op: Any, g: Graph, inputs: Values, outputs: Values, grads: Grads) -> Grads:
    """The backward op for the loss; for the log-sum-exp, ct · softmax."""
    (logits, labels), (_, lse), (dloss, dlse) = inputs, outputs, grads
    found: Value | None = None
    if dloss is not None:
        back = lookup("softmax_cross_entropy_backward")(ignore_index=op.ignore_index)
        found = g.append_node(back, [logits, labels, lse, dloss]).output
    if dlse is not None:
        column, share = (g.reshape(v, shape=(*v.shape.dims, 1)) for v in (lse, dlse))
        p = g.mul(g.exp(g.sub(wide(g, logits), column)), share)
        found = add_any(g, found, in_type(g, p, logits.shape.dtype))
    return [found, None]
