"""Guessing tokens ahead: one run checks several guesses, and keeps those that were right.

The model draws a token after each guess, exactly as it would one by one: with the same random
numbers from the same logits. As long as it draws what was guessed, the next draw stands. So an
answer has the tokens it would have without guesses, and costs fewer runs where guesses are good.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.errors import OptionError, UnsupportedError
from rlx.models.decoder_runner import Engine

_LONGEST, _SHORTEST = 4, 2  # tokens that must be equal for a guess


class Guesser(ABC):
    """Guesses `count` tokens for an engine to check."""

    def __init__(self, engine: Engine, count: int) -> None:
        if engine.model.config.recurrent is not None:
            raise UnsupportedError(
                "wrong guesses cannot be taken back from a recurrent state",
                where=engine.model.config.arch, hint="generate without speculate= and draft=",
            )  # fmt: skip
        self.engine, self.count = engine, count

    def guess(self, seen: Sequence[int], rng: Any, settings: Any) -> list[int]:
        """As many tokens as are checked in one run, or none; `rng` is that of the next draw."""
        if len(self.engine.tokens) + 1 + self.count > self.engine.context:
            return []
        found = self.find(seen, rng, settings)
        return found + [0] * (self.count - len(found)) if found else []

    @abstractmethod
    def find(self, seen: Sequence[int], rng: Any, settings: Any) -> list[int]:
        """Up to `count` tokens that may come after `seen`."""


class Lookup(Guesser):
    """What came after the last tokens when they came before, in prompt or answer."""

    def __init__(self, engine: Engine, count: int) -> None:
        super().__init__(engine, count)
        self._ends: dict[tuple[int, ...], int] = {}  # some tokens, and where they ended last
        self._known = _SHORTEST

    def find(self, seen: Sequence[int], rng: Any, settings: Any) -> list[int]:
        for end in range(self._known, len(seen)):
            for size in range(_SHORTEST, min(_LONGEST, end) + 1):
                self._ends[tuple(seen[end - size : end])] = end
        self._known = max(self._known, len(seen))
        for size in range(min(_LONGEST, len(seen)), _SHORTEST - 1, -1):
            at = self._ends.get(tuple(seen[len(seen) - size :]))
            if at is not None:
                return list(seen[at : at + self.count])
        return []


class Draft(Guesser):
    """A smaller model of the same vocabulary, which draws with the same random numbers."""

    def __init__(self, engine: Engine, count: int, smaller: Engine) -> None:
        super().__init__(engine, count)
        self.smaller = smaller

    def find(self, seen: Sequence[int], rng: Any, settings: Any) -> list[int]:
        engine, found = self.smaller, list[int]()
        if len(seen) + self.count > engine.context:
            return found
        with engine.lock:
            pending = list(seen[engine.keep(seen) :])
            for _ in range(self.count):
                token, rng = engine.feed(pending, rng, settings)
                found.append(token)
                pending = [token]
        return found


def check_draft(model: Engine, draft: Engine) -> None:
    """Raise where two models do not speak of the same tokens."""
    ours, theirs = model.model.config.vocab, draft.model.config.vocab
    if ours != theirs:
        raise OptionError(
            "a draft model needs the same vocabulary", where="draft", got=f"{theirs} tokens",
            expected=f"{ours} tokens",
        )  # fmt: skip


def draw_with_guesses(
    engine: Engine, token: int, guesses: Sequence[int], rng: Any, settings: Any
) -> tuple[list[int], Any]:
    """The tokens that come after `token`: one at least, and one more for every right guess."""
    drawn = engine.check_guesses([token, *guesses], rng, settings)
    right = 0
    while right < len(guesses) and guesses[right] == drawn[right]:
        right += 1
    engine.tokens += [token, *guesses[:right]]
    seed, counter = (int(n) for n in rng)
    return drawn[: right + 1], np.array([seed, counter + right + 1], np.uint64)
