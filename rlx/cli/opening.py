"""From the name of a model to the model, with something to look at meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlx.cli import console
from rlx.cli.options import Loading

if TYPE_CHECKING:
    from rlx.models.language import LanguageModel

_MODEL_FILES = (".gguf", ".safetensors", ".json")


def is_model(text: str) -> bool:
    """Whether an argument names a model: something on disk, in the catalogue, or on the hub."""
    from rlx.formats.catalogue import find
    from rlx.formats.hub import REPOSITORY

    path = Path(text).expanduser()
    try:
        if path.exists():
            return True
    except (OSError, ValueError):  # a long prompt is no path
        return False
    looks = path.suffix in _MODEL_FILES and not any(c.isspace() for c in text)
    return find(text) is not None or looks or REPOSITORY.fullmatch(text) is not None


def find_model(name: str) -> Path:
    """The file or folder of a model, fetched where that is needed."""
    from rlx.formats.fetch import resolve

    with console.transfer(name) as progress:
        return resolve(name, progress=progress)


def load_model(name: str, loading: Loading) -> LanguageModel:
    """The model, ready to run."""
    path = find_model(name)
    with console.working(f"loading {name}"):
        from rlx.models.language import load

        return load(
            path,
            device=loading.device,
            context=loading.context,
            threads=loading.threads,
            kv=loading.kv,
        )
