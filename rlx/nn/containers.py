"""Modules that hold modules: Sequential, ModuleList, ModuleDict."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from rlx.errors import InputError
from rlx.nn.module import Module
from rlx.numpy.array import Array
from rlx.random import fold_in


class Lambda(Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.function(*args, **named)

    def extra_repr(self) -> str:
        return getattr(self.function, "__name__", repr(self.function))


def _as_module(layer: object) -> Module:
    if isinstance(layer, Module):
        return layer
    if callable(layer):
        return Lambda(layer)
    raise InputError("not a layer", where="nn", got=repr(layer), expected="a module or a function")


class ModuleList(Module):
    """Modules in a list, named by their numbers."""

    def __init__(self, modules: Iterable[Module | Callable[..., Any]] = ()) -> None:
        self._items = [_as_module(m) for m in modules]

    def entries(self) -> Iterator[tuple[str, Any]]:
        return ((str(i), m) for i, m in enumerate(self._items))

    def append(self, module: Module | Callable[..., Any]) -> None:
        """Add a module at the end."""
        self._items.append(_as_module(module))

    def __getitem__(self, index: int) -> Any:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)


class ModuleDict(Module):
    """Modules by name."""

    def __init__(self, modules: Mapping[str, Module] | None = None) -> None:
        self._items = {name: _as_module(m) for name, m in (modules or {}).items()}

    def entries(self) -> Iterator[tuple[str, Any]]:
        return iter(self._items.items())

    def __getitem__(self, name: str) -> Any:
        if name not in self._items:
            known = ", ".join(self._items)
            raise InputError("no such module", where="ModuleDict", got=name, expected=known)
        return self._items[name]

    def __setitem__(self, name: str, module: Module) -> None:
        self._items[name] = _as_module(module)

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def keys(self) -> Iterable[str]:
        """The names."""
        return self._items.keys()

    def values(self) -> Iterable[Any]:
        """The modules."""
        return self._items.values()

    def items(self) -> Iterable[tuple[str, Any]]:
        """Names and modules."""
        return self._items.items()


class Sequential(ModuleList):
    """Layers one after the other; functions count as layers. With a key, layers that take one (as
    Dropout does) get one of their own each."""

    def __init__(self, *layers: Module | Callable[..., Any]) -> None:
        super().__init__(layers)

    def __call__(self, x: Any, *, key: Array | None = None) -> Any:
        for i, layer in enumerate(self._items):
            if key is not None and takes_key(type(layer).__call__):
                x = layer(x, key=fold_in(key, i))  # type: ignore[operator]
            else:
                x = layer(x)  # type: ignore[operator]
        return x


@lru_cache(maxsize=256)
def takes_key(function: Callable[..., Any]) -> bool:
    """Whether a function takes a key."""
    return "key" in inspect.signature(function).parameters
