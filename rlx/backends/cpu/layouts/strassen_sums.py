"""The sums of weight blocks that Strassen's algorithm reads, packed after the weight's panels.

A weight lies in panels [P, K, W]. One level (`gemm/strassen.py`) takes two panels as blocks b11,
b12 over b21, b22 (halves of k) and needs the sums T1 to T4, which take the space of two panels. A
second level takes the blocks of four panels (the first and third, the second and fourth) and does
the same with each of the seven right operands of the first level: seven panels of sums for every
four.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import TypeVar

import numpy as np

from rlx.ir.op import Array
from rlx.ir.ops._common import quiet

_T = TypeVar("_T")
_BYTES_PER_THREAD = 1 << 22  # worth starting a thread for


def parallel_ranges(
    work: Callable[[_T, int, int], object], items: Iterable[_T], units: int, size: int
) -> None:
    """work(item, first, last) over equal ranges of each item's units, threaded if `size` is large.

    NumPy releases the interpreter lock while it computes.
    """
    parts = max(1, min(size // _BYTES_PER_THREAD, units))
    bounds = [units * i // parts for i in range(parts + 1)]
    jobs = [(item, *run) for item in items for run in pairwise(bounds)]
    if parts == 1:
        for job in jobs:
            work(*job)
        return
    from concurrent.futures import ThreadPoolExecutor  # 5 ms that `import rlx` need not take

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(lambda job: work(*job), jobs):
            pass


def whole_panels(panels: int, levels: int) -> int:
    """Panels of a weight of `panels` panels together with its sums."""
    return panels + (panels if levels else 0) + (panels // 4 * 7 if levels > 1 else 0)


def plain_panels(whole: int, levels: int) -> int:
    """Panels of the weight alone, the inverse of `whole_panels`."""
    return (whole, whole // 2, whole * 4 // 15)[levels]


def add_sums(packed: Array, panels: int, levels: int) -> None:
    """Write the sums after the first `panels` panels of packed [..., P, K, W]."""
    add = _add_two_levels if levels > 1 else _add_level
    weights = packed.reshape(-1, *packed.shape[-3:])
    parallel_ranges(
        lambda w, lo, hi: add(w, panels, lo, hi), weights, panels >> levels, packed.nbytes
    )


def _add_level(packed: Array, panels: int, first: int, last: int) -> list[Array]:
    """T1 to T4 of pairs of panels; returns the right operands of P1 to P7, [pairs, K/2, W] each."""
    half = packed.shape[1] // 2
    pairs = packed[2 * first : 2 * last].reshape(-1, 4, half, packed.shape[2])
    sums = packed[panels:][2 * first : 2 * last].reshape(pairs.shape)
    b11, b21, b12, b22 = (pairs[:, i] for i in range(4))
    t1, t2, t3, t4 = _sum_blocks((b11, b12, b21, b22), sums)
    return [b11, b21, b22, t4, t1, t2, t3]


def _add_two_levels(packed: Array, panels: int, first: int, last: int) -> None:
    quarter = packed.shape[1] // 4
    behind = packed[2 * panels :].reshape(-1, 7, 4, quarter, packed.shape[2])[first:last]
    for o, operand in enumerate(_add_level(packed, panels, 2 * first, 2 * last)):
        (b11, b21), (b12, b22) = (
            (operand[i::2, :quarter], operand[i::2, quarter:]) for i in range(2)
        )
        _sum_blocks((b11, b12, b21, b22), behind[:, o])


def _sum_blocks(blocks: tuple[Array, Array, Array, Array], out: Array) -> list[Array]:
    """T1 to T4 into out [blocks, 4, ...]."""
    b11, b12, b21, b22 = blocks
    t1, t2, t3, t4 = (out[:, i] for i in range(4))
    with quiet():
        np.subtract(b12, b11, out=t1)
        np.subtract(b22, t1, out=t2)
        np.subtract(b22, b12, out=t3)
        np.subtract(b21, t2, out=t4)
    return [t1, t2, t3, t4]
