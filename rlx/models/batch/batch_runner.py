"""One run of a model for many requests, and a token drawn for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.models.adapters import stacked
from rlx.models.batch.kv_pool import KVPool, sampler_spec
from rlx.models.batch.paged_builder import PAGE
from rlx.models.batch.request import Request
from rlx.models.batch.scheduler import ScheduledTokens
from rlx.models.build_graph import SAMPLE, EntryPoint
from rlx.models.bundle import ModelBundle
from rlx.models.model_runner import ModelRunner, share_states
from rlx.runtime.compiled import CompiledGraph
from rlx.specialize.options import CompileOptions


class BatchRunner(ModelRunner):
    """Runs tokens of many requests. Not safe for several threads."""

    def __init__(
        self, pool: KVPool, device: str, threads: int | None, bundle: ModelBundle | None
    ) -> None:
        """`bundle` has executables compiled elsewhere, for this pool."""
        super().__init__(
            pool.model, device=device, options=CompileOptions(threads=threads),
            packing=pool.model.packing, bundle=bundle,
        )  # fmt: skip
        self.pool, self.config = pool, pool.model.config
        self.page_table = np.zeros((pool.requests, -(-pool.context // PAGE)), np.int32)
        self._samplers: dict[str, CompiledGraph] = {}
        (self._graph,) = self.compile(pool.entry_point, pool.spec).values()
        if pool.adapter_shape is not None:
            put, states = self._graph.allocator.put, stacked(pool.adapters, pool.adapter_shape)
            share_states(self._graph, {name: put(array) for name, array in states.items()})

    def check(self, tokens: Sequence[int]) -> None:
        hint = "make the engine with a larger context=, or shorten the prompt"
        self.config.check_tokens(tokens, self.pool.context, hint)

    def run(self, scheduled: Sequence[ScheduledTokens]) -> Any:
        """Logits [n, vocab] of the requests whose next token is drawn, in order."""
        ids: list[int] = []
        rows: list[int] = []
        positions: list[int] = []
        picked: list[int] = []
        which: list[int] = []
        for part in scheduled:
            request = part.request
            places = range(request.done, request.done + part.count)
            ids += request.tokens[places.start : places.stop]
            rows += [request.row] * part.count
            positions += places
            which += [request.adapter] * part.count
            if part.completes:
                picked.append(len(ids) - 1)
        at, row = np.array(positions, np.int32), np.array(rows, np.int32)
        given: dict[str, Any] = {"ids": [ids], "rows": row, "positions": at, "picked": picked}
        given["slots"] = self.page_table[row, at // PAGE] * np.int32(PAGE) + at % np.int32(PAGE)
        given["table"] = self.page_table
        if self.pool.adapters:
            given["adapters"] = which
        (logits,) = self._graph.run({n: np.asarray(a, np.int32) for n, a in given.items()})
        return logits[0]

    def sample(self, request: Request, logits: Any) -> int:
        """The next token of a request, drawn from its logits [1, vocab] in native code."""
        penalties = request.penalties
        given: dict[str, Any] = {"rng": request.rng, "settings": request.sampling}
        if penalties is not None:
            given |= penalties.inputs
        graph = self._sampler(SAMPLE if penalties is None else penalties.entry_point)
        token, request.rng = graph.run(logits=logits, **given)
        return int(token[0])

    def _sampler(self, entry_point: EntryPoint) -> CompiledGraph:
        found = self._samplers.get(entry_point.name)
        if found is None:
            (found,) = self.compile(*sampler_spec(self.config.vocab, entry_point)).values()
            self._samplers[entry_point.name] = found
        return found

    def close(self) -> None:
        """Free executables, weights and KV cache."""
        del self._graph
        self._samplers.clear()
        super().close()
