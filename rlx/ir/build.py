"""One builder method per registered op: `g.softmax(x, axis=-1)`, `g.add(a, b)`, …

Tensors come first, then attributes, by position or by name; `name=` names the result and `shape=`
states the expected one, which is then checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlx.errors import InputError
from rlx.ir.node import Value
from rlx.ir.op import Op, lookup, on_register


class Builder:
    """Gains a method for every op as it is registered."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        # registered ops are real methods; what arrives here is unknown
        if name.startswith("_"):
            raise AttributeError(name)
        lookup(name)
        raise AttributeError(name)

    def apply(self, op: str, *args: Any, **attributes: Any) -> Any:
        """Build the op called `op`."""
        return getattr(self, op)(*args, **attributes)

    def append(
        self, op: Op, operands: Sequence[Any] = (), name: str = "", shape: object = None
    ) -> Any:
        """Add the op record `op` applied to `operands`."""
        raise NotImplementedError


def _install(cls: type[Op]) -> None:
    if not cls.is_source:
        setattr(Builder, cls.name, _method(cls))


def _method(cls: type[Op]) -> Callable[..., Any]:
    fixed = cls.num_required + cls.num_optional
    fields, variadic = cls.fields, cls.variadic
    plain = None if cls.fields else cls()

    def build(
        self: Builder, *args: Any, name: str = "", shape: object = None, **attributes: Any
    ) -> Any:
        if len(args) <= fixed and not attributes and plain is not None:
            return self.append(plain, args, name, shape)
        operands, rest = (_variadic if variadic else _split)(args, fixed)
        if len(rest) > len(fields):
            raise InputError(
                "too many arguments", where=cls.name, got=len(args), expected=_usage(cls)
            )
        attributes.update(zip(fields, rest, strict=False))
        return self.append(_record(cls, attributes), operands, name, shape)

    build.__name__, build.__doc__ = cls.name, cls.__doc__
    return build


def _usage(cls: type[Op]) -> str:
    tensors = [*cls.input_names, *(["…"] if cls.variadic else [])]
    return f"{cls.name}({', '.join(tensors)}; {', '.join(cls.fields)})"


_records: dict[tuple[Any, ...], Op] = {}


def _record(cls: type[Op], attributes: dict[str, Any]) -> Op:
    """The record of these attributes; layers repeat, so they are remembered as written."""
    # the types are part of the key: 1, 1.0 and True are equal but make different attributes
    key = (cls, *attributes.items(), *map(type, attributes.values()))
    try:
        found = _records.get(key)
    except TypeError:  # a list or an array among them
        return _new_record(cls, attributes)
    if found is None:
        if len(_records) > 100_000:
            _records.clear()
        found = _records[key] = _new_record(cls, attributes)
    return found


def _new_record(cls: type[Op], attributes: dict[str, Any]) -> Op:
    unknown = [a for a in attributes if a not in cls.fields]
    if unknown:
        raise InputError(
            "unknown argument", where=cls.name, got=", ".join(unknown), expected=_usage(cls)
        )
    missing = [f for f in cls.fields if f not in attributes and f not in cls.defaults]
    if missing:
        raise InputError("missing argument", where=cls.name, expected=", ".join(missing))
    return cls(**attributes)


def _variadic(args: tuple[Any, ...], fixed: int) -> tuple[Sequence[Any], Sequence[Any]]:
    """Tensors, or one list of them, then attributes."""
    if args and isinstance(args[0], (list, tuple)):
        return args[0], args[1:]
    count = len(args)
    while count and not isinstance(args[count - 1], (Value, np.ndarray)):
        count -= 1
    return args[:count], args[count:]


_TENSOR = (Value, bool, int, float, np.ndarray, np.generic)


def _split(args: tuple[Any, ...], fixed: int) -> tuple[Sequence[Any], Sequence[Any]]:
    """Positional arguments as (tensors, attributes); absent optional tensors may be None."""
    operands, rest = list(args[:fixed]), list(args[fixed:])
    count = len(operands)
    while count and not isinstance(operands[count - 1], _TENSOR):
        count -= 1
    # what stands where an optional tensor could, and is not one, is an attribute; None is nothing
    rest[:0] = [a for a in operands[count:] if a is not None]
    return operands[:count], rest


on_register(_install)
