"""What every model is built with: its parameters, products and norms, whatever file they are in.

Quantisation belongs to the weight: `linear(x, name)` is a plain or a dequantising product, as the
file says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any, ClassVar

from rlx.ir.module import GraphModule
from rlx.ir.op import Array
from rlx.models.adapters import AdapterForm, state_names
from rlx.models.weights import Weight, Weights
from rlx.records import dataclass

Tensor = Any  # a value of the module


@dataclass
class Parts:
    """A model under construction; `params` collects what its parameters are bound to."""

    strassen: ClassVar[bool] = False  # whether products may be of sums of blocks

    g: GraphModule
    config: Any
    weights: Weights
    form: AdapterForm | None = field(default=None, kw_only=True)  # of an adapter to run with
    params: dict[str, Array] = field(default_factory=dict, kw_only=True)
    adapted: set[str] = field(default_factory=set, kw_only=True)  # weights that took the adapter
    _values: dict[str, Tensor] = field(default_factory=dict, kw_only=True)
    _packed: dict[str, tuple[Tensor, ...]] = field(default_factory=dict, kw_only=True)

    def param(self, name: str, make: Callable[[], Array] | None = None) -> Tensor:
        """A parameter of the graph: from the file, or computed by `make`."""
        if name in self._values:
            return self._values[name]
        return self.fixed(name, make() if make is not None else self.weights.get(name).array)

    def fixed(self, name: str, array: Array) -> Tensor:
        """A parameter that is this array."""
        if name not in self._values:
            self.params[name] = array
            self._values[name] = self.g.param(name, list(array.shape), array.dtype)
        return self._values[name]

    def linear(self, x: Tensor, name: str, activation: str | None = None) -> Tensor:
        """x · Wᵀ (+ bias), W as the file has it: [out, in], plain or packed."""
        weight = self.weights.get(f"{name}.weight")
        bias = self.param(f"{name}.bias") if f"{name}.bias" in self.weights else None
        return self.product(x, weight, bias, activation)

    def product(
        self, x: Tensor, weight: Weight, bias: Tensor = None, activation: str | None = None
    ) -> Tensor:
        packed, added = self.packed(weight), self._added(x, weight)
        if packed is not None:
            y = self.g.dequant_matmul(x, *packed, scheme=weight.scheme or weight.wanted)
        elif added is not None:
            y = self.g.linear(x, self.param(weight.name), transposed=True)
        else:
            w, asked = self.param(weight.name), {"strassen": True} if self.strassen else {}
            return self.g.linear(x, w, bias, activation=activation, transposed=True, **asked)
        y = y if added is None else y + added
        y = y if bias is None else y + bias
        return y if activation is None else self.g.hir_mir(activation, [y])

    def _added(self, x: Tensor, weight: Weight) -> Tensor | None:
        """What an adapter adds to the product with a weight."""
        if self.form is None or weight.name not in self.form.weights:
            return None
        self.adapted.add(weight.name)
        (out, inner), rank = weight.shape, self.form.rank
        first, second = state_names(weight.name)
        return self.adapter_product(self.adapter_product(x, first, inner, rank), second, rank, out)

    def adapter_product(self, x: Tensor, name: str, inner: int, out: int) -> Tensor:
        """x [1, rows, inner] · half of an adapter, a state of this name."""
        return self.g.hir_mir("matmul", [x, self.g.state(name, [inner, out], "f32")])

    def packed(self, weight: Weight) -> tuple[Tensor, ...] | None:
        """A packed weight, with what its scheme keeps beside it; None where it is plain."""
        if weight.scheme is not None:
            return (self.param(weight.name),)
        if weight.wanted is None:
            return None
        if weight.name not in self._packed:
            made = self.g.hir_mir(
                "quantize_weight", [self.param(weight.name)], scheme=weight.wanted
            )
            self._packed[weight.name] = made if isinstance(made, tuple) else (made,)
        return self._packed[weight.name]

    def grouped(self, x: Tensor, name: str, group: Tensor) -> Tensor:
        """Each row of x [rows, in] · its own of the weights [groups, out, in] (+ its bias)."""
        weight = self.weights.get(f"{name}.weight")
        packed = self.packed(weight)
        if packed is None:
            w = self.g.hir_mir("transpose", [self.param(weight.name)], perm=(0, 2, 1))
            y = self.g.hir_mir("grouped_matmul", [x, w, group])
        else:
            w, *sides = packed
            scheme = weight.scheme or weight.wanted
            y = self.g.hir_mir("dequant_grouped_matmul", [x, w, group, *sides], scheme=scheme)
        if f"{name}.bias" not in self.weights:
            return y
        return y + self.g.hir_mir("gather", [self.param(f"{name}.bias"), group], axis=0)

    def embed(self, ids: Tensor, scale: float = 1.0, table: str = "token_embd.weight") -> Tensor:
        """Rows of the token table, as f32."""
        weight = self.weights.get(table)
        packed = self.packed(weight)
        if packed is not None:
            rows, *sides = packed
            scheme = weight.scheme or weight.wanted
            x = self.g.hir_mir("dequant_gather", [rows, ids, *sides], scheme=scheme)
            return x if scale == 1.0 else x * scale
        x = self.wide(self.g.embedding(ids, self.param(table)))
        return x if scale == 1.0 else x * scale

    def wide(self, x: Tensor) -> Tensor:
        """x as f32."""
        return x if x.shape.dtype.name == "f32" else self.g.hir_mir("cast", [x], dtype="f32")

    def split(self, x: Tensor, widths: list[int]) -> list[Tensor]:
        """Parts of the last axis."""
        parts, start, axis = [], 0, len(x.shape.dims) - 1
        for width in widths:
            parts.append(self.g.hir_mir("narrow", [x], axis=axis, start=start, length=width))
            start += width
        return parts
