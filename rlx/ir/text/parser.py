"""The parser: text to a graph. Shapes are inferred again and checked against written ones."""

from __future__ import annotations

import json
import re
from typing import Any

from rlx.errors import RlxError, VerifyError
from rlx.ir.attrs import Body
from rlx.ir.graph import Graph
from rlx.ir.node import UNKNOWN, Node, Origin, Value, infer
from rlx.ir.op import Op, make_op
from rlx.ir.shape import Shape
from rlx.ir.text.reader import Reader, Source, Token
from rlx.ir.verify import verify

_PART = r'(?:"(?:[^"\\]|\\.)*"|[^\s,":>]+)'
_ORIGIN = re.compile(
    rf"(?:block (?P<block>{_PART}))?(?:(?:^|, )(?P<file>{_PART}):(?P<line>-?\d+))?"
    rf"(?:(?:^|, )via (?P<passes>{_PART}(?: > {_PART})*))?\Z"
)
_PASS = re.compile(_PART)
_FAULTS = (RlxError, ValueError, TypeError, ArithmeticError, LookupError, AttributeError)


def parse_graph(text: str, name: str = "text") -> Graph:
    """The graph written in `text`; `name` is the file it came from, for messages."""
    parser = GraphParser(Source(text, name))
    parser.skip_comments()
    graph = parser.graph()
    parser.skip_comments()
    if parser.token.kind != "end":
        parser.fail(parser.token, "text after the graph")
    return graph


class GraphParser(Reader):
    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.files: dict[str, str] = {}
        self.built: Graph = Graph()
        self.values: dict[str, Value] = {}

    def skip_comments(self) -> None:
        while self.token.kind == "comment":
            self.advance()

    def graph(self) -> Graph:
        """`graph name { … }`; a nested one has labels of its own."""
        start = self.expect("graph")
        outer = self.built, self.values
        self.built, self.values = Graph(), {}
        if self.token.text != "{":
            self.built.name = self.name("a name or '{'")
        self.nest(self.expect("{"))
        self._statements()
        self.depth -= 1
        try:
            verify(self.built)
        except VerifyError as e:
            self.wrap(start, e)
        graph = self.built
        self.built, self.values = outer
        return graph

    def body(self) -> Any:
        after = self.tokens[self.position + 1]
        if after.kind not in ("identifier", "string") and after.text != "{":
            return super().body()
        return Body(self.graph())

    def _statements(self) -> None:
        """Everything between the braces, the closing one included."""
        while True:
            self.skip_comments()
            token = self.token
            if token.kind == "value":
                self._node()
            elif self.take("live"):
                self._dynamic()
            elif self.take("file"):
                label = self.string()
                self.expect("=")
                self.files[label] = self.string()
            elif self.take("return"):
                self._return()
                self.skip_comments()
                self.expect("}")
                return
            elif self.take("}"):
                return
            else:
                self.fail(token, "unexpected text", expected="a node, 'live', 'return' or '}'")

    def _dynamic(self) -> None:
        while True:
            symbol = self.name("a symbol")
            self.expect("<=")
            self.built.dynamic[symbol] = self.integer("a bound")
            if not self.take(","):
                return

    def _return(self) -> None:
        start = self.token
        values, names = [], []
        while self.token.kind == "value":
            values.append(self._operand())
            names.append(self.string() if self.take("as") else "")
            if not self.take(","):
                break
        try:
            self.built.set_outputs(*values)
            if any(names):
                defaults = self.built.output_names
                both = zip(names, defaults, strict=True)
                self.built.output_names = [n or default for n, default in both]
        except RlxError as e:
            self.wrap(start, e)

    # -- nodes --------------------------------------------------------------------------------

    def _node(self) -> None:
        start = self.advance()
        if "." in start.text or start.text in self.values:
            what = "defined twice" if start.text in self.values else "a result on its own"
            self.fail(start, what, expected="a new label")
        count, name, shapes = self._left()
        self.expect("=")
        at = self.token
        op, inputs = self._call(shapes)
        found = self._infer(at, op, inputs)
        if count is not None and count != len(found):
            self.fail(start, "wrong number of results", got=count, expected=len(found))
        self._check_shapes(start, shapes, found)
        node = Node(self.built, len(self.built.nodes), op, inputs, name, self._origin())
        node.outputs = tuple([Value(node, i, s) for i, s in enumerate(shapes or found)])
        self.built.nodes.append(node)
        if op.is_source and name:
            self.built._sources[name] = node
        self._define(start.text, node)

    def _left(self) -> tuple[int | None, str, list[Shape]]:
        """`:2 "name": [4] f32, [4] i32`, each part optional."""
        count, name, shapes = None, "", list[Shape]()
        if self.token.text == ":" and self.tokens[self.position + 1].kind == "number":
            self.advance()
            count = self.integer()
        if self.token.kind == "string":
            name = self.string()
        if self.take(":"):
            shapes.append(self.shape())
            while self.take(","):
                shapes.append(self.shape())
        return count, name, shapes

    def _infer(self, at: Token, op: Op, inputs: tuple[Value, ...]) -> tuple[Shape, ...]:
        try:
            return infer(op, tuple([v.shape for v in inputs]))
        except _FAULTS as e:
            self.wrap(at, e)

    def _check_shapes(self, start: Token, written: list[Shape], found: tuple[Shape, ...]) -> None:
        if not written or tuple(written) == found:
            return
        if len(written) != len(found):
            what = "wrong number of shapes"
        elif all(
            a.dtype is b.dtype and a.same_dims(b) for a, b in zip(written, found, strict=True)
        ):
            return  # two forms of one size, such as rows and batch * seq
        else:
            what = "the written shape is not the inferred one"
        got, expected = (", ".join(map(str, shapes)) for shapes in (written, found))
        self.fail(start, what, got=got, expected=expected)

    def _define(self, label: str, node: Node) -> None:
        # the bare label is there for single results, and to notice a second definition
        self.values[label] = node.outputs[0] if len(node.outputs) == 1 else _SEVERAL
        for value in node.outputs:
            self.values[f"{label}.{value.index}"] = value

    def _operand(self) -> Value:
        token = self.expect_kind("value", "an operand such as %0")
        value = self.values.get(token.text)
        if value is None:
            self.fail(token, "not defined before its use", expected="the label of a node above")
        if value is _SEVERAL:
            self.fail(token, "a node of several results", expected=f"{token.text}.0 or another")
        return value

    def _call(self, shapes: list[Shape]) -> tuple[Op, tuple[Value, ...]]:
        token = self.token
        name = self.name("an op")
        while self.take("."):
            name += "." + self.name("an op")
        attributes: dict[str, Any] = {}
        inputs: list[Value] = []
        if name == "constant" and self.token.text == "(" and self.ahead() != ";":
            attributes["data"] = self._constant(token, shapes)
        elif self.take("("):
            while self.token.text not in (";", ")"):
                inputs.append(self._operand())
                if not self.take(","):
                    break
            if self.take(";"):
                self.sequence(lambda: self._attribute(attributes), ")")
            elif not self.take(")"):
                self.fail(self.token, "unexpected text", expected="',', ';' or ')'")
        elif name in ("input", "param", "state"):
            if len(shapes) != 1:
                self.fail(token, f"{name} without a shape", expected='%0 "x": [n] f32 = input')
            attributes["shape"] = shapes[0]
        else:
            self.fail(self.token, "unexpected text", expected="'('")
        return self._op(token, name, attributes), tuple(inputs)

    def _op(self, token: Token, name: str, attributes: dict[str, Any]) -> Op:
        try:
            return make_op(name, attributes)
        except _FAULTS as e:
            self.wrap(token, e)

    def _constant(self, token: Token, shapes: list[Shape]) -> Any:
        if len(shapes) != 1:
            self.fail(token, "a constant without a shape", expected="%0: [2] f32 = constant(…)")
        self.expect("(")
        data = self.array(shapes[0])
        self.expect(")")
        return data

    def _attribute(self, attributes: dict[str, Any]) -> None:
        token = self.expect_kind("identifier", "the name of an attribute")
        if token.text in attributes:
            self.fail(token, "attribute given twice")
        self.expect("=")
        attributes[token.text] = self.value()

    def _origin(self) -> Origin:
        """The origin in the comment after a node; other comments are ignored."""
        token = self.token
        if token.kind != "comment":
            return UNKNOWN
        last = self.tokens[self.position - 1]
        if "\n" in self.source.text[last.at + len(last.text) : token.at]:
            return UNKNOWN
        self.advance()
        found = _ORIGIN.match(token.text[2:].strip())
        if found is None:
            return UNKNOWN
        try:
            label = _unquote(found["file"])
            passes = tuple(map(_unquote, _PASS.findall(found["passes"] or "")))
            line = int(found["line"] or 0)
            return Origin(_unquote(found["block"]), self.files.get(label, label), line, passes)
        except ValueError as e:  # a bad escape
            self.fail(token, "not an origin", cause=e)


_SEVERAL: Any = object()


def _unquote(text: str | None) -> str:
    if not text:
        return ""
    return str(json.loads(text, strict=False)) if text.startswith('"') else text
