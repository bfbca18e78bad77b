"""What `rlx embed` asks of a model, for language models: vectors one by one, likeness, ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rlx.models.encoder_model import Ranked
    from rlx.models.language_model import LanguageModel


class LanguageEmbedder:
    """A language model in the place of an encoder."""

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
    """Language models have none of an encoder's settings."""
    given = [name for name, value in options.items() if value not in (None, "warn")]
    if given:
        name = _NAMES.get(given[0], f"--{given[0]}")
        raise typer.BadParameter(f"{name} is for encoders; this is a language model")
