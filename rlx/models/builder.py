"""The base of all model builders: parameters by name, matmuls with float or quantised weights.

Quantisation belongs to the weight: `linear(x, name)` is a plain or a dequantising matmul, as the
file has it. `build_graph` makes the graph of an entry point: ids in; logits, tokens, vectors or
scores out. Activations have the names that config files give them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.errors import UnsupportedError
from rlx.ir.module import GraphModule
from rlx.ir.op import Array
from rlx.models.adapters import AdapterShape, state_names
from rlx.models.config import ModelConfig
from rlx.models.weights import Weight, Weights
from rlx.support.gc_pause import without_gc
from rlx.support.records import dataclass

if TYPE_CHECKING:
    from rlx.models.model_file import ModelFile

Tensor = Any  # a value of the module

# name in a file → the op
_OPS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "quick_gelu": "gelu_quick",
    "relu": "relu",
    "sigmoid": "sigmoid",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
_COMPOSED: dict[str, Callable[[GraphModule, Tensor], Tensor]] = {
    "gelu_10": lambda g, x: x.gelu().clamp(low=-10.0, high=10.0),
    "hardswish": lambda g, x: x * (x + 3.0).clamp(low=0.0, high=6.0) * (1 / 6),
    "laplace": lambda g, x: (g.erf((x - 0.707107) * (1 / (0.282095 * 2**0.5))) + 1.0) * 0.5,
    "leaky_relu": lambda g, x: g.leaky_relu(x, alpha=0.01),
    "linear": lambda g, x: x,
    "mish": lambda g, x: x * g.softplus(x).tanh(),
    "relu2": lambda g, x: x.relu() * x.relu(),
    "relu6": lambda g, x: x.clamp(low=0.0, high=6.0),
    "sqrtsoftplus": lambda g, x: g.softplus(x).sqrt(),
}
ACTIVATIONS = tuple(sorted({*_OPS, *_COMPOSED}))


def activation_named(name: str, where: str, field: str = "activation") -> str:
    """What `activate` takes for what a file calls an activation."""
    if name in _COMPOSED:
        return name
    if name not in _OPS:
        raise UnsupportedError(
            f"unknown activation in {field}", where=where, got=name,
            expected=", ".join(ACTIVATIONS),
        )  # fmt: skip
    return _OPS[name]


def fusable(name: str | None) -> str | None:
    """The name, where a matmul can apply it."""
    return None if name in _COMPOSED else name


def activate(g: GraphModule, name: str, x: Tensor) -> Tensor:
    """The activation of x."""
    return _COMPOSED[name](g, x) if name in _COMPOSED else g.apply(name, x)


@dataclass
class InputSums:
    """Outputs for calibration: Σ x² over the rows of the input of every weight, WEIGHT.in_sum2."""

    outputs: dict[str, Tensor] = field(default_factory=dict)
    _known: dict[tuple[int, ...], tuple[Tensor, ...]] = field(default_factory=dict)  # by inputs

    def observe(self, x: Tensor, weight: str) -> None:
        """Σ x² [in] of x [..., in]; weights of the same input share it."""
        if (id(x),) not in self._known:
            wide = x.astype("f32").reshape(-1, x.shape.dims[-1])
            self._known[id(x),] = (x, (wide * wide).sum(axis=0))
        self.outputs[f"{weight}.in_sum2"] = self._known[id(x),][-1]

    def observe_groups(self, x: Tensor, group: Tensor, count: int, weight: str) -> None:
        """Σ x² [groups, in] over the rows of each group, and how many there are: WEIGHT.counts."""
        key = (id(x), id(group))
        if key not in self._known:
            wide, rows = x.astype("f32"), x.shape.dims[0]
            chosen = (group.reshape(rows, 1) == x.graph.iota((count,))).astype("f32")
            sums = chosen.transpose(1, 0) @ (wide * wide)
            self._known[key] = (x, group, chosen.sum(axis=0), sums)
        *_, self.outputs[f"{weight}.counts"], self.outputs[f"{weight}.in_sum2"] = self._known[key]


@dataclass
class ModelBuilder:
    """Builds the graph of a model; `params` collects the arrays of its parameters."""

    g: GraphModule
    config: ModelConfig
    weights: Weights
    lora: AdapterShape | None = field(default=None, kw_only=True)  # LoRA to run with
    strassen: bool = field(default=False, kw_only=True)  # matmuls may use Strassen's algorithm
    squares: InputSums | None = field(default=None, kw_only=True)  # collect those of inputs
    params: dict[str, Array] = field(default_factory=dict, kw_only=True)
    _adapted: set[str] = field(default_factory=set, kw_only=True)  # weights that LoRA was added to
    _values: dict[str, Tensor] = field(default_factory=dict, kw_only=True)
    _packed: dict[str, tuple[Tensor, ...]] = field(default_factory=dict, kw_only=True)

    def param(self, name: str, make: Callable[[], Array] | None = None) -> Tensor:
        """A parameter: the weight of that name, or what `make` computes."""
        if name in self._values:
            return self._values[name]
        return self.array_param(name, make() if make is not None else self.weights.get(name).array)

    def array_param(self, name: str, array: Array) -> Tensor:
        """A parameter that is bound to this array."""
        if name not in self._values:
            self.params[name] = array
            self._values[name] = self.g.param(name, list(array.shape), array.dtype)
        return self._values[name]

    def linear(self, x: Tensor, name: str, activation: str | None = None) -> Tensor:
        """act(x · Wᵀ + bias), W [out, in] as the file has it; bias only where it has one."""
        weight = self.weights.get(f"{name}.weight")
        bias = self.param(f"{name}.bias") if f"{name}.bias" in self.weights else None
        if activation is None or fusable(activation):
            return self.matmul(x, weight, bias, activation)
        return activate(self.g, activation, self.matmul(x, weight, bias))

    def matmul(
        self, x: Tensor, weight: Weight, bias: Tensor = None, activation: str | None = None
    ) -> Tensor:
        """act(x · Wᵀ + LoRA + bias)"""
        if self.squares is not None:
            self.squares.observe(x, weight.name)
        packed, added = self.packed(weight), self._lora(x, weight)
        if packed is not None:
            scheme: Any = weight.scheme or weight.wanted
            y = self.g.dequant_matmul(x, *packed, scheme=scheme)
        elif added is not None:
            y = self.g.linear(x, self.param(weight.name), transposed=True)
        else:
            w, strassen = self.param(weight.name), self.strassen
            return self.g.linear(
                x, w, bias, activation=activation, transposed=True, strassen=strassen
            )
        y = y if added is None else y + added
        y = y if bias is None else y + bias
        return y if activation is None else self.g.apply(activation, y)

    def _lora(self, x: Tensor, weight: Weight) -> Tensor | None:
        """(x · A) · B of the adapter; None where it has none for this weight."""
        if self.lora is None or weight.name not in self.lora.weights:
            return None
        self._adapted.add(weight.name)
        (out, inner), rank = weight.shape, self.lora.rank
        first, second = state_names(weight.name)
        return self.adapter_matmul(self.adapter_matmul(x, first, inner, rank), second, rank, out)

    def adapter_matmul(self, x: Tensor, name: str, inner: int, out: int) -> Tensor:
        """x [1, rows, inner] · A or B of the adapter, which is a state of this name."""
        return x @ self.g.state(name, [inner, out], "f32")

    def packed(self, weight: Weight) -> tuple[Tensor, ...] | None:
        """A quantised weight, with the scales its scheme keeps apart; None for floats."""
        if weight.scheme is not None:
            return (self.param(weight.name),)
        if weight.wanted is None:
            return None
        if weight.name not in self._packed:
            made = self.param(weight.name).quantize_weight(scheme=weight.wanted)
            self._packed[weight.name] = made if isinstance(made, tuple) else (made,)
        return self._packed[weight.name]

    def grouped(self, x: Tensor, name: str, group: Tensor) -> Tensor:
        """Grouped matmul: row r of x [rows, in] · weight group[r] of [groups, out, in] (+ bias)."""
        weight = self.weights.get(f"{name}.weight")
        if self.squares is not None:
            self.squares.observe_groups(x, group, weight.shape[0], weight.name)
        packed = self.packed(weight)
        if packed is None:
            w = self.param(weight.name).transpose(0, 2, 1)
            y = self.g.grouped_matmul(x, w, group)
        else:
            w, *sides = packed
            scheme: Any = weight.scheme or weight.wanted
            y = self.g.dequant_grouped_matmul(x, w, group, *sides, scheme=scheme)
        if f"{name}.bias" not in self.weights:
            return y
        return y + self.param(f"{name}.bias").gather(group, axis=0)

    def embed(self, ids: Tensor, scale: float = 1.0, table: str = "token_embd.weight") -> Tensor:
        """Token embeddings, f32."""
        weight = self.weights.get(table)
        packed = self.packed(weight)
        if packed is not None:
            rows, *sides = packed
            scheme: Any = weight.scheme or weight.wanted
            x = self.g.dequant_gather(rows, ids, *sides, scheme=scheme)
            return x if scale == 1.0 else x * scale
        x = self.as_f32(self.g.embedding(ids, self.param(table)))
        return x if scale == 1.0 else x * scale

    def as_f32(self, x: Tensor) -> Tensor:
        """Cast to f32."""
        return x if x.shape.dtype.name == "f32" else x.astype("f32")

    def split(self, x: Tensor, widths: list[int]) -> list[Tensor]:
        """Split along the last axis."""
        parts, start, axis = [], 0, len(x.shape.dims) - 1
        for width in widths:
            parts.append(x.narrow(axis=axis, start=start, length=width))
            start += width
        return parts

    def layers(self, arch: ModuleType, x: Tensor) -> Tensor:
        """All layers of a page and what it does after them."""
        for i in range(self.config.layers):
            with self.g.block(f"blk.{i}"):
                x = arch.layer(self, x, i)
        return arch.finish(self, x)

    def require_adapted(self) -> None:
        """Raise if the adapter has a weight that is used otherwise than in `matmul`."""
        names = () if self.lora is None else self.lora.weights
        left = [n for n in names if n not in self._adapted and n != "output.weight"]
        if left:
            raise UnsupportedError(
                "weights that cannot be adapted yet", where=self.config.arch,
                got=", ".join(left[:4]),
                hint="merge the adapter: rlx.load(model, adapters=[…], merge=True)",
            )  # fmt: skip


@dataclass(frozen=True)
class EntryPoint:
    """What a graph computes.

    Of a language model: "logits" of every token; "hidden", the states after the last norm;
    "sample", the last token's logits and a token drawn from them; "verify", a token drawn after
    each of `tokens`; "squares", `InputSums` of all tokens. Of an encoder: "embedding", "scores" or
    "hidden" of every text.
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
    g = GraphModule.hir(model.config.arch)
    # late: each starts without the other
    if model.is_encoder:
        from rlx.models.encoder_builder import build_encoder

        with without_gc():
            return _finished(g, *build_encoder(g, model, weights, entry_point, strassen))
    from rlx.models.decoder_builder import build_decoder

    with without_gc():
        built = build_decoder(g, model, weights, entry_point, context, kv, adapters)
        return _finished(g, *built)


def define_graph(
    name: str, build: Callable[[GraphModule], tuple[ModelBuilder, dict[str, Tensor]]]
) -> BuiltGraph:
    """The graph that `build` makes with a model builder."""
    g = GraphModule.hir(name)
    with without_gc():
        return _finished(g, *build(g))


def _finished(g: GraphModule, builder: ModelBuilder, outputs: dict[str, Tensor]) -> BuiltGraph:
    g.finish_hir(outputs)
    builder.require_adapted()
    return BuiltGraph(g, builder.params)


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
