"""One builder method per registered op: `g.softmax(x, axis=-1)`, `g.add(a, b)`, …

Tensors come first, then attributes, by position or by name; `name=` names the result and `shape=`
states the expected one, which is then checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlx.errors import InputError, OptionError, StageError
from rlx.ir.methods import OpMethods, ValueMethods
from rlx.ir.node import Value
from rlx.ir.op import REGISTRY, Op, lookup, on_register


class UnknownMethod(OptionError, AttributeError):
    """No op of that name; an AttributeError too, so that `hasattr` answers."""


class Builder(OpMethods):
    """Adds nodes: has a method for every op, those registered later included."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        # registered ops are real methods; what arrives here is unknown
        if name.startswith("_"):
            raise AttributeError(name)
        if f"hir.{name}" in REGISTRY:
            raise StageError(
                f"{name} is an HIR block", where=name, got="a MIR graph", expected="an HIR module",
                hint="build it with GraphModule.hir(name) or GraphModule.define(name, build)",
            )  # fmt: skip
        try:
            lookup(name)
        except OptionError as e:
            raise UnknownMethod(e.what, got=e.got, hint=e.hint) from None
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
    if not cls.is_source and not cls.is_block:
        setattr(OpMethods, cls.name, _method(cls))
        install_value_method(cls.name, cls)


def install_value_method(name: str, cls: type[Op]) -> None:
    """Make `x.name(…)` build `g.name(x, …)`: the block at HIR, the op at MIR."""
    if not cls.num_required or hasattr(ValueMethods, name):
        return

    def build(self: Value, *args: Any, **attributes: Any) -> Any:
        return getattr(self.graph, name)(self, *args, **attributes)

    build.__name__, build.__doc__ = name, described(name, cls)
    setattr(ValueMethods, name, build)


def described(name: str, cls: type[Op]) -> str:
    """The docstring of a builder method: how it is called, then what the op says of itself."""
    tensors = [n if i < cls.num_required else f"{n}=None" for i, n in enumerate(cls.input_names)]
    more = ["*tensors"] if cls.variadic else []
    given = [f for f in cls.fields if not (cls.is_block and f.startswith("has_"))]
    fields = [f"{f}={cls.defaults[f]!r}" if f in cls.defaults else f for f in given]
    return f"{name}({', '.join([*tensors, *more, *fields])})\n\n{cls.__doc__ or ''}"


def _method(cls: type[Op]) -> Callable[..., Any]:
    required, fixed = cls.num_required, cls.num_required + cls.num_optional
    fields, variadic, names = cls.fields, cls.variadic, cls.input_names
    plain = None if cls.fields else cls()

    def build(
        self: Builder, *args: Any, name: str = "", shape: object = None, **attributes: Any
    ) -> Any:
        if len(args) <= fixed and not attributes and plain is not None:
            return self.append(plain, args, name, shape)
        if shape is not None and "shape" in fields:  # what reshape is to make, not what it made
            attributes["shape"], shape = shape, None
        if attributes and not variadic and not attributes.keys().isdisjoint(names):
            args = _by_name(cls, args, attributes)
        operands, rest = _variadic(args) if variadic else _split(args, required, fixed)
        if len(rest) > len(fields):
            raise InputError(
                "too many arguments", where=cls.name, got=len(args), expected=_usage(cls)
            )
        attributes.update(zip(fields, rest, strict=False))
        return self.append(record(cls, attributes), operands, name, shape)

    build.__name__, build.__doc__ = cls.name, described(cls.name, cls)
    return build


def _by_name(cls: type[Op], args: tuple[Any, ...], attributes: dict[str, Any]) -> tuple[Any, ...]:
    """The positional arguments with the tensors given by name, taken out of `attributes`."""
    given = list(args)
    for name in cls.input_names[len(args) :]:
        if name not in attributes:
            break
        given.append(attributes.pop(name))
    return tuple(given)


def _usage(cls: type[Op]) -> str:
    tensors = [*cls.input_names, *(["…"] if cls.variadic else [])]
    return f"{cls.name}({', '.join(tensors)}; {', '.join(cls.fields)})"


_records: dict[tuple[Any, ...], Op] = {}


def record(cls: type[Op], attributes: dict[str, Any]) -> Op:
    """The record of these attributes; layers repeat, so they are remembered as written."""
    # the types are part of the key: 1, 1.0 and True are equal but make different attributes
    key = (cls, *attributes.items(), *map(_kind, attributes.values()))
    try:
        found = _records.get(key)
    except TypeError:  # a list or an array among them
        return _new_record(cls, attributes)
    if found is None:
        if len(_records) > 100_000:
            _records.clear()
        found = _records[key] = _new_record(cls, attributes)
    return found


def _kind(value: object) -> object:
    if type(value) is float:
        return repr(value)  # tells -0.0 from 0.0
    return tuple(map(_kind, value)) if type(value) is tuple else type(value)


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


def _variadic(args: tuple[Any, ...]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Tensors, or one list of them, then attributes."""
    if args and isinstance(args[0], (list, tuple)):
        return args[0], args[1:]
    count = len(args)
    while count and not isinstance(args[count - 1], (Value, np.ndarray)):
        count -= 1
    return args[:count], args[count:]


def _split(args: tuple[Any, ...], required: int, fixed: int) -> tuple[Sequence[Any], Sequence[Any]]:
    """Positional arguments as (tensors, attributes).

    Where an optional tensor could stand, only a value or an array is one (a number is taken for
    an attribute) and None is nothing.
    """
    count = min(required, len(args))
    while count < min(fixed, len(args)) and isinstance(args[count], (Value, np.ndarray)):
        count += 1
    rest = args[count:]
    skipped = 0
    while skipped < min(fixed - count, len(rest)) and rest[skipped] is None:
        skipped += 1
    return args[:count], rest[skipped:]


on_register(_install)
