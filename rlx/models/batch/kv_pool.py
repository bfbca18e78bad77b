"""The sizes of an engine for many requests, and what is compiled for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from rlx.errors import InputError, OptionError, UnsupportedError
from rlx.ir.binding import UpTo
from rlx.ir.module import GraphModule
from rlx.models.adapters import Adapter, AdapterForm, common_form
from rlx.models.batch.draw import drawing
from rlx.models.batch.paged_builder import PAGE, BatchNet
from rlx.models.build_graph import DRAWS, Described, ModelFile, body, require_adapted
from rlx.models.bundle import Recipe
from rlx.models.decoder_builder import Tensor
from rlx.models.kv_cache import CacheType
from rlx.models.limits import context_length
from rlx.records import dataclass
from rlx.specialize.variant import ModelVariant

USE = "requests"
REQUESTS = 8  # at once, where nobody asks for another number
CHUNK = 512  # tokens of a step, when nobody waits for its next one
BETWEEN = 128  # and when somebody does


@dataclass(frozen=True)
class Pool:
    """How many requests share how much cache. Executables depend on all of it."""

    model: ModelFile
    requests: int
    context: int  # tokens of a request
    kv: CacheType
    slots: int  # tokens of all of them, whole pages
    adapters: tuple[Adapter, ...] = ()  # one of which, or none, each request has

    @staticmethod
    def of(
        model: ModelFile, *, requests: int | None = None, context: int | None = None,
        cache_tokens: int | None = None, kv: str | None = None, memory: int | None = None,
        adapters: Sequence[Adapter] = (),
    ) -> Pool:  # fmt: skip
        """Checked, with usual sizes where none are given; `memory` is what the cache may take."""
        config = model.config
        requests, kv = REQUESTS if requests is None else requests, kv or "f16"
        if requests < 1:
            raise OptionError("must be positive", where="requests", got=requests)
        if config.recurrent is not None:
            raise UnsupportedError(
                "recurrent states are not kept for many requests yet", where=config.arch,
                hint="load the model with rlx.load, for one request at a time",
            )  # fmt: skip
        cache = CacheType.of(kv, config.head_dim)
        if cache.scheme is not None:
            raise OptionError("not for pages yet", where="kv", got=kv, expected="f16, bf16 or f32")
        length = context_length(config, context)
        wanted = requests * length if cache_tokens is None else cache_tokens
        pool = Pool(model, requests, length, cache, _whole(wanted), tuple(adapters))
        return pool if memory is None else pool._within(memory, cache_tokens is not None)

    def _within(self, memory: int, asked: bool) -> Pool:
        fits = memory // self.token_bytes
        if not asked and self.slots > fits:
            # a power of two: what is free differs a little at every start, and executables are
            # found again only where the number of pages is the same
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
        """Bytes of cache that a token takes."""
        c = self.model.config
        return 2 * c.layers * c.kv_heads * self.kv.row_bytes(c.head_dim)

    @property
    def recipe(self) -> Recipe:
        """Of the run of the model: one executable for any tokens, which is as fast as one for as
        many as there are."""
        variant = ModelVariant(seq=UpTo(max(CHUNK, BETWEEN + self.requests)))
        return Recipe(self._describe, {"any": variant.with_extra("picked", UpTo(self.requests))})

    @cached_property
    def form(self) -> AdapterForm | None:
        """Of all adapters, if there are any."""
        return common_form(self.adapters) if self.adapters else None

    @property
    def use(self) -> str:
        """The name of the run of the model; with adapters it is one of its own."""
        return USE if self.form is None else f"{USE} {len(self.adapters)} {self.form.name}"

    def _describe(self) -> Described:
        """The model for tokens of many sequences: logits of the tokens that are picked."""
        nets: list[BatchNet] = []

        def build(g: GraphModule) -> dict[str, Tensor]:
            ids = g.input("ids", [1, "seq"], "i32")
            weights, many = self.model.weights(), len(self.adapters)
            net = BatchNet(
                g, self.model.config, weights, self.context, self.kv, self.slots, self.requests,
                many, form=self.form,
            )  # fmt: skip
            nets.append(net)
            return {"logits": net.head(net.pick(body(net, self.model, ids)), last_only=False)}

        module = GraphModule.define(self.model.config.arch, build)
        if self.form is not None:
            require_adapted(self.model, self.form, nets[0].adapted)
        return Described(module, nets[0].params)

    def plan(self) -> dict[str, Recipe]:
        """All that is compiled, by use."""
        draws = dict(drawing(self.model.config.vocab, use) for use in DRAWS)
        return {self.use: self.recipe, **draws}


def _whole(tokens: int) -> int:
    """So many tokens in whole pages."""
    return -(-tokens // PAGE) * PAGE
