"""Where the time of a run goes: a row per kernel and node, with bytes and flops per second."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """One step, over all its workers."""

    label: str  # the kernel
    node: str  # what it computes
    block: str  # where that came from
    seconds: float
    flops: int
    bytes: int


@dataclass(frozen=True)
class Profile:
    """Timings of one run (the median of several), in schedule order."""

    rows: tuple[Timing, ...]

    @property
    def seconds(self) -> float:
        return sum(r.seconds for r in self.rows)

    def by_kernel(self) -> list[tuple[str, int, float, int, int]]:
        """(kernel, calls, seconds, flops, bytes), the costliest first."""
        table: dict[str, list[Timing]] = {}
        for row in self.rows:
            table.setdefault(row.label, []).append(row)
        found = [
            (
                label,
                len(rows),
                sum(r.seconds for r in rows),
                sum(r.flops for r in rows),
                sum(r.bytes for r in rows),
            )
            for label, rows in table.items()
        ]
        return sorted(found, key=lambda r: -r[2])

    def __str__(self) -> str:
        total = self.seconds or 1e-30
        lines = ["kernel                    calls        time   share     GB/s   GFLOP/s"]
        for label, calls, seconds, flops, moved in self.by_kernel():
            spent = seconds or 1e-30
            lines.append(
                f"{label[:24]:24} {calls:6d} {seconds * 1e6:9.1f} µs {100 * seconds / total:6.1f}% "
                f"{moved / spent / 1e9:8.1f} {flops / spent / 1e9:9.1f}"
            )
        lines.append(f"{'total':24} {len(self.rows):6d} {self.seconds * 1e6:9.1f} µs")
        return "\n".join(lines)


def median_profile(profiles: Iterable[Profile]) -> Profile:
    """Row by row the median time of several runs of one program."""
    runs = list(profiles)
    rows = []
    for same in zip(*(p.rows for p in runs), strict=True):
        times = sorted(r.seconds for r in same)
        first = same[0]
        middle = times[len(times) // 2]
        rows.append(Timing(first.label, first.node, first.block, middle, first.flops, first.bytes))
    return Profile(tuple(rows))
