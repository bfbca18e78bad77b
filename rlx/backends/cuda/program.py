"""A program: launches in order, and the table of their args in device memory.

Each arg is an address or a number: a base (the arena, a parameter, an input, …) plus an addend,
which may depend on dynamic sizes. A run with other sizes or buffers writes the table anew, in one
small copy; the launches stay as they are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.backends.bounds_checks import BoundsCheck
from rlx.backends.cuda.launches import KernelLaunch
from rlx.backends.cuda.tensor_map import Matrix
from rlx.ir.dim import Dim, Expr, evaluate, is_affine
from rlx.ir.lir import Lir
from rlx.ir.node import Value
from rlx.ir.phase import Phase

Base = tuple[str, Any]  # role and name: ("param", "w"), ("constant", a node's number), …
NUMBER: Base = ("number", None)  # no address at all
ARENA: Base = ("arena", None)
STATUS: Base = ("status", None)
TABLE: Base = ("table", None)  # the table of args itself
FLAG: Base = ("flag", None)  # what a device tells the host before it takes a jump
_PER_RUN = ("input", "output")  # roles of bases that each run places anew

_MAX_SIZES = 64  # dynamic sizes whose addends are remembered


class Program:
    """Launches and their args. `symbols` are the dynamic sizes, in order."""

    launches: Sequence[KernelLaunch]
    nodes: Sequence[int]  # of each launch
    symbols: list[str]
    bounds_checks: list[BoundsCheck]
    reports: dict[int, tuple[str, str, str]]  # op, operands, origin: who may find a bad index
    maps: dict[Base, tuple[Base, int, Matrix]]  # base → where a matrix lies, and how
    starts: list[int]  # the first arg of each launch
    bases: list[Base]
    base_of: npt.NDArray[np.int64]  # of each arg
    fixed: npt.NDArray[np.int64]  # addends that no size changes
    dynamic: list[tuple[int, Dim]]  # args whose addends depend on sizes
    orders: list[int]  # of the phases of launches
    can_repeat: bool  # whether runs may be queued without the host
    replaced: list[str]  # states that a run changes so that it may not be repeated in vain
    constants: dict[Base, Any]  # that kernels or the host read, as arrays

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[str, int], ...], npt.NDArray[np.int64]] = {}

    @property
    def num_args(self) -> int:
        return len(self.fixed)

    def table(self, addresses: Mapping[Base, int], sizes: Mapping[str, int]) -> bytes:
        """The args of all launches."""
        bases = np.array([addresses[b] for b in self.bases], np.int64)
        return (bases[self.base_of] + self.addends(sizes)).tobytes()

    def addends(self, sizes: Mapping[str, int]) -> npt.NDArray[np.int64]:
        """What is added to the base of each arg."""
        if not self.dynamic:
            return self.fixed
        key = tuple(sorted(sizes.items()))
        if key not in self._known:
            if len(self._known) >= _MAX_SIZES:
                self._known.clear()
            slopes = self._slopes  # they complete `fixed`
            found = self._known[key] = self.fixed.copy()
            for symbol, (places, factors) in slopes.items():
                found[places] += factors * sizes[symbol]
            for position, dim in self._others:
                found[position] = evaluate(dim, sizes)
        return self._known[key]

    @cached_property
    def _others(self) -> list[tuple[int, Dim]]:
        """Args that are no sums of multiples of sizes."""
        return [(i, dim) for i, dim in self.dynamic if not is_affine(dim)]

    @cached_property
    def _slopes(self) -> dict[str, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """For each size, the args that depend on it, and what they grow by; the rest of their sums
        is part of `fixed`."""
        found: dict[str, list[tuple[int, int]]] = {}
        for i, dim in self.dynamic:
            for monomial, factor in dim.terms if isinstance(dim, Expr) and is_affine(dim) else ():
                if not monomial:
                    self.fixed[i] = factor
                else:
                    found.setdefault(str(monomial[0]), []).append((i, factor))
        columns = {s: np.array(rows, np.int64).T for s, rows in found.items()}
        return {s: (both[0], both[1]) for s, both in columns.items()}

    def part(self, span: tuple[Phase, Phase] | None) -> tuple[int, int]:
        """The launches of a span of phases: from which to which."""
        if span is None:
            return 0, len(self.launches)
        first, last = (bisect_right(self.orders, o) for o in (span[0].order - 1, span[1].order))
        return first, last

    def maps_of_runs(self) -> list[Base]:
        """The tensor maps of what each run places anew."""
        return [b for b, (base, _, _) in self.maps.items() if base[0] in _PER_RUN]


def place_of(lir: Lir, value: Value) -> tuple[Base, Dim]:
    """Where a value's first element is: a base, and bytes from there."""
    view = lir.slots[value].view
    root, slot = lir.home(value)
    start: Dim = 0 if view is None else view.offset * value.dtype.bytes
    if slot.kind == "arena":
        assert slot.offset is not None
        return ARENA, slot.offset + start
    if slot.kind == "constant":
        return ("constant", root.node.id), start
    if slot.kind == "output":
        names = dict(zip(lir.outputs, lir.graph.output_names, strict=True))
        return ("output", names[root]), start
    return (slot.kind, root.node.name), start
