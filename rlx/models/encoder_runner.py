"""A loaded encoder that can run batches: few executables, each for any batch and any length.

Batch and sequence are live up to a bound. Lengths are divided into a few steps, each up to four
times the one before, with fewer texts in a batch the longer they may be: no step plans for more
memory than another, and of what is planned only what a batch needs is ever touched.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.backends.registry import Device
from rlx.errors import OptionError
from rlx.ir.binding import UpTo
from rlx.ir.quant import QuantScheme
from rlx.models.bundle import Plan, Recipe, Shipped
from rlx.models.encoder_check import check_weights
from rlx.models.encoder_graph import EncoderFile, Use, describe
from rlx.models.encoder_inputs import Tokens
from rlx.models.model_runner import Executables
from rlx.models.weights import Weights
from rlx.records import dataclass
from rlx.runtime.compiled import CompiledGraph
from rlx.specialize.options import CompileOptions
from rlx.specialize.variant import ModelVariant

BATCH_TOKENS = 2048  # of a batch, padding included: weights are read once, activations stay near
_BATCH_COST = 8  # what a batch costs by itself, in tokens of each worker
_SHORTEST, _STRIDE = 64, 4  # bound of the first step, and how much further the next one reaches
_TYPES = ("f32", "f16", "bf16")


@dataclass(frozen=True)
class Batch:
    """Texts that run together: where they stand in the input, their tokens, and whether they run
    as texts of several lengths, which they may also if they are of one."""

    places: list[int]
    tokens: list[Tokens]
    padded: bool

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
        dtype: str | None = None,
        quant: str | None = None,
        steps: Mapping[int, int] | None = None,
        shipped: Shipped | None = None,
    ) -> None:
        """`steps` are bounds of lengths, each with how many texts run together at most; those of
        `shipped` were fixed when it was made."""
        self.model = model
        fixed = None if shipped is None else {int(b): n for b, n in shipped.facts["steps"]}
        chosen: Mapping[int, int] = fixed or steps or usual_steps(longest)
        self.steps = dict(sorted(chosen.items()))
        self._facts = {"context": max(self.steps), "dtype": dtype, "quant": quant}
        self.options = CompileOptions(threads=threads, quant=_scheme(dtype, quant))
        self._batch_cost = _BATCH_COST * Device.of(device).backend.workers(self.options)
        self._executables = Executables(
            model.file, device, self.options, dtype, quant, files=model.files, shipped=shipped
        )
        self._weights: Weights = model.weights(dtype)
        check_weights(model, self._weights)
        self._graphs: dict[tuple[Use, int], CompiledGraph] = {}
        self._lock = threading.Lock()
        types = self._weights.find("token_types.weight")
        self.has_types = types is not None and types.shape[0] > 1

    # -- batches ------------------------------------------------------------------------------

    def step(self, seq: int) -> int:
        """The bound of the lengths among which `seq` falls."""
        return next(bound for bound in self.steps if bound >= seq)

    def most_texts(self, bound: int) -> int:
        """How many texts of a step run together at most."""
        return self.steps[bound]

    def batches(self, texts: Sequence[Tokens], most: int | None) -> list[Batch]:
        """Texts of like lengths together, the longest first; empty ones are left out."""
        order = sorted((i for i, t in enumerate(texts) if t.ids), key=lambda i: -len(texts[i]))
        lengths = np.array([len(texts[i]) for i in order])
        cuts = [0]
        while cuts[-1] < len(order):
            cuts.append(cuts[-1] + self._count(lengths[cuts[-1] :][: most or BATCH_TOKENS]))
        uneven = {self.step(lengths[i]) for i, j in pairwise(cuts) if lengths[i] != lengths[j - 1]}
        return [
            Batch(order[i:j], [texts[k] for k in order[i:j]], self.step(lengths[i]) in uneven)
            for i, j in pairwise(cuts)
        ]

    def _count(self, lengths: npt.NDArray[np.int64]) -> int:
        """How many of the texts, of falling lengths, run together: so many that a token of theirs
        costs least, what pads them and what a batch costs by itself included."""
        seq = int(lengths[0])
        fitting = lengths[: max(1, min(BATCH_TOKENS // seq, self.most_texts(self.step(seq))))]
        costs = (self._batch_cost + seq * np.arange(1, len(fitting) + 1)) / np.cumsum(fitting)
        return len(costs) - int(np.argmin(costs[::-1]))  # of equals the most

    def run(self, batch: Batch, result: str = "embedding") -> Any:
        """One row per text of the batch."""
        lengths = np.array([len(t) for t in batch.tokens], np.int32)
        rows, seq = len(lengths), batch.seq
        typed = self.has_types and any(t.second >= 0 for t in batch.tokens)
        given: dict[str, Any] = {"ids": np.zeros((rows, seq), np.int32)}
        if batch.padded:
            given["lengths"] = lengths
        if typed:
            given["types"] = np.zeros((rows, seq), np.int32)
        for i, tokens in enumerate(batch.tokens):
            given["ids"][i, : len(tokens)] = tokens.ids
            if typed and tokens.second >= 0:
                given["types"][i, tokens.second : len(tokens)] = 1
        (found,) = self.graph(Use(result, batch.padded, typed), seq).run(given)
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
        (made,) = self._executables.make(use.name, self._recipe(use, bound)).values()
        return made

    def _recipe(self, use: Use, *bounds: int) -> Recipe:
        sizes = {f"upto{b}": ModelVariant.encoder(UpTo(self.steps[b]), UpTo(b)) for b in bounds}
        return Recipe(partial(describe, self.model, self._weights, use), sizes)

    def plan(self) -> Plan:
        """What is compiled to run this model elsewhere."""
        results = ["scores"] if self.model.config.labels else ["embedding"]
        kinds = (False, True) if self.has_types else (False,)
        uses = [Use(r, p, t) for r in results for p in (False, True) for t in kinds]
        recipes = {use.name: self._recipe(use, *self.steps) for use in uses}
        facts = {**self._facts, "steps": list(self.steps.items())}
        return Plan("encoder", recipes, facts)

    def close(self) -> None:
        """Let go of executables and weights."""
        self._graphs.clear()
        self._executables.close()
        self.model.file.close()


def usual_steps(longest: int) -> dict[int, int]:
    """Bounds of lengths, each with as many texts as of its shortest fit into a batch."""
    bounds = [_SHORTEST]
    while bounds[-1] < longest:
        bounds.append(bounds[-1] * _STRIDE)
    bounds[-1] = min(bounds[-1], longest)
    return {b: max(1, BATCH_TOKENS // max(b // _STRIDE, 1)) for b in bounds}


def _scheme(dtype: str | None, quant: str | None) -> QuantScheme | None:
    if dtype is not None and dtype not in _TYPES:
        raise OptionError(
            "unknown type", where="dtype", got=dtype, expected=", ".join(_TYPES),
            hint="integers are a matter of quant=",
        )  # fmt: skip
    if dtype is not None and quant is not None:
        raise OptionError("give dtype or quant, not both", got=f"{dtype} and {quant}")
    if quant is None:
        return None
    if not isinstance(quant, str):
        raise OptionError("not a quantisation", where="quant", got=repr(quant), expected='"int8"')
    # a scale for a whole row loses too much where a few activations are far above the others
    return QuantScheme.int8(64) if quant.lower() == "int8" else QuantScheme.parse(quant)
