"""Where barriers go: between launches that depend on each other through memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    accessed = _accessed_ranges(accesses, variant)
    after = [False] * len(accesses)
    begin = 0  # the first launch after the last barrier
    for i, access in enumerate(accesses):
        waits = dependencies is not None and dependencies[i] >= begin
        if waits or _must_wait(i, begin, accessed, accesses):
            after[i - 1] = True
            begin = i
        if access.fence:
            after[i] = True
            begin = i + 1
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


def _must_wait(
    launch: int, begin: int, accessed: Callable[[int], AccessedRanges], accesses: Sequence[Accesses]
) -> bool:
    if launch == begin:
        return False
    own, solo = accessed(launch), accesses[launch].solo
    for earlier in range(begin, launch):
        if solo and accesses[earlier].solo:
            continue  # worker 0 runs both, in order
        reads, writes = accessed(earlier)
        if (
            _overlap(own.reads, writes)
            or _overlap(own.writes, writes)
            or _overlap(own.writes, reads)
        ):
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


def _overlap(some: Sequence[MemoryRange], others: Sequence[MemoryRange]) -> bool:
    for space, start, end in some:
        for other, first, last in others:
            if start < last and first < end and space == other:
                return True
    return False
