"""What a caller reads of a request: text as it is generated, in threads or in asyncio.

Nothing is queued. A reader has its place in the one Generation that the engine fills, and takes all
that was published since. So an answer that nobody reads costs its own size, and a slow reader gets
fewer and longer pieces. After a run the engine wakes each event loop once, for all of its readers.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rlx.models.generation import Generation
from rlx.support.records import dataclass

if TYPE_CHECKING:
    import asyncio


@dataclass(frozen=True)
class Chunk:
    """A part of an answer: all that is new. A token may come before its text, which is held back
    while it may begin a stop string or end in the middle of a character."""

    text: str
    tokens: list[int]
    logprobs: list[dict[int, float]] | None  # of each token, where they were asked for


class _Waiter:
    """A thread that waits for news, or a task of an event loop."""

    def __init__(self, at_end: bool, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.at_end, self.loop = at_end, loop
        self.future: Any = None if loop is None else loop.create_future()
        self.lock = threading.Lock()
        self.lock.acquire()


class Outlet:
    """What readers may see of a generation, and who waits for more."""

    def __init__(self, result: Generation) -> None:
        self.result = result
        self.ended = False
        self.error: BaseException | None = None
        self.seen = (0, 0)  # characters and tokens that are published
        self._waiters: list[_Waiter] = []
        self._lock = threading.Lock()

    def publish(self, ended: bool = False, error: BaseException | None = None) -> None:
        """Let readers see what the generation has now; `wake` tells them."""
        with self._lock:
            self.seen = (len(self.result.text), len(self.result.tokens))
            self.ended, self.error = self.ended or ended, self.error or error

    def add(self, waiter: _Waiter, is_news: Callable[[], bool]) -> bool:
        """Have a waiter woken; not where there is news already."""
        with self._lock:
            if self.ended or (not waiter.at_end and is_news()):
                return False
            self._waiters.append(waiter)
            return True

    def take_waiters(self) -> list[_Waiter]:
        """Those to wake now."""
        if not self._waiters:
            return []
        with self._lock:
            now = [w for w in self._waiters if self.ended or not w.at_end]
            self._waiters = [w for w in self._waiters if not self.ended and w.at_end]
        return now


def wake(outlets: Iterable[Outlet]) -> None:
    """Wake all who wait for what was published; an event loop once."""
    tasks: dict[asyncio.AbstractEventLoop, list[Any]] = {}
    for outlet in outlets:
        for waiter in outlet.take_waiters():
            if waiter.loop is None:
                waiter.lock.release()
            else:
                tasks.setdefault(waiter.loop, []).append(waiter.future)
    for loop, futures in tasks.items():
        with suppress(RuntimeError):  # the loop is closed: nobody reads any more
            loop.call_soon_threadsafe(_resolve, futures)


def _resolve(futures: list[Any]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


class Reply(Iterator[str]):
    """The answer to a request. Iterate over its text, or in asyncio over `chunks()`; `wait()` for
    its end. `result` fills along; `close()` cancels. One reader at a time."""

    def __init__(self, outlet: Outlet, logprobs: bool, cancel: Callable[[], None]) -> None:
        self._outlet, self._logprobs, self._cancel = outlet, logprobs, cancel
        self._place = (0, 0)  # characters and tokens that were read
        self._raised = False

    @property
    def result(self) -> Generation:
        return self._outlet.result

    @property
    def ended(self) -> bool:
        """Whether the generation has ended; there may be text left to read."""
        return self._outlet.ended

    # -- threads ------------------------------------------------------------------------------

    def __next__(self) -> str:
        while True:
            chunk = self._take()
            if chunk is None:
                raise StopIteration
            if chunk.text:
                return chunk.text
            if not chunk.tokens:
                self._block(at_end=False)

    def wait(self) -> Generation:
        """The finished generation."""
        if not self._outlet.ended:
            self._block(at_end=True)
        self._place = self._outlet.seen
        self._take()
        return self.result

    def _block(self, at_end: bool) -> None:
        waiter = _Waiter(at_end)
        if self._outlet.add(waiter, self._is_news):
            waiter.lock.acquire()

    # -- asyncio ------------------------------------------------------------------------------

    async def chunks(self) -> AsyncIterator[Chunk]:
        """The answer in parts, each all that is ready. Leaving the loop early, or cancelling its
        task, cancels the request."""
        try:
            while (chunk := self._take()) is not None:
                if chunk.text or chunk.tokens:
                    yield chunk
                else:
                    await self._sleep(at_end=False)
        finally:
            self.close()

    async def wait_async(self) -> Generation:
        """The finished generation, in asyncio; cancelling the task cancels the request."""
        try:
            if not self._outlet.ended:
                await self._sleep(at_end=True)
            return self.wait()
        finally:
            self.close()

    async def __aiter__(self) -> AsyncIterator[str]:
        async for chunk in self.chunks():
            if chunk.text:
                yield chunk.text

    async def _sleep(self, at_end: bool) -> None:
        import asyncio  # late: others start 15 ms sooner

        waiter = _Waiter(at_end, asyncio.get_running_loop())
        if self._outlet.add(waiter, self._is_news):
            await waiter.future

    # -- both ---------------------------------------------------------------------------------

    def _is_news(self) -> bool:
        return self._outlet.seen != self._place

    def _take(self) -> Chunk | None:
        """All that is new, maybe nothing; None at the end, unless it is an error to raise."""
        outlet, (text, tokens) = self._outlet, self._place
        ended = outlet.ended  # first: nothing is published after it
        to_text, to_tokens = self._place = outlet.seen
        if ended and (text, tokens) == self._place:
            if outlet.error is not None and not self._raised:
                self._raised = True
                raise outlet.error
            return None
        result = outlet.result
        rows = result.logprobs[tokens:to_tokens] if self._logprobs else None
        return Chunk(result.text[text:to_text], result.tokens[tokens:to_tokens], rows)

    def close(self) -> None:
        """Cancel the request: its slot and pages are free before the next run."""
        if not self._outlet.ended:
            self._cancel()

    def __del__(self) -> None:
        self.close()
