"""A request: its tokens, the pages it holds, and the reply its reader waits on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from queue import SimpleQueue
from typing import Any

from rlx.formats.tokenizer import Tokenizer
from rlx.models.generation import Answer, Generation
from rlx.models.sampling import GenerationSettings
from rlx.models.structured_output import adjustment

_END = None  # what closes the queue of a reply


class Request:
    """What the engine knows of a request. Its thread alone changes anything but `cancelled`."""

    def __init__(
        self, prompt: list[int], settings: GenerationSettings, tokenizer: Tokenizer, vocab: int,
        context: int, adapter: int = 0,
    ) -> None:  # fmt: skip
        self.settings, self.adapter = settings, adapter  # its number; 0 is none
        self.tokens = list(prompt)  # prompt and answer
        self.done = 0  # how many of them the cache holds
        self.pages: list[int] = []
        self.row = -1  # of the table of pages, while it runs
        self.cancelled = False
        self.result = Generation(prompt_tokens=len(prompt))
        self.pieces: SimpleQueue[str | BaseException | None] = SimpleQueue()
        self.rng, self.sampling = settings.rng(), settings.row()
        self.penalties = adjustment(settings, tokenizer, vocab, prompt)
        self.most = min(len(prompt) + settings.max_tokens, context)  # tokens that the cache holds
        self._answer = Answer(tokenizer, settings, self.result)

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.done

    def receive(self, token: int, logits: Any) -> bool:
        """A token was drawn from `logits`; whether the answer ends with it."""
        self._say(self._answer.push(token, logits))
        self.tokens.append(token)
        if self.penalties is not None:
            self.penalties.count(token)
        if not self._answer.ended and len(self.tokens) > self.most:
            self._say(self._answer.end("length"))
        if self._answer.ended:
            self.pieces.put(_END)
        return self._answer.ended

    def finish(self, reason: str) -> None:
        """End the answer here."""
        self._say(self._answer.end(reason))
        self.pieces.put(_END)

    def fail(self, error: BaseException) -> None:
        self.result.finish_reason = "error"
        self.pieces.put(error)

    def _say(self, piece: str) -> None:
        if piece:
            self.pieces.put(piece)


class Reply(Iterator[str]):
    """Pieces of the answer as they are made. `result` fills along; `close()` cancels."""

    def __init__(self, request: Request, wake: Callable[[], None]) -> None:
        self._request, self._wake = request, wake
        self._ended = False

    @property
    def result(self) -> Generation:
        return self._request.result

    def __next__(self) -> str:
        if self._ended:
            raise StopIteration
        piece = self._request.pieces.get()
        if isinstance(piece, str):
            return piece
        self._ended = True
        if piece is not None:
            raise piece
        raise StopIteration

    def wait(self) -> Generation:
        """The whole answer."""
        for _ in self:
            pass
        return self.result

    def close(self) -> None:
        """Nobody wants the rest."""
        self._request.cancelled = True
        self._wake()

    async def __aiter__(self) -> AsyncIterator[str]:
        done: Any = object()
        while (piece := await asyncio.to_thread(next, self, done)) is not done:
            yield piece

    def __del__(self) -> None:
        if not self._ended:
            self._request.cancelled = True
