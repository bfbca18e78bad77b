"""An answer as content blocks, and the events that tell of them."""

from __future__ import annotations

import json
import secrets
from typing import Any

from rlx.serve.events import (
    Event,
    Finished,
    ReasoningDelta,
    ToolCallDelta,
    ToolCallStart,
)

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class BlockBuilder:
    """Takes the events of an answer, gives those of the interface; `message` is the whole."""

    def __init__(self, model: str) -> None:
        self.message: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant",
            "model": model, "content": [], "stop_reason": None, "stop_sequence": None,
            "usage": _usage(0, 0, 0),
        }  # fmt: skip
        self._open = ""  # the type of the block that is being written
        self._arguments = ""

    def begin(self, prompt_tokens: int) -> dict[str, Any]:
        self.message["usage"] = _usage(prompt_tokens, 0, 0)
        return {"type": "message_start", "message": self.message | {"content": []}}

    def add(self, event: Event) -> list[dict[str, Any]]:
        if isinstance(event, Finished):
            return self._finish(event)
        if isinstance(event, ToolCallStart):
            number = f"toolu_{event.id.removeprefix('call_')}"
            block: dict[str, Any] = {"type": "tool_use", "id": number, "name": event.name}
            block["input"] = {}
            self._arguments = ""
            return [*self._close(), self._start(block)]
        if isinstance(event, ToolCallDelta):
            self._arguments += event.arguments
            return [self._delta({"type": "input_json_delta", "partial_json": event.arguments})]
        if not event.text:
            return []
        kind = "thinking" if isinstance(event, ReasoningDelta) else "text"
        told = []
        if self._open != kind:
            block = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
            told = [*self._close(), self._start(block)]
        self.message["content"][-1][kind] += event.text
        return [*told, self._delta({"type": f"{kind}_delta", kind: event.text})]

    def _start(self, block: dict[str, Any]) -> dict[str, Any]:
        self.message["content"].append(block)
        self._open = block["type"]
        return {"type": "content_block_start", "index": self._index, "content_block": dict(block)}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    @property
    def _index(self) -> int:
        return len(self.message["content"]) - 1

    def _close(self) -> list[dict[str, Any]]:
        """The block is complete."""
        if not self._open:
            return []
        told = []
        if self._open == "tool_use":
            self.message["content"][-1]["input"] = _input(self._arguments)
        elif self._open == "thinking":  # nobody else checks what this server thought
            self.message["content"][-1]["signature"] = "rlx"
            told.append(self._delta({"type": "signature_delta", "signature": "rlx"}))
        self._open = ""
        return [*told, {"type": "content_block_stop", "index": self._index}]

    def _finish(self, event: Finished) -> list[dict[str, Any]]:
        told = self._close()
        usage, found = event.usage, event.stop
        reason = "stop_sequence" if found else _REASONS.get(event.reason, "end_turn")
        self.message |= {"stop_reason": reason, "stop_sequence": found}
        counted = _usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        self.message["usage"] = counted
        ended = {"stop_reason": reason, "stop_sequence": found}
        told.append({"type": "message_delta", "delta": ended, "usage": counted})
        return [*told, {"type": "message_stop"}]


def _input(text: str) -> dict[str, Any]:
    """Arguments as an object; none where they were cut off."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _usage(prompt: int, cached: int, output: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
    }
