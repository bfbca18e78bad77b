"""Work on large arrays by several threads: NumPy computes without holding the interpreter."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import TypeVar

_T = TypeVar("_T")
_SHARE = 1 << 22  # bytes that are worth a thread


def in_runs(
    work: Callable[[_T, int, int], object], items: Iterable[_T], units: int, size: int
) -> None:
    """work(item, first, last) for equal runs of the units of each item; `size` bytes in all."""
    pieces = max(1, min(size // _SHARE, units))
    bounds = [units * i // pieces for i in range(pieces + 1)]
    jobs = [(item, *run) for item in items for run in pairwise(bounds)]
    if pieces == 1:
        for job in jobs:
            work(*job)
        return
    from concurrent.futures import ThreadPoolExecutor  # 5 ms that `import rlx` need not take

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(lambda job: work(*job), jobs):
            pass
