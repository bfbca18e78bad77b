"""Pauses the cyclic garbage collector where many objects are made that all stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_gc() -> Iterator[None]:
    """Hundreds of thousands of new objects would make the collector traverse all of them again and
    again. Reference counting still frees everything that is not part of a cycle."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
