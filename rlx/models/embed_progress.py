"""Progress of embedding many texts: to a function of the caller's, or to a line on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from rlx.errors import OptionError

Progress = Callable[[int, int], None]  # how many texts are done, and how many there are
_PAUSE = 0.1  # seconds between two lines


def reporter(progress: bool | Progress | None) -> Progress:
    """What is called after each batch: `progress` itself, a line on stderr for True, or nothing."""
    if progress is None or progress is False:
        return lambda done, total: None
    if progress is True:
        return _Line()
    if not callable(progress):
        raise OptionError(
            "neither True nor a function", where="progress", got=repr(progress)[:40],
            expected="progress(done, total)",
        )  # fmt: skip
    return progress


class _Line:
    """One line that is written over; the last one stays."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, done: int, total: int) -> None:
        if done < total and time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _PAUSE
        end = "\n" if done == total else ""
        print(f"\rembedding: {done} of {total} texts", end=end, file=sys.stderr, flush=True)
