"""Answers that must have a form: JSON of a schema, a regular expression, a grammar.

Before each draw a mask says which tokens may come next; `llguidance` computes it. The mask is an
input of the model, so logits stay in native memory.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.errors import OptionError
from rlx.formats.optional import library
from rlx.formats.tokenizer import Tokenizer
from rlx.models.sampling import GenerationSettings, Penalties

# JSON as json.dumps writes it; small models lose their way in free white space
_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_vocabularies: weakref.WeakKeyDictionary[Tokenizer, Any] = weakref.WeakKeyDictionary()


def adjustment(
    settings: GenerationSettings, tokenizer: Tokenizer, vocab: int, prompt: Sequence[int]
) -> Penalties | None:
    """What changes logits before a draw: nothing, penalties, or these and a form."""
    if settings.constrains:
        return Constrained(settings, tokenizer, vocab, prompt)
    return Penalties(settings, vocab, prompt) if settings.adjusts else None


class Constrained(Penalties):
    """Penalties, and a mask of the tokens that the form allows next."""

    def __init__(
        self, settings: GenerationSettings, tokenizer: Tokenizer, vocab: int, prompt: Sequence[int]
    ) -> None:
        super().__init__(settings, vocab, prompt)
        engine = _library()
        known = _vocabulary(engine, tokenizer, vocab)
        self._ends = tokenizer.end_ids | settings.stop_tokens
        self._matcher = engine.LLMatcher(known, _grammar(engine, settings), log_level=0)
        self.allowed = np.zeros(-(-vocab // 32), np.int32)
        self._look()
        mask = {"allowed": self.allowed}
        self.inputs = self.inputs | mask if settings.adjusts else mask
        self.use = "adjust, constrain" if settings.adjusts else "constrain"

    def count(self, token: int) -> None:
        super().count(token)
        if token not in self._ends:
            self._matcher.consume_token(token)
            self._look()

    def _look(self) -> None:
        """Bring the mask up to date."""
        if self._matcher.is_error():
            raise OptionError(
                "the form of the answer cannot be followed", got=self._matcher.get_error(),
                hint="check the schema, expression or grammar",
            )  # fmt: skip
        self._matcher.unsafe_compute_mask_ptr(self.allowed.ctypes.data, self.allowed.nbytes)


def _library() -> Any:
    return library("llguidance", "an answer of a given form", "'rlx[grammar]'")


def _grammar(engine: Any, settings: GenerationSettings) -> str:
    """The form as the library reads it."""
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
    except convert.GbnfToLarkError as error:
        raise OptionError("not a GBNF grammar", where="grammar", got=str(error)) from error


def _vocabulary(engine: Any, tokenizer: Tokenizer, vocab: int) -> Any:
    """The vocabulary as the library wants it; made once, which takes a moment."""
    found = _vocabularies.get(tokenizer)
    if found is None:
        wrapped = engine.TokenizerWrapper(_Spelled(tokenizer, vocab))
        ends = sorted(tokenizer.end_ids)
        found = engine.LLTokenizer(wrapped, n_vocab=vocab, eos_token=ends)
        _vocabularies[tokenizer] = found
    return found


class _Spelled:
    """A tokenizer as the library sees it: the bytes of every token."""

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        self._tokenizer = tokenizer
        special = tokenizer.vocabulary.special | tokenizer.end_ids
        self.tokens = [b"" if t in special else tokenizer.piece(t) for t in range(vocab)]
        self.special_token_ids = sorted(special)
        self.eos_token_id = min(tokenizer.end_ids)
        self.bos_token_id = tokenizer.bos_id

    def __call__(self, text: bytes | str) -> list[int]:
        plain = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(plain, add_special=False, parse_special=False)
