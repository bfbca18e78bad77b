"""Modules that hold modules: Sequential, ModuleList, ModuleDict."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Generic, TypeVar

from rlx.errors import InputError
from rlx.nn.functional.operands import ArrayLike
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


M = TypeVar("M", bound=Module)


def _as_module(layer: object) -> Module:
    if isinstance(layer, Module):
        return layer
    if callable(layer):
        return Lambda(layer)
    raise InputError("not a layer", where="nn", got=repr(layer), expected="a module or a function")


class ModuleList(Module, Generic[M]):
    """Modules in a list, named by their numbers."""

    def __init__(self, modules: Iterable[M] = ()) -> None:
        self._items: list[Any] = [_as_module(m) for m in modules]

    def entries(self) -> Iterator[tuple[str, Any]]:
        return ((str(i), m) for i, m in enumerate(self._items))

    def append(self, module: M) -> None:
        """Add a module at the end."""
        self._items.append(_as_module(module))

    def __getitem__(self, index: int) -> M:
        found: M = self._items[index]
        return found

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[M]:
        return iter(self._items)


class ModuleDict(Module, Generic[M]):
    """Modules by name."""

    def __init__(self, modules: Mapping[str, M] | None = None) -> None:
        self._items: dict[str, Any] = {name: _as_module(m) for name, m in (modules or {}).items()}

    def entries(self) -> Iterator[tuple[str, Any]]:
        return iter(self._items.items())

    def __getitem__(self, name: str) -> M:
        if name not in self._items:
            known = ", ".join(self._items)
            raise InputError("no such module", where="ModuleDict", got=name, expected=known)
        found: M = self._items[name]
        return found

    def __setitem__(self, name: str, module: M) -> None:
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

    def values(self) -> Iterable[M]:
        """The modules."""
        return self._items.values()

    def items(self) -> Iterable[tuple[str, M]]:
        """Names and modules."""
        return self._items.items()


class Sequential(ModuleList[Any]):
    """Layers one after the other; functions count as layers. With a key, layers that take one by
    keyword, `*, key`, as Dropout does, get one of their own each."""

    def __init__(self, *layers: Module | Callable[..., Any]) -> None:
        super().__init__([_as_module(layer) for layer in layers])

    def __call__(self, x: ArrayLike, *, key: Array | None = None) -> Array:
        y: Any = x
        for i, layer in enumerate(self._items):
            if key is not None and takes_key(type(layer).__call__):
                y = layer(y, key=fold_in(key, i))
            else:
                y = layer(y)
        made: Array = y
        return made


@lru_cache(maxsize=256)
def takes_key(function: Callable[..., Any]) -> bool:
    """Whether a function takes a random key: by keyword alone, as attention has a `key` too."""
    found = inspect.signature(function).parameters.get("key")
    return found is not None and found.kind is inspect.Parameter.KEYWORD_ONLY
