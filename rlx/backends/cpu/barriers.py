"""Where barriers go: between launches that depend on each other through memory."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from rlx.backends.cpu.lowering import KernelLaunch
from rlx.ir.lir import Lir, aligned
from rlx.passes.plan import Variant

MemoryRange = tuple[object, int, int]  # a memory space and a byte range in it
_ALL = 1 << 62
_ARENA = "arena"


class Accesses(NamedTuple):
    """Memory that a launch accesses: root values by number, and the node of its scratch memory."""

    reads: Sequence[int]
    writes: Sequence[int]
    scratch: int  # −1: none
    solo: bool  # run by worker 0 alone
    fence: bool  # always followed by a barrier


class AccessedRanges(NamedTuple):
    """The byte ranges a launch reads and writes."""

    reads: list[MemoryRange]
    writes: list[MemoryRange]


def barriers_of(launches: Sequence[KernelLaunch], lir: Lir) -> list[bool]:
    """For each launch of a planned graph, whether a barrier follows it."""
    variant = Variant.of(lir)
    numbers, roots = variant.value_numbers, variant.roots
    accesses = []
    for s in launches:
        reads, writes = ([roots[numbers[v]] for v in vs] for vs in (s.reads, s.writes))
        scratch = s.node.id if s.uses_scratch and s.node is not None else -1
        accesses.append(Accesses(reads, writes, scratch, s.solo, s.fence))
    return insert_barriers(accesses, variant)


def insert_barriers(
    accesses: Sequence[Accesses], variant: Variant, dependencies: Sequence[int] | None = None
) -> list[bool]:
    """For each launch, whether all workers must have finished it before the next one begins.
    `dependencies` are the `data_dependencies`, if they were computed before."""
    window = _Window(accesses, _accessed_ranges(accesses, variant))
    after = [False] * len(accesses)
    for i, access in enumerate(accesses):
        waits = dependencies is not None and dependencies[i] >= window.begin
        if waits or window.conflicts(i):
            after[i - 1] = True
            window.restart(i)
        if access.fence:
            after[i] = True
            window.restart(i + 1)
    return after


def data_dependencies(accesses: Sequence[Accesses]) -> list[int]:
    """For each launch, the last earlier one that it depends on by a value (read after write, write
    after read or write), whatever the arena offsets; −1: none. Solo launches run in order on one
    worker and need no barrier between them."""
    read: list[dict[int, int]] = [{}, {}]  # by all workers; by solo launches
    written: list[dict[int, int]] = [{}, {}]
    waits = []
    for i, (reads, writes, _, solo, _) in enumerate(accesses):
        last = -1
        for by_solo in range(1 if solo else 2):
            for root in (*reads, *writes):
                last = max(last, written[by_solo].get(root, -1))
            for root in writes:
                last = max(last, read[by_solo].get(root, -1))
        waits.append(last)
        read[solo] |= dict.fromkeys(reads, i)
        written[solo] |= dict.fromkeys(writes, i)
    return waits


class _Window:
    """The launches since the last barrier, and the memory they access."""

    def __init__(
        self, accesses: Sequence[Accesses], accessed: Callable[[int], AccessedRanges]
    ) -> None:
        self.accesses, self.accessed = accesses, accessed
        self.restart(0)

    def restart(self, begin: int) -> None:
        self.begin = self.end = begin  # launches from `begin` to `end` are counted in
        self.reads = (_RangeSet(), _RangeSet())  # by all workers; by solo launches
        self.writes = (_RangeSet(), _RangeSet())

    def conflicts(self, launch: int) -> bool:
        """Whether `launch` must not run at the same time as those of the window."""
        if launch == self.begin:
            return False
        for earlier in range(self.end, launch):
            by_solo = self.accesses[earlier].solo
            reads, writes = self.accessed(earlier)
            self.reads[by_solo].add(reads)
            self.writes[by_solo].add(writes)
        self.end = launch
        own = self.accessed(launch)
        # worker 0 runs solo launches in order: they do not wait for each other
        for solo in (False,) if self.accesses[launch].solo else (False, True):
            if (
                self.writes[solo].overlaps(own.reads)
                or self.writes[solo].overlaps(own.writes)
                or self.reads[solo].overlaps(own.writes)
            ):
                return True
        return False


class _RangeSet:
    """A union of byte ranges in each memory space: sorted, disjoint, searched by bisection."""

    def __init__(self) -> None:
        self.bounds: dict[object, tuple[list[int], list[int]]] = {}  # starts and ends

    def add(self, ranges: Iterable[MemoryRange]) -> None:
        for space, start, end in ranges:
            starts, ends = self.bounds.setdefault(space, ([], []))
            first, last = bisect_left(ends, start), bisect_right(starts, end)
            if first < last:  # merged with those it touches
                start, end = min(start, starts[first]), max(end, ends[last - 1])
            starts[first:last], ends[first:last] = [start], [end]

    def overlaps(self, ranges: Iterable[MemoryRange]) -> bool:
        for space, start, end in ranges:
            found = self.bounds.get(space)
            if found is not None:
                at = bisect_right(found[1], start)
                if at < len(found[0]) and found[0][at] < end:
                    return True
        return False


def _accessed_ranges(
    accesses: Sequence[Accesses], variant: Variant
) -> Callable[[int], AccessedRanges]:
    """The byte ranges of each launch, computed on demand."""
    known: dict[int, list[MemoryRange]] = {}
    found: dict[int, AccessedRanges] = {}

    def ranges(roots: Sequence[int]) -> list[MemoryRange]:
        merged: list[MemoryRange] = []
        for root in roots:
            if root not in known:
                known[root] = _value_ranges(root, variant)
            merged += known[root]
        return merged

    def accessed(launch: int) -> AccessedRanges:
        if launch not in found:
            reads, writes, node, _, _ = accesses[launch]
            new = found[launch] = AccessedRanges(ranges(reads), ranges(writes))
            if node in variant.scratch:
                offset, size = variant.scratch[node]
                new.writes.append((_ARENA, offset, offset + size))
        return found[launch]

    return accessed


def _value_ranges(root: int, variant: Variant) -> list[MemoryRange]:
    """The memory of a value that is its own root."""
    kind, offset = variant.slot_kinds[root], variant.offsets[root]
    if kind in ("param", "constant"):
        return []  # never written
    ranges: list[MemoryRange] = []
    if offset is not None:
        ranges.append((_ARENA, offset, offset + aligned(variant.sizes[root])))
    if kind != "arena":  # inputs and outputs may be buffers of the caller
        ranges.append((root, 0, _ALL))
    return ranges
