"""Batch invariance: whether a row's sums are to have one order, whatever runs beside it.

Lowerings and rewrites ask here. By default kernels are chosen by the number of rows. Where batch
invariance is asked for, the order of every sum depends on the sizes of weights, on types, and on a
token's own position alone:

- products: the columns of x are divided into as many parts as N and K ask for, each part is one
  chain of instructions, and parts are added in order, by one block or by several;
- attention: keys are divided by the position of the query;
- norms and other reductions: by the length of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_asked: ContextVar[bool] = ContextVar("batch_invariant", default=False)


def is_asked() -> bool:
    """Whether what is lowered now has to be batch-invariant."""
    return _asked.get()


@contextmanager
def asking(wanted: bool) -> Iterator[None]:
    """Lower with batch invariance, or without, inside the context."""
    before = _asked.set(wanted)
    try:
        yield
    finally:
        _asked.reset(before)
