"""The optimisers of `ai.onnx.preview.training`: one step for any number of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import rlx.numpy as xp
from rlx.numpy.array import Array
from rlx.onnx.call import Call
from rlx.onnx.table import op

DOMAIN = "ai.onnx.preview.training"


def _optimiser(name: str, slots: int) -> Callable[[Any], Any]:
    """An operator on (rate, step, tensors…): the tensors, gradients, then `slots` kinds of state;
    results are new tensors, then their states."""

    def register(function: Callable[..., tuple[Array, ...]]) -> Any:
        @op(name, domain=DOMAIN)
        def update(node: Call, rate: Array, step: Array, *tensors: Array) -> Any:
            count = len(tensors) // (2 + slots)
            if not count or count * (2 + slots) != len(tensors):
                raise node.fault("not as many states as tensors", got=len(tensors))
            columns = [tensors[i * count : (i + 1) * count] for i in range(2 + slots)]
            made = [function(node, rate, step, *row) for row in zip(*columns, strict=True)]
            return tuple([x for column in zip(*made, strict=True) for x in column])

        return update

    return register


@_optimiser("Adagrad", 1)
def adagrad(node: Call, rate: Array, step: Array, x: Array, grad: Array, total: Array) -> Any:
    decay = node.float("decay_factor", 0.0)
    r = rate / (1.0 + step.astype(rate.dtype) * decay)
    g = grad + node.float("norm_coefficient", 0.0) * x
    total = total + g * g
    return x - r * g / (xp.sqrt(total) + node.float("epsilon", 1e-6)), total


@_optimiser("Adam", 2)
def adam(node: Call, rate: Array, step: Array, x: Array, grad: Array, v: Array, h: Array) -> Any:
    alpha, beta = node.float("alpha", 0.9), node.float("beta", 0.999)
    g = grad + node.float("norm_coefficient", 0.0) * x
    v = alpha * v + (1 - alpha) * g
    h = beta * h + (1 - beta) * g * g
    t = step.astype(x.dtype)
    corrected = rate * xp.sqrt(1.0 - beta**t) / (1.0 - alpha**t)
    r = xp.where(xp.greater(step, 0), corrected, rate)
    made = x - r * v / (xp.sqrt(h) + node.float("epsilon", 1e-6))
    return (1.0 - node.float("norm_coefficient_post", 0.0)) * made, v, h


@_optimiser("Momentum", 1)
def momentum(node: Call, rate: Array, step: Array, x: Array, grad: Array, v: Array) -> Any:
    alpha, beta = node.float("alpha"), node.float("beta")
    g = grad + node.float("norm_coefficient") * x
    weight = xp.where(xp.greater(step, 0), beta, 1.0).astype(x.dtype)
    v = alpha * v + weight * g
    if node.text("mode") == "nesterov":
        return x - rate * (g + alpha * v), v
    return x - rate * v, v
