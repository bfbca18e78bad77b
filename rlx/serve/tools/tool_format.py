"""What a format of tool calls is: its markers, its grammar, its parser."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlx.serve.events import TextDelta
from rlx.serve.tools.definitions import Tool
from rlx.serve.tools.lark import TEXT, Lark
from rlx.serve.tools.scanner import NotACall, Scanner, Steps


class ToolFormat:
    """How a family of models writes calls. `name` is for messages and tests."""

    name = ""
    markers: tuple[str, ...] = ()  # where they are special tokens, the parser must see them
    parallel = True  # whether an answer may have several calls
    result_role = "tool"  # in templates that print roles as they are
    text_begins_not = ""  # a regular expression: an answer that begins so is a call

    def calls(self, lark: Lark, tools: Sequence[Tool], parallel: bool) -> str:
        """The rest of a call, or of several."""
        raise NotImplementedError

    def body(
        self, lark: Lark, tools: Sequence[Tool], *, required: bool, parallel: bool,
        answer: str | None = None,
    ) -> str:  # fmt: skip
        """The grammar of an answer: a call, or free text and perhaps a call. `answer` stands in
        the place of free text where the text has a form of its own."""
        calls = self.calls(lark, tools, parallel and self.parallel)
        first = lark.sequence(self.first_marker)
        if required:
            return f"{first} {calls}"
        if answer is not None:
            return f"{answer} | {first} {calls}"
        lead = lark.text_then(self.first_marker) if self.first_marker else ""
        return f"{TEXT} | {lead} {calls}"

    @property
    def first_marker(self) -> str:
        """The marker at which free text ends."""
        return self.markers[0] if self.markers else ""

    def scanner(self, tools: Sequence[Tool]) -> Scanner:
        """A parser of answers."""
        raise NotImplementedError

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls, each a name and JSON, as the model would write them: for templates that cannot."""
        raise NotImplementedError

    def instructions(self, tools: Sequence[Tool]) -> str:
        """What a model is told whose template does not show tools."""
        listed = "\n".join(json.dumps(tool.as_openai(), ensure_ascii=False) for tool in tools)
        example = self.written([("function-name", '{"argument": "value"}')])
        return (
            f"You may call these tools, each given by a JSON schema:\n{listed}\n\n"
            f"To call a tool, answer in this form and wait for its result:\n{example}"
        )

    def template_tools(self, tools: Sequence[Tool]) -> Mapping[str, Any]:
        """Variables of the template that show the tools."""
        return {"tools": [tool.as_openai() for tool in tools]}


class CallScanner(Scanner):
    """Text, and calls between markers. What follows an opening marker and is no call is text."""

    def __init__(self, opening: Sequence[str], closing: Sequence[str], names: Sequence[str]):
        self._opening, self._closing = opening, closing
        self._known = frozenset(names)
        super().__init__()

    def _run(self) -> Steps[None]:
        markers = [m for m in (*self._opening, *self._closing) if m]
        while True:
            marker = yield from self._until(markers, TextDelta)
            if marker is None:
                return
            if self._calls:
                yield from self._skip_space()
            if marker in self._opening:
                yield from self._guarded(marker, self._trimmed)

    def _guarded(self, marker: str, before: str = "") -> Steps[None]:
        self._taken = []
        try:
            yield from self._after(marker)
        except NotACall:
            if self._ended and (marker or self._calls):
                self._rest = ""  # it was cut off, and may have been a call
            elif self._taken is not None:
                yield TextDelta(before + marker + "".join(self._taken))
        self._taken = None
        if self._calls:
            yield from self._skip_space()

    def _after(self, marker: str) -> Steps[None]:
        """Read what follows an opening marker."""
        raise NotImplementedError
