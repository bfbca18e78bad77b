"""`/v1/completions`: prompts without a chat template."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from itertools import accumulate
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from rlx.serve.api_errors import api_error, bad_request, openai_shape
from rlx.serve.chat import Answers, TextRequest, open_text
from rlx.serve.context import ServerContext, body_of, connected, context_of, terms_of
from rlx.serve.events import Finished, TextDelta, TokenLogprob, Usage
from rlx.serve.json_body import Fields
from rlx.serve.merge import merged
from rlx.serve.openai.chat_completions import usage_json
from rlx.serve.openai.parameters import (
    SAMPLING,
    choices,
    response_format,
    sampling_settings,
    stream_usage,
)
from rlx.serve.streams import DONE, EventStream, json_text

_FIELDS = "prompt best_of echo logprobs suffix response_format"
KNOWN = SAMPLING | frozenset(_FIELDS.split())
_DEFAULT_TOKENS = 16
_MOST_PROMPTS = 128
_MOST_SCORES = 1 << 18  # log probabilities of prompts in a request, some 25 MiB


def read_prompts(fields: Fields) -> list[str | list[int]]:
    """The prompts: a text, token ids, or several of either."""
    given = fields.get("prompt")
    if given is None:
        raise fields.missing("prompt")
    expected = "a string, an array of token ids, or an array of at most 128 of them"
    if isinstance(given, str) or is_tokens(given):
        return [given]
    if not isinstance(given, list) or not 0 < len(given) <= _MOST_PROMPTS:
        raise fields.wrong("prompt", expected)
    if not all(isinstance(prompt, str) or is_tokens(prompt) for prompt in given):
        raise fields.wrong("prompt", expected)
    return given


def is_tokens(value: Any) -> bool:
    """Whether this is a list of token ids."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(token) is int and 0 <= token < 1 << 31 for token in value)
    )


async def completions(request: Request) -> Response:
    context = context_of(request)
    fields = await body_of(request, KNOWN)
    fields.refuse("suffix", "is not supported: text is continued, not filled in.")
    prompts, n = read_prompts(fields), choices(fields, context.limits.most_choices)
    best = fields.whole("best_of", 1, 1 << 31)
    if best is not None and best != n:
        raise bad_request(
            "'best_of' is not supported: every answer is returned; use 'n'.", "best_of",
            "unsupported_value",
        )  # fmt: skip
    settings = {"max_tokens": _DEFAULT_TOKENS} | sampling_settings(fields)
    top = fields.whole("logprobs", 0, 20)
    if top is not None:
        settings["logprobs"] = max(top, 1)
    schema = response_format(fields)
    if schema is not None:
        settings["json_schema"] = schema
    echo, stream = fields.flag("echo"), fields.flag("stream")
    with_usage, model = stream_usage(fields, stream), fields.needed_text("model")
    terms = terms_of(request, fields)
    scored = top if echo else None
    asked = [TextRequest(model, prompt, settings, n, terms, scored) for prompt in prompts]
    opened = await connected(request, _open_all(context, asked))
    shape = _Shape(model, top or 0, with_usage, scored is not None)
    if stream:
        events = _chunks(context, opened, request, shape, echo)
        return EventStream(events, _closing(opened), context.limits.write_seconds)
    try:
        whole = await connected(request, _collect(context, opened, request, shape, echo))
    finally:
        await _closing(opened)()
    return Response(json.dumps(whole), media_type="application/json")


async def _open_all(context: ServerContext, asked: Sequence[TextRequest]) -> list[Answers]:
    opened: list[Answers] = []
    try:
        for one in asked:
            opened.append(await open_text(context.pool, one))
            _check_scores(opened, one)
    except BaseException:
        for answers in opened:
            await answers.close()
        raise
    return opened


def _check_scores(opened: Sequence[Answers], request: TextRequest) -> None:
    """Refuse more log probabilities of prompts than fit into an answer."""
    if request.prompt_logprobs is None:
        return
    tokens = request.n * sum(len(answers.prompt) for answers in opened)
    most = _MOST_SCORES // (1 + request.prompt_logprobs)
    if tokens > most:
        raise bad_request(
            f"'echo' with 'logprobs': {request.prompt_logprobs} takes prompts of at most {most} "
            f"tokens together; these have more.", "prompt", "invalid_value",
        )  # fmt: skip


def _closing(opened: Sequence[Answers]) -> Any:
    async def close() -> None:
        for answers in opened:
            await answers.close()

    return close


class _Shape:
    """The JSON of one completion."""

    def __init__(self, model: str, top: int, with_usage: bool, scored: bool) -> None:
        self.top, self.with_usage, self.scored = top, with_usage, scored
        self.head = {
            "id": "cmpl-" + secrets.token_hex(12),
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._head = "data: " + json.dumps(self.head)[:-1] + ', "choices": ['
        self._tail = '], "usage": null}\n\n' if with_usage else "]}\n\n"

    def chunk(self, choice: dict[str, Any]) -> bytes:
        return f"{self._head}{json.dumps(choice)}{self._tail}".encode()

    def text_chunk(self, number: int, text: str) -> bytes:
        """A part of an answer without log probabilities: most chunks are."""
        choice = f'{{"text": {json_text(text)}, "index": {number}, "logprobs": null, '
        return f'{self._head}{choice}"finish_reason": null}}{self._tail}'.encode()

    def usage_chunk(self, usage: Usage) -> bytes:
        return f'{self._head}], "usage": {json.dumps(usage_json(usage))}}}\n\n'.encode()

    def choice(
        self, number: int, text: str, told: dict[str, Any] | None, reason: str | None
    ) -> dict[str, Any]:
        return {"text": text, "index": number, "logprobs": told, "finish_reason": reason}

    def logprobs(self, delta: TextDelta, offset: int, answers: Answers) -> dict[str, Any] | None:
        """Of tokens of a part of the text that begins at this offset."""
        tokens = delta.logprobs
        if tokens is None:
            return None
        told: dict[str, Any] = {
            "tokens": [_text(one.piece) for one in tokens],
            "token_logprobs": [max(one.logprob, -9999.0) for one in tokens],
            "top_logprobs": [self._top(one) for one in tokens] if self.top else None,
        }
        if not delta.of_prompt:
            lengths = map(len, told["tokens"][:-1])
            return told | {"text_offset": [*accumulate(lengths, initial=offset)]}
        told["token_logprobs"][0] = None
        if self.top:
            told["top_logprobs"][0] = None
        decoder = answers.model.tokenizer.stream(at_start=True)
        pieces = (len(decoder.push(one.token)) for one in tokens[:-1])
        return told | {"text_offset": [*accumulate(pieces, initial=0)]}

    def _top(self, one: TokenLogprob) -> dict[str, float]:
        found: dict[str, float] = {}
        for _, piece, logprob in one.top[: self.top]:  # the likeliest first
            found.setdefault(_text(piece), max(logprob, -9999.0))
        return found


def _text(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")


def _echoed(answers: Answers) -> str:
    text: str = answers.model.tokenizer.decode(answers.prompt)
    return text


async def _chunks(
    context: ServerContext, opened: Sequence[Answers], request: Request, shape: _Shape, echo: bool
) -> AsyncGenerator[bytes, None]:
    total = Usage()
    n = len(opened[0].answers)
    offsets = [0] * (n * len(opened))
    try:
        if echo and not shape.scored:
            for number in range(len(offsets)):
                yield shape.chunk(shape.choice(number, _echoed(opened[number // n]), None, None))
        streams = [context.observed(answers, request) for answers in opened]
        async for place, (number, event) in merged(streams):
            at = place * n + number
            if isinstance(event, TextDelta):
                if event.logprobs is None:
                    yield shape.text_chunk(at, event.text)
                    continue
                told = shape.logprobs(event, offsets[at], opened[place])
                offsets[at] += len(event.text)
                yield shape.chunk(shape.choice(at, event.text, told, None))
            elif isinstance(event, Finished):
                total = _total(total, event.usage, number == 0)
                yield shape.chunk(shape.choice(at, "", None, event.reason))
        if shape.with_usage:
            yield shape.usage_chunk(total)
    except Exception as error:  # the status is sent already
        context.log.failure("stream failed", error, path=request.url.path)
        yield f"data: {json.dumps(openai_shape(api_error(error)))}\n\n".encode()
    yield DONE


def _total(before: Usage, one: Usage, counts_prompt: bool) -> Usage:
    """The usage of several prompts; the answers to one of them share its tokens."""
    prompt = one.prompt_tokens if counts_prompt else 0
    cached = one.cached_tokens if counts_prompt else 0
    return Usage(
        before.prompt_tokens + prompt, before.cached_tokens + cached,
        before.completion_tokens + one.completion_tokens,
    )  # fmt: skip


async def _collect(
    context: ServerContext, opened: Sequence[Answers], request: Request, shape: _Shape, echo: bool
) -> dict[str, Any]:
    n = len(opened[0].answers)
    echo = echo and not shape.scored
    texts = [_echoed(answers) if echo else "" for answers in opened for _ in range(n)]
    told: list[dict[str, Any] | None] = [None] * len(texts)
    reasons = [""] * len(texts)
    total = Usage()
    streams = [context.observed(answers, request) for answers in opened]
    async for place, (number, event) in merged(streams):
        at = place * n + number
        if isinstance(event, TextDelta):
            more = shape.logprobs(event, len(texts[at]), opened[place])
            texts[at] += event.text
            if more is not None and (before := told[at]) is not None:
                for name, rows in before.items():
                    if rows is not None:
                        rows += more[name]
            elif more is not None:
                told[at] = more
        elif isinstance(event, Finished):
            reasons[at] = event.reason
            total = _total(total, event.usage, number == 0)
    found = [shape.choice(i, texts[i], told[i], reasons[i]) for i in range(len(texts))]
    return {**shape.head, "choices": found, "usage": usage_json(total)}
