"""What a token adds to a text, in bytes: tokens may end inside a character."""

from __future__ import annotations

import re
from collections.abc import Callable
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
