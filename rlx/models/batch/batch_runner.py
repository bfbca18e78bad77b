"""The model behind an engine: its executables, the pool of cache, and one run for many requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.models.adapters import stacked
from rlx.models.batch.kv_pool import Pool
from rlx.models.batch.paged_builder import PAGE
from rlx.models.batch.request import Request
from rlx.models.bundle import Shipped
from rlx.models.limits import check_tokens
from rlx.models.model_runner import Executables, share_states
from rlx.records import dataclass
from rlx.specialize.options import CompileOptions


@dataclass(frozen=True)
class Share:
    """The next `count` tokens of a request, to be run."""

    request: Request
    count: int

    @property
    def completes(self) -> bool:
        """Whether the next token can be drawn after them."""
        return self.count == self.request.pending


class BatchModel:
    """Runs shares of requests. Not safe for several threads."""

    def __init__(
        self, pool: Pool, device: str, threads: int | None, shipped: Shipped | None
    ) -> None:
        """`shipped` has executables made elsewhere, for this pool."""
        self.pool, self.file, self.config = pool, pool.model, pool.model.config
        self.table = np.zeros((pool.requests, -(-pool.context // PAGE)), np.int32)
        self.executables = Executables(
            self.file.file, device, CompileOptions(threads=threads), *self.file.packing,
            shipped=shipped,
        )  # fmt: skip
        (self._graph,) = self.executables.make(pool.use, pool.recipe).values()
        if pool.form is not None:
            share_states(self._graph, stacked(pool.adapters, pool.form))

    def check(self, tokens: Sequence[int]) -> None:
        hint = "make the engine with a larger context=, or shorten the prompt"
        check_tokens(self.config, tokens, self.pool.context, hint)

    def run(self, shares: Sequence[Share]) -> Any:
        """Logits [n, vocab] of the requests whose shares complete them, in order."""
        ids: list[int] = []
        rows: list[int] = []
        positions: list[int] = []
        picked: list[int] = []
        which: list[int] = []
        for share in shares:
            request = share.request
            places = range(request.done, request.done + share.count)
            ids += request.tokens[places.start : places.stop]
            rows += [request.row] * share.count
            positions += places
            which += [request.adapter] * share.count
            if share.completes:
                picked.append(len(ids) - 1)
        at, row = np.array(positions, np.int32), np.array(rows, np.int32)
        given: dict[str, Any] = {"ids": [ids], "rows": row, "positions": at, "picked": picked}
        given["slots"] = self.table[row, at // PAGE] * np.int32(PAGE) + at % np.int32(PAGE)
        given["table"] = self.table
        if self.pool.adapters:
            given["adapters"] = which
        (logits,) = self._graph.run({n: np.asarray(a, np.int32) for n, a in given.items()})
        return logits[0]

    def close(self) -> None:
        """Let go of executables and cache."""
        del self._graph
        self.executables.close()
        self.file.file.close()
