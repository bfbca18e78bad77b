"""One tree of errors.

RlxError
├── ShapeError
├── DTypeError
├── AttributeValueError
├── StageError
├── NameConflictError
├── VerifyError
├── ParseError
├── FormatError
├── BindingError
├── InputError
│   ├── QueueFullError
│   ├── EngineClosedError
│   ├── IndexingError (also an IndexError)
│   ├── ArrayValueError (also a ValueError)
│   │   ├── AxisError (also an IndexError)
│   │   └── ArrayCopyError (also a BufferError)
│   └── ArrayTypeError (also a TypeError)
├── BoolConversionError
├── UnsupportedError
├── OptionError
├── CodegenError
├── NumericsError
└── OutOfMemoryError (also a MemoryError)

Each message reads `[where] what; got …; expected …`, then the origin, the lines around the fault,
then `hint: …`; the parts stay available as fields. `page` is where docs say more: the last line of
a traceback names it. Misspelt names get suggestions.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RlxError(Exception):
    """Base of every error that RLX raises on purpose."""

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        got: object = None,
        expected: object = None,
        origin: object = None,
        hint: str = "",
        excerpt: str = "",
    ) -> None:
        self.what, self.where, self.hint, self.excerpt = what, where, hint, excerpt
        self.got, self.expected, self.origin = got, expected, origin
        super().__init__(self._render())
        self.add_note(f"  see {self.page}")

    @property
    def page(self) -> str:
        """Causes and remedies of this kind of error, in the documentation."""
        kind = next(c for c in type(self).__mro__ if c.__module__ == __name__)
        return f"docs/errors.md#{kind.__name__.lower()}"

    def _render(self) -> str:
        head = f"[{self.where}] {self.what}" if self.where else self.what
        if self.got is not None:
            head += f"; got {self.got}"
        if self.expected is not None:
            head += f"; expected {self.expected}"
        lines = [head]
        if self.origin:
            lines.append(f"  from {self.origin}")
        if self.excerpt:
            lines.append(self.excerpt)
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        return "\n".join(lines)

    def located(self, where: str = "", origin: object = None) -> RlxError:
        """The same error with its place filled in, where the raiser did not know it."""
        self.where = self.where or where
        self.origin = self.origin or origin
        self.args = (self._render(),)
        return self


class ShapeError(RlxError):
    """Shapes or dimensions that do not fit."""


class DTypeError(RlxError):
    """Element types that an op does not take."""


class AttributeValueError(RlxError):
    """An op attribute outside its range."""


class StageError(RlxError):
    """A builder or query at the wrong stage of a module."""


class NameConflictError(RlxError):
    """Two things with one name."""


class VerifyError(RlxError):
    """A graph that breaks the rules of the IR."""

    after = ""  # the pass that left the graph so


class ParseError(RlxError):
    """Text that is not IR."""

    line = 0  # both count from 1
    column = 0


class FormatError(RlxError):
    """A file that is damaged, truncated, foreign or of another version."""


class BindingError(RlxError):
    """A symbol unbound, bound twice, or beyond its bound."""


class InputError(RlxError):
    """An input, parameter or state unknown, missing, mistyped or missized."""


class QueueFullError(InputError):
    """A request beyond the queue of an engine; `retry_after` is when to try again, in seconds."""

    retry_after = 1.0


class EngineClosedError(InputError):
    """A request to an engine that is closed, or finishes what it has before it closes."""


class IndexingError(InputError, IndexError):
    """An index of an array out of range, or not an index."""


class ArrayValueError(InputError, ValueError):
    """An argument of an array function whose value does not fit."""


class ArrayTypeError(InputError, TypeError):
    """An argument of an array function of the wrong kind."""


class AxisError(ArrayValueError, IndexError):
    """An axis that the array does not have."""


class ArrayCopyError(ArrayValueError, BufferError):
    """`copy=False` where the elements cannot be shared."""


class BoolConversionError(RlxError):
    """`if`, `and`, `in` or `bool()` on a value of a graph that has not run yet."""


class UnsupportedError(RlxError):
    """An op, a model or a file that cannot be run in any way."""


class OptionError(RlxError):
    """An unknown device, profile, policy, pass or option value."""


class CodegenError(RlxError):
    """Machine code that could not be made or loaded."""


class NumericsError(RlxError):
    """A NaN found where the check mode forbids it."""


class OutOfMemoryError(RlxError, MemoryError):
    """Memory that a device does not have; `got` says how much was asked for."""


def close_names(name: str, known: Iterable[str]) -> str:
    """`close names: …`, or an empty string if none is close."""
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return "close names: " + ", ".join(close) if close else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean …?`, or an empty string if no name is close."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f"did you mean {near[0]}?" if near else ""
