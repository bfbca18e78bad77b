"""Progress of long work: a function that is told the stage, how much is done, and of how much.

The function is the caller's; the work is far below it, in other threads too. So whoever starts the
work names the function (`reporting`), and whoever does it asks for the `current()` reporter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Progress = Callable[[str, int, int], None]  # the stage, how much of it is done, how much there is

PACKING = "packing weights"  # in bytes
COMPILING = "compiling kernels"


def silent(what: str, done: int, total: int) -> None:
    """No progress report."""


class Reporter:
    """Counts what is done of each stage and tells a function, one call at a time.

    An error of the function must not stop work whose results others wait for: the function is not
    called again, and `reporting` raises the error when the work is done.
    """

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._counts: dict[str, tuple[int, int]] = {}
        self._lock = threading.RLock()
        self.error: Exception | None = None

    def expect(self, stage: str, count: int) -> None:
        """There is so much more to do."""
        self._add(stage, 0, count)

    def advance(self, stage: str, count: int = 1) -> None:
        """So much more is done."""
        self._add(stage, count, 0)

    def finish(self, stage: str) -> None:
        """All of the stage is done that was expected so far."""
        with self._lock:
            done, total = self._counts.get(stage, (0, 0))
            self._add(stage, total - done, 0)

    def _add(self, stage: str, done: int, total: int) -> None:
        if self._progress is None or not (done or total):
            return
        with self._lock:
            before = self._counts.get(stage, (0, 0))
            whole = before[1] + total
            now = self._counts[stage] = (min(before[0] + done, whole), whole)
            if self.error is None and now != before:
                try:
                    self._progress(stage, *now)
                except Exception as error:
                    self.error = error


_NOBODY = Reporter(None)
_current: ContextVar[Reporter] = ContextVar("progress", default=_NOBODY)


def current() -> Reporter:
    """The reporter of this work. A new thread has none, unless it runs in a copied context."""
    return _current.get()


@contextmanager
def reporting(progress: Progress | None) -> Iterator[None]:
    """Tell `progress` of all work in this block; None leaves that to the block around it."""
    if progress is None:
        yield
        return
    reporter = Reporter(progress)
    token = _current.set(reporter)
    try:
        yield
    finally:
        _current.reset(token)
    if reporter.error is not None:
        raise reporter.error
