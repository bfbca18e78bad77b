"""A backend that holds the tokens that its texts can need, not the whole vocabulary.

The `tokenizers` library builds tables of all tokens and merges, which takes seconds for the largest
vocabularies. But BPE makes of a word only tokens that occur in it: a model with these tokens and
the merges among them gives the same ids. So a start builds a model for its prompt. It grows with
what texts bring, until that has cost as much as the whole one, which then takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlx.formats.tokenizer.token_index import LONGEST, TokenIndex

Found = Mapping[bytes, tuple[int, list[int]]]
"""Tokens by their bytes: the hash, and the places of their equals in the table."""

_LONG = 16_384  # characters of a text that is worth the whole vocabulary
_SHORT_WORD = 64  # characters of words that are remembered
_MOST_WORDS = 1 << 16


class _WordReader:
    """A pre-tokenizer that notes what the model is given, and changes nothing."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def pre_tokenize(self, text: Any) -> None:
        self.words += [word for word, _, tokens in text.get_splits("normalized") if tokens is None]


class PartialBackend:
    """What the library's `Tokenizer` is, as far as texts are encoded."""

    def __init__(
        self,
        lib: Any,
        backend: Any,
        index: TokenIndex,
        make_model: Callable[[Found], Any],
        make_whole: Callable[[], Any],
    ) -> None:
        """`backend` has normalizer, pre-tokenizer and added tokens; `make_model` makes a model of
        the tokens that were found, `make_whole` the backend with all of them."""
        self._lib, self._backend, self._index = lib, backend, index
        self._make_model, self._make_whole = make_model, make_whole
        self._whole: Any = None
        self._reader = _WordReader()
        self._words: set[str] = set()
        self._found: dict[bytes, tuple[int, list[int]]] = {}
        self._built = 0  # tokens of all models so far
        self._pre_tokenizer = backend.pre_tokenizer
        self.pre_tokenizer = self._pre_tokenizer
        backend.model = make_model({})

    # -- settings of the library's tokenizers ---------------------------------------------------

    @property
    def normalizer(self) -> Any:
        return self._backend.normalizer

    @normalizer.setter
    def normalizer(self, value: Any) -> None:
        self._backend.normalizer = value
        if self._whole is not None:
            self._whole.normalizer = value

    @property
    def pre_tokenizer(self) -> Any:
        return self._pre_tokenizer

    @pre_tokenizer.setter
    def pre_tokenizer(self, value: Any) -> None:
        self._pre_tokenizer = value
        kinds = self._lib.pre_tokenizers
        reader = kinds.PreTokenizer.custom(self._reader)
        parts = [reader] if value is None else [value, reader]
        self._backend.pre_tokenizer = kinds.Sequence(parts)
        if self._whole is not None:
            self._whole.pre_tokenizer = value

    @property
    def encode_special_tokens(self) -> bool:
        return bool(self._backend.encode_special_tokens)

    @encode_special_tokens.setter
    def encode_special_tokens(self, value: bool) -> None:
        self._backend.encode_special_tokens = value
        if self._whole is not None:
            self._whole.encode_special_tokens = value

    @property
    def model(self) -> Any:
        return self._backend.model

    @property
    def decoder(self) -> Any:
        return self._backend.decoder

    def get_added_tokens_decoder(self) -> Any:
        return self._backend.get_added_tokens_decoder()

    def token_to_id(self, token: str) -> int | None:
        known: int | None = self._backend.token_to_id(token)
        return self._index.get(token) if known is None else known

    # -- texts ------------------------------------------------------------------------------------

    @property
    def is_whole(self) -> bool:
        return self._whole is not None

    def encode(self, text: str, pair: str | None = None, *, add_special_tokens: bool = True) -> Any:
        if self._whole is not None or len(text) + len(pair or "") > _LONG:
            return self.whole().encode(text, pair, add_special_tokens=add_special_tokens)
        self._reader.words.clear()
        encoded = self._backend.encode(text, pair, add_special_tokens=add_special_tokens)
        new = {w for w in self._reader.words if w not in self._words}
        if not new:
            return encoded
        self._add(new)
        backend = self._backend if self._whole is None else self._whole
        return backend.encode(text, pair, add_special_tokens=add_special_tokens)

    def encode_batch_fast(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> Any:
        if self._whole is None and sum(map(len, texts)) <= _LONG:
            return [self.encode(t, add_special_tokens=add_special_tokens) for t in texts]
        return self.whole().encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self.whole().decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def whole(self) -> Any:
        """The library's tokenizer of all tokens, with the same settings."""
        if self._whole is None:
            made = self._make_whole()
            made.normalizer, made.pre_tokenizer = self.normalizer, self.pre_tokenizer
            made.encode_special_tokens = self.encode_special_tokens
            self._whole = made
        return self._whole

    def _add(self, words: set[str]) -> None:
        """Have the tokens of these words in the model."""
        text = "\0".join(words).encode("utf-8")
        if len(text) > LONGEST:
            self.whole()
            return
        found = self._index.found_in(text)
        if len(self._words) > _MOST_WORDS:
            self._words.clear()
        self._words.update(w for w in words if len(w) <= _SHORT_WORD)
        if found.keys() <= self._found.keys():
            return
        self._found |= found
        self._built += len(self._found)
        if self._built > len(self._index):
            self.whole()
        else:
            self._backend.model = self._make_model(self._found)
