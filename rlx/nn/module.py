"""`Module`: a layer as a plain Python object whose arrays form a tree.

    class Mlp(nn.Module):
        def __init__(self, width, *, key):
            a, b = random.split(key)
            self.hidden = nn.Linear(width, 4 * width, key=a)
            self.out = nn.Linear(4 * width, width, key=b)

        def __call__(self, x):
            return self.out(F.gelu(self.hidden(x)))

Attributes that are arrays, modules, or lists, tuples and dicts of them are the tree: a jitted
function takes a module as an argument, with its arrays traced. Everything else is static.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, Self, TypeVar

import numpy as np

from rlx.errors import InputError, ShapeError
from rlx.formats.safetensors import SafetensorsFile, write_safetensors
from rlx.ir.dtype import DType
from rlx.nn.functional.quantized import QuantizedWeight
from rlx.numpy.array import Array
from rlx.numpy.dispatch import as_array

P = ParamSpec("P")
R = TypeVar("R")


class Unset:
    """A parameter without numbers yet: a layer made without a key, to be loaded."""

    __slots__ = ("dtype", "shape")

    def __init__(self, shape: Sequence[int], dtype: DType) -> None:
        self.shape, self.dtype = tuple(shape), dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        raise InputError(
            "a parameter without numbers", where="nn", got=repr(self),
            hint="make the layer with key=, or load its weights with load_state_dict",
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"Unset({list(self.shape)}, {self.dtype})"


_trees: dict[type, bool] = {}  # by type of an attribute; containers are looked into


def _is_tree(value: Any) -> bool:
    """Whether an attribute is part of the tree, and not static. A call of a jitted function asks
    it of every attribute."""
    kind = type(value)
    if kind is list or kind is tuple or kind is dict:
        items = value.values() if kind is dict else value
        return any(map(_is_tree, items))
    found = _trees.get(kind)
    if found is None:
        known = (Array, Unset, Module, QuantizedWeight)
        found = _trees[kind] = issubclass(kind, known)
    return found


class Module:
    """Base class of layers and networks. `training` says whether dropout and batch norm train."""

    training: bool = True
    buffers_of_class: tuple[str, ...] = ()  # arrays that are state, not parameters

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, as_array(value) if isinstance(value, np.ndarray) else value)

    # -- the tree -----------------------------------------------------------------------------

    def tree_flatten(self) -> tuple[tuple[Any, ...], list[Any]]:
        """Names of the attributes that are trees, then the static ones; the former's values."""
        attributes = self.__dict__
        names, values, static = [], [], []
        for item in attributes.items():
            name, value = item
            kind = _trees.get(type(value))
            if kind or (kind is None and _is_tree(value)):
                names.append(name)
                values.append(value)
            else:
                static.append(item)
        names.append(tuple(static))  # type: ignore[arg-type]
        return tuple(names), values

    @classmethod
    def tree_unflatten(cls, keys: tuple[Any, ...], children: Sequence[Any]) -> Self:
        made = object.__new__(cls)
        attributes = made.__dict__
        attributes.update(keys[-1])
        attributes.update(zip(keys[:-1], children, strict=True))
        return made

    def entries(self) -> Iterator[tuple[str, Any]]:
        """The attributes that are trees, by the names of their paths."""
        return ((n, v) for n, v in vars(self).items() if _is_tree(v))

    def _buffers(self) -> tuple[str, ...]:
        return (*self.buffers_of_class, *vars(self).get("_more_buffers", ()))

    def register_buffer(self, name: str, value: Any) -> None:
        """An array that belongs to the state of the module, but is no parameter."""
        self._more_buffers = (*vars(self).get("_more_buffers", ()), name)
        setattr(self, name, as_array(value))

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """This module and all inside it, by path."""
        yield prefix, self
        for name, value in self.entries():
            for path, found in _walk(value, f"{prefix}.{name}" if prefix else name):
                if isinstance(found, Module):
                    yield from found.named_modules(path)

    def modules(self) -> Iterator[Module]:
        """This module and all inside it."""
        return (m for _, m in self.named_modules())

    def _places(self) -> Iterator[tuple[str, _Place]]:
        """Where the arrays are, by path, in the order of the attributes."""
        for prefix, module in self.named_modules():
            for name, value in module.entries():
                path = f"{prefix}.{name}" if prefix else name
                yield from _arrays(module, name, value, path, name in module._buffers())

    # -- parameters ---------------------------------------------------------------------------

    def named_parameters(self) -> dict[str, Array]:
        """The parameters by path, such as "layers.0.weight": PyTorch's names."""
        return {path: p.value for path, p in self._places() if not p.is_buffer}

    def named_buffers(self) -> dict[str, Array]:
        """The arrays that are state, not parameters, by path."""
        return {path: p.value for path, p in self._places() if p.is_buffer}

    def parameters(self) -> list[Array]:
        """The parameters, in the order of `named_parameters`."""
        return list(self.named_parameters().values())

    def num_parameters(self) -> int:
        """How many numbers the parameters have."""
        return sum(int(np.prod(p.shape)) for p in self.parameters())

    def replaced(self, arrays: Mapping[str, Any]) -> Self:
        """A copy with other arrays at some paths; this module stays as it is."""
        from rlx.numpy.tree import flatten, unflatten

        leaves, structure = flatten(self)
        copy: Self = unflatten(structure, leaves)
        places = dict(copy._places())
        for path, array in arrays.items():
            if path not in places:
                raise InputError("no such array", where="nn", got=path, expected=_some(places))
            places[path].set(as_array(array))
        return copy

    def to(self, dtype: Any) -> Self:
        """Float arrays in another element type, in place."""
        element = DType.of(dtype)
        for _, place in self._places():
            value = place.value
            if isinstance(value, Unset):
                place.set(Unset(value.shape, element))
            elif value.dtype.kind == "float":
                place.set(value.astype(element))
        return self

    def train(self, mode: bool = True) -> Self:
        """Have dropout and batch norm train (or not), in all modules inside."""
        for module in self.modules():
            module.training = mode
        return self

    def eval(self) -> Self:
        """`train(False)`: for inference."""
        return self.train(False)

    # -- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Array]:
        """Parameters and buffers by path: PyTorch's names and layouts."""
        return {path: place.value for path, place in self._places()}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Self:
        """Take the arrays of a state: another module's, a safetensors file's, PyTorch's tensors.

        They take the element types of this module. Every name must be there, and no other, unless
        `strict` is False.
        """
        places = dict(self._places())
        missing = [n for n in places if n not in state]
        unexpected = [n for n in state if n not in places]
        if strict and (missing or unexpected):
            raise InputError(
                "the state does not fit the module", where="load_state_dict",
                got=f"missing: {_some(missing)}; unexpected: {_some(unexpected)}",
                hint="strict=False takes the arrays that fit",
            )  # fmt: skip
        found = {
            name: _fitting(name, state[name], p) for name, p in places.items() if name in state
        }
        for name, array in found.items():
            places[name].set(array)
        return self

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state as a safetensors file, atomically."""
        write_safetensors(path, {n: np.asarray(a) for n, a in self.state_dict().items()})

    def load(self, path: str | os.PathLike[str], strict: bool = True) -> Self:
        """Take the state from a safetensors file, or the index of its shards. Arrays stay in the
        file until they are used."""
        with SafetensorsFile(path) as file:
            state = {name: file.array(name) for name in file.tensors}
        return self.load_state_dict(state, strict)

    # -- printing -----------------------------------------------------------------------------

    def extra_repr(self) -> str:
        """What the printed form says about this module itself."""
        return ""

    def __repr__(self) -> str:
        parts = []
        for name, value in self.entries():
            for path, found in _walk(value, name):
                if isinstance(found, Module):
                    text = repr(found).replace("\n", "\n  ")
                    parts.append(f"  ({path}): {text}")
        name = type(self).__name__
        if not parts:
            return f"{name}({self.extra_repr()})"
        return "\n".join([f"{name}(", *parts, ")"])


class _Place:
    """Where an array is: an attribute of an object, or an item of a list or dict."""

    __slots__ = ("holder", "is_buffer", "key")

    def __init__(self, holder: Any, key: Any, is_buffer: bool) -> None:
        self.holder, self.key, self.is_buffer = holder, key, is_buffer

    @property
    def value(self) -> Any:
        if isinstance(self.holder, (list, tuple, dict)):
            return self.holder[self.key]
        return getattr(self.holder, self.key)

    def set(self, value: Any) -> None:
        if isinstance(self.holder, (list, dict)):
            self.holder[self.key] = value
        elif isinstance(self.holder, tuple):
            raise InputError(
                "an array in a tuple cannot be replaced", where="nn", hint="use a list"
            )
        else:
            setattr(self.holder, self.key, value)


def _items(value: Any) -> list[tuple[Any, Any]]:
    return list(value.items() if isinstance(value, dict) else enumerate(value))


def _walk(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The modules and arrays of an attribute, containers opened."""
    if isinstance(value, (list, tuple, dict)):
        for key, item in _items(value):
            yield from _walk(item, f"{path}.{key}")
    else:
        yield path, value


def _arrays(
    holder: Any, key: Any, value: Any, path: str, is_buffer: bool
) -> Iterator[tuple[str, _Place]]:
    if isinstance(value, (Array, Unset)):
        yield path, _Place(holder, key, is_buffer)
    elif isinstance(value, QuantizedWeight):
        for part in ("data", "scale", "zero_point"):
            if getattr(value, part) is not None:
                yield f"{path}.{part}", _Place(value, part, True)
    elif isinstance(value, (list, tuple, dict)):
        for k, item in _items(value):
            yield from _arrays(value, k, item, f"{path}.{k}", is_buffer)


def _fitting(name: str, given: Any, place: _Place) -> Array:
    """A given array in the shape and element type of the one it replaces."""
    array = as_array(given.detach() if hasattr(given, "detach") else given)
    wanted = place.value
    if tuple(array.shape) != tuple(wanted.shape):
        raise ShapeError(
            "an array of another shape", where=f"load_state_dict: {name}",
            got=list(array.shape), expected=list(wanted.shape),
        )  # fmt: skip
    return array if array.dtype is wanted.dtype else array.astype(wanted.dtype)


def _some(names: Any) -> str:
    listed = list(names)
    return ", ".join(listed[:6]) + (", …" if len(listed) > 6 else "") if listed else "none"


def functional_call(
    module: Callable[P, R], arrays: Mapping[str, Any], *args: P.args, **named: P.kwargs
) -> R:
    """Call a module with other arrays at some paths: a pure function of `arrays`, so that results
    can be differentiated with respect to them. The module stays as it is."""
    if not isinstance(module, Module):
        raise InputError("not a module", where="functional_call", got=repr(module))
    other: Callable[P, R] = module.replaced(arrays)
    return other(*args, **named)


__all__ = ["Module", "Unset", "functional_call"]
