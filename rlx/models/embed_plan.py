"""Texts to be embedded: their tokens, how they run, and what becomes of their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rlx.support.records import dataclass

Vectors = Any  # f32 [texts, width]
Rows = Iterator[tuple[Sequence[int], Vectors]]  # indices of texts, and the rows of these


@dataclass(frozen=True)
class EmbedPlan:
    """Texts of plans with equal keys may run together, through `run` of any of them: a row depends
    on its own text alone. Texts without tokens are not run: their rows are zeros."""

    key: str
    tokens: Sequence[Any]  # of each text; their number is its len()
    width: int  # of a row
    run: Callable[[Sequence[Any]], Rows]
    finish: Callable[[Vectors], Vectors]  # all rows of the plan, in order; raises for bad ones
