"""A loaded encoder: embeds texts, and ranks them against a query."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from rlx.errors import InputError, NumericsError, OptionError, UnsupportedError
from rlx.ir.html import card
from rlx.models.arguments import (
    Progress,
    one_text,
    reporter,
    require_count,
    several_texts,
    token_ids,
)
from rlx.models.builder import EntryPoint
from rlx.models.bundle import ModelBundle
from rlx.models.embed_plan import EmbedPlan, Rows, Vectors
from rlx.models.encoder_inputs import TextReader, Tokens
from rlx.models.encoder_runner import EncoderRunner, embedding_width
from rlx.models.model_file import ModelFile
from rlx.models.pooling import normalized
from rlx.support.pickling import Unpicklable
from rlx.support.records import dataclass

WINDOW = 4096  # texts of a stream that are batched together
_DOCUMENT = ("document", "passage", "corpus")  # what models call the prompt of documents


@dataclass(frozen=True)
class Ranked:
    """A text of `rerank`: its index in the input and its relevance to the query."""

    index: int
    score: float


class EncoderModel(Unpicklable):
    """Embeds texts, or ranks them. Safe to call from several threads; `close()` frees it."""

    def __init__(
        self,
        model: ModelFile,
        *,
        device: str = "cpu",
        context: int | None = None,
        threads: int | None = None,
        dtype: str | None = None,
        quant: str | None = None,
        strassen: bool = False,
        bundle: ModelBundle | None = None,
    ) -> None:
        self.model, self.config, self.sentence = model, model.config, model.sentence
        self.tokenizer = model.tokenizer()
        self.reader = TextReader(model, self.tokenizer, context)
        self.runner = EncoderRunner(
            model, longest=self.reader.max_tokens, device=device, threads=threads,
            dtype=dtype, quant=quant, strassen=strassen, bundle=bundle,
        )  # fmt: skip
        self.width = embedding_width(model)  # dimensions of a vector
        self.labels = 0 if model.config.encoder is None else model.config.encoder.labels
        self._closed = False

    @property
    def max_tokens(self) -> int:
        """Texts are truncated to this many tokens, special ones included."""
        return self.reader.max_tokens

    @property
    def is_reranker(self) -> bool:
        """Whether the model was made to score pairs of texts."""
        return self.labels > 0

    def warm(self) -> None:
        """Make the code now: for texts of every length, alone or in batches."""
        self._check(None, None)
        typed = self.is_reranker and self.reader.two_kinds and self.runner.has_types
        for bound in self.runner.buckets:
            for padded in (False, True):
                entry_point = EntryPoint(self.runner.output, padded=padded, typed=typed)
                self.runner.graph(entry_point, bound)

    # -- vectors ------------------------------------------------------------------------------

    def embed(
        self,
        texts: str | Iterable[str],
        *,
        batch: int | None = None,
        normalize: bool | None = None,
        truncate_dim: int | None = None,
        prompt: str | None = None,
        overlong: str = "warn",
        progress: bool | Progress | None = None,
    ) -> Vectors:
        """A vector for each text, in order: f32 [texts, width]; of one string, [width].

        `batch` limits how many run at once. `normalize` and `prompt` (a text to put before each, or
        the name of one that comes with the model) default to what the model says; `truncate_dim`
        keeps the first numbers of each vector. `overlong`: texts beyond `max_tokens` are cut with a
        "warn"ing, just "cut", or an "error". `progress` is called with how many texts are done and
        how many there are, after each batch; True writes that to stderr.
        """
        self._check(batch, truncate_dim)
        many = [texts] if isinstance(texts, str) else _listed(texts)
        tokens = self.reader.read(many, self.prompt_text(prompt), overlong)
        rows = self._rows(tokens, batch, progress=reporter(progress))
        found = self._finished(rows, normalize, truncate_dim)
        return found[0] if isinstance(texts, str) else found

    encode = embed  # its name in other libraries

    def plan_embed(
        self, texts: Iterable[str | Sequence[int]], *, normalize: bool | None = None,
        truncate_dim: int | None = None, prompt: str | None = None, overlong: str = "cut",
    ) -> EmbedPlan:  # fmt: skip
        """`embed` for a batcher, which runs texts of several callers together. A text may be its
        tokens, with the special ones."""
        self._check(None, truncate_dim)
        given = _listed(texts)
        written = [text for text in given if not isinstance(text, list)]
        read = iter(self.reader.read(written, self.prompt_text(prompt), overlong))
        tokens = [self._tokens(t) if isinstance(t, list) else next(read) for t in given]

        def run(found: Sequence[Tokens]) -> Rows:
            for part in self.runner.batches(found, None):
                yield part.places, self.runner.run(part, "embedding")

        def finish(rows: Vectors) -> Vectors:
            return self._finished(self._finite(rows, "embedding"), normalize, truncate_dim)

        return EmbedPlan("embedding", tokens, self.width, run, finish)

    def _tokens(self, ids: list[int]) -> Tokens:
        found = token_ids(ids)
        self.config.check_tokens(found, self.max_tokens, "shorten it")
        return Tokens(found)

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
        require_count("window", window)
        source, put_before = iter(several_texts(texts)), self.prompt_text(prompt)

        def windows() -> Iterator[Vectors]:
            first = 0
            while held := list(itertools.islice(source, window)):
                self._check(batch, truncate_dim)  # it may have been closed meanwhile
                tokens = self.reader.read(held, put_before, overlong, first)
                rows = self._rows(tokens, batch, first=first)
                first += len(held)
                yield from self._finished(rows, normalize, truncate_dim)

        return windows()

    def similarity(self, a: str | Iterable[str], b: str | Iterable[str]) -> Vectors:
        """Cosine similarity of every text of `a` with every text of `b`."""
        left, right = (self.embed([t] if isinstance(t, str) else t, normalize=True) for t in (a, b))
        return left @ right.T

    # -- ranking ------------------------------------------------------------------------------

    def rerank(
        self,
        query: str,
        texts: Iterable[str],
        *,
        top: int | None = None,
        batch: int | None = None,
        overlong: str = "warn",
    ) -> list[Ranked]:
        """The texts by relevance to the query, the best first.

        A cross-encoder scores each pair; other models give the cosine similarity of their vectors,
        with the model's own prompts for queries and documents.
        """
        if top is not None:
            require_count("top", top, least=0)
        scores = self.scores(query, texts, batch=batch, overlong=overlong)
        order = np.argsort(-scores, kind="stable")[:top]
        return [Ranked(int(i), float(scores[i])) for i in order]

    def scores(
        self,
        query: str,
        texts: Iterable[str],
        *,
        batch: int | None = None,
        overlong: str = "warn",
    ) -> Vectors:
        """Relevance of each text to the query, f32 [texts], in order."""
        if not self.is_reranker:
            asked, found = (
                self.embed(given, batch=batch, normalize=True, prompt=named, overlong=overlong)
                for given, named in ((one_text(query), self._named("query")),
                                     (several_texts(texts), self._named(*_DOCUMENT)))
            )  # fmt: skip
            return found @ asked
        if self.labels > 2:
            raise UnsupportedError(
                "a classifier, not a reranker", where=str(self.model.path),
                got=f"{self.labels} labels", expected="1 or 2",
                hint="logits() gives those of every label",
            )  # fmt: skip
        logits = self.logits(query, texts, batch=batch, overlong=overlong)
        if self.labels == 2:  # how much likelier "relevant" is than "not"
            return _sigmoid(logits[:, 1] - logits[:, 0])
        return _sigmoid(logits[:, 0]) if self.sentence.scores == "sigmoid" else logits[:, 0]

    def logits(
        self,
        query: str,
        texts: Iterable[str],
        *,
        batch: int | None = None,
        overlong: str = "warn",
    ) -> Vectors:
        """The logits of a cross-encoder for the query with each text, f32 [texts, labels]."""
        self._check(batch, None)
        if not self.is_reranker:
            raise UnsupportedError("a model without a classifier", where=str(self.model.path))
        pairs = self.reader.pairs(one_text(query), _listed(texts), overlong)
        return self._rows(pairs, batch, "scores")

    # -- inside -------------------------------------------------------------------------------

    def _rows(
        self, tokens: list[Tokens], batch: int | None, result: str = "embedding", first: int = 0,
        progress: Progress | None = None,
    ) -> Vectors:  # fmt: skip
        """One row per text, in order; zeros for texts without tokens. `first` is the index of the
        first text, for messages."""
        width = self.labels if result == "scores" else self.width
        rows = np.zeros((len(tokens), width), np.float32)
        done = sum(not len(text) for text in tokens)  # they are zeros already
        for part in self.runner.batches(tokens, batch):
            rows[part.places] = self.runner.run(part, result)
            done += len(part.places)
            if progress is not None:
                progress(done, len(tokens))
        return self._finite(rows, result, first)

    def _finite(self, rows: Vectors, result: str, first: int = 0) -> Vectors:
        if not np.isfinite(rows).all():
            broken = int(np.flatnonzero(~np.isfinite(rows).all(1))[0])
            raise NumericsError(
                f"the {result} of text {first + broken} is not finite", where=str(self.model.path),
                hint="are the weights damaged, or too large for dtype=\"f16\"?",
            )  # fmt: skip
        return rows

    def _finished(self, rows: Vectors, normalize: bool | None, truncate_dim: int | None) -> Vectors:
        if truncate_dim is not None:
            rows = np.ascontiguousarray(rows[:, :truncate_dim])
        if self.sentence.normalize if normalize is None else normalize:
            rows = normalized(rows)
        return rows

    def prompt_text(self, prompt: str | None) -> str:
        """The prompt before each text, given as a text or by name."""
        known = self.sentence.prompts
        if prompt is None:
            found = known.get(self.sentence.default_prompt or "", "")
        elif isinstance(prompt, str):
            found = known.get(prompt, prompt)
        else:
            raise OptionError(
                "neither a text nor the name of one", where="prompt", got=repr(prompt)[:40],
                expected=", ".join(("a str", *known)),
            )  # fmt: skip
        if found and not self.sentence.pools_prompt:
            raise UnsupportedError(
                "the model leaves prompts out when it pools, which is not known here",
                where=str(self.model.path), hint='prompt="" embeds without one',
            )  # fmt: skip
        return found

    def _named(self, *names: str) -> str | None:
        """The first of these names that the model has a prompt for."""
        return next((name for name in names if name in self.sentence.prompts), None)

    def _check(self, batch: int | None, truncate_dim: int | None) -> None:
        if self._closed:
            raise InputError("the model is closed", where=str(self.model.path))
        if batch is not None:
            require_count("batch", batch)
        if truncate_dim is not None:
            require_count("truncate_dim", truncate_dim, most=self.width)

    def close(self) -> None:
        """Free memory. A second call does nothing; any other use is an error."""
        if not self._closed:
            self._closed = True
            self.runner.close()

    def __enter__(self) -> EncoderModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        c = self.config
        kind = "reranker" if self.is_reranker else "/".join(self.sentence.pooling)
        return f"<EncoderModel {c.arch}, {c.layers} layers, {kind}, {self.max_tokens} tokens>"

    def _repr_html_(self) -> str:
        c = self.config
        kind = "reranker" if self.is_reranker else "/".join(self.sentence.pooling)
        rows = {"layers": c.layers, "hidden": c.hidden, "heads": c.heads, "result": kind}
        return card(f"EncoderModel {c.arch}", {**rows, "tokens": self.max_tokens})


def _listed(texts: object) -> list[str]:
    return list(several_texts(texts))


def _sigmoid(x: Vectors) -> Vectors:
    return 1 / (1 + np.exp(-x, dtype=np.float32))
