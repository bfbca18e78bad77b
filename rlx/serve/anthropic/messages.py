"""`/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rlx.serve.anthropic.blocks import BlockBuilder
from rlx.serve.anthropic.conversation import read_conversation, read_system
from rlx.serve.api_errors import SHAPES, ApiError, api_error, bad_request
from rlx.serve.chat import Answers, ChatRequest, open_chat
from rlx.serve.context import ServerContext, body_of, connected, context_of, terms_of
from rlx.serve.json_body import Fields
from rlx.serve.reasoning import thinking_options
from rlx.serve.streams import EventStream

_MOST_TOOLS, _MOST_STOPS, _WHOLE = 256, 64, 1 << 31
_FIELDS = (
    "model messages max_tokens system stop_sequences stream temperature top_p top_k tools "
    "tool_choice thinking metadata service_tier priority output_config cache_control "
    # refused where they ask for something
    "container context_management mcp_servers thread"
)
KNOWN = frozenset(_FIELDS.split())
_SETTINGS = {"max_tokens", "stream", "stop_sequences", "temperature", "top_p", "top_k"}
_COUNTED = KNOWN - _SETTINGS
_NO_THREADS = "thread_unsupported_request"
_KINDS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
          404: "not_found_error", 408: "timeout_error", 413: "request_too_large",
          429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"}  # fmt: skip


def routes() -> list[Route]:
    return [
        Route("/v1/messages", create, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    ]


def anthropic_shape(error: ApiError) -> dict[str, Any]:
    usual = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _KINDS.get(error.status, usual)
    told: dict[str, Any] = {"type": kind, "message": error.message}
    if error.code == _NO_THREADS:  # by this the client knows that it must send all messages itself
        told["details"] = {"error_code": _NO_THREADS, "unsupported": ["thread"]}
    return {"type": "error", "error": told}


SHAPES |= dict.fromkeys(("/v1/messages", "/v1/messages/count_tokens"), anthropic_shape)


async def create(request: Request) -> Response:
    context, fields = context_of(request), await body_of(request, KNOWN)
    for name in ("container", "context_management", "mcp_servers"):
        fields.refuse(name, "is not supported: this server generates text and calls of tools.")
    if "thread" in fields:
        raise bad_request("'thread' is not supported: send all messages.", "thread", _NO_THREADS)
    asked = _chat_request(fields, _settings(fields), request)
    stream = fields.flag("stream")
    answers = await connected(request, open_chat(context.pool, asked))
    builder = BlockBuilder(asked.model)
    if stream:
        events = _stream(context, answers, request, builder)
        return EventStream(events, answers.close, context.limits.write_seconds)
    try:
        await connected(request, _collect(context, answers, request, builder))
    finally:
        await answers.close()
    return Response(json.dumps(builder.message), media_type="application/json")


async def count_tokens(request: Request) -> Response:
    """How many tokens a conversation has, with its tools."""
    context, fields = context_of(request), await body_of(request, _COUNTED)
    asked = _chat_request(fields, {}, request)
    lease = await context.pool.acquire(asked.model, "chat")
    try:
        chat = await asyncio.to_thread(
            lease.model.answer_format.prepare, asked.messages, tools=asked.tools,
            choice=asked.tool_choice, template_options=asked.template_options,
        )  # fmt: skip
    finally:
        lease.release()
    told = {"input_tokens": len(chat.prompt)}
    return Response(json.dumps(told), media_type="application/json")


def _settings(fields: Fields) -> dict[str, Any]:
    longest = fields.whole("max_tokens", 1, _WHOLE - 1)
    if longest is None:
        raise fields.missing("max_tokens")
    found: dict[str, Any] = {
        "max_tokens": longest,
        "temperature": fields.number("temperature", 0, 1),
        "top_p": fields.number("top_p", 0, 1),
        "top_k": fields.whole("top_k", 0, _WHOLE - 1),
    }
    stops = fields.array("stop_sequences", _MOST_STOPS)
    if stops is not None:
        if not all(isinstance(s, str) and 0 < len(s) <= 1000 and not s.isspace() for s in stops):
            raise fields.wrong("stop_sequences", "texts of 1 to 1000 characters, not only space")
        found["stop"] = tuple(stops)
    schema = _schema(fields)
    if schema is not None:
        found["json_schema"] = schema
    return {name: value for name, value in found.items() if value is not None}


def _schema(fields: Fields) -> dict[str, Any] | None:
    given = fields.object("output_config")
    if given is None:
        return None
    outer = Fields(given, ("format", "effort"), "output_config.")
    form = outer.object("format")
    if form is None:
        return None
    inner = Fields(form, ("type", "schema"), "output_config.format.")
    inner.choice("type", ("json_schema",), "")
    return inner.object("schema") or {"type": "object"}


def _chat_request(fields: Fields, settings: dict[str, Any], request: Request) -> ChatRequest:
    tools = _tools(fields)
    choice, parallel = _choice(fields, tools)
    talk = [*read_system(fields), *read_conversation(fields)]
    return ChatRequest(
        fields.needed_text("model"), talk, settings, tools, choice, parallel, _thinking(fields), 1,
        terms_of(request, fields),
    )  # fmt: skip


def _thinking(fields: Fields) -> dict[str, Any]:
    """Models think where they are asked to, within `max_tokens`."""
    given = fields.object("thinking")
    if given is None:
        return thinking_options(False)
    inner = Fields(given, ("type", "budget_tokens", "display"), "thinking.")
    kind = inner.choice("type", ("enabled", "disabled", "adaptive"), "")
    budget = inner.whole("budget_tokens", 1, _WHOLE - 1)
    if kind == "enabled" and budget is None:
        raise inner.missing("budget_tokens")
    return thinking_options(kind != "disabled")


def _tools(fields: Fields) -> list[dict[str, Any]]:
    found = []
    for i, tool in enumerate(fields.array("tools", _MOST_TOOLS) or []):
        if not isinstance(tool, dict):
            raise fields.wrong("tools", "an array of objects")
        known = ("name", "description", "input_schema", "type", "cache_control", "strict",
                 "input_examples", "eager_input_streaming", "defer_loading",
                 "allowed_callers")  # fmt: skip
        inner = Fields(tool, known, f"tools[{i}].")
        inner.choice("type", ("custom",), "custom")
        schema = inner.object("input_schema")
        if schema is None:
            raise inner.missing("input_schema")
        told = {"name": inner.needed_text("name"), "description": inner.text("description") or ""}
        more = {"parameters": schema, "strict": inner.flag("strict")}
        found.append({"type": "function", "function": told | more})
    return found


def _choice(fields: Fields, tools: list[dict[str, Any]]) -> tuple[str | dict[str, Any], bool]:
    """The choice of a tool, and whether several may be called."""
    given = fields.object("tool_choice")
    if given is None:
        return ("auto" if tools else "none"), True
    inner = Fields(given, ("type", "name", "disable_parallel_tool_use"), "tool_choice.")
    kind = inner.choice("type", ("auto", "any", "tool", "none"), "")
    parallel = not inner.flag("disable_parallel_tool_use")
    if not tools and kind != "none":
        raise bad_request("tool_choice: tools must be given with it.", "tool_choice")
    if kind == "tool":
        return {"type": "function", "function": {"name": inner.needed_text("name")}}, parallel
    return {"any": "required"}.get(kind, kind), parallel


async def _stream(
    context: ServerContext, answers: Answers, request: Request, builder: BlockBuilder
) -> AsyncGenerator[bytes, None]:
    try:
        yield _sent(builder.begin(len(answers.prompt)))
        async for _, event in context.observed(answers, request):
            for told in builder.add(event):
                yield _sent(told)
    except Exception as error:  # the status is sent already
        context.log.failure("stream failed", error, path=request.url.path)
        yield _sent(anthropic_shape(api_error(error)))


def _sent(told: dict[str, Any]) -> bytes:
    return f"event: {told['type']}\ndata: {json.dumps(told)}\n\n".encode()


async def _collect(
    context: ServerContext, answers: Answers, request: Request, builder: BlockBuilder
) -> None:
    builder.begin(len(answers.prompt))
    async for _, event in context.observed(answers, request):
        builder.add(event)
