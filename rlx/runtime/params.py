"""Parameters and states: named buffers that executables attach.

Parameters are loaded once, prepared once (weight prepacking, constant folding), copied to each
device once, and shared by all variants. States (KV cache, recurrent state) belong to one compiled
graph, or to all of one pipeline, unless they are bound to others; they begin as zeros.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from rlx.backends.base import Backend
from rlx.backends.buffer import Allocator, Buffer, DeviceBuffer, HostBuffer
from rlx.errors import InputError
from rlx.ir.binding import infer_sizes
from rlx.ir.dim import upper_bound
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph
from rlx.ir.op import Array
from rlx.ir.shape import Shape
from rlx.support.pickling import Unpicklable
from rlx.support.progress import PACKING, current
from rlx.support.records import dataclass

PREPARED = "prepared."
_FITS = {
    "b": ("bool", "int", "uint", "float", "complex"),
    "i": ("int", "uint", "float", "complex"),
    "u": ("int", "uint", "float", "complex"),
    "f": ("float", "complex"),
    "c": ("complex",),
}
"""Types that numbers in lists may become: none of them loses a fraction."""


def contiguous(array: Array) -> Array:
    """`array` itself where it is C-contiguous, else a copy that is."""
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def as_array(name: str, value: Any, expected: Shape) -> Array:
    """`value` as a C-contiguous array of the expected element type, without a copy if it is one."""
    if type(value) is np.ndarray and value.dtype == expected.dtype.numpy:
        return contiguous(value)
    if isinstance(value, Buffer):
        if not isinstance(value, HostBuffer):
            raise InputError("a buffer of another device", where=name, got=repr(value))
        value = value.array
    if not isinstance(value, np.ndarray):
        value = _converted(name, value, expected)
    if value.dtype != expected.dtype.numpy:
        raise InputError(
            "wrong element type", where=name, got=value.dtype, expected=expected.dtype,
            hint=f"convert it with .astype({expected.dtype.numpy.name!r})",
        )  # fmt: skip
    return np.ascontiguousarray(value) if value.ndim else value


def _converted(name: str, value: Any, expected: Shape) -> Array:
    """What is not an array yet: a scalar of NumPy's, another library's array, numbers in lists."""
    if isinstance(value, np.generic):
        return np.asarray(value)
    try:
        if hasattr(value, "__dlpack__"):
            return np.from_dlpack(value)
        found = np.asarray(value)
        if expected.dtype.kind in _FITS.get(found.dtype.kind, ()) or not found.size:
            return np.asarray(value, _element(expected))
        why: Exception | None = None
    except (TypeError, ValueError, OverflowError, BufferError, RuntimeError) as error:
        why = error
    raise InputError(
        "not an array of numbers", where=name, got=f"{type(value).__name__} {value!r:.60}",
        expected=f"{expected}, as an array, or numbers in lists",
    ) from why  # fmt: skip


def as_argument(name: str, value: Any, expected: Shape, allocator: Allocator) -> Any:
    """`value` as an array, or as a buffer if it is in the device's own memory."""
    is_foreign = not isinstance(value, np.ndarray | Buffer) and hasattr(value, "__dlpack__")
    if is_foreign and not allocator.is_host:
        value = allocator.from_dlpack(value) or value
    if not isinstance(value, DeviceBuffer) or value.allocator is not allocator:
        return as_array(name, value, expected)
    if value.dtype != expected.dtype.numpy:
        raise InputError("wrong element type", where=name, got=value.dtype, expected=expected.dtype)
    return value


def _contiguous(array: Any) -> Array:
    """The array itself if it is C-contiguous, as kernels expect it, else a copy."""
    found = np.asanyarray(array)
    return found if found.flags.c_contiguous else np.ascontiguousarray(found)


def _element(shape: Shape) -> Any:
    return shape.dtype.numpy


@dataclass(frozen=True)
class Deferred:
    """A parameter that is computed when something is prepared from it, and then freed."""

    shape: tuple[int, ...]
    dtype: DType
    make: Callable[[], Array]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.bytes

    def copy(self) -> Array:
        return _contiguous(self.make())


class ParamStore(Unpicklable):
    """Parameters by name, what was prepared (packed, concatenated) from them, and their buffers.

    Arrays are not copied (a memory map stays one). Prepared ones are named by what they compute, so
    that all variants that need the same packed weight share it. A device with memory of its own
    gets one copy of each parameter that its executables use.
    """

    instead = "pickle the arrays, and set them in each process"

    def __init__(self, arrays: Mapping[str, Any] | None = None) -> None:
        self._arrays: dict[str, Array | Buffer | Deferred] = {}
        self._prepared: dict[str, Array | Buffer] = {}
        self._buffers: dict[Allocator, dict[str, Buffer]] = {}
        self._lock = threading.RLock()
        self.version = 0
        self.preparations = 0  # how often a prepare graph ran
        for name, array in (arrays or {}).items():
            self.set(name, array)

    def set(self, name: str, array: Any) -> None:
        """Set the parameter `name`; what was prepared from an older one is dropped."""
        if name.startswith(PREPARED):
            raise InputError("a name reserved for prepared parameters", got=name)
        with self._lock:
            if name in self._arrays:  # nothing was prepared from a new name
                for prepared in self._prepared:
                    self._drop_buffer(prepared)
                self._prepared.clear()
            self._drop_buffer(name)
            as_given = isinstance(array, Deferred | Buffer)
            self._arrays[name] = array if as_given else _contiguous(array)
            self.version += 1

    def get(self, name: str) -> Array:
        """The parameter in host memory, copied from the device if need be."""
        return _host_array(self._find(name))

    def buffer(self, name: str, allocator: Allocator) -> Buffer:
        """The parameter in a device's memory, copied there the first time."""
        own = self._buffers.setdefault(allocator, {})
        buffer = own.get(name)
        if buffer is None:
            with self._lock:
                buffer = own[name] = self._put(name, allocator)
        return buffer

    def _put(self, name: str, allocator: Allocator) -> Buffer:
        given = self._arrays.get(name)
        if isinstance(given, Deferred) and not allocator.is_host:
            return allocator.put(given.copy())  # the host's copy is freed
        found = self._find(name)
        if isinstance(found, Buffer) and found.allocator is allocator:
            return found
        return allocator.put(_host_array(found))

    def _find(self, name: str) -> Array | Buffer:
        if name in self._prepared:
            return self._prepared[name]
        if name not in self._arrays:
            raise InputError("parameter not given", got=name, hint=f"set_param({name!r}, array)")
        array = self._arrays[name]
        if isinstance(array, Deferred):  # used unprepared: cached
            array = self._arrays[name] = array.copy()
        return array

    def _drop_buffer(self, name: str) -> None:
        for own in self._buffers.values():
            own.pop(name, None)

    def ensure(self, names: Sequence[str], prepare: Graph | None, backend: Backend) -> None:
        """Prepare those of these parameters that are missing, by the part of the prepare graph that
        computes them."""
        if all(n in self for n in names):
            return
        with self._lock:
            missing = [n for n in names if n not in self]
            wanted = [n for n in missing if prepare is not None and n in prepare.output_names]
            graph = _only(prepare, wanted) if prepare is not None and wanted else None
            needed = [n.name for n in graph.sources("param")] if graph is not None else []
            self.require([n for n in missing if n not in wanted] + needed)
            if graph is not None:
                reporter = current()
                reporter.expect(PACKING, sum(v.shape.upper_bytes({}) for v in graph.outputs))
                for part in self._parts(graph):
                    self._prepare(part, backend)
                reporter.finish(PACKING)
                self.preparations += 1

    def _parts(self, graph: Graph) -> Iterator[Graph]:
        """Parts of a prepare graph to run one after the other. Outputs of deferred arrays are parts
        of their own, so that few of these arrays are in memory at once."""
        params = graph.sources("param")
        late = {n for n in params if isinstance(self._arrays[n.name], Deferred)}
        for node in graph.nodes:
            if any(v.node in late for v in node.inputs):
                late.add(node)
        named = dict(zip(graph.output_names, graph.outputs, strict=True))
        at_once = [n for n, v in named.items() if v.node not in late]
        if at_once:
            yield _only(graph, at_once)
        for name, value in named.items():
            if value.node in late:
                yield _only(graph, [name])

    def _prepare(self, part: Graph, backend: Backend) -> None:
        given = {n.name: self._arrays[n.name] for n in part.sources("param")}
        self.adopt(backend.prepare(part, {n: _host_array(a) for n, a in given.items()}))

    def adopt(self, prepared: Mapping[str, Array | Buffer], *, replace: bool = False) -> None:
        """Add prepared parameters, computed here or mapped from disk. `replace` exchanges the
        memory of those that exist; the values must be the same."""
        with self._lock:
            if replace:
                self._prepared |= prepared
                for own in (own for of, own in self._buffers.items() if of.is_host):
                    for name in prepared:  # copies on devices stay valid
                        own.pop(name, None)
                self.version += 1
            for name, array in prepared.items():
                self._prepared.setdefault(name, array)

    @property
    def prepared_names(self) -> frozenset[str]:
        return frozenset(self._prepared)

    @property
    def prepared(self) -> dict[str, Array]:
        """All prepared parameters, in host memory."""
        return {name: _host_array(array) for name, array in dict(self._prepared).items()}

    def require(self, names: list[str]) -> None:
        """Raise an error that lists all missing parameters."""
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

    def __repr__(self) -> str:
        return f"<ParamStore: {len(self._arrays)} params, {self.num_bytes:,} bytes>"

    def __contains__(self, name: object) -> bool:
        return name in self._arrays or name in self._prepared

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def _host_array(value: Array | Buffer | Deferred) -> Array:
    if isinstance(value, Deferred):
        return value.copy()
    if isinstance(value, HostBuffer):
        return value.array
    return value.copy_out() if isinstance(value, Buffer) else value


def _only(graph: Graph, names: Sequence[str]) -> Graph:
    """The part of a prepare graph that computes these outputs."""
    part = graph.copy()
    outputs = dict(zip(part.output_names, part.outputs, strict=True))
    part.set_outputs({n: outputs[n] for n in names})
    needed = {v.node for v in part.outputs}
    for node in reversed(part.nodes):
        if node in needed:
            needed.update(v.node for v in node.inputs)
    part.nodes = [n for n in part.nodes if n in needed]
    for position, node in enumerate(part.nodes):
        node.id = position
    return part


class SharedStates:
    """States that graphs share: one buffer for each name, size and element type. They outlive the
    graphs: what one wrote, another that is compiled later reads."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[object, ...], Buffer] = {}
        self._lock = threading.Lock()

    def get(self, name: str, dims: Sequence[int], dtype: Any, allocator: Allocator) -> Buffer:
        key = (name, tuple(dims), str(dtype), allocator)
        with self._lock:
            if key not in self._buffers:
                self._buffers[key] = allocator.alloc(dims, dtype)
            return self._buffers[key]


class StateStore:
    """States by name, in the memory of one device: allocated on first use, shared, or bound."""

    def __init__(self, allocator: Allocator, shared: SharedStates | None = None) -> None:
        self._allocator = allocator
        self._shared = SharedStates() if shared is None else shared
        self.buffers: dict[str, Buffer] = {}
        self.version = 0  # counts bindings

    def bind(self, name: str, array: Any, shape: Shape, sizes: Mapping[str, int]) -> None:
        """Use a buffer of the device, or an array, as the memory of a state."""
        is_host = self._allocator.is_host
        own = isinstance(array, Buffer) and array.allocator is self._allocator
        if not own and (not isinstance(array, np.ndarray) or not array.flags.c_contiguous):
            raise InputError(
                "a state is a buffer of the device or a C-ordered NumPy array", where=name,
                got=type(array).__name__,
            )  # fmt: skip
        if is_host and not (array.array if own else array).flags.writeable:
            raise InputError("a state must be writeable", where=name)
        as_argument(name, array, shape, self._allocator)
        infer_sizes([(name, shape, array.shape)], sizes)
        self.buffers[name] = array if own else self._allocator.put(array)
        self.version += 1

    def allocate(self, shapes: Mapping[str, Shape], bounds: Mapping[str, int]) -> None:
        """Allocate missing states; dynamic dims get their upper bounds."""
        for name, shape in shapes.items():
            if name not in self.buffers:
                dims = [upper_bound(d, bounds) for d in shape.dims]
                element = shape.dtype.numpy
                self.buffers[name] = self._shared.get(name, dims, element, self._allocator)

    def read(self, name: str) -> Any:
        """The memory itself on the host, else a copy."""
        buffer = self.buffers[name]
        return buffer.array if self._allocator.is_host else buffer.copy_out()


def named_inputs(
    where: str, expected: Mapping[str, Shape], inputs: Mapping[str, Any], named: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The inputs of a mapping and those given by name."""
    if not isinstance(inputs, Mapping):
        raise InputError(
            "inputs have names here", where=where, got=type(inputs).__name__,
            expected=", ".join(f"{name}=…" for name in expected) or "none",
            hint="f(x) takes them in order",
        )  # fmt: skip
    return {**inputs, **named} if named else inputs
