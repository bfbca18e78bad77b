"""Nodes that are alike have steps that are alike: lowered once, then told for other operands.

The layers of a model differ in their operands only. A lowering looks at the op, at shapes and at
how operands lie in memory, so what it gave for one node holds for every node that agrees in those,
with operands, results and scratch memory exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rlx.backends.cpu.lowering import (
    Context,
    Lowering,
    Number,
    Pointer,
    Scratch,
    Step,
    Word,
    WordOf,
)
from rlx.ir.dim import Dim
from rlx.ir.node import Node, Value
from rlx.records import dataclass

# Their lowerings look at what stands around the node, or make steps of nested graphs.
_LOOKING_AROUND = frozenset({"gated_delta_net", "selective_scan", "cond", "while_loop", "scan"})


def looks_around(node: Node) -> bool:
    kind = node.op.name
    if kind == "state_update":  # it may find that a recurrence has written the state already
        kind = node.inputs[1].node.op.name
    return kind in _LOOKING_AROUND


@dataclass(frozen=True)
class Recipe:
    """The words of a step in terms of a node's values: operands first, then results."""

    fixed: list[int]  # the words that are numbers, 0 in the place of others
    others: list[tuple[int, Word]]  # position, a word that is the same for every node
    pointers: list[tuple[int, int, Dim]]  # position, number of the value, shift
    scratch: list[tuple[int, int, Dim]]  # position, offset, shift
    numbers: list[int]  # positions of the node's number
    links: list[tuple[int, int, int]]  # position, step of the node, its word


class Told(Sequence[Word]):
    """The words of a step by its recipe."""

    __slots__ = ("node", "recipe", "steps")

    def __init__(self, recipe: Recipe, node: Node, steps: list[Step]) -> None:
        self.recipe, self.node, self.steps = recipe, node, steps

    def __len__(self) -> int:
        return len(self.recipe.fixed)

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def __iter__(self) -> Iterator[Word]:
        r, node = self.recipe, self.node
        words: list[Word] = list(r.fixed)
        for at, word in r.others:
            words[at] = word
        values = (*node.inputs, *node.outputs)
        for at, number, shift in r.pointers:
            words[at] = Pointer(values[number], shift)
        for at, offset, shift in r.scratch:
            words[at] = Scratch(node, offset, shift)
        for at in r.numbers:
            words[at] = Number(node)
        for at, step, index in r.links:
            words[at] = WordOf(self.steps[step], index)
        return iter(words)


@dataclass(frozen=True)
class Pattern:
    """A step of the first of several nodes that are alike."""

    step: Step
    recipe: Recipe
    reads: tuple[int, ...]
    writes: tuple[int, ...]


class Repeats:
    """Lowers nodes of one program."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self._known: dict[tuple[Any, ...], list[Pattern] | None] = {}

    def lower(self, node: Node, lowering: Lowering) -> list[Step]:
        if looks_around(node):
            return lowering(node, self.ctx)
        key = self._key(node)
        if key not in self._known:
            steps = lowering(node, self.ctx)
            self._known[key] = patterns_of(node, steps)
            return steps
        patterns = self._known[key]
        if patterns is None:
            return lowering(node, self.ctx)
        return _retold(node, patterns)

    def _key(self, node: Node) -> tuple[Any, ...]:
        """All that a lowering may look at; which operands are the same value counts too.

        Ops and views are told apart by identity: the graph shares equal ones, and where it does
        not, a node is only lowered once more.
        """
        slots, inputs = self.ctx.lir.slots, node.inputs
        key: list[Any] = [id(node.op)]
        for v in inputs:
            view = slots[v].view
            key += (v.shape, None if view is None else id(view))
        for v in node.outputs:
            key.append(v.shape)
        if len(inputs) > 1 and len(set(inputs)) < len(inputs):
            key.append(tuple(map({v: i for i, v in enumerate(inputs)}.get, inputs)))
        return tuple(key)


def _retold(node: Node, patterns: list[Pattern]) -> list[Step]:
    values = (*node.inputs, *node.outputs)
    steps: list[Step] = []
    for p in patterns:
        old = p.step
        step = Step(
            old.spec, Told(p.recipe, node, steps), [values[i] for i in p.reads],
            [values[i] for i in p.writes], old.solo, node, old.uses_scratch, old.flops, old.bytes,
            old.label, old.jump, old.fence,
        )  # fmt: skip
        steps.append(step)
    return steps


def patterns_of(node: Node, steps: list[Step]) -> list[Pattern] | None:
    """What the steps are, told for any node; None where they hold something of another node."""
    values = (*node.inputs, *node.outputs)
    numbers: dict[Value, int] = {}
    for i, v in enumerate(values):
        numbers.setdefault(v, i)
    found = []
    for step in steps:
        recipe = _recipe(node, step, steps, numbers)
        touched = (*step.reads, *step.writes)
        if recipe is None or step.host is not None or not all(v in numbers for v in touched):
            return None
        reads, writes = (tuple(numbers[v] for v in vs) for vs in (step.reads, step.writes))
        found.append(Pattern(step, recipe, reads, writes))
    return found


def _recipe(node: Node, step: Step, steps: list[Step], numbers: dict[Value, int]) -> Recipe | None:
    made = Recipe([], [], [], [], [], [])
    for at, word in enumerate(step.words):
        made.fixed.append(word if isinstance(word, int) else 0)
        if isinstance(word, Pointer):
            if word.value not in numbers:
                return None
            made.pointers.append((at, numbers[word.value], word.shift))
        elif isinstance(word, Scratch):
            if word.node is not node:
                return None
            made.scratch.append((at, word.offset, word.shift))
        elif isinstance(word, Number):
            if word.node is not node:
                return None
            made.numbers.append(at)
        elif isinstance(word, WordOf):
            place = next((i for i, s in enumerate(steps) if s is word.step), None)
            if place is None:
                return None
            made.links.append((at, place, word.index))
        elif not isinstance(word, int):
            made.others.append((at, word))
    return made
