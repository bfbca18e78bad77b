"""Profiles and timelines of runs: a row per launch, a row per kernel, a slice per worker.

`Executable.recording()` records the runs inside it. `profile()` is their median, `slices()` the
timeline.
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
    """The time of one launch, over all workers."""

    label: str  # the kernel
    node: str  # the node it computes
    block: str  # the block that the node came from
    seconds: float
    flops: int
    bytes: int
    calls: int = 1  # iterations of a launch in a loop; 0: it was jumped over


@dataclass(frozen=True)
class KernelTime:
    """The time of all launches of one kernel."""

    kernel: str
    blocks: tuple[str, ...]  # that it is used by, numbers replaced: blk.*.rope
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
        """The blocks, shortened."""
        more = len(self.blocks) - _MOST_BLOCKS
        shown = ", ".join(self.blocks[:_MOST_BLOCKS])
        return f"{shown} and {more} more" if more > 0 else shown


@dataclass(frozen=True)
class Slice:
    """A time interval of one worker, in seconds of a clock that all runs share."""

    run: int
    worker: int
    label: str  # the kernel, or WAIT
    node: str
    block: str
    begin: float
    end: float


WAIT = "wait"
"""The label of a slice in which a worker waits at a barrier."""


@dataclass(frozen=True)
class Profile:
    """Timings of one run (the median of several), in schedule order."""

    rows: tuple[Timing, ...]
    elapsed: float = 0.0  # from the begin of the first launch to the end of the last

    @property
    def seconds(self) -> float:
        """The time spent in launches."""
        return sum(r.seconds for r in self.rows)

    @property
    def waiting(self) -> float:
        """The time spent at barriers."""
        return max(0.0, self.elapsed - self.seconds)

    def by_kernel(self) -> list[KernelTime]:
        """Kernels, the most expensive first."""
        table: dict[str, list[Timing]] = {}
        for row in self.rows:
            table.setdefault(row.label, []).append(row)
        found = [_sum(label, rows) for label, rows in table.items()]
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
    """The recorded runs of an executable."""

    @abstractmethod
    def profile(self) -> Profile:
        """For each launch the median of all runs; flops and bytes are those of the middle run."""

    @abstractmethod
    def slices(self) -> list[Slice]:
        """The timeline of every worker, run by run."""


def _sum(label: str, rows: Sequence[Timing]) -> KernelTime:
    return KernelTime(
        label,
        tuple(dict.fromkeys(block_pattern(r.block) for r in rows if r.block)),
        sum(r.calls for r in rows),
        sum(r.seconds for r in rows),
        sum(r.flops for r in rows),
        sum(r.bytes for r in rows),
    )


def block_pattern(block: str) -> str:
    """`blk.7.rope` as `blk.*.rope`: all layers of a model together."""
    return _NUMBER.sub("*", block)


def median_of(values: Iterable[float]) -> float:
    """The upper median; 0 if there are no values."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else 0.0
