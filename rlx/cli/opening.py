"""From the name of a model to the model, with something to look at meanwhile."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rlx.cli import console
from rlx.cli.options import Loading
from rlx.errors import OptionError, UnsupportedError

if TYPE_CHECKING:
    from rlx.cli.embedders import LanguageEmbedder
    from rlx.models.encoder_model import EncoderModel
    from rlx.models.language_model import LanguageModel

_MODEL_FILES = (".gguf", ".safetensors", ".json")
_PLACES = ("./", "../", "~/")  # how nothing but paths begins


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
    looks = path.suffix in _MODEL_FILES or text.startswith(_PLACES)
    return (
        find(text) is not None
        or (looks and not any(c.isspace() for c in text))
        or REPOSITORY.fullmatch(text) is not None
    )


def find_model(name: str) -> Path:
    """The file or folder of a model, fetched where that is needed."""
    from rlx.formats.fetch import resolve

    with console.transfer(name) as progress:
        return resolve(name, progress=progress)


def load_any(name: str, loading: Loading) -> LanguageModel | EncoderModel:
    """A model of any kind, ready to run."""
    path = find_model(name)
    asked = {name: value for name, value in asdict(loading).items() if value is not None}
    if asked.get("draft"):
        asked["draft"] = find_model(asked["draft"])
    with console.working(f"loading {name}"):
        from rlx.models.load import load

        return load(path, **asked)


def load_model(name: str, loading: Loading) -> LanguageModel:
    """A model that writes text, ready to run."""
    model = load_any(name, loading)
    from rlx.models.language_model import LanguageModel

    if not isinstance(model, LanguageModel):
        model.close()
        raise UnsupportedError(
            "an encoder does not write text", where=name, hint=f"rlx embed {name} TEXT …"
        )
    return model


def load_embedder(
    name: str,
    device: str,
    threads: int | None,
    quant: str | None,
    pooling: str | None,
    artifact: Path | None,
) -> EncoderModel | LanguageEmbedder:
    """A model that turns texts into vectors, ready to run."""
    path = find_model(name)
    with console.working(f"loading {name}"):
        from rlx.models.encoder_model import EncoderModel
        from rlx.models.load import load

        model = load(path, device=device, threads=threads, quant=quant, artifact=artifact)
    if not isinstance(model, EncoderModel):
        from rlx.cli.embedders import LanguageEmbedder

        return LanguageEmbedder(model, pooling or "mean")
    if pooling is not None:
        model.close()
        raise OptionError(
            "an encoder pools as it was trained to", where="--pooling", got=pooling,
            hint="it is for language models",
        )  # fmt: skip
    return model
