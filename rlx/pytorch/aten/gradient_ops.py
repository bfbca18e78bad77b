"""Backward parts of fused activations and losses. AOTAutograd asks for them by name; what is not
here it decomposes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlx.errors import UnsupportedError
from rlx.ir.node import Node, Value
from rlx.passes.grad.rules import VJP, load_rules
from rlx.pytorch.aten.table import aten

if TYPE_CHECKING:
    from rlx.pytorch.lower_aten import Lowering


def pulled_back(low: Lowering, node: Node, cotangent: Value) -> Sequence[Value]:
    """The cotangents of a node's operands by the op's own rule. The node itself computes nothing:
    no one reads it, so it is removed."""
    load_rules()
    rule = VJP.get(node.op.name)
    if rule is None:
        raise UnsupportedError("no rule of derivatives", where=node.op.name, got=str(node.op))
    return rule(node.op, low.g, node.inputs, node.outputs, [cotangent])


def activation_backward(low: Lowering, op: str, gradient: Value, x: Value, **options: Any) -> Value:
    made: Value = low.g.apply(op, x, **options)
    return pulled_back(low, made.node, gradient)[0]


@aten("gelu_backward.default")
def gelu_backward(low: Lowering, gradient: Value, x: Value, *, approximate: str = "none") -> Value:
    op = "gelu_tanh" if approximate == "tanh" else "gelu"
    return activation_backward(low, op, gradient, x)


@aten("silu_backward.default")
def silu_backward(low: Lowering, gradient: Value, x: Value) -> Value:
    return activation_backward(low, "silu", gradient, x)


@aten("threshold_backward.default")
def threshold_backward(low: Lowering, gradient: Value, x: Value, threshold: Any) -> Value:
    element = low.out.dtype
    above = low.g.gt(x, low.scalar(threshold, x.shape.dtype))
    return low.g.where(above, gradient, low.scalar(0, element))


@aten("sigmoid_backward.default")
def sigmoid_backward(low: Lowering, gradient: Value, y: Value) -> Value:
    return low.g.mul(gradient, low.g.mul(y, low.g.sub(1.0, y)))


@aten("tanh_backward.default")
def tanh_backward(low: Lowering, gradient: Value, y: Value) -> Value:
    return low.g.mul(gradient, low.g.sub(1.0, low.g.square(y)))


@aten("_softmax_backward_data.default")
def softmax_backward(low: Lowering, gradient: Value, y: Value, axis: int, _: Any) -> Value:
    """(dy − Σ dy · y) · y"""
    g, product = low.g, low.g.mul(gradient, y)
    total = g.sum(product, axis=(axis % y.shape.rank,), keepdims=True)
    return g.sub(product, g.mul(y, total))


@aten("_log_softmax_backward_data.default")
def log_softmax_backward(low: Lowering, gradient: Value, y: Value, axis: int, _: Any) -> Value:
    """dy − e^y · Σ dy"""
    g = low.g
    total = g.sum(gradient, axis=(axis % y.shape.rank,), keepdims=True)
    return g.sub(gradient, g.mul(g.exp(y), total))
