"""Answers of language models as events: conversations and plain prompts.

    chat = await open_chat(pool, ChatRequest("smollm2-135m", messages))
    async for event in chat.answers[0]:
        ...

What is wrong with a request is raised by `open_chat`, before anything is sent. An answer that is
not read to its end is cancelled: `await chat.close()`, or leave `async with`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, Protocol

from rlx.errors import OptionError
from rlx.serve.events import (
    Event,
    Finished,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)
from rlx.support.records import dataclass

if TYPE_CHECKING:
    from rlx.serve.model_pool import Lease, ModelPool


class OutputParser(Protocol):
    """Splits the text of an answer into reasoning, text and tool calls."""

    def push(self, text: str) -> list[Event]: ...
    def end(self) -> list[Event]: ...


@dataclass(frozen=True)
class Terms:
    """How a request is scheduled: the engine's `priority`, `user` and `deadline` (seconds)."""

    priority: int = 0
    user: str | None = None
    deadline: float | None = None


@dataclass(frozen=True)
class ChatRequest:
    """A conversation to be answered `n` times. `settings` are those of `rlx.GenerationSettings`;
    tools and the choice among them are written as OpenAI's chat completions do."""

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
    """A prompt, a text or tokens, to be continued `n` times."""

    model: str
    prompt: str | Sequence[int]
    settings: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    terms: Terms = Terms()


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
    model = lease.model
    tools = [] if request.tool_choice == "none" else list(request.tools)
    settings = dict(request.settings)
    form = model.tool_format()
    messages = form.messages(request.messages, tools)
    grammar = form.grammar(tools, request.tool_choice, request.parallel_tool_calls)
    if grammar is not None:
        if any(settings.get(n) is not None for n in ("json_schema", "regex", "grammar")):
            raise OptionError(
                "a call of a tool is a structure of its own", where="tool_choice",
                got=request.tool_choice, hint="leave out response_format and grammar, or the tools",
            )  # fmt: skip
        settings["grammar"] = grammar
    prompt = model.tokenizer.encode_chat(messages, tools=tools or None, **request.template_options)
    parsers = [form.parser(tools) for _ in range(request.n)]
    return _submit(lease, prompt, settings, request.terms, parsers)


def _start_text(lease: Lease, request: TextRequest) -> Answers:
    from rlx.models.prompts import prompt_tokens

    prompt = prompt_tokens(lease.model.tokenizer, request.prompt)
    return _submit(lease, prompt, dict(request.settings), request.terms, [None] * request.n)


def _submit(
    lease: Lease, prompt: list[int], settings: dict[str, Any], terms: Terms,
    parsers: Sequence[OutputParser | None],
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
            chat.answers.append(_events(reply, model, parser, int(settings.get("logprobs") or 0)))
    except BaseException:
        chat.cancel()
        raise
    return chat


async def _events(
    reply: Any, model: Any, parser: OutputParser | None, logprobs: int
) -> AsyncIterator[Event]:
    """The events of a reply. Reasoning and calls have no log probabilities."""
    counted = _Counter()
    waiting: list[TokenLogprob] = []  # of tokens whose text is held back
    async for chunk in reply.chunks():
        if logprobs:
            waiting += _logprobs(model.tokenizer, chunk, logprobs)
        events = _parsed(parser, chunk.text)
        for event in events:
            counted.see(event)
            if logprobs and isinstance(event, TextDelta):
                event, waiting = TextDelta(event.text, tuple(waiting)), []
            yield event
        if waiting and events and not any(isinstance(e, TextDelta) for e in events):
            waiting = []
    for event in [] if parser is None else parser.end():
        counted.see(event)
        yield event
    if waiting:
        yield TextDelta("", tuple(waiting))
    yield counted.finished(reply.result, model.tokenizer)


def _parsed(parser: OutputParser | None, text: str) -> Sequence[Event]:
    if not text:
        return ()
    return (TextDelta(text),) if parser is None else parser.push(text)


def _logprobs(tokenizer: Any, chunk: Any, count: int) -> list[TokenLogprob]:
    found = []
    for token, row in zip(chunk.tokens, chunk.logprobs or (), strict=False):
        top = tuple((t, tokenizer.piece(t), p) for t, p in list(row.items())[:count])
        found.append(TokenLogprob(token, tokenizer.piece(token), row[token], top))
    return found


class _Counter:
    """Counts what an answer consists of, for its last event."""

    def __init__(self) -> None:
        self.reasoning: list[str] = []
        self.calls = False

    def see(self, event: Event) -> None:
        if isinstance(event, ReasoningDelta):
            self.reasoning.append(event.text)
        elif isinstance(event, ToolCallStart | ToolCallDelta):
            self.calls = True

    def finished(self, result: Any, tokenizer: Any) -> Finished:
        thought = "".join(self.reasoning)
        tokens = len(tokenizer.encode_continuation(thought)) if thought else 0
        written = len(result.tokens)
        usage = Usage(result.prompt_tokens, result.reused_tokens, written, min(tokens, written))
        reason = result.finish_reason
        if self.calls and reason == "stop":
            reason = "tool_calls"
        return Finished(reason, usage, getattr(result, "stop", None))
