"""What of a model is trained: LoRA adapters beside frozen weights, or all float weights.

Frozen weights stay as the file has them, float or packed, mapped from disk and not copied. They are
captured by the program that is traced, and named by the names of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import field
from typing import Any

import numpy as np

from rlx.errors import OptionError, close_names
from rlx.ir.op import Array as Data
from rlx.ir.quant.scheme import decode, encode
from rlx.models.builder import ModelBuilder, Tensor
from rlx.models.weights import Weight, Weights
from rlx.numpy.array import Array
from rlx.random import transforms
from rlx.random.words import words
from rlx.runtime.params import Deferred
from rlx.support.records import dataclass

ALL_LINEAR = "all-linear"
# what Hugging Face and PEFT call the matrices of a layer → ours
_SHORT = {
    "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "qkv": "attn_qkv",
    "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down",
}  # fmt: skip


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters: y = x · Wᵀ + alpha / rank · dropout(x) · Aᵀ · Bᵀ.

    `targets` are the weights that get one: "all-linear" (all matrices of layers, as in PEFT), or
    names such as "q", "q_proj", "attn_q" or "blk.0.attn_q". With `use_dora` the rows of W + B · A
    have trained lengths.
    """

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: str | tuple[str, ...] = ALL_LINEAR
    use_dora: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise OptionError("not a rank", where="rank", got=self.rank, expected="1 or more")
        if not 0 <= self.dropout < 1:
            raise OptionError("not a rate", where="dropout", got=self.dropout, expected="0 … 1")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def targeted(self, names: Iterable[str], where: str) -> frozenset[str]:
        """Those of the names of weights that the targets mean."""
        known = sorted(names)
        layers = [n for n in known if n.startswith("blk.")]
        if self.targets == ALL_LINEAR:
            return frozenset(layers)
        asked = (self.targets,) if isinstance(self.targets, str) else self.targets
        found: set[str] = set()
        for target in asked:
            matching = {n for n in known if _means(target, n)}
            if not matching:
                parts = sorted({_part(n) for n in layers})
                raise OptionError(
                    "no weights of that name to adapt", where=f"{where}: targets", got=target,
                    expected=f"{ALL_LINEAR}, or some of {', '.join(parts)}",
                    hint=close_names(target, [*_SHORT, *parts]),
                )  # fmt: skip
            found |= matching
        return frozenset(found)


def _part(name: str) -> str:
    """attn_q of blk.3.attn_q.weight"""
    name = name.removesuffix(".weight")
    return name.split(".", 2)[2] if name.startswith("blk.") else name


def _means(target: str, name: str) -> bool:
    short = target.removesuffix("_proj")
    return name.removesuffix(".weight") == target or _part(name) in (target, _SHORT.get(short))


@dataclass
class TrainedWeights:
    """The weights of a model by what becomes of them in training."""

    weights: Weights
    lora: LoraConfig | None  # None: all float weights are trained
    adapted: frozenset[str] = frozenset()
    trained: dict[str, tuple[int, ...]] = field(default_factory=dict)  # inputs of graphs: shapes
    frozen: dict[str, Array] = field(default_factory=dict)
    linear: dict[str, tuple[int, ...]] = field(default_factory=dict)  # what can be adapted
    streams: dict[str, int] = field(default_factory=dict)  # random numbers of each adapter

    def keep(self, name: str, array: Any) -> Array:
        """A frozen array of this name, read once."""
        if name not in self.frozen:
            data = array.make() if isinstance(array, Deferred) else array
            self.frozen[name] = Array(np.ascontiguousarray(data))
        return self.frozen[name]

    def dequantized(self, name: str) -> Data:
        """The weight as f32, a copy of its own."""
        weight = self.weights.get(name)
        array = weight.array.make() if isinstance(weight.array, Deferred) else weight.array
        if weight.scheme is None:
            return np.array(array, np.float32)
        return decode(weight.scheme, np.ascontiguousarray(array))

    def stream(self, name: str) -> int:
        return self.streams.setdefault(name, len(self.streams) + 1)

    # -- parameters ---------------------------------------------------------------------------

    def init(self, seed: int) -> dict[str, Any]:
        """The first parameters. LoRA: {weight: {"a": [rank, in], "b": [out, rank]}}, A uniform and
        B zero as in PEFT, and "magnitude" [out] with DoRA. Else {weight: array}, as f32."""
        if self.lora is None:
            return {name: Array(self.dequantized(name)) for name in sorted(self.trained)}
        rng = np.random.default_rng(seed)
        found: dict[str, Any] = {}
        for name in sorted(self.adapted):
            out, inner = self.linear[name]
            bound = inner**-0.5  # kaiming_uniform with a = √5
            a = rng.uniform(-bound, bound, (self.lora.rank, inner)).astype(np.float32)
            found[name] = {"a": Array(a), "b": Array(np.zeros((out, self.lora.rank), np.float32))}
            if self.lora.use_dora:
                squares = self.frozen[f"{name}.row_squares"].data
                found[name]["magnitude"] = Array(np.sqrt(squares))
        return found

    def leaf(self, params: Any, name: str) -> Any:
        """The parameter that an input of a graph stands for."""
        if self.lora is None:
            return params[name]
        weight, _, part = name.rpartition(".")
        return params[weight][part.removeprefix("lora_")]


@dataclass
class TrainingBuilder(ModelBuilder):
    """A model builder whose parameters are inputs of the graph, trained or frozen."""

    store: TrainedWeights = field(kw_only=True)
    key: Tensor | None = field(default=None, kw_only=True)  # of dropout

    def param(self, name: str, make: Callable[[], Data] | None = None) -> Tensor:
        if name in self._values:
            return self._values[name]
        if make is None and self.store.lora is None and self._is_float(name):
            return self.trained(name, self.weights.get(name).shape)
        if name in self.store.frozen:
            return self._frozen(name)
        return super().param(name, make)

    def _is_float(self, name: str) -> bool:
        """Whether a weight is trained where all are: packed ones are dequantised first."""
        weight = self.weights.get(name)
        return weight.scheme is not None or bool(weight.array.dtype.name in _FLOATS)

    def array_param(self, name: str, array: Data) -> Tensor:
        self.store.keep(name, array)
        return self._frozen(name)

    def _frozen(self, name: str) -> Tensor:
        if name not in self._values:
            array = self.store.frozen[name]
            self._values[name] = self.g.input(name, list(array.data.shape), array.dtype)
        return self._values[name]

    def trained(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A trainable parameter, f32."""
        if name not in self._values:
            self.store.trained[name] = shape
            self._values[name] = self.g.input(name, list(shape), "f32")
        return self._values[name]

    def packed(self, weight: Weight) -> tuple[Tensor, ...] | None:
        """A packed weight stays packed, unless it is trained; one that `quant` picks is packed
        here, once."""
        if self.store.lora is None:
            return None
        if weight.wanted is None or weight.scheme is not None:
            return super().packed(weight)
        names = [weight.name, f"{weight.name}.scale", f"{weight.name}.zero"]
        if weight.name not in self.store.frozen:
            made = encode(weight.wanted, self.store.dequantized(weight.name))
            for name, part in zip(names, (made.data, made.scale, made.zp), strict=True):
                if part is not None:
                    self.store.keep(name, part)
        return tuple(self._frozen(name) for name in names if name in self.store.frozen)

    def matmul(
        self, x: Tensor, weight: Weight, bias: Tensor = None, activation: str | None = None
    ) -> Tensor:
        self.store.linear[weight.name] = weight.shape
        if weight.name not in self.store.adapted:
            return super().matmul(x, weight, bias, activation)
        y = self._adapted_matmul(x, weight)
        y = y if bias is None else y + bias
        return y if activation is None else self.g.apply(activation, y)

    def _adapted_matmul(self, x: Tensor, weight: Weight) -> Tensor:
        lora, name = self.store.lora, weight.name
        assert lora is not None
        out, inner = weight.shape
        a = self.trained(f"{name}.lora_a", (lora.rank, inner))
        b = self.trained(f"{name}.lora_b", (out, lora.rank))
        y = super().matmul(x, weight)
        low = self.g.linear(self._dropped(x, name), a, transposed=True)
        y = y + self.g.linear(low * lora.scale, b, transposed=True)
        return y if not lora.use_dora else y * self._row_lengths(weight, a, b)

    def _dropped(self, x: Tensor, name: str) -> Tensor:
        """x with dropout by the key, each adapter with random numbers of its own."""
        rate = 0.0 if self.store.lora is None else self.store.lora.dropout
        if not rate or self.key is None:
            return x
        g = x.graph
        drawn = transforms.unit(g, words(g, self.key, x.shape.dims, self.store.stream(name)),
                                x.shape.dtype)  # fmt: skip
        return g.where(g.lt(drawn, 1.0 - rate), g.mul(x, 1 / (1 - rate)), 0.0)

    def _row_lengths(self, weight: Weight, a: Tensor, b: Tensor) -> Tensor:
        """DoRA: the trained length of each row over that of W + s · B · A, which counts as
        constant. |w + s·b·A|² = |w|² + 2s·b·(A·w) + s²·b·(A·Aᵀ)·bᵀ: no row is ever made."""
        store, name, g = self.store, weight.name, self.g
        assert store.lora is not None
        if f"{name}.row_squares" not in store.frozen:
            rows = store.dequantized(name)
            store.keep(f"{name}.row_squares", np.einsum("ij,ij->i", rows, rows))
        magnitude = self.trained(f"{name}.magnitude", (weight.shape[0],))
        s = store.lora.scale
        met = super().matmul(a, weight).transpose(1, 0)
        gram = g.linear(a, a, transposed=True)
        squares = (b * met).sum(axis=1) * (2 * s) + (b * (b @ gram)).sum(axis=1) * (s * s)
        length = (squares + self._frozen(f"{name}.row_squares")).sqrt()
        return magnitude / length.graph.stop_gradient(length)


_FLOATS = ("f32", "f16", "bf16", "f64", "float32", "float16", "bfloat16", "float64")


__all__ = ["LoraConfig", "TrainedWeights", "TrainingBuilder"]
