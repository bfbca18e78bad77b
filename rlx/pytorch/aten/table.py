"""The table of ATen ops: a name such as `add.Tensor`, and the function that builds it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

Build = Callable[..., Any]
F = TypeVar("F", bound=Build)

_OPS: dict[str, Build] = {}
_GROUPS = (
    "pointwise", "shape_ops", "create_ops", "reduce_ops", "matrix_products", "attention_ops",
    "convolutions", "windows_ops", "normalizations", "index_ops", "random_ops", "gradient_ops",
)  # fmt: skip


def aten(*names: str) -> Callable[[F], F]:
    """Register a function that builds these ATen ops: `build(low, *arguments of the op)`."""

    def register(build: F) -> F:
        for name in names:
            assert name not in _OPS, name
            _OPS[name] = build
        return build

    return register


def table() -> dict[str, Build]:
    """Every ATen op that RLX builds, by name."""
    for group in _GROUPS:
        import_module(f"rlx.pytorch.aten.{group}")
    return _OPS
