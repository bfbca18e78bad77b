"""The cyclic collector, paused where many objects are made and all of them stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_gc() -> Iterator[None]:
    """Hundreds of thousands of new objects would make the collector walk over all of them again and
    again. What nobody holds any more goes at once all the same, unless it is part of a cycle."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
