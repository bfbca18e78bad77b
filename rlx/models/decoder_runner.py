"""A loaded model that can run tokens: executables for prefill and decode, and one cache."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np

from rlx.ir.binding import UpTo
from rlx.ir.phase import Phase
from rlx.models.adapters import Adapter
from rlx.models.build_graph import DRAWS, Described, ModelFile, describe
from rlx.models.bundle import Plan, Recipe, Shipped
from rlx.models.decode_loop import Step
from rlx.models.engine_lock import Turns
from rlx.models.limits import check_tokens, context_length
from rlx.models.model_runner import Executables, share_states
from rlx.models.recurrent import CARRIED
from rlx.models.sampling import Penalties
from rlx.models.weights import Weights
from rlx.records import dataclass
from rlx.runtime.compiled import CompiledGraph
from rlx.specialize.options import CompileOptions
from rlx.specialize.variant import ModelVariant

CHUNK = 512  # tokens of a prompt that run at once
KINDS = (*DRAWS, "logits", "hidden")


@dataclass
class Use:
    """One way to use the model: its executables, sharing parameters and cache with the others."""

    prefill: CompiledGraph
    decode: CompiledGraph

    @cached_property
    def step(self) -> Step:
        return Step(self.decode)


class Engine:
    """Runs tokens through a model and keeps the cache. Not safe for several threads: see `lock`."""

    def __init__(
        self,
        model: ModelFile,
        *,
        device: str = "cpu",
        context: int | None = None,
        kv: str = "f16",
        threads: int | None = None,
        chunk: int = CHUNK,
        shipped: Shipped | None = None,
    ) -> None:
        """`shipped` has executables made elsewhere, for this context, cache and chunk."""
        self.model = model
        self.context = context_length(model.config, context)
        self.kv, self.chunk = kv, min(chunk, self.context)
        self.lock = Turns()
        self.tokens: list[int] = []  # what the cache holds
        options = CompileOptions(threads=threads)
        self._executables = Executables(
            model.file, device, options, *model.packing, shipped=shipped
        )
        self._weights: Weights = model.weights()
        self._states: dict[str, Any] = {}
        self.adapter: Adapter | None = None
        self._adapted: dict[str, list[CompiledGraph]] = {}  # by the form of adapters
        self._uses: dict[str, Use] = {}
        self._guessing: dict[str, CompiledGraph] = {}

    def use(self, kind: str) -> Use:
        """The executables for a use of `describe`, made the first time."""
        name = self._named(kind)
        if name not in self._uses:
            made = self._executables.make(name, self._recipe(kind))
            for graph in made.values():
                self._share_states(graph)
            self._uses[name] = Use(made.get("prefill", made["decode"]), made["decode"])
        return self._uses[name]

    def _named(self, kind: str) -> str:
        """A use with adapters of one form is a use of its own."""
        return kind if self.adapter is None else f"{kind} {self.adapter.form.name}"

    def adapt(self, adapter: Adapter | None) -> None:
        """Run with this adapter from now on, or with none; what another one cached is forgotten."""
        if adapter is self.adapter:
            return
        self.adapter, self.tokens = adapter, []
        if adapter is not None:
            for graph in self._adapted.setdefault(adapter.form.name, []):
                _bind(graph, adapter)

    @property
    def variants(self) -> dict[str, ModelVariant]:
        """The executables of every use: a part of a prompt, and one token after it."""
        past = UpTo(max(self.context - 1, 1))
        found = {"decode": ModelVariant.decode(1, past)}
        if self.chunk > 1:
            found["prefill"] = ModelVariant.decode(1, past, UpTo(self.chunk))
        return found

    def _recipe(self, kind: str) -> Recipe:
        return Recipe(partial(self.describe, kind), self.variants)

    def _guess_recipe(self, count: int) -> Recipe:
        """A run that draws a token after each of `count`."""
        past, use = UpTo(max(self.context - count, 1)), f"guess {count}"
        return Recipe(partial(self.describe, use), {use: ModelVariant.decode(1, past, count)})

    def plan(self, speculate: int = 0) -> Plan:
        """What is compiled to run this model elsewhere, guessing so many tokens ahead."""
        uses = {kind: self._recipe(kind) for kind in KINDS}
        if speculate:
            uses[f"guess {speculate + 1}"] = self._guess_recipe(speculate + 1)
        quant = None if self.model.quant is None else self.model.quant.name
        facts = {"context": self.context, "kv": self.kv, "chunk": self.chunk, "quant": quant}
        return Plan("language", uses, facts)

    def describe(self, kind: str) -> Described:
        """The graph and parameters of a use; an engine for an edited graph has another one."""
        form = None if self.adapter is None else self.adapter.form
        return describe(self.model, self._weights, self.context, self.kv, kind, form)

    def _share_states(self, graph: CompiledGraph) -> None:
        """One cache for all executables, and the adapter in use."""
        if self.adapter is not None:
            _bind(graph, self.adapter)
            self._adapted[self.adapter.form.name].append(graph)
        own = () if self.adapter is None else self.adapter.states
        share_states(graph, self._states, besides=own)

    # -- running ------------------------------------------------------------------------------

    def keep(self, prompt: Sequence[int]) -> int:
        """Forget what the cache holds beyond its common beginning with `prompt`; how much stays."""
        shared = 0
        for a, b in zip(self.tokens, prompt, strict=False):
            if a != b:
                break
            shared += 1
        shared = min(shared, len(prompt) - 1)  # the last token must run: its logits are wanted
        if self.model.config.recurrent is not None and shared < len(self.tokens):
            shared = 0  # a recurrent state cannot be taken back to an earlier token
        del self.tokens[shared:]
        return shared

    def check(self, tokens: Sequence[int], overflow: str = "error") -> None:
        """Raise for tokens that cannot be run; with "shift", there may be more than the context."""
        most = self.context if overflow == "error" else None
        hint = 'load the model with a larger context=, or use overflow="shift"'
        check_tokens(self.model.config, tokens, most, hint)

    def _past(self) -> int:
        """How many tokens come before those of the next run; before any, recurrent states are 0."""
        if not self.tokens:
            for name, state in self._states.items():
                if name.startswith(CARRIED):
                    state.fill(0)
        return len(self.tokens)

    def feed(
        self, tokens: Sequence[int], rng: Any, settings: Any, penalties: Penalties | None = None
    ) -> tuple[int, Any]:
        """Run `tokens` after what the cache holds; the token drawn next, and the rng after it."""
        if len(tokens) == 1 and penalties is None:
            drawn, after = self.go_on(tokens[0], rng, settings, 1, ())
            return drawn[0], after
        use = self.use("sample" if penalties is None else penalties.use)
        if len(tokens) == 1 and penalties is not None:
            found = use.step.run(tokens[0], self._past(), rng, settings, penalties)
            self.tokens.append(tokens[0])
            self.last_logits = use.step.logits
            return found
        given: dict[str, Any] = {"rng": np.array(rng, np.uint64), "settings": settings}
        if penalties is not None:
            given |= penalties.inputs
        results: tuple[Any, ...] = ()
        for start in range(0, len(tokens), self.chunk):
            part = tokens[start : start + self.chunk]
            graph = use.decode if len(part) == 1 else use.prefill
            ids = np.array([part], np.int32)
            sizes = {"past_seq": self._past()}
            more = start + self.chunk < len(tokens)  # then nothing is drawn yet
            until = Phase.STEADY_STATE if more else None
            results = graph.run(ids=ids, sizes=sizes, until=until, **given)
            self.tokens.extend(part)
        token, after, self.last_logits = results
        return int(token[0]), after

    def go_on(
        self, token: int, rng: Any, settings: Any, count: int, ends: Collection[int]
    ) -> tuple[list[int], Any]:
        """Run `token`, and then what is drawn, up to `count` tokens or to one of `ends`: all that
        was drawn, and the rng after it. Nothing is seen of them meanwhile, so a token costs less.
        """
        step = self.use("sample").step
        drawn, after = step.run_several(token, self._past(), rng, settings, count, ends)
        self.tokens.append(token)
        self.tokens += drawn[:-1]
        self.last_logits = step.logits
        return drawn, after

    def check_guesses(self, tokens: Sequence[int], rng: Any, settings: Any) -> list[int]:
        """What the model draws after each of `tokens`, were they all right; none is kept."""
        count = len(tokens)
        name = self._named(f"guess {count}")
        if name not in self._guessing:
            (graph,) = self._executables.make(name, self._guess_recipe(count)).values()
            self._share_states(graph)
            self._guessing[name] = graph
        given = {"ids": np.array([tokens], np.int32), "rng": np.array(rng, np.uint64)}
        sizes = {"past_seq": len(self.tokens)}
        (drawn,) = self._guessing[name].run(given, sizes=sizes, settings=settings)
        return [int(token) for token in drawn]

    def rows(self, tokens: Sequence[int], kind: str = "logits") -> Any:
        """What the use "logits" or "hidden" gives for every token, [n, …]."""
        self.check(tokens)
        use = self.use(kind)
        self.tokens = []
        rows = []
        for start in range(0, len(tokens), self.chunk):
            part = list(tokens[start : start + self.chunk])
            graph = use.decode if len(part) == 1 else use.prefill
            (found,) = graph.run(ids=np.array([part], np.int32), sizes={"past_seq": self._past()})
            self.tokens.extend(part)
            rows.append(found[0])
        return np.concatenate(rows)

    @property
    def cache_bytes(self) -> int:
        """Of all states; none before the first run."""
        return sum(int(state.nbytes) for state in self._states.values())

    def close(self) -> None:
        """Let go of executables, weights and cache."""
        self._uses.clear()
        self._guessing.clear()
        self._adapted.clear()
        self._states.clear()
        self.tokens.clear()
        self._executables.close()
        self.model.file.close()


def _bind(graph: CompiledGraph, adapter: Adapter) -> None:
    """Let a graph for adapters of this form run with this one."""
    for state in graph.manifest.states:
        if state.name in adapter.states:  # a use without a head has no state for its adapter
            graph.bind_state(state.name, adapter.states[state.name])
