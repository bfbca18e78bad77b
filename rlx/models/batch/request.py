"""A request: its tokens, its pages of the KV cache, and the reply that its caller reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from queue import SimpleQueue
from typing import Any

from rlx.formats.tokenizer import Tokenizer
from rlx.models.generation import Generation, GenerationState
from rlx.models.sampling import GenerationSettings
from rlx.models.structured_output import penalties_for

_END = None  # ends the queue of a reply


class Request:
    """A request of the engine, whose thread alone changes anything but `cancelled`."""

    def __init__(
        self, prompt: list[int], settings: GenerationSettings, tokenizer: Tokenizer, vocab: int,
        context: int, adapter: int = 0,
    ) -> None:  # fmt: skip
        self.settings, self.adapter = settings, adapter  # a number; 0 is none
        self.tokens = list(prompt)  # prompt and output
        self.done = 0  # how many of them the KV cache holds
        self.pages: list[int] = []
        self.row = -1  # of the page table, while it runs
        self.cancelled = False
        self.result = Generation(prompt_tokens=len(prompt))
        self.pieces: SimpleQueue[str | BaseException | None] = SimpleQueue()
        self.rng, self.sampling = settings.rng(), settings.row()
        self.penalties = penalties_for(settings, tokenizer, vocab, prompt)
        self.most = min(len(prompt) + settings.max_tokens, context)  # tokens in the KV cache
        self._state = GenerationState(tokenizer, settings, self.result)

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.done

    def receive(self, token: int, logits: Any) -> bool:
        """Add a token that was drawn from `logits`; whether the generation has ended."""
        self._emit(self._state.push(token, logits))
        self.tokens.append(token)
        if self.penalties is not None:
            self.penalties.count(token)
        if not self._state.ended and len(self.tokens) > self.most:
            self._emit(self._state.end("length"))
        if self._state.ended:
            self.pieces.put(_END)
        return self._state.ended

    def finish(self, reason: str) -> None:
        """End the generation here."""
        self._emit(self._state.end(reason))
        self.pieces.put(_END)

    def fail(self, error: BaseException) -> None:
        self.result.finish_reason = "error"
        self.pieces.put(error)

    def _emit(self, piece: str) -> None:
        if piece:
            self.pieces.put(piece)


class Reply(Iterator[str]):
    """Text as it is generated. `result` fills along; `close()` cancels."""

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
        """The finished generation."""
        for _ in self:
            pass
        return self.result

    def close(self) -> None:
        """Cancel the request."""
        self._request.cancelled = True
        self._wake()

    async def __aiter__(self) -> AsyncIterator[str]:
        done: Any = object()
        while (piece := await asyncio.to_thread(next, self, done)) is not done:
            yield piece

    def __del__(self) -> None:
        if not self._ended:
            self._request.cancelled = True
