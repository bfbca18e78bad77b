"""Prompts as callers give them: one or many, texts, tokens, conversations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from rlx.errors import InputError
from rlx.formats.tokenizer import Tokenizer
from rlx.models.arguments import token_ids

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
