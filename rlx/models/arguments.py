"""What users give to models: texts, token ids, numbers and paths, checked before anything runs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence, Set
from math import inf
from numbers import Integral, Real
from operator import index
from typing import Any

from rlx.errors import InputError, OptionError


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


def check_paths(adapters: object, **paths: object) -> None:
    """Raise for what is no path, or no list of paths."""
    if not isinstance(adapters, Sequence) or isinstance(adapters, str):
        raise OptionError("not a list of paths", where="adapters", got=repr(adapters))
    for name, path in [*paths.items(), *(("adapters", adapter) for adapter in adapters)]:
        if path is not None and not isinstance(path, str | os.PathLike):
            raise OptionError("not a path", where=name, got=repr(path), expected="a str or a Path")


def require_count(name: str, value: object, least: int = 1, most: int | None = None) -> None:
    """Raise for what is no whole number of this range."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or not least <= value or (most is not None and value > most):  # type: ignore
        expected = f"{least} or more" if most is None else f"{least} … {most}"
        raise OptionError("not such a number", where=name, got=repr(value)[:40], expected=expected)


def require_seconds(name: str, value: object) -> None:
    """Raise for what is no time above 0."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not 0 < value < inf:  # type: ignore[operator]
        raise OptionError(
            "not a time", where=name, got=repr(value)[:40], expected="seconds above 0"
        )


def _shown(value: object) -> str:
    return f"{type(value).__name__} {value!r:.60}"
