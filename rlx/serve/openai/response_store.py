"""Responses that later requests go on from: in memory, bounded, forgotten oldest first."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

from rlx.serve.api_errors import ApiError
from rlx.support.records import dataclass

_MOST, _MOST_BYTES = 4096, 64 << 20


@dataclass(frozen=True)
class StoredResponse:
    """A response and the conversation up to its end, without instructions."""

    messages: list[dict[str, Any]]
    response: dict[str, Any]
    size: int


class ResponseStore:
    """Responses by their id. Each is seen only by the caller whose it is."""

    def __init__(self, most: int = _MOST, most_bytes: int = _MOST_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._kept: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self.size = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(
        self, caller: str, name: str, messages: list[dict[str, Any]], response: dict[str, Any]
    ) -> None:
        size = len(json.dumps(messages)) + len(json.dumps(response))
        if size > self._most_bytes:
            return
        self._kept[caller, name] = StoredResponse(messages, response, size)
        self.size += size
        while len(self._kept) > self._most or self.size > self._most_bytes:
            self.size -= self._kept.popitem(last=False)[1].size

    def get(self, caller: str, name: str) -> StoredResponse:
        found = self._kept.get((caller, name))
        if found is None:
            raise ApiError(404, f"Response with id '{name[:80]}' not found.", param="id")
        self._kept.move_to_end((caller, name))
        return found

    def remove(self, caller: str, name: str) -> None:
        self.get(caller, name)
        self.size -= self._kept.pop((caller, name)).size
