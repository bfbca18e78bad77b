"""The index of a vocabulary: its tokens and its merges, made once and kept on disk."""

from __future__ import annotations

from typing import Any

from rlx.formats.gguf import StringArray
from rlx.formats.tokenizer.index_cache import Arrays, cache_key, get_or_make
from rlx.formats.tokenizer.token_index import (
    MergeIndex,
    SortedHashes,
    TokenIndex,
    index_merges,
    index_tokens,
)
from rlx.support.records import dataclass

_VERSION = "1"


@dataclass(frozen=True)
class VocabularyIndex:
    """Where the tokens and merges are that a text can need."""

    tokens: TokenIndex
    merges: MergeIndex | None = None  # None: they follow from the tokens

    @staticmethod
    def open(texts: StringArray, merges: StringArray | None) -> VocabularyIndex | None:
        """The index of tables in a file, from the cache where it is there; None for tables that
        have to be looked at one by one."""
        tables = [_bytes_of(t) for t in (texts, merges) if t is not None]
        key = cache_key(f"{_VERSION} gguf", tables)
        found = get_or_make(key, lambda: _make(texts, merges))
        return None if found is None else from_arrays(found, texts, merges)


def _bytes_of(strings: StringArray) -> Any:
    """All bytes of a table, with the lengths."""
    if not len(strings):
        return b""
    return memoryview(strings.data)[int(strings.starts[0]) - 8 : int(strings.ends[-1])]


def _make(texts: StringArray, merges: StringArray | None) -> Arrays | None:
    tokens = index_tokens(texts)
    if tokens is None:
        return None
    found: Arrays = {"tokens": tokens.hashes, "places": tokens.numbers}
    if merges is None:
        return found
    made = index_merges(merges)
    if made is None:
        return None
    pairs, cuts = made
    return {**found, "merges": pairs.hashes, "ranks": pairs.numbers, "cuts": cuts}


def from_arrays(arrays: Arrays, texts: StringArray, merges: StringArray | None) -> VocabularyIndex:
    """The index that arrays of the cache describe."""
    tokens = TokenIndex(texts, SortedHashes(arrays["tokens"], arrays["places"]))
    if merges is None:
        return VocabularyIndex(tokens)
    pairs = SortedHashes(arrays["merges"], arrays["ranks"])
    return VocabularyIndex(tokens, MergeIndex(merges, pairs, arrays["cuts"]))
