"""Optional dependencies, imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from rlx.errors import UnsupportedError


def library(name: str, purpose: str) -> Any:
    """Import an optional dependency, or raise an error that says how to install it."""
    try:
        return import_module(name)
    except ImportError as e:
        raise UnsupportedError(
            f"{purpose} needs the library {name!r}, which is not installed",
            where="rlx.formats",
            hint=f"pip install {name.partition('.')[0]}",
        ) from e
