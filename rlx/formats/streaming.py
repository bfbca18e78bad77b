"""Text from tokens as they come, never a part of a character.

stream = tokenizer.stream()
for token in generated:
    print(stream.push(token), end="")
print(stream.flush())
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Container


class StreamDecoder:
    """Joins the bytes of tokens; bytes that may still become a character wait for the rest."""

    def __init__(
        self, piece: Callable[[int], bytes], skip: Container[int], strip_first: bool
    ) -> None:
        self._piece, self._skip = piece, skip
        self._strip = strip_first
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that became certain with this token; it may be empty."""
        if token in self._skip:
            return ""
        raw = self._piece(token)
        if self._strip and raw:
            self._strip = False
            raw = raw.removeprefix(b" ")
        return self._decoder.decode(raw)

    def flush(self) -> str:
        """What is left at the end: a replacement character where a character was cut off."""
        return self._decoder.decode(b"", final=True)


class WindowDecoder:
    """For vocabularies that only their library can spell: decodes a window of tokens twice, with
    the new token and without, and gives the difference once it is whole."""

    def __init__(self, decode: Callable[[list[int]], str], skip: Container[int]) -> None:
        self._decode, self._skip = decode, skip
        self._tokens: list[int] = []
        self._given = 0  # tokens whose text is out

    def push(self, token: int) -> str:
        """The text that became certain with this token; it may be empty."""
        if token not in self._skip:
            self._tokens.append(token)
        return self._take(final=False)

    def flush(self) -> str:
        """What is left at the end."""
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        before = self._decode(self._tokens[: self._given])
        text = self._decode(self._tokens)
        if len(text) <= len(before) or (text.endswith("\ufffd") and not final):
            return ""
        self._tokens = self._tokens[self._given :]
        self._given = len(self._tokens)
        return text[len(before) :]
