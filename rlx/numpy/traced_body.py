"""Tracing the body of a loop or a branch, and checking what it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlx.errors import DTypeError, InputError, ShapeError, UnsupportedError
from rlx.ir.dtype import DType, bool_
from rlx.ir.node import Value
from rlx.ir.shape import Shape
from rlx.numpy.array import Array, Tracer
from rlx.numpy.debug import tracers_of
from rlx.numpy.dispatch import as_array
from rlx.numpy.trace import Size, Trace
from rlx.numpy.tree import Structure, flatten, leaf_names, unflatten

_KINDS = ("bool", "uint", "int", "float", "complex")


class TracedBody:
    """A branch or body: its trace, and what it returns."""

    def __init__(self, where: str, parent: Trace) -> None:
        self.where, self.trace = where, Trace(f"{where} of {parent.name}", parent)
        self.results: list[Value] = []
        self.structure: Structure = None
        self.names: list[str] = []
        self._numbers: set[int] = set()  # results that were Python numbers

    def inputs(self, outer: Sequence[Value], sliced: bool = False) -> list[Tracer]:
        """Operands of the body; `sliced` without their axis 0."""
        found = []
        for value in outer:
            shape = value.shape
            shape = shape.with_dims(shape.dims[1:]) if sliced else shape
            name = f"x{len(self.trace.graph.nodes)}"
            found.append(Tracer(self.trace, self.trace.graph.input(name, shape)))
        return found

    def call(self, function: Callable[[], Any]) -> None:
        with self.trace.recording():
            result = function()
            leaves, self.structure = flatten(result)
            self.names = [f".{name}" if name else "" for name in leaf_names(result)]
            for i, leaf in enumerate(leaves):
                if isinstance(leaf, (bool, int, float, complex)):
                    self._numbers.add(i)
                self.results.append(value_in(self.trace, as_leaf(leaf, self.where)))

    def add_marker(self, prints: Sequence[Any]) -> None:
        """Results for the prints of the body: a marker of each iteration, and what they print."""
        with self.trace.reopened() as graph:
            self.results.append(graph.constant(np.zeros((), np.bool_)))
            self.results += [self.trace.enter(x.own, x.home) for x in tracers_of(prints)]

    def add_prints(self, other: TracedBody) -> None:
        """Results of a branch for what it prints, and zeros of the other branch in their place."""
        with self.trace.reopened():
            found = [self.trace.enter(x.own, x.home) for x in tracers_of(self.trace.prints)]
        self.results += found
        with other.trace.reopened() as graph:
            for value in found:
                zero = graph.constant(np.zeros((), np.bool_))
                zeros = graph.cast(zero, value.shape.dtype)
                other.results.append(graph.expand(zeros, value.shape.dims))

    def convert(self, i: int, wanted: DType) -> Value:
        """Result i in the type of what it stands beside, if it was a Python number."""
        value = self.results[i]
        fits = _KINDS.index(value.shape.dtype.kind) <= _KINDS.index(wanted.kind)
        if i in self._numbers and value.shape.dtype is not wanted and fits:
            with self.trace.reopened() as graph:
                value = self.results[i] = graph.cast(value, wanted)
        return value

    def flag(self, value: Value) -> Value:
        if value.shape.rank or value.shape.dtype is not bool_:
            raise DTypeError(
                "not one truth value", where=self.where, got=f"a condition {value.shape}",
                expected="[] bool", hint="compare, or reduce with rlx.numpy.all or any",
            )  # fmt: skip
        return value

    def require_carry(
        self, init: Any, structure: Structure, before: Sequence[Shape], after: Any = None
    ) -> None:
        """Raise unless the carry has the same tree, types and shapes after an iteration."""
        found = self.structure if self.where != "scan" else flatten(after)[1]
        if found != structure:
            raise changed_tree(self.where, init, found, structure)
        names = leaf_names(init)
        for i, (name, shape) in enumerate(zip(names, before, strict=True)):
            value = self.convert(i, shape.dtype)
            require_same(self.trace, value, shape, self.where, (
                f"the carry{'.' + name if name else ''} changes its type", "after an iteration",
                "before",
            ))  # fmt: skip

    def body(self) -> Any:
        return self.trace.body(self.results)


def changed_tree(where: str, init: Any, found: Structure, expected: Structure) -> InputError:
    return InputError(
        "the carry changes its tree", where=where, got=structure_text(found),
        expected=f"{structure_text(expected)}, as of {init!r:.80}",
    )  # fmt: skip


def require_same(
    trace: Trace, found: Value, expected: Value | Shape, where: str, texts: tuple[str, str, str]
) -> None:
    """Raise unless two values have one type; sizes that are equal in this call become one."""
    wanted = expected.shape if isinstance(expected, Value) else expected
    have, root = found.shape, trace.root
    same = have.rank == wanted.rank and have.dtype is wanted.dtype
    if same:
        pairs = zip(have.dims, wanted.dims, strict=True)
        same = all(trace.same_size(a, b, f"equal for {where}") for a, b in pairs)
    if not same:
        what, is_found, is_expected = texts
        raise (ShapeError if have.dtype is wanted.dtype else DTypeError)(
            what, where=where, got=f"{have.bind(root.hints)} {is_found}",
            expected=f"{wanted.bind(root.hints)} {is_expected}",
            hint="astype, reshape or broadcast_to make them agree",
        )  # fmt: skip


def checked_carry(carry: Any, structure: Structure, first: Sequence[Array], where: str) -> Any:
    """The carry after an iteration outside `rlx.jit`; it has the types of the first."""
    leaves, found = flatten(carry)
    if found != structure:
        raise changed_tree(where, carry, found, structure)
    arrays = []
    for leaf, before in zip(leaves, first, strict=True):
        x = as_array(leaf)
        if isinstance(leaf, (bool, int, float, complex)) and _KINDS.index(
            x.dtype.kind
        ) <= _KINDS.index(before.dtype.kind):
            x = x.astype(before.dtype)
        if x.dtype is not before.dtype or x.shape != before.shape:
            raise (ShapeError if x.dtype is before.dtype else DTypeError)(
                "the carry changes its type", where=where,
                got=f"{Shape(x.shape, x.dtype)} after an iteration",
                expected=f"{Shape(before.shape, before.dtype)} before",
                hint="astype, reshape or broadcast_to make them agree",
            )  # fmt: skip
        arrays.append(x)
    return unflatten(structure, arrays)


def arrays_of(tree: Any, where: str) -> tuple[list[Array], Structure]:
    leaves, structure = flatten(tree)
    return [as_leaf(x, where) for x in leaves], structure


def as_leaf(x: Any, where: str, hint: str = "") -> Array:
    """A leaf of a tree as an array."""
    if isinstance(x, Tracer):
        return x
    if isinstance(x, Size):
        return x.as_array()
    try:
        return as_array(x)
    except Exception as error:
        raise InputError(
            "not an array", where=where, got=f"{x!r:.60} ({type(x).__name__})",
            expected="arrays, numbers, or trees of them", hint=getattr(error, "hint", "") or hint,
        ) from error  # fmt: skip


def value_in(trace: Trace, x: Array) -> Value:
    """The value of an array in a trace."""
    if isinstance(x, Tracer):
        x.home.require_open()
        return trace.enter(x.own, x.home)
    if x.data.ndim == 0:
        return trace.graph.constant(x.data, x.dtype)
    return trace.capture(x)


def trace_of(tracer: Tracer) -> Trace:
    trace = tracer.trace
    trace.require_open()
    return trace


def flag_of(pred: Tracer, where: str, what: str) -> Value:
    if pred.ndim or pred.dtype is not bool_:
        raise DTypeError(
            f"{what} must be one truth value", where=where, got=pred.own.shape,
            expected="[] bool", hint="compare, or reduce with rlx.numpy.all or any",
        )  # fmt: skip
    return pred.value


def apply_op(parent: Trace, op: Any, operands: Sequence[Value]) -> list[Tracer]:
    made = parent.graph.append(op, operands)
    return [Tracer(parent, v) for v in (made if isinstance(made, tuple) else (made,))]


def unflattened(parent: Trace, op: Any, operands: Sequence[Value], structure: Structure) -> Any:
    return unflatten(structure, apply_op(parent, op, operands))


def require_functions(where: str, *functions: Any) -> None:
    for function in functions:
        if not callable(function):
            raise InputError("not a function", where=where, got=f"{function!r:.60}")


def require_no_prints(where: str, *bodies: TracedBody) -> None:
    if any(body.trace.prints for body in bodies):
        raise UnsupportedError(
            "a print inside a while_loop", where="debug.print", got=f"in {where}",
            expected="one outside, in a branch, or in the body of scan, map or fori_loop",
            hint="return the value, and print it afterwards",
        )  # fmt: skip


def tree_text(body: TracedBody) -> str:
    return structure_text(body.structure)


def structure_text(structure: Structure) -> str:
    """A structure as a reader writes it: `{'a': ·, 'b': (·, ·)}`."""
    if isinstance(structure, str):
        return "·"
    kind, keys, parts = structure
    inner = [structure_text(part) for part in parts]
    if kind is type(None):
        return "None"
    if keys:
        inner = [f"{k!r}: {part}" for k, part in zip(keys, inner, strict=True)]
    text = ", ".join(inner)
    if kind is dict:
        return f"{{{text}}}"
    return {tuple: f"({text})", list: f"[{text}]"}.get(kind, f"{kind.__name__}({text})")
