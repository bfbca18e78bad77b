"""Vectors and scores of an encoder."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rlx.serve.api_errors import bad_request
from rlx.serve.served_model import ServedModel
from rlx.support.records import dataclass


@dataclass(frozen=True)
class Vectors:
    """Rows, one per text, and how many tokens the texts had."""

    rows: Any
    tokens: int


async def embed(
    model: ServedModel, texts: Sequence[str | list[int]], width: int | None,
    normalize: bool | None, prompt: str | None, cut: bool, user: str | None,
) -> Vectors:  # fmt: skip
    """A vector for each text or list of tokens, computed together with those of other callers.
    A text that is too long is an error, or `cut`."""
    tokens = await asyncio.to_thread(_tokens, model, texts, prompt, cut)
    rows = await model.batcher.embed_async(
        tokens, user=user, normalize=normalize, truncate_dim=width
    )
    return Vectors(rows, sum(map(len, tokens)))


def _tokens(
    model: ServedModel, texts: Sequence[str | list[int]], prompt: str | None, cut: bool
) -> list[list[int]]:
    reader = model.encoder.reader
    written = [text for text in texts if isinstance(text, str)]
    if not cut:
        model.check_length(max(map(len, written), default=0))
    short = [text[: 64 * model.context] for text in written]
    read = reader.read(short, model.encoder.prompt_text(prompt), "cut" if cut else "error")
    told = iter(read)
    found = []
    for i, text in enumerate(texts):
        if isinstance(text, str):
            found.append(list(next(told).ids))
            continue
        ids = [*reader.prefix, *text, *reader.suffix]
        if len(ids) > reader.max_tokens and not cut:
            raise bad_request(
                f"Input {i} has {len(ids)} tokens; this model takes at most {reader.max_tokens}.",
                "input", "context_length_exceeded",
            )  # fmt: skip
        room = reader.max_tokens - len(reader.prefix) - len(reader.suffix)
        found.append([*reader.prefix, *text[:room], *reader.suffix])
    return found


async def relevance(model: ServedModel, query: str, texts: Sequence[str], cut: bool) -> Vectors:
    """How relevant each text is to the query."""

    def work() -> Vectors:
        encoder, how = model.encoder, "cut" if cut else "error"
        most = 64 * model.context
        asked, given = query[:most], [text[:most] for text in texts]
        scores = encoder.scores(asked, given, overlong=how)
        read = encoder.reader
        tokens = (
            read.pairs(asked, given, "cut")
            if encoder.is_reranker
            else read.read([asked, *given], "", "cut")
        )
        return Vectors(scores, sum(map(len, tokens)))

    return await asyncio.to_thread(work)
