"""Calls as JSON objects with a name and arguments, alone or in a list, between markers."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.serve.events import TextDelta
from rlx.serve.tools.definitions import Tool
from rlx.serve.tools.lark import Lark, literal
from rlx.serve.tools.scanner import NotACall, Scanner, Steps, loads
from rlx.serve.tools.tool_format import CallScanner, ToolFormat

_NAMES, _ARGUMENTS = ("name", "tool_name", "function"), ("arguments", "parameters")


class JsonCalls(ToolFormat):
    """`opening` {"name": …, "arguments": …} `closing`."""

    def __init__(
        self, name: str, opening: str, closing: str = "", *, listed: bool = False, pad: str = "",
        keys: tuple[str, str] = ("name", "arguments"), numbered: bool = False,
        optional_id: bool = False, parallel: bool = True,
    ) -> None:  # fmt: skip
        """`listed`: all calls are one list. `pad` stands between markers and JSON. `numbered`: an
        object begins with its "tool_call_id"; `optional_id`: it may end with its "id"."""
        self.name, self.parallel = name, parallel
        self.markers = tuple(m for m in (opening, closing) if m)
        self._open, self._close, self._listed, self._pad = opening, closing, listed, pad
        self._keys, self._numbered, self._optional_id = keys, numbered, optional_id

    def calls(self, lark: Lark, tools: Sequence[Tool], parallel: bool) -> str:
        one = lark.rule("call", " | ".join(f"({self._object(lark, t)})" for t in tools))
        pad, close = literal(self._pad) if self._pad else "", lark.sequence(self._close)
        if self._listed:
            more = f'(", " {one})*' if parallel else ""
            return f'{pad} "[" {one} {more} "]" {pad} {close}'
        whole = lark.rule("whole_call", f"{pad} {one} {pad} {close}")
        more = f'("\\n" {lark.sequence(self._open)} {whole})*' if parallel else ""
        return f"{whole} {more}"

    def _object(self, lark: Lark, tool: Tool) -> str:
        name, arguments = self._keys
        text = f'"{name}": "{tool.name}", "{arguments}": '
        number = r'"{\"tool_call_id\": \"" /[0-9]{1,3}/ "\", " ' if self._numbered else ""
        begin = number + literal(text if self._numbered else "{" + text)
        ends = r'(", \"id\": \"" /[a-zA-Z0-9]{9}/ "\"")?' if self._optional_id else ""
        return f'{begin} {lark.arguments(tool)} {ends} "}}"'

    def scanner(self, tools: Sequence[Tool]) -> Scanner:
        return JsonScanner([self._open], [self._close], [t.name for t in tools])

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        name, arguments = self._keys
        objects = []
        for number, (called, given) in enumerate(calls):
            begin = f'"tool_call_id": "{number}", ' if self._numbered else ""
            objects.append(f'{{{begin}"{name}": "{called}", "{arguments}": {given}}}')
        pad = self._pad
        if self._listed:
            return f"{self._open}{pad}[{', '.join(objects)}]{pad}{self._close}"
        return "\n".join(f"{self._open}{pad}{o}{pad}{self._close}" for o in objects)


class JsonScanner(CallScanner):
    """An object, or a list of them, after an opening marker."""

    def _after(self, marker: str) -> Steps[None]:
        yield from self._skip_space()
        if not (yield from self._literal("[")):
            yield from self._object()
            return
        while True:
            yield from self._skip_space()
            yield from self._object()
            yield from self._skip_space()
            if not (yield from self._literal(",")):
                yield from self._literal("]")
                return

    def _object(self) -> Steps[None]:
        """One call. Arguments that come before the name wait for it."""
        if not (yield from self._literal("{")):
            raise NotACall
        begun = given = False
        early = "{}"
        while True:
            key = yield from self._key()
            if key in _NAMES and not begun:
                if key == "function" and self._rest.startswith("{"):
                    yield from self._object()
                    given = True
                else:
                    yield self._begin(self._checked((yield from self._text_value())))
                begun = True
            elif key in _ARGUMENTS and begun and not given:
                yield from self._arguments()
                given = True
            elif key in _ARGUMENTS and not begun:
                early = yield from self._value()
            else:
                yield from self._value()
            yield from self._skip_space()
            if (yield from self._literal("}")):
                break
            if not (yield from self._literal(",")):
                raise NotACall
        if not begun:
            raise NotACall
        if not given:
            yield self._delta(str(loads(early)) if early.startswith('"') else early)

    def _key(self) -> Steps[str]:
        """A key of an object and the colon behind it."""
        yield from self._skip_space()
        key = yield from self._text_value()
        yield from self._skip_space()
        if not (yield from self._literal(":")):
            raise NotACall
        yield from self._skip_space()
        return key

    def _checked(self, name: str) -> str:
        return name


class LlamaCalls(JsonCalls):
    """Llama 3: an answer that begins with {"name": …} is a call, with or without a marker."""

    text_begins_not = r"\s*\{\"name\": \""

    def __init__(self) -> None:
        super().__init__("llama", "<|python_tag|>", keys=("name", "parameters"), parallel=False)
        self._open = ""

    @property
    def first_marker(self) -> str:
        return ""

    def scanner(self, tools: Sequence[Tool]) -> Scanner:
        return LlamaScanner(self.markers, [], [t.name for t in tools])


class LlamaScanner(JsonScanner):
    """Calls with no marker before them: only those of tools that exist count."""

    def _run(self) -> Steps[None]:
        yield from self._skip_space()
        if (yield from self._more()) and self._rest[0] == "{":
            yield from self._guarded("")
            while self._calls and (yield from self._literal(";")):
                yield from self._guarded("")
        yield from super()._run()

    def _checked(self, name: str) -> str:
        if name not in self._known:
            raise NotACall
        return name


class PlainScanner(Scanner):
    """Text alone."""

    def _run(self) -> Steps[None]:
        yield from self._until([], TextDelta, trim=False)
