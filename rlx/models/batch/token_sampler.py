"""Draws the next tokens of many requests from the logits of a run.

All rows are drawn in one native call, each with its own settings and random numbers, so a token is
the one of the request alone. Penalties change few logits of a row: they are applied in place, and
taken back. Only a draw that depends on the one before it in the same run has a call of its own.
Devices draw in the run itself, and constrained rows in one behind it (`device_draws.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from rlx.models.batch.kv_pool import KVPool, sampler_spec
from rlx.models.batch.request import Request
from rlx.models.batch.scheduler import ScheduledTokens
from rlx.models.batch.step_result import DeviceRows, StepResult, as_argument
from rlx.models.builder import SAMPLE, EntryPoint
from rlx.models.bundle import EntryPointSpec
from rlx.models.device_draws import Constrained, DeviceDraws, finds
from rlx.models.sampling import Penalties
from rlx.runtime.compiled import CompiledGraph

Compile = Callable[[str, EntryPointSpec], dict[str, CompiledGraph]]
_NO_RNG, _GREEDY = np.zeros(2, np.uint64), np.zeros(4, np.float32)


class TokenSampler:
    """Not safe for several threads, but for `prepare`."""

    def __init__(self, pool: KVPool, compile_entry_point: Compile) -> None:
        self._vocab, self._compile = pool.model.config.vocab, compile_entry_point
        self._graphs: dict[str, CompiledGraph] = {}
        self._lock = threading.Lock()
        self._rows: CompiledGraph | None = None
        self._device: DeviceDraws | None = None
        if pool.draws:
            self._device = DeviceDraws(self._vocab, pool.picked, compile_entry_point)
        else:
            self._rows = compile_entry_point(*pool.rows_sampler)["rows"]

    def prepare(self, request: Request) -> None:
        """Compile what a request needs, in the thread of its caller: nobody else waits for it."""
        if self._device is not None:
            self._device.prepare(self._is_constrained(request), request.settings.logprobs)
        if not self._is_joined(request) and not self._is_constrained(request):
            penalties = request.penalties
            self._graph(SAMPLE if penalties is None else penalties.entry_point)

    def _is_joined(self, request: Request) -> bool:
        """Whether rows of a request are drawn with all others. A grammar is an input of its own,
        and penalties of a draft's token depend on the token before. A device draws from logits as
        they are."""
        penalties = request.penalties
        if self._rows is None:
            return penalties is None
        return penalties is None or not (
            penalties.entry_point.grammar or request.settings.speculate
        )

    def _is_constrained(self, request: Request) -> bool:
        """Whether a device draws its rows with those of others, behind the run."""
        penalties, drafts = request.penalties, request.settings.speculate
        return self._device is not None and penalties is not None and not drafts

    def is_plain(self, request: Request) -> bool:
        """Whether the device draws the tokens of a request, and nothing else of a run is read."""
        asked = request.settings
        return request.penalties is None and not (asked.speculate or asked.logprobs) and (
            request.scores is None or not request.scores.is_due
        )  # fmt: skip

    def settings_of(self, scheduled: Sequence[ScheduledTokens]) -> tuple[Any, Any]:
        """Random numbers [n, 2] and settings [n, 4] of all rows of a run, which draws itself."""
        rng: list[Any] = []
        settings: list[Any] = []
        for part in scheduled:
            rows = part.rows
            drawn = min(rows, 1 + len(part.draft)) if part.completes else 0
            joined = self._is_joined(part.request)
            state = part.request.rng if joined else _NO_RNG
            rng += [_NO_RNG] * (rows - drawn)
            rng += [state + np.array([0, i], np.uint64) for i in range(drawn)]
            settings += [_GREEDY] * (rows - drawn)
            settings += [part.request.sampling if joined else _GREEDY] * drawn
        found = np.array(rng, np.uint64).reshape(-1, 2)
        return found, np.array(settings, np.float32).reshape(-1, 4)

    def draw(
        self, drawing: Sequence[tuple[ScheduledTokens, int]], result: StepResult
    ) -> list[list[int] | None]:
        """A token for each row of requests that complete, given with the first of their rows in
        the logits [n, vocab]; None for those that `draw_one` is for. RNGs are not advanced."""
        parts = [part for part, _ in drawing]
        joined = [self._is_joined(part.request) for part in parts]
        logits, tokens_there = result.logits, result.tokens
        if tokens_there is not None:
            pairs = zip(drawing, joined, strict=True)
            found = [
                list(tokens_there[at : at + 1 + len(part.draft)]) if is_joined else None
                for (part, at), is_joined in pairs
            ]
            return self._constrained(drawing, logits, found)
        if self._rows is None or not any(joined):
            return [None] * len(parts)
        places = [at + i for part, at in drawing for i in range(1 + len(part.draft))]
        if len(places) != len(logits):  # some are of prompts that are scored
            logits = logits[places]
        rng: list[Any] = []
        settings: list[Any] = []
        changes: list[tuple[int, Penalties]] = []
        for part, is_joined in zip(parts, joined, strict=True):
            request, count = part.request, 1 + len(part.draft)
            if request.penalties is not None and is_joined:
                changes.append((len(rng), request.penalties))
            state = request.rng if is_joined else _NO_RNG
            rng.append(state)
            rng += [state + np.array([0, i], np.uint64) for i in range(1, count)]
            settings += [request.sampling if is_joined else _GREEDY] * count
        with _changed(logits, changes):
            (drawn,) = self._rows.run(logits=logits, rng=np.array(rng), settings=np.array(settings))
        tokens = iter(drawn.tolist())
        found = [[next(tokens) for _ in range(1 + len(part.draft))] for part in parts]
        return [own if is_joined else None for own, is_joined in zip(found, joined, strict=True)]

    def _constrained(
        self, drawing: Sequence[tuple[ScheduledTokens, int]], logits: Any,
        found: list[list[int] | None],
    ) -> list[list[int] | None]:  # fmt: skip
        """Tokens of constrained requests too, where logits are still on the device."""
        if self._device is None or not isinstance(logits, DeviceRows):
            return found
        own = [i for i, (part, _) in enumerate(drawing) if self._is_constrained(part.request)]
        if not own:
            return found
        requests = [drawing[i][0].request for i in own]
        asked = [Constrained(r.penalties, r.rng, r.sampling) for r in requests if r.penalties]
        tokens = self._device.draw(logits, [drawing[i][1] for i in own], asked)
        for i, token in zip(own, tokens or (), strict=bool(tokens)):
            found[i] = [token]
        return found

    def logprobs(
        self, drawing: Sequence[tuple[ScheduledTokens, int]], tokens: Sequence[list[int] | None],
        logits: Any,
    ) -> dict[Request, list[dict[int, float]]]:  # fmt: skip
        """Log probabilities of drawn tokens, of requests for which a device finds them."""
        found: dict[Request, list[dict[int, float]]] = {}
        device, rows, drawn, counts = self._device, list[int](), list[int](), list[int]()
        if device is None or not isinstance(logits, DeviceRows):
            return found
        asked = [
            (part.request, at, own)
            for (part, at), own in zip(drawing, tokens, strict=True)
            if own is not None and finds(part.request.settings.logprobs)
        ]
        for request, at, own in asked:
            rows += range(at, at + len(own))
            drawn += own
            counts += [request.settings.logprobs] * len(own)
        made = iter(device.logprobs(logits, rows, drawn, counts) if rows else ())
        return {request: [next(made) for _ in own] for request, _, own in asked}

    def draw_one(self, request: Request, logits: Any) -> int:
        """The next token of a request, drawn from its logits [1, vocab]. Advances its RNG."""
        penalties = request.penalties
        given: dict[str, Any] = {"rng": request.rng, "settings": request.sampling}
        if penalties is not None:
            given |= penalties.inputs
        graph = self._graph(SAMPLE if penalties is None else penalties.entry_point)
        token, request.rng = graph.run(logits=as_argument(logits), **given)
        return int(token[0])

    def _graph(self, entry_point: EntryPoint) -> CompiledGraph:
        with self._lock:
            found = self._graphs.get(entry_point.name)
            if found is None:
                (found,) = self._compile(*sampler_spec(self._vocab, entry_point)).values()
                self._graphs[entry_point.name] = found
            return found


@contextmanager
def _changed(logits: Any, changes: Sequence[tuple[int, Penalties]]) -> Iterator[None]:
    """Penalties and biases applied to rows of logits, inside the context."""
    if not changes:
        yield
        return
    found = [(row * logits.shape[1] + p.changes[0], *p.changes[1:]) for row, p in changes]
    at, factor, bias = (np.concatenate(each) for each in zip(*found, strict=True))
    flat = logits.reshape(-1)
    before = flat[at]
    flat[at] = np.where(before > 0, before / factor, before * factor) + bias
    try:
        yield
    finally:
        flat[at] = before
