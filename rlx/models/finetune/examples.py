"""Training examples: conversations, prompts with completions, texts, and pairs for encoders.

They come as JSON lines or as a list of objects, and nothing of them is believed. What a model is to
write is marked: loss is on that alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import numpy as np

from rlx.data.json_lines import JsonLines
from rlx.errors import InputError, OptionError, RlxError
from rlx.formats.tokenizer import Tokenizer
from rlx.ir.op import Array
from rlx.models.encoder_inputs import TextReader
from rlx.support.progress import current
from rlx.support.records import dataclass

OVERLONG = ("cut", "split", "drop", "error")
ANSWERS = ("all", "last")
READING = "reading examples"
_FORMS = '{"messages": […]}, {"prompt": …, "completion": …} or {"text": …}'
_PAIR = '{"query": …, "positive": …} and perhaps "negative"'

Data: TypeAlias = str | os.PathLike[str] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Example:
    """The tokens of an example, and which of them the model is to learn to write."""

    tokens: Array  # i32 [n]
    learned: Array  # bool [n]

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Pair:
    """Texts of an encoder as tokens: a query, what answers it, and perhaps what does not."""

    query: list[int]
    positive: list[int]
    negative: list[int] | None


@dataclass
class Dataset:
    """Examples as they were read, and what happened to those that are too long."""

    examples: list[Example]
    cut: int = 0
    dropped: int = 0

    @property
    def tokens(self) -> int:
        return sum(map(len, self.examples))

    @property
    def learned(self) -> int:
        return int(sum(np.count_nonzero(e.learned) for e in self.examples))


def read_examples(
    data: Data, tokenizer: Tokenizer, *, longest: int, overlong: str = "cut", answers: str = "all",
    template: str = "default",
) -> Dataset:  # fmt: skip
    """The examples of a file or list, none longer than `longest` tokens."""
    for name, value, known in (("overlong", overlong, OVERLONG), ("answers", answers, ANSWERS)):
        if value not in known:
            raise OptionError(
                f"unknown {name}", where="finetune", got=repr(value), expected=", ".join(known)
            )
    reader = _Reader(tokenizer, answers, template)
    found = Dataset([])
    for where, entry in _entries(data):
        with _located(where):
            example, is_text = reader.example(entry)
        _fit(found, example, longest, overlong, is_text, where)
    if not found.examples:
        raise InputError(
            "no example has anything to learn", where=_name(data),
            got=f"{found.dropped} left out as too long" if found.dropped else "none",
            expected=_FORMS, hint="a larger context takes longer examples",
        )  # fmt: skip
    return found


def read_pairs(data: Data, reader: TextReader, prompts: tuple[str, str]) -> list[Pair]:
    """Pairs of a file or list as tokens; `prompts` are put before queries and documents. Texts are
    cut to what the model reads."""
    found = []
    for where, entry in _entries(data):
        with _located(where):
            rows = [
                reader.read([text], put_before, "cut")[0].ids
                for text, put_before in zip(_pair(entry), (*prompts, prompts[1]), strict=False)
            ]
        found.append(Pair(rows[0], rows[1], rows[2] if rows[2:] else None))
    if len({pair.negative is None for pair in found}) > 1:
        raise InputError(
            "some pairs have a negative and some have none", where=_name(data),
            expected="all, or none",
        )  # fmt: skip
    if not found:
        raise InputError("no pairs", where=_name(data), expected=_PAIR)
    return found


# -- objects --------------------------------------------------------------------------------------


def _name(data: Data) -> str:
    return os.fspath(data) if isinstance(data, str | os.PathLike) else "data"


def _entries(data: Data) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each object, and where it is."""
    where: Callable[[int], str]
    rows: JsonLines | Sequence[Mapping[str, Any]]
    if isinstance(data, str | os.PathLike):
        rows = JsonLines(data)
        where = rows.where
    elif not isinstance(data, Sequence):
        raise InputError(
            "not examples", where="data", got=type(data).__name__,
            expected="a path to JSON lines, or a list of objects",
        )  # fmt: skip
    else:
        rows, where = cast(Sequence[Mapping[str, Any]], data), lambda i: f"example {i}"
    progress = current()
    progress.expect(READING, len(rows))
    try:
        for i in range(len(rows)):
            entry = rows[i]
            if not isinstance(entry, Mapping):
                raise InputError("not an object", where=where(i), got=type(entry).__name__)
            yield where(i), entry
            progress.advance(READING)
    finally:
        if isinstance(rows, JsonLines):
            rows.close()


@contextmanager
def _located(where: str) -> Iterator[None]:
    """Errors in the block say which example they are about."""
    try:
        yield
    except RlxError as error:
        raise InputError(
            error.what, where=where, got=error.got, expected=error.expected, hint=error.hint
        ) from error


def _pair(entry: Mapping[str, Any]) -> list[str]:
    texts = [entry.get(name) for name in ("query", "positive", "negative")]
    given = texts if texts[2] is not None else texts[:2]
    for name, text in zip(("query", "positive", "negative"), given, strict=False):
        if not isinstance(text, str) or not text.strip():
            raise InputError(f"{name} is no text", got=repr(text)[:60], expected=_PAIR)
    return [text for text in given if isinstance(text, str)]


class _Reader:
    """Makes tokens of an object."""

    def __init__(self, tokenizer: Tokenizer, answers: str, template: str) -> None:
        self.tokenizer, self.answers, self.template = tokenizer, answers, template

    def example(self, entry: Mapping[str, Any]) -> tuple[Example, bool]:
        """The tokens of an object, and whether it is a text without a prompt."""
        if "messages" in entry:
            return self._chat(entry["messages"], 0, entry.get("tools")), False
        if "prompt" in entry and "completion" in entry:
            prompt, completion = entry["prompt"], entry["completion"]
            if isinstance(prompt, list) and isinstance(completion, list):
                messages = [*prompt, *completion]
                return self._chat(messages, len(prompt), entry.get("tools")), False
            return self._plain(_text(prompt, "prompt"), _text(completion, "completion")), False
        if "text" in entry:
            return self._plain("", _text(entry["text"], "text")), True
        raise InputError(
            "not a training example", got=", ".join(map(repr, list(entry)[:6]))[:80] or "{}",
            expected=_FORMS,
        )  # fmt: skip

    def _chat(self, messages: Any, first: int, tools: Any) -> Example:
        """A conversation; answers are messages of the assistant from number `first`."""
        if not isinstance(messages, list) or not messages:
            raise InputError(
                "messages are not a list", got=type(messages).__name__,
                expected='[{"role": "user", "content": "…"}, …]',
            )  # fmt: skip
        if tools is not None and not isinstance(tools, list):
            raise InputError("tools are not a list", got=type(tools).__name__)
        roles = [m.get("role") if isinstance(m, Mapping) else None for m in messages]
        turns = [i for i, role in enumerate(roles) if role == "assistant" and i >= first]
        if not turns:
            raise InputError(
                "no message of the assistant", got=", ".join(map(str, roles))[:80],
                hint="loss is on answers: one message needs the role assistant",
            )  # fmt: skip
        turns = turns if self.answers == "all" else turns[-1:]
        parts = self.tokenizer.encode_turns(messages, turns, template=self.template, tools=tools)
        return _joined([(ids, self._length(ids) if answer else 0) for ids, answer in parts])

    def _length(self, ids: list[int]) -> int:
        """How many tokens of an answer the model writes: up to the one that ends its turn."""
        ends = self.tokenizer.end_ids
        last = next((i for i in reversed(range(len(ids))) if ids[i] in ends), len(ids) - 1)
        return last + 1

    def _plain(self, prompt: str, completion: str) -> Example:
        t = self.tokenizer
        begin = [t.bos_id] if t.bos_id is not None and t.adds_bos else []
        if prompt:
            begin += t.encode(prompt, add_special=False, parse_special=False)
            rest = t.encode_continuation(completion, parse_special=False)
        else:
            rest = t.encode(completion, add_special=False, parse_special=False)
        rest += [] if t.eos_id is None else [t.eos_id]
        return _joined([(begin, 0), (rest, len(rest))])


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{name} is no text", got=type(value).__name__, expected=_FORMS)
    return value


def _joined(parts: Sequence[tuple[list[int], int]]) -> Example:
    """An example of parts, of each of which so many tokens are learned."""
    tokens = np.array([i for ids, _ in parts for i in ids], np.int32)
    learned = [np.arange(len(ids)) < count for ids, count in parts]
    return Example(tokens, np.concatenate(learned))


def _fit(
    found: Dataset, example: Example, longest: int, overlong: str, is_text: bool, where: str
) -> None:
    """Add the example, or what of it fits. Nothing is learned of a first token."""
    if len(example) > longest:
        if overlong == "error":
            raise InputError(
                "an example that is too long", where=where, got=f"{len(example)} tokens",
                expected=f"at most {longest}",
                hint="a larger context, or overlong cut, split, drop",
            )  # fmt: skip
        if overlong == "drop":
            found.dropped += 1
            return
        found.cut += 1
    split = is_text and overlong == "split"
    for begin in range(0, len(example) if split else 1, longest):
        here = slice(begin, begin + longest)
        part = Example(example.tokens[here], example.learned[here])
        if part.learned[1:].any():
            found.examples.append(part)
        elif not split:
            found.dropped += 1
