"""Suggestions for misspelt names, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def close_names(name: str, known: Iterable[str]) -> str:
    """`close names: …`, or an empty string if none is close."""
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return "close names: " + ", ".join(close) if close else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean …?`, or an empty string if no name is close."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f"did you mean {near[0]}?" if near else ""
