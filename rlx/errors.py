"""One tree of errors.

RlxError
├── ShapeError          shapes or dimensions that do not fit
├── DTypeError          element types that an op does not take
├── AttributeValueError an op attribute outside its range
├── StageError          a builder or query at the wrong stage of a module
├── NameConflictError   two things with one name
├── VerifyError         a graph that breaks the rules of the IR
├── ParseError          text that is not IR
├── FormatError         a file that is damaged, truncated, foreign or of another version
├── BindingError        a symbol unbound, bound twice, or beyond its bound
├── InputError          an input, parameter or state unknown, missing, mistyped or missized
├── UnsupportedError    an op a device cannot run in any way
├── OptionError         an unknown device, profile, policy, pass or option value
├── CodegenError        machine code that could not be made or loaded
└── NumericsError       a NaN found where the check mode forbids it

Each message reads `[where] what; got …; expected …`, then the origin, the lines around the fault,
then `hint: …`; the parts stay available as fields.
"""

from __future__ import annotations


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
    pass


class DTypeError(RlxError):
    pass


class AttributeValueError(RlxError):
    pass


class StageError(RlxError):
    pass


class NameConflictError(RlxError):
    pass


class VerifyError(RlxError):
    after = ""  # the pass that left the graph so


class ParseError(RlxError):
    line = 0  # both count from 1
    column = 0


class FormatError(RlxError):
    pass


class BindingError(RlxError):
    pass


class InputError(RlxError):
    pass


class UnsupportedError(RlxError):
    pass


class OptionError(RlxError):
    pass


class CodegenError(RlxError):
    pass


class NumericsError(RlxError):
    pass
