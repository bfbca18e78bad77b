"""The model behind an engine: its executables, the pool of cache, and one run for many requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlx.errors import InputError, OptionError, UnsupportedError
from rlx.ir.binding import DimBinding
from rlx.models.batch.net import PAGE, describe_batch
from rlx.models.batch.request import Request
from rlx.models.build import ModelFile
from rlx.models.kv import CacheType
from rlx.models.limits import check_tokens, context_length
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.machine import free_memory
from rlx.runtime.params import ParamStore
from rlx.runtime.session import Session
from rlx.specialize.options import CompileOptions

MOST_TOKENS = 1024  # of one run


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
        self, file: ModelFile, requests: int, context: int | None, cache_tokens: int | None,
        kv: str, device: str, threads: int | None,
    ) -> None:  # fmt: skip
        self.file, self.config = file, file.config
        if self.config.recurrent is not None:
            raise UnsupportedError(
                "recurrent states are not kept for many requests yet", where=self.config.arch,
                hint="load the model with rlx.load, for one request at a time",
            )  # fmt: skip
        self.context = context_length(file.config, context)
        self.kv = CacheType.of(kv, self.config.head_dim)
        if self.kv.scheme is not None:
            raise OptionError("not for pages yet", where="kv", got=kv, expected="f16, bf16 or f32")
        self.slots = self._slots(requests, cache_tokens)
        self.table = np.zeros((requests, -(-self.context // PAGE)), np.int32)
        self.session, self.options = Session(device), CompileOptions(threads=threads)
        described = describe_batch(
            file, file.weights(), self.context, self.kv, self.slots, requests
        )
        params = ParamStore()
        for name, array in described.params.items():
            params.set(name, array)
        many = DimBinding().set_live("seq", MOST_TOKENS).set_live("picked", requests)
        template = self.session.template(described.module, self.options)
        few = CompileOptions(threads=threads)
        # a few tokens: a variant for every number of them; more: one for all
        self._few = CompiledGraph(template.with_options(few), params)
        self._many = CompiledGraph(
            template.with_options(CompileOptions(threads=threads, binding=many)), params
        )
        self._most_few = requests
        for name in template.signature.states:
            self._few.bind_state(name, self._many.read_state(name))

    @property
    def token_bytes(self) -> int:
        """Bytes of cache that a token takes."""
        c = self.config
        return 2 * c.layers * c.kv_heads * self.kv.row_bytes(c.head_dim)

    def _slots(self, requests: int, asked: int | None) -> int:
        most = requests * self.context if asked is None else asked
        fits = free_memory() // 2 // self.token_bytes
        if asked is None:
            most = min(most, fits)
        pages = -(-most // PAGE)
        if not 0 < pages * PAGE <= max(fits, PAGE):
            raise InputError(
                "memory would not suffice for the cache", where="cache_tokens", got=most,
                expected=f"1 … {fits}", hint="half of the free memory at most is used for it",
            )  # fmt: skip
        return pages * PAGE

    def check(self, tokens: Sequence[int]) -> None:
        hint = "make the engine with a larger context=, or shorten the prompt"
        check_tokens(self.config, tokens, self.context, hint)

    def run(self, shares: Sequence[Share]) -> Any:
        """Logits [n, vocab] of the requests whose shares complete them, in order."""
        ids: list[int] = []
        rows: list[int] = []
        positions: list[int] = []
        picked: list[int] = []
        for share in shares:
            request = share.request
            places = range(request.done, request.done + share.count)
            ids += request.tokens[places.start : places.stop]
            rows += [request.row] * share.count
            positions += places
            if share.completes:
                picked.append(len(ids) - 1)
        at, row = np.array(positions, np.int32), np.array(rows, np.int32)
        graph = self._few if len(ids) <= self._most_few else self._many
        (logits,) = graph.run(
            ids=np.array([ids], np.int32),
            rows=row,
            positions=at,
            slots=self.table[row, at // PAGE] * np.int32(PAGE) + at % np.int32(PAGE),
            table=self.table,
            picked=np.array(picked, np.int32),
        )
        return logits[0]

    def close(self) -> None:
        """Let go of executables and cache."""
        del self._few, self._many
        self.file.file.close()
