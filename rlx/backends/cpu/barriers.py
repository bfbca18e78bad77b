"""Where barriers go: a launch waits only for launches whose memory it shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rlx.backends.cpu.lowering import KernelLaunch
from rlx.ir.lir import Lir, aligned
from rlx.passes.plan import Variant

Span = tuple[object, int, int]  # a memory space and a byte range in it
_ALL = 1 << 62
_ARENA = "arena"


class Uses(NamedTuple):
    """Memory that a launch touches: roots by value number, and the node whose scratch it uses."""

    reads: Sequence[int]
    writes: Sequence[int]
    scratch: int  # −1: none
    solo: bool  # run by one worker
    fence: bool  # a barrier follows in any case


class Touched(NamedTuple):
    """The byte ranges a launch reads and writes."""

    reads: list[Span]
    writes: list[Span]


def barriers_of(launches: Sequence[KernelLaunch], lir: Lir) -> list[bool]:
    """For each launch of a planned graph, whether a barrier follows it."""
    variant = Variant.of(lir)
    numbers, roots = variant.value_numbers, variant.roots
    uses = []
    for s in launches:
        reads, writes = ([roots[numbers[v]] for v in vs] for vs in (s.reads, s.writes))
        scratch = s.node.id if s.uses_scratch and s.node is not None else -1
        uses.append(Uses(reads, writes, scratch, s.solo, s.fence))
    return place_barriers(uses, variant)


def place_barriers(
    uses: Sequence[Uses], variant: Variant, certain: Sequence[int] | None = None
) -> list[bool]:
    """For each launch, whether all workers must have finished it before the next one begins.
    `certain` are the `certain_waits`, where they are known."""
    touched = _ranges(uses, variant)
    after = [False] * len(uses)
    begin = 0  # the first launch behind the last barrier
    for i, use in enumerate(uses):
        waits = certain is not None and certain[i] >= begin
        if waits or _must_wait(i, begin, touched, uses):
            after[i - 1] = True
            begin = i
        if use.fence:
            after[i] = True
            begin = i + 1
    return after


def certain_waits(uses: Sequence[Uses]) -> list[int]:
    """For each launch, the last before it that wrote what it touches or read what it writes,
    whatever the offsets; −1: none. Launches of one worker do not wait for each other."""
    read: list[dict[int, int]] = [{}, {}]  # by all workers, by one alone
    written: list[dict[int, int]] = [{}, {}]
    waits = []
    for i, (reads, writes, _, solo, _) in enumerate(uses):
        last = -1
        for alone in range(1 if solo else 2):
            for root in (*reads, *writes):
                last = max(last, written[alone].get(root, -1))
            for root in writes:
                last = max(last, read[alone].get(root, -1))
        waits.append(last)
        read[solo] |= dict.fromkeys(reads, i)
        written[solo] |= dict.fromkeys(writes, i)
    return waits


def _must_wait(
    launch: int, begin: int, touched: Callable[[int], Touched], uses: Sequence[Uses]
) -> bool:
    if launch == begin:
        return False
    own, alone = touched(launch), uses[launch].solo
    for earlier in range(begin, launch):
        if alone and uses[earlier].solo:
            continue  # the same worker does both
        reads, writes = touched(earlier)
        if _meet(own.reads, writes) or _meet(own.writes, writes) or _meet(own.writes, reads):
            return True
    return False


def _ranges(uses: Sequence[Uses], variant: Variant) -> Callable[[int], Touched]:
    """The byte ranges of each launch, found when they are asked for."""
    known: dict[int, list[Span]] = {}
    found: dict[int, Touched] = {}

    def spans(roots: Sequence[int]) -> list[Span]:
        made: list[Span] = []
        for root in roots:
            if root not in known:
                known[root] = _value_spans(root, variant)
            made += known[root]
        return made

    def touched(launch: int) -> Touched:
        if launch not in found:
            reads, writes, node, _, _ = uses[launch]
            made = found[launch] = Touched(spans(reads), spans(writes))
            if node in variant.scratch:
                offset, size = variant.scratch[node]
                made.writes.append((_ARENA, offset, offset + size))
        return found[launch]

    return touched


def _value_spans(root: int, variant: Variant) -> list[Span]:
    """The memory of a value that is its own root."""
    kind, offset = variant.slot_kinds[root], variant.offsets[root]
    if kind in ("param", "constant"):
        return []  # never written
    spans: list[Span] = []
    if offset is not None:
        spans.append((_ARENA, offset, offset + aligned(variant.sizes[root])))
    if kind != "arena":  # a run may bring memory of its own for inputs and outputs
        spans.append((root, 0, _ALL))
    return spans


def _meet(some: Sequence[Span], others: Sequence[Span]) -> bool:
    for space, start, end in some:
        for other, first, last in others:
            if start < last and first < end and space == other:
                return True
    return False
