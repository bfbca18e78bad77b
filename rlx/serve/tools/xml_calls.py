"""Calls as tags: `<function=name>` with a `<parameter=key>` for each argument (Qwen3-Coder)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlx.errors import InputError
from rlx.serve.events import Event
from rlx.serve.tools.definitions import Tool
from rlx.serve.tools.lark import Lark, literal, schema
from rlx.serve.tools.scanner import NotACall, Scanner, Steps
from rlx.serve.tools.tool_format import CallScanner, ToolFormat

_END = "</parameter>"
_FREE = r"(?s:.*)"


class XmlCalls(ToolFormat):
    """<tool_call> <function=f> <parameter=a> value </parameter> </function> </tool_call>"""

    name = "xml"
    markers = ("<tool_call>", "</tool_call>")

    def calls(self, lark: Lark, tools: Sequence[Tool], parallel: bool) -> str:
        call = lark.rule("call", " | ".join(f"({_function(lark, t)})" for t in tools))
        begin, end = map(lark.marker, self.markers)
        whole = lark.rule("whole_call", f'{call} "\\n" {end}')
        more = f'("\\n" {begin} {whole})*' if parallel else ""
        return f"{whole} {more}"

    def scanner(self, tools: Sequence[Tool]) -> Scanner:
        return XmlScanner(tools)

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        made = []
        for name, arguments in calls:
            given = json.loads(arguments)
            parameters = "".join(
                f"<parameter={k}>\n{v if isinstance(v, str) else json.dumps(v)}\n{_END}\n"
                for k, v in (given.items() if isinstance(given, dict) else ())
            )
            made.append(f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>")
        return "\n".join(made)


def _function(lark: Lark, tool: Tool) -> str:
    begin = literal(f"\n<function={tool.name}>\n")
    required = tool.parameters.get("required") or ()
    parts = []
    for key, kind in tool.properties.items():
        one = _parameter(lark, tool, key, kind)
        parts.append(one if key in required else f"({one})?")
    if "properties" not in tool.schema and tool.schema.get("additionalProperties", True):
        value = lark.rule("free_value", f"/{_FREE}\\n<\\/parameter>\\n/", lazy=True)
        parts.append(f'("<parameter=" /[A-Za-z0-9_.-]+/ ">\\n" {value})*')
    return f'{begin} {" ".join(parts)} "</function>"'


def _parameter(lark: Lark, tool: Tool, key: str, kind: Any) -> str:
    if not key or any(c in key for c in "<>\n\r"):
        raise InputError(
            "this model cannot write a parameter of that name", where=f"tool {tool.name}",
            got=repr(key)[:80], expected="a name without <, > and line breaks",
        )  # fmt: skip
    begin, end = literal(f"<parameter={key}>\n"), literal(f"\n{_END}\n")
    kind = kind if isinstance(kind, Mapping) else {}
    choices = [kind["const"]] if "const" in kind else kind.get("enum")
    if isinstance(choices, list) and choices and all(isinstance(c, str) for c in choices):
        return f"{begin} ({' | '.join(literal(c) for c in choices)}) {end}"
    if kind.get("type") == "string":
        value = lark.rule("text_value", f"/{_text_pattern(kind)}\\n<\\/parameter>\\n/", lazy=True)
        return f"{begin} {value}"
    whole = {k: v for k, v in tool.parameters.items() if k in ("$defs", "definitions")}
    return f"{begin} {schema({**whole, **kind}, tool.strict)} {end}"


def _text_pattern(kind: Mapping[str, Any]) -> str:
    """The strings of a schema as a regular expression."""
    written = kind.get("pattern")
    if isinstance(written, str):
        begin = "" if written.startswith("^") else _FREE
        end = "" if written.endswith("$") and not written.endswith("\\$") else _FREE
        inner = written.removeprefix("^")
        inner = inner.removesuffix("$") if not end else inner
        return f"{begin}({inner.replace('/', chr(92) + '/')}){end}"
    low, high = kind.get("minLength", 0), kind.get("maxLength", "")
    return f"(?s:.{{{low},{high}}})" if low or high != "" else _FREE


class XmlScanner(CallScanner):
    """Turns tags into JSON. Strings are passed on as they arrive, other values when complete."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._kinds = {tool.name: tool.properties for tool in tools}
        super().__init__(["<tool_call>", "<function="], ["</tool_call>"], [*self._kinds])

    def _after(self, marker: str) -> Steps[None]:
        yield from self._skip_space()
        if marker == "<tool_call>" and not (yield from self._literal("<function=")):
            raise NotACall
        name = (yield from self._raw_until(">", 300)).strip()
        yield self._begin(name)
        yield self._delta("{")
        first = True
        while True:
            yield from self._skip_space()
            if not (yield from self._literal("<parameter=")):
                break
            key = yield from self._raw_until(">")
            yield self._delta(("" if first else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
            first = False
            yield from self._literal("\n")
            yield from self._parameter(self._kinds.get(name, {}).get(key))
        if not (yield from self._literal("</function>")) and self._ended:
            raise NotACall
        yield self._delta("}")

    def _parameter(self, kind: Any) -> Steps[None]:
        kind = kind if isinstance(kind, Mapping) else {}
        choices = [kind["const"]] if "const" in kind else kind.get("enum") or [0]
        if kind.get("type") == "string" or all(isinstance(c, str) for c in choices):
            yield self._delta('"')
            yield from self._until([f"\n{_END}", _END], self._text, trim=False)
            yield self._delta('"')
        else:
            yield self._delta(_as_json((yield from self._raw_until(_END)).strip()))

    def _text(self, text: str) -> Event:
        return self._delta(json.dumps(text, ensure_ascii=False)[1:-1])


def _as_json(text: str) -> str:
    """JSON as it is; else what a Python programmer may have meant; else a string."""
    for form in (text, {"True": "true", "False": "false", "None": "null"}.get(text, "")):
        try:
            json.loads(form, parse_constant=lambda _: 1 // 0)
            return form
        except (ValueError, RecursionError, ZeroDivisionError):
            continue
    return json.dumps(text, ensure_ascii=False)
