"""The table of a profile: a row for each kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlx.backends.timing import Profile

HEADER = ("kernel", "calls", "time", "share", "MB", "GB/s", "GFLOP/s", "block")


def kernel_rows(profile: Profile) -> list[tuple[object, ...]]:
    """A row per kernel, and the time at barriers."""
    total = profile.seconds + profile.waiting
    rows: list[tuple[object, ...]] = [
        (
            k.kernel, k.calls, _time(k.seconds), f"{k.seconds / total:.1%}",
            f"{k.bytes / 1e6:.2f}", f"{k.gb_per_second:.1f}", f"{k.gflop_per_second:.1f}",
            k.serves,
        )
        for k in profile.by_kernel()
        if k.calls
    ]  # fmt: skip
    waiting = ("at barriers", "", _time(profile.waiting), f"{profile.waiting / total:.1%}")
    return [*rows, (*waiting, "", "", "", "")]


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs"
