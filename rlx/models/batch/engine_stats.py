"""What an engine does and has done, in numbers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import field
from typing import TYPE_CHECKING

from rlx.support.records import dataclass

if TYPE_CHECKING:
    from rlx.models.batch.request import Request
    from rlx.models.batch.scheduler import ScheduledTokens, Scheduler


@dataclass
class EngineCounts:
    """What an engine has done since it was made."""

    tokens_in: int = 0  # of the prompts of requests that were admitted
    tokens_out: int = 0
    tokens_run: int = 0  # prompts and output; less than in and out, where prefixes were reused
    drafted: int = 0  # tokens of speculative decoding
    accepted: int = 0  # and how many of them were right
    runs: int = 0
    run_seconds: float = 0.0
    finished: dict[str, int] = field(default_factory=dict)  # requests by finish reason

    def admitted(self, request: Request) -> None:
        self.tokens_in += request.result.prompt_tokens

    def ran(
        self, scheduled: Sequence[ScheduledTokens], accepted: Collection[int], seconds: float
    ) -> None:
        """A run took so long; so many tokens of each draft were right."""
        self.runs += 1
        self.run_seconds += seconds
        drafted = sum(len(part.draft) for part in scheduled)
        self.tokens_run += drafted + sum(part.count for part in scheduled)
        self.tokens_out += len(accepted) + sum(accepted)
        self.drafted += drafted
        self.accepted += sum(accepted)

    def ended(self, reason: str) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + 1


@dataclass(frozen=True)
class EngineStats:
    """A moment of an engine. Pages that only cache prefixes count as free: they are taken when
    needed."""

    running: int
    waiting: int
    pages_used: int
    pages_free: int
    pages_cached: int  # of those that are free
    tokens_in: int
    tokens_out: int
    tokens_run: int
    prefix_hits: int  # requests that found a part of their prompt in the KV cache
    prefix_tokens: int  # and its tokens
    drafted: int  # tokens of speculative decoding
    accepted: int  # and how many of them were right
    runs: int
    run_seconds: float
    finished: dict[str, int]
    retry_after: float  # what a full queue would say

    @staticmethod
    def of(scheduler: Scheduler, counts: EngineCounts) -> EngineStats:
        pages = scheduler.pages
        return EngineStats(
            running=len(scheduler.running), waiting=len(scheduler.queue), pages_used=pages.held,
            pages_free=pages.available, pages_cached=pages.cached, tokens_in=counts.tokens_in,
            tokens_out=counts.tokens_out, tokens_run=counts.tokens_run,
            prefix_hits=scheduler.prefix_hits, prefix_tokens=scheduler.prefix_tokens,
            drafted=counts.drafted, accepted=counts.accepted, runs=counts.runs,
            run_seconds=counts.run_seconds, finished=dict(counts.finished),
            retry_after=scheduler.retry_after(),
        )  # fmt: skip
