"""Messages, tools and the choice among them, checked: what comes out fits chat templates."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlx.serve.api_errors import ApiError, bad_request
from rlx.serve.json_body import Fields

_MOST_MESSAGES, _MOST_TOOLS = 4096, 128
_ROLES = ("system", "developer", "user", "assistant", "tool")
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_OTHER_PARTS = {"image_url": "images", "input_audio": "audio", "file": "files"}
_FIELDS = (
    "role content name tool_calls tool_call_id refusal reasoning_content reasoning audio "
    "annotations function_call prefix "
    "parsed"  # of the Python client, which sends back what it made of an answer
)
_KNOWN = frozenset(_FIELDS.split())


def read_messages(fields: Fields) -> list[dict[str, Any]]:
    """The conversation; parts of text are joined."""
    given = fields.array("messages", _MOST_MESSAGES)
    if given is None:
        raise fields.missing("messages")
    if not given:
        raise bad_request("'messages' must not be empty.", "messages", "invalid_value")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(given)]


def _message(given: Any, where: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise _wrong(where, "an object")
    fields = Fields(given, _KNOWN, f"{where}.")
    if "role" not in fields:
        raise fields.missing("role")
    role = fields.choice("role", _ROLES, "")
    found: dict[str, Any] = {"role": "system" if role == "developer" else role}
    calls = fields.array("tool_calls", _MOST_TOOLS)
    if "content" in fields:
        found["content"] = _content(fields.get("content"), f"{where}.content")
    elif role != "assistant":
        raise fields.missing("content")
    else:
        found["content"] = fields.text("refusal") or ""
    if calls:
        if role != "assistant":
            raise bad_request(f"'{where}.tool_calls' is for messages of the assistant.", where)
        found["tool_calls"] = [_call(c, f"{where}.tool_calls[{i}]") for i, c in enumerate(calls)]
    if role == "tool":
        found["tool_call_id"] = fields.needed_text("tool_call_id")
    thought = fields.text("reasoning_content") or fields.text("reasoning")
    named = fields.text("name")
    found |= {"reasoning_content": thought} if thought is not None else {}
    return found | ({"name": named} if named is not None else {})


def _content(given: Any, where: str) -> str:
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise _wrong(where, "a string or an array of content parts")
    texts = []
    for i, part in enumerate(given):
        place = f"{where}[{i}]"
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise _wrong(place, "a content part with a type")
        kind = part["type"]
        if kind in _OTHER_PARTS:
            raise bad_request(
                f"'{place}' has the type '{kind}': this model reads text, not "
                f"{_OTHER_PARTS[kind]}.", place, "unsupported_content",
            )  # fmt: skip
        text = part.get("refusal" if kind == "refusal" else "text")
        if kind not in ("text", "refusal") or not isinstance(text, str):
            raise _wrong(place, "{'type': 'text', 'text': '…'}")
        texts.append(text)
    return "\n".join(texts)


def _call(given: Any, where: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise _wrong(where, "an object")
    fields = Fields(given, ("id", "type", "function", "index"), f"{where}.")
    fields.choice("type", ("function",), "function")
    function = fields.object("function")
    if function is None:
        raise fields.missing("function")
    inner = Fields(function, ("name", "arguments", "parsed_arguments"), f"{where}.function.")
    name, arguments = inner.needed_text("name"), inner.text("arguments") or "{}"
    told = {"name": name, "arguments": arguments}
    return {"id": fields.needed_text("id"), "type": "function", "function": told}


def read_tools(fields: Fields) -> list[dict[str, Any]]:
    """The tools that the model may call."""
    given = fields.array("tools", _MOST_TOOLS) or []
    found: list[dict[str, Any]] = []
    for i, tool in enumerate(given):
        where = f"tools[{i}]"
        if not isinstance(tool, dict):
            raise _wrong(where, "an object")
        outer = Fields(tool, ("type", "function"), f"{where}.")
        outer.choice("type", ("function",), "")
        function = outer.object("function")
        if function is None:
            raise outer.missing("function")
        known = ("name", "description", "parameters", "strict")
        inner = Fields(function, known, f"{where}.function.")
        name = inner.needed_text("name")
        if not _NAME.fullmatch(name):
            raise inner.wrong("name", "1 to 64 letters, digits, _ or -")
        if name in (other["function"]["name"] for other in found):
            raise bad_request(f"Two tools are called '{name}'.", f"{where}.function.name")
        inner.text("description")
        inner.object("parameters")
        inner.flag("strict")
        told = {n: v for n, v in function.items() if v is not None and n != "strict"}
        told.setdefault("parameters", {"type": "object", "properties": {}})
        found.append({"type": "function", "function": told})
    return found


def read_choice(fields: Fields, tools: list[dict[str, Any]]) -> str | Mapping[str, Any]:
    """Which tool is to be called: none, auto, required, or one by its name."""
    given = fields.get("tool_choice")
    if given is None:
        return "auto" if tools else "none"
    if not tools and given != "none":
        raise bad_request("'tool_choice' is only allowed when 'tools' are given.", "tool_choice")
    if isinstance(given, str):
        return fields.choice("tool_choice", ("none", "auto", "required"), "auto")
    chosen = fields.object("tool_choice")
    assert chosen is not None
    outer = Fields(chosen, ("type", "function"), "tool_choice.")
    outer.choice("type", ("function",), "")
    function = outer.object("function")
    if function is None:
        raise outer.missing("function")
    name = Fields(function, ("name",), "tool_choice.function.").needed_text("name")
    if name not in (tool["function"]["name"] for tool in tools):
        raise bad_request(
            f"Tool choice '{name[:64]}' not found in 'tools'.", "tool_choice", "invalid_value"
        )
    return {"type": "function", "function": {"name": name}}


def _wrong(where: str, expected: str) -> ApiError:
    return bad_request(f"Invalid value for '{where}': expected {expected}.", where, "invalid_value")
