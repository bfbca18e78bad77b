"""Subgraphs of control flow: planned by themselves, into a part of their node's scratch memory.

Their launches become launches of that node. An address that changes in every iteration is an
induction pointer: the loop header updates the args that hold it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import lru_cache

from rlx.backends.cuda.launches import ArgAddress, ConstantPointer, KernelArg, KernelLaunch
from rlx.backends.cuda.lowering import TABLE, Layouts, lower_graph, runs_on_host
from rlx.backends.cuda.merge import merge_launches
from rlx.backends.cuda.tensor_map import TensorMap
from rlx.backends.kernel_args import Pointer, Scratch
from rlx.ir.attrs import Body
from rlx.ir.dim import Dim
from rlx.ir.lir import Lir
from rlx.ir.node import Node, Value
from rlx.passes.plan import plan
from rlx.passes.views import insert_contiguous
from rlx.support.records import dataclass

_CPU = "sm_80"  # kernels for it need no tensor maps, which the host encodes for fixed places


@dataclass(frozen=True)
class InductionPointer:
    """An address that changes in every iteration, by its number in the loop header."""

    number: int


Location = Pointer | Scratch | InductionPointer


@dataclass(frozen=True)
class ArgUpdate:
    """An arg of a launch that is set in every iteration: an induction pointer plus some bytes."""

    arg: ArgAddress
    pointer: int
    offset: Dim


def bodies(node: Node) -> Iterator[Body]:
    """The subgraphs of a node."""
    for name in ("then", "otherwise", "condition", "body"):
        found = getattr(node.op, name, None)
        if isinstance(found, Body):
            yield found


@lru_cache(maxsize=512)
def has_kernels(body: Body) -> bool:
    """Whether all nodes of a subgraph run on the device."""
    return not any(runs_on_host(n) for n in body.graph.nodes)


def plan_subgraph(body: Body, node: Node, outputs: Sequence[int] | None = None) -> Lir:
    """The plan of a subgraph of `node`, with all outputs or those of these numbers."""
    chosen = range(len(body.graph.outputs)) if outputs is None else outputs
    return _planned(body, tuple(chosen), tuple(sorted(node.graph.live.items())))


@lru_cache(maxsize=512)
def _planned(body: Body, outputs: tuple[int, ...], bounds: tuple[tuple[str, int], ...]) -> Lir:
    graph = body.graph.copy()
    graph.set_outputs([graph.outputs[i] for i in outputs])
    graph.live = dict(bounds)
    layouts = Layouts.of(graph)
    graph = insert_contiguous(graph, lambda node: TABLE.reads_strided(node, layouts))
    return plan(graph, scratch=TABLE.scratch, nested=True)


@dataclass
class Subgraph:
    """A planned subgraph of `node`: the offset of its arena in the node's scratch memory, the
    locations of its inputs and outputs, and the numbers of inputs that may begin at any element."""

    node: Node
    lir: Lir
    start: int
    inputs: Sequence[Location]
    outputs: Sequence[Location]
    displaced: Collection[int] = ()
    updates: list[ArgUpdate] = field(default_factory=list)

    def launches(self) -> list[KernelLaunch]:
        inputs = [n.output for n in self.lir.inputs]
        locations = dict(zip(inputs, self.inputs, strict=True))
        locations |= dict(zip(self.lir.outputs, self.outputs, strict=True))
        displaced = [inputs[i] for i in self.displaced]
        launches = merge_launches(lower_graph(self.lir, _CPU, displaced), self.lir)
        for launch in launches:
            pairs = enumerate(launch.args)
            launch.args = [self._arg(launch, i, a, locations) for i, a in pairs]
            launch.reads, launch.writes, launch.node = (), (), self.node
        return launches

    def _arg(
        self, launch: KernelLaunch, index: int, arg: KernelArg, locations: Mapping[Value, Location]
    ) -> KernelArg:
        assert not isinstance(arg, TensorMap)
        if isinstance(arg, Scratch):
            offset, _ = self.lir.scratch[arg.node.id]
            return Scratch(self.node, self.start + offset + arg.offset, arg.shift)
        if not isinstance(arg, Pointer):
            return arg
        root, slot = self.lir.home(arg.value)
        view = self.lir.slots[arg.value].view
        shift = arg.shift + (0 if view is None else view.offset)
        offset = shift * root.dtype.bytes  # type: ignore[assignment]
        location = locations.get(root)
        if isinstance(location, Pointer):
            return replace(location, shift=location.shift + shift)
        if isinstance(location, Scratch):
            return replace(location, shift=location.shift + offset)
        if isinstance(location, InductionPointer):
            place = ArgAddress(launch, index)
            self.updates.append(ArgUpdate(place, location.number, offset))
            return 0
        if slot.kind == "constant":
            return ConstantPointer(root.node.op.data, offset)  # type: ignore[attr-defined]
        assert slot.offset is not None, f"{root} has no arena slot"
        return Scratch(self.node, self.start + slot.offset, offset)
