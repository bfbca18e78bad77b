"""Who may use a model's cache: one answer at a time, and nobody waits for one that is not read."""

from __future__ import annotations

import threading
import time

PATIENCE = 0.1  # seconds that an answer may stand still while others wait


class Turns:
    """A lock whose holder may be passed over between two tokens.

    An answer keeps its turn from the first token to the last, or answers of two threads would run
    each other's prompts again for every token. But a stream may be left alone midway, by the very
    thread that now asks for something else; so one that stands still gives way, and finds out with
    its next token. As a context manager, for what is done at once.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the condition's own: taken without it, it is cheaper
        self._state = threading.Condition(self._lock)
        self._holder: object = None
        self._runs = False
        self._since = 0.0  # when the holder came to a stand
        self._waiting = 0

    def enter(self, who: object) -> bool:
        """Wait for the turn; whether `who` has had it all along."""
        with self._lock:
            if self._holder is who:
                self._runs = True
                return True
            self._waiting += 1
            try:
                while self._holder is not None and (left := self._patience()) != 0:
                    self._state.wait(left)
            finally:
                self._waiting -= 1
            self._holder, self._runs = who, True
            return False

    def _patience(self) -> float | None:
        """How long to wait for the holder; None while it runs."""
        return None if self._runs else max(0.0, self._since + PATIENCE - time.monotonic())

    def pause(self) -> None:
        """The holder stands still, until its next token."""
        with self._lock:
            self._runs, self._since = False, time.monotonic()
            if self._waiting:
                self._state.notify_all()

    def leave(self, who: object) -> None:
        with self._lock:
            if self._holder is who:
                self._holder, self._runs = None, False
                self._state.notify_all()

    def __enter__(self) -> None:
        self.enter(object())

    def __exit__(self, *_: object) -> None:
        self.leave(self._holder)  # nobody passes over a holder that runs
