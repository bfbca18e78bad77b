"""What a trace had to know of sizes: it serves only calls that give the same answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import eq, ge, gt, le, lt
from typing import NamedTuple

from rlx.ir.dim import Dim, evaluate

COMPARE: dict[str, Callable[[int, int], bool]] = {"==": eq, "<": lt, "<=": le, ">": gt, ">=": ge}


class Guard(NamedTuple):
    """What had to be known of sizes while a function was traced, and the answer."""

    left: Dim
    comparison: str
    right: Dim
    answer: bool
    where: str  # the user's line
    why: str = "looked at"

    def holds(self, sizes: Mapping[str, int]) -> bool:
        left, right = evaluate(self.left, sizes), evaluate(self.right, sizes)
        return COMPARE[self.comparison](left, right) is self.answer

    def __str__(self) -> str:
        text = f"{self.left} {self.comparison} {self.right}"
        return f"{text if self.answer else f'not {text}'} ({self.why}: {self.where})"
