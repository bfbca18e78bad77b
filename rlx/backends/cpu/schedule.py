"""Where barriers go: a step waits only for steps whose memory it shares."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlx.backends.cpu.lowering import Step
from rlx.ir.lir import Lir, aligned
from rlx.ir.node import Value

Span = tuple[object, int, int]  # a memory space and a byte range in it
_ALL = 1 << 62


def place_barriers(steps: Sequence[Step], lir: Lir) -> list[bool]:
    """For each step, whether all workers must have finished it before the next one begins."""
    after = [False] * len(steps)
    known: dict[Value, list[Span]] = {}
    read: list[Span] = []
    written: list[Span] = []
    for i, step in enumerate(steps):
        reads = _spans(step.reads, lir, known)
        writes = _spans(step.writes, lir, known)
        if step.uses_scratch and step.node is not None and step.node.id in lir.scratch:
            offset, size = lir.scratch[step.node.id]
            writes.append(("arena", offset, offset + size))
        if _meet(reads, written) or _meet(writes, written) or _meet(writes, read):
            after[i - 1] = True
            read, written = [], []
        read += reads
        written += writes
        if step.fence:
            after[i] = True
            read, written = [], []
    return after


def _spans(values: Iterable[Value], lir: Lir, known: dict[Value, list[Span]]) -> list[Span]:
    found: list[Span] = []
    for value in values:
        spans = known.get(value)
        if spans is None:
            spans = known[value] = list(_spans_of(value, lir))
        found += spans
    return found


def _spans_of(value: Value, lir: Lir) -> Iterable[Span]:
    root, slot = lir.home(value)
    if slot.kind in ("param", "constant"):
        return  # never written
    if slot.offset is not None:
        yield ("arena", slot.offset, slot.offset + aligned(slot.size))
    if slot.kind != "arena":  # a run may bring memory of its own for inputs and outputs
        yield (root, 0, _ALL)


def _meet(some: Sequence[Span], others: Sequence[Span]) -> bool:
    for space, start, end in some:
        for other, first, last in others:
            if start < last and first < end and space == other:
                return True
    return False
