"""A segment: nodes that run as one native call, traced once for all sizes.

The trace takes arrays with symbolic sizes. Where a node must see elements, the segment ends; if the
elements are an input's, they become part of what the trace is for: whole numbers as symbolic sizes,
so that another length needs no other code, anything else as constants.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rlx.errors import AttributeValueError, BindingError, ShapeError, UnsupportedError
from rlx.formats.onnx import OnnxNode
from rlx.ir.dim import Dim, evaluate, sym
from rlx.ir.graph import Graph
from rlx.ir.node import Value as GraphValue
from rlx.ir.shape import Shape
from rlx.numpy.array import Array, Tracer
from rlx.numpy.guard import Guard
from rlx.numpy.trace import Size, Trace, make_size
from rlx.numpy.written_attention import sizes_to_fix
from rlx.onnx.interpreter import Interpreter, Scope
from rlx.onnx.values import (
    Data,
    Host,
    Known,
    NeedsValueError,
    evaluated_sizes,
    is_number_type,
)
from rlx.runtime.compiled import CompiledGraph

if TYPE_CHECKING:
    from rlx.onnx.program import Program

_NEED_NUMBERS = (ShapeError, UnsupportedError, AttributeValueError, BindingError)
MAX_SIZES = 64  # elements of a tensor that are taken as sizes
SMALL = 16  # elements of a constant that is part of the code
_LARGEST = 2**31
_TRACING = threading.RLock()  # models run beside each other; one at a time is traced


class ModelTrace(Trace):
    """A trace whose captured arrays are params: shared by all graphs of a model, and prepacked."""

    def __init__(self, name: str, program: Program) -> None:
        super().__init__(name)
        self.program = program
        self.params: dict[str, Data] = {}

    def _captured(self, array: Array) -> GraphValue:
        if array.data.size <= SMALL:
            return self.graph.constant(array.data, array.dtype)
        name = self.program.model.param_name(array)
        self.params[name] = array.data
        return self.graph.param(name, Shape(array.data.shape, array.dtype))


class OutputAt(NamedTuple):
    """A result that the graph computes."""

    number: int


class Sizes(NamedTuple):
    """A result made of sizes."""

    dims: tuple[Dim, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Traced:
    """One trace of a segment: what it is for, its graph, how its results become values."""

    def __init__(
        self, shapes: Sequence[Shape], sizes: Sequence[str], guards: Sequence[Guard],
        quotients: Mapping[str, Dim], compiled: CompiledGraph | None, graph: Graph | None,
        results: Mapping[str, Any], end: int, names: Sequence[str], params: Mapping[str, Data],
    ) -> None:  # fmt: skip
        self.names, self.params = tuple(names), params  # of the inputs; the constants it holds
        self.shapes, self.size_names, self.guards = tuple(shapes), tuple(sizes), tuple(guards)
        self.quotients, self.compiled, self.graph = dict(quotients), compiled, graph
        self.results, self.end = results, end
        used = set() if compiled is None else set(compiled.template.open_symbols)
        inferred = {s for shape in shapes for s in shape.symbols}
        self.explicit = sorted(used - inferred)

    def bind(self, shapes: Sequence[tuple[int, ...]], given: Sequence[int]) -> Any:
        """The size of each symbol, or None where the trace is not for these."""
        sizes: dict[str, int] = {}
        for expected, found in zip(self.shapes, shapes, strict=True):
            for dim, n in zip(expected.dims, found, strict=True):
                if isinstance(dim, int):
                    if dim != n:
                        return None
                elif n < 1 or sizes.setdefault(str(dim), n) != n:
                    return None
        sizes.update(zip(self.size_names, given, strict=True))
        for symbol, dim in self.quotients.items():
            sizes[symbol] = evaluate(dim, sizes)
        return sizes if all(g.holds(sizes) for g in self.guards) else None

    def run(self, arrays: Sequence[Data], sizes: Mapping[str, int]) -> dict[str, Any]:
        outputs: Sequence[Data] = ()
        if self.compiled is not None:
            if self.explicit:
                named = dict(zip(self.compiled.input_names, arrays, strict=True))
                chosen = {s: sizes[s] for s in self.explicit}
                outputs = self.compiled.run(named, sizes=chosen)
            else:
                outputs = self.compiled.run_in_order(arrays)
        return {name: _concrete(x, outputs, sizes) for name, x in self.results.items()}


def _concrete(result: Any, outputs: Sequence[Data], sizes: Mapping[str, int]) -> Any:
    if isinstance(result, OutputAt):
        return outputs[result.number]
    if isinstance(result, Sizes):
        return evaluated_sizes(result.dims, result.shape, result.dtype, sizes)
    if isinstance(result, list):
        return [_concrete(x, outputs, sizes) for x in result]
    return result


class _Leaves:
    """The values that enter a segment, split into arrays, sizes and what is part of the key."""

    def __init__(self, values: Mapping[str, Any], known: set[str]) -> None:
        self.names: list[str] = []
        self.arrays: list[Data] = []
        self.sizes: list[int] = []
        self.known = known
        key = [(name, self._key(name, value)) for name, value in sorted(values.items())]
        self.key = tuple(key)

    def _key(self, name: str, value: Any) -> Any:
        if isinstance(value, list):
            return ("list", tuple([self._key(f"{name}_{i}", x) for i, x in enumerate(value)]))
        if value is None:
            return None
        if isinstance(value, np.ndarray) and name not in self.known:
            if not is_number_type(value.dtype):
                return "host"
            self.names.append(name)
            self.arrays.append(value)
            return (value.dtype, value.ndim)
        if isinstance(value, Known) and value.is_constant:
            return ("of the file", id(value))
        data = value.data if isinstance(value, Known) else value
        if _as_sizes(data):
            fixed: list[int | None] = []
            for x in data.reshape(-1).tolist():
                if 2 <= x < _LARGEST:
                    self.sizes.append(x)
                    fixed.append(None)
                else:
                    fixed.append(x)
            return ("sizes", data.dtype, data.shape, tuple(fixed))
        if data.dtype == object:
            return ("text", data.shape, tuple(data.reshape(-1).tolist()))
        return ("constant", data.dtype, data.shape, data.tobytes())


def _as_sizes(data: Data) -> bool:
    return data.dtype in (np.dtype(np.int64), np.dtype(np.int32)) and data.size <= MAX_SIZES


class Segment:
    """The nodes of a program from a position on, as far as they can be traced."""

    def __init__(self, program: Program, start: int) -> None:
        self.program, self.start = program, start
        self.known: set[str] = set()
        self._traces: dict[Any, list[Traced]] = {}
        self._exact: dict[Any, tuple[Traced, dict[str, int]]] = {}

    def find(self, values: Mapping[str, Any]) -> tuple[Traced, dict[str, int], _Leaves]:
        """The trace for these values, the sizes of its symbols, and its inputs."""
        while True:
            leaves = _Leaves(values, self.known)
            shapes = tuple([a.shape for a in leaves.arrays])
            key = (leaves.key, shapes, tuple(leaves.sizes))
            hit = self._exact.get(key) or self._match(values, leaves, shapes)
            if hit is not None:  # else another input turned out to be needed
                if len(self._exact) >= 4096:
                    self._exact.clear()
                self._exact[key] = hit
                return *hit, leaves

    def _match(
        self, values: Mapping[str, Any], leaves: _Leaves, shapes: Any
    ) -> tuple[Traced, dict[str, int]] | None:
        known = self._traces.setdefault(leaves.key, [])
        for traced in known:
            sizes = traced.bind(shapes, leaves.sizes)
            if sizes is not None:
                return traced, sizes
        with _TRACING:
            made = self._fresh(values, leaves)
        if made is None:
            return None
        sizes = made.bind(shapes, leaves.sizes)
        assert sizes is not None, "a trace must serve the call that it was made for"
        known.append(made)
        return made, sizes

    def _fresh(self, values: Mapping[str, Any], leaves: _Leaves) -> Traced | None:
        """A trace with sizes of 1 that have a name as symbols too; else with those as numbers, for
        they may be broadcast; else with all sizes as numbers."""
        for symbolic in ("named", "many"):
            try:
                return _Tracing(self, values, leaves, symbolic).run()
            except _NEED_NUMBERS as error:
                if hasattr(error, "is_final"):
                    raise
        return _Tracing(self, values, leaves, "").run()

    @property
    def traces(self) -> list[Traced]:
        return [t for known in self._traces.values() for t in known]


class _Tracing:
    """Making one trace."""

    def __init__(
        self, segment: Segment, values: Mapping[str, Any], leaves: _Leaves, symbolic: str
    ) -> None:
        """`symbolic` says which sizes are: all that have a "named" dimension or are above 1, those
        that are above 1 ("many"), or none."""
        self.segment, self.program, self.symbolic = segment, segment.program, symbolic
        self.trace = ModelTrace(self.program.name, self.program)
        self.shapes: list[Shape] = []
        self.size_names: list[str] = []
        self.sources: dict[GraphValue, str] = {}
        self.leaves = leaves
        self.scope = Scope(self.program.opsets, None, self.program.attributes, self.program.depth)
        self.scope.values.update(self.program.constants)
        for name, value in sorted(values.items()):
            self.scope.values[name] = self._entered(name, name, value)

    def _entered(self, name: str, root: str, value: Any) -> Any:
        if isinstance(value, list):
            return [self._entered(f"{name}_{i}", root, x) for i, x in enumerate(value)]
        if value is None:
            return None
        if isinstance(value, np.ndarray) and name not in self.segment.known:
            return self._input(name, root, value) if is_number_type(value.dtype) else Host(value)
        if isinstance(value, Known) and value.is_constant:
            return value
        data = value.data if isinstance(value, Known) else value
        if not _as_sizes(data) or not self.symbolic:
            if _as_sizes(data):
                self._fixed_sizes(data)
            return Known(data)
        elements = np.empty(data.size, object)
        for i, x in enumerate(data.reshape(-1).tolist()):
            elements[i] = self._size(x) if 2 <= x < _LARGEST else x
        return Known(elements.reshape(data.shape), data.dtype) if self.leaves.sizes else Known(data)

    def _fixed_sizes(self, data: Data) -> None:
        for x in data.reshape(-1).tolist():
            if 2 <= x < _LARGEST:
                size = self._size(x)
                self.trace.guard(size.dim, "==", x)

    def _size(self, n: int) -> Size:
        name = f"size_{len(self.size_names)}"
        self.size_names.append(name)
        self.trace.hints[name] = n
        return make_size(self.trace, sym(name))  # type: ignore[no-any-return]

    def _input(self, name: str, root: str, value: Data) -> Tracer:
        declared = self.program.declared.get(name)
        dims: list[Dim] = []
        for axis, n in enumerate(value.shape):
            wanted = declared[axis] if declared and len(declared) == value.ndim else None
            least = 1 if self.symbolic == "named" and isinstance(wanted, str) else 2
            if n < least or not self.symbolic or wanted == n:
                dims.append(n)
                continue
            symbol = self.program.symbol(wanted) if isinstance(wanted, str) else ""
            if not symbol or self.trace.hints.get(symbol, n) != n:
                symbol = f"{self.program.symbol(name)}_{axis}"
            self.trace.hints[symbol] = n
            dims.append(sym(symbol))
        shape = Shape(dims, value.dtype)
        self.shapes.append(shape)
        source = self.trace.graph.input(f"x{len(self.shapes)}_{self.program.symbol(name)}", shape)
        self.sources[source] = root
        return Tracer(self.trace, source)

    def run(self) -> Traced | None:
        program, end = self.program, self.segment.start
        interpreter = Interpreter(program.model.file, True, program.model.max_iterations)
        with self.trace.recording():
            while end < len(program.nodes):
                try:
                    node = program.nodes[end]
                    with self.trace.graph.block(_block_name(node)):
                        interpreter.run_node(node, self.scope)
                except NeedsValueError as need:
                    name = self._input_of(need)
                    if name is not None:
                        self.segment.known.add(name)
                        return None
                    self._require_progress(end, need)
                    break
                end += 1
            return self._finish(end)

    def _input_of(self, need: NeedsValueError) -> str | None:
        """The input whose elements are needed, where they may become part of the key."""
        if need.on_host or not isinstance(need.value, Tracer):
            return None
        return self.sources.get(need.value.own)

    def _require_progress(self, end: int, need: NeedsValueError) -> None:
        if need.on_host or end == self.segment.start:
            self.program.on_host.add(end)

    def _finish(self, end: int) -> Traced:
        program, trace = self.program, self.trace
        outputs: list[GraphValue] = []
        values = program.used_after(end, self.scope.values)
        leaves = {n: v for n, v in values.items() if n not in program.constants}
        results = {name: self._leaf(value, outputs) for name, value in leaves.items()}
        graph = None
        compiled = None
        if outputs:
            graph = trace.graph
            for node, dims in list(sizes_to_fix(graph.set_outputs(*outputs), trace.hint)):
                trace.fix([trace.resolve(d) for d in dims], "a number for attention", node.origin)
            graph.set_outputs(*outputs, names=[f"y{i}" for i in range(len(outputs))])
            graph = graph.copy()
            for one in graph.nodes:  # no line of the user's made it
                one.origin = one.origin._replace(file="", line=0)
            compiled = program.model.compile_graph(graph, trace.params)
        return Traced(
            self.shapes, self.size_names, trace.guards, trace.quotients, compiled, graph, results,
            end, self.leaves.names, trace.params,
        )  # fmt: skip

    def _leaf(self, value: Any, outputs: list[GraphValue]) -> Any:
        if isinstance(value, Tracer):
            made = self.trace.enter(value.own, value.home)
            if made.node.op.is_source or any(made is other for other in outputs):
                made = self.trace.graph.contiguous(made)
            outputs.append(made)
            return OutputAt(len(outputs) - 1)
        if isinstance(value, Array):
            return Known(value.data)
        if isinstance(value, list):
            return [self._leaf(x, outputs) for x in value]
        if isinstance(value, Host):
            return value.data
        if isinstance(value, Known) and value.is_symbolic:
            dims = [x.dim if isinstance(x, Size) else int(x) for x in value.data.reshape(-1)]
            return Sizes(tuple(dims), value.data.shape, value.dtype)
        return value


def _block_name(node: OnnxNode) -> str:
    """Where a node is in the network: exporters write paths as names."""
    clean = re.sub(r"[^A-Za-z0-9_]+", ".", node.name or node.op_type).strip(".")
    return clean[:200] or node.op_type
