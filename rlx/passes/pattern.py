"""Patterns of rewrite rules: trees of op names with captured operands.

    op("mul", "x", op("sigmoid", "x"))            the same x twice
    op("add", op("matmul", "a", "b", name="p"), "bias")
    op(("gelu", "silu"), "x")                     one of several ops
    op(activation_ops, "x")                       ops that a function lists, also later ones
    op("mul", "x", 1)                             the number 1, in any element type
    op("mul", "x", const("c"))                    any constant, captured
    op("mean", "x", when=lambda o: o.keepdims)    a condition on the attributes
    op(("add", "mul"), having="expand")           any operands, one of them an expand

Operands of commutative ops match in either order. A string captures a value; the same string
twice means the same value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.errors import OptionError
from rlx.ir.node import Node, Value
from rlx.ir.op import REGISTRY, Op

if TYPE_CHECKING:
    from rlx.ir.graph import Graph
    from rlx.passes.rewrite import Editor

Part = Any  # a Pattern, a capture name, or a number
OpNames = str | Iterable[str] | Callable[[], frozenset[str]]


class Pattern:
    """Base of the nodes of a pattern tree."""

    ops: frozenset[str] | None = None  # names of the ops it can match; None means any

    def refresh(self) -> None:
        """List the ops again where a function does so: more may have been registered since."""


class Capture(Pattern):
    """Any value, remembered under a name."""

    def __init__(self, name: str) -> None:
        self.name = name


class Const(Pattern):
    """A constant: of one element equal to `number`, or any when that is None."""

    ops = frozenset({"constant"})

    def __init__(self, name: str, number: float | None) -> None:
        self.name, self.number = name, number

    def accepts(self, node: Node) -> bool:
        if node.op.name != "constant":
            return False
        return self.number is None or is_number(node.output, self.number)


class OpPattern(Pattern):
    """A node whose op is one of `ops` and whose operands match `parts`."""

    def __init__(
        self,
        ops: OpNames,
        parts: tuple[Pattern, ...],
        name: str,
        when: Callable[[Any], bool] | None,
        having: str,
    ) -> None:
        self.given = ops
        self.ops: frozenset[str] = _op_names(ops)
        self.parts, self.name, self.when, self.having = parts, name, when, having
        self.swaps = len(parts) == 2 and all(map(_is_commutative, self.ops))

    def refresh(self) -> None:
        self.ops = _op_names(self.given)
        for part in self.parts:
            part.refresh()

    @property
    def needs(self) -> tuple[frozenset[str], ...]:
        """Sets of op names; one operand must be of each set. The cheapest test for a mismatch."""
        if self.having:
            return (frozenset({self.having}),)
        known = [p.ops for p in self.parts if p.ops is not None]
        return tuple(sorted(dict.fromkeys(known), key=len))


def _op_names(given: OpNames) -> frozenset[str]:
    if callable(given):
        return given()
    return frozenset({given} if isinstance(given, str) else given)


def _is_commutative(name: str) -> bool:
    known = REGISTRY.get(name)
    return known is not None and known.is_commutative


def op(
    ops: OpNames,
    *parts: Part,
    name: str = "",
    when: Callable[[Any], bool] | None = None,
    having: str = "",
) -> OpPattern:
    """A node of one of `ops` on operands `parts`; without parts any operands match."""
    return OpPattern(ops, tuple(map(_part, parts)), name, when, having)


def const(name: str = "", number: float | None = None) -> Const:
    """A constant, captured under `name` when one is given."""
    return Const(name, number)


def _part(given: Part) -> Pattern:
    if isinstance(given, Pattern):
        return given
    if isinstance(given, str):
        return Capture(given)
    if isinstance(given, (int, float)):
        return Const("", float(given))
    raise OptionError("not part of a pattern", got=repr(given))


def number(value: Value) -> float | None:
    """The value of a one-element real constant, or None.

    The shortest decimal that rounds to the constant: 1e-6, not the f32 nearest to it.
    """
    node = value.node
    if node.op.name != "constant":
        return None
    array = node.op.data.array  # type: ignore[attr-defined]
    if array.size != 1 or value.shape.dtype.kind == "complex":
        return None
    scalar = array.reshape(())[()]
    return float(str(scalar)) if array.dtype in (np.float32, np.float16) else float(scalar)


def is_number(value: Value, wanted: float) -> bool:
    """Whether a constant is `wanted`, up to the rounding of its element type."""
    found = number(value)
    if found is None:
        return False
    if found == wanted:
        return True
    if not value.shape.dtype.is_float or wanted == 0:
        return False
    # f64 constants often come from f32 ones, so compare with the tolerance of f32
    tolerance = {1: 0.06, 2: 0.004}.get(value.shape.dtype.bytes, 2e-7)
    return abs(found - wanted) <= tolerance * abs(wanted)


class Match:
    """A pattern matched at a root node: the captures and the nodes between."""

    __slots__ = ("_values", "also", "editor", "inner", "reason", "root")

    def __init__(self, editor: Editor, root: Node) -> None:
        self.editor, self.root = editor, root
        self._values: dict[str, Value] = {}
        self.inner: list[Value] = []  # results of matched nodes below the root
        self.also: list[tuple[Value, Value]] = []  # more values to replace, and by what
        self.reason = ""

    @property
    def g(self) -> Graph:
        """The graph to build the replacement on."""
        return self.editor.graph

    def __getattr__(self, name: str) -> Value:
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(name) from None

    def has(self, name: str) -> bool:
        return name in self._values

    def op(self, name: str = "") -> Any:
        """The record of a captured node, or of the root."""
        return self._values[name].node.op if name else self.root.op

    def number(self, name: str) -> float | None:
        return number(self._values[name])

    def array(self, name: str) -> Any:
        """The elements of a captured constant."""
        return np.asarray(self.op(name).data.array)

    def if_same(self, value: Value) -> Value | None:
        """`value` when it has the shape and type of the root's result, else None."""
        old, new = self.root.outputs[0].shape, value.shape
        return value if old is new or (old.dtype is new.dtype and old.same_dims(new)) else None

    def same_precision(self, *values: Value) -> bool:
        """Whether `values` have the element type of the result.

        A fused op rounds once, at the end. Where the parts round to a narrower type on the way,
        fusing them would change a wide result.
        """
        element = self.root.outputs[0].shape.dtype
        return all(v.shape.dtype is element for v in values)

    def miss(self, reason: str) -> Value | None:
        """Returns None, and notes in the fusion report why the rule does not apply."""
        self.reason = reason
        return None

    def replace_too(self, value: Value, by: Value) -> None:
        """Replace another value along with the root."""
        self.also.append((value, by))

    def owned(self) -> tuple[Value, str] | None:
        """An inner value that is used outside the match, and how; None when there is none.

        A match without such values leaves only dead nodes when it is replaced.
        """
        inside = {v.node for v in self.inner}
        inside.add(self.root)
        for value in self.inner:
            if value in self.editor.returned:
                return value, "is a graph output"
            if any(user not in inside for user in self.editor.users[value]):
                return value, "has another user"
        return None


def matches(pattern: OpPattern, editor: Editor, root: Node) -> Iterator[Match]:
    """Matches at `root`, whose op is known to fit: one per order of its operands."""
    if pattern.when is not None and not pattern.when(root.op):
        return
    for todo in _operands(pattern, root.inputs, None):
        match = Match(editor, root)
        if pattern.name:
            match._values[pattern.name] = root.outputs[0]
        if _solve(todo, match):
            yield match


Todo = tuple[Pattern, Value, Any] | None  # a linked list: pattern, value, the rest


def _operands(pattern: OpPattern, inputs: tuple[Value, ...], rest: Todo) -> Iterator[Todo]:
    """The ways to pair the parts of a pattern with operands."""
    parts = pattern.parts
    if not parts:
        yield rest
    elif len(parts) == len(inputs):
        if pattern.swaps:
            first, second = parts
            a, b = inputs
            yield (first, a, (second, b, rest))
            yield (first, b, (second, a, rest))
            return
        for part, value in zip(reversed(parts), reversed(inputs), strict=True):
            rest = (part, value, rest)
        yield rest


def _solve(todo: Todo, match: Match) -> bool:
    """Match everything in `todo`, backtracking where operands can be paired in two ways."""
    values = match._values
    while todo is not None:
        part, value, todo = todo
        if isinstance(part, OpPattern):
            return _solve_op(part, value, todo, match)
        if isinstance(part, Const) and not part.accepts(value.node):
            return False
        name: str = part.name  # type: ignore[attr-defined]
        if name:
            known = values.get(name)
            if known is None:
                values[name] = value
            elif known is not value:
                return False
    return True


def _solve_op(part: OpPattern, value: Value, rest: Todo, match: Match) -> bool:
    node = value.node
    record: Op = node.op
    if record.name not in part.ops or (part.when is not None and not part.when(record)):
        return False
    if part.name and match._values.setdefault(part.name, value) is not value:
        return False
    kept, depth = dict(match._values), len(match.inner)
    for todo in _operands(part, node.inputs, rest):
        match.inner.append(value)
        if _solve(todo, match):
            return True
        match._values = dict(kept)
        del match.inner[depth:]
    return False
