"""The paged KV cache that requests share: its sizes, and the executables compiled for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from rlx.backends.registry import get_backend
from rlx.errors import InputError, UnsupportedError
from rlx.ir.binding import Size, UpTo
from rlx.ir.dim import sym
from rlx.ir.module import GraphModule
from rlx.models.adapters import Adapter, AdapterShape, common_shape
from rlx.models.arguments import require_count
from rlx.models.batch.paged_builder import PAGE, PagedDecoderBuilder
from rlx.models.builder import SAMPLES, BuiltGraph, EntryPoint, Tensor, define_graph, sample
from rlx.models.bundle import EntryPointSpec
from rlx.models.config import KVCacheType
from rlx.models.device_draws import device_specs
from rlx.models.model_file import ModelFile
from rlx.specialize.variant import ModelVariant
from rlx.support.records import dataclass

NAME = "requests"
REQUESTS = 8  # at once, unless another number is asked for
MOST_REQUESTS = 1 << 16
CHUNK = 512  # tokens of prompts in a run, at most
MOST_DRAFTS = 32  # tokens of speculative decoding in a run, of all requests
MIXED_CHUNK = 128  # beside decodes, before runs are measured
_WIDTHS = (1, 4, 8, 64)  # tokens of a run for which devices have executables of their own
_EXACT = 8  # up to so many, code for exactly so many rows reads weights at the memory's bandwidth


@dataclass(frozen=True)
class KVPool:
    """How many requests share how much KV cache. Executables depend on all of it."""

    model: ModelFile
    requests: int
    context: int  # tokens of a request
    kv: KVCacheType
    slots: int  # tokens of all of them, whole pages
    adapters: tuple[Adapter, ...] = ()  # a request has one of them, or none
    draws: bool = False  # whether runs draw tokens too, so that logits stay where they are

    @staticmethod
    def of(
        model: ModelFile, *, requests: int | None = None, context: int | None = None,
        cache_tokens: int | None = None, kv: str | None = None, memory: int | None = None,
        adapters: Sequence[Adapter] = (), device: str = "cpu",
    ) -> KVPool:  # fmt: skip
        """Checked, with defaults for what is not given; `memory` is the most that it may take."""
        draws = not get_backend(device).allocator.is_host
        config = model.config
        requests, kv = REQUESTS if requests is None else requests, kv or "f16"
        require_count("requests", requests, most=MOST_REQUESTS)
        if cache_tokens is not None:
            require_count("cache_tokens", cache_tokens)
        cache = KVCacheType.of(kv, config.head_dim)
        length = config.context_length(context)
        if switch := config.rope.switches_at(length):
            raise UnsupportedError(
                "requests are not batched beyond the original context of longrope",
                where="context", got=length, expected=f"at most {switch}",
                hint="load the model with rlx.load, for one request at a time",
            )  # fmt: skip
        wanted = requests * length if cache_tokens is None else cache_tokens
        pool = KVPool(model, requests, length, cache, _whole(wanted), tuple(adapters), draws)
        return pool if memory is None else pool._within(memory, cache_tokens is not None)

    def _within(self, memory: int, asked: bool) -> KVPool:
        fits = memory // self.token_bytes
        if not asked and self.slots > fits:
            # a power of two: free memory differs a little at every start, and executables on disk
            # are for one number of pages
            pages = 1 << max((fits // PAGE).bit_length() - 1, 0)
            return replace(self, slots=pages * PAGE)
        if not 0 < self.slots <= max(fits, PAGE):
            raise InputError(
                "memory would not suffice for the cache", where="cache_tokens", got=self.slots,
                expected=f"1 … {fits}", hint="half of the free memory at most is used for it",
            )  # fmt: skip
        return self

    @property
    def token_bytes(self) -> int:
        """Bytes of KV cache per token."""
        c = self.model.config
        return 2 * c.layers * c.kv_heads * self.kv.row_bytes(c.head_dim)

    @property
    def most_tokens(self) -> int:
        """The most tokens of a run."""
        return max(CHUNK, MIXED_CHUNK + self.requests + self.drafts)

    @property
    def drafts(self) -> int:
        """The most draft tokens that a run verifies."""
        if self.model.config.recurrent is not None:
            return 0  # a recurrent state cannot be rewound
        return min(MOST_DRAFTS, 16 * self.requests)

    @property
    def spec(self) -> EntryPointSpec:
        """One executable for any number of tokens: on the host it is as fast as one for exactly so
        many. Devices have more for few tokens. Where there are recurrent layers, one for a token of
        each request, one for a chunk of a prompt."""
        if self.model.config.recurrent is not None:
            decode = ModelVariant(seq=1).with_extra("runs", UpTo(self.requests))
            prefill = ModelVariant(seq=UpTo(CHUNK)).with_extra("runs", 1)
            variants = {"decode": decode, "prefill": prefill}
            picked = UpTo(self.requests)
            return EntryPointSpec(
                self._build, {n: v.with_extra("picked", picked) for n, v in variants.items()}
            )
        variant = ModelVariant(seq=UpTo(self.most_tokens))
        variants = {"any": variant.with_extra("picked", UpTo(self.picked))}
        if self.draws:
            for count in self.widths:
                size: Size = count if count <= _EXACT else UpTo(count)
                variants[str(count)] = ModelVariant(seq=size).with_extra("picked", size)
        return EntryPointSpec(self._build, variants)

    @property
    def widths(self) -> list[int]:
        """Tokens of the executables for few of them: up to `_EXACT` exactly so many, and others
        are repeated; then at most so many."""
        return [n for n in _WIDTHS if n == 1 or n < 2 * self.requests]

    @cached_property
    def adapter_shape(self) -> AdapterShape | None:
        """The shape that all adapters fit."""
        return common_shape(self.adapters) if self.adapters else None

    @property
    def entry_point(self) -> str:
        """The name of the entry point; adapters of one shape have their own."""
        shape = self.adapter_shape
        return NAME if shape is None else f"{NAME} {len(self.adapters)} {shape.name}"

    def _build(self) -> BuiltGraph:
        """The model for tokens of many sequences: logits of the tokens that are picked."""

        def build(g: GraphModule) -> tuple[PagedDecoderBuilder, dict[str, Tensor]]:
            arch = self.model.arch
            weights, many = self.model.weights(), len(self.adapters)
            net = PagedDecoderBuilder(
                g, self.model.config, weights, self.context, self.kv, self.slots, self.requests,
                many, lora=self.adapter_shape,
            )  # fmt: skip
            x = net.pick(net.layers(arch, arch.embed(net, net.ids())))
            logits = net.head(x, last_only=False)
            if not self.draws:
                return net, {"logits": logits}
            rows = logits.reshape(sym("picked"), self.model.config.vocab)
            return net, {"logits": logits, "tokens": _draw_rows(g, rows)}

        return define_graph(self.model.config.arch, build)

    def plan(self) -> dict[str, EntryPointSpec]:
        """All that is compiled, by the name of the entry point."""
        samplers = dict(sampler_spec(self.model.config.vocab, e) for e in SAMPLES)
        name, spec = self.rows_sampler
        rows = {name: spec}
        if self.draws:
            rows = device_specs(self.model.config.vocab, self.picked)
        return {self.entry_point: self.spec, **rows, **samplers}

    @property
    def picked(self) -> int:
        """The most rows of logits of a run."""
        return self.requests + self.drafts

    @property
    def rows_sampler(self) -> tuple[str, EntryPointSpec]:
        """The name and the graph that draws a token from each row of logits [picked, vocab]."""

        def build() -> BuiltGraph:
            def draw(g: GraphModule) -> dict[str, Tensor]:
                logits = g.input("logits", ["picked", self.model.config.vocab])
                return {"tokens": _draw_rows(g, logits)}

            return BuiltGraph(GraphModule.define("draw", draw), {})

        variant = ModelVariant().with_extra("picked", UpTo(self.picked))
        return "rows-sample", EntryPointSpec(build, {"rows": variant})


def _draw_rows(g: GraphModule, logits: Tensor) -> Tensor:
    """A token for each row of logits [picked, vocab], with its own settings and random numbers."""
    rng, settings = g.input("rng", ["picked", 2], "u64"), g.input("settings", ["picked", 4])
    return g.sample(logits, rng, settings)[0]


def sampler_spec(vocab: int, entry_point: EntryPoint) -> tuple[str, EntryPointSpec]:
    """The name and the graph that draws a token from logits [1, vocab] as an entry point does."""

    def build() -> BuiltGraph:
        def draw(g: GraphModule) -> dict[str, Tensor]:
            return sample(g, g.input("logits", [1, vocab]), entry_point)

        return BuiltGraph(GraphModule.define("draw", draw), {})

    return f"row-{entry_point.name}", EntryPointSpec(build, {"row": ModelVariant()})


def _whole(tokens: int) -> int:
    """This many tokens in whole pages."""
    return -(-tokens // PAGE) * PAGE
