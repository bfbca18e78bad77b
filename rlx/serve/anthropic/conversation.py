"""Messages of content blocks as messages of a conversation."""

from __future__ import annotations

import json
from typing import Any

from rlx.serve.api_errors import ApiError, bad_request
from rlx.serve.json_body import Fields

_MOST = 4096
_BLOCK = ("type", "text", "cache_control", "citations")


def read_system(fields: Fields) -> list[dict[str, Any]]:
    given = fields.get("system")
    if given is None:
        return []
    text = _text(given, "system")
    return [{"role": "system", "content": text}] if text else []


def read_conversation(fields: Fields) -> list[dict[str, Any]]:
    """The messages. Results of tools come before the text of their message."""
    given = fields.array("messages", _MOST)
    if given is None:
        raise fields.missing("messages")
    if not given:
        raise bad_request("messages: at least one message is required.", "messages")
    found: list[dict[str, Any]] = []
    for i, message in enumerate(given):
        where = f"messages.{i}"
        if not isinstance(message, dict):
            raise _wrong(where, "an object")
        inner = Fields(message, ("role", "content"), f"{where}.")
        role = inner.choice("role", ("user", "assistant"), "")
        content = inner.get("content")
        if content is None:
            raise inner.missing("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or len(blocks) > _MOST:
            raise _wrong(f"{where}.content", "a string or an array of content blocks")
        read = _assistant if role == "assistant" else _user
        found += read(blocks, f"{where}.content")
    if found[-1]["role"] == "assistant":
        raise bad_request(
            "messages: the conversation must end with a user message; an answer cannot be begun "
            "for the model.", "messages",
        )  # fmt: skip
    return found


def _assistant(blocks: list[Any], where: str) -> list[dict[str, Any]]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    texts: list[str] = []
    for i, block in enumerate(blocks):
        place, kind = f"{where}.{i}", _kind(block, f"{where}.{i}")
        if kind == "text":
            texts.append(_text([block], place))
        elif kind == "tool_use":
            known = ("type", "id", "name", "input", "cache_control", "caller")
            inner = Fields(block, known, f"{place}.")
            given = inner.object("input")
            function = {"name": inner.needed_text("name"), "arguments": json.dumps(given or {})}
            call = {"id": inner.needed_text("id"), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        elif kind == "thinking":
            inner = Fields(block, ("type", "thinking", "signature"), f"{place}.")
            message["reasoning_content"] = inner.needed_text("thinking")
        elif kind != "redacted_thinking":
            raise _wrong(f"{place}.type", "text, tool_use or thinking")
    return [message | {"content": "\n".join(texts)}]


def _user(blocks: list[Any], where: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    texts: list[str] = []
    for i, block in enumerate(blocks):
        place, kind = f"{where}.{i}", _kind(block, f"{where}.{i}")
        if kind == "text":
            texts.append(_text([block], place))
        elif kind == "tool_result":
            known = ("type", "tool_use_id", "content", "is_error", "cache_control")
            inner = Fields(block, known, f"{place}.")
            content = _text(inner.get("content") or "", f"{place}.content")
            failed = "Error: " if inner.flag("is_error") else ""
            called = inner.needed_text("tool_use_id")
            found.append({"role": "tool", "tool_call_id": called, "content": failed + content})
        else:
            raise _wrong(f"{place}.type", "text or tool_result: this model reads text alone")
    if texts or not found:
        found.append({"role": "user", "content": "\n".join(texts)})
    return found


def _kind(block: Any, where: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        raise _wrong(where, "a content block with a type")
    return kind


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(where, "a string or an array of text blocks")
    texts = []
    for i, block in enumerate(content):
        if _kind(block, f"{where}.{i}") != "text" or not isinstance(block.get("text"), str):
            raise _wrong(f"{where}.{i}", "a block of text: this model reads text alone")
        Fields(block, _BLOCK, f"{where}.{i}.")
        texts.append(block["text"])
    return "\n".join(texts)


def _wrong(where: str, expected: str) -> ApiError:
    return bad_request(f"{where}: expected {expected}.", where, "invalid_value")
