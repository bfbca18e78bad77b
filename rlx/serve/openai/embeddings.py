"""`/v1/embeddings` and `/v1/rerank`: vectors of texts, and texts by relevance."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from rlx.serve.api_errors import bad_request
from rlx.serve.context import body_of, connected, context_of, terms_of
from rlx.serve.json_body import Fields
from rlx.serve.model_pool import Lease
from rlx.serve.openai.completions import is_tokens
from rlx.serve.vectors import Vectors, embed, relevance

_EMBED = "model input encoding_format dimensions user prompt truncate normalize"
_RERANK = "model query documents top_n return_documents user truncate"
EMBED, RERANK = frozenset(_EMBED.split()), frozenset(_RERANK.split())
_INPUT = "a string, an array of strings, or token ids, or arrays of them"


async def embeddings(request: Request) -> Response:
    context = context_of(request)
    fields = await body_of(request, EMBED)
    texts = _inputs(fields, context.limits.most_inputs)
    kind = fields.choice("encoding_format", ("float", "base64"), "float")
    width = fields.whole("dimensions", 1, 1 << 20)
    prompt, normalize = fields.text("prompt"), fields.get("normalize")
    if normalize is not None:
        normalize = fields.flag("normalize")
    cut, model = fields.flag("truncate"), fields.needed_text("model")
    lease = await connected(request, context.pool.acquire(model, "embeddings"))
    with lease:
        if width is not None and width > lease.model.encoder.width:
            most = lease.model.encoder.width
            raise bad_request(
                f"'dimensions' is {width}; this model's vectors have {most}.", "dimensions",
                "invalid_value",
            )  # fmt: skip
        found = await connected(
            request,
            embed(
                lease.model, texts, width, normalize, prompt, cut, terms_of(request, fields).user
            ),
        )
    _count(request, lease, found)
    rows = [
        {"object": "embedding", "index": i, "embedding": _encoded(row, kind)}
        for i, row in enumerate(found.rows)
    ]
    usage = {"prompt_tokens": found.tokens, "total_tokens": found.tokens}
    body = {"object": "list", "data": rows, "model": model, "usage": usage}
    return Response(json.dumps(body), media_type="application/json")


def _encoded(row: Any, kind: str) -> list[float] | str:
    if kind == "base64":
        return base64.b64encode(row.astype("<f4").tobytes()).decode()
    # the shortest numbers that are these f32
    return [float(str(number)) for number in row.astype(np.float32)]


def _inputs(fields: Fields, most: int) -> list[str | list[int]]:
    given = fields.get("input")
    if given is None:
        raise fields.missing("input")
    if isinstance(given, str) or is_tokens(given):
        given = [given]
    if not isinstance(given, list) or not given:
        raise fields.wrong("input", _INPUT)
    if len(given) > most:
        raise fields.wrong("input", f"at most {most} inputs")
    if not all((isinstance(one, str) and one) or is_tokens(one) for one in given):
        raise fields.wrong("input", _INPUT + ", none of them empty")
    return given


def _count(request: Request, lease: Lease, found: Vectors) -> None:
    context, name = context_of(request), lease.model.name
    context.metrics.prompt_tokens.labels(name).inc(found.tokens)
    request.scope.setdefault("rlx.log", {}).update(model=name, prompt_tokens=found.tokens)


async def rerank(request: Request) -> Response:
    """The interface of Cohere and Jina: documents by relevance to a query."""
    context = context_of(request)
    fields = await body_of(request, RERANK)
    query, model = fields.needed_text("query"), fields.needed_text("model")
    texts = _documents(fields, context.limits.most_inputs)
    top = fields.whole("top_n", 1, 1 << 31)
    with_texts, cut = fields.flag("return_documents"), fields.flag("truncate", True)
    lease = await connected(request, context.pool.acquire(model, "rerank"))
    with lease:
        found = await connected(request, relevance(lease.model, query, texts, cut))
    _count(request, lease, found)
    order = np.argsort(-found.rows, kind="stable")[:top]
    results = [
        {"index": int(i), "relevance_score": float(found.rows[i])}
        | ({"document": {"text": texts[i]}} if with_texts else {})
        for i in order
    ]
    usage = {"prompt_tokens": found.tokens, "total_tokens": found.tokens}
    body = {"object": "list", "model": model, "results": results, "usage": usage}
    return Response(json.dumps(body), media_type="application/json")


def _documents(fields: Fields, most: int) -> list[str]:
    given = fields.array("documents", most)
    if given is None:
        raise fields.missing("documents")
    found = []
    for one in given:
        text = one.get("text") if isinstance(one, dict) else one
        if not isinstance(text, str):
            raise fields.wrong("documents", "strings, or objects with a text")
        found.append(text)
    if not found:
        raise fields.wrong("documents", "one document at least")
    return found
