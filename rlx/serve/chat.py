"""Answers of language models as events: conversations and plain prompts.

    chat = await open_chat(pool, ChatRequest("smollm2-135m", messages))
    async for event in chat.answers[0]:
        ...

What is wrong with a request is raised by `open_chat`, before anything is sent. An answer that is
not read to its end is cancelled: `await chat.close()`, or leave `async with`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from rlx.serve.events import (
    Event,
    Finished,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallStart,
    Usage,
)
from rlx.support.records import dataclass

if TYPE_CHECKING:
    from rlx.serve.model_pool import Lease, ModelPool
    from rlx.serve.reasoning import Parser


@dataclass(frozen=True)
class Terms:
    """How a request is scheduled: the engine's `priority`, `user` and `deadline` (seconds)."""

    priority: int = 0
    user: str | None = None
    deadline: float | None = None


@dataclass(frozen=True)
class ChatRequest:
    """A conversation to be answered `n` times. `settings` are those of `rlx.GenerationSettings`,
    and `ignore_eos`; tools and the choice among them are those of OpenAI's chat completions."""

    model: str
    messages: Sequence[Mapping[str, Any]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool = True
    template_options: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    terms: Terms = Terms()


@dataclass(frozen=True)
class TextRequest:
    """A prompt, a text or tokens, to be continued `n` times. `prompt_logprobs` has its own tokens
    scored, and so many of the likeliest in place of each."""

    model: str
    prompt: str | Sequence[int]
    settings: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    terms: Terms = Terms()
    prompt_logprobs: int | None = None


class Answers:
    """The answers to one request, as they are generated. Close it when done."""

    def __init__(self, lease: Lease, replies: list[Any], prompt: list[int]) -> None:
        self.model, self.prompt = lease.model, prompt
        self._lease, self._replies = lease, replies
        self.answers: list[AsyncIterator[Event]] = []

    def cancel(self) -> None:
        """Stop generating, now."""
        for reply in self._replies:
            reply.close()

    async def close(self) -> None:
        """Cancel what is not finished, and let the model go."""
        self.cancel()
        self._lease.release()

    async def __aenter__(self) -> Answers:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def open_chat(pool: ModelPool, request: ChatRequest) -> Answers:
    """Load the model if need be and submit the conversation. Its answers are in `answers`."""
    lease = await pool.acquire(request.model, "chat")
    return await _opened(lease, lambda: _start_chat(lease, request))


async def open_text(pool: ModelPool, request: TextRequest) -> Answers:
    """As `open_chat`, for a prompt without a template."""
    lease = await pool.acquire(request.model, "completions")
    return await _opened(lease, lambda: _start_text(lease, request))


async def run_chat(pool: ModelPool, request: ChatRequest) -> AsyncIterator[Event]:
    """The events of the first answer."""
    async with await open_chat(pool, request) as chat:
        async for event in chat.answers[0]:
            yield event


async def _opened(lease: Lease, start: Callable[[], Answers]) -> Answers:
    """Templates, tokenizers and grammars take their time: they run in a thread."""
    work = asyncio.ensure_future(asyncio.to_thread(start))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:  # the thread goes on: cancel what it starts
        work.add_done_callback(lambda done: _drop(lease, done))
        raise
    except BaseException:
        lease.release()
        raise


def _drop(lease: Lease, done: asyncio.Future[Answers]) -> None:
    if not done.cancelled() and done.exception() is None:
        done.result().cancel()
    lease.release()


def _start_chat(lease: Lease, request: ChatRequest) -> Answers:
    lease.model.check_length(_characters(request.messages))
    chat = lease.model.answer_format.prepare(
        request.messages, tools=request.tools, choice=request.tool_choice,
        parallel=request.parallel_tool_calls, settings=_settings(lease, request.settings),
        template_options=request.template_options,
    )  # fmt: skip
    parsers = [chat.parser() for _ in range(request.n)]
    return _submit(lease, chat.prompt, chat.settings, request.terms, parsers, chat.reasoning_tokens)


def _settings(lease: Lease, given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a generation. `ignore_eos` keeps tokens that end an answer from coming."""
    settings = dict(given)
    if settings.pop("ignore_eos", False):
        ends = dict.fromkeys(lease.model.tokenizer.end_ids, -math.inf)
        settings["logit_bias"] = {**settings.get("logit_bias", {}), **ends}
    return settings


def _characters(messages: Sequence[Mapping[str, Any]]) -> int:
    contents = (message.get("content") for message in messages)
    return sum(len(content) for content in contents if isinstance(content, str))


def _start_text(lease: Lease, request: TextRequest) -> Answers:
    from rlx.models.arguments import prompt_tokens

    if isinstance(request.prompt, str):
        lease.model.check_length(len(request.prompt))
    prompt = prompt_tokens(lease.model.tokenizer, request.prompt)
    settings = _settings(lease, request.settings) | {"prompt_logprobs": request.prompt_logprobs}
    return _submit(lease, prompt, settings, request.terms, [None] * request.n, None)


def _submit(
    lease: Lease, prompt: list[int], settings: dict[str, Any], terms: Terms,
    parsers: Sequence[Parser | None], count: Callable[[Sequence[int]], int] | None,
) -> Answers:  # fmt: skip
    model, seed = lease.model, settings.get("seed")
    settings["max_tokens"] = model.most_tokens(len(prompt), settings.get("max_tokens"))
    if lease.adapter is not None:
        settings["adapter"] = model.adapters[lease.adapter]
    asked = {"priority": terms.priority, "user": terms.user, "deadline": terms.deadline}
    chat = Answers(lease, [], prompt)
    try:
        for number, parser in enumerate(parsers):
            if seed is not None:  # answers with one seed would be the same
                settings["seed"] = seed + number
            reply = model.engine.submit(prompt, **settings, **asked)
            chat._replies.append(reply)
            logprobs = int(settings.get("logprobs") or 0)
            events = _events(reply, model.tokenizer, parser, logprobs, count)
            if settings.get("prompt_logprobs") is not None:
                events = _scored(events, reply, prompt, model.tokenizer)
            chat.answers.append(events)
    except BaseException:
        chat.cancel()
        raise
    return chat


async def _events(
    reply: Any, tokenizer: Any, parser: Parser | None, logprobs: int,
    count: Callable[[Sequence[int]], int] | None,
) -> AsyncIterator[Event]:  # fmt: skip
    """The events of a reply. Reasoning and calls have no log probabilities."""
    seen: set[type] = set()  # kinds of events
    waiting: list[TokenLogprob] = []  # of tokens whose text is held back
    async for chunk in reply.chunks():
        if logprobs:
            waiting += _logprobs(tokenizer, chunk, logprobs)
        events = _parsed(parser, chunk.text)
        for event in events:
            seen.add(type(event))
            if logprobs and isinstance(event, TextDelta):
                event, waiting = TextDelta(event.text, tuple(waiting)), []
            yield event
        if waiting and events and not any(isinstance(e, TextDelta) for e in events):
            waiting = []
    for event in [] if parser is None else parser.end():
        seen.add(type(event))
        yield event
    if waiting:
        yield TextDelta("", tuple(waiting))
    result = reply.result
    thought = count(result.tokens) if count is not None and ReasoningDelta in seen else 0
    usage = Usage(result.prompt_tokens, result.reused_tokens, len(result.tokens), thought)
    called = ToolCallStart in seen and result.finish_reason == "stop"
    reason = "tool_calls" if called else result.finish_reason
    yield Finished(reason, usage, result.stop_string or None)


async def _scored(
    events: AsyncIterator[Event], reply: Any, prompt: Sequence[int], tokenizer: Any
) -> AsyncIterator[Event]:
    """Events after that of the prompt, whose tokens are all scored before there is another one.
    The token that ends an answer has a log probability too."""
    first = True
    async for event in events:
        result = reply.result
        if first and len(result.prompt_logprobs) == len(prompt) - 1:
            scored = map(partial(_token, tokenizer), prompt[1:], result.prompt_logprobs)
            begin = TokenLogprob(prompt[0], tokenizer.piece(prompt[0]), 0.0)
            yield TextDelta(tokenizer.decode(prompt), (begin, *scored), of_prompt=True)
        first = False
        if isinstance(event, Finished) and len(result.logprobs) > len(result.tokens):
            yield TextDelta("", (_token(tokenizer, result.end_token, result.logprobs[-1]),))
        yield event


def _parsed(parser: Parser | None, text: str) -> Sequence[Event]:
    if not text:
        return ()
    return (TextDelta(text),) if parser is None else parser.push(text)


def _logprobs(tokenizer: Any, chunk: Any, count: int) -> list[TokenLogprob]:
    pairs = zip(chunk.tokens, chunk.logprobs or (), strict=False)
    return [_token(tokenizer, token, row, count) for token, row in pairs]


def _token(
    tokenizer: Any, token: int, row: Mapping[int, float], count: int | None = None
) -> TokenLogprob:
    top = tuple((t, tokenizer.piece(t), p) for t, p in islice(row.items(), count))
    return TokenLogprob(token, tokenizer.piece(token), row[token], top)
