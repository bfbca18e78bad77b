"""Functions made as Python source: variants of one model share most of them."""

from __future__ import annotations

from functools import lru_cache
from types import CodeType


@lru_cache(maxsize=256)
def compiled(source: str) -> CodeType:
    """The code of a source text, which costs more to make than a variant's tables."""
    return compile(source, "<rlx>", "exec")
