"""What a rule looks for: a tree of op kinds with captured operands.

    op("mul", "x", op("sigmoid", "x"))            the same x in both places
    op("add", op("matmul", "a", "b", name="p"), "bias")
    op(("gelu", "silu"), "x")                     one of several kinds
    op(activation_kinds, "x")                     the kinds that a function gives, now and later
    op("mul", "x", 1)                             the number 1, in any element type
    op("mul", "x", const("c"))                    any constant, captured
    op("mean", "x", when=lambda o: o.keepdims)    a condition on the attributes
    op(("add", "mul"), having="expand")           any operands, one of them an expand

Operands of commutative kinds match in either order. A string captures a value; the same string
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
Kinds = str | Iterable[str] | Callable[[], frozenset[str]]


class Pattern:
    """Base of the pieces a pattern is made of."""

    kinds: frozenset[str] | None = None  # of nodes it can match; None means any

    def refresh(self) -> None:
        """Ask again for kinds that a function gives: ops were registered since."""


class Capture(Pattern):
    """Any value, remembered under a name."""

    def __init__(self, name: str) -> None:
        self.name = name


class Const(Pattern):
    """A constant: of one element equal to `number`, or any when that is None."""

    kinds = frozenset({"constant"})

    def __init__(self, name: str, number: float | None) -> None:
        self.name, self.number = name, number

    def accepts(self, node: Node) -> bool:
        if node.op.name != "constant":
            return False
        return self.number is None or is_number(node.output, self.number)


class OpPattern(Pattern):
    """A node of one of `kinds` whose operands match `parts`."""

    def __init__(
        self,
        kinds: Kinds,
        parts: tuple[Pattern, ...],
        name: str,
        when: Callable[[Any], bool] | None,
        having: str,
    ) -> None:
        self.given = kinds
        self.kinds: frozenset[str] = _kinds(kinds)
        self.parts, self.name, self.when, self.having = parts, name, when, having
        self.swaps = len(parts) == 2 and all(map(_is_commutative, self.kinds))

    def refresh(self) -> None:
        self.kinds = _kinds(self.given)
        for part in self.parts:
            part.refresh()

    @property
    def needs(self) -> tuple[frozenset[str], ...]:
        """Sets of kinds, of each of which one operand must be: the cheapest reason not to match."""
        if self.having:
            return (frozenset({self.having}),)
        known = [p.kinds for p in self.parts if p.kinds is not None]
        return tuple(sorted(dict.fromkeys(known), key=len))


def _kinds(given: Kinds) -> frozenset[str]:
    if callable(given):
        return given()
    return frozenset({given} if isinstance(given, str) else given)


def _is_commutative(kind: str) -> bool:
    known = REGISTRY.get(kind)
    return known is not None and known.is_commutative


def op(
    kinds: Kinds,
    *parts: Part,
    name: str = "",
    when: Callable[[Any], bool] | None = None,
    having: str = "",
) -> OpPattern:
    """A node of kind `kinds` on operands `parts`; without parts any operands do."""
    return OpPattern(kinds, tuple(map(_part, parts)), name, when, having)


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
    """The number that a one-element real constant holds, or None.

    It is the shortest one that rounds to the constant: 1e-6, not the f32 nearest to it.
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
    # f64 constants are often typed from f32 ones, so nothing finer than f32 is asked for
    step = {1: 0.06, 2: 0.004}.get(value.shape.dtype.bytes, 2e-7)
    return abs(found - wanted) <= step * abs(wanted)


class Match:
    """A place where a pattern fits: the root node, the captures, the nodes between."""

    __slots__ = ("_values", "also", "editor", "inner", "reason", "root")

    def __init__(self, editor: Editor, root: Node) -> None:
        self.editor, self.root = editor, root
        self._values: dict[str, Value] = {}
        self.inner: list[Value] = []  # results of matched nodes below the root
        self.also: list[tuple[Value, Value]] = []  # more values to replace, and by what
        self.reason = ""

    @property
    def g(self) -> Graph:
        """Where the result is built."""
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

    def rounds_alike(self, *values: Value) -> bool:
        """Whether `values` have the element type of the result.

        A fused op rounds once, at the end. Where the parts round to a narrower type on the way,
        fusing them would change a wide result.
        """
        element = self.root.outputs[0].shape.dtype
        return all(v.shape.dtype is element for v in values)

    def miss(self, reason: str) -> Value | None:
        """None, and why the rule does not apply after all: for the fusion report."""
        self.reason = reason
        return None

    def replace_too(self, value: Value, by: Value) -> None:
        """Replace another value along with the root."""
        self.also.append((value, by))

    def owned(self) -> tuple[Value, str] | None:
        """An inner value with a user outside the match, and who that is; None when there is none.

        Matches that own their inner values leave nothing behind when they are replaced.
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
    """Matches at `root`, whose kind is known to be right: one per order of its operands."""
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
    """Match everything in `todo`, going back where operands could be paired in two ways."""
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
    if record.name not in part.kinds or (part.when is not None and not part.when(record)):
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
