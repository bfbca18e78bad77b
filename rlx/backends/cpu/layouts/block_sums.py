"""The sums of blocks of a weight that products with fewer multiplications read beside it.

A weight lies in panels [P, K, W]. One step of the scheme (`gemm/strassen.py`) takes two panels
as blocks b11, b12 over b21, b22, halves of k, and multiplies sums of them: T1 to T4, which take the
place of two panels. A second step takes the blocks of four panels, those of the first and third
beside those of the second and fourth, and does the same with each of the seven operands of the
first step: seven panels of sums for each four.

Work on large arrays by several threads: NumPy computes without holding the interpreter.
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


def whole_panels(panels: int, steps: int) -> int:
    """Panels of the weight and of its sums, after so many steps."""
    return panels + (panels if steps else 0) + (panels // 4 * 7 if steps > 1 else 0)


def plain_panels(whole: int, steps: int) -> int:
    """Panels of the weight among as many with its sums."""
    return (whole, whole // 2, whole * 4 // 15)[steps]


def add_sums(packed: Array, panels: int, steps: int) -> None:
    """Fill in what follows the first `panels` panels of packed [..., P, K, W]."""
    add = _add_twice if steps > 1 else _add_once
    weights = packed.reshape(-1, *packed.shape[-3:])
    in_runs(lambda w, lo, hi: add(w, panels, lo, hi), weights, panels >> steps, packed.nbytes)


def _add_once(packed: Array, panels: int, first: int, last: int) -> list[Array]:
    """T1 to T4 of pairs of panels; gives the right operands of the seven products, [pairs, K/2, W]
    each."""
    half = packed.shape[1] // 2
    pairs = packed[2 * first : 2 * last].reshape(-1, 4, half, packed.shape[2])
    sums = packed[panels:][2 * first : 2 * last].reshape(pairs.shape)
    b11, b21, b12, b22 = (pairs[:, i] for i in range(4))
    t1, t2, t3, t4 = _sum_blocks((b11, b12, b21, b22), sums)
    return [b11, b21, b22, t4, t1, t2, t3]


def _add_twice(packed: Array, panels: int, first: int, last: int) -> None:
    quarter = packed.shape[1] // 4
    behind = packed[2 * panels :].reshape(-1, 7, 4, quarter, packed.shape[2])[first:last]
    for o, operand in enumerate(_add_once(packed, panels, 2 * first, 2 * last)):
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
