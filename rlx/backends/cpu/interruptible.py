"""Long kernels that Ctrl-C can interrupt.

A run returns to Python at barriers, but one kernel may take longer than a user waits. Where a
program has such a launch, another thread runs it while the main thread, the only one that handles
signals, waits. A run that was interrupted is left behind: it keeps its memory and the thread pool
until the kernel ends, and whoever needs these waits for it. Other programs pay nothing.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rlx.backends.bounds_checks import compiled
from rlx.ir.dim import Dim

LONG_FLOPS, LONG_BYTES = 2_000_000_000, 250_000_000
"""Work of a launch that may take longer than 0.2 s where kernels are slow. Where they are fast it
takes 10 ms, of which the other thread is less than 1 %."""


def long_check(costs: Iterable[tuple[Dim, Dim]], symbols: Sequence[str]) -> Callable[..., bool]:
    """Generate `check(*sizes)`: whether one of the launches (flops, bytes) is long in this run."""
    found = [
        f"({cost}) > {limit}"
        for pair in dict.fromkeys(costs)
        for cost, limit in zip(pair, (LONG_FLOPS, LONG_BYTES), strict=True)
    ]
    scope: dict[str, Any] = {}
    text = f"def check({', '.join(symbols)}):\n    return {' or '.join(found)}"
    exec(compiled(text), scope)  # names are checked identifiers, the rest integers
    check: Callable[..., bool] = scope["check"]
    return check


class AsideRun:
    """A call in another thread. The thread that waits for it may be interrupted at any point; then
    the call goes on without it."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call, self._errors = call, list[BaseException]()
        self._claim, self._finished = _thread.allocate_lock(), _thread.allocate_lock()
        self._finished.acquire()
        self.done = False

    def run(self) -> None:
        _thread.start_new_thread(self._work, ())
        self._finished.acquire()
        if self._errors:
            raise self._errors[0]

    def _work(self) -> None:
        if not self._claim.acquire(blocking=False):
            return  # nobody wants it any more
        try:
            self._call()
        except BaseException as error:
            self._errors.append(error)
        finally:
            self.done = True
            self._finished.release()

    def wait(self) -> None:
        """Wait until it is over. Ctrl-C interrupts this too."""
        if not self._claim.acquire(blocking=False) and not self.done:
            with self._finished:
                pass


def handles_signals() -> bool:
    """Whether this thread is the one that handles signals."""
    return threading.current_thread() is threading.main_thread()
