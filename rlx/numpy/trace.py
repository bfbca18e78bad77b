"""Tracing: running a Python function once on arrays without data, to record a graph.

Sizes stay symbolic: each axis of an argument has a symbol of its own. Where an op needs two sizes
to be equal, and they are in this call, one symbol replaces the other and a guard is recorded.
Python code that looks at a number (`if n > 4`, `range(n)`) leaves a guard too. The trace serves
only calls for which every guard gives the same answer.

Bodies of loops and branches are traced by a `Trace` inside another. Arrays of the outer one that
they use become operands of the body.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import eq, ge, gt, le, lt
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rlx.errors import DTypeError, InputError, RlxError
from rlx.ir.binding import bind_op
from rlx.ir.dim import Dim, Expr, evaluate, substitute
from rlx.ir.graph import Graph
from rlx.ir.node import Node, Operand, Value, caller, infer
from rlx.ir.op import Op
from rlx.ir.shape import Shape

if TYPE_CHECKING:
    from rlx.numpy.array import Array

_COMPARE: dict[str, Callable[[int, int], bool]] = {"==": eq, "<": lt, "<=": le, ">": gt, ">=": ge}


class Guard(NamedTuple):
    """What had to be known of sizes while a function was traced, and the answer."""

    left: Dim
    comparison: str
    right: Dim
    answer: bool
    where: str  # the user's line
    why: str = "looked at"

    def holds(self, sizes: Mapping[str, int]) -> bool:
        left, right = evaluate(self.left, sizes), evaluate(self.right, sizes)
        return _COMPARE[self.comparison](left, right) is self.answer

    def __str__(self) -> str:
        text = f"{self.left} {self.comparison} {self.right}"
        return f"{text if self.answer else f'not {text}'} ({self.why}: {self.where})"


class _Active(threading.local):
    def __init__(self) -> None:
        self.traces: list[Trace] = []


_active = _Active()


def recording_trace() -> Trace | None:
    """The innermost trace that this thread records now."""
    return _active.traces[-1] if _active.traces else None


class Trace:
    """The graph being recorded, its guards, and the concrete arrays that it captures.

    The trace of a body has a `parent`; guards and captured arrays are those of the outermost one,
    the `root`.
    """

    def __init__(self, name: str, parent: Trace | None = None) -> None:
        self.name, self.parent, self.open = name, parent, True
        self.root: Trace = self if parent is None else parent.root
        self.open_graphs: list[Graph] = []  # of the root: those being recorded
        self.graph: Graph = TraceGraph(self)
        self.root.open_graphs.append(self.graph)
        self.captured: list[Array] = []
        self.operands: list[Value] = []  # values of the parent that the body uses
        self.prints: list[Any] = []  # what `debug.print` asked for: see `debug`
        self._values: dict[object, tuple[object, Value]] = {}  # keyed by identity, kept alive
        if parent is None:
            self.guards: list[Guard] = []
            self.hints: dict[str, int] = {}  # the sizes of the call that is traced
            self.replaced: dict[str, Dim] = {}  # symbols that turned out to equal others

    @contextmanager
    def recording(self) -> Iterator[Trace]:
        """Ops of this thread are recorded here until the context ends, which closes the trace."""
        _active.traces.append(self)
        try:
            yield self
        finally:
            _active.traces.pop()
            self.open = False
            self.root.open_graphs.remove(self.graph)

    def is_inside(self, other: Trace) -> bool:
        trace: Trace | None = self
        while trace is not None and trace is not other:
            trace = trace.parent
        return trace is not None

    def innermost(self) -> Trace:
        """The trace that records now, where it is this one or one inside; else this one."""
        if _active.traces and _active.traces[-1].is_inside(self):
            return _active.traces[-1]
        return self

    # -- values -------------------------------------------------------------------------------

    def capture(self, array: Array) -> Value:
        """A concrete array used inside the function: one more input, not copied."""
        self.require_open()
        return self._once(array, lambda: self._captured(array))

    def _captured(self, array: Array) -> Value:
        if self.parent is not None:
            return self._operand(self.parent.capture(array))
        self.captured.append(array)
        shape = Shape(array.data.shape, array.dtype)
        return self.graph.input(f"captured_{len(self.captured)}", shape)

    def enter(self, value: Value, home: Trace) -> Value:
        """A value of `home`, which is this trace or one around it, in this trace."""
        if home is self:
            return value
        if self.parent is None:
            raise InputError(
                "arrays of two traces meet", got=f"{home.name} and {self.name}",
                hint="a jitted function takes what it needs as arguments",
            )  # fmt: skip
        return self._operand(self.parent.enter(value, home))

    def _operand(self, outer: Value) -> Value:
        def make() -> Value:
            self.operands.append(outer)
            return self.graph.input(f"operand_{len(self.operands)}", outer.shape)

        return self._once(outer, make)

    def _once(self, key: object, make: Callable[[], Value]) -> Value:
        found = self._values.get(id(key))
        if found is None:
            found = self._values[id(key)] = key, make()
        return found[1]

    def require_open(self) -> None:
        if not self.open:
            raise InputError(
                "a traced array was used after its function returned", where=self.name,
                got="a leaked tracer", expected="arrays that the function returns",
                hint="return the array from the jitted function instead of storing it elsewhere",
            )  # fmt: skip

    # -- sizes --------------------------------------------------------------------------------

    def hint(self, dim: Dim) -> int:
        """What a size is in the call that is traced."""
        return evaluate(dim, self.root.hints)

    def resolve(self, dim: Dim) -> Dim:
        """`dim` with symbols that turned out to equal others replaced."""
        return substitute(dim, self.root.replaced) if self.root.replaced else dim

    def guard(self, left: Dim, comparison: str, right: Dim) -> bool:
        """The answer for the sizes of this call, recorded as a guard unless it always holds."""
        left, right = self.resolve(left), self.resolve(right)
        answer = _COMPARE[comparison](self.hint(left), self.hint(right))
        if not (isinstance(left, int) and isinstance(right, int)) and left != right:
            self._record(Guard(left, comparison, right, answer, str(caller("", 2))))
        return answer

    def _record(self, guard: Guard) -> None:
        if guard[:4] not in [known[:4] for known in self.root.guards]:
            self.root.guards.append(guard)

    def equate(self, symbol: str, dim: Dim, why: str) -> None:
        """Let `dim` replace `symbol`, in all that was recorded so far. Calls are checked for it."""
        root, change = self.root, {symbol: dim}
        self._record(Guard(Expr({(symbol,): 1}), "==", dim, True, str(caller("", 2)), why))
        root.replaced = {s: substitute(d, change) for s, d in root.replaced.items()} | change
        for graph in root.open_graphs:
            for node in graph.nodes:
                node.op = bind_op(node.op, change)
                for value in node.outputs:
                    value.shape = value.shape.bind(change)

    def fix(self, dims: Sequence[Dim], why: str) -> None:
        """Make the symbols of these sizes the numbers that they are in this call."""
        for symbol in sorted({s for d in dims if isinstance(d, Expr) for s in d.symbols}):
            self.equate(symbol, self.root.hints[symbol], why)

    def same_size(self, a: Dim, b: Dim, why: str) -> bool:
        """Whether two sizes are equal; ones that are equal in this call alone become one symbol."""
        a, b = self.resolve(a), self.resolve(b)
        if a == b:
            return True
        if self.hint(a) != self.hint(b):
            return False
        change = _solved(a, b)
        if change is None:
            self.fix([a, b], why)
        else:
            self.equate(*change, why)
        return True

    # -- ops that need equal sizes --------------------------------------------------------------

    def unify(self, op: Op, shapes: Sequence[Shape]) -> None:
        """Make sizes equal that `op` needs to be equal. Raises the op's own error, with the numbers
        of this call, if it does not take these either."""
        hints = self.root.hints
        dims = list(dict.fromkeys(d for d in (*_dims_of(op), *[d for s in shapes for d in s.dims])))
        try:
            infer(bind_op(op, hints), tuple([s.bind(hints) for s in shapes]))
        except RlxError as error:
            self.fix(dims, "not equal")  # code that catches the error may have relied on it
            error.is_final = True  # type: ignore[attr-defined]
            raise
        why = f"equal for {op.name}"
        pairs = [
            pair
            for i, b in enumerate(dims)
            for a in dims[:i]
            if self.hint(a) == self.hint(b) and (pair := _solved(a, b)) is not None
        ]
        for pair in pairs:
            if _fits(op, shapes, [pair]):
                self.equate(*pair, why)
                return
        needed = _without_cycles(pairs)
        if not _fits(op, shapes, needed):
            self.fix(dims, why)
            return
        for pair in list(needed):  # leave out those that the op does not need
            fewer = [p for p in needed if p is not pair]
            if _fits(op, shapes, fewer):
                needed = fewer
        for symbol, dim in needed:
            resolved = self.resolve(dim)
            if symbol not in self.root.replaced:
                self.equate(symbol, resolved, why)


def _dims_of(op: Op) -> Iterator[Dim]:
    for value in op.attributes().values() if op.fields else ():
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, Expr):
                yield item


def _solved(a: Dim, b: Dim) -> tuple[str, Dim] | None:
    """A symbol and what it must be for a == b; None where neither is a symbol of its own."""
    for dim, other in ((b, a), (a, b)):
        if isinstance(dim, Expr) and dim.symbols == {str(dim)}:
            name = str(dim)
            if isinstance(other, int) or name not in other.symbols:
                return name, other
    return None


def _without_cycles(pairs: Sequence[tuple[str, Dim]]) -> list[tuple[str, Dim]]:
    """Pairs that can be applied one after the other: one for a symbol."""
    chosen: dict[str, Dim] = {}
    for symbol, dim in pairs:
        resolved = substitute(dim, chosen)
        if symbol in chosen or (isinstance(resolved, Expr) and symbol in resolved.symbols):
            continue
        chosen = {s: substitute(d, {symbol: resolved}) for s, d in chosen.items()}
        chosen[symbol] = resolved
    return list(chosen.items())


def _fits(op: Op, shapes: Sequence[Shape], pairs: Sequence[tuple[str, Dim]]) -> bool:
    """Whether the op takes these shapes once the pairs are equal."""
    change = dict(pairs)
    try:
        infer(bind_op(op, change), tuple([s.bind(change) for s in shapes]))
    except RlxError:
        return False
    return True


class TraceGraph(Graph):
    """A graph that makes sizes equal where an op needs it."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace.name)
        self.trace = trace

    def _empty(self) -> Graph:  # type: ignore[override]
        return Graph(self.name)  # copies are graphs like others

    def append_node(self, op: Op, operands: Sequence[Operand] = (), name: str = "") -> Node:
        self.trace.require_open()
        replaced = self.trace.root.replaced
        if replaced:
            op = bind_op(op, replaced)
        count = len(self.nodes)
        try:
            return super().append_node(op, operands, name)
        except (DTypeError, InputError):
            raise
        except RlxError:
            del self.nodes[count:]  # constants made of literals
            inputs = self._operands(op, tuple(operands))
            try:
                self.trace.unify(op, [v.shape for v in inputs])
            except RlxError as error:
                shown = ", ".join(f"{v.name} {v.shape}" for v in inputs)
                where = f"{name or op.name}({shown}) {caller(self._block, 2)}".strip()
                raise error.located(op.name, where) from None
            op = bind_op(op, self.trace.root.replaced)
            return super().append_node(op, inputs, name)


class Size:
    """A symbolic size: arithmetic keeps it symbolic, looking at its number leaves a guard."""

    __slots__ = ("_dim", "trace")

    def __init__(self, trace: Trace, dim: Dim) -> None:
        self.trace, self._dim = trace, dim

    @property
    def dim(self) -> Dim:
        return self.trace.resolve(self._dim)

    @property
    def hint(self) -> int:
        return self.trace.hint(self._dim)

    def as_array(self, dtype: Any = "i64") -> Array:
        """The size as a traced array without axes."""
        from rlx.numpy.array import Tracer  # late: it imports this file

        trace = self.trace.innermost()
        return Tracer(trace, trace.graph.dim_value(dim=self.dim, dtype=dtype))

    def _arithmetic(self, function: Callable[[Any, Any], Any], other: object) -> Any:
        if isinstance(other, bool) or not isinstance(other, (int, Size, np.integer)):
            return _with_array(self, function, other)
        return make_size(self.trace, function(self.dim, dim_of(other)))

    def __add__(self, other: object) -> Any:
        return self._arithmetic(lambda a, b: a + b, other)

    def __sub__(self, other: object) -> Any:
        return self._arithmetic(lambda a, b: a - b, other)

    def __rsub__(self, other: object) -> Any:
        return self._arithmetic(lambda a, b: b - a, other)

    def __mul__(self, other: object) -> Any:
        return self._arithmetic(lambda a, b: a * b, other)

    def __radd__(self, other: object) -> Any:
        return self._arithmetic(lambda a, b: b + a, other)

    def __rmul__(self, other: object) -> Any:
        return self._arithmetic(lambda a, b: b * a, other)

    def __floordiv__(self, other: object) -> Any:
        if type(other) is int and other > 0:
            return self._arithmetic(lambda a, b: a // b, other)
        return self._looked_at(lambda a, b: a // b, other)

    def __mod__(self, other: object) -> Any:
        if type(other) is int and other > 0:
            return self - (self // other) * other
        return self._looked_at(lambda a, b: a % b, other)

    def _looked_at(self, function: Callable[[Any, Any], Any], other: object) -> Any:
        """Arithmetic on the number itself, or on arrays."""
        if isinstance(other, Size):
            return function(int(self), int(other))
        if isinstance(other, (int, float, complex, np.number)):
            return function(int(self), other)
        return _with_array(self, function, other)

    def __divmod__(self, other: object) -> Any:
        return self // other, self % other

    def __truediv__(self, other: Any) -> Any:
        return self._looked_at(lambda a, b: a / b, other)

    def __rtruediv__(self, other: Any) -> Any:
        return self._looked_at(lambda a, b: b / a, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return self._looked_at(lambda a, b: b // a, other)

    def __rmod__(self, other: Any) -> Any:
        return self._looked_at(lambda a, b: b % a, other)

    def __pow__(self, other: Any) -> Any:
        if type(other) is int and 0 < other <= 8:
            made: Any = self
            for _ in range(other - 1):
                made = made * self
            return made
        return self._looked_at(lambda a, b: a**b, other)

    def __rpow__(self, other: Any) -> Any:
        return self._looked_at(lambda a, b: b**a, other)

    def __neg__(self) -> Any:
        return self * -1

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return abs(int(self)) if self < 0 else self

    def _compare(self, comparison: str, other: object) -> bool:
        if isinstance(other, (float, np.floating)):
            return _COMPARE[comparison](int(self), other)  # type: ignore[arg-type]
        if not isinstance(other, (int, Size, np.integer)):
            return NotImplemented  # type: ignore[no-any-return]
        return self.trace.guard(self.dim, comparison, dim_of(other))

    def __eq__(self, other: object) -> bool:
        return self._compare("==", other)

    def __ne__(self, other: object) -> bool:
        answer = self._compare("==", other)
        return answer if answer is NotImplemented else not answer

    def __lt__(self, other: object) -> bool:
        return self._compare("<", other)

    def __le__(self, other: object) -> bool:
        return self._compare("<=", other)

    def __gt__(self, other: object) -> bool:
        return self._compare(">", other)

    def __ge__(self, other: object) -> bool:
        return self._compare(">=", other)

    def __index__(self) -> int:
        number = self.hint
        self.trace.guard(self.dim, "==", number)
        return number

    __int__ = __index__

    def __float__(self) -> float:
        return float(int(self))

    def __bool__(self) -> bool:
        return not self.trace.guard(self.dim, "==", 0)

    def __hash__(self) -> int:
        return hash(int(self))

    def __repr__(self) -> str:
        return str(self.dim)


def _with_array(size: Size, function: Callable[[Any, Any], Any], other: object) -> Any:
    """Arithmetic of a size and an array: the size is an element of the array's type."""
    from rlx.numpy.array import Array  # late: it imports this file

    if not isinstance(other, Array):
        return NotImplemented
    element = "i64" if other.dtype.kind in ("bool", "complex") else other.dtype
    return function(size.as_array(element), other)


def make_size(trace: Trace, dim: Dim) -> Any:
    """A number where `dim` is one, else a symbolic size."""
    return dim if isinstance(dim, int) else Size(trace, dim)


def dim_of(size: object) -> Dim:
    """The dim of a size: an int, a NumPy int or a symbolic `Size`."""
    if isinstance(size, Size):
        return size.dim
    try:
        return size.__index__()  # type: ignore[attr-defined, no-any-return]
    except AttributeError:
        raise InputError("not a size", got=repr(size), expected="an int") from None
