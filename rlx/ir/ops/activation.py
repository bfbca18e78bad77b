"""Activations of fused ops: every elementwise op of one real tensor."""

from __future__ import annotations

from functools import lru_cache

from rlx.errors import AttributeValueError, RlxError
from rlx.ir.dim import Dim
from rlx.ir.op import REGISTRY, Array, Op, registrations
from rlx.ir.shape import Shape


def activations() -> list[str]:
    """Names of the activations; "none" is the identity."""
    return ["none", *(name for name in REGISTRY if name in activation_ops())]


def activation_ops() -> frozenset[str]:
    """Names of all registered ops that fused kernels may apply as an activation."""
    return _activation_ops(registrations())


@lru_cache(maxsize=1)
def _activation_ops(registered: int) -> frozenset[str]:
    return frozenset(name for name, cls in REGISTRY.items() if _is_activation(cls))


def is_default(record: Op) -> bool:
    """Whether an op has its default attributes, so that its name alone defines it."""
    return not record.fields or record == REGISTRY[record.name]()


def _is_activation(cls: type[Op]) -> bool:
    if not cls.is_elementwise or cls.num_required != 1 or len(cls.fields) != len(cls.defaults):
        return False
    real = Shape([1])
    try:
        return cls().infer(real) is real
    except RlxError:  # takes integers only
        return False


def require_activation(name: str, where: str) -> None:
    cls = REGISTRY.get(name)
    if name != "none" and (cls is None or not _is_activation(cls)):
        raise AttributeValueError(
            "unknown activation", where=f"{where}.activation", got=repr(name),
            expected=", ".join(activations()),
        )  # fmt: skip


def activate(name: str, x: Array) -> Array:
    """The reference of the activation `name`, on an array in compute precision."""
    return x if name == "none" else REGISTRY[name]().reference(x)


def activation_flops(name: str, shape: Shape) -> Dim:
    return 0 if name == "none" else REGISTRY[name]().cost([shape], [shape]).flops
