"""Where the time of runs goes: a row per step, a record per kernel, and what each worker did when.

An executable's `recording()` watches the runs inside it. Its `profile()` is the median of them,
its `slices()` are the timeline.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from rlx.support.records import dataclass

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_MOST_BLOCKS = 3


@dataclass(frozen=True)
class Timing:
    """One step, over all its workers."""

    label: str  # the kernel
    node: str  # what it computes
    block: str  # where that came from
    seconds: float
    flops: int
    bytes: int
    calls: int = 1  # rounds of a step in a loop; 0: it was jumped over


@dataclass(frozen=True)
class KernelTime:
    """All steps of one kernel."""

    kernel: str
    blocks: tuple[str, ...]  # what it serves, blocks that differ in a number once: blk.*.rope
    calls: int
    seconds: float
    flops: int
    bytes: int

    @property
    def gb_per_second(self) -> float:
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0

    @property
    def gflop_per_second(self) -> float:
        return self.flops / self.seconds / 1e9 if self.seconds else 0.0

    @property
    def serves(self) -> str:
        """The blocks in a few words."""
        more = len(self.blocks) - _MOST_BLOCKS
        shown = ", ".join(self.blocks[:_MOST_BLOCKS])
        return f"{shown} and {more} more" if more > 0 else shown


@dataclass(frozen=True)
class Slice:
    """What a worker did from one moment to another, in seconds of a clock that all runs share."""

    run: int
    worker: int
    label: str  # the kernel, or WAIT
    node: str
    block: str
    begin: float
    end: float


WAIT = "wait"
"""The label of a slice in which a worker waits for others."""


@dataclass(frozen=True)
class Profile:
    """Timings of one run (the median of several), in schedule order."""

    rows: tuple[Timing, ...]
    elapsed: float = 0.0  # from the begin of the first step to the end of the last

    @property
    def seconds(self) -> float:
        """The time that belongs to steps."""
        return sum(r.seconds for r in self.rows)

    @property
    def waiting(self) -> float:
        """Time at barriers, where workers wait for each other."""
        return max(0.0, self.elapsed - self.seconds)

    def by_kernel(self) -> list[KernelTime]:
        """The costliest first."""
        table: dict[str, list[Timing]] = {}
        for row in self.rows:
            table.setdefault(row.label, []).append(row)
        found = [_together(label, rows) for label, rows in table.items()]
        return sorted(found, key=lambda k: -k.seconds)

    def __str__(self) -> str:
        total = self.seconds + self.waiting or 1e-30
        lines = ["kernel                    calls        time   share     GB/s   GFLOP/s"]
        for k in self.by_kernel():
            lines.append(
                f"{k.kernel[:24]:24} {k.calls:6d} {k.seconds * 1e6:9.1f} µs "
                f"{100 * k.seconds / total:6.1f}% {k.gb_per_second:8.1f} {k.gflop_per_second:9.1f}"
            )
        if self.waiting:
            spent = f"{self.waiting * 1e6:9.1f} µs {100 * self.waiting / total:6.1f}%"
            lines.append(f"{'at barriers':24} {'':6} {spent}")
        lines.append(f"{'total':24} {len(self.rows):6d} {total * 1e6:9.1f} µs")
        return "\n".join(lines)


class Recording(ABC):
    """The runs of an executable while it was watched."""

    @abstractmethod
    def profile(self) -> Profile:
        """Step by step the median of all runs; costs are those of the run in the middle."""

    @abstractmethod
    def slices(self) -> list[Slice]:
        """What every worker did, run by run."""


def _together(label: str, rows: Sequence[Timing]) -> KernelTime:
    return KernelTime(
        label,
        tuple(dict.fromkeys(block_pattern(r.block) for r in rows if r.block)),
        sum(r.calls for r in rows),
        sum(r.seconds for r in rows),
        sum(r.flops for r in rows),
        sum(r.bytes for r in rows),
    )


def block_pattern(block: str) -> str:
    """`blk.7.rope` as `blk.*.rope`: the layers of a model are alike."""
    return _NUMBER.sub("*", block)


def median_of(values: Iterable[float]) -> float:
    """The upper median; 0 of nothing."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else 0.0
