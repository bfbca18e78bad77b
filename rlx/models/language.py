"""`rlx.load`: a language model that generates, chats, and tells its logits."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlx.errors import InputError, OptionError
from rlx.formats.fetch import resolve
from rlx.models.build import ModelFile
from rlx.models.engine import Engine
from rlx.models.kv import CacheType
from rlx.models.sampling import GenerationSettings, Penalties
from rlx.models.stops import StopWatch
from rlx.models.vectors import normalized, pooled


@dataclass
class Generation:
    """A finished answer: text, tokens, why it ended, what it took."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: str = ""  # stop, length, cancelled
    prompt_tokens: int = 0
    reused_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    logprobs: list[dict[int, float]] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        steps = len(self.tokens) - 1
        return steps / self.decode_seconds if steps > 0 and self.decode_seconds else 0.0

    def __str__(self) -> str:
        return self.text


class Stream(Iterator[str]):
    """Pieces of text as they are made. `result` fills along; `close()` cancels safely."""

    def __init__(self, pieces: Iterator[str], result: Generation) -> None:
        self._pieces, self.result = pieces, result

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        self._pieces.close()  # type: ignore[attr-defined]


class LanguageModel:
    """A model in memory. Calls from several threads take turns; `close()` frees it."""

    def __init__(self, model: ModelFile, engine: Engine) -> None:
        self.model, self.engine = model, engine
        self.config = model.config
        self.tokenizer = model.tokenizer()
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

    async def agenerate(self, prompt: str | Sequence[int], **settings: Any) -> AsyncIterator[str]:
        """The same for asyncio: tokens are made in a thread, the loop stays free."""
        pieces = self.generate(prompt, **settings)
        done = object()
        try:
            while (piece := await asyncio.to_thread(next, pieces, done)) is not done:
                yield str(piece)
        finally:
            pieces.close()

    def _start(self, tokens: list[int], stream: bool, options: Mapping[str, Any]) -> Any:
        self._require_open()
        settings = _settings(options)
        self.engine.check(tokens)
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
        with self.engine.lock:
            self._require_open()
            result.finish_reason = "cancelled"
            decoder = self.tokenizer.stream()
            watch = StopWatch(settings.stop)
            for token in self._draw(prompt, settings, result):
                piece = watch.push(decoder.push(token))
                if piece:
                    result.text += piece
                    yield piece
                if watch.stopped:
                    result.finish_reason = "stop"
                    return
            rest = watch.push(decoder.flush()) + watch.flush()
            if rest:
                result.text += rest
                yield rest

    def _draw(
        self, prompt: list[int], settings: GenerationSettings, result: Generation
    ) -> Iterator[int]:
        """The tokens of an answer, one native run each."""
        engine = self.engine
        ends = self.tokenizer.end_ids | settings.stop_tokens
        vocab = self.config.vocab
        penalties = Penalties(settings, vocab, prompt) if settings.adjusts else None
        rng, row = settings.rng(), settings.row()
        result.reused_tokens = engine.keep(prompt)
        pending = prompt[result.reused_tokens :]
        clock = time.perf_counter()
        while True:
            if len(result.tokens) >= settings.max_tokens:
                result.finish_reason = "length"
                return
            fitting = self._make_room(pending, settings, result)
            if fitting is None:
                return
            token, rng = engine.feed(fitting, rng, row, penalties)
            now = time.perf_counter()
            if result.tokens:
                result.decode_seconds += now - clock
            else:
                result.prefill_seconds = now - clock
            clock = now
            result.tokens.append(token)
            if settings.logprobs:
                result.logprobs.append(_top(engine.last_logits[0], token, settings.logprobs))
            if token in ends:
                result.tokens.pop()
                result.finish_reason = "stop"
                return
            if penalties is not None:
                penalties.count(token)
            yield token
            pending = [token]

    def _make_room(
        self, pending: list[int], settings: GenerationSettings, result: Generation
    ) -> list[int] | None:
        """What to run next when the context is full: nothing, or the younger half again."""
        engine = self.engine
        if len(engine.tokens) + len(pending) <= engine.context:
            return pending
        if settings.overflow == "error":
            result.finish_reason = "length"
            return None
        kept = (engine.tokens + pending)[-max(engine.context // 2, 1) :]
        engine.tokens = []
        return kept

    # -- numbers ------------------------------------------------------------------------------

    def logits(self, tokens: Sequence[int]) -> Any:
        """Logits after each token, f32 [n, vocab]."""
        self._require_open()
        with self.engine.lock:
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


def _settings(options: Mapping[str, Any]) -> GenerationSettings:
    try:
        return GenerationSettings(**options)
    except TypeError:
        known = ", ".join(GenerationSettings.__dataclass_fields__)
        wrong = [n for n in options if n not in GenerationSettings.__dataclass_fields__]
        raise OptionError("unknown setting", got=", ".join(wrong), expected=known) from None


def _top(logits: Any, token: int, count: int) -> dict[int, float]:
    """Log probabilities of the likeliest tokens and of the one drawn."""
    shifted = logits.astype(np.float64) - float(logits.max())
    logs = shifted - np.log(np.exp(shifted).sum())
    best = np.argpartition(-logs, min(count, len(logs)) - 1)[:count]
    ranked = sorted((int(t) for t in best), key=lambda t: -logs[t])
    return {t: float(logs[t]) for t in [*ranked, token]}


def load(
    path_or_name: str | os.PathLike[str] = "smollm2-135m",
    *,
    device: str = "cpu",
    context: int | None = None,
    threads: int | None = None,
    kv: str = "f16",
    quant: str | None = None,
) -> LanguageModel:
    """A language model from a GGUF file, a Hugging Face folder, or the catalogue."""
    model = ModelFile.open(resolve(path_or_name), quant)
    CacheType.of(kv, model.config.head_dim)  # an error now, not with the first token
    engine = Engine(model, device=device, context=context, kv=kv, threads=threads)
    return LanguageModel(model, engine)


__all__ = ["Generation", "LanguageModel", "Stream", "load"]
