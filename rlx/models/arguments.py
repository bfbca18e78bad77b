"""What users give to models: texts and token ids, checked before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from operator import index
from typing import Any

from rlx.errors import InputError


def token_ids(prompt: Any) -> list[int]:
    """A prompt of tokens as a list of ints; whole numbers only."""
    try:
        if not isinstance(prompt, bytes | bytearray | Mapping | Set):
            return [index(token) for token in prompt]
    except TypeError:
        pass
    raise InputError(
        "not token ids", got=f"{prompt!r:.60}", expected="whole numbers, as in [1, 2, 3]",
        hint="model.tokenize(text) makes them; rlx.Engine(…).generate takes several texts",
    )  # fmt: skip


def several_texts(texts: object) -> Iterable[str]:
    """An iterable of texts; their types are checked when they are read."""
    if isinstance(texts, str | bytes | bytearray) or not isinstance(texts, Iterable):
        raise InputError(
            "not several texts", got=_shown(texts),
            expected="a list of texts, or whatever gives one after another",
        )  # fmt: skip
    return texts


def one_text(query: object) -> str:
    if not isinstance(query, str):
        raise InputError("not a query", got=_shown(query), expected="str")
    return query


def _shown(value: object) -> str:
    return f"{type(value).__name__} {value!r:.60}"
