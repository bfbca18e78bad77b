"""Special tokens that are written out in the text of messages, and stay text.

A template writes special tokens where turns begin and end. The same characters in a message would
begin a turn that nobody took. So a mark, a character that no message has, is put into them before
the template runs; where the prompt has it, it is cut, and a token never spans a cut. The pieces are
encoded by variants of a backend: without special tokens, without a space before the text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rlx.support.optional import library

_MARKS = range(0xF0000, 0xFFFFE)  # a private use area
# tokens that vocabularies do not always call special, and with which templates write turns
_TURNS = re.compile("turn|im_start|im_end|role|user|assistant|system|header|inst|message|channel")


def is_turn_token(text: str) -> bool:
    """Whether a token's name says that it marks turns."""
    return _TURNS.search(text.lower()) is not None


class SpecialTexts:
    """The special tokens of a vocabulary as texts."""

    def __init__(self, texts: Iterable[str], normalize: Callable[[str], str] | None = None) -> None:
        """`normalize` is given where the vocabulary finds them in normalised text."""
        found = set(texts)
        self._normalize = normalize
        found |= {normalize(t) for t in found} if normalize else set()
        self._texts = {t for t in found if len(t) > 1}
        self._lengths = sorted({len(t) for t in self._texts})
        first = "".join(re.escape(c) for c in sorted({t[0] for t in self._texts}))
        self._first = re.compile(f"[{first}]") if first else None

    def marked(self, value: Any, mark: str) -> Any:
        """The value with `mark` behind the first character of each special token in its texts."""
        if isinstance(value, str):
            return self._marked(value, mark)
        if isinstance(value, Mapping):
            return {self.marked(k, mark): self.marked(v, mark) for k, v in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
            return [self.marked(v, mark) for v in value]
        return value

    def _marked(self, text: str, mark: str) -> str:
        made = self._cut(text, mark)
        if self._normalize is None:
            return made
        normal = self._normalize(text)
        cut = self._cut(normal, mark)
        return cut if cut.count(mark) > made.count(mark) else made

    def _cut(self, text: str, mark: str) -> str:
        pieces, done = [], 0
        for at in self.places(text):
            pieces.append(text[done : at + 1])
            done = at + 1
        return mark.join([*pieces, text[done:]]) if pieces else text

    def places(self, text: str) -> Iterator[int]:
        """Where special tokens begin in a text, also one within another."""
        for found in self._first.finditer(text) if self._first else ():
            at = found.start()
            if any(text[at : at + n] in self._texts for n in self._lengths):
                yield at


def unused_mark(*values: Any) -> str:
    """A character that none of the values has."""
    used = set().union(*map(_characters, values))
    return next(c for c in map(chr, _MARKS) if c not in used)


def _characters(value: Any) -> set[str]:
    """The characters of the private use area in a value's texts."""
    if isinstance(value, str):
        return set() if value.isascii() else {c for c in value if ord(c) in _MARKS}
    if isinstance(value, Mapping):
        return _characters([*value, *value.values()])
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return set().union(*map(_characters, value))
    return set()


_State = dict[str, Any] | None


class SpacePrefix:
    """The space that a backend puts before a text, and how to leave it out."""

    def __init__(self, backend: Any) -> None:
        own = (_state(backend.normalizer), _state(backend.pre_tokenizer))
        normalizer, pre_tokenizer = _unprefixed(own[0]), _unprefixed(own[1])
        self._without: tuple[Any, Any] | None = None
        if (normalizer, pre_tokenizer) != own:
            self._without = _components(normalizer, pre_tokenizer)

    @contextmanager
    def left_out(self, backend: Any) -> Iterator[None]:
        """No space is put before texts meanwhile."""
        if self._without is None:
            yield
            return
        own = backend.normalizer, backend.pre_tokenizer
        try:
            backend.normalizer, backend.pre_tokenizer = self._without
            yield
        finally:
            backend.normalizer, backend.pre_tokenizer = own


def _state(component: Any) -> _State:
    found: _State = None if component is None else json.loads(component.__getstate__())
    return found


def _unprefixed(state: _State) -> _State:
    """The state of a normalizer or a pre-tokenizer that puts no space first."""
    kind = None if state is None else state.get("type")
    if state is None or kind == "Prepend":
        return None
    if kind == "Metaspace":
        return {**state, "prepend_scheme": "never"}
    if kind == "ByteLevel":
        return {**state, "add_prefix_space": False}
    if kind != "Sequence":
        return state
    name = "normalizers" if "normalizers" in state else "pretokenizers"
    return {**state, name: [s for s in map(_unprefixed, state[name]) if s is not None]}


def _components(normalizer: _State, pre_tokenizer: _State) -> tuple[Any, Any]:
    """A normalizer and a pre-tokenizer by their states."""
    made = library("tokenizers", "text").Tokenizer.from_str(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "normalizer": normalizer,
                "pre_tokenizer": pre_tokenizer,
                "model": {"type": "BPE", "vocab": {}, "merges": []},
            }
        )
    )
    return made.normalizer, made.pre_tokenizer


def without_special(backend: Any, special: Collection[int]) -> Any:
    """A backend for which special tokens in a text are text.

    The library's setting does that for BPE and WordPiece. A unigram model finds any token that it
    has in a text, so there it gets one with names that nobody can guess for them.
    """
    if type(backend.model).__name__ != "Unigram":
        return backend
    stored = json.loads(backend.to_str())
    hidden = secrets.token_hex(16)
    vocab = stored["model"]["vocab"]
    for token in special:
        if token < len(vocab):
            vocab[token][0] = f"{hidden} {token}"
    stored["added_tokens"] = [t for t in stored["added_tokens"] if not t["special"]]
    stored["post_processor"] = None
    return library("tokenizers", "text").Tokenizer.from_str(json.dumps(stored))
