"""Sizes: PyTorch's SymInts as our symbolic dims.

Dynamo and `torch.export` name each free size, and prove by guards what the program needs of them.
The expressions they carry are SymPy's; ours are polynomials with floor quotients. What has no such
form (a maximum, a quotient by a size) is lowered with numbers for sizes instead, once for each
combination.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add, floordiv, mul
from typing import Any

from rlx.errors import UnsupportedError
from rlx.ir.dim import Dim, sym
from rlx.ir.shape import Shape
from rlx.pytorch.element_types import ELEMENTS


class FixedSizeError(UnsupportedError):
    """A size that PyTorch leaves open, and that can only be one number."""

    symbol, size = "", 0


class SizeTable:
    """SymInts as dims; as numbers where `numbers` gives the sizes of all symbols. `fixed` has those
    of some."""

    def __init__(
        self, numbers: Mapping[str, int] | None = None, fixed: Mapping[str, int] | None = None
    ) -> None:
        self.numbers, self.fixed = numbers, fixed or {}
        self._known: dict[Any, Dim] = {}

    def dim(self, value: Any) -> Dim:
        """A size, which may be a SymInt."""
        if type(value) is int:
            return value
        if isinstance(value, int):
            return int(value)
        node = getattr(value, "node", None)
        if node is None:
            raise UnsupportedError("not a size", where="SymInt", got=repr(value))
        return self.expression(node.expr)

    def adopt(self, value: Any, dim: Dim) -> None:
        """Let a size of PyTorch's be this dim, which is equal but has another form."""
        node = getattr(value, "node", None)
        if node is not None and self.numbers is None:
            self._known[node.expr] = dim

    def expression(self, expr: Any) -> Dim:
        """A SymPy expression of sizes as a dim."""
        found = self._known.get(expr)
        if found is None:
            found = self._known[expr] = self._made(expr)
        return found

    def _made(self, expr: Any) -> Dim:
        if expr.is_Integer:
            return int(expr)
        if self.numbers is not None:
            return self._number(expr)
        if expr.is_Symbol:
            return self.fixed.get(str(expr)) or sym(str(expr))
        parts: list[Any] = [self.expression(a) for a in expr.args]
        kind = type(expr).__name__
        if kind == "Add":
            return _folded(add, parts)
        if kind == "Mul":
            return _folded(mul, parts)
        if kind == "Pow" and isinstance(parts[1], int) and 1 <= parts[1] <= 8:
            return _folded(mul, [parts[0]] * parts[1])
        divides = len(parts) == 2 and isinstance(parts[1], int) and parts[1] > 0
        if kind in ("FloorDiv", "CleanDiv") and divides:
            return _folded(floordiv, parts)
        if kind in ("Mod", "PythonMod") and divides:
            return _remainder(*parts)
        raise UnsupportedError(
            "a size that is no polynomial with floor quotients", where="SymInt", got=str(expr),
            expected="sums, products and quotients by numbers",
        )  # fmt: skip

    def _number(self, expr: Any) -> int:
        assert self.numbers is not None
        given = {s: self.numbers[str(s)] for s in expr.free_symbols if str(s) in self.numbers}
        found = expr.subs(given)
        if not found.is_Integer:
            raise UnsupportedError("a size that depends on data", where="SymInt", got=str(expr))
        return int(found)

    def require_equal(self, dim: Dim, size: Dim) -> None:
        """An open size meets a number where they are broadcast: it is above 1, so it must be that.
        PyTorch's exporter does not find out everywhere."""
        if isinstance(size, int) and size > 1 and not isinstance(dim, int) and dim == sym(str(dim)):
            error = FixedSizeError(
                "a size that must be a number", where="SymInt", got=str(dim), expected=size
            )
            error.symbol, error.size = str(dim), size
            raise error

    def dims(self, values: Sequence[Any]) -> tuple[Dim, ...]:
        return tuple([self.dim(v) for v in values])

    def shape(self, fake: Any) -> Shape:
        """The shape of a FakeTensor."""
        element = ELEMENTS.get(str(fake.dtype))
        if element is None:
            raise UnsupportedError(
                "an element type that RLX has not", where="tensor", got=str(fake.dtype),
                expected=", ".join(ELEMENTS),
            )  # fmt: skip
        return Shape(self.dims(fake.shape), element)


def _folded(function: Any, parts: Sequence[Dim]) -> Dim:
    result: Dim = reduce(function, parts)
    return result


def _remainder(a: Dim, b: Dim) -> Dim:
    return a - _folded(floordiv, [a, b]) * b
