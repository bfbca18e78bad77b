"""Who is admitted, and who gets tokens in the next run. Nothing here runs a model.

Requests wait in a fair queue and are admitted in its order, as rows of the page table and pages
allow: a large one is not overtaken while it waits for pages, so it gets them. A run has one token
of every request that decodes. Of the room for prompts half goes to the oldest, half to the
shortest: a long prompt always moves on, and a short one does not wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from itertools import count

from rlx.errors import QueueFullError
from rlx.models.batch.fair_queue import OUTPUT_COST, FairQueue
from rlx.models.batch.page_allocator import PageAllocator
from rlx.models.batch.request import Request
from rlx.models.batch.step_timer import StepTimer
from rlx.support.records import dataclass

_RATE = 0.1  # of the newest interval in the mean
_LONGEST_RETRY = 600.0  # seconds


@dataclass(frozen=True)
class ScheduledTokens:
    """The next `count` tokens of a request, to be run, and those of a draft to verify."""

    request: Request
    count: int
    draft: Sequence[int] = ()

    @property
    def completes(self) -> bool:
        """Whether the next token is drawn after them."""
        return self.count == self.request.pending

    @property
    def rows(self) -> int:
        """After how many of them, the last ones, logits are wanted."""
        scores = self.request.scores
        if scores is not None and scores.is_due:
            return self.count + len(self.draft)
        return 1 + len(self.draft) if self.completes else 0


class Scheduler:
    """Not safe for several threads."""

    def __init__(
        self, pages: PageAllocator, rows: int, waiting: int, timer: StepTimer,
        drafts: int = 0, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`drafts` is the most draft tokens of a run."""
        self.drafts = drafts
        self.pages, self.timer, self.clock = pages, timer, clock
        self.queue = FairQueue()
        self.running: list[Request] = []
        self.free_rows = list(range(rows))
        self._most_waiting = waiting
        self._deadlines: list[tuple[float, int, Request]] = []  # a heap
        self._number = count()
        self._blocked = False  # whether the next one needs pages that are not there
        self._left = 0.0  # when a request ended last
        self._interval = 0.0  # mean seconds between two ends
        self.prefix_hits = 0  # requests that found a part of their prompt in the KV cache
        self.prefix_tokens = 0  # and its tokens

    @property
    def is_busy(self) -> bool:
        return bool(self.running) or len(self.queue) > 0

    @property
    def can_admit(self) -> bool:
        """Whether one that waits may be admitted now."""
        return len(self.queue) > 0 and bool(self.free_rows) and not self._blocked

    @property
    def is_late(self) -> bool:
        """Whether the time of a request may be over."""
        return bool(self._deadlines) and self._deadlines[0][0] <= self.clock()

    # -- requests come and go -----------------------------------------------------------------

    def add(self, request: Request) -> None:
        if len(self.queue) >= self._most_waiting:
            error = QueueFullError(
                "too many requests wait already", got=len(self.queue),
                expected=f"below {self._most_waiting}", hint="try later, or raise waiting=",
            )  # fmt: skip
            error.retry_after = self.retry_after()
            raise error
        now = self.clock()
        self.queue.add(request, now)
        self._blocked = False
        if request.terms.deadline is not None:
            if len(self._deadlines) > 2 * (len(self.queue) + len(self.running)):
                self._deadlines = [entry for entry in self._deadlines if not entry[2].ended]
                heapify(self._deadlines)
            heappush(self._deadlines, (now + request.terms.deadline, next(self._number), request))

    def retry_after(self) -> float:
        """Seconds until half of the queue is likely to be gone."""
        interval = self._interval or 1.0
        return min(max(1.0, interval * len(self.queue) / 2), _LONGEST_RETRY)

    def expired(self) -> list[Request]:
        """Requests whose time is over."""
        found, now = [], self.clock() if self._deadlines else 0.0
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][2].ended):
            request = heappop(self._deadlines)[2]
            if not request.ended:
                found.append(request)
        return found

    def remove(self, request: Request) -> None:
        """Let go of a request, whether it waits, runs or has left."""
        if request.row >= 0:
            self.leave(request)
        elif self.queue.remove(request):
            self._blocked = False

    def admit(self) -> list[Request]:
        """Admit requests as rows and pages allow."""
        found: list[Request] = []
        while self.free_rows and not self._blocked:
            now = self.clock()
            request = self.queue.first(now)
            if request is None:
                break
            if self._enter(request):
                self.queue.serve(request, now)
                self.queue.charge(request, request.pending - request.shared * self.pages.size)
                found.append(request)
            else:
                self._blocked = True
        return found

    def _enter(self, request: Request) -> bool:
        # a prompt that is scored runs as a whole
        prompt = request.tokens if request.scores is None else []
        found = self.pages.begin(prompt, request.most, request.adapter, request)
        if found is None:
            return False
        request.pages, request.shared = found
        request.row, request.done = self.free_rows.pop(), 0
        self.running.append(request)
        return True

    def leave(self, request: Request) -> None:
        """A request has ended: its row and pages are free."""
        self.pages.end(request.pages, request)
        self.free_rows.append(request.row)
        self.running.remove(request)
        request.row, request.pages, self._blocked = -1, [], False
        now = self.clock()
        if self._left:
            self._interval += _RATE * (now - self._left - self._interval)
        self._left = now

    # -- tokens of a run ----------------------------------------------------------------------

    def next_tokens(self) -> list[ScheduledTokens]:
        """The tokens of the next run."""
        ages = {r: _age(r) for r in self.running if r.pending > 1}
        for request in list(ages):
            filler = self._reuse(request)
            if filler is not None:  # it moves on as if it were as urgent as those who wait for it
                age = ages.pop(request)
                if filler in ages:
                    ages[filler] = min(ages[filler], age)
        scheduled = self._decodes()
        prompts = sorted((r for r in ages if r.pending > 1), key=ages.__getitem__)
        if prompts:
            drafts = sum(len(part.draft) for part in scheduled)
            wanted = self._wanted(prompts, self.drafts - drafts)
            shares = share_room(wanted, self.timer.room(len(scheduled) + drafts))
            pairs = zip(prompts, shares, strict=True)
            scheduled += [ScheduledTokens(r, share) for r, share in pairs if share]
        return scheduled

    @staticmethod
    def _wanted(prompts: Sequence[Request], rows: int) -> list[int]:
        """How many tokens of each prompt could run. There is room for the logits of one token of
        each, and so many rows more: they bound prompts that are scored."""
        found = []
        for request in prompts:
            wanted = request.pending
            if request.scores is not None:
                wanted = min(wanted, 1 + rows)
                rows -= wanted - 1
            found.append(wanted)
        return found

    def _decodes(self) -> list[ScheduledTokens]:
        """A token of every request that decodes, and drafts as far as they fit."""
        room, found = self.drafts, list[ScheduledTokens]()
        for request in self.running:
            if request.pending == 1:
                draft = request.draft(room) if room and request.settings.speculate else ()
                room -= len(draft)
                found.append(ScheduledTokens(request, 1, draft))
        return found

    def _reuse(self, request: Request) -> Request | None:
        """Skip what shared pages hold already. Returns who is to fill the next one, if it is not
        this request itself."""
        size = self.pages.size
        while request.done < request.shared * size:
            at = request.done // size
            page = request.pages[at]
            if not self.pages.is_ready(page):
                self.pages.claim(request.pages[at : request.shared], request)
                filler = self.pages.filler(page)
                return filler if isinstance(filler, Request) and filler is not request else None
            self.prefix_hits += not request.result.reused_tokens
            self.prefix_tokens += size
            request.done += size
            request.result.reused_tokens += size
        return None

    def ran(self, part: ScheduledTokens, accepted: int = 0) -> None:
        """Tokens of a request ran, and so many of its draft were right: the KV cache holds them,
        and pages that they filled may serve other requests."""
        request, size = part.request, self.pages.size
        first, request.done = request.done // size, request.done + part.count + accepted
        for number in range(first, request.done // size):
            tokens = request.tokens[number * size : (number + 1) * size]
            self.pages.learn(request.pages, number, tokens, request.adapter)
        if part.count == 1:
            self.queue.charge(request, OUTPUT_COST * (1 + accepted))


def tokens_of(scheduled: Sequence[ScheduledTokens]) -> tuple[int, int]:
    """Tokens of a run: those of decodes and drafts, and those of prompts."""
    decodes = sum(1 + len(part.draft) for part in scheduled if part.count == 1)
    return decodes, sum(part.count for part in scheduled if part.count > 1)


def _age(request: Request) -> tuple[int, float]:
    """The order in which prompts are prefilled."""
    return -request.terms.priority, request.arrived


def share_room(wanted: list[int], room: int) -> list[int]:
    """Tokens for each of several prompts, the oldest first: half of the room for the oldest, the
    rest for the shortest, and what is left for the oldest."""
    shares = [0] * len(wanted)
    shares[0] = min(wanted[0], -(-room // 2))
    left = room - shares[0]
    shortest = sorted(range(len(wanted)), key=lambda i: wanted[i])
    for i in [*shortest, *range(len(wanted))]:
        more = min(wanted[i] - shares[i], left)
        shares[i] += more
        left -= more
    return shares
