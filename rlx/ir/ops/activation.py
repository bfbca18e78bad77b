"""The functions that fused ops may apply to a product: any elementwise op of one real tensor."""

from __future__ import annotations

from functools import lru_cache

from rlx.errors import AttributeValueError, RlxError
from rlx.ir.dim import Dim
from rlx.ir.op import REGISTRY, Array, Op, registrations
from rlx.ir.shape import Shape


def activations() -> list[str]:
    """Their names; "none" is the identity."""
    return ["none", *(name for name in REGISTRY if name in activation_kinds())]


def activation_kinds() -> frozenset[str]:
    """The ops that fused kernels may apply: those registered so far."""
    return _kinds(registrations())


@lru_cache(maxsize=1)
def _kinds(registered: int) -> frozenset[str]:
    return frozenset(name for name, cls in REGISTRY.items() if _fits(cls))


def is_default(record: Op) -> bool:
    """Whether an activation has its default attributes: its name alone says all of it."""
    return not record.fields or record == REGISTRY[record.name]()


def _fits(cls: type[Op]) -> bool:
    if not cls.is_elementwise or cls.num_required != 1 or len(cls.fields) != len(cls.defaults):
        return False
    real = Shape([1])
    try:
        return cls().infer(real) is real
    except RlxError:  # takes integers only
        return False


def require_activation(name: str, where: str) -> None:
    cls = REGISTRY.get(name)
    if name != "none" and (cls is None or not _fits(cls)):
        raise AttributeValueError(
            "unknown activation", where=f"{where}.activation", got=repr(name),
            expected=", ".join(activations()),
        )  # fmt: skip


def activate(name: str, x: Array) -> Array:
    """The activation called `name`, of an array in compute precision."""
    return x if name == "none" else REGISTRY[name]().reference(x)


def activation_flops(name: str, shape: Shape) -> Dim:
    return 0 if name == "none" else REGISTRY[name]().cost([shape], [shape]).flops
