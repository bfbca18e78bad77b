"""The deserialiser: untrusted bytes to values, ops and graphs."""

from __future__ import annotations

import struct
from collections.abc import Callable
from math import prod
from typing import Any, NoReturn, TypeVar

from rlx.errors import FormatError, VerifyError
from rlx.ir import attrs
from rlx.ir.attrs import Body, Data, MaskKind
from rlx.ir.dim import MAX_DEGREE, MAX_TERMS, Atom, Dim, Expr, FloorDiv, sym
from rlx.ir.dtype import BY_NAME, DType
from rlx.ir.graph import Graph
from rlx.ir.node import UNKNOWN, Node, Origin, Value
from rlx.ir.op import Op, make_op
from rlx.ir.quant.scheme import QuantScheme
from rlx.ir.serial.writer import MAX_DEPTH, int_bytes
from rlx.ir.shape import Shape
from rlx.ir.verify import verify

_MAX_INT = 64 << 10  # bytes of one int
_G = TypeVar("_G", bound=Graph)
_T = TypeVar("_T")


class Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.at, self.end = data, 0, len(data)
        self.depth = 0

    # -- bytes --------------------------------------------------------------------------------

    def fail(
        self,
        what: str,
        *,
        got: object = None,
        expected: object = None,
        cause: BaseException | None = None,
    ) -> NoReturn:
        raise FormatError(f"{what} (at byte {self.at})", got=got, expected=expected) from cause

    def finish(self) -> None:
        if self.at != self.end:
            self.fail("bytes after the end", got=f"{self.end - self.at} bytes")

    def take(self, size: int) -> bytes:
        start, stop = self.at, self.at + size
        if stop > self.end:
            self.fail("a length past the end", got=size, expected=f"at most {self.end - start}")
        self.at = stop
        return self.data[start:stop]

    def uint(self) -> int:
        at, end, data = self.at, self.end, self.data
        number = shift = 0
        while at < end and shift < 64:
            byte = data[at]
            at += 1
            number |= (byte & 127) << shift
            if byte < 128:
                if not byte and shift:
                    break  # not the shortest encoding
                self.at = at
                return number
            shift += 7
        return self.fail("not a number")

    def count(self, smallest: int = 1) -> int:
        """A number of entries that take at least `smallest` bytes each."""
        number = self.uint()
        if number * smallest > self.end - self.at:
            self.fail("a count past the end", got=number)
        return number

    def integer(self) -> int:
        size = self.uint()
        if not 0 < size <= _MAX_INT:
            self.fail("an int of impossible size", got=f"{size} bytes")
        number = int.from_bytes(self.take(size), "little", signed=True)
        if int_bytes(number) != size:
            self.fail("not the shortest encoding of an int")
        return number

    def text(self) -> str:
        raw = self.take(self.uint())
        try:
            return raw.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as e:
            self.fail("text that is not UTF-8", cause=e)

    def flag(self) -> bool:
        byte = self.take(1)[0]
        if byte > 1:
            self.fail("not a flag", got=byte)
        return byte == 1

    def ints32(self) -> tuple[int, ...]:
        size = self.count(4)
        return struct.unpack(f"<{size}I", self.take(4 * size))

    def table(self, entry: Callable[[], _T]) -> list[_T]:
        return [entry() for _ in range(self.count())]

    def nest(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self.fail("nested too deep", expected=f"at most {MAX_DEPTH} levels")

    # -- values -------------------------------------------------------------------------------

    def value(self) -> Any:
        tag = self.take(1)
        decode = _DECODERS.get(tag)
        if decode is None:
            self.fail("unknown tag of a value", got=tag)
        return decode(self)

    def _float(self) -> float:
        return float(struct.unpack("<d", self.take(8))[0])

    def _tuple(self) -> tuple[Any, ...]:
        self.nest()
        items = tuple(self.table(self.value))
        self.depth -= 1
        return items

    def _expr(self) -> Expr:
        """A polynomial in normal form; any other is an error."""
        self.nest()
        count = self.count(2)
        terms: dict[tuple[Atom, ...], int] = {}
        for _ in range(count):
            factor = self.integer()
            atoms = [self._atom() for _ in range(self.count())]
            if len(atoms) > MAX_DEGREE or len(terms) >= MAX_TERMS:
                self.fail("a dimension expression too large")
            terms[tuple(atoms)] = factor
        self.depth -= 1
        found = Expr(terms)
        in_order = all(list(m) == sorted(m, key=str) for m in terms)
        if found.terms != tuple(terms.items()) or len(terms) != count or not in_order:
            self.fail("a dimension that is not in normal form", got=found)
        if not found.symbols:
            self.fail("a dimension expression without symbols", got=found)
        return found

    def _atom(self) -> Atom:
        tag = self.take(1)
        if tag == b"s":
            name = self.text()
            sym(name)  # checks it
            return name
        if tag != b"/":
            self.fail("unknown tag in a dimension", got=tag)
        numerator, divisor = self._expr(), self.integer()
        atom = FloorDiv(numerator, divisor)
        if divisor < 2 or numerator // divisor != Expr({(atom,): 1}):
            self.fail("a quotient that is not in normal form", got=atom)
        return atom

    def dim(self) -> Dim:
        value: Dim = self.value()
        if type(value) is not int and type(value) is not Expr:
            self.fail("not a dimension", got=repr(value))
        return value

    def _dtype(self) -> DType:
        name = self.text()
        if name not in BY_NAME:
            self.fail("unknown element type", got=repr(name))
        return BY_NAME[name]

    def shape(self) -> Shape:
        dtype = self._dtype()
        return Shape(self.table(self.dim), dtype)

    def _data(self) -> Data:
        shape = self.shape()
        if not shape.is_static:
            self.fail("a constant of unknown size", got=shape)
        raw = self.take(prod(shape.static_dims) * shape.dtype.bytes)
        return Data(attrs.from_bytes(raw, shape))

    def _body(self) -> Body:
        self.nest()
        size, end = self.uint(), self.end
        if size > end - self.at:
            self.fail("a length past the end", got=size)
        self.end = self.at + size
        graph = self.graph(Graph)
        self.finish()
        self.end = end
        self.depth -= 1
        return Body(graph)

    # -- ops and graphs -----------------------------------------------------------------------

    def op(self) -> Op:
        if self.take(1) != b"O":
            self.fail("not an op")
        name = self.text()
        attributes = {}
        for _ in range(count := self.count(2)):
            field = self.text()
            attributes[field] = self.value()
        if len(attributes) != count:
            self.fail("an attribute given twice", got=name)
        op = make_op(name, attributes)
        for field, value in attributes.items():
            if not _same_kind(getattr(op, field), value):
                self.fail(f"[{name}.{field}] an attribute of another type", got=repr(value))
        return op

    def graph(self, cls: type[_G]) -> _G:
        ops, shapes, names = self.table(self.op), self.table(self.shape), self.table(self.text)
        count = self.uint()
        rows = self.ints32()
        graph = cls()
        self._nodes(graph, count, rows, ops, shapes, names)
        values = [v for n in graph.nodes for v in n.outputs]
        for _ in range(self.count(2)):
            index = self.uint()
            if index >= len(values):
                self.fail("an output that is no value of the graph", got=index)
            graph.outputs.append(values[index])
            graph.output_names.append(self.text())
        for _ in range(self.count(2)):
            symbol = self.text()
            if symbol in graph.dynamic:
                self.fail("a dynamic symbol given twice", got=symbol)
            graph.dynamic[symbol] = self.integer()
        if self.flag():
            self._names(graph)
        self._verify(graph)
        return graph

    def _nodes(
        self,
        graph: Graph,
        count: int,
        rows: tuple[int, ...],
        ops: list[Op],
        shapes: list[Shape],
        names: list[str],
    ) -> None:
        nodes, values, at = graph.nodes, list[Value](), 0
        try:
            for position in range(count):
                op, name, stop = ops[rows[at]], names[rows[at + 1]], at + 3 + rows[at + 2]
                inputs = tuple([values[i] for i in rows[at + 3 : stop]])
                node = Node(graph, position, op, inputs, name, UNKNOWN)
                at = stop + 1 + rows[stop]
                found = [shapes[i] for i in rows[stop + 1 : at]]
                node.outputs = outputs = tuple([Value(node, i, s) for i, s in enumerate(found)])
                values += outputs
                nodes.append(node)
                if name and op.is_source:
                    graph._sources[name] = node
        except IndexError as e:
            what = "a row that refers to something later, or to nothing"
            self.fail(f"node {len(nodes)}: {what}", cause=e)
        if at != len(rows):
            self.fail("rows that are not nodes", got=len(rows), expected=at)

    def _names(self, graph: Graph) -> None:
        graph.name = self.text()
        strings = self.table(self.text)
        origins = self.table(lambda: self._origin(strings))
        rows = self.ints32()
        if len(rows) != len(graph.nodes) or any(i >= len(origins) for i in rows):
            self.fail("origins that do not fit the nodes")
        for node, index in zip(graph.nodes, rows, strict=True):
            node.origin = origins[index]

    def _origin(self, strings: list[str]) -> Origin:
        indices = self.table(self.uint)
        if len(indices) < 2 or any(i >= len(strings) for i in indices):
            self.fail("an origin that refers to nothing")
        block, file, *passes = [strings[i] for i in indices]
        return Origin(block, file, self.integer(), tuple(passes))

    def _verify(self, graph: Graph) -> None:
        try:
            verify(graph)
        except VerifyError as e:
            self.fail(f"a graph that breaks the rules: {e}", cause=e)


def _same_kind(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    return type(a) is not tuple or (len(a) == len(b) and all(map(_same_kind, a, b)))


def _mask(reader: Reader) -> MaskKind:
    return MaskKind(reader.text(), reader.integer())


_DECODERS: dict[bytes, Callable[[Reader], Any]] = {
    b"N": lambda r: None,
    b"T": lambda r: True,
    b"F": lambda r: False,
    b"i": Reader.integer,
    b"f": Reader._float,
    b"s": Reader.text,
    b"x": Reader._expr,
    b"t": Reader._dtype,
    b"S": Reader.shape,
    b"m": _mask,
    b"q": lambda r: QuantScheme.parse(r.text()),
    b"(": Reader._tuple,
    b"D": Reader._data,
    b"B": Reader._body,
}
