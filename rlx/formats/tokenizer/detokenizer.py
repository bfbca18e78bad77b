"""Detokenising: tokens to bytes, and a stream of tokens to text, never a part of a character.

stream = tokenizer.stream()
for token in generated:
    print(stream.push(token), end="")
print(stream.flush())
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Container
from typing import Literal

from rlx.support.records import dataclass

SPACE = "\u2581"  # SentencePiece's visible space
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class TokenDecoder:
    """How the tokens of a vocabulary become bytes; the names are those of Hugging Face's decoders.

    `byte_level`: GPT-2's characters for bytes; `metaspace`: SPACE for a space and <0xAB> for bytes
    (SentencePiece); `wordpiece`: a token without `prefix` starts a word; `library`: another one,
    run by the `tokenizers` library.
    """

    kind: Literal["byte_level", "metaspace", "wordpiece", "library"]
    strip_first: bool = False  # the first token of a text loses its leading space
    prefix: str = "##"
    cleanup: bool = False  # no space before punctuation

    @property
    def to_bytes(self) -> Callable[[str], bytes]:
        """Token text → bytes."""
        if self.kind == "byte_level":
            return byte_level
        if self.kind == "metaspace":
            return metaspace
        return self._wordpiece if self.kind == "wordpiece" else str.encode

    def _wordpiece(self, text: str) -> bytes:
        text = text[len(self.prefix) :] if text.startswith(self.prefix) else " " + text
        return (_clean_up(text) if self.cleanup else text).encode("utf-8")


def _byte_characters() -> dict[str, int]:
    """GPT-2's character for every byte: itself where that prints, else one from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in plain}
    rest = [b for b in range(256) if b not in set(plain)]
    return table | {chr(0x100 + i): b for i, b in enumerate(rest)}


_BYTE_OF = _byte_characters()


def byte_level(text: str) -> bytes:
    """The bytes of a byte-level BPE token; added tokens stand for themselves."""
    try:
        return bytes([_BYTE_OF[c] for c in text])
    except KeyError:
        return text.encode("utf-8")


def metaspace(text: str) -> bytes:
    """The bytes of a SentencePiece token."""
    if match := _BYTE_TOKEN.fullmatch(text):
        return bytes([int(match[1], 16)])
    return text.replace(SPACE, " ").encode("utf-8")


# the same as the WordPiece decoder of the `tokenizers` library
_CLEANUP = {
    " .": ".",
    " ?": "?",
    " !": "!",
    " ,": ",",
    " ' ": "'",
    " n't": "n't",
    " 'm": "'m",
    " do not": " don't",
    " 's": "'s",
    " 've": "'ve",
    " 're": "'re",
}


def _clean_up(text: str) -> str:
    for pair in _CLEANUP.items():
        text = text.replace(*pair)
    return text


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
    """For decoders that only the `tokenizers` library has: decodes a window of tokens twice, with
    and without the new token, and returns the difference once it is complete UTF-8."""

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
