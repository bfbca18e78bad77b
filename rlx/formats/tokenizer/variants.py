"""Variants of a backend of the `tokenizers` library: without the space that it puts before a text,
and with special tokens that no text can spell."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from rlx.support.optional import library

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
