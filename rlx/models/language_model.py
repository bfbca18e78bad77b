"""A loaded language model: generates, chats, embeds, gives logits."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlx.errors import InputError, OptionError
from rlx.ir.html import card
from rlx.models.adapter_files import add_adapter
from rlx.models.adapters import Adapter, find_adapter
from rlx.models.arguments import (
    Messages,
    Progress,
    is_many,
    prompt_tokens,
    reporter,
    several_texts,
    system_tokens,
    token_ids,
)
from rlx.models.builder import HIDDEN, SAMPLE
from rlx.models.decoder_runner import DecoderRunner
from rlx.models.embed_plan import EmbedPlan, Rows
from rlx.models.generation import Generation, GenerationState
from rlx.models.model_file import ModelFile
from rlx.models.pooling import normalized
from rlx.models.sampling import GenerationSettings, recommended_sampling
from rlx.models.speculative import (
    Drafter,
    DraftModel,
    PromptLookup,
    check_draft_model,
    decode_draft,
)
from rlx.models.structured_output import penalties_for
from rlx.support.pickling import Unpicklable

POOLING = ("mean", "last")


class Stream(Unpicklable, Iterator[str]):
    """Text as it is generated. `result` fills along; `close()` cancels safely."""

    instead = "read the stream, and pickle its result"

    def __init__(self, pieces: Iterator[str], result: Generation) -> None:
        self._pieces, self.result = pieces, result
        self._turn = threading.Lock()  # a task may be cancelled while a thread runs the model

    def __next__(self) -> str:
        with self._turn:
            return next(self._pieces)

    def close(self) -> None:
        with self._turn:
            self._pieces.close()  # type: ignore[attr-defined]


class LanguageModel(Unpicklable):
    """A model in memory. Calls from several threads take turns; `close()` frees it."""

    def __init__(
        self, model: ModelFile, runner: DecoderRunner, draft: LanguageModel | None = None
    ) -> None:
        """`draft` is a smaller model for speculative decoding."""
        self.model, self.runner = model, runner
        self.draft = draft
        if draft is not None:
            check_draft_model(runner, draft.runner)
        self.config = model.config
        self.tokenizer = model.tokenizer()
        self.sampling = recommended_sampling(model)
        self.adapters: dict[str, Adapter] = {}
        self._closed = False

    def warm(self) -> None:
        """Make the code of prefill and decode now, not with the first token."""
        self._require_open()
        with self.runner.lock:
            self.runner.adapt(None)
            self.runner.executables(SAMPLE)
        if self.draft is not None:
            self.draft.warm()

    # -- text ---------------------------------------------------------------------------------

    def tokenize(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def decode(self, tokens: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of tokens; special ones are left out unless asked for."""
        return self.tokenizer.decode(tokens, skip_special=skip_special)

    def apply_chat_template(
        self,
        messages: Messages,
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        parse_special: bool = False,
        **variables: Any,
    ) -> list[int] | str:
        """The tokens that `chat` runs for a conversation; with `tokenize=False` its text.

        `tools` and `variables` go to the model's template. `parse_special` is as in `chat`.
        """
        given = {"add_generation_prompt": add_generation_prompt, "tools": tools, **variables}
        if not tokenize:
            return self.tokenizer.chat_template().render(messages, **given)
        return self.tokenizer.encode_chat(messages, parse_special=parse_special, **given)

    def settings(self, **options: Any) -> GenerationSettings:
        """The settings of a call with these options: what is not given is what the model
        recommends (`sampling`), else a default."""
        return GenerationSettings.of(self.sampling | options)

    def generate(self, prompt: str | Sequence[Any], *, stream: bool = True, **settings: Any) -> Any:
        """Continue a prompt: an iterator of text, or with `stream=False` a Generation.

        Of a list of prompts it is the list of Generations, the same as one by one.
        """
        if is_many(prompt):
            return [self.generate(one, stream=False, **settings) for one in prompt]
        tokens = prompt_tokens(self.tokenizer, prompt)
        return self._start(tokens, stream, self.settings(**settings))

    def chat(
        self,
        messages: Messages,
        *,
        stream: bool = True,
        parse_special: bool = False,
        **settings: Any,
    ) -> Any:
        """Answer a conversation of {"role": …, "content": …}. Its cached prefix is reused.

        Special tokens written out in messages are text, so that a message cannot pretend to be
        another; with `parse_special` they are what they say.
        """
        tokens = self.tokenizer.encode_chat(messages, parse_special=parse_special)
        made = self.settings(**settings)
        if made.overflow == "shift" and made.keep is None:
            made = replace(made, keep=system_tokens(self.tokenizer, messages, tokens))
        return self._start(tokens, stream, made)

    def agenerate(self, prompt: str | Sequence[int], **settings: Any) -> AsyncIterator[str]:
        """`generate` for asyncio: the model runs in a thread."""
        if is_many(prompt):
            raise InputError(
                "one prompt at a time", got=f"{len(prompt)} prompts",
                hint="rlx.Engine serves many at once",
            )  # fmt: skip
        return _in_threads(self.generate(prompt, **settings))

    def achat(self, messages: Messages, **settings: Any) -> AsyncIterator[str]:
        return _in_threads(self.chat(messages, **settings))

    def _start(self, tokens: list[int], stream: bool, settings: GenerationSettings) -> Any:
        self._require_open()
        self.runner.check(tokens, settings.overflow)
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
        state = GenerationState(self.tokenizer, settings, result)
        try:
            yield from self._generate(prompt, state)
        finally:
            self.runner.lock.leave(state)
            if not state.ended:
                result.finish_reason = "cancelled"

    def _generate(self, prompt: list[int], state: GenerationState) -> Iterator[str]:
        """The text of a generation; each native call may decode several tokens."""
        runner, settings, result = self.runner, state.settings, state.result
        adapter = self._adapter(settings.adapter)
        penalties = penalties_for(settings, self.tokenizer, self.config.vocab, prompt)
        rng, row = settings.rng(), settings.row()
        drafter = None if penalties or settings.logprobs else self._drafter(settings)
        # whether Python must see a token before the next one is drawn
        one_by_one = bool(penalties or settings.logprobs or settings.stop or drafter)
        seen, pending = list(prompt), prompt  # all tokens, and those that are not in the KV cache
        if not settings.max_tokens:
            state.end("length")
        while not state.ended:
            held = runner.lock.enter(state)
            try:
                self._require_open()
                if not held:  # at the start, or after others used the KV cache
                    runner.adapt(adapter)
                    reused = runner.reuse_prefix(seen)
                    result.reused_tokens = result.reused_tokens if result.tokens else reused
                    pending = seen[reused:]
                if len(runner.tokens) + len(pending) > runner.context:
                    if settings.overflow == "error":
                        break
                    pending = seen = self._truncate_context(seen, len(prompt), settings.keep)
                single = len(pending) == 1
                draft = drafter.draft(seen, rng, row) if drafter and single else []
                if draft:
                    drawn, rng = decode_draft(runner, pending[0], draft, rng, row)
                elif single and not one_by_one:
                    count = min(state.tokens_per_call, runner.context - len(runner.tokens))
                    drawn, rng = runner.decode_n(pending[0], rng, row, count, state.ends)
                else:
                    token, rng = runner.step(pending, rng, row, penalties)
                    drawn = [token]
                # now, as others may overwrite them
                count = settings.logprobs
                scored = runner.logprobs(drawn[0], count) if count else None
                piece = state.push(drawn[0], logprobs=scored)
            finally:
                runner.lock.pause()
            if penalties is not None:
                penalties.count(drawn[0])
            pending = drawn[-1:]
            seen += drawn
            if piece:
                yield piece
            for token in drawn[1:]:
                if not state.ended and (piece := state.push(token)):
                    yield piece
        if not state.ended and (piece := state.end("length")):
            yield piece

    def _drafter(self, settings: GenerationSettings) -> Drafter | None:
        """What drafts tokens for speculative decoding: a draft model, or prompt lookup."""
        count = settings.speculate
        if self.draft is not None:
            count = 4 if count is None else count
            return DraftModel(self.runner, count, self.draft.runner) if count else None
        return PromptLookup(self.runner, count) if count else None

    def _truncate_context(self, seen: list[int], prompt: int, keep: int | None) -> list[int]:
        """The tokens that stay of a full context: those that are kept, and the younger half of the
        others. They are run again from an empty KV cache."""
        self.runner.tokens = []
        context = self.runner.context
        first = int(seen[0] == self.tokenizer.bos_id) + (keep or 0) if keep != -1 else prompt
        first = min(first, max(context - 4, 0))
        return seen[:first] + seen[-max((context - first) // 2, 1) :]

    # -- adapters -----------------------------------------------------------------------------

    def load_adapter(self, path: str | os.PathLike[str], name: str | None = None) -> str:
        """Read a LoRA adapter, a PEFT folder or a GGUF file. Returns its name.

        It is the file's own where none is given. Several may be loaded: a call has `adapter=name`,
        or none.
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
        with self.runner.lock:
            self.runner.adapt(chosen)
            return self.runner.rows(token_ids(tokens))

    def embed(
        self,
        texts: str | Sequence[str],
        *,
        pooling: str = "mean",
        normalize: bool = True,
        progress: bool | Progress | None = None,
    ) -> Any:
        """A vector for each text, in order: f32 [texts, hidden]; of one string, [hidden].

        It is the hidden state after the last norm: the "mean" over the tokens, or the "last" one.
        `progress` is called with how many texts are done and how many there are; True writes that
        to stderr.
        """
        self._require_open()
        many = [texts] if isinstance(texts, str) else several_texts(texts)
        found = self._pooled([self.tokenize(t) for t in many], pooling, reporter(progress))
        found = normalized(found) if normalize else found
        return found[0] if isinstance(texts, str) else found

    def plan_embed(
        self, texts: Iterable[str], *, pooling: str = "mean", normalize: bool = True
    ) -> EmbedPlan:
        """`embed` for a batcher, which runs texts of several callers in turn."""
        self._require_open()
        _check_pooling(pooling)
        tokens = [self.tokenize(text) for text in several_texts(texts)]
        for one in tokens:
            self.runner.check(one or [0])

        def run(found: Sequence[Sequence[int]]) -> Rows:
            for number, one in enumerate(found):
                yield [number], self._pooled([one], pooling, reporter(None))

        finish = normalized if normalize else lambda rows: rows
        return EmbedPlan(pooling, tokens, self.config.hidden, run, finish)

    def _pooled(self, texts: Sequence[Sequence[int]], pooling: str, progress: Progress) -> Any:
        """A vector for each text of tokens; zeros for one without any."""
        _check_pooling(pooling)
        found = np.zeros((len(texts), self.config.hidden), np.float32)
        for number, (row, tokens) in enumerate(zip(found, texts, strict=True), 1):
            if len(tokens):
                with self.runner.lock:
                    self.runner.adapt(None)
                    states = self.runner.rows(tokens, HIDDEN)
                row[:] = states[-1] if pooling == "last" else states.mean(0)
            progress(number, len(texts))
        return found

    def perplexity(self, text: str | Sequence[int]) -> float:
        """exp of the mean negative log probability of each token after the first."""
        tokens = self.tokenize(text) if isinstance(text, str) else token_ids(text)
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
            self.runner.close()
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
        return f"<LanguageModel {c.arch}, {c.layers} layers, context {self.runner.context}>"

    def _repr_html_(self) -> str:
        c = self.config
        rows = {"layers": c.layers, "hidden": c.hidden, "heads": f"{c.heads}, KV {c.kv_heads}"}
        more = {"vocabulary": c.vocab, "context": self.runner.context}
        return card(f"LanguageModel {c.arch}", {**rows, **more})


def _check_pooling(pooling: str) -> None:
    if pooling not in POOLING:
        raise OptionError(
            "unknown pooling", where="pooling", got=pooling, expected=" or ".join(POOLING)
        )


async def _in_threads(pieces: Stream) -> AsyncIterator[str]:
    import asyncio  # late: others start 15 ms sooner

    done = object()
    try:
        while (piece := await asyncio.to_thread(next, pieces, done)) is not done:
            yield str(piece)
    finally:  # the model may be running when a task is cancelled
        await asyncio.shield(asyncio.to_thread(pieces.close))


__all__ = ["LanguageModel", "Stream"]
