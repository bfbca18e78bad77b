"""Binding symbols to sizes: static sizes, or bounded dynamic dims whose size each run gives.

`bind_nodes` substitutes sizes in ops, shapes and subgraphs, `bind_graph` those of a whole graph
with its dynamic dims; `infer_sizes` solves for the symbols
from the shapes of given arrays.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from rlx.errors import BindingError, InputError, did_you_mean
from rlx.ir.attrs import Body, has_symbols
from rlx.ir.dim import DERIVED, Dim, Expr, evaluate, substitute
from rlx.ir.graph import Graph
from rlx.ir.op import Op
from rlx.ir.shape import MAX_BYTES, Shape


class UpTo(NamedTuple):
    """A bounded dynamic size: at most `bound`, given with each run."""

    bound: int

    def __str__(self) -> str:
        return f"≤{self.bound}"


Size = int | UpTo


class DimBinding:
    """Symbol → size, static or dynamic (`UpTo`). Equality does not depend on the order of `set`."""

    __slots__ = ("_sizes",)

    def __init__(self, sizes: Mapping[str, Size] | None = None, /, **more: Size) -> None:
        self._sizes: dict[str, Size] = {}
        for symbol, size in {**(sizes or {}), **more}.items():
            self.set(symbol, size)

    @staticmethod
    def batch_seq(batch: int, seq: int) -> DimBinding:
        return DimBinding(batch=batch, seq=seq)

    @staticmethod
    def batch_past_seq(batch: int, past_seq: Size) -> DimBinding:
        return DimBinding(batch=batch, past_seq=past_seq)

    def set(self, symbol: str | Expr, size: Size) -> DimBinding:
        """Bind `symbol`; binding it again to another size is an error. Returns self."""
        name = symbol_name(symbol)
        check_size(name, size)
        old = self.get(name)
        if old is not None and old != size:
            raise BindingError(
                "a symbol bound to two sizes", where=name, got=f"{old} and {size}",
                hint="use a new binding, or `with_size` for a changed copy",
            )  # fmt: skip
        self._sizes[name] = size
        for derived, product in DERIVED.items():
            given, implied = self._sizes.get(derived), self._product(product)
            if isinstance(given, int) and implied is not None and given != implied:
                del self._sizes[name]
                raise BindingError(
                    "a symbol bound to two sizes", where=derived,
                    got=f"{given} and {product} = {implied}",
                )  # fmt: skip
        return self

    def set_dynamic(self, symbol: str | Expr, bound: int) -> DimBinding:
        """Leave `symbol` dynamic, at most `bound`; each run gives its size. Returns self."""
        return self.set(symbol, UpTo(bound))

    set_live = set_dynamic

    def with_size(self, symbol: str | Expr, size: Size) -> DimBinding:
        """A copy in which `symbol` has `size`."""
        sizes = {k: v for k, v in self._sizes.items() if k != symbol_name(symbol)}
        return DimBinding(sizes).set(symbol, size)

    def get(self, symbol: str | Expr) -> Size | None:
        """The size of a symbol, also of a derived one (`rows`) once its factors are bound."""
        name = symbol_name(symbol)
        found = self._sizes.get(name)
        if found is None and name in DERIVED:
            return self._product(DERIVED[name])
        return found

    def _product(self, product: Expr) -> int | None:
        sizes = self.sizes
        return evaluate(product, sizes) if product.symbols <= sizes.keys() else None

    @property
    def sizes(self) -> dict[str, int]:
        """The static sizes."""
        return {k: v for k, v in sorted(self._sizes.items()) if isinstance(v, int)}

    @property
    def dynamic(self) -> dict[str, int]:
        """The dynamic symbols and their upper bounds."""
        return {k: v.bound for k, v in sorted(self._sizes.items()) if isinstance(v, UpTo)}

    live = dynamic

    def items(self) -> list[tuple[str, Size]]:
        return sorted(self._sizes.items())

    def __contains__(self, symbol: str | Expr) -> bool:
        return self.get(symbol) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._sizes))

    def __len__(self) -> int:
        return len(self._sizes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DimBinding):
            return NotImplemented
        return self._sizes == other._sizes

    def __hash__(self) -> int:
        return hash(tuple(self.items()))

    def __str__(self) -> str:
        return "{" + ", ".join(f"{k}: {v}" for k, v in self.items()) + "}"

    def __repr__(self) -> str:
        return f"DimBinding({self})"


def symbol_name(symbol: str | Expr) -> str:
    """The name of a plain symbol."""
    if isinstance(symbol, Expr) and len(symbol.terms) == 1 and symbol.symbols == {str(symbol)}:
        return str(symbol)
    if not isinstance(symbol, str):
        raise BindingError("only a plain symbol can be bound", got=str(symbol))
    return symbol


def check_size(symbol: str, size: object) -> None:
    """Raise unless `size` is a static size or a bound."""
    if isinstance(size, UpTo):
        if not isinstance(size.bound, int) or not 1 <= size.bound < MAX_BYTES:
            raise BindingError(
                "an upper bound is a positive int", where=symbol, got=size.bound,
                expected="1 … 2^63 - 1",
            )  # fmt: skip
    elif not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < MAX_BYTES:
        raise BindingError(
            "a size is a non-negative int", where=symbol, got=repr(size), expected="0 … 2^63 - 1"
        )


WELL_KNOWN = ("batch", "seq", "past_seq", *DERIVED)  # a binding may have them, used or not


def require_known(binding: Iterable[str], symbols: Collection[str], where: str) -> None:
    """Raise if a binding names a symbol that the graph does not have."""
    unknown = [s for s in binding if s not in symbols and s not in WELL_KNOWN]
    if unknown:
        raise BindingError(
            "unknown symbols in a binding", where=where, got=", ".join(unknown),
            expected=", ".join(sorted(symbols)) or "none", hint=did_you_mean(unknown[0], symbols),
        )  # fmt: skip


Sizes = Mapping[str, Dim]


def bind_attr(value: Any, sizes: Sizes) -> Any:
    """An attribute with its symbols substituted, recursing into tuples, shapes and subgraphs."""
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
    """The op with the symbols of its attributes substituted; itself when it has none."""
    if not op.fields or not op.has_symbols:
        return op
    mentioned = set(op.symbols)
    for symbol in DERIVED.keys() & mentioned:
        mentioned |= DERIVED[symbol].symbols
    found = [(s, sizes[s]) for s in sorted(mentioned) if s in sizes]
    return _bind_op(op, tuple(found)) if found else op


@lru_cache(maxsize=4096)
def _bind_op(op: Op, items: tuple[tuple[str, Dim], ...]) -> Op:
    sizes = dict(items)
    return op.replace(**{f: bind_attr(getattr(op, f), sizes) for f in op.fields})


def bind_nodes(graph: Graph, sizes: Sizes) -> Graph:
    """A copy of `graph` with the symbols of ops and shapes substituted; ids and edges stay."""
    return graph.rebuild(
        [(bind_op(n.op, sizes), tuple([v.shape.bind(sizes) for v in n.outputs])) for n in graph]
    )


class _Origin(NamedTuple):
    """Where a size comes from: an axis of an array, or the explicit sizes."""

    name: str = ""
    axis: int = -1

    def __str__(self) -> str:
        return f"axis {self.axis} of {self.name}" if self.name else "the given sizes"


class _Equation(NamedTuple):
    """An expression, its size, and where that comes from."""

    dim: Expr
    size: int
    origin: _Origin


def infer_sizes(
    given: Iterable[tuple[str, Shape, Sequence[int]]], sizes: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Symbol sizes from `(name, declared shape, actual dims)` and from `sizes`.

    Solves plain symbols first, then expressions with one unknown, and checks every dimension
    against the result. Symbols that no shape determines are absent.
    """
    solver = _Solver()
    for name, shape, dims in given:
        if len(dims) != shape.rank:
            raise InputError("wrong rank", where=name, got=list(dims), expected=shape)
        for axis, (dim, size) in enumerate(zip(shape.dims, dims, strict=True)):
            if isinstance(dim, Expr):
                solver.add(dim, int(size), _Origin(name, axis))
            elif dim != size:
                raise InputError("wrong size", where=name, got=list(dims), expected=shape)
    for symbol, value in (sizes or {}).items():
        solver.set(symbol, _size(symbol, value), _Origin())
    solver.solve()
    return solver.known


class _Solver:
    def __init__(self) -> None:
        self.known: dict[str, int] = {}
        self.origins: dict[str, _Origin] = {}
        self.equations: list[_Equation] = []

    def add(self, dim: Expr, size: int, origin: _Origin) -> None:
        ((monomial, factor), *rest) = dim.terms
        if rest or factor != 1 or len(monomial) != 1 or not isinstance(monomial[0], str):
            self.equations.append(_Equation(dim, size, origin))
        else:
            self.set(monomial[0], size, origin)

    def set(self, symbol: str, size: int, origin: _Origin) -> None:
        if self.known.setdefault(symbol, size) != size:
            raise self._conflict(symbol, (symbol,), f"{symbol} = {size} from {origin}")
        self.origins.setdefault(symbol, origin)

    def solve(self) -> None:
        pending = self.equations
        while pending:
            left = [e for e in pending if not self._solve(e)]
            if len(left) == len(pending):
                break
            pending = left
        for dim, size, origin in self.equations:
            value = substitute(dim, self.known)
            if isinstance(value, int) and value != size:
                raise self._conflict(dim, dim.symbols, f"{dim} = {size} from {origin}")
        for symbol in DERIVED.keys() & self.known.keys():
            product = DERIVED[symbol]
            value = substitute(product, self.known)
            if isinstance(value, int) and value != self.known[symbol]:
                seen = f"{symbol} = {self.known[symbol]} from {self.origins[symbol]}"
                raise self._conflict(symbol, product.symbols, seen)

    def _solve(self, equation: _Equation) -> bool:
        """Solve a linear equation with one unknown; False while it has more."""
        rest = substitute(equation.dim, self.known)
        if isinstance(rest, int):
            return True
        terms = dict(rest.terms)
        offset = terms.pop((), 0)
        ((monomial, factor), *others) = terms.items()
        if others or len(monomial) != 1 or not isinstance(monomial[0], str):
            return False
        value, remainder = divmod(equation.size - offset, factor)
        if remainder or value < 0:
            raise BindingError(
                "no size of a symbol fits", where=monomial[0],
                got=f"{equation.dim} = {equation.size} from {equation.origin}",
            )  # fmt: skip
        self.set(monomial[0], value, equation.origin)
        return True

    def _conflict(self, what: Dim | str, symbols: Iterable[str], other: str) -> BindingError:
        known = sorted(s for s in symbols if s in self.known)
        seen = ", ".join(f"{s} = {self.known[s]} from {self.origins[s]}" for s in known)
        return BindingError(
            "a symbol bound to two sizes",
            where=str(what),
            got=f"{seen} and {other}",
            expected="one size for all uses of a symbol",
        )


def _size(symbol: str, size: object) -> int:
    if isinstance(size, bool) or not hasattr(size, "__index__") or int(size.__index__()) < 0:
        raise BindingError(
            "not a size", where=symbol, got=repr(size), expected="a non-negative int"
        )
    return int(size.__index__())


def bind_graph(
    graph: Graph,
    binding: DimBinding | Mapping[str, int],
    symbols: frozenset[str] | None = None,
) -> Graph:
    """A copy with symbols replaced by sizes: ids, edges, names and outputs unchanged.

    Attributes and subgraphs are bound too. Dynamic symbols stay, and the graph records their upper
    bounds; unbound symbols stay as they are, unknown ones are an error. `symbols` are those of the
    graph, if already known; then the binding is not checked.
    """
    if not isinstance(binding, DimBinding):
        binding = DimBinding(binding)
    found = graph.symbols() if symbols is None else symbols
    used = {f for s in found for f in (DERIVED[s].symbols if s in DERIVED else {s})}
    if symbols is None:
        require_known(binding, used, graph.name)
    sizes = binding.sizes
    done: dict[tuple[int, tuple[Shape, ...]], tuple[Op, tuple[Shape, ...]]] = {}

    def bind(op: Op, shapes: tuple[Shape, ...]) -> tuple[Op, tuple[Shape, ...]]:
        key = (id(op), shapes)  # the graph keeps its ops alive, so ids are unique
        found = done.get(key)
        if found is None:
            bound = tuple([s.bind(sizes) for s in shapes])
            # a −1 cannot be inferred again once other dims are 0
            exact = op.replace(shape=shapes[0].dims) if op.name == "reshape" else op
            found = done[key] = bind_op(exact, sizes), bound
        return found

    new = graph.rebuild([bind(n.op, tuple([v.shape for v in n.outputs])) for n in graph.nodes])
    new.dynamic |= {s: bound for s, bound in binding.dynamic.items() if s in used}
    return new


def require_bound(graph: Graph) -> None:
    """Raise unless every symbol is dynamic; the error lists the symbols and their nodes."""
    free = {
        s
        for s in graph.symbols()
        if not (s in graph.dynamic or (s in DERIVED and DERIVED[s].symbols <= graph.dynamic.keys()))
    }
    if not free:
        return
    users = []
    for node in graph.nodes:
        used = set().union(*(v.shape.symbols for v in node.outputs)) & free
        if used:
            users.append(f"{node.name or '%' + str(node.id)} ({', '.join(sorted(used))})")
    shown = ", ".join(users[:5]) + (f" and {len(users) - 5} more" if len(users) > 5 else "")
    raise BindingError(
        "unbound symbols", where=graph.name, got=", ".join(sorted(free)),
        expected="a size, or an upper bound to leave them dynamic", origin=f"nodes {shown}",
        hint='DimBinding(batch=1, seq=128), or .set_dynamic("past_seq", 4096)',
    )  # fmt: skip
