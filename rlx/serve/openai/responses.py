"""`/v1/responses`: items in, items out, and answers that later requests go on from."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rlx.serve.api_errors import ApiError, api_error
from rlx.serve.chat import Answers, ChatRequest, open_chat
from rlx.serve.context import ServerContext, body_of, connected, context_of, terms_of
from rlx.serve.json_body import Fields
from rlx.serve.openai.parameters import SAMPLING, sampling_settings
from rlx.serve.openai.response_events import ResponseBuilder
from rlx.serve.openai.response_items import messages_of_items
from rlx.serve.openai.response_store import ResponseStore
from rlx.serve.reasoning import EFFORTS, thinking_options
from rlx.serve.streams import EventStream

_MOST_TOOLS, _WHOLE = 128, 1 << 31
_FIELDS = (
    "input instructions tools tool_choice parallel_tool_calls text max_output_tokens store "
    "previous_response_id reasoning metadata truncation include top_logprobs "
    # accepted, without effect here
    "service_tier prompt_cache_key prompt_cache_retention safety_identifier max_tool_calls "
    # refused where they ask for something
    "background conversation prompt"
)
_UNUSED = {"n", "max_tokens", "logit_bias", "stop"}
KNOWN = (SAMPLING - _UNUSED) | frozenset(_FIELDS.split())


def routes() -> list[Route]:
    return [
        Route("/v1/responses", create, methods=["POST"]),
        Route("/v1/responses/{id}", retrieve, methods=["GET"]),
        Route("/v1/responses/{id}", delete, methods=["DELETE"]),
    ]


async def create(request: Request) -> Response:
    context, fields = context_of(request), await body_of(request, KNOWN)
    for name, why in (
        ("background", "is not supported: responses are generated at once."),
        ("conversation", "is not supported: use 'previous_response_id'."),
        ("prompt", "is not supported: this server has no stored prompts."),
    ):
        fields.refuse(name, why)
    fields.choice("truncation", ("auto", "disabled"), "disabled")
    store, caller = store_of(request), caller_of(request)
    before = _before(store, caller, fields)
    talk = messages_of_items(fields)
    asked = _chat_request(fields, request, [*before, *talk])
    builder = ResponseBuilder(_echo(fields), context.tag)
    keep, stream = fields.flag("store", True), fields.flag("stream")
    answers = await connected(request, open_chat(context.pool, asked))

    def finished() -> None:
        if keep:
            history = [*before, *talk, *builder.messages()]
            store.add(caller, builder.id, history, builder.response)

    if stream:
        events = _stream(context, answers, request, builder, finished)
        return EventStream(events, answers.close, context.limits.write_seconds)
    try:
        await connected(request, _collect(context, answers, request, builder))
    finally:
        await answers.close()
    finished()
    return Response(json.dumps(builder.response), media_type="application/json")


async def retrieve(request: Request) -> Response:
    found = store_of(request).get(caller_of(request), request.path_params["id"])
    return Response(json.dumps(found.response), media_type="application/json")


async def delete(request: Request) -> Response:
    name = request.path_params["id"]
    store_of(request).remove(caller_of(request), name)
    told = {"id": name, "object": "response.deleted", "deleted": True}
    return Response(json.dumps(told), media_type="application/json")


def store_of(request: Request) -> ResponseStore:
    """The responses of this server."""
    state = request.app.state
    if not hasattr(state, "responses"):
        state.responses = ResponseStore()
    found: ResponseStore = state.responses
    return found


def caller_of(request: Request) -> str:
    """Whose responses a request may see."""
    caller = request.scope.get("rlx.caller")
    return "" if caller is None else str(caller.name)


def _before(store: ResponseStore, caller: str, fields: Fields) -> list[dict[str, Any]]:
    """The conversation that a request goes on from."""
    earlier = fields.text("previous_response_id")
    if earlier is None:
        return []
    try:
        return store.get(caller, earlier).messages
    except ApiError as error:
        message = f"Previous response with id '{earlier[:80]}' not found."
        code = "previous_response_not_found"
        raise ApiError(400, message, param="previous_response_id", code=code) from error


def _chat_request(fields: Fields, request: Request, messages: list[dict[str, Any]]) -> ChatRequest:
    settings = sampling_settings(fields)
    longest = fields.whole("max_output_tokens", 1, _WHOLE - 1)
    if longest is not None:
        settings["max_tokens"] = longest
    schema = _text_format(fields)
    if schema is not None:
        settings["json_schema"] = schema
    told = fields.text("instructions")
    system = [{"role": "system", "content": told}] if told else []
    tools = _tools(fields)
    return ChatRequest(
        fields.needed_text("model"), [*system, *messages], settings, tools,
        _choice(fields, tools), fields.flag("parallel_tool_calls", True), _thinking(fields), 1,
        terms_of(request, fields),
    )  # fmt: skip


def _thinking(fields: Fields) -> dict[str, Any]:
    given = fields.object("reasoning")
    if given is None:
        return {}
    inner = Fields(given, ("effort", "summary", "generate_summary"), "reasoning.")
    effort = inner.choice("effort", EFFORTS, "") if "effort" in inner else None
    return thinking_options(effort=effort)


def _text_format(fields: Fields) -> dict[str, Any] | None:
    """The schema of the answer, if it is to be JSON."""
    given = fields.object("text")
    outer = Fields(given or {}, ("format", "verbosity"), "text.")
    form = outer.object("format")
    if form is None:
        return None
    known = ("type", "name", "schema", "strict", "description")
    inner = Fields(form, known, "text.format.")
    kind = inner.choice("type", ("text", "json_object", "json_schema"), "")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    inner.needed_text("name")
    schema = inner.object("schema")
    if schema is None:
        raise inner.missing("schema")
    return schema


def _tools(fields: Fields) -> list[dict[str, Any]]:
    """Functions in the form of chat completions; other kinds of tools run elsewhere."""
    found = []
    for i, tool in enumerate(fields.array("tools", _MOST_TOOLS) or []):
        where = f"tools[{i}]."
        if not isinstance(tool, dict):
            raise fields.wrong("tools", "an array of objects")
        inner = Fields(tool, ("type", "name", "description", "parameters", "strict"), where)
        inner.choice("type", ("function",), "")
        told = {"name": inner.needed_text("name"), "description": inner.text("description") or ""}
        parameters = {"parameters": inner.object("parameters") or {}}
        strict = {"strict": inner.flag("strict")}
        found.append({"type": "function", "function": told | parameters | strict})
    return found


def _choice(fields: Fields, tools: list[dict[str, Any]]) -> str | dict[str, Any]:
    given = fields.get("tool_choice")
    if given is None:
        return "auto" if tools else "none"
    if isinstance(given, str):
        chosen = fields.choice("tool_choice", ("none", "auto", "required"), "auto")
        if chosen == "required" and not tools:
            raise fields.wrong("tool_choice", "tools to choose from")
        return chosen if tools else "none"
    inner = Fields(fields.object("tool_choice") or {}, ("type", "name"), "tool_choice.")
    inner.choice("type", ("function",), "")
    return {"type": "function", "function": {"name": inner.needed_text("name")}}


def _echo(fields: Fields) -> dict[str, Any]:
    """What a response repeats of its request."""
    given = {name: fields.get(name) for name in ("instructions", "max_output_tokens", "user",
             "previous_response_id", "temperature", "top_p")}  # fmt: skip
    reasoning = fields.object("reasoning") or {}
    return given | {
        "model": fields.get("model"),
        "metadata": fields.object("metadata") or {},
        "parallel_tool_calls": fields.flag("parallel_tool_calls", True),
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "store": fields.flag("store", True),
        "text": {"format": (fields.get("text") or {}).get("format") or {"type": "text"}},
        "tool_choice": fields.get("tool_choice") or "auto",
        "tools": fields.get("tools") or [],
        "truncation": fields.get("truncation") or "disabled",
    }


async def _stream(
    context: ServerContext, answers: Answers, request: Request, builder: ResponseBuilder,
    finished: Any,
) -> AsyncGenerator[bytes, None]:  # fmt: skip
    try:
        for told in builder.begin():
            yield _sent(told)
        async for _, event in context.observed(answers, request):
            for told in builder.add(event):
                yield _sent(told)
        finished()
    except Exception as error:  # the status is sent already
        context.log.failure("stream failed", error, path=request.url.path)
        for told in builder.fail(api_error(error)):
            yield _sent(told)


def _sent(told: dict[str, Any]) -> bytes:
    return f"event: {told['type']}\ndata: {json.dumps(told)}\n\n".encode()


async def _collect(
    context: ServerContext, answers: Answers, request: Request, builder: ResponseBuilder
) -> None:
    builder.begin()
    async for _, event in context.observed(answers, request):
        builder.add(event)
