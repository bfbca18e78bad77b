"""What a token adds to a text, in bytes: tokens may end inside a character."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Container
from typing import Literal

from rlx.records import dataclass

SPACE = "\u2581"  # SentencePiece's visible space
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class Spelling:
    """How the tokens of a vocabulary are spelled.

    `bytes`: GPT-2's characters for bytes; `spaces`: SPACE for a space and <0xAB> for bytes;
    `continued`: a token that does not start with `prefix` starts a word; `library`: some other way
    that only the library knows.
    """

    kind: Literal["bytes", "spaces", "continued", "library"]
    strip_first: bool = False  # the first token of a text loses its leading space
    prefix: str = "##"
    tidy: bool = False  # no space before punctuation

    @property
    def speller(self) -> Callable[[str], bytes]:
        """Token text → bytes."""
        if self.kind == "bytes":
            return byte_level
        if self.kind == "spaces":
            return with_spaces
        return self._continued if self.kind == "continued" else str.encode

    def _continued(self, text: str) -> bytes:
        text = text[len(self.prefix) :] if text.startswith(self.prefix) else " " + text
        return (_tidied(text) if self.tidy else text).encode("utf-8")


def _byte_characters() -> dict[str, int]:
    """GPT-2's character for every byte: itself where that prints, else one from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in plain}
    rest = [b for b in range(256) if b not in set(plain)]
    return table | {chr(0x100 + i): b for i, b in enumerate(rest)}


_BYTE_OF = _byte_characters()


def byte_level(text: str) -> bytes:
    """The bytes that byte-level BPE spells as `text`; added tokens stand for themselves."""
    try:
        return bytes([_BYTE_OF[c] for c in text])
    except KeyError:
        return text.encode("utf-8")


def with_spaces(text: str) -> bytes:
    """The bytes that SentencePiece spells as `text`."""
    if match := _BYTE_TOKEN.fullmatch(text):
        return bytes([int(match[1], 16)])
    return text.replace(SPACE, " ").encode("utf-8")


# the same as the WordPiece decoder of the `tokenizers` library
_TIDY = {
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


def _tidied(text: str) -> str:
    for pair in _TIDY.items():
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
