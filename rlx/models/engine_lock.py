"""Who may use the one KV cache of a model."""

from __future__ import annotations

import threading
import time

_PATIENCE = 0.1  # seconds that a paused generation may hold the lock while others wait


class EngineLock:
    """A lock for the KV cache whose holder may be preempted between two tokens.

    A generation holds it from the first token to the last: two threads that alternate would prefill
    each other's prompts for every token. But a stream may be abandoned midway, by the very thread
    that now asks for something else. So a paused generation is preempted after a moment, and finds
    out with its next token. As a context manager, for a single call.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the condition's own: taken without it, it is cheaper
        self._state = threading.Condition(self._lock)
        self._holder: object = None
        self._running = False
        self._paused_at = 0.0
        self._waiting = 0

    def enter(self, who: object) -> bool:
        """Wait for the lock; whether `who` has held it all along."""
        with self._lock:
            if self._holder is who:
                self._running = True
                return True
            self._waiting += 1
            try:
                while self._holder is not None and (left := self._patience()) != 0:
                    self._state.wait(left)
            finally:
                self._waiting -= 1
            self._holder, self._running = who, True
            return False

    def _patience(self) -> float | None:
        """How long to wait for the holder; None while it runs."""
        if self._running:
            return None
        return max(0.0, self._paused_at + _PATIENCE - time.monotonic())

    def pause(self) -> None:
        """The holder is idle until its next token."""
        with self._lock:
            self._running, self._paused_at = False, time.monotonic()
            if self._waiting:
                self._state.notify_all()

    def leave(self, who: object) -> None:
        with self._lock:
            if self._holder is who:
                self._holder, self._running = None, False
                self._state.notify_all()

    def __enter__(self) -> None:
        self.enter(object())

    def __exit__(self, *_: object) -> None:
        self.leave(self._holder)  # a running holder is not preempted
