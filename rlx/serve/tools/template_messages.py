"""Conversations with calls, in the form that a chat template takes.

Templates differ: arguments as a dict or as JSON, one call a message or several, ids of nine
characters, no tools at all. What a template can do is found by rendering small conversations.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlx.errors import InputError, RlxError
from rlx.formats.chat_template import ChatTemplate
from rlx.serve.tools.definitions import Tool
from rlx.serve.tools.tool_format import ToolFormat
from rlx.support.records import dataclass

_RESPONSE = "<tool_response>\n"
_USER = {"role": "user", "content": "probe-question"}
_KEY, _VALUE, _RESULT, _ID = "probe_key", "probe-value", "probe-result", "probe0001"
_PROBE = Tool("probe_tool", "probe", {"type": "object", "properties": {_KEY: {"type": "string"}}})


@dataclass(frozen=True)
class TemplateAbilities:
    """What a template does with tools."""

    shows_tools: bool
    calls: str  # "dict" or "text": how arguments are given; "": it shows no calls
    results: bool  # it shows messages of the role `tool`
    several: bool  # several calls in one message
    system: bool
    empty: str | None  # the content of a message that has calls alone

    @staticmethod
    def of(template: ChatTemplate, form: ToolFormat) -> TemplateAbilities:
        tools = form.template_tools([_PROBE])
        ways = [(kind, empty) for empty in ("", None) for kind in ("dict", "text")]
        calls, empty = next((w for w in ways if _shows_call(template, *w)), ("", ""))
        system = _rendered(template, [{"role": "system", "content": "probe-system"}, _USER])
        if "system_tools" in tools:
            shown = True
        else:
            shown = "probe_tool" in _rendered(template, [_USER], **tools)
        return TemplateAbilities(
            shown,
            calls,
            bool(calls) and _RESULT in _rendered(template, [*_talk(calls, 1, empty), _result()]),
            bool(calls) and _rendered(template, _talk(calls, 2, empty)).count(_VALUE) == 2,
            "probe-system" in system,
            empty,
        )


def _talk(kind: str, count: int, content: str | None) -> list[dict[str, Any]]:
    given: Any = {_KEY: _VALUE}
    function = {"name": "probe_tool", "arguments": given if kind == "dict" else json.dumps(given)}
    calls = [{"id": _ID, "type": "function", "function": function}] * count
    return [_USER, {"role": "assistant", "content": content, "tool_calls": calls}]


def _result() -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": _ID, "name": "probe_tool", "content": _RESULT}


def _shows_call(template: ChatTemplate, kind: str, empty: str | None) -> bool:
    """Whether a call is shown, its arguments neither escaped twice nor as Python prints them."""
    text = _rendered(template, _talk(kind, 1, empty))
    plain = _VALUE in text and "probe_tool" in text
    return plain and '\\"' + _KEY not in text and "'" + _KEY + "'" not in text


def _rendered(template: ChatTemplate, messages: list[Any], **variables: Any) -> str:
    try:
        return template.render(messages, **variables)
    except RlxError:
        return ""


class MessageWriter:
    """Writes messages for one template."""

    def __init__(self, template: ChatTemplate, form: ToolFormat) -> None:
        self._form, self.abilities = form, TemplateAbilities.of(template, form)
        self._developer = "developer" in template.source
        self._short_ids = "length != 9" in template.source

    def write(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]
    ) -> tuple[list[dict[str, Any]], Mapping[str, Any]]:
        """The messages for the template, and variables that show it the tools. Messages are those
        of OpenAI's chat completions."""
        found: list[dict[str, Any]] = []
        names: dict[str, str] = {}  # of calls, by their id
        for number, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise InputError(
                    "a message needs a role", where=f"messages[{number}]", got=repr(message)[:80]
                )
            found += self._message(dict(message), number, names)
        if not self.abilities.several:
            found = _one_call_each(found, self.abilities.empty)
        found = _merged_results(found)
        variables: Mapping[str, Any] = {}
        if tools:
            if self.abilities.shows_tools:
                variables = dict(self._form.template_tools(tools))
            else:
                found = _with_system(found, self._form.instructions(tools))
        if "system_tools" in variables:
            found = _with_system(found, "")
            found[0] = found[0] | {"tools": variables["system_tools"]}
            variables = {}
        return (found if self.abilities.system else _without_system(found)), variables

    def _message(
        self, message: dict[str, Any], number: int, names: dict[str, str]
    ) -> list[dict[str, Any]]:
        role = message["role"]
        if role == "developer" and not self._developer:
            return [message | {"role": "system"}]
        if role == "assistant":
            return [self._assistant(message, number, names)]
        if role in ("tool", "function"):
            return [self._result(message, names)]
        return [message]

    def _assistant(
        self, message: dict[str, Any], number: int, names: dict[str, str]
    ) -> dict[str, Any]:
        calls = message.pop("tool_calls", None) or []
        thought = message.pop("reasoning_content", None) or message.pop("reasoning", None)
        if isinstance(thought, str) and thought:
            message |= {"reasoning_content": thought}
            if self._form.name == "harmony" and calls:
                message |= {"thinking": thought, "content": ""}
        if not calls:
            message["content"] = message.get("content") or ""
            return message
        pairs, made = [], []
        for i, call in enumerate(calls if isinstance(calls, list | tuple) else [calls]):
            name, text, given = _call(call, f"messages[{number}].tool_calls[{i}]")
            names[str(call.get("id"))] = name
            pairs.append((name, text))
            arguments = given if self.abilities.calls == "dict" else text
            function = {"name": name, "arguments": arguments}
            made.append({"id": self._id(call.get("id")), "type": "function", "function": function})
        if self.abilities.calls:
            content = message.get("content") or self.abilities.empty
            return message | {"tool_calls": made, "content": content}
        told = _text_of(message.get("content"))
        written = self._form.written(pairs)
        return message | {"content": f"{told}\n{written}" if told else written}

    def _result(self, message: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
        key = str(message.get("tool_call_id"))
        name = message.get("name") or names.get(key)
        content = _text_of(message.get("content"))
        if self.abilities.results:
            made = {"role": "tool", "content": content, "tool_call_id": self._id(key)}
            return made | ({"name": name} if name else {})
        if self._form.result_role != "tool":
            return {"role": self._form.result_role, "content": content}
        return {"role": "user", "content": f"{_RESPONSE}{content}\n</tool_response>"}

    def _id(self, given: object) -> str:
        text = str(given)
        if not self._short_ids or (len(text) == 9 and text.isalnum() and text.isascii()):
            return text
        return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:9]


def _call(call: Any, where: str) -> tuple[str, str, dict[str, Any]]:
    """Name and arguments of a call, as JSON and as an object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not isinstance(function, Mapping):
        raise InputError(
            "not a call", where=where, got=repr(call)[:80],
            expected='{"id": …, "type": "function", "function": {"name": …, "arguments": "{…}"}}',
        )  # fmt: skip
    given = function.get("arguments", "{}")
    try:
        read = json.loads(given or "{}") if isinstance(given, str) else given
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, Mapping):
        raise InputError(
            "arguments of a call are a JSON object", where=f"{where}.function.arguments",
            got=repr(given)[:80],
        )  # fmt: skip
    return name, given if isinstance(given, str) and given else json.dumps(read), dict(read)


def _text_of(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list | tuple) else [content]
    texts = [p.get("text") if isinstance(p, Mapping) else p for p in parts]
    if not all(isinstance(text, str) for text in texts):
        raise InputError(
            "content that is not text", got=repr(content)[:80],
            expected='a text, or parts {"type": "text", "text": "…"}',
        )  # fmt: skip
    return "\n".join(map(str, texts))


def _one_call_each(messages: list[dict[str, Any]], empty: str | None) -> list[dict[str, Any]]:
    """Every call in a message of its own, followed by its result."""
    found: list[dict[str, Any]] = []
    results: dict[str, dict[str, Any]] = {
        str(m.get("tool_call_id")): m for m in messages if m["role"] == "tool"
    }
    used: set[int] = set()
    for message in messages:
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            found += [] if id(message) in used else [message]
            continue
        for i, call in enumerate(calls):
            own = {"tool_calls": [call]} | ({"content": empty} if i else {})
            found.append(message | own)
            result = results.get(call["id"])
            if result is not None and id(result) not in used:
                used.add(id(result))
                found.append(result)
    return found


def _merged_results(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results that became messages of the user, in one message: turns must alternate."""
    found: list[dict[str, Any]] = []
    for message in messages:
        content = message.get("content")
        if found and message["role"] == "user" == found[-1]["role"] and isinstance(content, str):
            last = found[-1]["content"]
            if isinstance(last, str) and last.startswith(_RESPONSE):
                found[-1] = found[-1] | {"content": f"{last}\n{content}"}
                continue
        found.append(message)
    return found


def _with_system(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """The conversation with more in its system message, which comes first."""
    if messages and messages[0]["role"] in ("system", "developer"):
        told = _text_of(messages[0].get("content"))
        whole = "\n\n".join(part for part in (told, text) if part)
        return [messages[0] | {"content": whole}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _without_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For templates that refuse a system message: the first user message begins with it."""
    if not messages or messages[0]["role"] != "system":
        return messages
    told, rest = _text_of(messages[0].get("content")), messages[1:]
    if rest and rest[0]["role"] == "user":
        asked = rest[0].get("content")
        parts = [{"type": "text", "text": told}, *(asked if isinstance(asked, list) else [])]
        first = rest[0] | {"content": f"{told}\n\n{asked}" if isinstance(asked, str) else parts}
        return [first, *rest[1:]]
    return [{"role": "user", "content": told}, *rest]
