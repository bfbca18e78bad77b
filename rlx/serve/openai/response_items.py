"""Items of `/v1/responses` as messages of a conversation."""

from __future__ import annotations

from typing import Any

from rlx.serve.api_errors import ApiError, bad_request
from rlx.serve.json_body import Fields

_MOST_ITEMS = 4096
_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")


def messages_of_items(fields: Fields) -> list[dict[str, Any]]:
    """The input, a text or items. Calls and reasoning become parts of the assistant's messages."""
    given = fields.get("input")
    if given is None:
        raise fields.missing("input")
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given or len(given) > _MOST_ITEMS:
        raise fields.wrong("input", f"a string, or an array of 1 to {_MOST_ITEMS} items")
    found: list[dict[str, Any]] = []
    thought = ""
    for i, item in enumerate(given):
        where = f"input[{i}]"
        if not isinstance(item, dict):
            raise _wrong(where, "an object")
        kind = item.get("type") or "message"
        if kind == "reasoning":
            thought = _text(item.get("content") or item.get("summary") or "", f"{where}.content")
        elif kind == "message":
            message = _message(item, where)
            if thought and message["role"] == "assistant":
                message["reasoning_content"], thought = thought, ""
            found.append(message)
        elif kind == "function_call":
            _add_call(found, _call(item, where), thought)
            thought = ""
        elif kind == "function_call_output":
            inner = Fields(item, ("type", "call_id", "output", "id", "status"), f"{where}.")
            content = _text(item.get("output"), f"{where}.output")
            called = inner.needed_text("call_id")
            found.append({"role": "tool", "tool_call_id": called, "content": content})
        else:
            raise _wrong(f"{where}.type", "message, function_call, function_call_output, reasoning")
    if not found:
        raise _wrong("input", "a message")
    return found


def _message(item: dict[str, Any], where: str) -> dict[str, Any]:
    inner = Fields(item, ("type", "role", "content", "id", "status", "phase"), f"{where}.")
    role = inner.choice("role", _ROLES, "")
    if "content" not in inner:
        raise inner.missing("content")
    content = _text(item["content"], f"{where}.content")
    return {"role": "system" if role == "developer" else role, "content": content}


def _call(item: dict[str, Any], where: str) -> dict[str, Any]:
    known = ("type", "id", "call_id", "name", "arguments", "status", "namespace")
    inner = Fields(item, known, f"{where}.")
    function = {"name": inner.needed_text("name"), "arguments": inner.text("arguments") or "{}"}
    return {"id": inner.needed_text("call_id"), "type": "function", "function": function}


def _add_call(found: list[dict[str, Any]], call: dict[str, Any], thought: str) -> None:
    """Calls that follow each other, or a text, are one message."""
    if not (found and found[-1]["role"] == "assistant") or thought:
        found.append({"role": "assistant", "content": ""})
        if thought:
            found[-1]["reasoning_content"] = thought
    found[-1].setdefault("tool_calls", []).append(call)


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(where, "a string or an array of content parts")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if kind in _TEXTS else None
        if not isinstance(text, str):
            raise bad_request(
                f"'{where}[{i}]' is not text: this model reads text alone.", f"{where}[{i}]",
                "unsupported_content",
            )  # fmt: skip
        texts.append(text)
    return "\n".join(texts)


def _wrong(where: str, expected: str) -> ApiError:
    return bad_request(f"Invalid value for '{where}': expected {expected}.", where, "invalid_value")
