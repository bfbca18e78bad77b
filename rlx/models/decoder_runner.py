"""Runs the tokens of one sequence through a language model: prefill, decode loop, KV cache."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from rlx.backends.buffer import Buffer, Mirror
from rlx.backends.decode_loop import DecodeLoop, LoopSpec
from rlx.backends.registry import get_backend
from rlx.ir.binding import UpTo
from rlx.ir.op import Array
from rlx.ir.phase import Phase
from rlx.models.adapters import Adapter
from rlx.models.batch.step_result import DeviceRows
from rlx.models.builder import (
    HIDDEN,
    LOGITS,
    SAMPLE,
    SAMPLES,
    BuiltGraph,
    EntryPoint,
    build_graph,
)
from rlx.models.bundle import BundlePlan, EntryPointSpec, ModelBundle
from rlx.models.device_draws import Constrained, DeviceDraws, device_specs, finds, takes
from rlx.models.engine_lock import EngineLock
from rlx.models.generation import top_logprobs
from rlx.models.model_file import ModelFile
from rlx.models.model_runner import ModelRunner, compile_options, share_states
from rlx.models.recurrent import CARRIED
from rlx.models.rope_tables import LONG_ROPE
from rlx.models.sampling import Penalties
from rlx.models.weights import Weights
from rlx.runtime.compiled import CompiledGraph
from rlx.specialize.variant import ModelVariant

CHUNK = 512  # tokens of a prompt that run at once
LONG = 512  # tokens of a sequence for which huge pages of KV cache pay


_Begin = Callable[[], Callable[[], CompiledGraph]]


class DecoderExecutables:
    """The executables of an entry point: prefill, and decode with its small inputs in the arena.

    After native code has streamed a model's weights, no Python object is in the CPU's caches: every
    lookup, check and allocation per token is slow, and a memoryview is the cheapest.
    """

    def __init__(self, prefill: CompiledGraph, compile_decode: _Begin) -> None:
        """`compile_decode` begins to compile decode, and gives what waits for it."""
        self.prefill, self._compile_decode = prefill, compile_decode
        self._compiled_decode: Callable[[], CompiledGraph] | None = None
        self._bound: CompiledGraph | None = None  # the graph that the slots are those of
        self._sizes = {"past_seq": 0}
        self._loop: DecodeLoop | None = None
        self._rng_given: Any = None
        self._settings_given: Any = None

    def begin_decode(self) -> None:
        """Compile decode, if it is not, while the caller goes on."""
        if self._compiled_decode is None:
            self._compiled_decode = self._compile_decode()

    def of(self, count: int) -> CompiledGraph:
        """The one for so many tokens."""
        return self.decode if count == 1 else self.prefill

    @cached_property
    def decode(self) -> CompiledGraph:
        self.begin_decode()
        assert self._compiled_decode is not None
        return self._compiled_decode()

    def _bind(self) -> None:
        graph = self._bound = self.decode
        self._loop = None
        self._no_inputs = dict.fromkeys(graph.input_names)
        names = ("ids", "rng", "settings", "token", "rng_next")
        mirrors = [Mirror(graph.slot_buffer(name)) for name in names]
        self._ids, self._rng, self._settings, self._token, self._rng_next = (
            memoryview(mirror.array.reshape(-1)) for mirror in mirrors
        )
        # none where the slots are host memory: then they are written and read in place
        copied = [] if graph.allocator.is_host else mirrors
        self._copied_in = copied[:3]
        self._copied_out = copied[1:2] + copied[3:]  # a loop leaves its rng in the input's slot
        self._logits = Mirror(graph.slot_buffer("logits"))

    @property
    def logits(self) -> Array:
        """Those of the last run; valid until the next one."""
        return self._logits.pull()

    def run(
        self, token: int, past: int, rng: Any, settings: Any, penalties: Penalties
    ) -> tuple[int, Any]:
        """Run one token. Returns the token drawn next and the new RNG state."""
        self._write(token, past, rng, settings)
        self.decode.run_slots(*(self._no_inputs | penalties.inputs).values(), sizes=self._sizes)
        for mirror in self._copied_out:
            mirror.pull()
        return self._token[0], self._rng_next.tolist()

    def run_n(
        self, token: int, past: int, rng: Any, settings: Any, count: int, ends: Collection[int]
    ) -> tuple[list[int], Any]:
        """Decode up to `count` tokens in one native call, stopping at any id in `ends`."""
        self._write(token, past, rng, settings)
        if self._loop is None:
            carried = {"ids": "token", "rng": "rng_next"}
            self._loop = self.decode.decode_loop(LoopSpec(carried, "token", "past_seq"))
        drawn = self.decode.run_loop(self._loop, self._sizes, count, ends)
        for mirror in self._copied_out:
            mirror.pull()
        self._rng_given = self._rng_next.tolist()  # the loop has carried it to the input already
        return drawn, self._rng_given

    def _write(self, token: int, past: int, rng: Any, settings: Any) -> None:
        if self._bound is not self.decode:
            self._bind()
        self._ids[0], self._sizes["past_seq"] = token, past
        if rng is not self._rng_given:
            self._rng[0], self._rng[1] = self._rng_given = rng
        if settings is not self._settings_given:
            self._settings[:] = self._settings_given = settings
        for mirror in self._copied_in:
            mirror.push()


class DecoderRunner(ModelRunner):
    """Runs tokens and holds the KV cache. Not safe for several threads: see `lock`."""

    def __init__(
        self,
        model: ModelFile,
        *,
        device: str = "cpu",
        context: int | None = None,
        kv: str = "f16",
        threads: int | None = None,
        chunk: int = CHUNK,
        bundle: ModelBundle | None = None,
        batch_invariant: bool = False,
    ) -> None:
        """`bundle` has executables compiled elsewhere, for this context, KV cache and chunk."""
        options = compile_options(threads, batch_invariant)
        super().__init__(
            model, device=device, options=options, packing=model.packing, bundle=bundle
        )
        self.context = model.config.context_length(context)
        self.kv, self.chunk = kv, min(chunk, self.context)
        self.lock = EngineLock()
        self.tokens: list[int] = []  # those in the KV cache
        self._ran: CompiledGraph  # what has the newest logits
        self._last_logits: Any = None  # an array, or the executables that hold them
        self.adapter: Adapter | None = None
        self._states: dict[str, Buffer] = {}
        self._switch = model.config.rope.switches_at(self.context)  # of longrope; 0: none
        self._is_long = False
        self._has_long = False  # whether a sequence was long
        self._adapted: dict[str, list[CompiledGraph]] = {}  # by the shape of adapters
        self._by_entry_point: dict[str, DecoderExecutables] = {}
        self._verifiers: dict[str, CompiledGraph] = {}
        self._long_chunk = min(
            get_backend(device).long_chunk if bundle is None else 0, self.context
        )
        self._long: dict[str, CompiledGraph] = {}  # executables for so much of a long prompt

    # -- executables --------------------------------------------------------------------------

    def executables(self, entry_point: EntryPoint, begin: bool = False) -> DecoderExecutables:
        """The executables of an entry point, compiled when it is first used; to `begin`, prefill
        alone, so that the first token does not wait for decode."""
        name = self._named(entry_point)
        found = self._by_entry_point.get(name)
        if found is None:
            found = self._begin(name, entry_point) if begin else None
            found = self._by_entry_point[name] = found or self._whole(name, entry_point)
        return found

    def _whole(self, name: str, entry_point: EntryPoint) -> DecoderExecutables:
        made = self.compile(name, self._spec(entry_point))
        for graph in made.values():
            self._share_states(graph)
        decode = made["decode"]
        return DecoderExecutables(made.get("prefill", decode), lambda: lambda: decode)

    def _begin(self, name: str, entry_point: EntryPoint) -> DecoderExecutables | None:
        """Executables whose decode is compiled later; none where that is not possible."""
        spec = self._spec(entry_point)
        parts = {n: replace(spec, variants={n: variant}) for n, variant in spec.variants.items()}
        if "prefill" not in parts or not get_backend(self.device).allocator.is_host:
            return None
        (prefill,) = self.compile(name, parts["prefill"], store=False).values()
        self._share_states(prefill)

        def compile_decode() -> Callable[[], CompiledGraph]:
            result = self.compile_behind(name, parts["decode"])

            def decode() -> CompiledGraph:
                (graph,) = result().values()
                self._share_states(graph)
                return graph

            return decode

        return DecoderExecutables(prefill, compile_decode)

    def _named(self, entry_point: EntryPoint) -> str:
        """Executables for adapters of one shape have names of their own."""
        if self.adapter is None:
            return entry_point.name
        return f"{entry_point.name} {self.adapter.shape.name}"

    def adapt(self, adapter: Adapter | None) -> None:
        """Run with this adapter from now on, or with none; a change empties the KV cache."""
        if adapter is self.adapter:
            return
        self.adapter, self.tokens = adapter, []
        if adapter is not None:
            for graph in self._adapted.setdefault(adapter.shape.name, []):
                _bind_adapter(graph, adapter)

    @property
    def variants(self) -> dict[str, ModelVariant]:
        """The executables of every entry point: a chunk of a prompt, and one token."""
        past = UpTo(max(self.context - 1, 1))
        found = {"decode": ModelVariant.decode(1, past)}
        if self.chunk > 1:
            found["prefill"] = ModelVariant.decode(1, past, UpTo(self.chunk))
        return found

    def _spec(self, entry_point: EntryPoint) -> EntryPointSpec:
        return EntryPointSpec(partial(self.build, entry_point), self.variants)

    def _verify_spec(self, entry_point: EntryPoint) -> EntryPointSpec:
        """One executable, for as many tokens as are verified at once."""
        past = UpTo(max(self.context - entry_point.tokens, 1))
        variant = ModelVariant.decode(1, past, entry_point.tokens)
        return EntryPointSpec(partial(self.build, entry_point), {entry_point.name: variant})

    def plan(self, speculate: int = 0) -> BundlePlan:
        """What a bundle of this model holds; `speculate` is the number of draft tokens."""
        specs = {e.name: self._spec(e) for e in (*SAMPLES, LOGITS, HIDDEN)}
        if speculate:
            verify = EntryPoint("verify", speculate + 1)
            specs[verify.name] = self._verify_spec(verify)
        if self._draws is not None:
            specs |= device_specs(self.model.config.vocab, 1)
        quant = None if self.model.quant is None else self.model.quant.name
        settings = {"context": self.context, "kv": self.kv, "chunk": self.chunk, "quant": quant}
        return BundlePlan("language", specs, settings)

    @cached_property
    def _weights(self) -> Weights:
        return self.model.weights()

    def build(self, entry_point: EntryPoint) -> BuiltGraph:
        """The graph of an entry point; a runner of an edited graph overrides it."""
        shape = None if self.adapter is None else self.adapter.shape
        return build_graph(
            self.model, self._weights, entry_point, context=self.context, kv=self.kv,
            adapters=shape,
        )  # fmt: skip

    def _share_states(self, graph: CompiledGraph) -> None:
        """Bind the one KV cache of all executables, and the adapter in use."""
        if self.adapter is not None:
            _bind_adapter(graph, self.adapter)
            self._adapted[self.adapter.shape.name].append(graph)
        own = () if self.adapter is None else self.adapter.states
        known = set(self._states)
        share_states(graph, self._states, besides=own)
        # the first tokens of every head lie in pages of their own: huge ones would be all of it
        for name in self._states.keys() - known:
            self._states[name].use_huge_pages(self._has_long)

    def _expect(self, length: int) -> None:
        """Ask for huge pages of KV cache once a sequence is long."""
        if length >= LONG and not self._has_long:
            self._has_long = True
            for state in self._states.values():
                state.use_huge_pages(True)

    # -- running ------------------------------------------------------------------------------

    def reuse_prefix(self, prompt: Sequence[int]) -> int:
        """Truncate the KV cache to its common prefix with `prompt`; returns its length."""
        shared = 0
        for a, b in zip(self.tokens, prompt, strict=False):
            if a != b:
                break
            shared += 1
        shared = min(shared, len(prompt) - 1)  # the last token must run: its logits are wanted
        if self.model.config.recurrent is not None and shared < len(self.tokens):
            shared = 0  # a recurrent state cannot be rewound
        del self.tokens[shared:]
        return shared

    def check(self, tokens: Sequence[int], overflow: str = "error") -> None:
        """Raise for tokens that cannot be run; with "shift", there may be more than the context."""
        most = self.context if overflow == "error" else None
        hint = 'load the model with a larger context=, or use overflow="shift"'
        self.model.config.check_tokens(tokens, most, hint)

    def _past(self) -> int:
        """The length of the KV cache; an empty one resets recurrent states."""
        if not self.tokens:
            for name, state in self._states.items():
                if name.startswith(CARRIED):
                    state.zero()
            if self._switch and LONG_ROPE in self._states:
                self._states[LONG_ROPE].copy_in(np.array([self._is_long], np.int32))
        return len(self.tokens)

    def before_switch(self) -> int:
        """Tokens that can run before longrope has other factors; as many as fit where none are."""
        return (self.context if self._is_long else self._switch or self.context) - len(self.tokens)

    def _lengthened(self, tokens: Sequence[int]) -> Sequence[int]:
        """The tokens to run for `tokens` to follow: all, where longrope has other factors for so
        long a sequence."""
        is_long = bool(self._switch) and len(self.tokens) + len(tokens) > self._switch
        if is_long == self._is_long:
            return tokens
        before, self.tokens, self._is_long = self.tokens, [], is_long
        return [*before, *tokens]

    def step(
        self, tokens: Sequence[int], rng: Any, settings: Any, penalties: Penalties | None = None
    ) -> tuple[int, Any]:
        """Run `tokens` after the KV cache. Returns the token drawn next and the new RNG state."""
        tokens = self._lengthened(tokens)
        self._expect(len(self.tokens) + len(tokens))
        if len(tokens) == 1 and penalties is None:
            drawn, after = self.decode_n(tokens[0], rng, settings, 1, ())
            return drawn[0], after
        entry_point = SAMPLE if penalties is None else penalties.entry_point
        if penalties is not None and self._draws is not None and takes(penalties):
            return self._drawn(tokens, rng, settings, penalties)
        graphs = self.executables(entry_point, begin=len(tokens) > 1)
        if len(tokens) == 1 and penalties is not None:
            found = graphs.run(tokens[0], self._past(), rng, settings, penalties)
            self.tokens.append(tokens[0])
            self._last_logits = graphs
            return found
        given: dict[str, Any] = {"rng": np.array(rng, np.uint64), "settings": settings}
        if penalties is not None:
            given |= penalties.inputs
        results: tuple[Any, ...] = ()
        start = 0
        while start < len(tokens):
            graph, most = self._prefill(entry_point, graphs, len(tokens) - start)
            part = tokens[start : start + most]
            start += len(part)
            until = Phase.STEADY_STATE if start < len(tokens) else None  # or a token is sampled
            results = self._run_chunk(graph, part, given, until)
        token, after, self._last_logits = results
        graphs.begin_decode()
        return int(token[0]), after

    @cached_property
    def _draws(self) -> DeviceDraws | None:
        """Draws with penalties and grammars, where logits stay on a device."""
        if get_backend(self.device).allocator.is_host:
            return None
        return DeviceDraws(self.model.config.vocab, 1, self.compile)

    def _drawn(
        self, tokens: Sequence[int], rng: Any, settings: Any, penalties: Penalties
    ) -> tuple[int, Any]:
        """A step whose own draw does not count."""
        _, after = self.step(tokens, rng, settings)
        assert self._draws is not None
        asked = [Constrained(penalties, rng, settings)]
        return (self._draws.draw(self._device_logits(), [0], asked) or [0])[0], after

    def _device_logits(self) -> DeviceRows:
        """Those of the last run, where they are."""
        return DeviceRows(self._ran.slot_buffer("logits"), 0, 1)

    def logprobs(self, token: int, count: int) -> dict[int, float]:
        """Log probabilities behind the last run: of the likeliest tokens, and of `token`."""
        if self._draws is None or not finds(count):
            return top_logprobs(self.last_logits.reshape(-1), token, count)
        return self._draws.logprobs(self._device_logits(), [0], [token], [count])[0]

    def _prefill(
        self, entry_point: EntryPoint, graphs: DecoderExecutables, count: int
    ) -> tuple[CompiledGraph, int]:
        """What runs the first of so many tokens, and how many of them."""
        if count <= self.chunk or self._long_chunk <= self.chunk:
            return graphs.of(min(count, self.chunk)), self.chunk
        name = self._named(entry_point) + " long"
        if name not in self._long:
            variant = ModelVariant.decode(1, UpTo(self.context - 1), UpTo(self._long_chunk))
            spec = EntryPointSpec(partial(self.build, entry_point), {"prefill": variant})
            (graph,) = self.compile(name, spec).values()
            self._share_states(graph)
            self._long[name] = graph
        return self._long[name], self._long_chunk

    def _run_chunk(
        self, graph: CompiledGraph, tokens: Sequence[int], given: dict[str, Any],
        until: Phase | None = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        ids, sizes = np.array([tokens], np.int32), {"past_seq": self._past()}
        self._ran = graph
        results: tuple[Any, ...] = graph.run(ids=ids, sizes=sizes, until=until, **given)
        self.tokens.extend(tokens)
        return results

    def decode_n(
        self, token: int, rng: Any, settings: Any, count: int, ends: Collection[int]
    ) -> tuple[list[int], Any]:
        """Decode up to `count` tokens after `token` in one native call, stopping at any id in
        `ends`. Returns the ids and the new RNG state."""
        if self._switch:
            tokens = self._lengthened([token])
            if len(tokens) > 1:
                found, after = self.step(tokens, rng, settings)
                return [found], after
            count = min(count, self.before_switch())
        graphs = self.executables(SAMPLE)
        self._ran = graphs.decode
        drawn, after = graphs.run_n(token, self._past(), rng, settings, count, ends)
        self.tokens.append(token)
        self.tokens += drawn[:-1]
        self._last_logits = graphs
        return drawn, after

    def verify_draft(self, tokens: Sequence[int], rng: Any, settings: Any) -> list[int]:
        """The token drawn after each of `tokens`, in one run. The KV cache keeps its length."""
        entry_point = EntryPoint("verify", len(tokens))
        name = self._named(entry_point)
        if name not in self._verifiers:
            (graph,) = self.compile(name, self._verify_spec(entry_point)).values()
            self._share_states(graph)
            self._verifiers[name] = graph
        given = {"ids": np.array([tokens], np.int32), "rng": np.array(rng, np.uint64)}
        sizes = {"past_seq": len(self.tokens)}
        (drawn,) = self._verifiers[name].run(given, sizes=sizes, settings=settings)
        return [int(token) for token in drawn]

    def rows(self, tokens: Sequence[int], entry_point: EntryPoint = LOGITS) -> Any:
        """Logits or hidden states of every token, [n, …]; they replace the KV cache."""
        self.check(tokens)
        self._expect(len(tokens))
        graphs = self.executables(entry_point)
        self.tokens = []
        self._lengthened(tokens)
        parts = (list(tokens[i : i + self.chunk]) for i in range(0, len(tokens), self.chunk))
        found = [self._run_chunk(graphs.of(len(part)), part, {})[0][0] for part in parts]
        return np.concatenate(found)

    def outputs(self, entry_point: EntryPoint, tokens: Sequence[int]) -> dict[str, Array]:
        """All outputs of one chunk of tokens by name; they replace the KV cache."""
        self.check(tokens)
        graphs = self.executables(entry_point)
        self.tokens = []
        tokens = self._lengthened(tokens)
        results = self._run_chunk(graphs.of(len(tokens)), tokens, {})
        return dict(zip(graphs.prefill.output_names, results, strict=True))

    @property
    def last_logits(self) -> Any:
        """Logits of the last token that ran; copied from the device when they are asked for."""
        found = self._last_logits
        return found.logits if isinstance(found, DecoderExecutables) else found

    @property
    def cache_bytes(self) -> int:
        """The size of all states; 0 before the first run."""
        return sum(int(state.nbytes) for state in self._states.values())

    def close(self) -> None:
        """Free executables, weights and KV cache."""
        self._by_entry_point.clear()
        self._verifiers.clear()
        self._long.clear()
        self._adapted.clear()
        self._states.clear()
        self.tokens.clear()
        super().close()


def _bind_adapter(graph: CompiledGraph, adapter: Adapter) -> None:
    """Bind the states of a graph for adapters of this shape to those of this one."""
    for state in graph.manifest.states:
        if state.name in adapter.states:  # an entry point without a head has no state for it
            graph.bind_state(state.name, adapter.buffers(graph.allocator)[state.name])
