"""GPT-OSS: messages on channels. Analysis is reasoning, final is the answer, and a message to
`functions.name` is a call."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlx.serve.events import Event, ReasoningDelta, TextDelta
from rlx.serve.tools.definitions import Tool
from rlx.serve.tools.lark import Lark, literal
from rlx.serve.tools.scanner import NotACall, Scanner, Steps
from rlx.serve.tools.tool_format import ToolFormat

_CHANNEL, _MESSAGE, _START = "<|channel|>", "<|message|>", "<|start|>"
_CONSTRAIN, _END, _CALL, _RETURN = "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
_LONGEST_HEADER = 512


class Harmony(ToolFormat):
    """Markers are special tokens. A call ends the answer, so there is one at a time."""

    name = "harmony"
    markers = (_CHANNEL, _MESSAGE, _START, _CONSTRAIN, _END, _CALL, _RETURN)
    parallel = False

    def calls(self, lark: Lark, tools: Sequence[Tool], parallel: bool) -> str:
        channel, message = lark.marker(_CHANNEL), lark.marker(_MESSAGE)
        constrain = lark.marker(_CONSTRAIN)
        each = []
        for tool in tools:
            to, arguments = f"to=functions.{tool.name}", lark.arguments(tool)
            inner = f'{channel} {literal(f"commentary {to} ")} {constrain} "json"'
            outer = f'{literal(f" {to}")} {channel} "commentary " {constrain} "json"'
            each.append(f"(({inner} | {outer}) {message} {arguments})")
        return lark.rule("call", " | ".join(each))

    def body(
        self, lark: Lark, tools: Sequence[Tool], *, required: bool, parallel: bool,
        answer: str | None = None,
    ) -> str:  # fmt: skip
        channel, message = lark.marker(_CHANNEL), lark.marker(_MESSAGE)
        again = f'{lark.marker(_END)} {lark.marker(_START)} "assistant"'
        channels = '"analysis"' if required else '("analysis" | "commentary")'
        before = lark.rule("before", f"{channel} {channels} {message} TEXT {again}")
        last = [] if required else [f'{channel} "final" {message} {answer or "TEXT"}']
        last += [self.calls(lark, tools, parallel)] if tools else []
        return f"{before}* ({' | '.join(last)})"

    def scanner(self, tools: Sequence[Tool]) -> Scanner:
        return HarmonyScanner()

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        return "".join(
            f"{_CHANNEL}commentary to=functions.{n} {_CONSTRAIN}json{_MESSAGE}{a}{_CALL}"
            for n, a in calls
        )


class HarmonyScanner(Scanner):
    """Reads messages: a header, which says what the text of the message is, and the text."""

    def _run(self) -> Steps[None]:
        ends = [_END, _START, _CALL, _RETURN]
        if not (yield from self._has_header()):
            yield from self._until(ends, TextDelta, trim=False)
        while (yield from self._more()):
            try:
                header = yield from self._raw_until(_MESSAGE, _LONGEST_HEADER)
            except NotACall:
                return  # a header that was cut off
            yield from self._message(header, ends)

    def _has_header(self) -> Steps[bool]:
        """Whether the answer begins with a header; else all of it is text."""
        for begin in (_CHANNEL, _START, " to=", _MESSAGE):
            if self._rest.startswith(begin):
                return True
        while (yield from self._more()):
            begins = (_CHANNEL, _START, " to=", _MESSAGE)
            if any(self._rest.startswith(b) for b in begins):
                return True
            if self._ended or not any(b.startswith(self._rest) for b in begins):
                return False
            yield None
        return True

    def _message(self, header: str, ends: list[str]) -> Steps[None]:
        recipient = _RECIPIENT.search(header)
        if recipient is not None:
            yield self._begin(recipient[1])
            try:
                yield from self._arguments()
            except NotACall:
                return
            yield from self._until(ends, _nothing)
            return
        channel = header.partition(_CHANNEL)[2].strip()
        delta = ReasoningDelta if channel.startswith("analysis") else TextDelta
        yield from self._until(ends, delta, trim=False)


def _nothing(text: str) -> Event:
    return TextDelta("")
