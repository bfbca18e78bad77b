"""A program: launches in order, and the table of their args in device memory.

Each arg is an address or a number: a base (the arena, a parameter, an input, …) plus an addend,
which may depend on dynamic sizes. A run with other sizes or buffers writes the table anew, in one
small copy; the launches stay as they are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.backends.bounds_checks import bounds_checks_of
from rlx.backends.cuda.kernels.persistent.plan import persist
from rlx.backends.cuda.lowering import Counters, KernelArg, KernelLaunch, Lasting, lower_graph
from rlx.backends.cuda.merge import merge_launches
from rlx.backends.cuda.tensor_map import Matrix, TensorMap
from rlx.backends.kernel_args import NodeNumber, Pointer, Scratch, Status
from rlx.ir.dim import Dim, evaluate
from rlx.ir.lir import Lir
from rlx.ir.node import Node, Value
from rlx.ir.phase import Phase
from rlx.support.settings import debug, setting

Base = tuple[str, Any]  # role and name: ("param", "w"), ("constant", a node's number), …
NUMBER: Base = ("number", None)  # no address at all
ARENA: Base = ("arena", None)
STATUS: Base = ("status", None)
TABLE: Base = ("table", None)  # the table of args itself
_PER_RUN = ("input", "output")  # roles of bases that each run places anew

_MAX_SIZES = 64  # dynamic sizes whose addends are remembered


class Program:
    def __init__(self, lir: Lir, cpu: str, multiprocessors: int) -> None:
        self.lir = lir
        wish = setting("RLX_PERSISTENT")
        found, self.unsuited = persist(lower_graph(lir, cpu), lir, cpu, multiprocessors, wish)
        if self.unsuited and wish != "0":
            debug(1, f"decode is no persistent kernel: {self.unsuited}")
        self.launches = merge_launches(found, lir)
        self.lasting: dict[Base, int] = {}  # memory that launches keep, and its bytes
        self.symbols = sorted(lir.live)
        self.bounds_checks = bounds_checks_of(lir.graph.nodes) if lir.live else []
        self.reports: dict[int, Node] = {}  # nodes that may find an index out of bounds
        self._outputs = dict(zip(lir.outputs, lir.graph.output_names, strict=True))
        self.maps: dict[Base, tuple[Base, int, Matrix]] = {}  # base → where a matrix lies, and how
        self._map_numbers: dict[tuple[Base, int, Matrix], int] = {}
        self.starts = [0]  # the first arg of each launch
        bases, addends = list[Base](), list[Dim]()
        self._counters = 0  # words behind all args
        first = sum(len(launch.args) for launch in self.launches)
        for launch in self.launches:
            for arg in launch.args:
                base, addend = self._resolved(arg, first)
                bases.append(base)
                addends.append(addend)
            self.starts.append(len(bases))
        bases += [NUMBER] * self._counters
        addends += [0] * self._counters
        self.bases = list(dict.fromkeys([NUMBER, *bases]))
        number = {base: i for i, base in enumerate(self.bases)}
        self._base_of = np.array([number[b] for b in bases], np.int64)
        self._fixed = np.array([a if isinstance(a, int) else 0 for a in addends], np.int64)
        self.dynamic = [(i, a) for i, a in enumerate(addends) if not isinstance(a, int)]
        self._known: dict[tuple[tuple[str, int], ...], npt.NDArray[np.int64]] = {}
        orders = [_order(lir, launch) for launch in self.launches]
        self._orders = [min(orders[i:]) for i in range(len(orders))]

    @property
    def num_args(self) -> int:
        return len(self._fixed)

    def table(self, addresses: Mapping[Base, int], sizes: Mapping[str, int]) -> bytes:
        """The args of all launches."""
        bases = np.array([addresses[b] for b in self.bases], np.int64)
        return (bases[self._base_of] + self.addends(sizes)).tobytes()

    def addends(self, sizes: Mapping[str, int]) -> npt.NDArray[np.int64]:
        """What is added to the base of each arg."""
        if not self.dynamic:
            return self._fixed
        key = tuple(sorted(sizes.items()))
        if key not in self._known:
            if len(self._known) >= _MAX_SIZES:
                self._known.clear()
            found = self._known[key] = self._fixed.copy()
            values = {d: evaluate(d, sizes) for d in dict.fromkeys(d for _, d in self.dynamic)}
            for position, dim in self.dynamic:
                found[position] = values[dim]
        return self._known[key]

    def part(self, span: tuple[Phase, Phase] | None) -> tuple[int, int]:
        """The launches of a span of phases: from which to which."""
        if span is None:
            return 0, len(self.launches)
        first, last = (bisect_right(self._orders, o) for o in (span[0].order - 1, span[1].order))
        return first, last

    # -- args -----------------------------------------------------------------------------------

    def _resolved(self, arg: KernelArg, first: int) -> tuple[Base, Dim]:
        """Base and addend of an arg; counters lie from arg `first` on."""
        if isinstance(arg, Counters):
            self._counters += arg.count
            return TABLE, 8 * (first + self._counters - arg.count)
        if isinstance(arg, Lasting):
            kept: Base = ("lasting", len(self.lasting))
            self.lasting[kept] = arg.count
            return kept, 0
        if isinstance(arg, TensorMap):
            where, offset = self._resolved(arg.start, first)
            assert isinstance(offset, int)
            place = where, offset, arg.matrix
            number = self._map_numbers.setdefault(place, len(self._map_numbers))
            base: Base = ("map", number)  # bases are looked up by each run
            self.maps[base] = place
            return base, 0
        if isinstance(arg, Pointer):
            base, start = self.place(arg.value)
            return base, start + arg.shift * arg.value.dtype.bytes
        if isinstance(arg, Scratch):
            return ARENA, self.lir.scratch[arg.node.id][0] + arg.offset + arg.shift
        if isinstance(arg, Status):
            return STATUS, 0
        if isinstance(arg, NodeNumber):
            self.reports[arg.node.id + 1] = arg.node
            return NUMBER, arg.node.id + 1
        return NUMBER, arg

    def maps_of_runs(self) -> list[Base]:
        """The tensor maps of what each run places anew."""
        return [b for b, (base, _, _) in self.maps.items() if base[0] in _PER_RUN]

    def place(self, value: Value) -> tuple[Base, Dim]:
        """Where a value's first element is: a base, and bytes from there."""
        view = self.lir.slots[value].view
        root, slot = self.lir.home(value)
        start: Dim = 0 if view is None else view.offset * value.dtype.bytes
        if slot.kind == "arena":
            assert slot.offset is not None
            return ARENA, slot.offset + start
        if slot.kind == "constant":
            return ("constant", root.node.id), start
        if slot.kind == "output":
            return ("output", self._outputs[root]), start
        return (slot.kind, root.node.name), start

    def constants(self) -> dict[Base, Any]:
        """The constants that kernels or the host read, as arrays."""
        places = [*self.bases, *(base for base, _, _ in self.maps.values())]
        used = {base for base in places if base[0] == "constant"}
        for launch in self.launches:
            if launch.kernel is None and launch.node is not None:
                used |= {b for b, _ in map(self.place, launch.node.inputs) if b[0] == "constant"}
        nodes: Sequence[Any] = self.lir.graph.nodes
        return {base: nodes[base[1]].op.data.array for base in sorted(used)}


def _order(lir: Lir, launch: KernelLaunch) -> int:
    """The phase of a launch; one that stands before an earlier phase belongs to that."""
    phase = None if launch.node is None else lir.phases.get(launch.node)
    return 0 if phase is None else phase.order
