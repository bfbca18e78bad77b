"""Draws that penalties, biases or a grammar constrain, and log probabilities, on devices that keep
logits to themselves: some bytes of each row go there and come back, not its logits.

A run draws plain tokens itself. The rows of all others are drawn by one more run, which reads the
logits where they are. It is given the tokens whose logits change, and a mask of
bits of those that a grammar allows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from math import log
from typing import Any

import numpy as np

from rlx.ir.binding import UpTo
from rlx.ir.module import GraphModule
from rlx.models.batch.step_result import DeviceRows
from rlx.models.builder import BuiltGraph, Tensor
from rlx.models.bundle import EntryPointSpec
from rlx.models.sampling import Penalties
from rlx.runtime.compiled import CompiledGraph
from rlx.specialize.variant import ModelVariant
from rlx.support.records import dataclass

Compile = Callable[[str, EntryPointSpec], dict[str, CompiledGraph]]
DRAW = "rows-constrained"
LIKELIEST = (5, 20)  # of each row, that graphs find: one for few, one for as many as OpenAI's
MOST_CHANGES = 1 << 16  # of logits, in all rows of a run


def constrained_spec(vocab: int, rows: int) -> tuple[str, EntryPointSpec]:
    """The name and the graph that draws from rows of logits with changes and masks."""

    def build() -> BuiltGraph:
        return BuiltGraph(GraphModule.define("draw", lambda g: _constrained(g, vocab)), {})

    variant = _rows(rows).with_extra("changes", UpTo(MOST_CHANGES))
    return DRAW, EntryPointSpec(build, {"rows": variant})


def scores_spec(vocab: int, rows: int, count: int) -> tuple[str, EntryPointSpec]:
    """The name and the graph that finds the likeliest tokens of rows, and what one of them has."""

    def build() -> BuiltGraph:
        return BuiltGraph(GraphModule.define("scores", lambda g: _scores(g, vocab, count)), {})

    return f"rows-scores {count}", EntryPointSpec(build, {"rows": _rows(rows)})


def device_specs(vocab: int, rows: int) -> dict[str, EntryPointSpec]:
    """All of them."""
    counts = [min(count, vocab) for count in LIKELIEST]
    scores = [scores_spec(vocab, rows, count) for count in counts]
    return dict([constrained_spec(vocab, rows), *scores])


def _rows(most: int) -> ModelVariant:
    return ModelVariant().with_extra("all", UpTo(most)).with_extra("picked", UpTo(most))


def _picked(g: GraphModule, vocab: int) -> Tensor:
    logits = g.input("logits", ["all", vocab])
    return logits.gather(g.input("which", ["picked"], "i32"), axis=0)


def _constrained(g: GraphModule, vocab: int) -> dict[str, Tensor]:
    """As `builder.sample` changes and masks logits, row by row."""
    rows = _picked(g, vocab)
    size, words = rows.shape.dims[0], -(-vocab // 32)
    at = g.input("at", ["changes"], "i32")
    factor, bias = g.input("factor", ["changes"]), g.input("bias", ["changes"])
    flat = rows.reshape(size * vocab)
    before = flat.gather(at, axis=0)
    after = g.where(before > 0.0, before / factor, before * factor) + bias
    rows = g.scatter(flat, at, after, axis=0).reshape(size, vocab)
    allowed = g.input("allowed", ["picked", words], "i32").reshape(size, words, 1)
    bits = g.reshape((allowed >> g.iota((32,))) & 1, (size, words * 32))
    bit = bits.narrow(axis=1, start=0, length=vocab)
    rows = g.where(bit != 0, rows, float("-inf"))
    rng, settings = g.input("rng", ["picked", 2], "u64"), g.input("settings", ["picked", 4])
    return {"tokens": g.sample(rows, rng, settings)[0]}


def _scores(g: GraphModule, vocab: int, count: int) -> dict[str, Tensor]:
    """Logits, and the sum over the vocabulary of e to what they are above the largest one."""
    rows = _picked(g, vocab)
    size = rows.shape.dims[0]
    chosen = rows.reshape(size * vocab).gather(g.input("at", ["picked"], "i32"), axis=0)
    best, ids = g.top_k(rows, k=count)
    largest = best.narrow(axis=1, start=0, length=1).astype("f64")
    total = g.sum(g.exp(rows.astype("f64") - largest), axis=1)
    return {"best": best, "ids": ids, "chosen": chosen, "total": total}


@dataclass(frozen=True)
class Constrained:
    """What a draw depends on, beside the logits."""

    penalties: Penalties
    rng: Any
    sampling: Any  # temperature, top-k, top-p, min-p


def takes(penalties: Penalties) -> bool:
    """Whether a run takes all logits that they change."""
    return not penalties.entry_point.penalties or len(penalties.changes[0]) <= MOST_CHANGES


def finds(likeliest: int) -> bool:
    """Whether a device finds so many tokens with log probabilities."""
    return 0 < likeliest <= LIKELIEST[-1]


class DeviceDraws:
    """Safe to prepare from several threads; one thread draws."""

    def __init__(self, vocab: int, rows: int, compile_entry_point: Compile) -> None:
        """Runs have up to `rows` rows of logits."""
        self._vocab, self._most, self._compile = vocab, rows, compile_entry_point
        self._graphs: dict[str, CompiledGraph] = {}
        self._lock = threading.Lock()

    def prepare(self, draws: bool, likeliest: int) -> None:
        """Compile what draws, and log probabilities of so many tokens, need."""
        if draws:
            self._graph(constrained_spec(self._vocab, self._most))
        if finds(likeliest):
            self._graph(self._scores_for(likeliest))

    def _graph(self, spec: tuple[str, EntryPointSpec]) -> CompiledGraph:
        with self._lock:
            found = self._graphs.get(spec[0])
            if found is None:
                (found,) = self._compile(*spec).values()
                self._graphs[spec[0]] = found
            return found

    def _scores_for(self, count: int) -> tuple[str, EntryPointSpec]:
        most = next(n for n in LIKELIEST if n >= count)
        return scores_spec(self._vocab, self._most, min(most, self._vocab))

    # -- draws ------------------------------------------------------------------------------------

    def draw(
        self, logits: DeviceRows, rows: Sequence[int], asked: Sequence[Constrained]
    ) -> list[int] | None:
        """A token from each of these rows of the logits. RNGs are not advanced. None if more logits
        change than a run takes."""
        changed: list[tuple[Any, Any, Any]] = []
        masks = np.full((len(rows), -(-self._vocab // 32)), -1, np.int32)
        for i, penalties in enumerate(one.penalties for one in asked):
            if penalties.entry_point.penalties:
                changed.append(_at_row(penalties, i * self._vocab))
            if penalties.entry_point.grammar:
                masks[i] = penalties.inputs["allowed"]
        if not changed:  # a logit that stays as it is
            changed.append((np.zeros(1, np.int64), np.ones(1), np.zeros(1)))
        at, factor, bias = (np.concatenate(each) for each in zip(*changed, strict=True))
        if not 0 < len(at) <= MOST_CHANGES:
            return None
        (tokens,) = self._graph(constrained_spec(self._vocab, self._most)).run(
            logits=logits.buffer, which=np.array(rows, np.int32), at=at.astype(np.int32),
            factor=factor.astype(np.float32), bias=bias.astype(np.float32), allowed=masks,
            rng=np.array([one.rng for one in asked], np.uint64),
            settings=np.array([one.sampling for one in asked], np.float32),
        )  # fmt: skip
        return [int(token) for token in tokens]

    # -- log probabilities ------------------------------------------------------------------------

    def logprobs(
        self, logits: DeviceRows, rows: Sequence[int], tokens: Sequence[int], counts: Sequence[int]
    ) -> list[dict[int, float]]:
        """Of each row as many of the likeliest tokens, and the one that was drawn: as
        `top_logprobs` has them."""
        places = np.arange(len(rows)) * self._vocab + np.array(tokens)
        best, ids, chosen, total = self._graph(self._scores_for(max(counts))).run(
            logits=logits.buffer, which=np.array(rows, np.int32), at=places.astype(np.int32)
        )
        found = []
        for i, (token, count) in enumerate(zip(tokens, counts, strict=True)):
            top, whole = float(best[i, 0]), log(float(total[i]))
            own = zip(ids[i, :count].tolist(), best[i, :count].tolist(), strict=True)
            row = {t: x - top - whole for t, x in own}
            found.append({**row, token: float(chosen[i]) - top - whole})
        return found


def _at_row(penalties: Penalties, start: int) -> tuple[Any, Any, Any]:
    tokens, factor, bias = penalties.changes
    return tokens + start, factor, bias
