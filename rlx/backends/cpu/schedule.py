"""Where barriers go: a step waits only for steps whose memory it shares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from rlx.backends.cpu.lowering import Step
from rlx.ir.lir import Lir, aligned
from rlx.ir.node import Value

Span = tuple[object, int, int]  # a memory space and a byte range in it
_ALL = 1 << 62
ARENA = "arena"


class Touched(NamedTuple):
    """The memory a step reads and writes."""

    reads: list[Span]
    writes: list[Span]


def place_barriers(steps: Sequence[Step], lir: Lir) -> list[bool]:
    """For each step, whether all workers must have finished it before the next one begins."""
    touched = _touched_by(steps, lir)
    return barriers_between(touched.__getitem__, steps, [-1] * len(steps))


def barriers_between(
    touched: Callable[[int], Touched], steps: Sequence[Step], certain: Sequence[int]
) -> list[bool]:
    """The same by the numbers of steps. `certain` is for each step the last one that it must wait
    for whatever lies where, −1 where there is none."""
    after = [False] * len(steps)
    begin = 0  # the first step behind the last barrier
    for i, step in enumerate(steps):
        if certain[i] >= begin or _must_wait(i, begin, touched, steps):
            after[i - 1] = True
            begin = i
        if step.fence:
            after[i] = True
            begin = i + 1
    return after


def _must_wait(
    step: int, begin: int, touched: Callable[[int], Touched], steps: Sequence[Step]
) -> bool:
    if step == begin:
        return False
    own, alone = touched(step), steps[step].solo
    for earlier in range(begin, step):
        if alone and steps[earlier].solo:
            continue  # the same worker does both
        reads, writes = touched(earlier)
        if _meet(own.reads, writes) or _meet(own.writes, writes) or _meet(own.writes, reads):
            return True
    return False


def _touched_by(steps: Sequence[Step], lir: Lir) -> list[Touched]:
    known: dict[Value, list[Span]] = {}
    found = []
    for step in steps:
        reads = _spans(step.reads, lir, known)
        writes = _spans(step.writes, lir, known)
        if step.uses_scratch and step.node is not None and step.node.id in lir.scratch:
            writes.append(scratch_span(*lir.scratch[step.node.id]))
        found.append(Touched(reads, writes))
    return found


def _spans(values: Iterable[Value], lir: Lir, known: dict[Value, list[Span]]) -> list[Span]:
    found: list[Span] = []
    for value in values:
        spans = known.get(value)
        if spans is None:
            spans = known[value] = _spans_of(value, lir)
        found += spans
    return found


def _spans_of(value: Value, lir: Lir) -> list[Span]:
    root, slot = lir.home(value)
    return value_spans(id(root), slot.kind, slot.offset, slot.size)  # == of values builds a node


def value_spans(root: object, kind: str, offset: int | None, size: int) -> list[Span]:
    """The memory of a value that is its own root."""
    if kind in ("param", "constant"):
        return []  # never written
    spans: list[Span] = []
    if offset is not None:
        spans.append((ARENA, offset, offset + aligned(size)))
    if kind != "arena":  # a run may bring memory of its own for inputs and outputs
        spans.append((root, 0, _ALL))
    return spans


def scratch_span(offset: int, size: int) -> Span:
    return (ARENA, offset, offset + size)


def _meet(some: Sequence[Span], others: Sequence[Span]) -> bool:
    for space, start, end in some:
        for other, first, last in others:
            if start < last and first < end and space == other:
                return True
    return False
