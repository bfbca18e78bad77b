"""A request: its tokens, how it is scheduled, its pages of the KV cache."""

from __future__ import annotations

from typing import Any

from rlx.errors import OptionError
from rlx.formats.tokenizer import Tokenizer
from rlx.models.arguments import require_count, require_seconds
from rlx.models.batch.prompt_scores import PromptScores
from rlx.models.batch.reply import Outlet
from rlx.models.generation import Generation, GenerationState, top_logprobs
from rlx.models.sampling import GenerationSettings, Penalties
from rlx.models.speculative import NgramTable
from rlx.models.structured_output import penalties_for
from rlx.support.records import dataclass

MOST_PRIORITY = 100
LONGEST_USER = 256  # characters


@dataclass(frozen=True)
class Terms:
    """How a request is scheduled: a higher priority first, each user a fair share, and no longer
    than `deadline` seconds from its submission."""

    priority: int = 0
    deadline: float | None = None
    user: str | None = None

    def __post_init__(self) -> None:
        require_count("priority", self.priority, -MOST_PRIORITY, MOST_PRIORITY)
        if self.deadline is not None:
            require_seconds("deadline", self.deadline)
        if self.user is not None and not (
            isinstance(self.user, str) and len(self.user) <= LONGEST_USER
        ):
            raise OptionError(
                "not a name", where="user", got=repr(self.user)[:40],
                expected=f"a str of at most {LONGEST_USER} characters",
            )  # fmt: skip


class Request:
    """A request of the engine, whose thread alone changes it."""

    def __init__(
        self, prompt: list[int], settings: GenerationSettings, tokenizer: Tokenizer, vocab: int,
        context: int, adapter: int = 0, terms: Terms | None = None,
        prompt_logprobs: int | None = None,
    ) -> None:  # fmt: skip
        self.settings, self.adapter = settings, adapter  # a number; 0 is none
        self.terms = terms or Terms()
        self.tokens = list(prompt)  # prompt and output
        self.done = 0  # how many of them the KV cache holds
        self.pages: list[int] = []
        self.shared = 0  # how many of the first ones others fill, or have filled
        self.row = -1  # of the page table, while it runs
        self.arrived = 0.0  # when it was queued
        self.result = Generation(prompt_tokens=len(prompt))
        self.scores: PromptScores | None = None  # where those of the prompt are asked for
        if prompt_logprobs is not None:
            self.scores = PromptScores(prompt, prompt_logprobs, self.result.prompt_logprobs)
        self.outlet = Outlet(self.result)
        self.rng, self.sampling = settings.rng(), settings.row()
        self.penalties: Penalties | None = penalties_for(settings, tokenizer, vocab, prompt)
        self.most = min(len(prompt) + settings.max_tokens, context)  # tokens in the KV cache
        self._state = GenerationState(tokenizer, settings, self.result)
        self._ngrams = NgramTable() if settings.speculate else None

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.done

    def draft(self, most: int) -> list[int]:
        """Up to `most` tokens that may come next, for the next run to verify; as many as were
        asked for and fit."""
        count = min(self.settings.speculate or 0, most, self.most - len(self.tokens))
        if self._ngrams is None or count <= 0:
            return []
        return self._ngrams.find(self.tokens, count)

    @property
    def finished(self) -> bool:
        """Whether the generation has come to its end."""
        return self._state.ended

    @property
    def ended(self) -> bool:
        """Whether readers know of the end."""
        return self.outlet.ended

    def goes_on(self, tokens: int) -> bool:
        """Whether so many tokens more fit, if none of them ends the generation."""
        left = self.settings.max_tokens - len(self.result.tokens)
        return min(left, self.most - len(self.tokens)) >= tokens

    def receive(self, token: int, logits: Any, logprobs: dict[int, float] | None = None) -> None:
        """Add a token that was drawn from `logits`, or whose log probabilities are known."""
        count = self.settings.logprobs
        if count and logprobs is None:
            logprobs = top_logprobs(logits, token, count)
        self._state.push(token, logprobs=logprobs)
        if self.scores is not None and logprobs is not None and self.result.end_token >= 0:
            self.result.logprobs.append(logprobs)
        self.tokens.append(token)
        if self._state.ended:
            return
        if self.penalties is not None:
            self.penalties.count(token)
        if len(self.tokens) > self.most:
            self._state.end("length")

    def end(self, reason: str) -> None:
        """End the generation; `publish` lets readers know."""
        self._state.end(reason)

    def finish(self, reason: str, error: BaseException | None = None) -> None:
        """End the generation here."""
        self.end(reason)
        self.publish(error)

    def publish(self, error: BaseException | None = None) -> None:
        """Let readers see what there is now; the end too, if there was an error."""
        if error is not None:
            self.result.finish_reason = "error"
        finished = self.finished
        self.outlet.publish(finished, error)
        if finished:  # a reply may be kept for long
            self.penalties = self._ngrams = None
