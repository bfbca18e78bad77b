"""A loaded encoder that can run batches: few executables, each for any batch and any length.

Batch and sequence are live up to a bound. Lengths are divided into steps of doubling bounds, with
fewer texts in a batch the longer they may be, so that no step plans for more memory than another.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlx.ir.binding import DimBinding
from rlx.models.encoders.build import EncoderFile, Use, describe
from rlx.models.encoders.text import Tokens
from rlx.models.keeping import Keeping
from rlx.models.weights import Weights
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.params import ParamStore
from rlx.runtime.pipeline import ModelCompilePipeline
from rlx.runtime.template import Template
from rlx.specialize.options import CompileOptions

BATCH_TOKENS = 4096  # of a batch, padding included: weights are read once, activations stay near
_SHORTEST = 32  # bound of the first step


@dataclass(frozen=True)
class Batch:
    """Texts that run together: where they stand in the input, and their tokens."""

    places: list[int]
    tokens: list[Tokens]

    @property
    def seq(self) -> int:
        return len(self.tokens[0])


class EncoderEngine:
    """Executables of one encoder, made on first use. Safe to call from several threads."""

    def __init__(
        self,
        model: EncoderFile,
        *,
        longest: int,
        device: str = "cpu",
        threads: int | None = None,
        keep: Keeping | None = None,
    ) -> None:
        self.model, self.longest = model, longest
        keep = keep or Keeping()
        self._options = CompileOptions(threads=threads, quant=keep.scheme)
        self._pipeline = ModelCompilePipeline(device, params=ParamStore())
        self._weights: Weights = model.weights(keep)
        self._templates: dict[Use, Template] = {}
        self._graphs: dict[tuple[Use, int], CompiledGraph] = {}
        self._lock = threading.Lock()
        types = self._weights.find("token_types.weight")
        self.has_types = types is not None and types.shape[0] > 1

    # -- batches ------------------------------------------------------------------------------

    def step(self, seq: int) -> int:
        """The bound of the lengths among which `seq` falls."""
        bound = _SHORTEST
        while bound < seq:
            bound *= 2
        return min(bound, self.longest)

    def most_texts(self, seq: int) -> int:
        """How many texts of this length run together at most."""
        return max(1, BATCH_TOKENS // self.step(seq))

    def batches(self, texts: Sequence[Tokens], most: int | None) -> list[Batch]:
        """Texts of like lengths together, the longest first; empty ones are left out."""
        order = sorted((i for i, t in enumerate(texts) if t.ids), key=lambda i: -len(texts[i]))
        found, start = [], 0
        while start < len(order):
            count = self.most_texts(len(texts[order[start]]))
            places = order[start : start + min(count, most or count)]
            found.append(Batch(places, [texts[i] for i in places]))
            start += len(places)
        return found

    def run(self, batch: Batch, result: str = "embedding") -> Any:
        """One row per text of the batch."""
        lengths = np.array([len(t) for t in batch.tokens], np.int32)
        rows, seq = len(lengths), batch.seq
        padded = bool(lengths[-1] != seq)
        typed = self.has_types and any(t.second >= 0 for t in batch.tokens)
        given: dict[str, Any] = {"ids": np.zeros((rows, seq), np.int32)}
        if padded:
            given["lengths"] = lengths
        if typed:
            given["types"] = np.zeros((rows, seq), np.int32)
        for i, tokens in enumerate(batch.tokens):
            given["ids"][i, : len(tokens)] = tokens.ids
            if typed and tokens.second >= 0:
                given["types"][i, tokens.second : len(tokens)] = 1
        (found,) = self.graph(Use(result, padded, typed), seq).run(given)
        return found

    # -- executables --------------------------------------------------------------------------

    def graph(self, use: Use, seq: int) -> CompiledGraph:
        """The executable for texts of this length."""
        bound = self.step(seq)
        graph = self._graphs.get((use, bound))
        if graph is None:
            with self._lock:
                graph = self._graphs.get((use, bound))
                if graph is None:
                    graph = self._graphs[use, bound] = self._compile(use, bound)
        return graph

    def _compile(self, use: Use, bound: int) -> CompiledGraph:
        binding = DimBinding().set_live("batch", self.most_texts(bound)).set_live("seq", bound)
        pipeline = self._pipeline
        bound_template = pipeline.specialize_template(binding, self._options, self._template(use))
        executable = pipeline.compile_lir(bound_template, self._options)
        return CompiledGraph(bound_template.template, pipeline.params, executable)

    def _template(self, use: Use) -> Template:
        if use not in self._templates:
            described = describe(self.model, self._weights, use)
            for name, array in described.params.items():
                if name not in self._pipeline.params:
                    self._pipeline.params.set(name, array)
            self._templates[use] = self._pipeline.build_template(
                lambda: described.module, self._options
            )
        return self._templates[use]

    def close(self) -> None:
        """Let go of executables and weights."""
        self._graphs.clear()
        self._templates.clear()
        self._pipeline = ModelCompilePipeline(self._pipeline.session.device)
        self.model.file.close()
