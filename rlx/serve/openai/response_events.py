"""A response as it comes to be: its items, and the events that tell of them."""

from __future__ import annotations

import secrets
import time
from typing import Any

from rlx.serve.api_errors import ApiError
from rlx.serve.events import (
    Event,
    Finished,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)

_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}


class ResponseBuilder:
    """Takes the events of an answer, gives those of the interface, numbered in order."""

    def __init__(self, echo: dict[str, Any], tag: str = "") -> None:
        self.id = _new_id(f"resp_{tag}" if tag else "resp")
        self.response: dict[str, Any] = {
            "id": self.id, "object": "response", "created_at": int(time.time()),
            "status": "in_progress", "background": False, "error": None,
            "incomplete_details": None, "output": [], "usage": None, **echo,
        }  # fmt: skip
        self._number = 0
        self._item: dict[str, Any] | None = None  # the one that is being written

    def begin(self) -> list[dict[str, Any]]:
        return [self._told(f"response.{k}", response=self._copy())
                for k in ("created", "in_progress")]  # fmt: skip

    def add(self, event: Event) -> list[dict[str, Any]]:
        if isinstance(event, Finished):
            return self._finish(event)
        if isinstance(event, ToolCallStart):
            item = {"id": _new_id("fc"), "type": "function_call", "status": "in_progress",
                    "call_id": event.id, "name": event.name, "arguments": ""}  # fmt: skip
            return [*self._close(), *self._open(item)]
        if isinstance(event, ToolCallDelta):
            assert self._item is not None
            self._item["arguments"] += event.arguments
            kind = "response.function_call_arguments.delta"
            return [self._told(kind, delta=event.arguments, **self._place())]
        return self._text("reasoning" if isinstance(event, ReasoningDelta) else "message", event)

    def _text(self, kind: str, event: TextDelta | ReasoningDelta) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = []
        if not event.text:
            return told
        if self._item is None or self._item["type"] != kind:
            told += self._close()
            item: dict[str, Any]
            if kind == "message":
                item = {"id": _new_id("msg"), "type": kind, "status": "in_progress",
                        "role": "assistant", "content": []}  # fmt: skip
            else:
                item = {"id": _new_id("rs"), "type": kind, "status": "in_progress", "summary": [],
                        "content": []}  # fmt: skip
            told += self._open(item)
            part = _part(kind, "")
            place = self._place() | {"content_index": 0}
            told.append(self._told("response.content_part.added", part=dict(part), **place))
            item["content"] = [part]
        assert self._item is not None
        self._item["content"][0]["text"] += event.text
        more: dict[str, Any] = {"delta": event.text, "content_index": 0}
        if kind == "message":
            more["logprobs"] = []
        told.append(self._told(f"response.{_PARTS[kind]}.delta", **more, **self._place()))
        return told

    def _open(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        self._item = item
        self.response["output"].append(item)
        index = len(self.response["output"]) - 1
        return [self._told("response.output_item.added", output_index=index, item=dict(item))]

    def _close(self, status: str = "completed") -> list[dict[str, Any]]:
        """The item is complete."""
        item = self._item
        if item is None:
            return []
        told, place = [], self._place()
        if item["type"] == "function_call":
            more: dict[str, Any] = {"arguments": item["arguments"], "name": item["name"]}
            told.append(self._told("response.function_call_arguments.done", **more, **place))
        else:
            part, at = item["content"][0], place | {"content_index": 0}
            more = {"logprobs": []} if item["type"] == "message" else {}
            kind = f"response.{_PARTS[item['type']]}.done"
            told.append(self._told(kind, text=part["text"], **more, **at))
            told.append(self._told("response.content_part.done", part=dict(part), **at))
        item["status"] = status
        index = place["output_index"]
        told.append(self._told("response.output_item.done", output_index=index, item=dict(item)))
        self._item = None
        return told

    def _finish(self, event: Finished) -> list[dict[str, Any]]:
        cut = event.reason == "length"
        told = self._close("incomplete" if cut else "completed")
        self.response["status"] = "incomplete" if cut else "completed"
        if cut:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        self.response["usage"] = _usage(event.usage)
        kind = "response.incomplete" if cut else "response.completed"
        return [*told, self._told(kind, response=self._copy())]

    def fail(self, error: ApiError) -> list[dict[str, Any]]:
        self.response["status"] = "failed"
        self.response["error"] = {"code": error.code or error.kind, "message": error.message}
        return [self._told("response.failed", response=self._copy())]

    def messages(self) -> list[dict[str, Any]]:
        """The answer as messages of the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        for item in self.response["output"]:
            if item["type"] == "message":
                message["content"] += item["content"][0]["text"]
            elif item["type"] == "reasoning":
                thought = message.get("reasoning_content", "") + item["content"][0]["text"]
                message["reasoning_content"] = thought
            else:
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)
        return [message]

    def _place(self) -> dict[str, Any]:
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": len(self.response["output"]) - 1}

    def _told(self, kind: str, **more: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **more}

    def _copy(self) -> dict[str, Any]:
        return self.response | {"output": [dict(item) for item in self.response["output"]]}


def _part(kind: str, text: str) -> dict[str, Any]:
    more: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "message" else {}
    return {"type": _PARTS[kind], "text": text, **more}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"
