"""The lexer: text to tokens, and errors with line, column and a caret."""

from __future__ import annotations

import re
from typing import NamedTuple, NoReturn

from rlx.errors import ParseError

_TOKEN = re.compile(
    r"""(?P<space>\s+)
      | (?P<comment>//[^\n]*)
      | (?P<string>"(?:[^"\\\n]|\\.)*")
      | (?P<number>0x[0-9a-fA-F]+|[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)
      | (?P<value>%[A-Za-z0-9_]+(?:\.[0-9]+)?)
      | (?P<identifier>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<punctuation><=|[-+*()\[\]{},;:=.])""",
    re.VERBOSE,
)
_CLOSES = {")": "(", "]": "[", "}": "{"}
_WIDTH = 100  # of the line shown with an error


class Token(NamedTuple):
    kind: str  # string, number, value, identifier, punctuation, comment or end
    text: str
    at: int  # offset of its first character

    def __str__(self) -> str:
        return "the end of the text" if self.kind == "end" else f"'{_shorten(self.text)}'"


def _shorten(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "…"


class Source:
    """A text, its name, and the errors found in it."""

    def __init__(self, text: str, name: str) -> None:
        self.text, self.name = text, name

    def fail(
        self,
        at: int,
        what: str,
        *,
        got: object = None,
        expected: object = None,
        hint: str = "",
        cause: BaseException | None = None,
    ) -> NoReturn:
        """Raise a ParseError for the character `at`."""
        line = self.text.count("\n", 0, at) + 1
        start = self.text.rfind("\n", 0, at) + 1
        column = at - start + 1
        error = ParseError(
            what,
            where=f"{self.name}:{line}:{column}",
            got=got,
            expected=expected,
            hint=hint,
            excerpt=self._excerpt(start, at),
        )
        error.line, error.column = line, column
        raise error from cause

    def _excerpt(self, start: int, at: int) -> str:
        """The line, cut to a window around the fault, and a caret under it."""
        end = self.text.find("\n", start)
        line = self.text[start : end if end >= 0 else None].replace("\t", " ").rstrip("\r")
        column = at - start
        first = max(0, column - _WIDTH // 2) if len(line) > _WIDTH else 0
        shown = line[first : first + _WIDTH]
        return f"    {shown}\n    {' ' * (column - first)}^"


def tokenize(source: Source) -> list[Token]:
    """All tokens, an `end` last. `//` is a quotient inside brackets and a comment elsewhere."""
    text, tokens, open_marks = source.text, list[Token](), list[str]()
    at, match = 0, _TOKEN.match
    while at < len(text):
        found = match(text, at)
        if found is None:
            expected = "a closing quote on the same line" if text[at] == '"' else None
            source.fail(at, "not a token", got=repr(text[at]), expected=expected)
        kind, lexeme = str(found.lastgroup), found[0]
        if kind == "comment" and open_marks and open_marks[-1] != "{":
            kind, lexeme = "punctuation", "//"
        if kind == "punctuation":
            if lexeme in "([{":
                open_marks.append(lexeme)
            elif open_marks and _CLOSES.get(lexeme) == open_marks[-1]:
                open_marks.pop()
        if kind != "space":
            tokens.append(Token(kind, lexeme, at))
        at += len(lexeme)
    tokens.append(Token("end", "", len(text)))
    return tokens
