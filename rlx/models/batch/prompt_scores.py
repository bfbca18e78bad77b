"""Log probabilities of the tokens of a prompt, given those before them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class PromptScores:
    """Takes the logits of a prompt as they come, a chunk after the other."""

    def __init__(self, prompt: Sequence[int], count: int, found: list[dict[int, float]]) -> None:
        """`found` gets a row for each token but the first: the `count` likeliest, and itself."""
        self._prompt, self._count, self._found = prompt, count, found
        self._done = 0

    @property
    def is_due(self) -> bool:
        """Whether there are tokens left to score."""
        return self._done < len(self._prompt)

    def add(self, logits: Any) -> None:
        """The logits [n, vocab] after the next n tokens. Those after the last one are of no use."""
        start, self._done = self._done + 1, self._done + len(logits)
        for token, row in zip(self._prompt[start : self._done + 1], logits, strict=False):
            self._found.append(_scored(row, token, self._count))


def _scored(logits: Any, token: int, count: int) -> dict[int, float]:
    """As `top_logprobs`, which is slower by several passes over all of the vocabulary in f64."""
    top = logits.max()
    total = float(top) + float(np.log(np.exp(logits - top).sum(dtype=np.float64)))
    if count == 1:
        best = [int(logits.argmax())]
    else:
        many = min(count, len(logits))
        best = np.argpartition(-logits, many - 1)[:many].tolist() if many else []
        best.sort(key=lambda t: -logits[t])
    return {t: float(logits[t]) - total for t in [*best, token]}
