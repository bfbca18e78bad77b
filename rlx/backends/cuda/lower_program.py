"""From a plan to a program: launches, and where their args lie."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from rlx.backends.bounds_checks import bounds_checks_of
from rlx.backends.cuda.batch_invariance import is_asked
from rlx.backends.cuda.kernels.control.loop_kernels import LoopHeader
from rlx.backends.cuda.kernels.persistent.plan import persist
from rlx.backends.cuda.launches import (
    ArgAddress,
    ConstantPointer,
    Counters,
    HostFlag,
    KernelArg,
    KernelLaunch,
    Lasting,
)
from rlx.backends.cuda.lowering import lower_graph
from rlx.backends.cuda.merge import merge_launches
from rlx.backends.cuda.program import (
    ARENA,
    FLAG,
    NUMBER,
    STATUS,
    TABLE,
    Base,
    Program,
    place_of,
)
from rlx.backends.cuda.tensor_map import Matrix, TensorMap
from rlx.backends.kernel_args import NodeNumber, Pointer, Scratch, Status
from rlx.ir.attrs import Data
from rlx.ir.dim import Dim, Expr, is_affine
from rlx.ir.lir import Lir
from rlx.ir.node import Node
from rlx.support.settings import debug, setting


class LoweredProgram(Program):
    """The program of a plan, for a GPU of this name. `unsuited` is why there is no persistent
    kernel in it."""

    def __init__(self, lir: Lir, cpu: str, multiprocessors: int) -> None:
        super().__init__()
        wish = "0" if is_asked() else setting("RLX_PERSISTENT")
        found, self.unsuited = persist(lower_graph(lir, cpu), lir, cpu, multiprocessors, wish)
        if self.unsuited and wish != "0":
            debug(1, f"decode is no persistent kernel: {self.unsuited}")
        self.lir, self.launches = lir, merge_launches(found, lir)
        for before, x in pairwise(self.launches):
            x.waits = before.kernel is None or isinstance(before.kernel, LoopHeader)
        self._lasting = 0  # how many launches keep memory
        self.nodes = [x.node.id for x in self.launches if x.node is not None]
        self.symbols = sorted(lir.live)
        self.bounds_checks = bounds_checks_of(lir.graph.nodes) if lir.live else []
        self.reports, self.maps = {}, {}
        self._map_numbers: dict[tuple[Base, int, Matrix], int] = {}
        bases, addends = list[Base](), list[Dim]()
        self._body_constants: dict[Base, Data] = {}
        self._node_numbers: dict[Node, int] = {}
        self.starts = [0, *accumulate(len(launch.args) for launch in self.launches)]
        self._start_of = {id(x): at for x, at in zip(self.launches, self.starts, strict=False)}
        self._counters = self._used = 0  # words behind all args, which launches use in turn
        for launch in self.launches:
            self._used = 0
            for arg in launch.args:
                base, addend = self._resolved(arg, self.starts[-1])
                bases.append(base)
                addends.append(addend)
        bases += [NUMBER] * self._counters
        addends += [0] * self._counters
        self.bases = list(dict.fromkeys([NUMBER, *bases]))
        number = {base: i for i, base in enumerate(self.bases)}
        self.base_of = np.array([number[b] for b in bases], np.int64)
        self.fixed = np.array([a if isinstance(a, int) else 0 for a in addends], np.int64)
        self.dynamic = [(i, a) for i, a in enumerate(addends) if not isinstance(a, int)]
        orders = [_order(lir, launch) for launch in self.launches]
        self.orders = [min(orders[i:]) for i in range(len(orders))]
        self.constants = self._constants()
        updates = [n for n in lir.graph.nodes if n.op.name == "state_update"]
        affine = all(is_affine(a) for _, a in self.dynamic)
        self.can_repeat = (
            affine
            and all(x.kernel is not None for x in self.launches)
            and all(len(n.inputs) == 2 for n in updates)  # at a start, not at given slots
        )
        replaced = [lir.home(n.inputs[0])[0] for n in updates if not _is_append(n)]
        self.replaced = sorted({str(root.node.name) for root in replaced})

    # -- args -----------------------------------------------------------------------------------

    def _resolved(self, arg: KernelArg, first: int) -> tuple[Base, Dim]:
        """Base and addend of an arg; counters lie from arg `first` on: they are 0 again when a
        kernel ends, and the next one waits for that."""
        if isinstance(arg, Counters):
            self._used += arg.count
            self._counters = max(self._counters, self._used)
            return TABLE, 8 * (first + self._used - arg.count)
        if isinstance(arg, Lasting):
            self._lasting += 1
            return ("lasting", (self._lasting, arg.count, arg.blocks)), 0
        if isinstance(arg, TensorMap):
            where, offset = self._resolved(arg.start, first)
            assert isinstance(offset, int)
            place = where, offset, arg.matrix
            number = self._map_numbers.setdefault(place, len(self._map_numbers))
            base: Base = ("map", number)  # bases are looked up by each run
            self.maps[base] = place
            return base, 0
        if isinstance(arg, Pointer):
            base, start = place_of(self.lir, arg.value)
            return base, start + arg.shift * arg.value.dtype.bytes
        if isinstance(arg, Scratch):
            return ARENA, self.lir.scratch[arg.node.id][0] + arg.offset + arg.shift
        if isinstance(arg, Status):
            return STATUS, 0
        if isinstance(arg, NodeNumber):
            return NUMBER, self._number(arg.node)
        if isinstance(arg, ArgAddress):
            return TABLE, 8 * (self._start_of[id(arg.launch)] + arg.index)
        if isinstance(arg, ConstantPointer):
            known = self._body_constants
            same = next((b for b, data in known.items() if data == arg.data), None)
            base = same or ("constant", f"of a body {len(known)}")
            known[base] = arg.data
            return base, arg.shift
        if isinstance(arg, HostFlag):
            return FLAG, 0
        return NUMBER, arg

    def _number(self, node: Node) -> int:
        """What a kernel stores when it meets bad data."""
        number = self._node_numbers.setdefault(node, len(self._node_numbers) + 1)
        operands = ", ".join(f"{v.name} {v.shape}" for v in node.inputs)
        self.reports[number] = node.op.name, operands, str(node.origin)
        return number

    def _constants(self) -> dict[Base, Any]:
        places = [*self.bases, *(base for base, _, _ in self.maps.values())]
        used = {b for b in places if b[0] == "constant" and b not in self._body_constants}
        for launch in self.launches:
            if launch.on_host and launch.node is not None:
                places = [place_of(self.lir, v)[0] for v in launch.node.inputs]
                used |= {b for b in places if b[0] == "constant"}
        nodes: Sequence[Any] = self.lir.graph.nodes
        own = {base: nodes[base[1]].op.data.array for base in sorted(used)}
        return own | {base: data.array for base, data in self._body_constants.items()}


def _is_append(node: Any) -> bool:
    """Whether a state is written at the position of the run, so that writing again is the same."""
    return len(node.inputs) == 2 and isinstance(node.op.start, Expr)


def _order(lir: Lir, launch: KernelLaunch) -> int:
    """The phase of a launch; one that stands before an earlier phase belongs to that."""
    phase = None if launch.node is None else lir.phases.get(launch.node)
    return 0 if phase is None else phase.order
