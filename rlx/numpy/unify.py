"""Making sizes equal that an op needs to be equal, while a function is traced.

An op that does not take its operands' symbolic shapes may take them once two sizes are one symbol.
Only sizes that are equal in the call that is traced are tried, the fewest that do; each becomes a
guard. Where that is not enough, a size becomes a multiple of a number, or a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from math import ceil, floor, inf, prod
from typing import TYPE_CHECKING

from rlx.errors import RlxError
from rlx.ir.binding import bind_op
from rlx.ir.dim import Dim, Expr, FloorDiv, Monomial, substitute
from rlx.ir.node import infer
from rlx.ir.op import Op
from rlx.ir.shape import Shape

if TYPE_CHECKING:
    from rlx.numpy.trace import Trace


def unify(trace: Trace, op: Op, shapes: Sequence[Shape]) -> None:
    """Make sizes equal that `op` needs to be equal. Raises the op's own error, with the numbers
    of this call, if it does not take these either."""
    hints = trace.root.hints
    dims = list(dict.fromkeys(d for d in (*_dims_of(op), *[d for s in shapes for d in s.dims])))
    try:
        infer(bind_op(op, hints), tuple([s.bind(hints) for s in shapes]))
    except RlxError as error:
        trace.fix(dims, "not equal")  # code that catches the error may have relied on it
        error.is_final = True  # type: ignore[attr-defined]
        raise
    why = f"equal for {op.name}"
    if _unify_by(trace, _aligned(shapes, trace.hint), op, shapes, why):
        return
    pairs = [
        pair
        for i, b in enumerate(dims)
        for a in dims[:i]
        if trace.hint(a) == trace.hint(b) and (pair := solved(a, b)) is not None
    ]
    for pair in pairs:
        if _fits(op, shapes, [pair]):
            trace.equate(*pair, why)
            return
    if _unify_by(trace, pairs, op, shapes, why) or _divide_for(trace, op, shapes, dims):
        return
    trace.fix(_fewest_fixed(trace, op, shapes) or dims, f"a number for {op.name}")


def _fewest_fixed(trace: Trace, op: Op, shapes: Sequence[Shape]) -> list[Dim]:
    """The sizes of axes side by side that differ, where the op takes the shapes once these are
    numbers: the others, such as a batch, stay symbols. Empty where that is not enough."""
    beside = [(a, b) for a, b in _side_by_side(shapes) if a != b]
    dims: list[Dim] = [d for pair in beside for d in pair if isinstance(d, Expr)]
    numbers = {s: trace.root.hints[s] for d in dims if isinstance(d, Expr) for s in d.symbols}
    return dims if numbers and _fits(op, shapes, list(numbers.items())) else []


def _side_by_side(shapes: Sequence[Shape]) -> Iterator[tuple[Dim, Dim]]:
    """Sizes of the axes that broadcasting puts side by side."""
    for i, second in enumerate(shapes):
        for first in shapes[:i]:
            yield from zip(reversed(first.dims), reversed(second.dims), strict=False)


def _unify_by(
    trace: Trace, pairs: Sequence[tuple[str, Dim]], op: Op, shapes: Sequence[Shape], why: str
) -> bool:
    """Equate those of the pairs that the op needs, if all together are enough."""
    needed = _without_cycles(pairs)
    if not _fits(op, shapes, needed):
        return False
    for pair in list(needed):  # leave out those that the op does not need
        fewer = [p for p in needed if p is not pair]
        if _fits(op, shapes, fewer):
            needed = fewer
    for symbol, dim in needed:
        trace.equate(symbol, trace.resolve(dim), why)
    return True


def _divide_for(trace: Trace, op: Op, shapes: Sequence[Shape], dims: Sequence[Dim]) -> bool:
    """Whether the op takes the shapes once a size is a multiple of a number in its attributes:
    a reshape to [-1, 4]."""
    numbers = [n for n in _divisors_of(op) if n > 1]
    symbols = sorted({s for d in dims if isinstance(d, Expr) for s in d.symbols})
    for number in dict.fromkeys([*numbers, prod(numbers)]):
        for symbol in symbols:
            fresh = Expr({(f"{symbol}_by_{number}",): number})
            if not trace.root.hints[symbol] % number and _fits(op, shapes, [(symbol, fresh)]):
                trace.divide(symbol, number, f"a multiple for {op.name}")
                return True
    return False


def _dims_of(op: Op) -> Iterator[Dim]:
    for value in op.attributes().values() if op.fields else ():
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, Expr):
                yield item


def _divisors_of(op: Op) -> Iterator[int]:
    """The numbers in the attributes of an op, and what sizes are divided by there."""
    for value in op.attributes().values() if op.fields else ():
        for item in value if isinstance(value, tuple) else ():
            if type(item) is int:
                yield item
            elif isinstance(item, Expr):
                for monomial, _ in item.terms:
                    yield from (atom.divisor for atom in monomial if isinstance(atom, FloorDiv))


def _aligned(shapes: Sequence[Shape], hint: Callable[[Dim], int]) -> list[tuple[str, Dim]]:
    """Sizes of axes that broadcasting puts side by side and that are equal in this call."""
    pairs = []
    for a, b in _side_by_side(shapes):
        if a != b and hint(a) == hint(b) and (pair := solved(a, b)) is not None:
            pairs.append(pair)
    return pairs


def decided(difference: Dim, comparison: str) -> bool:
    """Whether a comparison of `difference` with 0 has the same answer for all sizes."""
    low, high = _range(difference)
    return {
        "==": low > 0 or high < 0 or low == high,
        "<": high < 0 or low >= 0,
        "<=": high <= 0 or low > 0,
        ">": high <= 0 or low > 0,
        ">=": high < 0 or low >= 0,
    }[comparison]


def _range(dim: Dim) -> tuple[float, float]:
    """The least and the greatest number that a size may be: symbols are 1 or more, those of
    arguments 2 or more. Infinite where that is not known."""
    if isinstance(dim, int):
        return dim, dim
    terms: dict[Monomial, Fraction] = {}
    low, high = _without_quotients(dim, Fraction(1), terms)
    constant, others = terms.pop((), Fraction(0)), [m for m in terms if terms[m]]
    if any(not isinstance(atom, str) for m in others for atom in m):
        return -inf, inf
    least = {m: prod([1 if "_by_" in str(atom) else 2 for atom in m]) for m in others}
    nearest = constant + sum(terms[m] * least[m] for m in others)
    return (
        -inf if any(terms[m] < 0 for m in others) else ceil(nearest + low),
        inf if any(terms[m] > 0 for m in others) else floor(nearest + high),
    )


def _without_quotients(
    dim: Expr, factor: Fraction, terms: dict[Monomial, Fraction]
) -> tuple[Fraction, Fraction]:
    """Adds `dim` times `factor` to terms, with a / d for a // d. Returns the range of what that
    is off by: a // d is a / d less at most (d − 1) / d."""
    low = high = zero = Fraction(0)
    for monomial, count in dim.terms:
        each = count * factor
        if len(monomial) == 1 and isinstance(monomial[0], FloorDiv):
            quotient = monomial[0]
            lower, upper = _without_quotients(quotient.numerator, each / quotient.divisor, terms)
            off = each * Fraction(quotient.divisor - 1, quotient.divisor)
            low, high = low + lower - max(off, zero), high + upper - min(off, zero)
        else:
            terms[monomial] = terms.get(monomial, Fraction(0)) + each
    return low, high


def solved(a: Dim, b: Dim) -> tuple[str, Dim] | None:
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
