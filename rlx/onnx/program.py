"""The nodes of a graph or body as a program: segments, and nodes between them that run on the host.

Where segments end is found while they are traced, not planned: see `segment`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.backends.buffer import require_memory
from rlx.formats.onnx import Argument, OnnxGraph, OnnxNode, bodies_of
from rlx.numpy.array import Array
from rlx.onnx.fuse_quantized import fuse_quantized
from rlx.onnx.interpreter import Interpreter, Scope, constants_of
from rlx.onnx.run_parts import Part
from rlx.onnx.segment import Segment
from rlx.onnx.values import Known

if TYPE_CHECKING:
    from rlx.onnx.onnx_model import OnnxModel


class Program:
    """Runs nodes on concrete values: NumPy arrays, lists of them, and None."""

    def __init__(
        self, model: OnnxModel, name: str, nodes: Sequence[OnnxNode], outputs: Sequence[str],
        constants: Mapping[str, Known], opsets: Mapping[str, int],
        attributes: Mapping[str, Any] | None = None, inputs: Sequence[Argument] = (),
        depth: int = 0,
    ) -> None:  # fmt: skip
        self.model, self.name, self.nodes = model, name, tuple(nodes)
        self.outputs, self.constants, self.opsets = tuple(outputs), dict(constants), opsets
        self.attributes, self.depth = attributes, depth
        self.declared = {a.name: a.type.dims for a in inputs}
        self.on_host: set[int] = set()
        self.segments: dict[int, Segment] = {}
        self._last_use = _last_uses(self.nodes, self.outputs)
        self._symbols: dict[str, str] = {}

    @classmethod
    def of(
        cls, model: OnnxModel, graph: OnnxGraph, opsets: Mapping[str, int],
        attributes: Mapping[str, Any] | None = None, depth: int = 0,
    ) -> Program:  # fmt: skip
        outputs = [a.name for a in graph.outputs]
        nodes = fuse_quantized(graph.nodes, outputs, graph.initializers)
        return cls(
            model, graph.name or "graph", nodes, outputs, constants_of(graph.initializers), opsets,
            attributes, graph.inputs, depth,
        )  # fmt: skip

    def used_after(self, position: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Those values that nodes from a position on use, or that are outputs."""
        last = self._last_use
        return {n: v for n, v in values.items() if last.get(n, -1) >= position}

    def symbol(self, name: str) -> str:
        """A name as a symbol, no two alike."""
        found = self._symbols.get(name)
        if found is None:
            clean = re.sub("[^A-Za-z0-9_]", "_", name)[:60]
            clean = clean if clean.isidentifier() else f"x_{clean}"
            while clean in self._symbols.values() or clean == "rows":
                clean += "_"
            found = self._symbols[name] = clean
        return found

    def run(self, given: Mapping[str, Any], watch: list[Part] | None = None) -> list[Any]:
        """The outputs for these inputs, and values of graphs around this one. The pieces of the run
        are added to `watch`."""
        values = dict(given)
        position = 0
        while position < len(self.nodes):
            if position in self.on_host:
                self._run_on_host(position, values)
                if watch is not None:
                    watch.append(Part(str(self.nodes[position])))
                position += 1
                continue
            values = self.used_after(position, values)
            segment = self.segments.get(position)
            if segment is None:
                segment = self.segments[position] = Segment(self, position)
            traced, sizes, leaves = segment.find(values)
            values.update(traced.run(leaves.arrays, sizes))
            if watch is not None and traced.graph is not None:
                title = f"nodes {position} to {traced.end - 1}"
                watch.append(Part(title, traced, sizes, tuple(leaves.arrays)))
            position = traced.end
        return [self._output(name, values) for name in self.outputs]

    def _output(self, name: str, values: Mapping[str, Any]) -> Any:
        return concrete(values[name] if name in values else self.constants[name])

    def _run_on_host(self, position: int, values: dict[str, Any]) -> None:
        node = self.nodes[position]
        scope = Scope(self.opsets, None, self.attributes, self.depth)
        scope.values.update(self.constants)
        scope.values.update({n: as_known(v) for n, v in values.items()})
        HostInterpreter(self.model).run_node(node, scope)
        for name in node.outputs:
            if name:
                values[name] = _dynamic(scope.values[name])
                if isinstance(values[name], np.ndarray):
                    require_memory(values[name].shape, values[name].dtype)


class HostInterpreter(Interpreter):
    """Runs one node on concrete values; bodies and functions inside are programs."""

    def __init__(self, model: OnnxModel) -> None:
        super().__init__(model.file, False, model.max_iterations)
        self.model = model

    def run_body(self, body: OnnxGraph, scope: Scope, given: Sequence[Any]) -> list[Any]:
        program = self.model.program_of(body, scope)
        names = [a.name for a in body.inputs]
        values = {n: _dynamic(v) for n, v in zip(names, given, strict=False)}
        for name in body.outer:
            value = scope.get(name)
            values[name] = value if isinstance(value, Known) else _dynamic(value)
        return [as_known(x) for x in program.run(values)]

    def run_function(
        self, function: Any, operands: Sequence[Any], attributes: Mapping[str, Any], scope: Scope
    ) -> Sequence[Any]:
        program = self.model.program_of_function(function, attributes, scope)
        padded = [*operands, *[None] * (len(function.inputs) - len(operands))]
        values = {n: _dynamic(v) for n, v in zip(function.inputs, padded, strict=False)}
        return [as_known(x) for x in program.run(values)]


def as_known(value: Any) -> Any:
    """A concrete value as the function of an op takes it."""
    if isinstance(value, np.ndarray):
        return Known(value)
    return [as_known(x) for x in value] if isinstance(value, list) else value


def _dynamic(value: Any) -> Any:
    """A result of the host: it varies from run to run."""
    return concrete(value)


def concrete(value: Any) -> Any:
    """A value as NumPy arrays."""
    if isinstance(value, (Known, Array)):
        return value.data
    return [concrete(x) for x in value] if isinstance(value, list) else value


def _last_uses(nodes: Sequence[OnnxNode], outputs: Sequence[str]) -> dict[str, int]:
    """The position of the last node that uses a name; past the end for outputs."""
    found: dict[str, int] = {}
    for position, node in enumerate(nodes):
        names = [*node.inputs, *(n for body in bodies_of(node) for n in body.outer)]
        found.update(dict.fromkeys(names, position))
    return found | dict.fromkeys(outputs, len(nodes))
