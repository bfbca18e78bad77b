"""Runs batches of texts through an encoder: few executables, each for a bucket of lengths.

Batch and sequence are dynamic up to a bound. Each bucket of lengths reaches four times as far as
the one before, with fewer texts in a batch the longer they may be: no bucket plans for more memory
than another, and a batch touches only what it needs of it.
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
from rlx.errors import FormatError, OptionError
from rlx.ir.binding import UpTo
from rlx.ir.quant.scheme import QuantScheme
from rlx.models.builder import EntryPoint, build_graph
from rlx.models.bundle import BundlePlan, EntryPointSpec, ModelBundle
from rlx.models.encoder_inputs import Tokens
from rlx.models.model_file import ModelFile
from rlx.models.model_runner import ModelRunner
from rlx.models.sentence_config import SentenceModule
from rlx.models.weights import Weights
from rlx.runtime.compiled import CompiledGraph
from rlx.specialize.options import CompileOptions
from rlx.specialize.variant import ModelVariant
from rlx.support.records import dataclass

BATCH_TOKENS = 2048  # padding included: weights are read once, activations stay in the caches
_BATCH_COST = 8  # of a batch as such, in tokens of each worker
_SHORTEST, _STRIDE = 64, 4  # the bound of the first bucket, and the ratio of the next ones
_TYPES = ("f32", "f16", "bf16")


@dataclass(frozen=True)
class Batch:
    """Texts that run together: their indices in the input and their tokens. With `padded` they run
    as texts of several lengths, even if they have one."""

    places: list[int]
    tokens: list[Tokens]
    padded: bool

    @property
    def seq(self) -> int:
        return len(self.tokens[0])


class EncoderRunner(ModelRunner):
    """Runs batches. Executables are made on first use. Safe to call from several threads."""

    def __init__(
        self,
        model: ModelFile,
        *,
        longest: int,
        device: str = "cpu",
        threads: int | None = None,
        dtype: str | None = None,
        quant: str | None = None,
        strassen: bool = False,
        steps: Mapping[int, int] | None = None,
        bundle: ModelBundle | None = None,
    ) -> None:
        """`steps` are the buckets: bounds of lengths, each with the most texts of a batch. A bundle
        has those it was made for."""
        options = CompileOptions(threads=threads, quant=_scheme(dtype, quant))
        super().__init__(
            model, device=device, options=options, packing=(dtype, quant, strassen), bundle=bundle
        )
        stored = None if bundle is None else {int(b): n for b, n in bundle.settings["steps"]}
        chosen: Mapping[int, int] = stored or steps or default_buckets(longest)
        self.buckets = dict(sorted(chosen.items()))
        self._settings = {"context": max(self.buckets), "dtype": dtype, "quant": quant}
        self._strassen = strassen
        self._batch_cost = _BATCH_COST * Device.of(device).backend.workers(options)
        self._weights: Weights = model.weights(dtype)
        self._graphs: dict[tuple[EntryPoint, int], CompiledGraph] = {}
        self._lock = threading.Lock()
        types = self._weights.find("token_types.weight")
        self.has_types = types is not None and types.shape[0] > 1

    # -- batches ------------------------------------------------------------------------------

    def bucket(self, seq: int) -> int:
        """The bound of the bucket for this length."""
        return next(bound for bound in self.buckets if bound >= seq)

    def most_texts(self, bound: int) -> int:
        """The most texts in a batch of a bucket."""
        return self.buckets[bound]

    def batches(self, texts: Sequence[Tokens], most: int | None) -> list[Batch]:
        """Batches of texts of similar lengths, the longest first; empty texts are left out."""
        order = sorted((i for i, t in enumerate(texts) if t.ids), key=lambda i: -len(texts[i]))
        lengths = np.array([len(texts[i]) for i in order])
        cuts = [0]
        while cuts[-1] < len(order):
            cuts.append(cuts[-1] + self._count(lengths[cuts[-1] :][: most or BATCH_TOKENS]))
        uneven = {
            self.bucket(lengths[i]) for i, j in pairwise(cuts) if lengths[i] != lengths[j - 1]
        }
        return [
            Batch(order[i:j], [texts[k] for k in order[i:j]], self.bucket(lengths[i]) in uneven)
            for i, j in pairwise(cuts)
        ]

    def _count(self, lengths: npt.NDArray[np.int64]) -> int:
        """How many texts, of falling lengths, to run together: the number with the least cost per
        token, with padding and the cost of a batch as such."""
        seq = int(lengths[0])
        fitting = lengths[: max(1, min(BATCH_TOKENS // seq, self.most_texts(self.bucket(seq))))]
        costs = (self._batch_cost + seq * np.arange(1, len(fitting) + 1)) / np.cumsum(fitting)
        return len(costs) - int(np.argmin(costs[::-1]))  # the most of equals

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
        (found,) = self.graph(EntryPoint(result, padded=batch.padded, typed=typed), seq).run(given)
        return found

    # -- executables --------------------------------------------------------------------------

    def graph(self, entry_point: EntryPoint, seq: int) -> CompiledGraph:
        """The executable for texts of this length."""
        bound = self.bucket(seq)
        graph = self._graphs.get((entry_point, bound))
        if graph is None:
            with self._lock:
                graph = self._graphs.get((entry_point, bound))
                if graph is None:
                    graph = self._compile(entry_point, bound)
                    self._graphs[entry_point, bound] = graph
        return graph

    def _compile(self, entry_point: EntryPoint, bound: int) -> CompiledGraph:
        (made,) = self.compile(entry_point.name, self._spec(entry_point, bound)).values()
        return made

    def _spec(self, entry_point: EntryPoint, *bounds: int) -> EntryPointSpec:
        sizes = {f"upto{b}": ModelVariant.encoder(UpTo(self.buckets[b]), UpTo(b)) for b in bounds}
        build = partial(
            build_graph, self.model, self._weights, entry_point, strassen=self._strassen
        )
        return EntryPointSpec(build, sizes)

    @property
    def output(self) -> str:
        """What the model was made for: "scores" of pairs, or an "embedding"."""
        encoder = self.model.config.encoder
        return "scores" if encoder is not None and encoder.labels else "embedding"

    def plan(self) -> BundlePlan:
        """What a bundle of this model holds."""
        types = (False, True) if self.has_types else (False,)
        points = [EntryPoint(self.output, padded=p, typed=t) for p in (False, True) for t in types]
        specs = {point.name: self._spec(point, *self.buckets) for point in points}
        settings = {**self._settings, "steps": list(self.buckets.items())}
        return BundlePlan("encoder", specs, settings)

    def close(self) -> None:
        """Free executables and weights."""
        self._graphs.clear()
        super().close()


def default_buckets(longest: int) -> dict[int, int]:
    """Bounds of lengths, each with as many texts as a batch has of its shortest length."""
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
    # one scale per row loses too much where a few activations are outliers
    return QuantScheme.int8(64) if quant.lower() == "int8" else QuantScheme.parse(quant)


def embedding_width(model: ModelFile) -> int:
    """Dimensions of a vector, after the modules behind pooling."""
    found = len(model.sentence.pooling) * model.config.hidden
    for module, weights in zip(model.sentence.modules, model.module_weights(), strict=True):
        if weights is not None:
            found = _module_width(module, weights, found)
    return found


def _module_width(module: SentenceModule, weights: Weights, given: int) -> int:
    name = "norm.weight" if module.kind == "LayerNorm" else "linear.weight"
    shape = weights.get(name).shape
    fits = (
        shape == (given,) if module.kind == "LayerNorm" else len(shape) == 2 and shape[1] == given
    )
    bias = weights.find(name.replace("weight", "bias"))
    other = weights.find("residual.weight") if module.residual else None
    if (
        not fits
        or (bias is not None and bias.shape != shape[:1])
        or (other is not None and other.shape != shape)
        or (module.residual and other is None and shape[0] != given)
    ):
        raise FormatError(
            f"a {module.kind} module does not fit what comes before it", where=str(module.weights),
            got=f"{name} {list(shape)}", expected=f"{given} numbers in",
        )  # fmt: skip
    return shape[0]
