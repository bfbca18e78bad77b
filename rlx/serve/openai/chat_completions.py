"""`/v1/chat/completions`."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from rlx.serve.api_errors import api_error, openai_shape
from rlx.serve.chat import Answers, ChatRequest, open_chat
from rlx.serve.context import ServerContext, body_of, connected, context_of, terms_of
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
from rlx.serve.json_body import Fields
from rlx.serve.openai.messages_in import read_choice, read_messages, read_tools
from rlx.serve.openai.parameters import (
    SAMPLING,
    choices,
    response_format,
    sampling_settings,
    stream_usage,
)
from rlx.serve.streams import DONE, EventStream, json_text

_WHOLE = 1 << 31
_FIELDS = (
    "messages tools tool_choice parallel_tool_calls response_format logprobs top_logprobs "
    "max_completion_tokens reasoning_effort chat_template_kwargs "
    # accepted, without effect here
    "metadata store service_tier prompt_cache_key prompt_cache_retention safety_identifier "
    "verbosity modalities prediction "
    # refused where they ask for something
    "audio web_search_options functions function_call"
)
KNOWN = SAMPLING | frozenset(_FIELDS.split())
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


def chat_request(fields: Fields, context: ServerContext, request: Request) -> ChatRequest:
    """The neutral form of a body."""
    fields.refuse("audio", "is not supported: models answer in text.")
    fields.refuse("web_search_options", "is not supported: this server does not search.")
    for old in ("functions", "function_call"):
        fields.refuse(old, "is not supported: use 'tools' and 'tool_choice'.")
    if fields.get("modalities") not in (None, ["text"]):
        fields.refuse("modalities", "must be ['text'].")
    settings = sampling_settings(fields)
    longest = fields.whole("max_completion_tokens", 0, _WHOLE - 1)
    if longest is not None:
        settings["max_tokens"] = longest
    schema = response_format(fields)
    if schema is not None:
        settings["json_schema"] = schema
    top = fields.whole("top_logprobs", 0, 20)
    if fields.flag("logprobs"):
        settings["logprobs"] = max(top or 0, 1)
    elif top is not None:
        raise fields.wrong("top_logprobs", "'logprobs' to be true")
    options = dict(fields.object("chat_template_kwargs") or {})
    if "reasoning_effort" in fields:
        options["reasoning_effort"] = fields.choice("reasoning_effort", _EFFORTS, "")
        if options["reasoning_effort"] == "none":
            options.setdefault("enable_thinking", False)
    for taken in ("messages", "tools", "template", "add_generation_prompt", "parse_special"):
        if taken in options:
            raise fields.wrong("chat_template_kwargs", f"no '{taken}', which is set already")
    tools = read_tools(fields)
    return ChatRequest(
        fields.needed_text("model"), read_messages(fields), settings, tools,
        read_choice(fields, tools), fields.flag("parallel_tool_calls", True), options,
        choices(fields, context.limits.most_choices), terms_of(request, fields),
    )  # fmt: skip


async def chat_completions(request: Request) -> Response:
    context = context_of(request)
    fields = await body_of(request, KNOWN)
    asked = chat_request(fields, context, request)
    stream = fields.flag("stream")
    with_usage = stream_usage(fields, stream)
    top = fields.whole("top_logprobs", 0, 20) or 0
    answers = await connected(request, open_chat(context.pool, asked))
    shape = _Shape(asked.model, top, with_usage)
    if stream:
        events = _chunks(context, answers, request, shape)
        return EventStream(events, answers.close, context.limits.write_seconds)
    try:
        whole = await connected(request, _collect(context, answers, request, shape))
    finally:
        await answers.close()
    return Response(json.dumps(whole), media_type="application/json")


class _Shape:
    """The JSON of one completion. What all chunks share is encoded once."""

    def __init__(self, model: str, top: int, with_usage: bool) -> None:
        self.id = "chatcmpl-" + secrets.token_hex(12)
        self.created, self.model, self.top, self.with_usage = (
            int(time.time()),
            model,
            top,
            with_usage,
        )
        self._head = (
            f'data: {{"id":"{self.id}","object":"chat.completion.chunk","created":{self.created},'
            f'"model":{json.dumps(model)},"system_fingerprint":null,"choices":['
        )
        self._tail = '],"usage":null}\n\n' if with_usage else "]}\n\n"

    def chunk(self, number: int, delta: str, reason: str = "null", logprobs: str = "null") -> bytes:
        return (
            f'{self._head}{{"index":{number},"delta":{delta},"logprobs":{logprobs},'
            f'"finish_reason":{reason}}}{self._tail}'
        ).encode()

    def usage_chunk(self, usage: Usage) -> bytes:
        return f'{self._head}],"usage":{json.dumps(usage_json(usage))}}}\n\n'.encode()

    def logprobs(self, tokens: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        if tokens is None:
            return None
        content = []
        for one in tokens:
            top = [_token(*t[1:]) for t in one.top[: self.top]]
            content.append({**_token(one.piece, one.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def delta(self, number: int, event: Event) -> bytes:
        """An event as a chunk."""
        if isinstance(event, TextDelta):
            told = json.dumps(self.logprobs(event.logprobs)) if event.logprobs else "null"
            return self.chunk(number, f'{{"content":{json_text(event.text)}}}', logprobs=told)
        if isinstance(event, ReasoningDelta):
            return self.chunk(number, f'{{"reasoning_content":{json_text(event.text)}}}')
        if isinstance(event, Finished):
            return self.chunk(number, "{}", json.dumps(event.reason))
        call: dict[str, Any]
        if isinstance(event, ToolCallStart):
            function = {"name": event.name, "arguments": ""}
            call = {"id": event.id, "type": "function", "function": function}
        else:
            call = {"function": {"arguments": event.arguments}}
        told = json.dumps({"tool_calls": [{"index": event.index, **call}]})
        return self.chunk(number, told)


def _token(piece: bytes, logprob: float) -> dict[str, Any]:
    text = piece.decode("utf-8", "replace")
    return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(piece)}


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


async def _chunks(
    context: ServerContext, answers: Answers, request: Request, shape: _Shape
) -> AsyncGenerator[bytes, None]:
    """The stream: chunks, the usage where it is wanted, and the end."""
    usage: Usage | None = None
    try:
        for number in range(len(answers.answers)):
            yield shape.chunk(number, '{"role":"assistant","content":""}')
        async for number, event in context.observed(answers, request):
            if isinstance(event, Finished):
                usage = event.usage if usage is None else usage + event.usage
            yield shape.delta(number, event)
        if shape.with_usage and usage is not None:
            yield shape.usage_chunk(usage)
    except Exception as error:  # the status is sent already
        context.log.failure("stream failed", error, path=request.url.path)
        yield f"data: {json.dumps(openai_shape(api_error(error)))}\n\n".encode()
    yield DONE


async def _collect(
    context: ServerContext, answers: Answers, request: Request, shape: _Shape
) -> dict[str, Any]:
    """The whole completion."""
    found = [_Choice() for _ in answers.answers]
    usage: Usage | None = None
    async for number, event in context.observed(answers, request):
        found[number].add(event)
        if isinstance(event, Finished):
            usage = event.usage if usage is None else usage + event.usage
    assert usage is not None
    return {
        "id": shape.id,
        "object": "chat.completion",
        "created": shape.created,
        "model": shape.model,
        "system_fingerprint": None,
        "choices": [choice.json(i, shape) for i, choice in enumerate(found)],
        "usage": usage_json(usage),
    }


class _Choice:
    """One answer, put together of its events."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.calls: dict[int, dict[str, Any]] = {}
        self.logprobs: list[TokenLogprob] | None = None
        self.reason = ""

    def add(self, event: Event) -> None:
        if isinstance(event, TextDelta):
            self.text.append(event.text)
            if event.logprobs is not None:
                self.logprobs = [*(self.logprobs or ()), *event.logprobs]
        elif isinstance(event, ReasoningDelta):
            self.reasoning.append(event.text)
        elif isinstance(event, ToolCallStart):
            function = {"name": event.name, "arguments": ""}
            self.calls[event.index] = {"id": event.id, "type": "function", "function": function}
        elif isinstance(event, ToolCallDelta):
            self.calls[event.index]["function"]["arguments"] += event.arguments
        else:
            self.reason = event.reason

    def json(self, number: int, shape: _Shape) -> dict[str, Any]:
        text: str | None = "".join(self.text)
        if self.calls and not text:
            text = None
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = [self.calls[i] for i in sorted(self.calls)]
        return {
            "index": number,
            "message": message,
            "logprobs": shape.logprobs(self.logprobs),
            "finish_reason": self.reason,
        }
