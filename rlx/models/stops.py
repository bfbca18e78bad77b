"""Stop strings: text is held back while it may turn out to begin one."""

from __future__ import annotations

from collections.abc import Sequence


class StopWatch:
    """Passes text on, but for a stop string and what comes after it."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """What may be shown now."""
        if not self._stops:
            return text
        self._held += text
        found = [at for s in self._stops if (at := self._held.find(s)) >= 0]
        if found:
            self.stopped = True
            shown, self._held = self._held[: min(found)], ""
            return shown
        keep = max(_overlap(self._held, s) for s in self._stops)
        shown, self._held = self._held[: len(self._held) - keep], self._held[-keep:] if keep else ""
        return shown

    def flush(self) -> str:
        """What was held back and became no stop string after all."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
