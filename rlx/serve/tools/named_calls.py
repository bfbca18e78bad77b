"""Calls as a name, a separator and arguments: Mistral since 2025, DeepSeek."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.serve.tools.definitions import Tool
from rlx.serve.tools.lark import Lark
from rlx.serve.tools.scanner import NotACall, Scanner, Steps
from rlx.serve.tools.tool_format import CallScanner, ToolFormat

_CALL_ID = "[CALL_ID]"


class NamedCalls(ToolFormat):
    """`outer[0]` (`opening` `head` name `separator` arguments `closing`)+ `outer[1]`."""

    def __init__(
        self, name: str, opening: str, separator: str, closing: str = "", *, head: str = "",
        outer: tuple[str, str] = ("", ""), between: str = "", others: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self.name, self._outer, self._open, self._head = name, outer, opening, head
        self._separator, self._close, self._between = separator, closing, between
        pieces = (*outer, opening, *others)
        self.markers = tuple(m for m in pieces if m)

    def calls(self, lark: Lark, tools: Sequence[Tool], parallel: bool) -> str:
        end = lark.sequence(self._close)
        one = " | ".join(
            f"({lark.sequence(self._head + t.name + self._separator)} {lark.arguments(t)} {end})"
            for t in tools
        )
        call, opening = lark.rule("call", one), lark.sequence(self._open)
        between = lark.sequence(self._between)
        more = f"({between} {opening} {call})*" if parallel else ""
        return f"{opening if self._outer[0] else ''} {call} {more} {lark.sequence(self._outer[1])}"

    def scanner(self, tools: Sequence[Tool]) -> Scanner:
        closing = [*self._outer, self._close.strip()]
        names = [t.name for t in tools]
        return NamedScanner([self._open], closing, names, self._head, self._separator)

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        each = [f"{self._open}{self._head}{n}{self._separator}{a}{self._close}" for n, a in calls]
        return f"{self._outer[0]}{self._between.join(each)}{self._outer[1]}"


class NamedScanner(CallScanner):
    """A name up to a separator, then arguments."""

    def __init__(
        self, opening: Sequence[str], closing: Sequence[str], names: Sequence[str], head: str,
        separator: str,
    ) -> None:  # fmt: skip
        self._head, self._separator = head, separator.strip()
        super().__init__(opening, closing, names)

    def _after(self, marker: str) -> Steps[None]:
        yield from self._skip_space()
        if self._head and not (yield from self._literal(self._head)):
            raise NotACall
        name = yield from self._raw_until(self._separator, 300)
        yield self._begin(name.partition(_CALL_ID)[0].strip())
        yield from self._arguments()
