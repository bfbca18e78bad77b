"""Structured output: JSON of a schema, a regular expression, or a grammar.

Before each draw `llguidance` computes a mask of the tokens that may come next. It is an input of
the graph, so logits stay in native memory.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from rlx.errors import OptionError
from rlx.formats.tokenizer import Tokenizer
from rlx.models.builder import EntryPoint
from rlx.models.sampling import GenerationSettings, Penalties
from rlx.support.optional import library

# JSON as json.dumps writes it; small models lose their way in free white space
_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_vocabularies: weakref.WeakKeyDictionary[Tokenizer, Any] = weakref.WeakKeyDictionary()


def penalties_for(
    settings: GenerationSettings, tokenizer: Tokenizer, vocab: int, prompt: Sequence[int]
) -> Penalties | None:
    """What changes the logits before a draw: penalties, a grammar, both, or None."""
    if settings.is_structured:
        return GrammarMask(settings, tokenizer, vocab, prompt)
    return Penalties(settings, vocab, prompt) if settings.has_penalties else None


class GrammarMask(Penalties):
    """Penalties, and a mask of the tokens that the grammar allows next."""

    def __init__(
        self, settings: GenerationSettings, tokenizer: Tokenizer, vocab: int, prompt: Sequence[int]
    ) -> None:
        super().__init__(settings, vocab, prompt)
        engine = _library()
        known = _vocabulary(engine, tokenizer, vocab)
        self._ends = tokenizer.end_ids | settings.stop_tokens
        self._matcher = engine.LLMatcher(known, _grammar(engine, settings), log_level=0)
        self.allowed = np.zeros(-(-vocab // 32), np.int32)
        self._update()
        self.entry_point = EntryPoint("sample", penalties=settings.has_penalties, grammar=True)

    @cached_property
    def inputs(self) -> dict[str, Any]:
        mask = {"allowed": self.allowed}
        return super().inputs | mask if self.settings.has_penalties else mask

    def count(self, token: int) -> None:
        if self.settings.has_penalties:
            super().count(token)
        if token not in self._ends:
            self._matcher.consume_token(token)
            self._update()

    def _update(self) -> None:
        """Compute the mask of the next token."""
        if self._matcher.is_error():
            raise OptionError(
                "the schema, expression or grammar cannot be followed",
                got=self._matcher.get_error(),
                expected="a JSON schema, a regular expression, or a grammar in GBNF or Lark",
            )  # fmt: skip
        self._matcher.unsafe_compute_mask_ptr(self.allowed.ctypes.data, self.allowed.nbytes)


def _library() -> Any:
    return library("llguidance", "structured output")


def _grammar(engine: Any, settings: GenerationSettings) -> str:
    """The grammar in the library's form."""
    matcher = engine.LLMatcher
    if settings.regex is not None:
        return str(matcher.grammar_from_regex(settings.regex))
    if settings.grammar is not None:
        return str(matcher.grammar_from_lark(_as_lark(settings.grammar)))
    schema = settings.json_schema
    try:
        schema = json.loads(schema) if isinstance(schema, str) else schema
        return str(matcher.grammar_from_json_schema(schema, overrides=_JSON))
    except ValueError as error:
        raise OptionError("not a JSON schema", where="json_schema", got=str(error)) from error


def _as_lark(text: str) -> str:
    if "::=" not in text:  # what only GBNF has
        return text
    convert = library("llguidance.gbnf_to_lark", "a GBNF grammar")
    try:
        return str(convert.gbnf_to_lark(text))
    except Exception as error:  # a rule that is not defined raises nothing more special
        raise OptionError("not a GBNF grammar", where="grammar", got=str(error)) from error


def _vocabulary(engine: Any, tokenizer: Tokenizer, vocab: int) -> Any:
    """The vocabulary for the library; made once per tokenizer, as it is slow."""
    found = _vocabularies.get(tokenizer)
    if found is None:
        wrapped = engine.TokenizerWrapper(_TokenBytes(tokenizer, vocab))
        ends = sorted(tokenizer.end_ids)
        found = engine.LLTokenizer(wrapped, n_vocab=vocab, eos_token=ends)
        _vocabularies[tokenizer] = found
    return found


class _TokenBytes:
    """A tokenizer as the library takes it: the bytes of every token."""

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        self._tokenizer = tokenizer
        special = tokenizer.vocabulary.special | tokenizer.end_ids
        # special tokens differ in their names, else a grammar that allows one allows them all
        self.tokens = [
            f"<|{t}|>".encode() if t in special else tokenizer.piece(t) for t in range(vocab)
        ]
        self.special_token_ids = sorted(special)
        self.eos_token_id = min(tokenizer.end_ids)
        self.bos_token_id = tokenizer.bos_id

    def __call__(self, text: bytes | str) -> list[int]:
        plain = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode_continuation(plain, parse_special=False)
