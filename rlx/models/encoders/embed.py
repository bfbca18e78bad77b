"""An encoder in memory: texts to vectors, and texts ranked against a query."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlx.errors import InputError, OptionError, UnsupportedError
from rlx.models.encoders.build import EncoderFile
from rlx.models.encoders.engine import EncoderEngine
from rlx.models.encoders.text import TextReader, Tokens
from rlx.models.shipped import Shipped
from rlx.models.vectors import normalized

Vectors = Any  # f32 [texts, width]
WINDOW = 4096  # texts of a stream that are sorted by length together


@dataclass(frozen=True)
class Ranked:
    """A text of `rerank`: its place in the input and how well it answers the query."""

    index: int
    score: float


class EncoderModel:
    """Embeds texts, or ranks them. Safe to call from several threads; `close()` frees it."""

    def __init__(
        self,
        model: EncoderFile,
        *,
        device: str = "cpu",
        context: int | None = None,
        threads: int | None = None,
        dtype: str | None = None,
        quant: str | None = None,
        shipped: Shipped | None = None,
    ) -> None:
        self.model, self.config, self.sentence = model, model.config, model.sentence
        self.tokenizer = model.tokenizer()
        self.reader = TextReader(model, self.tokenizer, context)
        self.engine = EncoderEngine(
            model, longest=self.reader.max_tokens, device=device, threads=threads,
            dtype=dtype, quant=quant, shipped=shipped,
        )  # fmt: skip
        self._closed = False

    @property
    def max_tokens(self) -> int:
        """Tokens of a text beyond which it is cut, those around it included."""
        return self.reader.max_tokens

    @property
    def width(self) -> int:
        """Numbers of a vector."""
        dense = self.sentence.dense
        if dense:
            return int(self.model.dense()[-1].get("linear.weight").shape[0])
        return len(self.sentence.pooling) * self.config.hidden

    @property
    def is_reranker(self) -> bool:
        """Whether the model was made to score pairs of texts."""
        return self.config.labels > 0

    # -- vectors ------------------------------------------------------------------------------

    def embed(
        self,
        texts: str | Sequence[str],
        *,
        batch: int | None = None,
        normalize: bool | None = None,
        truncate_dim: int | None = None,
        prompt: str | None = None,
        overlong: str = "warn",
    ) -> Vectors:
        """A vector for each text, in order: f32 [texts, width]; of one string, [width].

        `batch` limits how many run at once. `normalize` and `prompt` (a text to put before each, or
        the name of one that comes with the model) default to what the model says; `truncate_dim`
        keeps the first numbers of each vector. `overlong`: texts beyond `max_tokens` are cut with a
        "warn"ing, just "cut", or an "error".
        """
        self._check(batch, truncate_dim)
        many = [texts] if isinstance(texts, str) else texts
        tokens = self.reader.read(many, self._prompt(prompt), overlong)
        found = self._finished(self._rows(tokens, batch), normalize, truncate_dim)
        return found[0] if isinstance(texts, str) else found

    def embed_stream(
        self,
        texts: Iterable[str],
        *,
        batch: int | None = None,
        normalize: bool | None = None,
        truncate_dim: int | None = None,
        prompt: str | None = None,
        overlong: str = "warn",
        window: int = WINDOW,
    ) -> Iterator[Vectors]:
        """The vectors one by one, in order, for any number of texts: `window` are held at once."""
        self._check(batch, truncate_dim)
        if window < 1:
            raise OptionError("nothing to hold", where="window", got=window, expected="1 or more")
        put_before, source, first = self._prompt(prompt), iter(texts), 0
        while held := list(itertools.islice(source, window)):
            tokens = self.reader.read(held, put_before, overlong, first)
            first += len(held)
            yield from self._finished(self._rows(tokens, batch), normalize, truncate_dim)

    def similarity(self, a: str | Sequence[str], b: str | Sequence[str]) -> Vectors:
        """Cosine similarity of every text of `a` with every text of `b`."""
        left, right = (
            np.atleast_2d(self.embed([t] if isinstance(t, str) else t, normalize=True))
            for t in (a, b)
        )
        return left @ right.T

    # -- ranking ------------------------------------------------------------------------------

    def rerank(
        self,
        query: str,
        texts: Sequence[str],
        *,
        top: int | None = None,
        batch: int | None = None,
        overlong: str = "warn",
    ) -> list[Ranked]:
        """The texts by how well they answer the query, the best first.

        A cross-encoder scores each pair; other models give the cosine of their vectors.
        """
        self._check(batch, None)
        if isinstance(texts, str):
            raise InputError("one text cannot be ranked", got="str", expected="a list of texts")
        scores = self.scores(query, texts, batch=batch, overlong=overlong)
        order = np.argsort(-scores, kind="stable")[:top]
        return [Ranked(int(i), float(scores[i])) for i in order]

    def scores(
        self,
        query: str,
        texts: Sequence[str],
        *,
        batch: int | None = None,
        overlong: str = "warn",
    ) -> Vectors:
        """How well each text answers the query, f32 [texts], in order."""
        self._check(batch, None)
        if not self.is_reranker:
            asked = self.embed(query, normalize=True, overlong=overlong)
            return self.embed(texts, batch=batch, normalize=True, overlong=overlong) @ asked
        if self.config.labels > 2:
            raise UnsupportedError(
                "a classifier, not a reranker", where=str(self.model.path),
                got=f"{self.config.labels} labels", expected="1 or 2",
            )  # fmt: skip
        logits = self._rows(self.reader.pairs(query, texts, overlong), batch, "scores")
        if self.config.labels == 2:  # how much likelier "relevant" is than "not"
            return _sigmoid(logits[:, 1] - logits[:, 0])
        return _sigmoid(logits[:, 0]) if self.sentence.scores == "sigmoid" else logits[:, 0]

    # -- inside -------------------------------------------------------------------------------

    def _rows(self, tokens: list[Tokens], batch: int | None, result: str = "embedding") -> Vectors:
        """Results of all texts, each at its place; zeros for texts without any token."""
        width = self.config.labels if result == "scores" else self.width
        rows = np.zeros((len(tokens), width), np.float32)
        for part in self.engine.batches(tokens, batch):
            rows[part.places] = self.engine.run(part, result)
        return rows

    def _finished(self, rows: Vectors, normalize: bool | None, truncate_dim: int | None) -> Vectors:
        if truncate_dim is not None:
            rows = np.ascontiguousarray(rows[:, :truncate_dim])
        if self.sentence.normalize if normalize is None else normalize:
            rows = normalized(rows)
        return rows

    def _prompt(self, prompt: str | None) -> str:
        known = self.sentence.prompts
        if prompt is None:
            return known.get(self.sentence.default_prompt or "", "")
        return known.get(prompt, prompt)

    def _check(self, batch: int | None, truncate_dim: int | None) -> None:
        if self._closed:
            raise InputError("the model is closed", where=str(self.model.path))
        if batch is not None and batch < 1:
            raise OptionError("an empty batch", where="batch", got=batch, expected="1 or more")
        if truncate_dim is not None and not 1 <= truncate_dim <= self.width:
            raise OptionError(
                "not a width", where="truncate_dim", got=truncate_dim,
                expected=f"1 … {self.width}",
            )  # fmt: skip

    def close(self) -> None:
        """Free memory. A second call does nothing; any other use is an error."""
        if not self._closed:
            self._closed = True
            self.engine.close()

    def __enter__(self) -> EncoderModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        c = self.config
        kind = "reranker" if self.is_reranker else "/".join(self.sentence.pooling)
        return f"<EncoderModel {c.arch}, {c.layers} layers, {kind}, {self.max_tokens} tokens>"


def _sigmoid(x: Vectors) -> Vectors:
    return 1 / (1 + np.exp(-x, dtype=np.float32))
