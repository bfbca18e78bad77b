"""Optional dependencies, imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from rlx.errors import UnsupportedError

_PACKAGES = {"PIL": "Pillow"}  # modules whose package has another name


def library(name: str, purpose: str) -> Any:
    """Import an optional dependency, or raise an error that says how to install it."""
    module = name.partition(".")[0]
    try:
        return import_module(name)
    except ImportError as e:
        raise UnsupportedError(
            f"{purpose} needs the library {name!r}, which is not installed",
            where="rlx.formats",
            hint=f"pip install {_PACKAGES.get(module, module)}",
        ) from e
