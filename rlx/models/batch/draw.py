"""Drawing a token for one request from its row of logits: a small program of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

from rlx.ir.module import GraphModule
from rlx.models.batch.request import Request
from rlx.models.build_graph import Described, draw
from rlx.models.bundle import Recipe
from rlx.models.model_runner import Executables
from rlx.runtime.compiled import CompiledGraph
from rlx.specialize.variant import ModelVariant


def drawing(vocab: int, use: str) -> tuple[str, Recipe]:
    """A way to draw from logits [1, vocab], and what it is compiled from."""
    return f"draw {use}", Recipe(partial(_describe, vocab, use), {"row": ModelVariant()})


def _describe(vocab: int, use: str) -> Described:
    def build(g: GraphModule) -> dict[str, Any]:
        return draw(g, g.input("logits", [1, vocab]), use)

    return Described(GraphModule.define("draw", build), {})


class Sampler:
    """Native, like the rest; requests may have settings of their own."""

    def __init__(self, vocab: int, executables: Executables) -> None:
        self._vocab, self._executables = vocab, executables
        self._made: dict[str, CompiledGraph] = {}

    def draw(self, request: Request, logits: Any) -> int:
        """The next token of a request; `logits` is f32 [1, vocab]."""
        penalties = request.penalties
        given: dict[str, Any] = {"rng": request.rng, "settings": request.sampling}
        if penalties is not None:
            given |= penalties.inputs
        graph = self._graph("sample" if penalties is None else penalties.use)
        token, request.rng = graph.run(logits=logits, **given)
        return int(token[0])

    def close(self) -> None:
        """Let go of executables: they hold the parameters of all."""
        self._made.clear()

    def _graph(self, use: str) -> CompiledGraph:
        if use not in self._made:
            (self._made[use],) = self._executables.make(*drawing(self._vocab, use)).values()
        return self._made[use]
