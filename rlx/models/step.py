"""One token after another through a decode graph, at the least cost in Python."""

from __future__ import annotations

from typing import Any

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

    def run(
        self, token: int, past: int, rng: Any, settings: Any, penalties: Penalties | None
    ) -> tuple[int, Any]:
        """The token drawn after this one, and the rng after that."""
        self._ids[0] = token
        self._rng[0], self._rng[1] = rng
        self._settings[:] = settings
        self._sizes["past_seq"] = past
        given: Any = ()
        if penalties is not None:
            given = (self._none | penalties.inputs).values()
        self._graph.run_slots(*given, sizes=self._sizes)
        return self._token[0], self._after.tolist()
