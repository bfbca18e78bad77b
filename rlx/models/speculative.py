"""Speculative decoding: one run verifies several draft tokens, and keeps those that were right.

The model draws a token after each draft token, with the random numbers and logits it would have one
by one. As long as a draw equals the draft, the next draw stands. So the tokens are those of plain
decoding, in fewer runs where drafts are good.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.errors import OptionError, UnsupportedError
from rlx.models.decoder_runner import DecoderRunner

_LONGEST, _SHORTEST = 4, 2  # tokens of an n-gram that a draft follows


class Drafter(ABC):
    """Drafts `count` tokens for a model to verify."""

    def __init__(self, runner: DecoderRunner, count: int) -> None:
        if runner.model.config.recurrent is not None:
            raise UnsupportedError(
                "speculative decoding needs a KV cache; a recurrent state cannot be rewound",
                where=runner.model.config.arch, hint="generate without speculate= and draft=",
            )  # fmt: skip
        self.runner, self.count = runner, count

    def draft(self, seen: Sequence[int], rng: Any, settings: Any) -> list[int]:
        """`count` tokens, or none; `rng` is that of the next draw."""
        if len(self.runner.tokens) + 1 + self.count > self.runner.context:
            return []
        found = self.find(seen, rng, settings)
        return found + [0] * (self.count - len(found)) if found else []

    @abstractmethod
    def find(self, seen: Sequence[int], rng: Any, settings: Any) -> list[int]:
        """Up to `count` tokens that may follow `seen`."""


class NgramTable:
    """What followed the last n-gram earlier in prompt or output."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}  # n-gram → where it ended last
        self._known = _SHORTEST

    def find(self, seen: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens that may follow `seen`, which only grows from call to call."""
        for end in range(self._known, len(seen)):
            for size in range(_SHORTEST, min(_LONGEST, end) + 1):
                self._ends[tuple(seen[end - size : end])] = end
        self._known = max(self._known, len(seen))
        for size in range(min(_LONGEST, len(seen)), _SHORTEST - 1, -1):
            at = self._ends.get(tuple(seen[len(seen) - size :]))
            if at is not None:
                return list(seen[at : at + count])
        return []


class PromptLookup(Drafter):
    """Prompt lookup: drafts of a table of n-grams."""

    def __init__(self, runner: DecoderRunner, count: int) -> None:
        super().__init__(runner, count)
        self._table = NgramTable()

    def find(self, seen: Sequence[int], rng: Any, settings: Any) -> list[int]:
        return self._table.find(seen, self.count)


class DraftModel(Drafter):
    """A smaller model of the same vocabulary, which draws with the same random numbers."""

    def __init__(self, runner: DecoderRunner, count: int, smaller: DecoderRunner) -> None:
        super().__init__(runner, count)
        self.smaller = smaller

    def find(self, seen: Sequence[int], rng: Any, settings: Any) -> list[int]:
        runner, found = self.smaller, list[int]()
        if len(seen) + self.count > runner.context:
            return found
        with runner.lock:
            pending = list(seen[runner.reuse_prefix(seen) :])
            for _ in range(self.count):
                token, rng = runner.step(pending, rng, settings)
                found.append(token)
                pending = [token]
        return found


def check_draft_model(model: DecoderRunner, draft: DecoderRunner) -> None:
    """Raise unless both models have one vocabulary."""
    ours, theirs = model.model.config.vocab, draft.model.config.vocab
    if ours != theirs:
        raise OptionError(
            "a draft model needs the same vocabulary", where="draft", got=f"{theirs} tokens",
            expected=f"{ours} tokens",
        )  # fmt: skip


def decode_draft(
    runner: DecoderRunner, token: int, draft: Sequence[int], rng: Any, settings: Any
) -> tuple[list[int], Any]:
    """Decode after `token`: one token at least, and one more for every accepted draft token.

    Returns the tokens and the new RNG state."""
    draft = draft[: runner.before_switch() - 1]
    if not draft:
        return runner.decode_n(token, rng, settings, 1, ())
    drawn = runner.verify_draft([token, *draft], rng, settings)
    accepted = 0
    while accepted < len(draft) and draft[accepted] == drawn[accepted]:
        accepted += 1
    runner.tokens += [token, *draft[:accepted]]
    seed, counter = (int(n) for n in rng)
    return drawn[: accepted + 1], np.array([seed, counter + accepted + 1], np.uint64)
