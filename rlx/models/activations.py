"""Activations by the names that config files give them.

Most are an op, which a matmul may fuse; the others are composed of ops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlx.errors import UnsupportedError
from rlx.ir.module import GraphModule

Tensor = Any  # a value of the module

# name in a file → the op
_OPS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "quick_gelu": "gelu_quick",
    "relu": "relu",
    "sigmoid": "sigmoid",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
_COMPOSED: dict[str, Callable[[GraphModule, Tensor], Tensor]] = {
    "gelu_10": lambda g, x: x.gelu().clamp(low=-10.0, high=10.0),
    "hardswish": lambda g, x: x * (x + 3.0).clamp(low=0.0, high=6.0) * (1 / 6),
    "laplace": lambda g, x: (g.erf((x - 0.707107) * (1 / (0.282095 * 2**0.5))) + 1.0) * 0.5,
    "leaky_relu": lambda g, x: g.leaky_relu(x, alpha=0.01),
    "linear": lambda g, x: x,
    "mish": lambda g, x: x * g.softplus(x).tanh(),
    "relu2": lambda g, x: x.relu() * x.relu(),
    "relu6": lambda g, x: x.clamp(low=0.0, high=6.0),
    "sqrtsoftplus": lambda g, x: g.softplus(x).sqrt(),
}
ACTIVATIONS = tuple(sorted({*_OPS, *_COMPOSED}))


def activation_named(name: str, where: str, field: str = "activation") -> str:
    """What `activate` takes for what a file calls an activation."""
    if name in _COMPOSED:
        return name
    if name not in _OPS:
        raise UnsupportedError(
            f"unknown activation in {field}", where=where, got=name,
            expected=", ".join(ACTIVATIONS),
        )  # fmt: skip
    return _OPS[name]


def fusable(name: str | None) -> str | None:
    """The name, where a matmul can apply it."""
    return None if name in _COMPOSED else name


def activate(g: GraphModule, name: str, x: Tensor) -> Tensor:
    """The activation of x."""
    return _COMPOSED[name](g, x) if name in _COMPOSED else g.apply(name, x)
