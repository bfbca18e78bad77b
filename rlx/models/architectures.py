"""Architectures by name: the file `rlx/models/<model_type>.py` is the architecture."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from types import ModuleType

import rlx.models
from rlx.errors import UnsupportedError


def architecture(name: str, where: str = "") -> ModuleType:
    """The module of an architecture; an unknown one gets a list and the nearest."""
    module = _module(name) if name in _names() else None
    if module is None:
        known = (*supported(), *encoders())
        near = difflib.get_close_matches(name, known, 1, 0.5)
        raise UnsupportedError(
            "unknown architecture",
            where=where,
            got=name,
            expected=", ".join(known),
            hint=f"the nearest is {near[0]}" if near else "see docs/models.md",
        )
    return module


def supported() -> tuple[str, ...]:
    """The names of all architectures."""
    return tuple(name for name in _names() if _module(name) is not None)


def encoders() -> tuple[str, ...]:
    """What config.json calls the encoders that are known."""
    from rlx.models.encoders.config import HF_TYPES  # late: only a message asks

    return tuple(HF_TYPES)


def _names() -> list[str]:
    return sorted(m.name for m in pkgutil.iter_modules(rlx.models.__path__) if not m.ispkg)


def _module(name: str) -> ModuleType | None:
    """A module beside this one, if it builds layers."""
    module = importlib.import_module(f"rlx.models.{name}")
    return module if hasattr(module, "layer") else None
