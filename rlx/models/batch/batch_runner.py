"""One run of a model for many requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.backends.buffer import Buffer
from rlx.models.adapters import stacked
from rlx.models.batch.kv_pool import KVPool
from rlx.models.batch.paged_builder import PAGE
from rlx.models.batch.request import Request
from rlx.models.batch.scheduler import ScheduledTokens
from rlx.models.batch.token_sampler import TokenSampler
from rlx.models.bundle import ModelBundle
from rlx.models.model_runner import ModelRunner, share_states
from rlx.runtime.compiled import CompiledGraph
from rlx.specialize.options import CompileOptions
from rlx.support.progress import Progress


class BatchRunner(ModelRunner):
    """Runs tokens of many requests. Not safe for several threads."""

    def __init__(
        self, pool: KVPool, device: str, threads: int | None, bundle: ModelBundle | None,
        progress: Progress | None = None,
    ) -> None:  # fmt: skip
        """`bundle` has executables compiled elsewhere, for this pool."""
        super().__init__(
            pool.model, device=device, options=CompileOptions(threads=threads),
            packing=pool.model.packing, bundle=bundle,
        )  # fmt: skip
        self.pool, self.config = pool, pool.model.config
        self.page_table = np.zeros((pool.requests, -(-pool.context // PAGE)), np.int32)
        self.progress = progress
        self._graphs = self.compile(pool.entry_point, pool.spec)
        shared: dict[str, Buffer] = {}
        if pool.adapter_shape is not None:
            put = next(iter(self._graphs.values())).allocator.put
            states = stacked(pool.adapters, pool.adapter_shape)
            shared = {name: put(array) for name, array in states.items()}
        for graph in self._graphs.values():
            share_states(graph, shared)
        on_host = next(iter(self._graphs.values())).allocator.is_host
        self.sampler = TokenSampler(pool, self.compile, on_host)

    def check(self, tokens: Sequence[int]) -> None:
        hint = "make the engine with a larger context=, or shorten the prompt"
        self.config.check_tokens(tokens, self.pool.context, hint)

    def run(self, scheduled: Sequence[ScheduledTokens]) -> Any:
        """Logits [n, vocab] after the last token of each request whose next one is drawn, and
        after each token of its draft or of a prompt that is scored, in order."""
        if self.config.recurrent is None:
            return self._run(self._graphs["any"], scheduled)
        # a recurrence goes along tokens of one sequence: decodes together, each prompt by itself
        parts = [[p] for p in scheduled if p.count > 1]
        decodes = [p for p in scheduled if p.count == 1]
        found: dict[Request, Any] = {}
        for part in [*parts, decodes] if decodes else parts:
            graph = self._graphs["decode" if part is decodes else "prefill"]
            rows = np.array(self._run(graph, part))  # a copy: the next run overwrites them
            picked = [p.request for p in part if p.rows]
            found |= zip(picked, np.split(rows, len(picked)) if picked else [], strict=True)
        ordered = [found[p.request] for p in scheduled if p.rows]
        return np.concatenate(ordered) if ordered else np.zeros((0, self.config.vocab), np.float32)

    def _run(self, graph: CompiledGraph, scheduled: Sequence[ScheduledTokens]) -> Any:
        ids: list[int] = []
        rows: list[int] = []
        positions: list[int] = []
        picked: list[int] = []
        which: list[int] = []
        for part in scheduled:
            request = part.request
            count, end = part.count + len(part.draft), request.done + part.count
            ids += request.tokens[request.done : end]
            ids += part.draft
            rows += [request.row] * count
            positions += range(request.done, request.done + count)
            which += [request.adapter] * count
            picked += range(len(ids) - part.rows, len(ids))
        at, row = np.array(positions, np.int32), np.array(rows, np.int32)
        given: dict[str, Any] = {"ids": [ids], "rows": row, "positions": at, "adapters": which}
        given["slots"] = self.page_table[row, at // PAGE] * np.int32(PAGE) + at % np.int32(PAGE)
        if self.config.recurrent is not None:
            given = {n: np.reshape(a, (len(scheduled), -1)) for n, a in given.items()}
            given["states"] = [part.request.row for part in scheduled]
            given["fresh"] = [part.request.done == 0 for part in scheduled]
        given |= {"table": self.page_table, "picked": picked}
        inputs = {n: np.asarray(given[n], np.int32) for n in graph.input_names}
        (logits,) = graph.run(inputs)
        return logits[0]

    def close(self) -> None:
        """Free executables, weights and KV cache."""
        self._graphs.clear()
        del self.sampler
        super().close()
