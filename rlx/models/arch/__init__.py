"""Architectures by name: `arch/<model_type>.py` is a language model, `arch/encoders/` has encoders.

A page has the names of its weights in a Hugging Face folder, and the functions `embed`, `layer` and
`finish`.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from types import ModuleType

from rlx.errors import UnsupportedError


def architecture(name: str, where: str = "") -> ModuleType:
    """The page of a language model; the error for an unknown one names the nearest."""
    if name in supported():
        return importlib.import_module(f"{__name__}.{name}")
    known = (*supported(), *encoder_types())
    near = difflib.get_close_matches(name, known, 1, 0.5)
    raise UnsupportedError(
        "unknown architecture",
        where=where,
        got=name,
        expected=", ".join(known),
        hint=f"the nearest is {near[0]}" if near else "see docs/models.md",
    )


def encoder_architecture(name: str) -> ModuleType:
    """The page of an encoder."""
    return importlib.import_module(f"{__name__}.encoders.{name}")


def supported() -> tuple[str, ...]:
    """The names of all language models."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.ispkg))


def encoder_types() -> tuple[str, ...]:
    """What config.json calls the encoders that are known."""
    from rlx.models.config_hf import HF_ENCODERS  # late: only a message asks

    return tuple(HF_ENCODERS)
