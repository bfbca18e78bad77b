"""A model file becomes one symbolic description: ids in, logits and the next token out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np

from rlx.errors import UnsupportedError
from rlx.formats import open_model
from rlx.formats.gguf import GgufFile
from rlx.formats.hf import HfFolder
from rlx.formats.mixture import Mixture
from rlx.formats.tokenizer import Tokenizer
from rlx.formats.tokenizer_gguf import tokenizer_from_gguf
from rlx.ir.module import GraphModule
from rlx.ir.op import Array
from rlx.models.adapters import Adapter, AdapterForm, merged
from rlx.models.arch import architecture
from rlx.models.config import ModelConfig
from rlx.models.config_gguf import from_gguf
from rlx.models.config_hf import from_hf
from rlx.models.decoder_builder import Net, Tensor
from rlx.models.kv_cache import CacheType
from rlx.models.weights import Weights
from rlx.records import dataclass

DRAWS = ("sample", "adjust", "constrain", "adjust, constrain")  # ways to draw the next token


@dataclass
class ModelFile:
    """An opened model: its architecture, numbers, weights and tokenizer."""

    path: Path
    file: GgufFile | HfFolder
    config: ModelConfig
    arch: ModuleType
    quant: Mixture | None = None  # how plain weights are packed when the model is prepared
    merged: tuple[Adapter, ...] = ()  # what is added to plain weights

    @staticmethod
    def open(path: Path, quant: str | None = None) -> ModelFile:
        return ModelFile.of(path, open_model(path), quant)

    @staticmethod
    def of(path: Path, file: GgufFile | HfFolder, quant: str | None = None) -> ModelFile:
        config = from_gguf(file) if isinstance(file, GgufFile) else from_hf(file)
        arch = architecture(config.arch, str(path))
        configure: Callable[[ModelConfig], ModelConfig] | None = getattr(arch, "configure", None)
        config = configure(config) if configure else config
        return ModelFile(path, file, config, arch, Mixture.of(quant) if quant else None)

    @property
    def packing(self) -> tuple[object, ...]:
        """What packed weights depend on beside the file."""
        return (self.quant or "as stored", *(adapter.digest for adapter in self.merged))

    def weights(self) -> Weights:
        turned = getattr(self.arch, "HF_TRANSPOSED", ())
        names, quant = self.arch.HF_NAMES, self.quant
        changes = merged(self.merged)
        return Weights(self.file, names, turned, config=self.config, quant=quant, changes=changes)

    def tokenizer(self) -> Tokenizer:
        if isinstance(self.file, GgufFile):
            return tokenizer_from_gguf(self.file)
        return self.file.tokenizer()


@dataclass
class Described:
    """The graph of a use of the model, and the arrays of its parameters."""

    module: GraphModule
    params: dict[str, Array]


def describe(
    model: ModelFile, weights: Weights, context: int, kv: str, use: str,
    form: AdapterForm | None = None,
) -> Described:  # fmt: skip
    """The model for one use, with adapters of a form if it is given.

    "logits": those of every token. "hidden": the states they are made from, after the last norm.
    "sample": the last token's logits, and the next token drawn from them.
    "adjust": the same after penalties and biases, given as inputs; "constrain": the same among the
    tokens that a mask allows; "adjust, constrain": both.
    "guess 4": a token drawn after each of four.
    """
    nets: list[Net] = []

    def build(g: GraphModule) -> dict[str, Tensor]:
        cache = CacheType.of(kv, model.config.head_dim)
        net = Net(g, model.config, weights, context, cache, form=form)
        nets.append(net)
        x = body(net, model, g.input("ids", [1, "seq"], "i32"))
        if use == "hidden":
            return {"hidden": net.wide(x)}
        logits = net.head(x, last_only=use != "logits" and not use.startswith("guess"))
        if use == "logits":
            return {"logits": logits}
        if use.startswith("guess"):
            return _draw_all(g, logits, int(use.split()[1]))
        row = g.hir_mir("reshape", [logits], dims=(1, model.config.vocab))
        return {**draw(g, row, use), "logits": logits}

    module = GraphModule.define(model.config.arch, build)
    if form is not None:
        require_adapted(model, form, nets[0].adapted)
    return Described(module, nets[0].params)


def require_adapted(model: ModelFile, form: AdapterForm, adapted: set[str]) -> None:
    """Raise where a weight is used otherwise than in a product that an adapter is added to."""
    left = [n for n in form.weights if n not in adapted and n != "output.weight"]
    if left:
        raise UnsupportedError(
            "weights that cannot be adapted yet", where=model.config.arch, got=", ".join(left[:4]),
            hint="merge the adapter: rlx.load(model, adapters=[…], merge=True)",
        )  # fmt: skip


def body(net: Net, model: ModelFile, ids: Tensor) -> Tensor:
    """From ids to what the head reads."""
    x = model.arch.embed(net, ids)
    for i in range(model.config.layers):
        x = net.g.named(f"blk.{i}", partial(_layer, net, model, x, i))
    return model.arch.finish(net, x)


def _layer(net: Net, model: ModelFile, x: Tensor, i: int, _: object) -> Tensor:
    return model.arch.layer(net, x, i)


def draw(g: GraphModule, row: Tensor, use: str) -> dict[str, Tensor]:
    """Sampling from logits [1, vocab], in the graph: they need not leave native memory."""
    vocab = row.shape.dims[1]
    if "adjust" in use:
        factor, bias = g.input("factor", [vocab]), g.input("bias", [vocab])
        shrunk = g.hir_mir("where", [g.hir_mir("gt", [row, 0.0]), row / factor, row * factor])
        row = shrunk + bias
    if "constrain" in use:
        row = _allowed(g, row, vocab)
    rng, settings = g.input("rng", [2], "u64"), g.input("settings", [4])
    token, after = g.hir_mir("sample", [row, rng, settings])
    return {"token": token, "rng_next": after}


def _draw_all(g: GraphModule, logits: Tensor, count: int) -> dict[str, Tensor]:
    """A token drawn after each of `count` tokens, with the random numbers of draws in turn."""
    rng, settings = g.input("rng", [2], "u64"), g.input("settings", [4])
    tokens = []
    for i in range(count):
        row = g.hir_mir("narrow", [logits], axis=1, start=i, length=1)
        row = g.hir_mir("reshape", [row], dims=(1, logits.shape.dims[2]))
        turn = g.hir_mir("add", [rng, g.constant(np.array([0, i], np.uint64))])
        tokens.append(g.hir_mir("sample", [row, turn, settings])[0])
    return {"tokens": g.hir_mir("concat", tokens, axis=0)}


def _allowed(g: GraphModule, row: Tensor, vocab: int) -> Tensor:
    """−inf for tokens whose bit of the input `allowed` is not set."""
    count = -(-vocab // 32)
    words = g.hir_mir("reshape", [g.input("allowed", [count], "i32")], dims=(count, 1))
    moved = g.hir_mir("shift_right", [words, g.hir_mir("iota", dims=(32,))])
    bits = g.hir_mir("reshape", [g.hir_mir("bitwise_and", [moved, 1])], dims=(count * 32,))
    bit = g.hir_mir("narrow", [bits], axis=0, start=0, length=vocab)
    return g.hir_mir("where", [g.hir_mir("ne", [bit, 0]), row, float("-inf")])
