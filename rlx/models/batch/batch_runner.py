"""One run of a model for many requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.backends.buffer import Buffer
from rlx.ir.dim import Dim
from rlx.models.adapters import stacked
from rlx.models.batch.kv_pool import KVPool
from rlx.models.batch.paged_builder import PAGE
from rlx.models.batch.request import Request
from rlx.models.batch.scheduler import ScheduledTokens
from rlx.models.batch.step_result import DeviceRows, QueuedRun, StepResult, on_host
from rlx.models.batch.token_sampler import TokenSampler
from rlx.models.bundle import ModelBundle
from rlx.models.model_runner import ModelRunner, compile_options, share_states
from rlx.runtime.compiled import CompiledGraph
from rlx.support.progress import Progress


class BatchRunner(ModelRunner):
    """Runs tokens of many requests. Not safe for several threads."""

    def __init__(
        self, pool: KVPool, device: str, threads: int | None, bundle: ModelBundle | None,
        progress: Progress | None = None, batch_invariant: bool = False,
    ) -> None:  # fmt: skip
        """`bundle` has executables compiled elsewhere, for this pool."""
        super().__init__(
            pool.model, device=device, options=compile_options(threads, batch_invariant),
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
        self.sampler = TokenSampler(pool, self.compile)
        self._kept: dict[tuple[int, ...], Buffer] = {}  # drawn tokens, by their number

    def check(self, tokens: Sequence[int]) -> None:
        hint = "make the engine with a larger context=, or shorten the prompt"
        self.config.check_tokens(tokens, self.pool.context, hint)

    def run(self, scheduled: Sequence[ScheduledTokens]) -> StepResult:
        """Logits [n, vocab] after the last token of each request whose next one is drawn, and
        after each token of its draft or of a prompt that is scored, in order."""
        if self.config.recurrent is None:
            return self._run(self._graph_for(scheduled), scheduled)
        # a recurrence goes along tokens of one sequence: decodes together, each prompt by itself
        parts = [[p] for p in scheduled if p.count > 1]
        decodes = [p for p in scheduled if p.count == 1]
        rows: dict[Request, Any] = {}
        drawn: dict[Request, Sequence[int]] = {}
        for part in [*parts, decodes] if decodes else parts:
            graph = self._graphs["decode" if part is decodes else "prefill"]
            made = self._run(graph, part)
            picked = [p.request for p in part if p.rows]
            if picked:  # a copy: the next run overwrites them
                each_rows = np.split(np.array(on_host(made.logits)), len(picked))
                rows |= zip(picked, each_rows, strict=True)
            if picked and made.tokens is not None:
                each = len(made.tokens) // len(picked)
                drawn |= {r: made.tokens[i * each :][:each] for i, r in enumerate(picked)}
        ordered = [p.request for p in scheduled if p.rows]
        empty = np.zeros((0, self.config.vocab), np.float32)
        return StepResult(
            np.concatenate([rows[r] for r in ordered]) if ordered else empty,
            [t for r in ordered for t in drawn[r]] if self.pool.draws else None,
        )

    def _graph_for(self, scheduled: Sequence[ScheduledTokens]) -> CompiledGraph:
        """The executable for so many tokens and rows of logits, or the least more."""
        tokens = sum(part.count + len(part.draft) for part in scheduled)
        rows = sum(part.rows for part in scheduled)
        fitting = [w for w in self.pool.widths if max(tokens, rows) <= w]
        return self._graphs[str(fitting[0]) if fitting and self.pool.draws else "any"]

    # -- runs that follow each other ---------------------------------------------------------------

    def can_follow(self, scheduled: Sequence[ScheduledTokens]) -> bool:
        """Whether the next run of the same requests can be queued before the tokens of this one
        are known: each decodes one, and a device draws them all."""
        return self.pool.draws and self.config.recurrent is None and all(
            part.count == 1 and not part.draft and self.sampler.is_plain(part.request)
            for part in scheduled
        )  # fmt: skip

    def queue(self, scheduled: Sequence[ScheduledTokens]) -> QueuedRun:
        """Queue a run of requests that `can_follow`."""
        return self._queue(*self._prepared(self._graph_for(scheduled), scheduled))

    def queue_next(self, run: QueuedRun) -> QueuedRun:
        """Queue the run of the tokens that `run` draws, whatever they are."""
        given = dict(run.inputs)
        at = given["positions"] = given["positions"] + np.int32(1)
        given["rng"] = given["rng"] + np.array([0, 1], np.uint64)
        given["slots"] = self._slots(given["rows"], at)
        given["ids"] = run.tokens.view(0, given["ids"].shape, np.int32)
        return self._queue(run.graph, given, run.count)

    def _slots(self, row: Any, at: Any) -> Any:
        """Where positions of requests lie in the KV cache."""
        return self.page_table[row, at // PAGE] * np.int32(PAGE) + at % np.int32(PAGE)

    def _run(self, graph: CompiledGraph, scheduled: Sequence[ScheduledTokens]) -> StepResult:
        if self.pool.draws:
            return self._queue(*self._prepared(graph, scheduled)).result()
        (logits,) = graph.run(self._inputs(graph, scheduled))
        return StepResult(logits[0])

    def _inputs(self, graph: CompiledGraph, scheduled: Sequence[ScheduledTokens]) -> dict[str, Any]:
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
        given["slots"] = self._slots(row, at)
        if self.config.recurrent is not None:
            given = {n: np.reshape(a, (len(scheduled), -1)) for n, a in given.items()}
            given["states"] = [part.request.row for part in scheduled]
            given["fresh"] = [part.request.done == 0 for part in scheduled]
        given |= {"table": self.page_table, "picked": picked}
        return {n: np.asarray(given[n], np.int32) for n in graph.input_names if n in given}

    def _prepared(
        self, graph: CompiledGraph, scheduled: Sequence[ScheduledTokens]
    ) -> tuple[CompiledGraph, dict[str, Any], int]:
        """The inputs of a run that draws, and how many tokens it does. Where there is code for
        exactly so many, the last one is repeated: it is computed, and written, once more."""
        inputs = self._inputs(graph, scheduled)
        rng, settings = self.sampler.settings_of(scheduled)
        inputs |= {"rng": rng, "settings": settings}
        for entry in graph.executable.manifest.inputs:
            inputs[entry.name] = _repeated(inputs[entry.name], entry.shape.dims)
        return graph, inputs, len(rng)

    def _queue(self, graph: CompiledGraph, inputs: dict[str, Any], count: int) -> QueuedRun:
        """Queue a run; logits stay on the device."""
        executable = graph.executable
        sizes = {"picked": len(inputs["picked"]), "seq": inputs["ids"].shape[-1]}
        sizes["runs"] = inputs["ids"].shape[0]
        live = {n: sizes[n] for n in executable.lir.live}
        graph.run_slots(*(inputs[e.name] for e in executable.manifest.inputs), sizes=live)
        logits, tokens = (
            executable.slot(executable.manifest.find(name), live) for name in ("logits", "tokens")
        )
        kept = self._kept.get(tokens.shape)
        if kept is None:  # the next run may take the place of the slot before it reads
            kept = self._kept[tokens.shape] = graph.allocator.alloc(tokens.shape, tokens.dtype)
        graph.allocator.copy(kept, tokens)
        rows = logits.view(0, tokens.shape + logits.shape[-1:], logits.dtype)
        read = graph.allocator.read_later(kept)
        return QueuedRun(graph, inputs, count, DeviceRows(rows, 0, count), kept, read)

    def close(self) -> None:
        """Free executables, weights and KV cache."""
        self._graphs.clear()
        self._kept.clear()
        del self.sampler
        super().close()


def _repeated(array: Any, dims: Sequence[Dim]) -> Any:
    """An array whose last element of an axis is repeated where there are too few of them."""
    for axis, (size, wanted) in enumerate(zip(array.shape, dims, strict=True)):
        if isinstance(wanted, int) and size < wanted:
            if not size:
                return np.zeros([d if isinstance(d, int) else 0 for d in dims], array.dtype)
            array = array.take([*range(size), *[size - 1] * (wanted - size)], axis)
    return np.ascontiguousarray(array)
