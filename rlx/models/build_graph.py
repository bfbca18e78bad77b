"""A graph of a model for each entry point: ids in; logits, tokens, vectors or scores out."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.ir.module import GraphModule
from rlx.ir.op import Array
from rlx.support.records import dataclass

if TYPE_CHECKING:
    from rlx.models.adapters import AdapterShape
    from rlx.models.builder import ModelBuilder
    from rlx.models.model_file import ModelFile
    from rlx.models.weights import Weights

Tensor = Any  # a value of the module


@dataclass(frozen=True)
class EntryPoint:
    """What a graph computes.

    Of a language model: "logits" of every token; "hidden", the states after the last norm;
    "sample", the last token's logits and a token drawn from them; "verify", a token drawn after
    each of `tokens`. Of an encoder: "embedding", "scores" or "hidden" of every text.
    """

    output: str
    tokens: int = 0  # of "verify"
    penalties: bool = False  # "sample" after penalties and biases, which are inputs
    grammar: bool = False  # "sample" among the tokens that an input mask allows
    padded: bool = False  # texts of an encoder have several lengths
    typed: bool = False  # and tokens of two types, where they are pairs

    @cached_property
    def name(self) -> str:
        count = f"-{self.tokens}" if self.tokens else ""
        flags = ("penalties", "grammar", "padded", "typed")
        return "-".join([self.output + count, *(f for f in flags if getattr(self, f))])


SAMPLE = EntryPoint("sample")
SAMPLES = tuple(
    EntryPoint("sample", penalties=p, grammar=g) for g in (False, True) for p in (False, True)
)
LOGITS, HIDDEN = EntryPoint("logits"), EntryPoint("hidden")


@dataclass
class BuiltGraph:
    """A graph of a model, and the arrays of its parameters."""

    module: GraphModule
    params: dict[str, Array]


def build_graph(
    model: ModelFile, weights: Weights, entry_point: EntryPoint, *, context: int = 0,
    kv: str = "f16", adapters: AdapterShape | None = None, strassen: bool = False,
) -> BuiltGraph:  # fmt: skip
    """The graph of an entry point; batch and sequence sizes stay symbolic.

    A language model has a KV cache of type `kv` for `context` tokens, and runs with LoRA adapters
    of one shape if that is given. Matmuls of an encoder may use Strassen's algorithm.
    """

    def build(g: GraphModule) -> tuple[ModelBuilder, dict[str, Tensor]]:
        # late: each starts without the other
        if model.is_encoder:
            from rlx.models.encoder_builder import build_encoder

            return build_encoder(g, model, weights, entry_point, strassen)
        from rlx.models.decoder_builder import build_decoder

        return build_decoder(g, model, weights, entry_point, context, kv, adapters)

    return define_graph(model.config.arch, build)


def define_graph(
    name: str, build: Callable[[GraphModule], tuple[ModelBuilder, dict[str, Tensor]]]
) -> BuiltGraph:
    """The graph that `build` makes with a model builder."""
    builders: list[ModelBuilder] = []

    def outputs(g: GraphModule) -> dict[str, Tensor]:
        builder, found = build(g)
        builders.append(builder)
        return found

    module = GraphModule.define(name, outputs)
    builders[0].require_adapted()
    return BuiltGraph(module, builders[0].params)


def sample(g: GraphModule, row: Tensor, entry_point: EntryPoint) -> dict[str, Tensor]:
    """Draw a token from logits [1, vocab] inside the graph: they stay in native memory."""
    vocab = row.shape.dims[1]
    if entry_point.penalties:
        factor, bias = g.input("factor", [vocab]), g.input("bias", [vocab])
        shrunk = g.where(row > 0.0, row / factor, row * factor)
        row = shrunk + bias
    if entry_point.grammar:
        row = _allowed(g, row, vocab)
    rng, settings = g.input("rng", [2], "u64"), g.input("settings", [4])
    token, after = g.sample(row, rng, settings)
    return {"token": token, "rng_next": after}


def sample_each(g: GraphModule, logits: Tensor, count: int) -> dict[str, Tensor]:
    """Draw a token after each of `count` tokens, with the random numbers of draws one by one."""
    rng, settings = g.input("rng", [2], "u64"), g.input("settings", [4])
    tokens = []
    for i in range(count):
        row = logits.narrow(axis=1, start=i, length=1)
        row = row.reshape(1, logits.shape.dims[2])
        turn = rng + g.constant(np.array([0, i], np.uint64))
        tokens.append(g.sample(row, turn, settings)[0])
    return {"tokens": g.concat(tokens, axis=0)}


def _allowed(g: GraphModule, row: Tensor, vocab: int) -> Tensor:
    """Mask the logits of tokens whose bit in the input `allowed` is not set."""
    count = -(-vocab // 32)
    words = g.input("allowed", [count], "i32").reshape(count, 1)
    shifted = words >> g.iota((32,))
    bits = g.reshape(shifted & 1, (count * 32,))
    bit = bits.narrow(axis=0, start=0, length=vocab)
    return g.where(bit != 0, row, float("-inf"))
