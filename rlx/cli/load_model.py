"""Loading a model by name, with progress on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rlx.cli import console
from rlx.cli.options import Loading
from rlx.errors import OptionError, UnsupportedError

if TYPE_CHECKING:
    from rlx.models.encoder_model import EncoderModel, Ranked
    from rlx.models.language_model import LanguageModel


_MODEL_FILES = (".gguf", ".safetensors", ".json")
_PLACES = ("./", "../", "~/")  # how nothing but paths begins


def is_model(text: str) -> bool:
    """Whether an argument names a model: something on disk, in the catalogue, or on the hub."""
    from rlx.formats.catalogue import find
    from rlx.formats.fetch import REPOSITORY

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


def refuse_near_miss(text: str, command: str, default: str) -> None:
    """Raise for a single word that is no model but looks like the name of one: to answer it as a
    prompt, with the `default` model, is not what was meant."""
    from rlx.formats.catalogue import near

    if any(c.isspace() for c in text):
        return
    files = [p.name for p in Path().glob("*.gguf") if p.stem == text]
    found = near(text)
    meant = files[0] if files else None if found is None else found.name
    if meant is not None:
        raise typer.BadParameter(
            f"{text!r} is no model; did you mean {meant}? Then: {command} {meant} …  "
            f"If it is a text: {command} {default} {text!r}"
        )


def find_model(name: str) -> Path:
    """The file or folder of a model, fetched if need be."""
    from rlx.formats.fetch import resolve

    with console.transfer(name) as progress:
        return resolve(name, progress=progress)


def load_any(name: str, loading: Loading) -> LanguageModel | EncoderModel:
    """A language model or an encoder."""
    path = find_model(name)
    asked = {name: value for name, value in asdict(loading).items() if value is not None}
    if asked.get("draft"):
        asked["draft"] = find_model(asked["draft"])
    with console.working(f"loading {name}"):
        from rlx.models.load import load_text_model

        return load_text_model(path, **asked, progress=console.stages())


def load_model(name: str, loading: Loading) -> LanguageModel:
    """A language model; an encoder is an error."""
    model = load_any(name, loading)
    from rlx.models.language_model import LanguageModel

    if not isinstance(model, LanguageModel):
        model.close()
        raise UnsupportedError(
            "an encoder does not generate text", where=name, hint=f"rlx embed {name} TEXT …"
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
    """A model that computes embeddings."""
    path = find_model(name)
    with console.working(f"loading {name}"):
        from rlx.models.encoder_model import EncoderModel
        from rlx.models.load import load_text_model

        model = load_text_model(
            path, device=device, threads=threads, quant=quant, artifact=artifact,
            progress=console.stages(),
        )  # fmt: skip
    if not isinstance(model, EncoderModel):
        return LanguageEmbedder(model, pooling or "mean")
    if pooling is not None:
        model.close()
        raise OptionError(
            "the pooling of an encoder is fixed", where="--pooling", got=pooling,
            hint="it is for language models",
        )  # fmt: skip
    return model


class LanguageEmbedder:
    """A language model with the interface of an encoder, for `rlx embed`."""

    def __init__(self, model: LanguageModel, pooling: str) -> None:
        self._language, self.model, self.pooling = model, model.model, pooling
        self.width = model.config.hidden

    def embed(self, texts: str | Sequence[str], normalize: bool | None = None, **other: Any) -> Any:
        _refuse(other)
        unit = normalize is not False
        return self._language.embed(texts, pooling=self.pooling, normalize=unit)

    def embed_stream(self, texts: Iterable[str], **options: Any) -> Iterator[Any]:
        return (self.embed(text, **options) for text in texts)

    def similarity(self, a: Sequence[str], b: Sequence[str]) -> Any:
        return self.embed(a) @ self.embed(b).T

    def rerank(self, query: str, texts: Sequence[str], **other: Any) -> list[Ranked]:
        from rlx.models.encoder_model import Ranked

        _refuse(other)
        scores = self.similarity([query], texts)[0]
        return [Ranked(int(i), float(scores[i])) for i in (-scores).argsort(kind="stable")]

    def __enter__(self) -> LanguageEmbedder:
        return self

    def __exit__(self, *_: object) -> None:
        self._language.close()


_NAMES = {"truncate_dim": "--dimensions"}


def _refuse(options: dict[str, Any]) -> None:
    """Language models have none of an encoder's options."""
    given = [name for name, value in options.items() if value not in (None, "warn")]
    if given:
        name = _NAMES.get(given[0], f"--{given[0]}")
        raise typer.BadParameter(f"{name} is for encoders; this is a language model")
