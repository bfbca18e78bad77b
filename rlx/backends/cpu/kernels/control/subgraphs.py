"""Subgraphs: the launches of a branch or a loop body, inlined among those of the graph around it.

A subgraph is planned by itself, into a part of its node's scratch memory, and lowered; its launches
then become launches of that node. An address in it becomes one in the scratch memory, or that of an
operand or result of the node, or one that moves from iteration to iteration: then the loop has to
set the arg, and finds it in `moves`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import lru_cache

from rlx.backends.cpu.barriers import barriers_of
from rlx.backends.cpu.lowering import (
    ConstantPointer,
    Context,
    KernelArg,
    KernelLaunch,
    Pointer,
    Scratch,
    insert_contiguous,
    lower_graph,
    scratch_of,
)
from rlx.ir.attrs import Body
from rlx.ir.dim import Dim
from rlx.ir.lir import Lir
from rlx.ir.node import Node, Value
from rlx.llvm.target import Target
from rlx.passes.plan import plan
from rlx.support.records import dataclass


@dataclass(frozen=True)
class Source:
    """An address that moves from iteration to iteration, by its number in the loop."""

    number: int


Place = Pointer | Scratch | Source


@dataclass(frozen=True)
class Move:
    """An arg of a launch that is to hold the address of a source plus some bytes."""

    launch: KernelLaunch
    index: int
    source: int
    offset: Dim


def plan_body(
    body: Body, node: Node, target: Target, threads: int, kept: Sequence[int] | None = None
) -> Lir:
    """The plan of a subgraph of `node`, with all its outputs or those of the numbers `kept`."""
    outputs = range(len(body.graph.outputs)) if kept is None else kept
    bounds = tuple(sorted(node.graph.live.items()))
    return _plan_body(body, tuple(outputs), bounds, target, threads)


@lru_cache(maxsize=512)
def _plan_body(
    body: Body,
    kept: tuple[int, ...],
    bounds: tuple[tuple[str, int], ...],
    target: Target,
    threads: int,
) -> Lir:
    graph = body.graph.copy()
    graph.set_outputs([graph.outputs[i] for i in kept])
    graph.live = dict(bounds)
    return plan(
        insert_contiguous(graph), scratch=lambda n: scratch_of(n, target, threads), nested=True
    )


@dataclass
class Nest:
    """A planned subgraph of `node`: where its memory begins in the node's scratch memory, and where
    its inputs and outputs are."""

    node: Node
    lir: Lir
    start: int
    inputs: Sequence[Place]
    outputs: Sequence[Place]
    moves: list[Move] = field(default_factory=list)

    def launches(self, ctx: Context) -> list[KernelLaunch]:
        """The launches, with barriers where they need them among each other and none at the end."""
        inputs = [n.output for n in self.lir.inputs]
        places = dict(zip(inputs, self.inputs, strict=True))
        places |= dict(zip(self.lir.outputs, self.outputs, strict=True))
        launches = lower_graph(Context(self.lir, ctx.target, ctx.threads))
        barriers = barriers_of(launches, self.lir)
        for launch, barrier in zip(launches, barriers, strict=True):
            _count_cost(launch)
            launch.args = [self._arg(launch, i, a, places) for i, a in enumerate(launch.args)]
            launch.reads, launch.writes, launch.uses_scratch, launch.fence = (), (), False, barrier
        return launches

    def _arg(
        self, launch: KernelLaunch, index: int, arg: KernelArg, places: Mapping[Value, Place]
    ) -> KernelArg:
        if isinstance(arg, Scratch):
            offset, _ = self.lir.scratch[arg.node.id]
            return Scratch(self.node, self.start + offset + arg.offset, arg.shift)
        if not isinstance(arg, Pointer):
            return arg
        root, slot = self.lir.home(arg.value)
        view = self.lir.slots[arg.value].view
        shift = arg.shift + (0 if view is None else view.offset)
        offset = shift * root.dtype.bytes  # type: ignore[assignment]
        place = places.get(root)
        if isinstance(place, Pointer):
            return Pointer(place.value, place.shift + shift)
        if isinstance(place, Scratch):
            return Scratch(place.node, place.offset, place.shift + offset)
        if isinstance(place, Source):
            self.moves.append(Move(launch, index, place.number, offset))
            return 0
        if slot.kind == "constant":
            return ConstantPointer(root.node.op.data, offset)  # type: ignore[attr-defined]
        assert slot.offset is not None, f"{root} has no place"
        return Scratch(self.node, self.start + slot.offset, offset)


def _count_cost(launch: KernelLaunch) -> None:
    """Give a launch without a cost that of its node: the node around it, which it belongs to from
    now on, costs as much as all iterations of all launches."""
    node = launch.node
    if node is not None and not launch.flops and not launch.bytes:
        cost = node.op.cost([v.shape for v in node.inputs], [v.shape for v in node.outputs])
        launch.flops, launch.bytes = cost.flops, cost.bytes
