"""Tokenises texts for an encoder: special tokens, truncation, pairs of texts."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

from rlx.errors import FormatError, InputError, OptionError
from rlx.formats.gguf import GgufFile
from rlx.formats.tokenizer import Tokenizer
from rlx.models.model_file import ModelFile
from rlx.support.records import dataclass

OVERLONG = ("warn", "cut", "error")  # what to do with a text that is too long


@dataclass(frozen=True)
class Tokens:
    """A text or a pair of texts, with special tokens."""

    ids: list[int]
    second: int = -1  # where the second text of a pair begins, if its token type differs

    def __len__(self) -> int:
        return len(self.ids)


class TextReader:
    """Tokenises for one model."""

    def __init__(self, model: ModelFile, tokenizer: Tokenizer, max_tokens: int | None) -> None:
        self.tokenizer, self.sentence = tokenizer, model.sentence
        self.name = str(model.path)
        self.max_tokens = self._limit(model, max_tokens)
        v = tokenizer.vocabulary
        self.prefix, self.suffix = list(v.prefix), list(v.suffix)
        self.between = _between(model, tokenizer)
        self.two_kinds = v.second_kind > 0
        if self.sentence.lower_case:
            tokenizer.ignore_case()

    def _limit(self, model: ModelFile, asked: int | None) -> int:
        longest, v = model.config.context, self.tokenizer.vocabulary
        least = len(v.prefix) + len(v.suffix) + 1
        if least > longest:
            raise FormatError(
                "no room for a text", where=self.name, got=f"{longest} tokens",
                expected=f"{least} at least",
            )  # fmt: skip
        if asked is None:
            return max(least, min(longest, self.sentence.max_tokens or longest))
        if not isinstance(asked, int) or not least <= asked <= longest:
            raise OptionError(
                "length out of range", where="context", got=asked, expected=f"{least} … {longest}"
            )
        return asked

    def read(
        self, texts: Sequence[str], prompt: str, overlong: str, first: int = 0
    ) -> list[Tokens]:
        """The tokens of each text; `first` is the index of the first one, for messages."""
        given = [prompt + t if isinstance(t, str) else t for t in texts] if prompt else texts
        room = self.max_tokens - len(self.prefix) - len(self.suffix)
        found = self.tokenizer.encode_batch(given, first=first)
        self._check(overlong, [i + first for i, ids in enumerate(found) if len(ids) > room], found)
        return [Tokens([*self.prefix, *ids[:room], *self.suffix]) for ids in found]

    def pairs(self, query: str, texts: Sequence[str], overlong: str) -> list[Tokens]:
        """The query paired with each text, for a cross-encoder; the longer one is truncated."""
        asked = self.tokenizer.encode(query, add_special=False)
        found = self.tokenizer.encode_batch(texts)
        around = len(self.prefix) + len(self.between) + len(self.suffix)
        room = self.max_tokens - around
        if room < 2:
            raise OptionError(
                "no room for a pair", where="context", got=self.max_tokens,
                expected=f"{around + 2} or more",
            )  # fmt: skip
        long = [i for i, ids in enumerate(found) if len(asked) + len(ids) > room]
        self._check(overlong, long, found)
        return [self._pair(asked, ids, room) for ids in found]

    def _pair(self, a: list[int], b: list[int], room: int) -> Tokens:
        if len(a) + len(b) > room:
            # the longer one is cut to the length of the shorter; then both alike
            less = min(len(a), len(b), room // 2)
            a, b = (a[: room - less], b[:less]) if len(a) > len(b) else (a[:less], b[: room - less])
        head = [*self.prefix, *a, *self.between]
        return Tokens([*head, *b, *self.suffix], len(head) if self.two_kinds else -1)

    def _check(self, overlong: str, long: list[int], found: list[list[int]]) -> None:
        if overlong not in OVERLONG:
            raise OptionError(
                "unknown policy", where="overlong", got=overlong, expected=", ".join(OVERLONG)
            )
        if not long or overlong == "cut":
            return
        if overlong == "error":
            raise InputError(
                f"text {long[0]} is too long", where=self.name,
                expected=f"{self.max_tokens} tokens at most",
                hint="shorten it, or allow overlong='cut'",
            )  # fmt: skip
        warnings.warn(
            f"cut to {self.max_tokens} tokens: {len(long)} of {len(found)} texts, the first of "
            f"them number {long[0]}",
            stacklevel=_frames_inside() + 1,
        )


def _frames_inside() -> int:
    """The number of stack frames inside the package."""
    frame, count = sys._getframe(1), 0
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("rlx."):
        frame, count = frame.f_back, count + 1
    return count


def _between(model: ModelFile, tokenizer: Tokenizer) -> list[int]:
    """The tokens between the texts of a pair: the suffix, twice for RoBERTa."""
    stated = tokenizer.vocabulary.between
    if stated is not None:
        return list(stated)
    end = list(tokenizer.vocabulary.suffix)
    kind = isinstance(model.file, GgufFile) and model.file.metadata.get("tokenizer.ggml.model")
    # GGUF calls both of them bert
    return end * 2 if model.config.arch == "bert" and kind != "bert" else end
