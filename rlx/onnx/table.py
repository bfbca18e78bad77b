"""The table of ONNX operators: each is a small function on arrays.

    @op("Selu")
    def selu(node, x):
        alpha, gamma = node.float("alpha", 1.67), node.float("gamma", 1.05)
        return gamma * xp.where(x > 0, x, alpha * xp.expm1(x))

`since` is the opset version from which the function holds: the row with the greatest one that is
not above the file's opset is used. `known` names operands whose elements must be known while
tracing, such as a shape: the function gets them as NumPy arrays, whose elements may be sizes.
`on_host` is for what depends on data in its shape, or computes with strings: the function gets
NumPy arrays for all its tensors and runs between segments. `raw` gets values as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from rlx.errors import FormatError

if TYPE_CHECKING:
    from rlx.formats.onnx import OnnxNode

Function = Callable[..., Any]
F = TypeVar("F", bound=Function)


class Row(NamedTuple):
    """One version of one operator."""

    function: Function
    since: int
    known: frozenset[int]
    on_host: bool
    raw: bool
    required: int  # operands that must be there
    most: int | None  # operands that it takes at most

    def check(self, node: OnnxNode, operands: Sequence[Any]) -> None:
        """Refuse a node with too few operands, or too many."""
        given = len(operands)
        missing = [i for i in range(self.required) if i >= given or operands[i] is None]
        if missing or (self.most is not None and given > self.most):
            raise FormatError(
                f"operand {missing[0]} is missing" if missing else "too many operands",
                where=str(node), got=given, expected=self.required if missing else self.most,
            )  # fmt: skip


_TABLE: dict[tuple[str, str], list[Row]] = {}
_ON_KNOWN: dict[tuple[str, str], Function] = {}


def op(
    *names: str, since: int = 1, domain: str = "", known: tuple[int, ...] = (),
    on_host: bool = False, raw: bool = False,
) -> Callable[[F], F]:  # fmt: skip
    """Register a function as these operators, from opset `since` on."""

    def register(function: F) -> F:
        for name in names:
            rows = _TABLE.setdefault((domain, name), [])
            rows.append(Row(function, since, frozenset(known), on_host, raw, *_operands(function)))
            rows.sort(key=lambda row: row.since)
        return function

    return register


def _operands(function: Function) -> tuple[int, int | None]:
    """The operands that a function of the table requires, and those it takes at most."""
    given = list(inspect.signature(function).parameters.values())[1:]  # after the node
    required = sum(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in given)
    if any("None" in str(p.annotation) and p.default is p.empty for p in given):
        # an operand that may be absent although others stand behind it
        required = next(i for i, p in enumerate(given) if "None" in str(p.annotation))
    variadic = any(p.kind is p.VAR_POSITIONAL for p in given)
    return required, None if variadic else len(given)


def on_known(*names: str, domain: str = "") -> Callable[[Function], Function]:
    """Register a NumPy function that computes these operators where all operands are known: shape
    computations. Elements may be symbolic sizes. It may return NotImplemented."""

    def register(function: Function) -> Function:
        for name in names:
            _ON_KNOWN[domain, name] = function
        return function

    return register


def find(domain: str, name: str, opset: int) -> Row | None:
    """The row of an operator at an opset version."""
    _load()
    fitting = [row for row in _TABLE.get((domain, name), ()) if row.since <= opset]
    return fitting[-1] if fitting else None


def find_on_known(domain: str, name: str) -> Function | None:
    return _ON_KNOWN.get((domain, name))


def operators() -> dict[tuple[str, str], list[Row]]:
    """The whole table, for the page that lists it."""
    _load()
    return _TABLE


def _load() -> None:
    import rlx.onnx.ops  # noqa: F401  # registers every group
