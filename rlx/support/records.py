"""`dataclass` as in the standard library, but five times faster to define.

The standard one compiles six functions for every class, and a start defines two hundred classes.
Here `__eq__`, `__hash__` and `__repr__` are shared, and `__init__` is compiled on first use.
Arguments other than `frozen` and `eq` are passed to the standard library.

CPU time saved on an AMD EPYC, Python 3.11, best (median) of 10 interleaved runs, with bytecode,
artifacts and prepacked weights cached:

    load and first token of SmolLM2-135M     426 (456) ms; standard 466 (504) ms
    import of what load and Session need     185 (201) ms; standard 200 (214) ms
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import MISSING, Field, FrozenInstanceError, field
from operator import attrgetter
from typing import Any, TypeVar, dataclass_transform, overload

_T = TypeVar("_T")
_Get = Callable[[Any], Any]


@overload
def dataclass(cls: type[_T], /) -> type[_T]: ...
@overload
def dataclass(
    *, frozen: bool = False, eq: bool = True, **others: Any
) -> Callable[[type[_T]], type[_T]]: ...
@dataclass_transform(field_specifiers=(field,))
def dataclass(
    cls: type[_T] | None = None, /, *, frozen: bool = False, eq: bool = True, **others: Any
) -> Any:
    """As `dataclasses.dataclass`."""

    def wrap(plain: Any) -> Any:
        if others:
            return dataclasses.dataclass(frozen=frozen, eq=eq, **others)(plain)
        return _record(plain, frozen, eq)

    return wrap if cls is None else wrap(cls)


def _record(cls: Any, frozen: bool, eq: bool) -> Any:
    own, doc = dict(cls.__dict__), cls.__doc__
    cls.__doc__ = doc or cls.__name__  # else the library would generate one, which is slow
    dataclasses.dataclass(init=False, repr=False, eq=False)(cls)
    cls.__doc__ = doc
    fields = dataclasses.fields(cls)
    methods: dict[str, Any] = {"__init__": _LazyInit(cls, frozen), "__repr__": _repr}
    if eq:
        get = _getter([f.name for f in fields if f.compare])
        methods["__eq__"] = _equality(get)
        if "__eq__" in own and own.get("__hash__", 0) is None:
            del own["__hash__"]  # set by Python, not by the class
        methods["__hash__"] = _hashing(get) if frozen else None
    for name, value in methods.items():
        if name not in own:
            setattr(cls, name, value)
    if frozen:
        cls.__setattr__, cls.__delattr__ = _frozen(cls, {f.name for f in fields})
    return cls


class _LazyInit:
    """Stands for `__init__` until it is first looked up; it is compiled and put in place then."""

    def __init__(self, cls: Any, frozen: bool) -> None:
        self.cls, self.frozen = cls, frozen

    def __get__(self, instance: Any, owner: Any = None) -> Callable[..., None]:
        made = self.cls.__init__ = _make_init(self.cls, self.frozen)
        return made if instance is None else made.__get__(instance)


def _make_init(cls: Any, frozen: bool) -> Callable[..., None]:
    """The constructor, with the fields as its signature."""
    known: dict[str, Any] = {"_unset": MISSING, "_set": object.__setattr__}
    plain: list[str] = ["self"]
    named: list[str] = []
    body: list[str] = []
    for f in dataclasses.fields(cls):
        value = _value(f, known)
        if f.init:
            default = "" if value is f.name and f.default is MISSING else f"=_default_{f.name}"
            known[f"_default_{f.name}"] = f.default
            (named if f.kw_only else plain).append(f.name + default)
        if f.init or value is not f.name:
            body.append(
                f"_set(self, {f.name!r}, {value})" if frozen else f"self.{f.name} = {value}"
            )
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    arguments = ", ".join([*plain, *(["*", *named] if named else [])])
    exec(f"def __init__({arguments}):\n " + "\n ".join(body or ["pass"]), known)
    init: Callable[..., None] = known["__init__"]
    init.__qualname__, init.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
    return init


def _value(f: Field[Any], known: dict[str, Any]) -> str:
    """The expression that a field is set to: its argument, or a call of its factory."""
    if f.default_factory is MISSING:
        return f.name
    known[f"_make_{f.name}"] = f.default_factory
    fresh = f"_make_{f.name}()"
    return f"{fresh} if {f.name} is _unset else {f.name}" if f.init else fresh


def _getter(names: list[str]) -> _Get:
    """A function that returns these attributes as a tuple."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda self: tuple([getattr(self, name) for name in names])


def _equality(get: _Get) -> Callable[[Any, object], Any]:
    def __eq__(self: Any, other: object) -> Any:
        return get(self) == get(other) if other.__class__ is self.__class__ else NotImplemented

    return __eq__


def _hashing(get: _Get) -> Callable[[Any], int]:
    def __hash__(self: Any) -> int:
        return hash(get(self))

    return __hash__


def _repr(self: Any) -> str:
    shown = [f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if f.repr]
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _frozen(cls: Any, names: set[str]) -> tuple[Callable[..., None], Callable[..., None]]:
    def __setattr__(self: Any, name: str, value: object) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def __delattr__(self: Any, name: str) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    return __setattr__, __delattr__
