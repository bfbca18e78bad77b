"""The first touch of a large arena, while its program is compiled.

The system gives out a page when it is first written, at 0.4 s a GB, and at several times that where
a virtual machine has to ask its host. A training step writes some GB in its first run. Emitting
kernels leaves cores idle, so a thread writes to the pages meanwhile; what it has not reached when
the code is there is left to the run.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rlx.backends.buffer import HOST
from rlx.ir.lir import Lir
from rlx.ir.op import Array
from rlx.support.machine import usable_cores

LARGE = 256 << 20  # bytes: less is touched in a tenth of a second
_STEP = 32 << 20  # bytes between two looks at whether to go on


@contextmanager
def arena_touched_ahead(lir: Lir) -> Iterator[Array | None]:
    """A large arena of static size, which a thread touches until the block ends; else None.

    An arena with dynamic dims is as large as their bounds, and most of it is never used.
    """
    if lir.arena_size < LARGE or lir.dynamic or usable_cores() < 2:
        yield None
        return
    arena: Array = HOST.alloc_arena(lir.arena_size).array
    spans, over = touched_spans(lir), threading.Event()
    thread = threading.Thread(target=_touch, args=(arena, spans, over), daemon=True)
    thread.start()
    try:
        yield arena
    finally:
        over.set()
        thread.join()


def touched_spans(lir: Lir) -> list[tuple[int, int]]:
    """What a run writes of its arena: all but the slots of inputs and outputs, whose memory is the
    caller's."""
    spans, end = [], 0
    slots = [(a.offset, a.size) for a in lir.arguments() if a.offset is not None and not a.is_view]
    for offset, size in sorted(slots):
        if offset > end:
            spans.append((end, offset))
        end = max(end, offset + size)
    return [*spans, (end, lir.arena_size)] if end < lir.arena_size else spans


def _touch(arena: Array, spans: list[tuple[int, int]], over: threading.Event) -> None:
    for first, last in spans:
        for start in range(first, last, _STEP):
            if over.is_set():
                return
            arena[start : min(start + _STEP, last) : mmap.PAGESIZE] = 0  # fresh pages are zero
