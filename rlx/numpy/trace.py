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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.errors import DTypeError, InputError, RlxError
from rlx.ir.binding import bind_op
from rlx.ir.dim import Dim, Expr, evaluate, substitute
from rlx.ir.graph import Graph
from rlx.ir.node import Node, Operand, Origin, Value, caller, infer, symbols_of_node
from rlx.ir.op import Op
from rlx.ir.shape import Shape
from rlx.numpy import unify
from rlx.numpy.guard import COMPARE, Guard

if TYPE_CHECKING:
    from rlx.numpy.array import Array


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
        self.open_graphs: list[TraceGraph] = []  # of the root: those being recorded
        self.graph = TraceGraph(self)
        self.root.open_graphs.append(self.graph)
        self.captured: list[Array] = []
        self.operands: list[Value] = []  # values of the parent that the body uses
        self.mapped_axis: tuple[str, Dim] | None = None  # of a `vmap` that names it, and its size
        self.prints: list[Any] = []  # what `debug.print` asked for: see `debug`
        self._values: dict[object, tuple[object, Value]] = {}  # keyed by identity, kept alive
        self._scalars: dict[tuple[Any, bytes], Value] = {}
        if parent is None:
            self.guards: list[Guard] = []
            self.known: set[tuple[Dim, str, Dim, bool]] = set()  # what they say
            self.hints: dict[str, int] = {}  # the sizes of the call that is traced
            self.replaced: dict[str, Dim] = {}  # symbols that turned out to equal others
            self.replaced_by: dict[str, set[str]] = {}  # a symbol -> those whose dims name it
            self.quotients: dict[str, Dim] = {}  # symbols made for what a size is divided by

    @contextmanager
    def recording(self) -> Iterator[Trace]:
        """Ops of this thread are recorded here until the context ends, which closes the trace."""
        _active.traces.append(self)
        try:
            yield self
        finally:
            _active.traces.pop()
            self.open = False

    def add_operand(self, outer: Value) -> None:
        """Make a value of the parent an operand of this body, though it does not use it."""
        with self.reopened():
            self._operand(outer)

    @contextmanager
    def reopened(self) -> Iterator[Graph]:
        """The graph of a body, to add to it after its function returned."""
        before, self.open = self.open, True
        try:
            yield self.graph
        finally:
            self.open = before

    def body(self, results: Sequence[Value]) -> Graph:
        """The finished graph of a body with these results."""
        self.root.open_graphs.remove(self.graph)
        return self.graph.set_outputs(*results).copy()

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

    def scalar(self, data: np.ndarray[Any, Any]) -> Value:
        """A number that is known now: a trace has it once."""
        key = data.dtype, data.tobytes()
        found = self._scalars.get(key)
        if found is None:
            found = self._scalars[key] = self.graph.constant(data)
        return found

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

    def current_graph(self, graph: Graph) -> Graph:
        """A finished graph with the symbols that turned out to equal others replaced."""
        known = self.root.replaced
        if not known:
            return graph
        return graph.rebuild(
            [(bind_op(n.op, known), tuple([v.shape.bind(known) for v in n.outputs])) for n in graph]
        )

    def guard(self, left: Dim, comparison: str, right: Dim) -> bool:
        """The answer for the sizes of this call, recorded as a guard unless it always holds."""
        left, right = self.resolve(left), self.resolve(right)
        answer = COMPARE[comparison](self.hint(left), self.hint(right))
        if not unify.decided(left - right, comparison):
            self._record(Guard(left, comparison, right, answer, str(caller("", 2))))
        return answer

    def _record(self, guard: Guard) -> None:
        if guard[:4] not in self.root.known:
            self.root.known.add(guard[:4])
            self.root.guards.append(guard)

    def equate(self, symbol: str, dim: Dim, why: str, where: Origin | None = None) -> None:
        """Let `dim` replace `symbol`, in all that was recorded so far. Calls are checked for it.
        `where` is the line that needs it, by default the one that runs."""
        made = Expr({(symbol,): 1})
        self._record(Guard(made, "==", dim, True, str(where or caller("", 2)), why))
        self._replace(symbol, dim)

    def _replace(self, symbol: str, dim: Dim) -> None:
        root, change = self.root, {symbol: dim}
        moved = root.replaced_by.pop(symbol, set())
        for each in moved:
            root.replaced[each] = substitute(root.replaced[each], change)
        root.replaced[symbol] = dim
        for each in dim.symbols if isinstance(dim, Expr) else ():
            root.replaced_by.setdefault(each, set()).update(moved, (symbol,))
        for graph in root.open_graphs:
            graph.replace_symbol(symbol, dim)

    def fix(self, dims: Sequence[Dim], why: str, where: Origin | None = None) -> None:
        """Make the symbols of these sizes the numbers that they are in this call."""
        for symbol in sorted({s for d in dims if isinstance(d, Expr) for s in d.symbols}):
            self.equate(symbol, self.root.hints[symbol], why, where)

    def same_size(self, a: Dim, b: Dim, why: str) -> bool:
        """Whether two sizes are equal; ones that are equal in this call alone become one symbol."""
        a, b = self.resolve(a), self.resolve(b)
        if a == b:
            return True
        if self.hint(a) != self.hint(b):
            return False
        change = unify.solved(a, b)
        if change is None:
            self.fix([a, b], why)
        else:
            self.equate(*change, why)
        return True

    def divide(self, symbol: str, divisor: int, why: str) -> None:
        """Let `divisor` times a new symbol replace `symbol`, which is a multiple of it."""
        root, name = self.root, f"{symbol}_by_{divisor}"
        quotient = Expr({(symbol,): 1}) // divisor
        root.quotients[name] = quotient
        root.hints[name] = root.hints[symbol] // divisor
        self._record(
            Guard(quotient * divisor, "==", Expr({(symbol,): 1}), True, str(caller("", 2)), why)
        )
        self._replace(symbol, Expr({(name,): divisor}))


class TraceGraph(Graph):
    """A graph that makes sizes equal where an op needs it."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace.name)
        self.trace = trace
        self._nodes_of: dict[str, dict[Node, None]] = {}  # by symbol, of the first `_indexed` nodes
        self._indexed = 0

    def _empty(self) -> Graph:  # type: ignore[override]
        return Graph(self.name)  # copies are graphs like others

    def current_op(self, op: Op) -> Op:
        replaced = self.trace.root.replaced
        return bind_op(op, replaced) if replaced else op

    def replace_symbol(self, symbol: str, dim: Dim) -> None:
        """Let `dim` replace `symbol` in all nodes so far. Only those that have it are looked at:
        a function of hundreds of arrays makes as many sizes equal."""
        for node in self.nodes[self._indexed :]:
            for each in symbols_of_node(node):
                self._nodes_of.setdefault(each, {})[node] = None
        self._indexed, change = len(self.nodes), {symbol: dim}
        found = self._nodes_of.pop(symbol, {})
        for node in found:
            node.op = bind_op(node.op, change)
            for value in node.outputs:
                value.shape = value.shape.bind(change)
        for each in dim.symbols if isinstance(dim, Expr) else ():
            self._nodes_of.setdefault(each, {}).update(found)

    def append_node(self, op: Op, operands: Sequence[Operand] = (), name: str = "") -> Node:
        self.trace.require_open()
        op = self.current_op(op)
        count = len(self.nodes)
        try:
            made = super().append_node(op, operands, name)
            if op.name in _RANGES:
                self._require_inside(made)
            return made
        except (DTypeError, InputError):
            raise
        except RlxError:
            del self.nodes[count:]  # constants made of literals
            inputs = self._operands(op, tuple(operands))
            try:
                unify.unify(self.trace, op, [v.shape for v in inputs])
            except RlxError as error:
                shown = ", ".join(f"{v.name} {v.shape}" for v in inputs)
                where = f"{name or op.name}({shown}) {caller(self._block, 2)}".strip()
                raise error.located(op.name, where) from None
            return super().append_node(self.current_op(op), inputs, name)

    def _require_inside(self, node: Node) -> None:
        """Guard that a range lies inside its axis, and raise where it does not in this call."""
        op: Any = node.op
        hints, dims = self.trace.root.hints, node.inputs[0].shape.dims
        infer(bind_op(op, hints), (node.inputs[0].shape.bind(hints),))
        if op.name == "narrow":
            bounds = [(op.start, dims[op.axis]), (op.start + op.length, dims[op.axis])]
            bounds.append((op.start, op.start + op.length))
        else:
            bounds = []
            for (low, count, step), size in zip(op.bounds(dims), dims, strict=True):
                last = low + (count - 1) * step
                bounds += [(0, count), *([(0, low), (low, size - 1), (0, last), (last, size - 1)])]
        for low, high in bounds:
            self.trace.guard(low, "<=", high)


_RANGES = ("narrow", "slice")  # ops that need a size to be large enough


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
            return COMPARE[comparison](int(self), other)  # type: ignore[arg-type]
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
