"""`/v1/models`, `/tokenize`, `/detokenize`: what a server has, and its tokenizers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from rlx.serve.api_errors import ApiError, bad_request
from rlx.serve.context import body_of, connected, context_of
from rlx.serve.model_pool import ModelInfo
from rlx.serve.openai.completions import is_tokens
from rlx.serve.openai.messages_in import read_messages, read_tools

_TOKENIZE = (
    "model prompt text content messages tools add_special_tokens add_special with_pieces "
    "add_generation_prompt chat_template_kwargs"
)
_DETOKENIZE = "model tokens skip_special_tokens"
TOKENIZE, DETOKENIZE = frozenset(_TOKENIZE.split()), frozenset(_DETOKENIZE.split())


def _json(value: Any) -> Response:
    return Response(json.dumps(value), media_type="application/json")


def _model(info: ModelInfo) -> dict[str, Any]:
    told = {"id": info.name, "object": "model", "created": info.created, "owned_by": "rlx"}
    return told | {"loaded": info.loaded} | ({"parent": info.parent} if info.parent else {})


async def models(request: Request) -> Response:
    found = [_model(info) for info in context_of(request).pool.models()]
    return _json({"object": "list", "data": found})


async def model(request: Request) -> Response:
    name = request.path_params["name"]
    for info in context_of(request).pool.models():
        if info.name == name:
            return _json(_model(info))
    raise ApiError(
        404, f"The model '{name[:200]}' does not exist.", param="model", code="model_not_found"
    )


async def tokenize(request: Request) -> Response:
    """Tokens of a text, or of a conversation in the model's template."""
    context = context_of(request)
    fields = await body_of(request, TOKENIZE)
    named = [n for n in ("prompt", "text", "content", "messages") if n in fields]
    if len(named) != 1:
        raise bad_request("Give one of 'prompt' and 'messages'.", "prompt", "invalid_value")
    special = fields.flag("add_special_tokens", fields.flag("add_special", True))
    messages = read_messages(fields) if named == ["messages"] else None
    text = None if messages is not None else fields.needed_text(named[0])
    options = dict(fields.object("chat_template_kwargs") or {})
    options["add_generation_prompt"] = fields.flag("add_generation_prompt", True)
    tools = read_tools(fields) or None
    with_pieces = fields.flag("with_pieces")
    with await connected(
        request, context.pool.acquire(fields.needed_text("model"), "tokens")
    ) as lease:
        served = lease.model
        tokenizer = served.tokenizer

        def encode() -> Any:
            if messages is not None:
                return tokenizer.encode_chat(messages, tools=tools, **options)
            return tokenizer.encode(text, add_special=special)

        served.check_length(len(text or ""))
        tokens = await asyncio.to_thread(encode)
        body = {"tokens": tokens, "count": len(tokens), "max_model_len": served.context}
        if with_pieces:
            body["pieces"] = [tokenizer.piece(t).decode("utf-8", "replace") for t in tokens]
    return _json(body)


async def detokenize(request: Request) -> Response:
    context = context_of(request)
    fields = await body_of(request, DETOKENIZE)
    tokens = fields.get("tokens")
    if tokens is None:
        raise fields.missing("tokens")
    if tokens != [] and not is_tokens(tokens):
        raise fields.wrong("tokens", "an array of token ids")
    skip = fields.flag("skip_special_tokens", True)
    with await connected(
        request, context.pool.acquire(fields.needed_text("model"), "tokens")
    ) as lease:
        tokenizer = lease.model.tokenizer
        beyond = next((t for t in tokens if t >= len(tokenizer)), None)
        if beyond is not None:
            raise bad_request(
                f"No such token: {beyond}; the vocabulary has {len(tokenizer)}.", "tokens",
                "invalid_value",
            )  # fmt: skip
        text = await asyncio.to_thread(tokenizer.decode, tokens, skip_special=skip)
    return _json({"text": text, "prompt": text})
