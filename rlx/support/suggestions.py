"""Hints for names that are not there."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def close_names(name: str, known: Iterable[str]) -> str:
    """`close names: …`, or nothing where none is close."""
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return "close names: " + ", ".join(close) if close else ""
