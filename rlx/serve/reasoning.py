"""What a model writes before it answers: found by markers, counted, asked for or switched off."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from rlx.errors import OptionError
from rlx.serve.events import Event, ReasoningDelta, TextDelta
from rlx.serve.tools.lark import Lark, pattern
from rlx.serve.tools.scanner import Scanner, Steps, joined
from rlx.support.records import dataclass

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


@dataclass(frozen=True)
class ReasoningStyle:
    """The markers around reasoning, and those around the answer behind it."""

    opening: str
    closing: str
    wrapper: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.opening, self.closing, *self.wrapper)


_THINK = ("<think>", "</think>")
_COHERE = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
STYLES = (
    ReasoningStyle("<|START_THINKING|>", "<|END_THINKING|>", _COHERE),
    ReasoningStyle("[THINK]", "[/THINK]"),
    ReasoningStyle("<seed:think>", "</seed:think>"),
    ReasoningStyle("Here is my thought process:", "Here is my response:"),
)


def find_reasoning(template: str) -> ReasoningStyle | None:
    """The style that a template's source speaks of."""
    for style in STYLES:
        if style.opening in template or style.closing in template:
            return style
    if any(marker in template for marker in _THINK):
        wrapper = ("<response>", "</response>") if "<response>" in template else ()
        return ReasoningStyle(*_THINK, wrapper)
    return None


def thinking_options(
    enable_thinking: bool | None = None, effort: str | None = None
) -> dict[str, Any]:
    """Variables for templates: what families call the switch, and how hard to think."""
    if effort is not None and effort not in EFFORTS:
        raise OptionError(
            "unknown effort", where="reasoning_effort", got=repr(effort)[:80],
            expected=", ".join(EFFORTS),
        )  # fmt: skip
    if enable_thinking is None and effort is not None:
        enable_thinking = effort not in ("none", "minimal")
    options: dict[str, Any] = {}
    if enable_thinking is not None:
        options |= {"enable_thinking": enable_thinking, "thinking": enable_thinking}
    if effort is not None:
        known = {"none": "low", "minimal": "low", "xhigh": "high"}
        options["reasoning_effort"] = known.get(effort, effort)
    return options


class Parser(Protocol):
    """Text of an answer to events."""

    def push(self, text: str) -> list[Event]: ...
    def end(self) -> list[Event]: ...


class ReasoningSplitter:
    """Splits reasoning off the beginning; what follows goes to another parser."""

    def __init__(self, style: ReasoningStyle, inner: Parser, *, opened: bool) -> None:
        """`opened`: the prompt ends inside of the reasoning."""
        self._outer, self._inner = _Outer(style, opened), inner

    def push(self, text: str) -> list[Event]:
        return self._passed(self._outer.push(text))

    def end(self) -> list[Event]:
        return joined([*self._passed(self._outer.end()), *self._inner.end()])

    def _passed(self, events: Iterable[Event]) -> list[Event]:
        found: list[Event] = []
        for event in events:
            found += self._inner.push(event.text) if isinstance(event, TextDelta) else [event]
        return joined(found)


class _Outer(Scanner):
    """Reasoning, then text without the markers around it."""

    def __init__(self, style: ReasoningStyle, opened: bool) -> None:
        self._style, self._opened = style, opened
        super().__init__()

    def _run(self) -> Steps[None]:
        style = self._style
        before = ""
        if not self._opened:
            while (yield from self._more()) and self._rest.isspace():
                before += self._take(len(self._rest))
                if self._ended:
                    break
            size = len(self._rest) - len(self._rest.lstrip())
            before += self._take(size)
            self._opened = yield from self._literal(style.opening)
        if self._opened:
            before = ""
            yield from self._skip_space()
            yield from self._until([style.closing], ReasoningDelta)
            yield from self._skip_space()
        yield TextDelta(before)
        while (yield from self._until(list(style.wrapper), TextDelta, trim=False)) is not None:
            pass


def grammar_with_reasoning(
    lark: Lark, body: str, style: ReasoningStyle | None, *, opened: bool
) -> str:
    """A grammar whose text may begin with reasoning; it must, if the prompt opened it."""
    if style is None:
        return lark.build(body)
    inner = lark.rule("body", body)
    thought = lark.reasoning("" if opened else style.opening, style.closing)
    space = r"/\s{0,4}/"
    if opened:
        return lark.build(f"{thought} {space} {inner}")
    return lark.build(f"{inner} | {thought} {space} {inner}")


def not_first(style: ReasoningStyle | None, opened: bool, special: Mapping[str, int]) -> str:
    """What free text may not begin with, so that reasoning is seen as such."""
    if style is None or opened or style.opening in special:
        return ""
    return rf"\s{{0,4}}{pattern(style.opening)}"


def count_reasoning(tokens: Iterable[int], decoder: Any, parser: Parser) -> int:
    """How many of the tokens of an answer are reasoning, with its markers: up to the one with
    which the last of it became certain. `decoder` and `parser` are fresh."""
    count = 0
    for number, token in enumerate(tokens, 1):
        if any(isinstance(e, ReasoningDelta) for e in parser.push(decoder.push(token))):
            count = number
    return count
