"""Embeddings of many callers in common batches.

    with rlx.EmbedBatcher(rlx.load("all-minilm-l6-v2")) as batcher:
        vectors = await batcher.embed_async(["A cat sits."])

One thread runs the model. When it has nothing to do it waits a moment for company; while it runs,
texts gather by themselves. A round takes texts of all callers, of each user about as many tokens,
and runs them in batches of similar lengths. A row depends on its own text alone, so vectors are
those of each caller alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from heapq import heappop, heapreplace
from typing import Any, Protocol

import numpy as np

from rlx.errors import EngineClosedError, QueueFullError
from rlx.models.arguments import require_count, require_seconds
from rlx.models.embed_plan import EmbedPlan, Vectors
from rlx.support.pickling import Unpicklable

WAIT = 0.002  # seconds for others to come, when nothing runs
ROUND = 8192  # tokens of a round, about
_RATE = 0.2  # of the newest round in the mean


class Embedder(Protocol):
    """A model that embeds texts: an encoder or a language model."""

    def plan_embed(self, texts: Iterable[str], **options: Any) -> EmbedPlan: ...


class _Job:
    """The texts of one call, and the rows that are there already."""

    def __init__(self, plan: EmbedPlan, user: str | None) -> None:
        self.plan, self.user = plan, user
        self.future: Future[Vectors] = Future()
        self.rows = np.zeros((len(plan.tokens), plan.width), np.float32)
        self.next = 0  # the text to run next
        self.size = self.left = sum(len(t) > 0 for t in plan.tokens)  # texts, and those not run

    @property
    def alive(self) -> bool:
        return not self.future.done()

    def rest(self) -> Iterator[int]:
        """The indices of texts that are still to be run, each once."""
        tokens = self.plan.tokens
        while self.alive and self.next < len(tokens):
            self.next += 1
            if len(tokens[self.next - 1]):
                yield self.next - 1

    def finish(self, error: BaseException | None = None) -> None:
        if not self.alive or not self.future.set_running_or_notify_cancel():
            return
        try:
            if error is not None:
                raise error
            self.future.set_result(self.plan.finish(self.rows))
        except BaseException as raised:
            self.future.set_exception(raised)


class EmbedBatcher(Unpicklable):
    """Embeds texts of several callers together. Safe to call from several threads."""

    def __init__(self, model: Any, *, waiting: int = 1 << 16, wait: float = WAIT) -> None:
        """`waiting` is the most texts in the queue; `wait` the seconds for others to come. The
        model stays the caller's to close."""
        require_count("waiting", waiting)
        require_seconds("wait", wait)
        self.model: Embedder = model
        self._most, self._wait = waiting, wait
        self._jobs: dict[str | None, dict[_Job, None]] = {}  # of each user, in order
        self._texts = 0  # of all of them
        self._rate = 0.0  # mean texts a second
        self._wake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="rlx-embed", daemon=True)
        self._thread.start()

    def submit(
        self, texts: Iterable[str], *, user: str | None = None, **options: Any
    ) -> Future[Vectors]:
        """The vectors of texts, f32 [texts, width]; `cancel()` of the future takes them out of the
        queue. The options are those of the model's `embed`."""
        job = _Job(self.model.plan_embed(texts, **options), user)
        with self._wake:
            if self._closed:
                raise EngineClosedError("the batcher is closed")
            if self._texts + job.left > self._most:
                error = QueueFullError(
                    "too many texts wait already", got=self._texts + job.left,
                    expected=f"at most {self._most}", hint="try later, or raise waiting=",
                )  # fmt: skip
                error.retry_after = self.retry_after()
                raise error
            if job.left:
                self._jobs.setdefault(user, {})[job] = None
                self._texts += job.size
                self._wake.notify_all()
        if job.size:
            job.future.add_done_callback(lambda _: self._leave(job))
        else:
            job.finish()
        return job.future

    def _leave(self, job: _Job) -> None:
        """A job has its vectors, was cancelled, or failed."""
        with self._wake:
            jobs = self._jobs.get(job.user, {})
            if job in jobs:
                del jobs[job]
                self._texts -= job.size
            if not jobs:
                self._jobs.pop(job.user, None)

    def retry_after(self) -> float:
        """Seconds until half of the queue is likely to be gone."""
        return min(max(1.0, self._texts / 2 / self._rate), 600.0) if self._rate else 1.0

    def embed(self, texts: Iterable[str], *, user: str | None = None, **options: Any) -> Vectors:
        """The vectors of texts, f32 [texts, width]."""
        return self.submit(texts, user=user, **options).result()

    async def embed_async(
        self, texts: Iterable[str], *, user: str | None = None, **options: Any
    ) -> Vectors:
        """`embed` in asyncio; cancelling the task takes the texts out of the queue."""
        import asyncio  # late: others start 15 ms sooner

        return await asyncio.wrap_future(self.submit(texts, user=user, **options))

    @property
    def waiting(self) -> int:
        """Texts in the queue."""
        return self._texts

    def close(self) -> None:
        """Cancel what waits and end the thread. A second call does nothing."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        self._thread.join()

    def __enter__(self) -> EmbedBatcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- its own thread -----------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            with self._wake:
                if not self._jobs and not self._closed:
                    self._wake.wait_for(lambda: self._jobs or self._closed)
                    self._wake.wait_for(lambda: self._closed, self._wait)  # for company
                if self._closed:
                    break
                taken = self._round()
            if taken:
                start = time.perf_counter()
                self._run(taken)
                rate = len(taken) / (time.perf_counter() - start)
                self._rate += _RATE * (rate - self._rate) if self._rate else rate
        for job in [job for jobs in self._jobs.values() for job in jobs]:
            job.future.cancel()

    def _round(self) -> list[tuple[_Job, int]]:
        """Texts to run now, of one kind: those of the user that got the least tokens come next."""
        if not self._jobs:
            return []
        first = next(iter(self._jobs))
        key = next(iter(self._jobs[first])).plan.key
        sources = [_texts(jobs, key) for jobs in self._jobs.values()]
        turns = [(0, number) for number in range(len(sources))]  # tokens of each user: a heap
        taken: list[tuple[_Job, int]] = []
        total = 0
        while turns and total < ROUND:
            tokens, number = turns[0]
            found = next(sources[number], None)
            if found is None:
                heappop(turns)
                continue
            taken.append(found)
            size = len(found[0].plan.tokens[found[1]])
            total += size
            heapreplace(turns, (tokens + size, number))
        self._jobs[first] = self._jobs.pop(first)  # another one begins the next round
        return taken

    def _run(self, taken: list[tuple[_Job, int]]) -> None:
        """Run texts together. If that fails, each alone: an error is that of its own call."""
        missing = dict(enumerate(taken))
        try:
            tokens = [job.plan.tokens[at] for job, at in taken]
            for places, rows in taken[0][0].plan.run(tokens):
                _deliver([(*missing.pop(p), row) for p, row in zip(places, rows, strict=True)])
        except BaseException as error:
            if len(taken) == 1:
                taken[0][0].finish(error)
                return
        for one in missing.values():
            if one[0].alive:
                self._run([one])


def _texts(jobs: Iterable[_Job], key: str) -> Iterator[tuple[_Job, int]]:
    """Texts of one kind, with their jobs."""
    return ((job, at) for job in jobs if job.plan.key == key for at in job.rest())


def _deliver(found: Iterable[tuple[_Job, int, Any]]) -> None:
    """Give rows to their jobs, and each caller all of its vectors."""
    for job, at, row in found:
        job.rows[at] = row
        job.left -= 1
        if not job.left:
            job.finish()
