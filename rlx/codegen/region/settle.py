"""Settling the loops of a kernel: axes that lie gapless behind each other become one, one axis is
chosen for the lanes of vectors, and everything that comes with a run gets an arg."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field

from rlx.codegen.region.affine import Affine
from rlx.codegen.region.kernels import Stored, Traced
from rlx.codegen.region.nest import (
    ROW,
    Apply,
    Arg,
    Checked,
    Count,
    Fold,
    Instruction,
    Literal,
    Load,
    Nest,
    Quantity,
    Report,
    Steps,
    Store,
    Table,
    Walk,
)
from rlx.codegen.region.trace import Item, Place
from rlx.ir.dim import Dim, same
from rlx.ir.dtype import DType
from rlx.support.records import dataclass


@dataclass(frozen=True)
class Address:
    """An arg that is the address of an element of a tensor."""

    place: Place
    shift: Dim
    bytes: int  # per element


REPORT, NODE = "report", "node"  # args: where bad data is reported, and the number to leave there
Meaning = Address | Dim | str


@dataclass(eq=False)
class Settled:
    """A kernel whose loops are settled; one object for all nodes that are alike."""

    nest: Nest
    args: list[Meaning]
    columns: bool  # lanes lie along the last row axis, not along the elements that are folded


@dataclass
class _Group:
    """Axes walked as one; `inner` is the one that moves fastest."""

    axes: list[int]
    size: Dim

    @property
    def inner(self) -> int:
        return self.axes[-1]


@dataclass
class _Args:
    meanings: list[Meaning] = field(default_factory=list)
    _addresses: dict[Address, Arg] = field(default_factory=dict)

    def new(self, meaning: Meaning) -> Arg:
        self.meanings.append(meaning)
        return Arg(len(self.meanings) - 1)

    def address(self, place: Place, shift: Dim, size: int) -> Arg | Table:
        if place.kind == "table":
            assert isinstance(shift, int)
            return Table(place.data, shift)
        key = Address(place, shift, size)
        if key not in self._addresses:
            self._addresses[key] = self.new(key)
        return self._addresses[key]


def settle(traced: Traced) -> Settled:
    return _Settling(traced).run()


class _Settling:
    def __init__(self, traced: Traced) -> None:
        self.traced = traced
        self.args = _Args()
        self.paths = [i.address for i in traced.items if i.what in ("read", "count")]
        self.paths += [s.address for s in traced.stores]
        self.report: Report | None = None
        self.columns = False
        self.tiled = False
        self.rows: list[_Group] = []
        self.spaces: list[list[_Group]] = []
        self._choose_loops()

    def _choose_loops(self) -> None:
        rows, spaces = self.traced.rows, self.traced.spaces
        self.rows = self._merged(rows)
        if not spaces:  # nothing is folded: the last axis gets the lanes
            self.spaces = [self.rows[-1:]]
            self.rows = self.rows[:-1]
            self._choose_tile()
            return
        stored = [s.axes for s in self.traced.stores]
        for axes in spaces:
            if not any(set(axes) & found for found in stored):
                axes = self._by_stride(axes)
            self.spaces.append(self._merged(axes))
        self.columns = self._prefers_columns()

    # -- axes ---------------------------------------------------------------------------------

    def _merged(self, axes: Sequence[int]) -> list[_Group]:
        groups: list[_Group] = []
        for a in axes:
            size = self.traced.sizes[a]
            if groups and self._follows(groups[-1].inner, a, size):
                groups[-1] = _Group([*groups[-1].axes, a], groups[-1].size * size)
            else:
                groups.append(_Group([a], size))
        return groups

    def _follows(self, outer: int, inner: int, size: Dim) -> bool:
        """Whether a step of `outer` is `size` steps of `inner`, in every tensor."""
        for path in self.paths:
            factors = dict(path.terms)
            if not same(factors.get(outer, 0), factors.get(inner, 0) * size):
                return False
        return True

    def _choose_tile(self) -> None:
        """Where a tensor's neighbours lie along a row axis and not along the lanes, that axis is
        put last: square tiles of both axes read and write whole cache lines."""
        if not self.rows:
            return
        lanes = self.spaces[0][-1].inner
        crossing = [p for p in self.paths if dict(p.terms).get(lanes, 0) not in (0, 1)]
        best = max(self.rows, key=lambda g: self._unit_paths([g.inner], crossing))
        if self._unit_paths([best.inner], crossing):
            self.rows = [*(g for g in self.rows if g is not best), best]
            self.tiled = True

    def _by_stride(self, axes: Sequence[int]) -> list[int]:
        """Axes that are only folded may come in any order: the smallest stride innermost."""

        def stride(a: int) -> int:
            factors = [dict(path.terms).get(a, 0) for path in self.paths]
            return max((abs(c) for c in factors if isinstance(c, int)), default=0)

        if all(isinstance(c, int) for path in self.paths for _, c in path.terms):
            return sorted(axes, key=lambda a: -stride(a))
        return list(axes)

    def _prefers_columns(self) -> bool:
        """Whether more tensors lie along a row axis than along what is folded; that axis is put
        last among the rows."""
        folded = [g[-1].inner for g in self.spaces if g]
        along = self._unit_paths(folded)
        best = max(self.rows, key=lambda g: self._unit_paths([g.inner]), default=None)
        if best is None or self._unit_paths([best.inner]) <= along:
            return False
        self.rows = [*(g for g in self.rows if g is not best), best]
        return True

    def _unit_paths(self, axes: Sequence[int], paths: Sequence[Affine] | None = None) -> int:
        """How many paths move by one element along one of the axes."""
        chosen = self.paths if paths is None else paths
        return sum(any(k in axes and c == 1 for k, c in p.terms) for p in chosen)

    # -- args --------------------------------------------------------------------------------

    def run(self) -> Settled:
        levels = [self._level(item.axes) for item in self.traced.items]
        code = [self._instruction(i, n) for i, n in zip(self.traced.items, levels, strict=True)]
        stores = [self._store(s) for s in self.traced.stores]
        rows = tuple(self.args.new(g.size) for g in self.rows)
        spaces = tuple(self._sizes(groups) for groups in self.spaces)
        nest = Nest(rows, spaces, tuple(code), tuple(stores), self.report, self.tiled)
        return Settled(nest, self.args.meanings, self.columns)

    def _sizes(self, groups: Sequence[_Group]) -> tuple[Quantity, ...]:
        """Inner sizes are part of the code, unless all there is is one long axis."""
        if not groups:
            return (1,)
        alone = not self.rows and not self.traced.spaces
        return tuple(self._quantity(g.size, not alone) for g in groups)

    def _quantity(self, value: Dim, constant: bool) -> Quantity:
        if isinstance(value, int) and (constant or value == 0):
            return value
        return self.args.new(value)

    def _level(self, axes: frozenset[int]) -> int:
        outer = {a for g in self.rows for a in g.axes}
        inner = axes - outer
        if not inner:
            return ROW
        for k, groups in enumerate(self.spaces):
            if inner <= {a for g in groups for a in g.axes}:
                return k
        raise AssertionError("an element of two spaces")

    def _steps(self, path: Affine, level: int) -> Steps:
        """Strides along the axes; those between lanes are part of the code."""
        factors = dict(path.terms)
        lanes = len(self.rows) - 1 if self.columns or self.tiled else -1
        rows = [
            self._quantity(factors.get(g.inner, 0), i == lanes) for i, g in enumerate(self.rows)
        ]
        inner = self.spaces[level] if level != ROW else []
        return Steps(
            tuple(rows), tuple(self._quantity(factors.get(g.inner, 0), True) for g in inner)
        )

    def _walk(self, place: Place, dtype: DType, path: Affine, level: int) -> Walk:
        pointer = self.args.address(place, path.constant, dtype.bytes)
        terms = tuple((-1 - k, self._quantity(c, True)) for k, c in path.terms if k < 0)
        return Walk(pointer, dtype, self._steps(path, level), terms)

    def _store(self, stored: Stored) -> Store:
        level = self._level(stored.axes | self.traced.items[stored.item].axes)
        return Store(
            level, self._walk(stored.place, stored.dtype, stored.address, level), stored.item
        )

    def _instruction(self, item: Item, level: int) -> Instruction:
        return _MAKE[item.what](self, item, level)

    def load(self, item: Item, level: int) -> Instruction:
        assert item.place is not None
        return Load(item.dtype, level, self._walk(item.place, item.dtype, item.address, level))

    def count(self, item: Item, level: int) -> Instruction:
        start = self._quantity(item.address.constant, True)
        return Count(item.dtype, level, start, self._steps(item.address, level))

    def check(self, item: Item, level: int) -> Instruction:
        if self.report is None:
            self.report = Report(self.args.new(REPORT), self.args.new(NODE))
        return Checked(item.dtype, level, item.args[0], self.args.new(item.size))

    def fold(self, item: Item, level: int) -> Instruction:
        place = item.args[1] if len(item.args) > 1 else None
        return Fold(item.dtype, ROW, item.kind, item.args[0], item.space, place)

    def use(self, item: Item, level: int) -> Instruction:
        assert item.record is not None
        return Apply(item.dtype, level, item.record, item.args)


_MAKE: dict[str, Callable[[_Settling, Item, int], Instruction]] = {
    "read": _Settling.load,
    "number": lambda s, item, level: Literal(item.dtype, level, item.data),
    "count": _Settling.count,
    "check": _Settling.check,
    "fold": _Settling.fold,
    "use": _Settling.use,
}
