"""The serialiser: values, ops and graphs to bytes. Each value has one encoding, tagged by type."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Any

from rlx.errors import FormatError
from rlx.ir import attrs
from rlx.ir.attrs import Body, Data, MaskKind
from rlx.ir.dim import Expr, FloorDiv
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph
from rlx.ir.node import Origin, Value
from rlx.ir.op import Op
from rlx.ir.quant.scheme import QuantScheme
from rlx.ir.shape import Shape

MAX_DEPTH = 32  # of tuples, quotients and nested graphs
_SMALL = [bytes([i]) for i in range(128)]


def canonical(value: Any) -> bytes:
    """The canonical encoding of an attribute value, an op or a graph: injective, for cache keys.

    Graph names and node origins are left out: they do not change what a program computes.
    """
    writer = Writer(names=False)
    if isinstance(value, Graph):
        return b"G" + writer.graph(value)
    return writer.op(value) if isinstance(value, Op) else writer.value(value)


def uint(number: int) -> bytes:
    """LEB128: seven bits per byte, lowest first, the eighth bit set while more follow."""
    if number < 128:
        return _SMALL[number]
    out = bytearray()
    while number >= 128:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def int_bytes(number: int) -> int:
    """The fewest bytes that hold a signed number."""
    magnitude = number if number >= 0 else ~number
    return magnitude.bit_length() // 8 + 1


def integer(number: int) -> bytes:
    size = int_bytes(number)
    return uint(size) + number.to_bytes(size, "little", signed=True)


def text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")  # file names may hold lone surrogates
    return uint(len(data)) + data


def ints32(numbers: list[int]) -> bytes:
    """A count and that many 32-bit integers."""
    return uint(len(numbers)) + struct.pack(f"<{len(numbers)}I", *numbers)


class Table:
    """Distinct entries in order of first appearance."""

    def __init__(self, first: Iterable[bytes] = ()) -> None:
        self.index = {entry: i for i, entry in enumerate(first)}

    def add(self, entry: bytes) -> int:
        return self.index.setdefault(entry, len(self.index))

    def pack(self) -> bytes:
        return uint(len(self.index)) + b"".join(self.index)


class Writer:
    """Encodes values; with `names`, also graph names and node origins."""

    def __init__(self, names: bool = True) -> None:
        self.names = names
        self.depth = 0

    # -- values -------------------------------------------------------------------------------

    def value(self, value: Any) -> bytes:
        encode = _ENCODERS.get(type(value))
        if encode is None:
            raise FormatError(
                "an attribute that cannot be stored", got=f"{value!r} ({type(value).__name__})"
            )
        return encode(self, value)

    def _nest(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise FormatError("nested too deep to store", expected=f"at most {MAX_DEPTH} levels")

    def _tuple(self, value: tuple[Any, ...]) -> bytes:
        self._nest()
        items = [self.value(item) for item in value]
        self.depth -= 1
        return b"(" + uint(len(items)) + b"".join(items)

    def _expr(self, value: Expr) -> bytes:
        return b"x" + self._terms(value)

    def _terms(self, value: Expr) -> bytes:
        self._nest()
        parts = [uint(len(value.terms))]
        for monomial, factor in value.terms:
            parts += [integer(factor), uint(len(monomial))]
            for atom in monomial:
                if isinstance(atom, FloorDiv):
                    parts += [b"/", self._terms(atom.numerator), integer(atom.divisor)]
                else:
                    parts += [b"s", text(atom)]
        self.depth -= 1
        return b"".join(parts)

    def shape(self, value: Shape) -> bytes:
        dims = [self.value(d) for d in value.dims]
        return text(value.dtype.name) + uint(len(dims)) + b"".join(dims)

    def _scheme(self, value: QuantScheme) -> bytes:
        if QuantScheme.parse(value.name) != value:
            raise FormatError("a scheme that `parse` does not give for its name", got=repr(value))
        return b"q" + text(value.name)

    def _data(self, value: Data) -> bytes:
        return b"D" + self.shape(value.shape) + attrs.to_bytes(value.array)

    def _body(self, value: Body) -> bytes:
        self._nest()
        graph = self.graph(value.graph)
        self.depth -= 1
        return b"B" + uint(len(graph)) + graph

    # -- ops and graphs -----------------------------------------------------------------------

    def op(self, op: Op) -> bytes:
        """The name and every attribute, also defaults: those may change between versions."""
        parts = [b"O", text(op.name), uint(len(op.fields))]
        for field in op.fields:
            parts += [text(field), self.value(getattr(op, field))]
        return b"".join(parts)

    def graph(self, graph: Graph) -> bytes:
        """Tables of distinct ops, shapes and names, then nodes as rows of indices into them."""
        ops, shapes, names = Table(), Table(), Table([text("")])
        known: dict[int, int] = {}  # id of an op or shape → its index; both outlive this call
        number: dict[Value, int] = {}
        rows: list[int] = []
        for node in graph.nodes:
            op = node.op
            index = known.get(id(op))
            if index is None:
                index = known[id(op)] = ops.add(self.op(op))
            inputs = [number[v] for v in node.inputs]
            rows += (index, names.add(text(node.name)) if node.name else 0, len(inputs), *inputs)
            rows.append(len(node.outputs))
            for v in node.outputs:
                number[v] = len(number)
                shape = known.get(id(v.shape))
                if shape is None:
                    shape = known[id(v.shape)] = shapes.add(self.shape(v.shape))
                rows.append(shape)
        parts = [ops.pack(), shapes.pack(), names.pack(), uint(len(graph.nodes)), ints32(rows)]
        parts.append(uint(len(graph.outputs)))
        for v, name in zip(graph.outputs, graph.output_names, strict=True):
            parts += [uint(number[v]), text(name)]
        parts.append(uint(len(graph.dynamic)))
        for symbol, bound in sorted(graph.dynamic.items()):
            parts += [text(symbol), integer(bound)]
        parts.append(self._names(graph) if self.names else b"\0")
        return b"".join(parts)

    def _names(self, graph: Graph) -> bytes:
        strings, origins = Table(), Table()
        known: dict[Origin, int] = {}
        rows = []
        for node in graph.nodes:
            index = known.get(node.origin)
            if index is None:
                index = known[node.origin] = origins.add(_origin(node.origin, strings))
            rows.append(index)
        return b"\1" + text(graph.name) + strings.pack() + origins.pack() + ints32(rows)


def _origin(origin: Origin, strings: Table) -> bytes:
    parts = (origin.block, origin.file, *origin.passes)
    indices = b"".join([uint(strings.add(text(part))) for part in parts])
    return uint(len(parts)) + indices + integer(origin.line)


_ENCODERS: dict[type, Callable[[Writer, Any], bytes]] = {
    type(None): lambda w, v: b"N",
    bool: lambda w, v: b"T" if v else b"F",
    int: lambda w, v: b"i" + integer(v),
    float: lambda w, v: b"f" + struct.pack("<d", v),
    str: lambda w, v: b"s" + text(v),
    DType: lambda w, v: b"t" + text(v.name),
    Shape: lambda w, v: b"S" + w.shape(v),
    MaskKind: lambda w, v: b"m" + text(v.kind) + integer(v.window),
    Expr: Writer._expr,
    QuantScheme: Writer._scheme,
    tuple: Writer._tuple,
    Data: Writer._data,
    Body: Writer._body,
}
