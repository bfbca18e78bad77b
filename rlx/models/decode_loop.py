"""One token after another through a decode graph, at the least cost in Python."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from typing import Any

from rlx.backends.chain import Chain, Links
from rlx.models.sampling import Penalties
from rlx.runtime.compiled import CompiledGraph


class Step:
    """A decode graph whose small inputs and results stay in its arena.

    After native code has streamed a model's weights, every Python object is out of the caches: what
    is looked up, checked and allocated for each token is dear, and a memoryview is the least.
    """

    def __init__(self, graph: CompiledGraph) -> None:
        self._graph, self._sizes = graph, {"past_seq": 0}
        self._none = dict.fromkeys(graph.input_names)
        self._ids, self._rng, self._settings, self._token, self._after = (
            memoryview(graph.slot(name).reshape(-1))
            for name in ("ids", "rng", "settings", "token", "rng_next")
        )
        self.logits = graph.slot("logits")  # valid until the next run
        self._rng_given: Any = None
        self._settings_given: Any = None

    def run(
        self, token: int, past: int, rng: Any, settings: Any, penalties: Penalties
    ) -> tuple[int, Any]:
        """The token drawn after this one, and the rng after that."""
        self._write(token, past, rng, settings)
        self._graph.run_slots(*(self._none | penalties.inputs).values(), sizes=self._sizes)
        return self._token[0], self._after.tolist()

    def run_several(
        self, token: int, past: int, rng: Any, settings: Any, count: int, ends: Collection[int]
    ) -> tuple[list[int], Any]:
        """The same for up to `count` tokens, each after the one before, until one is an end."""
        self._write(token, past, rng, settings)
        drawn = self._graph.run_chain(self._chain, self._sizes, count, ends)
        self._rng_given = self._after.tolist()  # the chain has moved it to its place already
        return drawn, self._rng_given

    @cached_property
    def _chain(self) -> Chain:
        return self._graph.chain(Links({"ids": "token", "rng": "rng_next"}, "token", "past_seq"))

    def _write(self, token: int, past: int, rng: Any, settings: Any) -> None:
        self._ids[0], self._sizes["past_seq"] = token, past
        if rng is not self._rng_given:
            self._rng[0], self._rng[1] = self._rng_given = rng
        if settings is not self._settings_given:
            self._settings[:] = self._settings_given = settings
