"""Computing the nodes of a graph one after the other: on traced arrays, or on concrete ones.

An operator is looked up in the table. One without a row is a function: of the file, or as the
`onnx` package defines it; its nodes are computed in its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlx.errors import FormatError, RlxError
from rlx.formats.onnx import (
    Initializer,
    OnnxFile,
    OnnxFunction,
    OnnxGraph,
    OnnxNode,
    Reference,
)
from rlx.numpy.array import Array
from rlx.onnx import schema_functions
from rlx.onnx.call import Call, as_results
from rlx.onnx.table import Row, find, find_on_known
from rlx.onnx.values import Host, Known, NeedsValueError, Value, constant_of, elements_of

MAX_DEPTH = 64  # of functions and bodies inside each other
_MISFITS = (
    ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError
)  # fmt: skip
MAX_KNOWN = 2**16  # elements of what is computed while tracing


class Scope:
    """The values of a graph by name; those of the graphs around it are found too."""

    __slots__ = ("attributes", "depth", "opsets", "outer", "values")

    def __init__(
        self, opsets: Mapping[str, int], outer: Scope | None = None,
        attributes: Mapping[str, Any] | None = None, depth: int = 0,
    ) -> None:  # fmt: skip
        self.values: dict[str, Any] = {}
        self.opsets, self.outer, self.depth = opsets, outer, depth
        self.attributes = attributes or {}
        if depth > MAX_DEPTH:
            raise FormatError("functions and bodies nest too deep", got=depth)

    def opset(self, domain: str) -> int:
        return self.opsets.get(domain, 1)

    def get(self, name: str) -> Any:
        scope: Scope | None = self
        while scope is not None:
            if name in scope.values:
                return scope.values[name]
            scope = scope.outer
        raise FormatError("a value that nothing computed", got=repr(name))


class Interpreter:
    """Runs nodes in a scope. `traced` says whether values are traced arrays."""

    def __init__(self, file: OnnxFile, traced: bool, max_iterations: int) -> None:
        self.file, self.traced, self.max_iterations = file, traced, max_iterations

    def run_nodes(self, nodes: Sequence[OnnxNode], scope: Scope) -> None:
        for node in nodes:
            self.run_node(node, scope)

    def run_node(self, node: OnnxNode, scope: Scope) -> None:
        operands = [scope.get(name) if name else None for name in node.inputs]
        results = self.call(node, operands, scope)
        if any(node.outputs[len(results) :]):
            raise FormatError(
                "a result that the operator does not have", where=str(node),
                got=f"{len(node.outputs)} outputs", expected=f"at most {len(results)}",
            )  # fmt: skip
        scope.values.update(zip(node.outputs, results, strict=False))

    def call(self, node: OnnxNode, operands: list[Any], scope: Scope) -> Sequence[Any]:
        """The results of an operator or a function."""
        if self.traced and any(_has_host(x) for x in operands):
            raise NeedsValueError(on_host=True)
        attributes = self._attributes(node, scope)
        function = self.file.functions.get((node.domain, node.op_type, node.overload))
        try:
            if function is not None:
                return self.run_function(function, operands, attributes, scope)
            opset = scope.opset(node.domain)
            row = find(node.domain, node.op_type, opset)
            if row is None:
                function = schema_functions.body_of(node, attributes, operands, opset)
                return self.run_function(function, operands, attributes, scope)
            row.check(node, operands)
            call = Call(node, attributes, scope, self)
            return self._call_row(row, call, operands)
        except RlxError as error:
            raise error.located(str(node)) from None
        except _MISFITS as error:  # of Python or NumPy, on what only a damaged file says
            raise FormatError(
                "operands or attributes that do not fit the operator", where=str(node),
                got=f"{type(error).__name__}: {error!s:.200}",
            ) from error  # fmt: skip

    def _call_row(self, row: Row, call: Call, operands: list[Any]) -> Sequence[Any]:
        count = max(call.num_outputs, 1)
        if operands and all(isinstance(x, Known) for x in operands):
            result = _on_known(call, operands)
            if result is not NotImplemented:
                return as_results(result, count)
        if row.raw:
            return as_results(row.function(call, *operands), count)
        given = [self._operand(row, i, x) for i, x in enumerate(operands)]
        return as_results(row.function(call, *given), count)

    def _operand(self, row: Row, position: int, value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, list):
            return [self._operand(row, position, x) for x in value]
        if row.on_host:
            if self.traced and (not isinstance(value, Known) or value.is_symbolic):
                raise NeedsValueError(value, on_host=True)
            return elements_of(value)
        if position in row.known or -1 in row.known:
            return elements_of(value)
        return value.array() if isinstance(value, Known) else value

    def _attributes(self, node: OnnxNode, scope: Scope) -> Mapping[str, Any]:
        if not any(isinstance(v, Reference) for v in node.attributes.values()):
            return node.attributes
        found = {}
        for name, value in node.attributes.items():
            if not isinstance(value, Reference):
                found[name] = value
            elif value.name in scope.attributes:
                found[name] = scope.attributes[value.name]
        return found

    # -- functions and bodies -----------------------------------------------------------------

    def run_function(
        self, function: OnnxFunction, operands: Sequence[Any], attributes: Mapping[str, Any],
        scope: Scope,
    ) -> Sequence[Any]:  # fmt: skip
        given = {**function.defaults, **attributes}
        opsets = {**scope.opsets, **function.opsets}
        inner = Scope(opsets, None, given, scope.depth + 1)
        padded = [*operands, *[None] * (len(function.inputs) - len(operands))]
        inner.values.update(zip(function.inputs, padded, strict=False))
        self.run_nodes(function.nodes, inner)
        return [inner.values.get(name) for name in function.outputs]

    def run_body(self, body: OnnxGraph, scope: Scope, given: Sequence[Value]) -> list[Value]:
        inner = Scope(scope.opsets, scope, scope.attributes, scope.depth + 1)
        inner.values.update(constants_of(body.initializers))
        if len(given) > len(body.inputs):
            raise FormatError(
                "more values than the body has inputs", where=body.name, got=len(given),
                expected=len(body.inputs),
            )  # fmt: skip
        inner.values.update(zip([a.name for a in body.inputs], given, strict=False))
        self.run_nodes(body.nodes, inner)
        return [inner.get(a.name) for a in body.outputs]


def constants_of(initializers: Mapping[str, Initializer]) -> dict[str, Known]:
    return {name: constant_of(made) for name, made in initializers.items()}


def _on_known(call: Call, operands: Sequence[Known]) -> Any:
    if sum(x.data.size for x in operands) > MAX_KNOWN:
        return NotImplemented
    function = find_on_known(call.node.domain, call.node.op_type)
    return NotImplemented if function is None else function(call, *operands)


def _has_host(value: Any) -> bool:
    return isinstance(value, Host) or (isinstance(value, list) and any(map(_has_host, value)))


def as_array(value: Any) -> Array:
    """A tensor as an array for computing."""
    return value.array() if isinstance(value, Known) else value
