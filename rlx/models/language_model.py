"""`rlx.load`: a language model that generates, chats, and tells its logits."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rlx.errors import InputError
from rlx.models.adapter_files import add_adapter
from rlx.models.adapters import Adapter, find_adapter
from rlx.models.build_graph import ModelFile
from rlx.models.decoder_runner import Engine
from rlx.models.generation import Answer, Generation
from rlx.models.sampling import GenerationSettings
from rlx.models.speculative import Draft, Guesser, Lookup, check_draft, draw_with_guesses
from rlx.models.structured_output import adjustment
from rlx.models.vectors import normalized, pooled


class Stream(Iterator[str]):
    """Pieces of text as they are made. `result` fills along; `close()` cancels safely."""

    def __init__(self, pieces: Iterator[str], result: Generation) -> None:
        self._pieces, self.result = pieces, result
        self._turn = threading.Lock()  # a task may be cancelled while a thread makes its token

    def __next__(self) -> str:
        with self._turn:
            return next(self._pieces)

    def close(self) -> None:
        with self._turn:
            self._pieces.close()  # type: ignore[attr-defined]


class LanguageModel:
    """A model in memory. Calls from several threads take turns; `close()` frees it."""

    def __init__(
        self, model: ModelFile, engine: Engine, draft: LanguageModel | None = None
    ) -> None:
        """`draft` is a smaller model that guesses tokens ahead, which this one checks."""
        self.model, self.engine = model, engine
        self.draft = draft
        if draft is not None:
            check_draft(engine, draft.engine)
        self.config = model.config
        self.tokenizer = model.tokenizer()
        self.adapters: dict[str, Adapter] = {}
        self._closed = False

    # -- text ---------------------------------------------------------------------------------

    def tokenize(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def generate(self, prompt: str | Sequence[int], *, stream: bool = True, **settings: Any) -> Any:
        """Continue a prompt: an iterator of pieces, or with `stream=False` a Generation."""
        tokens = self.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
        return self._start(tokens, stream, settings)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, stream: bool = True, **settings: Any
    ) -> Any:
        """Answer a conversation of {"role": …, "content": …}. Only what is new is prefilled."""
        return self._start(self.tokenizer.encode_chat(messages), stream, settings)

    def agenerate(self, prompt: str | Sequence[int], **settings: Any) -> AsyncIterator[str]:
        """The same for asyncio: tokens are made in a thread, the loop stays free."""
        return _in_threads(self.generate(prompt, **settings))

    def achat(self, messages: Sequence[Mapping[str, Any]], **settings: Any) -> AsyncIterator[str]:
        return _in_threads(self.chat(messages, **settings))

    def _start(self, tokens: list[int], stream: bool, options: Mapping[str, Any]) -> Any:
        self._require_open()
        settings = GenerationSettings.of(options)
        self.engine.check(tokens, settings.overflow)
        self._adapter(settings.adapter)
        result = Generation(prompt_tokens=len(tokens))
        pieces = Stream(self._pieces(tokens, settings, result), result)
        if stream:
            return pieces
        for _ in pieces:
            pass
        return result

    def _pieces(
        self, prompt: list[int], settings: GenerationSettings, result: Generation
    ) -> Iterator[str]:
        answer = Answer(self.tokenizer, settings, result)
        try:
            yield from self._answer(prompt, answer)
        finally:
            self.engine.lock.leave(answer)
            if not answer.ended:
                result.finish_reason = "cancelled"

    def _answer(self, prompt: list[int], answer: Answer) -> Iterator[str]:
        """Pieces of an answer; a native call for each, which may make several tokens."""
        engine, settings, result = self.engine, answer.settings, answer.result
        adapter = self._adapter(settings.adapter)
        penalties = adjustment(settings, self.tokenizer, self.config.vocab, prompt)
        rng, row = settings.rng(), settings.row()
        guesser = None if penalties or settings.logprobs else self._guesser(settings)
        # what a token is must be known before the next one is drawn, or it need not
        unseen = not (penalties or settings.logprobs or settings.stop or guesser)
        seen, pending = list(prompt), prompt  # all that the answer stands on, and what is new of it
        if not settings.max_tokens:
            answer.end("length")
        while not answer.ended:
            kept = engine.lock.enter(answer)
            try:
                self._require_open()
                if not kept:  # at the beginning, or after others had the cache
                    engine.adapt(adapter)
                    reused = engine.keep(seen)
                    result.reused_tokens = result.reused_tokens if result.tokens else reused
                    pending = seen[reused:]
                if len(engine.tokens) + len(pending) > engine.context:
                    if settings.overflow == "error":
                        break
                    pending = seen = self._younger_half(seen)
                one = len(pending) == 1
                guesses = guesser.guess(seen, rng, row) if guesser and one else []
                if guesses:
                    drawn, rng = draw_with_guesses(engine, pending[0], guesses, rng, row)
                elif one and unseen:
                    count = min(answer.burst, engine.context - len(engine.tokens))
                    drawn, rng = engine.go_on(pending[0], rng, row, count, answer.ends)
                else:
                    token, rng = engine.feed(pending, rng, row, penalties)
                    drawn = [token]
                piece = answer.push(drawn[0], engine.last_logits)  # others may overwrite them
            finally:
                engine.lock.pause()
            if penalties is not None:
                penalties.count(drawn[0])
            pending = drawn[-1:]
            seen += drawn
            if piece:
                yield piece
            for token in drawn[1:]:
                if not answer.ended and (piece := answer.push(token)):
                    yield piece
        if not answer.ended and (piece := answer.end("length")):
            yield piece

    def _guesser(self, settings: GenerationSettings) -> Guesser | None:
        """What guesses tokens ahead: a draft model, or the text so far."""
        count = settings.speculate
        if self.draft is not None:
            count = 4 if count is None else count
            return Draft(self.engine, count, self.draft.engine) if count else None
        return Lookup(self.engine, count) if count else None

    def _younger_half(self, seen: list[int]) -> list[int]:
        """What is run again when the context is full, as if it were all there is."""
        self.engine.tokens = []
        return seen[-max(self.engine.context // 2, 1) :]

    # -- adapters -----------------------------------------------------------------------------

    def load_adapter(self, path: str | os.PathLike[str], name: str | None = None) -> str:
        """Read a LoRA adapter, a folder of PEFT or a GGUF file; the name to ask for it by.

        It is the file's own name where none is given. Several may be loaded: a request has
        `adapter=name`, or none.
        """
        self._require_open()
        return add_adapter(self.adapters, path, self.model, name)

    def _adapter(self, name: str | None) -> Adapter | None:
        return find_adapter(self.adapters, name)

    # -- numbers ------------------------------------------------------------------------------

    def logits(self, tokens: Sequence[int], *, adapter: str | None = None) -> Any:
        """Logits after each token, f32 [n, vocab]."""
        self._require_open()
        chosen = self._adapter(adapter)
        with self.engine.lock:
            self.engine.adapt(chosen)
            return self.engine.rows(tokens)

    def embed(
        self, texts: str | Sequence[str], *, pooling: str = "mean", normalize: bool = True
    ) -> Any:
        """A vector for each text, in order: f32 [texts, hidden]; of one string, [hidden].

        It is the state after the last norm: the "mean" over the tokens, or that of the "last" one.
        """
        self._require_open()
        many = [texts] if isinstance(texts, str) else texts
        found = pooled(self.engine, [self.tokenize(t) for t in many], pooling)
        found = normalized(found) if normalize else found
        return found[0] if isinstance(texts, str) else found

    def perplexity(self, text: str | Sequence[int]) -> float:
        """exp of the mean negative log probability of each token after the first."""
        tokens = self.tokenize(text) if isinstance(text, str) else list(text)
        if len(tokens) < 2:
            raise InputError("a perplexity needs two tokens at least", got=len(tokens))
        rows = self.logits(tokens)[:-1].astype(np.float64)
        rows -= rows.max(-1, keepdims=True)
        picked = rows[np.arange(len(rows)), tokens[1:]]
        return float(np.exp(np.mean(np.log(np.exp(rows).sum(-1)) - picked)))

    # -- life ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Free memory. A second call does nothing; any other use is an error."""
        if not self._closed:
            self._closed = True
            self.engine.close()
            if self.draft is not None:
                self.draft.close()

    def _require_open(self) -> None:
        if self._closed:
            raise InputError("the model is closed", where=str(self.model.path))

    def __enter__(self) -> LanguageModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        c = self.config
        return f"<LanguageModel {c.arch}, {c.layers} layers, context {self.engine.context}>"


async def _in_threads(pieces: Stream) -> AsyncIterator[str]:
    import asyncio  # whoever awaits has it; others start 15 ms sooner

    done = object()
    try:
        while (piece := await asyncio.to_thread(next, pieces, done)) is not done:
            yield str(piece)
    finally:  # a token may be in the making when a task is cancelled
        await asyncio.shield(asyncio.to_thread(pieces.close))


__all__ = ["LanguageModel", "Stream"]
