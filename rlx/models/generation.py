"""An answer as its tokens arrive: text, the reasons to end, what it took."""

from __future__ import annotations

import time
from dataclasses import field
from typing import Any

import numpy as np

from rlx.formats.tokenizer import Tokenizer
from rlx.models.sampling import GenerationSettings
from rlx.models.stops import StopWatch
from rlx.records import dataclass

MOMENT = 0.1
"""Seconds of tokens that are drawn at once: a reader sees them as one, and Python costs less."""


@dataclass
class Generation:
    """A finished answer: text, tokens, why it ended, what it took."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: str = ""  # stop, length, cancelled
    prompt_tokens: int = 0
    reused_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    logprobs: list[dict[int, float]] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        steps = len(self.tokens) - 1
        return steps / self.decode_seconds if steps > 0 and self.decode_seconds else 0.0

    def __str__(self) -> str:
        return self.text


class Answer:
    """Fills a Generation token by token. It has ended once there is a `finish_reason`."""

    def __init__(
        self, tokenizer: Tokenizer, settings: GenerationSettings, result: Generation
    ) -> None:
        self.settings, self.result = settings, result
        self._decoder = tokenizer.stream()
        self._watch = StopWatch(settings.stop)
        self.ends = tokenizer.end_ids | settings.stop_tokens
        self._clock = time.perf_counter()

    @property
    def ended(self) -> bool:
        return bool(self.result.finish_reason)

    @property
    def burst(self) -> int:
        """How many tokens to draw before anybody looks at them: one at first, and then as many as
        take a moment."""
        result = self.result
        steps = len(result.tokens) - 1
        most = round(MOMENT * steps / result.decode_seconds) if steps > 0 else 1
        return max(1, min(most, self.settings.max_tokens - len(result.tokens)))

    def push(self, token: int, logits: Any = None) -> str:
        """The text that a token adds, and the rest of it when the answer ends with it."""
        result = self.result
        self._count_time()
        if token in self.ends:
            return self.end("stop")
        if self.settings.logprobs:
            found = top_logprobs(logits.reshape(-1), token, self.settings.logprobs)
            result.logprobs.append(found)
        result.tokens.append(token)
        piece = self._watch.push(self._decoder.push(token))
        result.text += piece
        if self._watch.stopped:
            result.finish_reason = "stop"
        elif len(result.tokens) >= self.settings.max_tokens:
            piece += self.end("length")
        return piece

    def end(self, reason: str) -> str:
        """No more tokens: what was held back in case it began a stop string."""
        rest = self._watch.push(self._decoder.flush()) + self._watch.flush()
        self.result.text += rest
        self.result.finish_reason = reason
        return rest

    def _count_time(self) -> None:
        now = time.perf_counter()
        if self.result.tokens:
            self.result.decode_seconds += now - self._clock
        else:
            self.result.prefill_seconds = now - self._clock
        self._clock = now


def top_logprobs(logits: Any, token: int, count: int) -> dict[int, float]:
    """Log probabilities of the likeliest tokens and of the one drawn."""
    shifted = logits.astype(np.float64) - float(logits.max())
    logs = shifted - np.log(np.exp(shifted).sum())
    best = np.argpartition(-logs, min(count, len(logs)) - 1)[:count]
    ranked = sorted((int(t) for t in best), key=lambda t: -logs[t])
    return {t: float(logs[t]) for t in [*ranked, token]}
