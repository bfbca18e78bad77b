"""The steps of a kind of node: lowered once for sizes not seen before, told for all its nodes."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

from rlx.backends.cpu.lowering import Context, Status, lower_node
from rlx.backends.cpu.repeat import Pattern, looks_around, patterns_of
from rlx.backends.cpu.words import wrapped
from rlx.codegen.target import Target
from rlx.ir.dim import Dim, Expr
from rlx.ir.lir import Lir, Slot
from rlx.ir.phase import PhaseSchedule
from rlx.passes.kinds import SizedKinds
from rlx.passes.mould import Mould
from rlx.support.records import dataclass

_MOST = 4096


class Sort(Enum):
    """What a word is, where it is not just a number."""

    POINTER = "pointer"
    SCRATCH = "scratch"
    STATUS = "status"
    SIZE = "size"
    NODE = "node"
    LINK = "link"


class Special(NamedTuple):
    """A word of a step that is not just a number."""

    at: int
    sort: Sort
    live: bool  # it depends on sizes that come with each run
    value: int = 0  # POINTER: which of the node's values; LINK: which of its steps
    word: int = 0  # LINK: the word of that step


@dataclass
class ToldStep:
    pattern: Pattern
    words: list[Dim]  # numbers, and what is added to addresses
    special: tuple[Special, ...]

    @property
    def layout(self) -> tuple[Any, ...]:
        """All but numbers and the kernel."""
        p, s = self.pattern, self.pattern.step
        flags = (s.spec is None, s.solo, s.jump, s.fence, s.uses_scratch)
        return (len(self.words), self.special, p.reads, p.writes, flags)


@dataclass
class ToldKind:
    steps: list[ToldStep]
    words: list[Dim]  # of all steps
    layout: int  # the same number for kinds of the same layout


class KindLowering:
    """Lowers the kinds of a mould for one target and number of workers."""

    def __init__(self, mould: Mould, target: Target, threads: int) -> None:
        self.target, self.threads = target, threads
        self.possible = not any(looks_around(node) for node in mould.graph.nodes)
        self.frames: dict[tuple[int, ...], Any] = {}
        self._known: dict[tuple[Any, ...], ToldKind] = {}
        self._layouts: dict[tuple[Any, ...], int] = {}

    def lower_all(self, sized: SizedKinds) -> list[ToldKind] | None:
        """The steps of all kinds; None where some hold what is not their node's own."""
        found: list[ToldKind] = []
        for number, kind in enumerate(sized.kinds.nodes):
            op = kind.op
            if op.is_source or (op.is_view and sized.views[kind.results[0]] is not None):
                found.append(_NOTHING)
                continue
            told = self._lower(sized, number)
            if told is None:
                self.possible = False
                return None
            found.append(told)
        return found

    def _lower(self, sized: SizedKinds, number: int) -> ToldKind | None:
        key = sized.identity(number)
        found = self._known.get(key)
        if found is None:
            found = self._lower_now(sized, number)
            if len(self._known) >= _MOST:
                self._known.clear()
            if found is not None:
                self._known[key] = found
        return found

    def _lower_now(self, sized: SizedKinds, number: int) -> ToldKind | None:
        node, kind = sized.node(number), sized.kinds.nodes[number]
        kinds = (*kind.operands, *kind.results)
        slots = {
            value: Slot("arena", 0, view=sized.views[k])
            for value, k in zip((*node.inputs, *node.outputs), kinds, strict=True)
        }
        alone = Lir(node.graph, slots, 0, PhaseSchedule())
        patterns = patterns_of(node, lower_node(node, Context(alone, self.target, self.threads)))
        if patterns is None:
            return None
        steps = [_told(sized, pattern, kinds) for pattern in patterns]
        layout = tuple([step.layout for step in steps])
        known = self._layouts.setdefault(layout, len(self._layouts) + 1)
        return ToldKind(steps, [w for step in steps for w in step.words], known)


_NOTHING = ToldKind([], [], 0)


def _told(sized: SizedKinds, pattern: Pattern, kinds: Sequence[int]) -> ToldStep:
    recipe = pattern.recipe
    words: list[Dim] = [wrapped(number) for number in recipe.fixed]
    special: list[Special] = []
    for at, value, shift in recipe.pointers:
        words[at] = _distance(sized, kinds[value], shift)
        special.append(Special(at, Sort.POINTER, isinstance(words[at], Expr), value))
    for at, offset, shift in recipe.scratch:
        words[at] = shift + offset
        special.append(Special(at, Sort.SCRATCH, isinstance(shift, Expr)))
    for at, word in recipe.others:
        if isinstance(word, Status):
            special.append(Special(at, Sort.STATUS, False))
        else:
            assert isinstance(word, Expr), "only nested graphs have other words"
            words[at] = word
            special.append(Special(at, Sort.SIZE, True))
    special += [Special(at, Sort.NODE, False) for at in recipe.numbers]
    special += [Special(at, Sort.LINK, False, step, index) for at, step, index in recipe.links]
    return ToldStep(pattern, words, tuple(sorted(special)))


def _distance(sized: SizedKinds, kind: int, shift: Dim) -> Dim:
    """Bytes from the start of the memory that a value of the kind lies in."""
    view = sized.views[kind]
    size = sized.shapes[sized.root(kind)].dtype.bytes
    return (shift if view is None else view.offset + shift) * size
