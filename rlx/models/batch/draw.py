"""Drawing a token for one request from its row of logits: a small program of its own."""

from __future__ import annotations

from typing import Any

from rlx.ir.module import GraphModule
from rlx.models.batch.request import Request
from rlx.models.build import draw
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.session import Session
from rlx.specialize.options import CompileOptions


class Sampler:
    """Native, like the rest; requests may have settings of their own."""

    def __init__(self, vocab: int, session: Session, options: CompileOptions) -> None:
        self._vocab, self._session, self._options = vocab, session, options
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

    def _graph(self, use: str) -> CompiledGraph:
        if use not in self._made:

            def build(g: GraphModule) -> dict[str, Any]:
                return draw(g, g.input("logits", [1, self._vocab]), use)

            module = GraphModule.define("draw", build)
            self._made[use] = self._session.compile(module, self._options)
        return self._made[use]
