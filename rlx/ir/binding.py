"""Sizes for symbols: fixed ones, and live ones that have a bound and arrive with each run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from rlx.errors import BindingError
from rlx.ir.dim import DERIVED, Expr, evaluate


class UpTo(NamedTuple):
    """A live size: at most `bound`, given anew with each run."""

    bound: int

    def __str__(self) -> str:
        return f"≤{self.bound}"


Size = int | UpTo


class DimBinding:
    """Symbol → size. Equal contents are equal bindings, in whatever order they were set."""

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
        """Bind `symbol`; binding it again to another size is an error. Gives itself."""
        name = _name(symbol)
        self._check_size(name, size)
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

    def _check_size(self, name: str, size: Size) -> None:
        if isinstance(size, UpTo):
            if not isinstance(size.bound, int) or size.bound < 1:
                raise BindingError("a live bound is a positive int", where=name, got=size.bound)
        elif not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise BindingError("a size is a non-negative int", where=name, got=repr(size))

    def set_live(self, symbol: str | Expr, bound: int) -> DimBinding:
        """Leave `symbol` live: up to `bound`, the value given with each run."""
        return self.set(symbol, UpTo(bound))

    def with_size(self, symbol: str | Expr, size: Size) -> DimBinding:
        """A copy in which `symbol` has `size`."""
        sizes = {k: v for k, v in self._sizes.items() if k != _name(symbol)}
        return DimBinding(sizes).set(symbol, size)

    def get(self, symbol: str | Expr) -> Size | None:
        """The size, also of a derived symbol (`rows`) once its factors are bound."""
        name = _name(symbol)
        found = self._sizes.get(name)
        if found is None and name in DERIVED:
            return self._product(DERIVED[name])
        return found

    def _product(self, product: Expr) -> int | None:
        sizes = self.sizes
        return evaluate(product, sizes) if product.symbols <= sizes.keys() else None

    @property
    def sizes(self) -> dict[str, int]:
        """The fixed sizes."""
        return {k: v for k, v in sorted(self._sizes.items()) if isinstance(v, int)}

    @property
    def live(self) -> dict[str, int]:
        """The live symbols and their bounds."""
        return {k: v.bound for k, v in sorted(self._sizes.items()) if isinstance(v, UpTo)}

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


def _name(symbol: str | Expr) -> str:
    if isinstance(symbol, Expr):
        if len(symbol.terms) == 1 and symbol.symbols == {str(symbol)}:
            return str(symbol)
        raise BindingError("only a plain symbol can be bound", got=str(symbol))
    return symbol
