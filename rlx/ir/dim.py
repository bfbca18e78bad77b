"""Dims: an int, or a symbolic expression in normal form.

An expression is a polynomial with integer coefficients over atoms; an atom is a symbol or the
floor quotient of an expression by an int. Equal expressions compare equal, whatever the order they
were built in: `batch * seq + 1 == 1 + seq * batch`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Union

from rlx.errors import BindingError, OptionError, ShapeError

Atom = Union[str, "FloorDiv"]
Monomial = tuple[Atom, ...]
Dim = Union[int, "Expr"]
DimLike = Union[int, "Expr", str]  # a size, a symbol, an expression or its text

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")

# Far above any model: limits for files made to exhaust memory.
MAX_TERMS = 1024
MAX_DEGREE = 64


class FloorDiv:
    """The atom `numerator // divisor`, kept opaque inside a polynomial."""

    __slots__ = ("_hash", "divisor", "numerator")

    def __init__(self, numerator: Expr, divisor: int) -> None:
        self.numerator, self.divisor = numerator, divisor
        self._hash = hash((numerator, divisor))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FloorDiv):
            return NotImplemented
        return self.divisor == other.divisor and self.numerator == other.numerator

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        return f"(({self.numerator}) // {self.divisor})"


class Expr:
    """A sum of products of symbols. Immutable; build with `sym(...)` and arithmetic."""

    def __init__(self, terms: Mapping[Monomial, int]) -> None:
        kept = [(m, c) for m, c in terms.items() if c]
        if len(kept) > 1:
            kept.sort(key=lambda t: (-len(t[0]), [str(a) for a in t[0]]))
        self.terms: tuple[tuple[Monomial, int], ...] = tuple(kept)
        self._hash = hash(self.terms)

    @cached_property
    def symbols(self) -> frozenset[str]:
        found: set[str] = set()
        for monomial, _ in self.terms:
            for atom in monomial:
                found |= {atom} if isinstance(atom, str) else atom.numerator.symbols
        return frozenset(found)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Expr):
            return self is other or self.terms == other.terms
        return False if isinstance(other, int) else NotImplemented

    def __hash__(self) -> int:
        return self._hash

    def __add__(self, other: Dim) -> Dim:
        if type(other) is int and not other:
            return self
        terms = dict(self.terms)
        for monomial, factor in _terms(other):
            terms[monomial] = terms.get(monomial, 0) + factor
        return _make(terms)

    def __mul__(self, other: Dim) -> Dim:
        if type(other) is int:
            return self if other == 1 else _make({m: c * other for m, c in self.terms})
        terms: dict[Monomial, int] = {}
        for m1, c1 in self.terms:
            for m2, c2 in _terms(other):
                m = tuple(sorted(m1 + m2, key=str))
                terms[m] = terms.get(m, 0) + c1 * c2
        return _make(terms)

    def __neg__(self) -> Dim:
        return self * -1

    def __sub__(self, other: Dim) -> Dim:
        return self + other * -1

    def __rsub__(self, other: Dim) -> Dim:
        return self * -1 + other

    def __floordiv__(self, divisor: int) -> Dim:
        if not isinstance(divisor, int) or divisor < 1:
            raise ShapeError("a dimension is divided by a positive int only", got=divisor)
        # (q·d + r) // d = q + r // d: divisible terms, and the divisible part of the constant, move
        # out of the quotient, so that (n - 1) // 2 + 1 equals (n + 1) // 2
        whole = {m: c // divisor for m, c in self.terms if c % divisor == 0 or not m}
        rest = _make({m: c if m else c % divisor for m, c in self.terms if c % divisor})
        if isinstance(rest, int):
            whole[()] = whole.get((), 0) + rest // divisor
        else:
            whole[(FloorDiv(rest, divisor),)] = 1
        return _make(whole)

    __radd__ = __add__
    __rmul__ = __mul__

    def __str__(self) -> str:
        out = ""
        for monomial, factor in self.terms:
            sign = "-" if factor < 0 else "+"
            parts = [str(a) for a in monomial]
            if abs(factor) != 1 or not parts:
                parts.insert(0, str(abs(factor)))
            text = " * ".join(parts)
            out = f"{out} {sign} {text}" if out else (f"-{text}" if factor < 0 else text)
        return out

    def __repr__(self) -> str:
        return str(self)

    def __bool__(self) -> bool:
        return True


def _terms(value: Dim) -> tuple[tuple[Monomial, int], ...]:
    if isinstance(value, Expr):
        return value.terms
    if isinstance(value, int) and not isinstance(value, bool):
        return (((), value),)
    raise ShapeError("a dimension is an int or an expression of symbols", got=repr(value))


def _make(terms: Mapping[Monomial, int]) -> Dim:
    kept = {m: c for m, c in terms.items() if c}
    if not kept:
        return 0
    if len(kept) == 1 and () in kept:
        return kept[()]
    if len(kept) > MAX_TERMS or max(map(len, kept)) > MAX_DEGREE:
        expected = f"at most {MAX_TERMS} terms of {MAX_DEGREE} factors"
        raise ShapeError("a dimension expression grew too large", expected=expected)
    return Expr(kept)


class _Symbols:
    """`sym("frames")` makes a symbol; the well-known ones are attributes."""

    def __call__(self, name: str) -> Expr:
        if not isinstance(name, str) or not _NAME.match(name):
            raise OptionError("not a symbol name", got=repr(name), expected="a Python identifier")
        return Expr({(name,): 1})

    @cached_property
    def BATCH(self) -> Expr:
        return self("batch")

    @cached_property
    def SEQ(self) -> Expr:
        """New tokens."""
        return self("seq")

    @cached_property
    def PAST_SEQ(self) -> Expr:
        """Tokens already in the cache."""
        return self("past_seq")

    @cached_property
    def ROWS(self) -> Expr:
        """Leading axes flattened: always `batch * seq`."""
        return self("rows")


sym = _Symbols()

# Derived symbols: equal to a product of others, and bound when those are.
DERIVED: dict[str, Expr] = {"rows": sym.BATCH * sym.SEQ}  # type: ignore[dict-item]


def as_dim(value: object) -> Dim:
    """An int, an expression, or the text of one."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, str):
        return parse_dim(value)
    try:
        number = value.__index__()  # type: ignore[attr-defined]
    except AttributeError:
        number = None
    if not isinstance(number, int) or isinstance(value, bool):
        expected = "an int, a symbol or its name"
        raise ShapeError("not a dimension", got=repr(value), expected=expected)
    return number


def substitute(dim: Dim, sizes: Mapping[str, Dim]) -> Dim:
    """`dim` with symbols substituted; a derived symbol follows its factors."""
    if isinstance(dim, int) or not any(s in sizes or s in DERIVED for s in dim.symbols):
        return dim  # not by `isdisjoint`, which goes through all sizes
    total: Dim = 0
    for monomial, factor in dim.terms:
        product: Dim = factor
        for atom in monomial:
            product = product * _substitute_atom(atom, sizes)
        total = total + product
    return total


def _substitute_atom(atom: Atom, sizes: Mapping[str, Dim]) -> Dim:
    if isinstance(atom, FloorDiv):
        return substitute(atom.numerator, sizes) // atom.divisor
    if atom in sizes:
        return sizes[atom]
    if atom in DERIVED and not DERIVED[atom].symbols.isdisjoint(sizes):
        return substitute(DERIVED[atom], sizes)
    return sym(atom)


def expand(dim: Dim) -> Dim:
    """`dim` with derived symbols expanded to their products, for comparison."""
    if isinstance(dim, int) or dim.symbols.isdisjoint(DERIVED):
        return dim
    return substitute(dim, DERIVED)


def is_affine(dim: Dim) -> bool:
    """Whether `dim` is affine: a constant plus multiples of symbols."""
    return isinstance(dim, int) or all(
        not m or (len(m) == 1 and isinstance(m[0], str)) for m, _ in dim.terms
    )


def same(a: Dim, b: Dim) -> bool:
    """Whether two dims are provably equal."""
    return a == b or expand(a) == expand(b)


def evaluate(dim: Dim, sizes: Mapping[str, int]) -> int:
    """The size of `dim`; every symbol must be given."""
    if isinstance(dim, int):
        return dim
    value = substitute(dim, sizes)
    if isinstance(value, int):
        return value
    raise BindingError(
        "unbound symbols",
        got=str(dim),
        expected=f"sizes for {', '.join(sorted(value.symbols))}",
        hint="bind them, or leave them dynamic with an upper bound",
    )


def upper_bound(dim: Dim, bounds: Mapping[str, int]) -> int:
    """An upper bound of `dim` with every symbol between 0 and its bound.

    Terms with a negative coefficient count as 0, so the bound is not always tight.
    """
    if type(dim) is int:
        return dim
    total = 0
    for monomial, factor in _terms(expand(dim)):
        if monomial and factor < 0:
            continue
        product = factor
        for atom in monomial:
            if isinstance(atom, FloorDiv):
                product *= upper_bound(atom.numerator, bounds) // atom.divisor
            elif atom in bounds:
                product *= bounds[atom]
            else:
                raise BindingError("symbol without a bound", got=atom, expected="a size or a bound")
        total += product
    return total


_TOKEN = re.compile(r"\s*(?:(\d+)|([A-Za-z_]\w*)|(//|[-+*()]))")


class _Parser:
    def __init__(self, text: str) -> None:
        self.text, self.tokens = text, self._split(text)

    def _split(self, text: str) -> list[str]:
        tokens, at = [], 0
        text = text.strip()
        while at < len(text):
            m = _TOKEN.match(text, at)
            if m is None:
                raise ShapeError("not a dimension expression", got=repr(text))
            tokens.append(m[0].strip())
            at = m.end()
        return tokens

    def take(self, *wanted: str) -> str | None:
        if self.tokens and self.tokens[0] in wanted:
            return self.tokens.pop(0)
        return None

    def sum(self, depth: int = 0) -> Dim:
        value: Any = self.product(depth)
        while op := self.take("+", "-"):
            right = self.product(depth)
            value = value + right if op == "+" else value - right
        return value  # type: ignore[no-any-return]

    def product(self, depth: int) -> Dim:
        value: Any = self.atom(depth)
        while op := self.take("*", "//"):
            right = self.atom(depth)
            value = value * right if op == "*" else value // right
        return value  # type: ignore[no-any-return]

    def atom(self, depth: int) -> Dim:
        if depth > 40 or not self.tokens:
            raise ShapeError("not a dimension expression", got=repr(self.text))
        if self.take("-"):
            return self.atom(depth + 1) * -1
        if self.take("("):
            value = self.sum(depth + 1)
            if not self.take(")"):
                raise ShapeError("unclosed parenthesis", got=repr(self.text))
            return value
        token = self.tokens.pop(0)
        if token.isdigit():
            return int(token)
        if not _NAME.match(token):
            raise ShapeError("not a dimension expression", got=repr(self.text))
        return sym(token)


def parse_dim(text: str) -> Dim:
    """The dimension written as `past_seq + seq`, `2 * frames`, `(n + 1) // 2`, …"""
    parser = _Parser(text)
    value = parser.sum()
    if parser.tokens:
        raise ShapeError("not a dimension expression", got=repr(text))
    return value
