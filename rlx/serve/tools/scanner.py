"""Incremental parsing: a parser is a generator that reads text as it arrives.

It yields events, and None where it needs more text. What it decides depends on the characters
alone, so any split of a text into pieces gives the same events, up to where deltas are cut.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeAlias, TypeVar

from rlx.serve.events import Event, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart

_T = TypeVar("_T")
Steps: TypeAlias = Generator[Event | None, None, _T]
_SPACE = " \t\r\n"
_NAME_AT_MOST = 256  # characters of a name; a longer one is no call


class NotACall(Exception):
    """What looked like a call is none."""


class Scanner:
    """Text that has arrived and was not consumed, and ways to read it. Subclasses have `_run`."""

    def __init__(self) -> None:
        self._rest = ""
        self._ended = self._done = False
        self._calls = 0
        self._trimmed = ""  # white space before the last marker
        self._taken: list[str] | None = None  # what was consumed of a call without a name so far
        self._steps = self._run()

    def _run(self) -> Steps[None]:
        raise NotImplementedError

    def push(self, text: str) -> list[Event]:
        """The events that became certain with this text."""
        self._rest += text
        return self._advance() if text else []

    def end(self) -> list[Event]:
        """What was held back; no text follows."""
        self._ended = True
        return self._advance()

    def _advance(self) -> list[Event]:
        found: list[Event] = []
        while not self._done:
            try:
                event = next(self._steps)
            except StopIteration:
                self._done = True
                break
            if event is None:
                break
            found.append(event)
        return joined(found)

    # -- primitives -------------------------------------------------------------------------------

    def _more(self) -> Steps[bool]:
        """Wait for a character that was not consumed; whether there is one."""
        while not self._rest:
            if self._ended:
                return False
            yield None
        return True

    def _take(self, count: int) -> str:
        text, self._rest = self._rest[:count], self._rest[count:]
        if self._taken is not None:
            self._taken.append(text)
        return text

    def _skip_space(self) -> Steps[None]:
        while (yield from self._more()):
            size = len(self._rest) - len(self._rest.lstrip(_SPACE))
            self._take(size)
            if self._rest:
                return

    def _literal(self, text: str) -> Steps[bool]:
        """Consume `text` if it comes next."""
        while not self._rest.startswith(text):
            if self._ended or not text.startswith(self._rest):
                return False
            yield None
        self._take(len(text))
        return True

    def _until(
        self, markers: Sequence[str], delta: Callable[[str], Event], *, trim: bool = True
    ) -> Steps[str | None]:
        """Pass text on as deltas up to a marker, which is consumed and returned; None at the end.
        `trim`: white space before a marker is dropped."""
        while True:
            found = [(at, m) for m in markers if (at := self._rest.find(m)) >= 0]
            if found:
                at, marker = min(found)
                whole = self._take(at + len(marker))[:at]
                text = whole.rstrip() if trim else whole
                self._trimmed = whole[len(text) :]
                if text:
                    yield delta(text)
                return marker
            if self._ended:
                # a marker that was cut off is text, unless a call shows what it would have been
                sure = self._certain(markers, trim) if self._calls else len(self._rest)
                text = self._take(len(self._rest))[:sure]
                if text:
                    yield delta(text)
                return None
            if text := self._take(self._certain(markers, trim)):
                yield delta(text)
            yield None

    def _certain(self, markers: Sequence[str], trim: bool) -> int:
        """How many characters can no longer be part of a marker, or of white space before one."""
        keep = max((overlap(self._rest, m) for m in markers), default=0)
        text = self._rest[: len(self._rest) - keep]
        return len(text.rstrip()) if trim else len(text)

    def _raw_until(self, marker: str, most: int | None = None) -> Steps[str]:
        """The text before a marker, both consumed; no call where there is none, or too late."""
        while (at := self._rest.find(marker)) < 0:
            if self._ended or (most is not None and len(self._rest) > most + len(marker)):
                raise NotACall
            yield None
        if most is not None and at > most:
            raise NotACall
        return self._take(at + len(marker))[:at]

    # -- JSON -------------------------------------------------------------------------------------

    def _value(self, delta: Callable[[str], Event] | None = None) -> Steps[str]:
        """Consume one JSON value; its text, as it was written. With `delta` it is passed on as it
        arrives."""
        whole: list[str] = []
        state = JsonEnd()
        while (yield from self._more()):
            size = state.feed(self._rest)
            text = self._take(size)
            whole.append(text)
            if delta is not None and text:
                yield delta(text)
            if state.done:
                return "".join(whole)
        if state.scalar:
            return "".join(whole)
        raise NotACall

    def _text_value(self) -> Steps[str]:
        """A JSON value that must be a string."""
        if not (yield from self._more()) or self._rest[0] != '"':
            raise NotACall
        value = loads((yield from self._value()))
        if not isinstance(value, str):
            raise NotACall
        return value

    # -- calls ------------------------------------------------------------------------------------

    def _begin(self, name: str) -> Event:
        """The call has its name: from here on it is one."""
        if not name or len(name) > _NAME_AT_MOST:
            raise NotACall
        self._taken = None
        self._calls += 1
        return ToolCallStart(self._calls - 1, new_call_id(), name)

    def _delta(self, text: str) -> Event:
        return ToolCallDelta(self._calls - 1, text)

    def _arguments(self) -> Steps[None]:
        """The arguments of the call that began: an object, or a string that has one."""
        yield from self._skip_space()
        if self._rest.startswith('"'):
            value = loads((yield from self._value()))
            yield self._delta(value if isinstance(value, str) else "{}")
        else:
            yield from self._value(self._delta)


class JsonEnd:
    """Finds the end of a JSON value that arrives in parts."""

    def __init__(self) -> None:
        self._depth, self._quoted, self._escaped = 0, False, False
        self.done = self.scalar = False
        self._begun = False

    def feed(self, text: str) -> int:
        """How many characters of `text` belong to the value; `done` when it is complete."""
        for at, c in enumerate(text):
            if self._quoted:
                self._in_string(c)
            elif c == '"':
                self._quoted = self._begun = True
            elif self.scalar and c in ",]} \t\r\n":
                self.done = True
                return at
            elif c in "{[":
                self._depth, self._begun = self._depth + 1, True
            elif c in "]}":
                self._depth -= 1
                self.done = self._depth <= 0
            elif not self._begun and c not in _SPACE:
                self.scalar = self._begun = True
            if self.done:
                return at + 1
        return len(text)

    def _in_string(self, c: str) -> None:
        if self._escaped:
            self._escaped = False
        elif c == "\\":
            self._escaped = True
        elif c == '"':
            self._quoted = False
            self.done = self._depth == 0


def joined(events: Sequence[Event]) -> list[Event]:
    """The events with neighbouring deltas of one kind put together; none is empty."""
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta):
            out[-1] = TextDelta(last.text + event.text)
        elif isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
            out[-1] = ReasoningDelta(last.text + event.text)
        elif isinstance(event, ToolCallDelta) and isinstance(last, ToolCallDelta):
            out[-1] = ToolCallDelta(last.index, last.arguments + event.arguments)
        elif not (isinstance(event, TextDelta) and not event.text):
            out.append(event)
    return out


def overlap(text: str, marker: str) -> int:
    """The length of the longest suffix of `text` that is a proper prefix of `marker`."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NotACall from error
