"""Nested graphs: their steps, told in the words of the graph around them.

The graph of a branch or a loop's body is planned by itself, into a part of the scratch memory of
its node; its steps then stand among those of the graph around it. An address in it becomes one in
that scratch memory, or that of an operand or result of the node, or one that moves from round to
round; then the loop has to set the word, and finds it in `moves`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import lru_cache

from rlx.backends.cpu.barriers import barriers_of
from rlx.backends.cpu.copies import insert_copies
from rlx.backends.cpu.lowering import (
    Context,
    Fixed,
    Pointer,
    Scratch,
    Step,
    Word,
    scratch_of,
    steps_of,
)
from rlx.codegen.target import Target
from rlx.ir.attrs import Body
from rlx.ir.dim import Dim
from rlx.ir.lir import Lir
from rlx.ir.node import Node, Value
from rlx.passes.plan import plan
from rlx.support.records import dataclass


@dataclass(frozen=True)
class Source:
    """A place that moves from round to round, by its number in the loop."""

    number: int


Place = Pointer | Scratch | Source


@dataclass(frozen=True)
class Move:
    """A word of a step that is to hold the address of a source plus some bytes."""

    step: Step
    index: int
    source: int
    offset: Dim


def plan_body(
    body: Body, node: Node, target: Target, threads: int, kept: Sequence[int] | None = None
) -> Lir:
    """The plan of a nested graph of `node`, with all its outputs or those of the numbers `kept`."""
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
    return plan(insert_copies(graph), scratch=lambda n: scratch_of(n, target, threads), nested=True)


@dataclass
class Nest:
    """A planned nested graph of `node`: where its memory begins in the node's scratch, and where
    its inputs and outputs are."""

    node: Node
    lir: Lir
    start: int
    inputs: Sequence[Place]
    outputs: Sequence[Place]
    moves: list[Move] = field(default_factory=list)

    def steps(self, ctx: Context) -> list[Step]:
        """The steps, with barriers where they need them among each other, but none at the end."""
        inputs = [n.output for n in self.lir.inputs]
        places = dict(zip(inputs, self.inputs, strict=True))
        places |= dict(zip(self.lir.outputs, self.outputs, strict=True))
        steps = steps_of(Context(self.lir, ctx.target, ctx.threads))
        barriers = barriers_of(steps, self.lir)
        for step, barrier in zip(steps, barriers, strict=True):
            _count_cost(step)
            step.words = [self._word(step, i, w, places) for i, w in enumerate(step.words)]
            step.reads, step.writes, step.uses_scratch, step.fence = (), (), False, barrier
        return steps

    def _word(self, step: Step, index: int, word: Word, places: Mapping[Value, Place]) -> Word:
        if isinstance(word, Scratch):
            offset, _ = self.lir.scratch[word.node.id]
            return Scratch(self.node, self.start + offset + word.offset, word.shift)
        if not isinstance(word, Pointer):
            return word
        root, slot = self.lir.home(word.value)
        view = self.lir.slots[word.value].view
        shift = word.shift + (0 if view is None else view.offset)
        offset = shift * root.dtype.bytes
        place = places.get(root)
        if isinstance(place, Pointer):
            return Pointer(place.value, place.shift + shift)
        if isinstance(place, Scratch):
            return Scratch(place.node, place.offset, place.shift + offset)
        if isinstance(place, Source):
            self.moves.append(Move(step, index, place.number, offset))
            return 0
        if slot.kind == "constant":
            return Fixed(root.node.op.data, offset)  # type: ignore[attr-defined]
        assert slot.offset is not None, f"{root} has no place"
        return Scratch(self.node, self.start + slot.offset, offset)


def _count_cost(step: Step) -> None:
    """A step that does not say what it costs, costs what its node does; the node around it, which
    is to be its node from now on, costs as much as all rounds of all steps."""
    node = step.node
    if node is not None and not step.flops and not step.bytes:
        cost = node.op.cost([v.shape for v in node.inputs], [v.shape for v in node.outputs])
        step.flops, step.bytes = cost.flops, cost.bytes
