"""Affine index expressions over loop axes, and their delinearisation, which a reshape needs. Where
that needs an axis to be split in two, `SplitAxis` says which and how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rlx.ir.dim import Dim, Expr, expand

Key = int  # a loop axis; below 0 a gathered index: −1 − its instruction


class Affine(NamedTuple):
    """constant + Σ factor · axis; factors are never 0, terms are ordered by key."""

    terms: tuple[tuple[Key, Dim], ...] = ()
    constant: Dim = 0

    @staticmethod
    def of(terms: dict[Key, Dim], constant: Dim = 0) -> Affine:
        return Affine(tuple(sorted((k, c) for k, c in terms.items() if c != 0)), constant)

    @property
    def keys(self) -> list[Key]:
        return [k for k, _ in self.terms]

    def plus(self, other: Affine | Dim) -> Affine:
        if not isinstance(other, Affine):
            return Affine(self.terms, self.constant + other)
        terms = dict(self.terms)
        for key, factor in other.terms:
            terms[key] = terms.get(key, 0) + factor
        return Affine.of(terms, self.constant + other.constant)

    def times(self, factor: Dim) -> Affine:
        return Affine.of({k: c * factor for k, c in self.terms}, self.constant * factor)


def axis(key: Key) -> Affine:
    return Affine(((key, 1),))


ZERO = Affine()


class SplitAxis(Exception):
    """An axis must be split in two, the inner one of size `inner`."""

    def __init__(self, key: Key, inner: int) -> None:
        self.key, self.inner = key, inner


class NotAffine(Exception):
    """An index is not affine in the loop axes."""


def linear(indices: Sequence[Affine], dims: Sequence[Dim]) -> Affine:
    """The linear (row-major) offset of an element."""
    total = ZERO
    step: Dim = 1
    for index, size in zip(reversed(indices), reversed(dims), strict=True):
        total = total.plus(index.times(step))
        step = step * size
    return total


def unravel(position: Affine, dims: Sequence[Dim], sizes: Sequence[Dim]) -> list[Affine]:
    """Indices of the element at a linear offset; `sizes` are those of the loop axes."""
    indices: list[Affine] = []
    for size in reversed(dims[1:]):
        position, rest = _divide(position, size, sizes)
        indices.append(rest)
    if dims:
        indices.append(position)
    return indices[::-1]


def _divide(position: Affine, by: Dim, sizes: Sequence[Dim]) -> tuple[Affine, Affine]:
    """Quotient and remainder."""
    if by == 1:
        return position, ZERO
    high: dict[Key, Dim] = {}
    low: dict[Key, Dim] = {}
    for key, factor in position.terms:
        times = quotient(factor, by)
        if times is not None:
            high[key] = times
        else:
            low[key] = factor
    whole, rest = _divide_constant(position.constant, by)
    _require_small(low, rest, by, sizes)
    return Affine.of(high, whole), Affine.of(low, rest)


def _divide_constant(constant: Dim, by: Dim) -> tuple[Dim, Dim]:
    if isinstance(constant, int) and isinstance(by, int) and by > 0:
        return constant // by, constant % by
    times = quotient(constant, by)
    return (times, 0) if times is not None else (0, constant)


def quotient(value: Dim, by: Dim) -> Dim | None:
    """value / by if the division is provably exact, else None."""
    if value == by:
        return 1
    if isinstance(by, int):
        factors = [value] if isinstance(value, int) else [c for _, c in value.terms]
        return value // by if by and all(c % by == 0 for c in factors) else None
    if isinstance(value, int):
        return 0 if value == 0 else None
    value, by = expand(value), expand(by)
    if isinstance(value, int) or isinstance(by, int) or len(by.terms) != 1:
        return 1 if value == by else None
    return _by_monomial(value, by)


def _by_monomial(value: Expr, by: Expr) -> Dim | None:
    [(atoms, factor)] = by.terms
    result: Dim = 0
    for monomial, coefficient in value.terms:
        left = list(monomial)
        for atom in atoms:
            if atom not in left:
                return None
            left.remove(atom)
        if coefficient % factor:
            return None
        times = coefficient // factor
        result = result + (Expr({tuple(left): times}) if left else times)
    return result


def _require_small(low: dict[Key, Dim], rest: Dim, by: Dim, sizes: Sequence[Dim]) -> None:
    """Raise unless rest + Σ low is provably in 0 … by − 1."""
    least, most = rest, rest
    for key, factor in low.items():
        if key < 0:
            raise NotAffine
        if isinstance(factor, int) and factor < 0:
            least = least + factor * (sizes[key] - 1)
        else:
            most = most + factor * (sizes[key] - 1)
    if _never_negative(least) and _never_negative(by - most - 1):
        return
    for key, factor in low.items():
        if isinstance(by, int) and isinstance(factor, int) and by % factor == 0:
            inner = by // abs(factor)
            if inner > 1 and sizes[key] != inner and quotient(sizes[key], inner) is not None:
                raise SplitAxis(key, inner)
    raise NotAffine


def _never_negative(value: Dim) -> bool:
    """Whether the value is provably ≥ 0: no term has a negative coefficient."""
    value = expand(value)
    if isinstance(value, int):
        return value >= 0
    return all(factor > 0 for _, factor in value.terms)
