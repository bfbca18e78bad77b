"""Reading text: tokens, then dims, shapes and attribute values by recursive descent.

Errors have line, column and a caret.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import struct
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import numpy as np

from rlx.errors import ParseError, RlxError
from rlx.ir import attrs
from rlx.ir.attrs import Data, MaskKind
from rlx.ir.dim import Dim, sym
from rlx.ir.dtype import BY_NAME, DType
from rlx.ir.quant.scheme import QuantScheme
from rlx.ir.shape import Shape

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


MAX_DEPTH = 60  # of brackets; nested graphs count several
_PLAIN = {"true": True, "false": False, "none": None, "inf": float("inf")}


class Reader:
    def __init__(self, source: Source) -> None:
        self.source, self.tokens, self.position = source, tokenize(source), 0
        self.depth = 0

    # -- tokens -------------------------------------------------------------------------------

    @property
    def token(self) -> Token:
        return self.tokens[self.position]

    def ahead(self) -> str:
        """The text of the token after the next."""
        return self.tokens[min(self.position + 1, len(self.tokens) - 1)].text

    def advance(self) -> Token:
        token = self.tokens[self.position]
        if token.kind != "end":
            self.position += 1
        return token

    def take(self, mark: str) -> bool:
        """Consume `mark` if it is the next token."""
        token = self.tokens[self.position]
        if token.text == mark and token.kind in ("punctuation", "identifier"):
            self.position += 1
            return True
        return False

    def expect(self, mark: str) -> Token:
        token = self.token
        if not self.take(mark):
            self.fail(token, "unexpected text", expected=f"'{mark}'")
        return token

    def expect_kind(self, kind: str, expected: str) -> Token:
        if self.token.kind != kind:
            self.fail(self.token, "unexpected text", expected=expected)
        return self.advance()

    def fail(
        self,
        token: Token,
        what: str,
        *,
        got: object = None,
        expected: object = None,
        cause: BaseException | None = None,
    ) -> NoReturn:
        shown = token if got is None else got
        self.source.fail(token.at, what, got=shown, expected=expected, cause=cause)

    def wrap(self, token: Token, cause: Exception) -> NoReturn:
        """Re-raise an error of the IR at the token that caused it."""
        if not isinstance(cause, RlxError):
            self.fail(token, f"{type(cause).__name__}: {cause}", cause=cause)
        where = f"{cause.where}: " if cause.where else ""
        self.source.fail(
            token.at,
            f"{where}{cause.what}",
            got=cause.got,
            expected=cause.expected,
            hint=cause.hint,
            cause=cause,
        )

    def nest(self, token: Token) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self.fail(token, "nested too deep", expected=f"at most {MAX_DEPTH} levels")

    def sequence(self, item: Callable[[], Any], close: str) -> list[Any]:
        """Items separated by commas, up to the mark `close`."""
        items: list[Any] = []
        while not self.take(close):
            if items:
                if not self.take(","):
                    self.fail(self.token, "unexpected text", expected=f"',' or '{close}'")
                if self.take(close):  # a comma at the end does no harm
                    break
            items.append(item())
        return items

    # -- identifiers and numbers --------------------------------------------------------------

    def string(self) -> str:
        token = self.expect_kind("string", "a quoted string")
        try:
            return str(json.loads(token.text, strict=False))
        except ValueError as e:
            self.fail(token, "not a string", cause=e)

    def name(self, expected: str) -> str:
        """An identifier, or any text in quotes."""
        if self.token.kind == "string":
            return self.string()
        return self.expect_kind("identifier", expected).text

    def integer(self, expected: str = "an int") -> int:
        negative = self.take("-")
        token = self.expect_kind("number", expected)
        number = self.number(token)
        if not isinstance(number, int):
            self.fail(token, "not an int", expected=expected)
        return -number if negative else number

    def number(self, token: Token) -> int | float:
        try:
            if token.text.startswith("0x"):
                return int(token.text, 16)
            return int(token.text) if token.text.isdigit() else float(token.text)
        except ValueError as e:  # an int of more digits than Python converts
            self.fail(token, "not a number", cause=e)

    # -- dimensions ---------------------------------------------------------------------------

    def dim(self) -> Dim:
        start = self.token
        try:
            return self._sum()
        except RlxError as e:
            if e.excerpt:
                raise
            self.wrap(start, e)

    def _sum(self) -> Dim:
        value: Any = self._product()
        while self.token.text in ("+", "-"):
            plus = self.advance().text == "+"
            right = self._product()
            value = value + right if plus else value - right
        return value  # type: ignore[no-any-return]

    def _product(self) -> Dim:
        value: Any = self._factor()
        while self.token.text in ("*", "//"):
            times, at = self.advance().text == "*", self.token
            right = self._factor()
            if not times and not (isinstance(right, int) and right > 0):
                self.fail(at, "not a divisor", got=right, expected="a positive int")
            value = value * right if times else value // right
        return value  # type: ignore[no-any-return]

    def _factor(self) -> Dim:
        token = self.token
        self.nest(token)
        try:
            if self.take("-"):
                return self._factor() * -1
            if self.take("("):
                value = self._sum()
                self.expect(")")
                return value
            if token.kind == "number":
                return self.integer("a dimension")
            if token.text == "sym" and self.ahead() == "(":
                self.position += 2
                value = sym(self.string())
                self.expect(")")
                return value
            return sym(self.expect_kind("identifier", "a dimension").text)
        finally:
            self.depth -= 1

    def shape(self) -> Shape:
        start = self.expect("[")
        dims = self.sequence(self.dim, "]")
        return self._shape(start, dims, self.dtype())

    def dtype(self) -> DType:
        token = self.expect_kind("identifier", "an element type")
        if token.text not in BY_NAME:
            self.fail(token, "unknown element type", expected=", ".join(BY_NAME))
        return BY_NAME[token.text]

    def _shape(self, start: Token, dims: list[Any], dtype: DType) -> Shape:
        try:
            return Shape(dims, dtype)
        except RlxError as e:
            self.wrap(start, e)

    # -- values -------------------------------------------------------------------------------

    def value(self) -> Any:
        """An attribute value; its text determines its type."""
        token = self.token
        if token.kind == "string":
            return self.string()
        if token.text == "[":
            return self._tuple_or_shape()
        special = self._special.get(token.text)
        if special is not None and (found := special(self)) is not _NOT_ONE:
            return found
        if self._is_float():
            return self._float()
        if token.text in BY_NAME:
            return self.dtype()
        if token.kind in ("identifier", "number") or token.text in ("-", "("):
            return self.dim()
        return self.fail(token, "unexpected text", expected="a value")

    def _tuple_or_shape(self) -> Any:
        start = self.expect("[")
        self.nest(start)
        items = self.sequence(self.value, "]")
        self.depth -= 1
        if self.token.kind == "identifier" and self.token.text in BY_NAME:
            return self._shape(start, items, self.dtype())
        return tuple(items)

    def _is_float(self) -> bool:
        token = self.tokens[self.position + 1] if self.token.text == "-" else self.token
        if token.kind == "number":
            return not token.text.startswith("0x") and not token.text.isdigit()
        return token.text in ("inf", "nan") and token.kind == "identifier"

    def _float(self) -> float:
        negative = self.take("-")
        token = self.advance()
        value = float(token.text)
        if token.text == "nan" and self.take("("):
            bits = self.integer("the bits of a NaN")
            self.expect(")")
            value = struct.unpack("<d", struct.pack("<Q", bits & (2**64 - 1)))[0]
        return -value if negative else value

    def _mask(self) -> Any:
        if self.ahead() != ".":
            return _NOT_ONE
        self.position += 2
        token = self.expect_kind("identifier", "a mask kind")
        width = 0
        if self.take("("):
            width = self.integer("the width of the window")
            self.expect(")")
        try:
            return MaskKind(token.text, width)
        except RlxError as e:
            self.wrap(token, e)

    def _scheme(self) -> Any:
        if self.ahead() != ".":
            return _NOT_ONE
        self.position += 2
        token = self.expect_kind("identifier", "a quantisation scheme")
        try:
            return QuantScheme.parse(token.text)
        except RlxError as e:
            self.wrap(token, e)

    def _data(self) -> Any:
        if self.ahead() != "(":
            return _NOT_ONE
        self.position += 2
        shape = self.shape()
        self.expect(",")
        data = self.array(shape)
        self.expect(")")
        return data

    def _plain(self) -> Any:
        return _PLAIN[self.advance().text]

    def body(self) -> Any:
        """A nested graph; the graph parser overrides this."""
        return _NOT_ONE

    _special: dict[str, Callable[[Reader], Any]] = {
        **dict.fromkeys(_PLAIN, _plain),
        "mask": _mask,
        "quant": _scheme,
        "data": _data,
        "graph": lambda self: self.body(),
    }

    # -- constants ----------------------------------------------------------------------------

    def array(self, shape: Shape) -> Data:
        """The elements of a constant of `shape`: nested lists, or base64 of its bytes."""
        start = self.token
        if not shape.is_static:
            self.fail(start, "a constant of unknown size", got=shape, expected="ints")
        try:
            if self.take("base64"):
                raw = base64.b64decode(self.string(), validate=True)
                return Data(attrs.from_bytes(raw, shape))
            flat: list[Any] = []
            dims = self._elements(flat, shape.dtype)
            if dims != shape.dims:
                self.fail(start, "elements of another shape", got=list(dims), expected=shape)
            return Data(np.array(flat, dtype=shape.dtype.numpy).reshape(dims))
        except (ValueError, OverflowError, binascii.Error) as e:
            self.fail(start, f"not the elements of {shape}: {e}", cause=e)

    def _elements(self, flat: list[Any], dtype: DType) -> tuple[int, ...]:
        start = self.token
        if not self.take("["):
            flat.append(self._element(dtype))
            return ()
        self.nest(start)
        rows = self.sequence(lambda: self._elements(flat, dtype), "]")
        self.depth -= 1
        if len(set(rows)) > 1:
            self.fail(start, "rows of different lengths")
        return (len(rows), *rows[0]) if rows else (0,)

    def _element(self, dtype: DType) -> Any:
        token = self.token
        if dtype.kind == "bool" and token.text in ("true", "false"):
            return self.advance().text == "true"
        if dtype.kind == "complex" and self.take("("):
            real = self._real()
            self.expect(",")
            imaginary = self._real()
            self.expect(")")
            return complex(real, imaginary)
        if dtype.is_integer:
            return self.integer(f"an element of type {dtype}")
        if dtype.is_float:
            return self._real()
        return self.fail(token, "unexpected text", expected=f"an element of type {dtype}")

    def _real(self) -> float:
        if self._is_float():
            return self._float()
        return float(self.integer("a number"))


_NOT_ONE: Any = object()  # not a special value after all: a symbol
