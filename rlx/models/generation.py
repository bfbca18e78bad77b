"""A generation as its tokens arrive: detokenised text, stop conditions, timing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import field
from typing import Any

import numpy as np

from rlx.formats.tokenizer import Tokenizer
from rlx.models.sampling import GenerationSettings
from rlx.support.records import dataclass

SECONDS_PER_CALL = 0.1
"""How long a native call decodes: a reader sees its tokens at once, and Python costs less."""


@dataclass
class Generation:
    """A finished generation: text, tokens, finish reason, timing."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: str = ""  # stop, length, cancelled, timeout, error
    stop_string: str = ""  # the one that was found
    prompt_tokens: int = 0
    reused_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, float]] = field(default_factory=list)  # but of its first token
    end_token: int = -1  # the one that ended it, which is not among the tokens

    @property
    def tokens_per_second(self) -> float:
        steps = len(self.tokens) - 1
        return steps / self.decode_seconds if steps > 0 and self.decode_seconds else 0.0

    def __str__(self) -> str:
        return self.text


class GenerationState:
    """Fills a Generation token by token. It has ended once there is a `finish_reason`."""

    def __init__(
        self, tokenizer: Tokenizer, settings: GenerationSettings, result: Generation
    ) -> None:
        self.settings, self.result = settings, result
        shown = settings.shown_special
        self._decoder = tokenizer.stream(shown=shown) if shown else tokenizer.stream()
        self._stops = StopStrings(settings.stop)
        self.ends = tokenizer.end_ids | settings.stop_tokens
        self._clock = time.perf_counter()

    @property
    def ended(self) -> bool:
        return bool(self.result.finish_reason)

    @property
    def tokens_per_call(self) -> int:
        """How many tokens the next native call decodes: one at first, then as many as take
        `SECONDS_PER_CALL`."""
        result = self.result
        steps = len(result.tokens) - 1
        most = round(SECONDS_PER_CALL * steps / result.decode_seconds) if steps > 0 else 1
        return max(1, min(most, self.settings.max_tokens - len(result.tokens)))

    def push(self, token: int, logits: Any = None, logprobs: dict[int, float] | None = None) -> str:
        """Add a token, with its log probabilities or the logits for them where they are asked for.
        Returns the text that can be shown now."""
        result = self.result
        self._count_time()
        if token in self.ends:
            result.end_token = token
            return self.end("stop")
        if self.settings.logprobs:
            if logprobs is None:
                logprobs = top_logprobs(logits.reshape(-1), token, self.settings.logprobs)
            result.logprobs.append(logprobs)
        result.tokens.append(token)
        piece = self._stops.push(self._decoder.push(token))
        result.text += piece
        if self._stops.found:
            result.finish_reason, result.stop_string = "stop", self._stops.found
        elif len(result.tokens) >= self.settings.max_tokens:
            piece += self.end("length")
        return piece

    def end(self, reason: str) -> str:
        """End the generation. Returns the text that was held back."""
        rest = self._stops.push(self._decoder.flush()) + self._stops.flush()
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
    """Log probabilities of the `count` likeliest tokens and of the one drawn."""
    shifted = logits.astype(np.float64) - float(logits.max())
    logs = shifted - np.log(np.exp(shifted).sum())
    best = np.argpartition(-logs, min(count, len(logs)) - 1)[:count]
    ranked = sorted((int(t) for t in best), key=lambda t: -logs[t])
    return {t: float(logs[t]) for t in [*ranked, token]}


class StopStrings:
    """Streams text up to a stop string; holds back what may turn out to begin one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = ""

    def push(self, text: str) -> str:
        """The text that can be shown now."""
        if not self._stops:
            return text
        self._held += text
        found = [(at, s) for s in self._stops if (at := self._held.find(s)) >= 0]
        if found:
            at, self.found = min(found)
            shown, self._held = self._held[:at], ""
            return shown
        keep = max(_overlap(self._held, s) for s in self._stops)
        shown, self._held = self._held[: len(self._held) - keep], self._held[-keep:] if keep else ""
        return shown

    def flush(self) -> str:
        """The text held back that became no stop string."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of `text` that is a prefix of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
