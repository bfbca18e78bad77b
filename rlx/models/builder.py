"""The base of all model builders: parameters by name, matmuls with float or quantised weights.

Quantisation belongs to the weight: `linear(x, name)` is a plain or a dequantising matmul, as the
file has it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from functools import partial
from types import ModuleType
from typing import Any

from rlx.errors import UnsupportedError
from rlx.ir.module import GraphModule
from rlx.ir.op import Array
from rlx.models.activations import activate, fusable
from rlx.models.adapters import AdapterShape, state_names
from rlx.models.config import ModelConfig
from rlx.models.weights import Weight, Weights
from rlx.support.records import dataclass

Tensor = Any  # a value of the module


@dataclass
class ModelBuilder:
    """Builds the graph of a model; `params` collects the arrays of its parameters."""

    g: GraphModule
    config: ModelConfig
    weights: Weights
    lora: AdapterShape | None = field(default=None, kw_only=True)  # LoRA to run with
    strassen: bool = field(default=False, kw_only=True)  # matmuls may use Strassen's algorithm
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
            x = self.g.named(f"blk.{i}", partial(self._layer, arch, x, i))
        return arch.finish(self, x)

    def _layer(self, arch: ModuleType, x: Tensor, i: int, _: object) -> Tensor:
        return arch.layer(self, x, i)

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
