"""Symbols become sizes: in ops and their nested graphs, and from the shapes of given arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from rlx.errors import BindingError, InputError
from rlx.ir.attrs import Body, has_symbols
from rlx.ir.dim import DERIVED, Dim, Expr, substitute
from rlx.ir.graph import Graph
from rlx.ir.op import Op
from rlx.ir.shape import Shape

Sizes = Mapping[str, Dim]


def bind_attr(value: Any, sizes: Sizes) -> Any:
    """An attribute with its symbols replaced, down into tuples, shapes and nested graphs."""
    if isinstance(value, Expr):
        return substitute(value, sizes)
    if isinstance(value, tuple):
        return tuple([bind_attr(item, sizes) for item in value])
    if isinstance(value, Shape):
        return value.bind(sizes)
    if isinstance(value, Body) and has_symbols(value):
        return Body(bind_nodes(value.graph, sizes))
    return value


def bind_op(op: Op, sizes: Sizes) -> Op:
    """The op with the symbols of its attributes replaced; the same record when it has none."""
    if not op.fields or not op.has_symbols:
        return op
    return _bind_op(op, tuple(sorted(sizes.items())))


@lru_cache(maxsize=4096)
def _bind_op(op: Op, items: tuple[tuple[str, Dim], ...]) -> Op:
    sizes = dict(items)
    return op.replace(**{f: bind_attr(getattr(op, f), sizes) for f in op.fields})


def bind_nodes(graph: Graph, sizes: Sizes) -> Graph:
    """A copy of `graph` with the symbols of every op and shape replaced; ids and edges stay."""
    return graph.rebuild(
        lambda op, shapes: (bind_op(op, sizes), tuple([s.bind(sizes) for s in shapes]))
    )


class _Equation(NamedTuple):
    """A dimension, the size it has, and the place that says so."""

    dim: Expr
    size: int
    place: str


def infer_sizes(
    given: Iterable[tuple[str, Shape, Sequence[int]]], sizes: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Symbol sizes from `(name, declared shape, actual dims)`, on top of `sizes`.

    Plain symbols come first, then expressions with one unknown left; every dimension is checked
    against the result. Symbols that no shape determines are simply absent from it.
    """
    known: dict[str, int] = {}
    places: dict[str, str] = {}
    equations = _equations(given)
    for symbol, size in (sizes or {}).items():
        equations.append(_Equation(Expr({(symbol,): 1}), _size(symbol, size), "the given sizes"))
    pending = equations
    while pending:
        left = [e for e in pending if not _solve(e, known, places)]
        if len(left) == len(pending):
            break
        pending = left
    for equation in equations:
        _check(equation, known, places)
    return known


def _equations(given: Iterable[tuple[str, Shape, Sequence[int]]]) -> list[_Equation]:
    found = []
    for name, shape, dims in given:
        if len(dims) != shape.rank:
            raise InputError("wrong rank", where=name, got=list(dims), expected=shape)
        for axis, (dim, size) in enumerate(zip(shape.dims, dims, strict=True)):
            if isinstance(dim, Expr):
                found.append(_Equation(dim, int(size), f"axis {axis} of {name}"))
            elif dim != size:
                raise InputError("wrong size", where=name, got=list(dims), expected=shape)
    # plain symbols first, whatever the order of the arrays, so that errors name the plain place
    found.sort(key=lambda e: len(e.dim.symbols) + len(e.dim.terms))
    return found


def _size(symbol: str, size: object) -> int:
    if isinstance(size, bool) or not hasattr(size, "__index__") or int(size.__index__()) < 0:
        raise BindingError("not a size", where=symbol, got=repr(size), expected="an int from 0 on")
    return int(size.__index__())


def _solve(equation: _Equation, known: dict[str, int], places: dict[str, str]) -> bool:
    """Bind the one unknown symbol of a linear equation; False while it has to wait."""
    rest = substitute(equation.dim, known)
    if isinstance(rest, int):
        return True
    terms = dict(rest.terms)
    offset = terms.pop((), 0)
    ((monomial, factor),) = terms.items() if len(terms) == 1 else (((), 0),)
    if len(monomial) != 1 or not isinstance(monomial[0], str):
        return False
    symbol = monomial[0]
    value, remainder = divmod(equation.size - offset, factor)
    if remainder or value < 0:
        raise BindingError(
            "no size of a symbol fits", where=symbol,
            got=f"{equation.dim} = {equation.size} from {equation.place}",
        )  # fmt: skip
    known[symbol], places[symbol] = value, equation.place
    return True


def _check(equation: _Equation, known: Mapping[str, int], places: Mapping[str, str]) -> None:
    value = substitute(equation.dim, known)
    for symbol in equation.dim.symbols & DERIVED.keys() & known.keys():
        _check_derived(symbol, known, places)
    if not isinstance(value, int) or value == equation.size:
        return
    symbols = sorted(s for s in equation.dim.symbols if s in places)
    sources = ", ".join(f"{s} = {known[s]} from {places[s]}" for s in symbols)
    raise BindingError(
        "a symbol bound to two sizes",
        where=", ".join(sorted(equation.dim.symbols)),
        got=f"{sources or value} and {equation.dim} = {equation.size} from {equation.place}",
        expected="one size for a symbol wherever it stands",
    )


def _check_derived(symbol: str, known: Mapping[str, int], places: Mapping[str, str]) -> None:
    product = substitute(DERIVED[symbol], known)
    if isinstance(product, int) and product != known[symbol]:
        raise BindingError(
            "a symbol bound to two sizes",
            where=symbol,
            got=f"{known[symbol]} from {places[symbol]} and {DERIVED[symbol]} = {product}",
            expected=f"{symbol} = {DERIVED[symbol]}",
        )
