"""Tracing: running a Python function once on arrays without data, to record a graph.

Sizes stay symbolic. A size is a `Size`, which does arithmetic like an int. Python code that looks
at its number (`if n > 4`, `range(n)`) leaves a guard: the trace serves only calls for which every
guard gives the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import eq, ge, gt, le, lt
from typing import TYPE_CHECKING, Any, NamedTuple

from rlx.errors import InputError
from rlx.ir.dim import Dim, evaluate
from rlx.ir.graph import Graph
from rlx.ir.node import Value, caller
from rlx.ir.shape import Shape

if TYPE_CHECKING:
    from rlx.numpy.array import Array

_COMPARE: dict[str, Callable[[int, int], bool]] = {"==": eq, "<": lt, "<=": le, ">": gt, ">=": ge}


class Guard(NamedTuple):
    """What Python code asked of sizes while it was traced, and the answer."""

    left: Dim
    comparison: str
    right: Dim
    answer: bool
    where: str

    def holds(self, sizes: Mapping[str, int]) -> bool:
        left, right = evaluate(self.left, sizes), evaluate(self.right, sizes)
        return _COMPARE[self.comparison](left, right) is self.answer

    def __str__(self) -> str:
        text = f"{self.left} {self.comparison} {self.right}"
        return f"{text if self.answer else f'not {text}'} ({self.where})"


class Trace:
    """The graph being recorded, its guards, and the concrete arrays that it captures."""

    def __init__(self, name: str) -> None:
        self.graph = Graph(name)
        self.name = name
        self.guards: list[Guard] = []
        self.hints: dict[str, int] = {}  # the sizes of the call that is traced
        self.symbols: dict[int, Dim] = {}  # by size, where equal sizes share a symbol
        self.captured: list[Array] = []
        self._captures: dict[int, Value] = {}
        self.open = True

    def capture(self, array: Array) -> Value:
        """A concrete array used inside the function: one more input, not copied."""
        self.require_open()
        found = self._captures.get(id(array))
        if found is None:
            self.captured.append(array)
            shape = Shape([self.symbols.get(n, n) for n in array.data.shape], array.dtype)
            found = self.graph.input(f"captured_{len(self.captured)}", shape)
            self._captures[id(array)] = found
        return found

    def guard(self, left: Dim, comparison: str, right: Dim) -> bool:
        """The answer for the sizes of this call, recorded as a guard unless it always holds."""
        answer = _COMPARE[comparison](evaluate(left, self.hints), evaluate(right, self.hints))
        if not (isinstance(left, int) and isinstance(right, int)) and left != right:
            where = caller("", 2)
            made = Guard(left, comparison, right, answer, str(where))
            if made not in self.guards:
                self.guards.append(made)
        return answer

    def require_open(self) -> None:
        if not self.open:
            raise InputError(
                "a traced array was used after its function returned", where=self.name,
                got="a leaked tracer", expected="arrays that the function returns",
                hint="return the array from the jitted function instead of storing it elsewhere",
            )  # fmt: skip


class Size:
    """A symbolic size: arithmetic keeps it symbolic, looking at its number leaves a guard."""

    __slots__ = ("dim", "trace")

    def __init__(self, trace: Trace, dim: Dim) -> None:
        self.trace, self.dim = trace, dim

    @property
    def hint(self) -> int:
        return evaluate(self.dim, self.trace.hints)

    def _arithmetic(self, function: Callable[[Any, Any], Any], other: object) -> Any:
        if isinstance(other, bool) or not isinstance(other, (int, Size)):
            return NotImplemented
        return make_size(self.trace, function(self.dim, dim_of(other)))

    def __add__(self, other: object) -> Any:
        return self._arithmetic(lambda a, b: a + b, other)

    def __sub__(self, other: object) -> Any:
        return self._arithmetic(lambda a, b: a - b, other)

    def __rsub__(self, other: object) -> Any:
        return self._arithmetic(lambda a, b: b - a, other)

    def __mul__(self, other: object) -> Any:
        return self._arithmetic(lambda a, b: a * b, other)

    __radd__, __rmul__ = __add__, __mul__

    def __floordiv__(self, other: object) -> Any:
        if type(other) is int and other > 0:
            return self._arithmetic(lambda a, b: a // b, other)
        return int(self) // other  # type: ignore[operator]

    def __mod__(self, other: object) -> Any:
        if type(other) is int and other > 0:
            return self - (self // other) * other
        return int(self) % other  # type: ignore[operator]

    def __truediv__(self, other: Any) -> Any:
        return int(self) / other

    def __rtruediv__(self, other: Any) -> Any:
        return other / int(self)

    def __rfloordiv__(self, other: Any) -> Any:
        return other // int(self)

    def __pow__(self, other: Any) -> Any:
        return int(self) ** other

    def __neg__(self) -> Any:
        return self * -1

    def _compare(self, comparison: str, other: object) -> bool:
        if not isinstance(other, (int, Size)):
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
