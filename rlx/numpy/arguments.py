"""The arguments of a call of a jitted function: arrays, their structure, and static values."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlx.errors import InputError
from rlx.numpy.array import Array, Tracer
from rlx.numpy.traced_body import as_leaf
from rlx.numpy.tree import flatten, leaf_names, unflatten
from rlx.support.records import dataclass

Data = np.ndarray[Any, Any]
Shapes = tuple[tuple[int, ...], ...]


@dataclass
class Parameters:
    """The parameters of a function: which of them are static, and where they stand."""

    function: str
    names: tuple[str, ...]
    static: frozenset[str]
    donated: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self.positions = {i: n for i, n in enumerate(self.names) if n in self.static}


class _Instance:
    """An instance by identity, with what its attributes are now."""

    def __init__(self, instance: object) -> None:
        self.instance = instance
        self.attributes = dict(getattr(instance, "__dict__", {}))

    def __hash__(self) -> int:
        return id(self.instance)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Instance) or other.instance is not self.instance:
            return False
        mine, others = self.attributes, other.attributes
        return mine.keys() == others.keys() and all(others[k] is v for k, v in mine.items())


class Arguments:
    """The arguments of a call: leaves of arrays, their structure, and static values."""

    def __init__(
        self, parameters: Parameters, args: tuple[Any, ...], named: Mapping[str, Any],
        bound: bool = False,
    ) -> None:  # fmt: skip
        self.parameters, self.bound = parameters, bound
        self.static_values: list[tuple[str, Any]] = []
        self.given, self._named = args, named
        positions = parameters.positions
        self._instance = _Instance(args[0]) if bound else None
        if positions or bound:
            at = {0: "self", **positions} if bound else positions
            self.static_values += [(at[i], args[i]) for i in at if i < len(args)]
            self.static_values += [(n, v) for n, v in named.items() if n in parameters.static]
            args = tuple([x for i, x in enumerate(args) if i not in at])
            named = {n: v for n, v in named.items() if n not in parameters.static}
        self.static = self._static_key()
        self.dynamic = (args, dict(named))
        leaves, self.structure = flatten(self.dynamic)
        self.leaves = [x if type(x) is Array else _leaf(parameters.function, x) for x in leaves]
        self.traced = any(type(x) is Tracer for x in self.leaves)
        self.datas: list[Data] = [] if self.traced else [x.data for x in self.leaves]
        self.shapes: Shapes = tuple([d.shape for d in self.datas])

    def _static_key(self) -> tuple[Any, ...]:
        key = [(name, exact_value(value)) for name, value in self.static_values]
        if self._instance is not None:
            key[0] = ("self", self._instance)
        return tuple(sorted(key, key=lambda item: item[0]))

    def rebuilt(self, leaves: Sequence[Array]) -> tuple[list[Any], dict[str, Any]]:
        """Positional and named arguments with other leaves. Containers are copies."""
        given, named = unflatten(self.structure, leaves)
        rest = iter(given)
        at = self.parameters.positions
        args = [
            x if i in at or (self.bound and i == 0) else next(rest)
            for i, x in enumerate(self.given)
        ]
        return args, named | {n: v for n, v in self._named.items() if n in self.parameters.static}

    def names(self) -> list[tuple[str, str]]:
        """The argument of each leaf, and a name of its own for it: `params`, `params_w`."""
        parameters = [
            n for i, n in enumerate(self.parameters.names)
            if i not in self.parameters.positions and not (self.bound and i == 0)
        ]  # fmt: skip
        args, named = self.dynamic
        rows = [
            (parameters[i] if i < len(parameters) else f"arg{i}", x) for i, x in enumerate(args)
        ]
        rows += [(n, named[n]) for n in sorted(named)]
        found: list[tuple[str, str]] = []
        taken: set[str] = set()
        for argument, tree in rows:
            for name in leaf_names(tree, argument):
                clean = re.sub("[^A-Za-z0-9_]", "_", name)
                clean = clean if clean.isidentifier() else f"x_{clean}"
                while clean in taken:
                    clean += "_"
                taken.add(clean)
                found.append((argument, clean))
        return found

    def require_untraced(self) -> None:
        """Raise if a method stored a traced array in its instance; the attributes are restored."""
        if self._instance is None:
            return
        now = getattr(self._instance.instance, "__dict__", {})
        for name, value in list(now.items()):
            if any(isinstance(leaf, Tracer) for leaf in flatten(value)[0]):
                now.clear()
                now.update(self._instance.attributes)
                raise InputError(
                    "a method stored a traced array in its instance",
                    where=self.parameters.function, got=f"self.{name}",
                    hint="return the array, and assign it outside",
                )  # fmt: skip


def _leaf(function: str, x: Any) -> Array:
    """A leaf of the arguments as an array."""
    if isinstance(x, Tracer):
        x.home.require_open()
    return as_leaf(x, function, "name it in static= to pass it by value")


def exact_value(value: Any) -> Any:
    """A static value that equals no value of another type: 1, 1.0 and True differ."""
    if isinstance(value, tuple):
        return (type(value), *[exact_value(item) for item in value])
    return type(value), value.hex() if type(value) is float else value


def parameter_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of parameters that an argument can have."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin
        return ()
    return tuple([p.name for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)])


def name_of(function: Callable[..., Any]) -> str:
    inner = function.func if isinstance(function, functools.partial) else function
    return str(getattr(inner, "__name__", type(inner).__name__))
