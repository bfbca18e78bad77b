"""What users give to models: prompts, texts, token ids, numbers, paths and a progress function,
checked before anything runs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from math import inf
from numbers import Integral, Real
from operator import index
from typing import Any

from rlx.errors import InputError, OptionError
from rlx.formats.tokenizer import Tokenizer


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


Progress = Callable[[int, int], None]  # how many texts are done, and how many there are
_PAUSE = 0.1  # seconds between two lines


def reporter(progress: bool | Progress | None) -> Progress:
    """What is called after each batch: `progress` itself, a line on stderr for True, or nothing."""
    if progress is None or progress is False:
        return lambda done, total: None
    if progress is True:
        return _Line()
    if not callable(progress):
        raise OptionError(
            "neither True nor a function", where="progress", got=repr(progress)[:40],
            expected="progress(done, total)",
        )  # fmt: skip
    return progress


def check_progress(progress: object) -> None:
    """Raise for what cannot be told the stages of a load."""
    if progress is not None and not callable(progress):
        raise OptionError(
            "not a function", where="progress", got=repr(progress)[:40],
            expected="progress(stage, done, total)",
        )  # fmt: skip


class _Line:
    """One line that is written over; the last one stays."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, done: int, total: int) -> None:
        if done < total and time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _PAUSE
        end = "\n" if done == total else ""
        print(f"\rembedding: {done} of {total} texts", end=end, file=sys.stderr, flush=True)


Messages = Sequence[Mapping[str, Any]]
_SYSTEM = ("system", "developer")


def is_many(prompt: Any) -> bool:
    """Whether this is a list of prompts: texts or lists of tokens."""
    if isinstance(prompt, str | bytes | Mapping | Set) or not hasattr(prompt, "__getitem__"):
        return False
    try:
        if not len(prompt):
            return False
    except TypeError:  # an array of no dimensions
        return False
    return isinstance(prompt[0], str | list | tuple) or hasattr(prompt[0], "__len__")


def prompt_tokens(tokenizer: Tokenizer, prompt: Any) -> list[int]:
    """The tokens of a prompt that is a text, or tokens already."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if not isinstance(prompt, Iterable) or isinstance(prompt, bytes | bytearray | Mapping):
        raise InputError(
            "not a prompt", got=f"{type(prompt).__name__} {prompt!r}"[:80],
            expected="a text, or token ids as in [1, 2, 3]",
        )  # fmt: skip
    return token_ids(prompt)


def system_tokens(tokenizer: Tokenizer, messages: Messages, tokens: Sequence[int]) -> int:
    """How many tokens of a conversation, beside BOS, are its system prompt."""
    count = 0
    while count < len(messages) and messages[count].get("role") in _SYSTEM:
        count += 1
    if not count:
        return 0
    begin = int(tokens[0] == tokenizer.bos_id)
    alone = _encoded(tokenizer, messages[:count])
    if len(alone) > begin and _common(alone, tokens) == len(alone):
        return len(alone) - begin
    if count == len(messages):
        return len(tokens) - begin
    # a template that has the system prompt inside of the first turn
    other = [*messages[:count], {**messages[count], "content": ""}, *messages[count + 1 :]]
    return max(_common(_encoded(tokenizer, other), tokens) - begin, 0)


def _encoded(tokenizer: Tokenizer, messages: Messages) -> list[int]:
    """Tokens of a conversation; none where the template refuses it."""
    try:
        return tokenizer.encode_chat(messages, add_generation_prompt=False)
    except InputError:
        return []


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the common prefix."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))
