"""Events of one answer, whatever interface it is sent by.

An answer is any number of deltas and then one `Finished`:

    ReasoningDelta*  (TextDelta | ToolCallStart ToolCallDelta*)*  Finished
"""

from __future__ import annotations

from typing import TypeAlias

from rlx.support.records import dataclass


@dataclass(frozen=True)
class TokenLogprob:
    """A token that was drawn, its log probability, and the likeliest tokens in its place."""

    token: int
    piece: bytes  # what it adds to the text
    logprob: float
    top: tuple[tuple[int, bytes, float], ...] = ()


@dataclass(frozen=True)
class TextDelta:
    """More text. Its tokens may have come before it, or come after it. The first may be the text
    `of_prompt`, where its log probabilities were asked for; its first token has none."""

    text: str
    logprobs: tuple[TokenLogprob, ...] | None = None
    of_prompt: bool = False


@dataclass(frozen=True)
class ReasoningDelta:
    """More of what the model writes before its answer."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """The model calls a tool; its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallDelta:
    """More of the arguments of a call, JSON in parts."""

    index: int
    arguments: str


@dataclass(frozen=True)
class Usage:
    """Tokens of a request; `cached_tokens` of the prompt were in the KV cache already."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: Usage) -> Usage:
        """Of two answers to one prompt."""
        return Usage(
            self.prompt_tokens,
            max(self.cached_tokens, other.cached_tokens),
            self.completion_tokens + other.completion_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
        )


@dataclass(frozen=True)
class Finished:
    """The end: stop, length, tool_calls, cancelled, timeout or error. `stop` is the stop string
    that was found, if one was."""

    reason: str
    usage: Usage
    stop: str | None = None


Event: TypeAlias = TextDelta | ReasoningDelta | ToolCallStart | ToolCallDelta | Finished
