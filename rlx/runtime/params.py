"""Parameters: loaded once, prepared once, shared by all variants of a model."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from rlx.backends.base import Backend
from rlx.errors import InputError
from rlx.ir.graph import Graph
from rlx.ir.op import Array
from rlx.ir.shape import Shape

PREPARED = "prepared."


def as_array(name: str, value: Any, expected: Shape) -> Array:
    """`value` as a C-ordered array of the expected element type; no copy where none is needed."""
    if type(value) is np.ndarray and value.dtype == expected.dtype.numpy:
        return value if value.flags.c_contiguous else np.ascontiguousarray(value)
    if not isinstance(value, np.ndarray):
        if hasattr(value, "__dlpack__") and not isinstance(value, np.generic):
            value = np.from_dlpack(value)
        else:
            value = np.asarray(value, None if isinstance(value, np.generic) else _element(expected))
    if value.dtype != expected.dtype.numpy:
        raise InputError(
            "wrong element type", where=name, got=value.dtype, expected=expected.dtype,
            hint=f"convert it with .astype({expected.dtype.numpy.name!r})",
        )  # fmt: skip
    return np.ascontiguousarray(value) if value.ndim else value


def _element(shape: Shape) -> Any:
    return shape.dtype.numpy


class ParamStore:
    """Arrays by name, and what was computed from them once.

    Arrays are kept as they are given (a memory map stays one). Prepared ones are named by what they
    compute, so that every variant that needs the same packed weight finds the same array.
    """

    def __init__(self, arrays: Mapping[str, Any] | None = None) -> None:
        self._arrays: dict[str, Array] = {}
        self._prepared: dict[str, Array] = {}
        self._lock = threading.RLock()
        self.version = 0
        for name, array in (arrays or {}).items():
            self.set(name, array)

    def set(self, name: str, array: Any) -> None:
        """Give the parameter `name`; what was prepared from an older one is dropped."""
        if name.startswith(PREPARED):
            raise InputError("a name kept for prepared parameters", got=name)
        with self._lock:
            self._arrays[name] = array if isinstance(array, np.ndarray) else np.asarray(array)
            self._prepared.clear()
            self.version += 1

    def get(self, name: str) -> Array:
        if name in self._arrays:
            return self._arrays[name]
        if name in self._prepared:
            return self._prepared[name]
        raise InputError("parameter not given", got=name, hint=f"set_param({name!r}, array)")

    def ensure_prepared(self, graph: Graph | None, backend: Backend) -> None:
        """Run the prepare graph unless its results are there already."""
        if graph is None or all(n in self._prepared for n in graph.output_names):
            return
        with self._lock:
            if all(n in self._prepared for n in graph.output_names):
                return
            needed = [n.name for n in graph.sources("param")]
            self.require(needed)
            self._prepared |= backend.prepare(graph, {n: self._arrays[n] for n in needed})

    def require(self, names: list[str]) -> None:
        """Raise an error that lists every name that was not given."""
        missing = [n for n in names if n not in self._arrays and n not in self._prepared]
        if missing:
            shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" * (len(missing) > 8))
            raise InputError(
                "parameters not given", got=shown, hint="set_param(name, array) or set_params({…})"
            )

    @property
    def num_bytes(self) -> int:
        """Bytes held, prepared ones included."""
        return sum(a.nbytes for a in [*self._arrays.values(), *self._prepared.values()])

    def __contains__(self, name: object) -> bool:
        return name in self._arrays or name in self._prepared

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)
