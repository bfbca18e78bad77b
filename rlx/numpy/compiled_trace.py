"""A trace with its compiled graph: which calls it serves, and how one runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from rlx.backends.base import check_numbers
from rlx.errors import NumericsError
from rlx.ir.dim import Dim, evaluate
from rlx.ir.graph import Graph
from rlx.ir.interp import evaluate as evaluate_graph
from rlx.ir.shape import Shape
from rlx.numpy import debug
from rlx.numpy.arguments import Data, Shapes
from rlx.numpy.array import Array, Tracer
from rlx.numpy.guard import Guard
from rlx.numpy.trace import Size, Trace
from rlx.numpy.tree import LEAF, Structure, unflatten
from rlx.numpy.written_attention import sizes_to_fix


class Graphs(Protocol):
    """What runs a trace: a compiled graph, or those that were saved."""

    def caller(self, shapes: Shapes) -> Callable[..., Sequence[Data]]: ...


class Variant(NamedTuple):
    """One trace of a jitted function: `f.variants()` lists them."""

    reason: str
    arguments: tuple[str, ...]
    guards: tuple[str, ...]
    calls: int
    sizes: int  # how many combinations of sizes it ran with

    def __str__(self) -> str:
        runs = f"{self.calls} calls with {self.sizes} combinations of sizes"
        lines = [f"{', '.join(self.arguments)}: {runs}; {self.reason}"]
        return "\n".join([*lines, *[f"  guard {g}" for g in self.guards]])


class Output(NamedTuple):
    """A leaf of the results that the graph computes: its number among the graph's outputs."""

    number: int


class SizeOf(NamedTuple):
    """A leaf of the results that is a size, in the symbols of the arguments."""

    dim: Dim


class Result(NamedTuple):
    """What a traced function returns: leaves are Outputs, sizes, or values that are returned as
    they are."""

    leaves: list[Any]
    structure: Structure
    prints: list[Any]  # of `debug.print`; their traced leaves are the outputs after the results


class Served(NamedTuple):
    """The calls that a trace serves: names and symbolic shapes of the arguments, and guards."""

    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    guards: tuple[Guard, ...]
    quotients: tuple[tuple[str, Dim], ...] = ()  # other symbols of the graph, by those of shapes

    def sizes(self, shapes: Shapes) -> dict[str, int] | None:
        """The size of each symbol; None where the shapes do not fit. Sizes 0 and 1 have traces of
        their own."""
        sizes: dict[str, int] = {}
        for expected, found in zip(self.shapes, shapes, strict=True):
            for dim, n in zip(expected.dims, found, strict=True):
                if isinstance(dim, int):
                    if dim != n:
                        return None
                elif n < 2:
                    return None
                else:
                    sizes[str(dim)] = n
        for symbol, dim in self.quotients:
            sizes[symbol] = evaluate(dim, sizes)
        return sizes

    def holds(self, shapes: Shapes) -> bool:
        sizes = self.sizes(shapes)
        return sizes is not None and all(guard.holds(sizes) for guard in self.guards)


class CompiledTrace:
    """One trace of a function, and its graph where it computes anything."""

    def __init__(
        self, name: str, served: Served, result: Result, reason: str,
        captured: Sequence[Data], compiled: Graphs | None, graph: Graph | None,
    ) -> None:  # fmt: skip
        self.name, self.served, self.result, self.reason = name, served, result, reason
        self.captured = list(captured)
        self.compiled, self.graph = compiled, graph
        self.calls = 0
        self._bound: dict[Shapes, Callable[[Sequence[Data]], Any]] = {}

    @property
    def bound_shapes(self) -> list[Shapes]:
        return list(self._bound)

    def bind(self, shapes: Shapes) -> Callable[[Sequence[Data]], Any]:
        """A function from arrays of these shapes to the results."""
        found = self._bound.get(shapes)
        if found is None:
            found = self._bound[shapes] = self._make(shapes)
        return found

    def _make(self, shapes: Shapes) -> Callable[[Sequence[Data]], Any]:
        sizes = self.served.sizes(shapes) or {}
        fixed = [evaluate(x.dim, sizes) if type(x) is SizeOf else x for x in self.result.leaves]
        outputs = [(i, x.number) for i, x in enumerate(fixed) if type(x) is Output]
        structure, prints, captured = self.result.structure, self.result.prints, self.captured
        if self.compiled is None:

            def constant(arrays: Sequence[Data]) -> Any:
                self.calls += 1
                return unflatten(structure, fixed)

            return constant
        run = self.compiled.caller((*shapes, *[a.shape for a in captured]))
        if structure is LEAF and not prints and not captured:

            def single(arrays: Sequence[Data]) -> Any:
                self.calls += 1
                try:
                    return Array(run(arrays)[0])
                except NumericsError:
                    self._locate(arrays)
                    raise

            return single
        printed = debug.tracers_of(prints)

        def call(arrays: Sequence[Data]) -> Any:
            self.calls += 1
            given = [*arrays, *captured] if captured else arrays
            try:
                results = run(given)
            except NumericsError:
                self._locate(given)
                raise
            leaves = fixed.copy()
            for at, number in outputs:
                leaves[at] = Array(results[number])
            if prints:
                count = len(results) - len(printed)
                pairs = zip(printed, results[count:], strict=True)
                debug.show(prints, {id(tracer): value for tracer, value in pairs})
            return leaves[0] if structure is LEAF else unflatten(structure, leaves)

        return call

    def _locate(self, arrays: Sequence[Data]) -> None:
        """Raise for the first op of the graph, before any fusion, whose result has a NaN."""
        if self.graph is not None:
            evaluate_graph(self.graph, arrays, on_node=check_numbers)

    def describe(self) -> Variant:
        rows = zip(self.served.names, self.served.shapes, strict=True)
        shown = tuple([f"{name} {shape}" for name, shape in rows])
        guards = tuple([str(g) for g in self.served.guards])
        return Variant(self.reason, shown, guards, self.calls, len(self._bound))


def finish(trace: Trace, leaves: list[Any], structure: Structure) -> tuple[Graph | None, Result]:
    """The graph of a trace whose function returned these leaves, and its results."""
    numbered: list[Any] = []
    values: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tracer):
            numbered.append(Output(len(values)))
            values.append(_output(trace, leaf))
        else:
            numbered.append(SizeOf(leaf.dim) if isinstance(leaf, Size) else leaf)
    printed = [_output(trace, x) for x in debug.tracers_of(trace.prints)]
    result = Result(numbered, structure, trace.prints)
    values += printed
    if not values:
        return None, result
    graph = trace.graph
    for node, dims in list(sizes_to_fix(graph.set_outputs(*values), trace.hint)):
        trace.fix([trace.resolve(d) for d in dims], "a number for attention", node.origin)
    graph.set_outputs(*values, names=[f"y{i}" for i in range(len(values))])
    return graph.copy(), result


def _output(trace: Trace, leaf: Tracer) -> Any:
    leaf.home.require_open()
    value = trace.enter(leaf.own, leaf.home)
    if value.node.op.is_source:  # a result that is an argument
        return trace.graph.contiguous(value)
    return value
