"""Architectures by name: the file `rlx/models/<model_type>.py` is the architecture."""

from __future__ import annotations

import difflib
import importlib
from types import ModuleType

from rlx.errors import UnsupportedError

SUPPORTED = ("gemma2", "gemma3", "gpt2", "llama", "mistral", "phi3", "qwen2", "qwen3")


def architecture(name: str, where: str = "") -> ModuleType:
    """The module of an architecture; an unknown one gets a list and the nearest."""
    if name not in SUPPORTED:
        near = difflib.get_close_matches(name, SUPPORTED, 1, 0.5)
        raise UnsupportedError(
            "unknown architecture",
            where=where,
            got=name,
            expected=", ".join(SUPPORTED),
            hint=f"the nearest is {near[0]}" if near else "see docs/adding-a-model.md",
        )
    return importlib.import_module(f"rlx.models.{name}")
