"""Linear layers, embeddings, dropout, and layers without parameters of a dense network."""

from __future__ import annotations

import math
from typing import Any

import rlx.numpy as rnp
from rlx import random
from rlx.ir.dtype import DType
from rlx.nn import functional as F
from rlx.nn.functional.operands import ArrayLike
from rlx.nn.functional.quantized import QuantizedWeight
from rlx.nn.module import Module, Unset
from rlx.numpy.array import Array
from rlx.numpy.derivative_rules import stop_gradient
from rlx.numpy.dispatch import as_array


def drawn(key: Array | None, index: int, shape: tuple[int, ...], bound: float, dtype: Any) -> Any:
    """Parameter number `index` of a layer: uniform in ±bound, or `Unset` without a key."""
    if key is None:
        return Unset(shape, DType.of(dtype))
    return random.uniform(random.fold_in(key, index), shape, dtype, -bound, bound)


class Linear(Module):
    """x · weightᵀ + bias, weight [out, in]; both start uniform in ±1/√in, as in PyTorch."""

    weight: Array | QuantizedWeight
    bias: Array | None

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, key: Array | None = None,
        dtype: Any = rnp.float32,
    ) -> None:  # fmt: skip
        self.in_features, self.out_features = in_features, out_features
        bound = 1 / math.sqrt(in_features) if in_features else 0.0
        self.weight = drawn(key, 0, (out_features, in_features), bound, dtype)
        self.bias = drawn(key, 1, (out_features,), bound, dtype) if bias else None

    def __call__(self, x: ArrayLike) -> Array:
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        has_bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={has_bias}"


class Bilinear(Module):
    """aᵀ · weight[k] · b + bias[k], weight [out, in1, in2]."""

    weight: Array
    bias: Array | None

    def __init__(
        self, in1_features: int, in2_features: int, out_features: int, bias: bool = True, *,
        key: Array | None = None, dtype: Any = rnp.float32,
    ) -> None:  # fmt: skip
        bound = 1 / math.sqrt(in1_features)
        shape = (out_features, in1_features, in2_features)
        self.weight = drawn(key, 0, shape, bound, dtype)
        self.bias = drawn(key, 1, (out_features,), bound, dtype) if bias else None

    def __call__(self, a: ArrayLike, b: ArrayLike) -> Array:
        return F.bilinear(a, b, self.weight, self.bias)

    def extra_repr(self) -> str:
        out, a, b = self.weight.shape
        return f"in1_features={a}, in2_features={b}, out_features={out}"


class Embedding(Module):
    """Rows of a table [entries, width], which starts normal; row `padding_idx` starts as zeros and
    has no gradient."""

    weight: Array | QuantizedWeight

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None, *,
        key: Array | None = None, dtype: Any = rnp.float32,
    ) -> None:  # fmt: skip
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = padding_idx
        shape = (num_embeddings, embedding_dim)
        weight: Any = Unset(shape, DType.of(dtype))
        if key is not None:
            weight = random.normal(key, shape, dtype)
            if padding_idx is not None:
                weight = weight.at[padding_idx].set(0.0)
        self.weight = weight

    def __call__(self, ids: ArrayLike) -> Array:
        rows = F.embedding(ids, self.weight)
        if self.padding_idx is None:
            return rows
        numbers = as_array(ids)
        is_padding = rnp.expand_dims(numbers == self.padding_idx, axis=-1)
        return rnp.where(is_padding, stop_gradient(rows), rows)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


class Dropout(Module):
    """Elements replaced by 0 with probability p while training, which takes a key."""

    _axes = 0

    def __init__(self, p: float = 0.5) -> None:
        self.p = float(p)

    def __call__(self, x: ArrayLike, *, key: Array | None = None) -> Array:
        return F.dropout(x, self.p, key, self.training, self._axes)

    def extra_repr(self) -> str:
        return f"p={self.p}"


class Dropout1d(Dropout):
    """Whole channels of x [B, C, n] dropped."""

    _axes = 2


class Dropout2d(Dropout):
    """Whole channels of x [B, C, h, w] dropped."""

    _axes = 2


class Dropout3d(Dropout):
    """Whole channels of x [B, C, d, h, w] dropped."""

    _axes = 2


class Identity(Module):
    """x."""

    def __call__(self, x: ArrayLike) -> Array:
        return as_array(x)


class Flatten(Module):
    """Axes start … end as one."""

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        self.start_dim, self.end_dim = start_dim, end_dim

    def __call__(self, x: ArrayLike) -> Array:
        made = as_array(x)
        first, last = self.start_dim % made.ndim, self.end_dim % made.ndim
        joined: Any = 1
        for n in made.shape[first : last + 1]:
            joined = joined * n
        return rnp.reshape(made, (*made.shape[:first], joined, *made.shape[last + 1 :]))

    def extra_repr(self) -> str:
        return f"start_dim={self.start_dim}, end_dim={self.end_dim}"


class Unflatten(Module):
    """One axis as several."""

    def __init__(self, dim: int, unflattened_size: tuple[int, ...]) -> None:
        self.dim, self.unflattened_size = dim, tuple(unflattened_size)

    def __call__(self, x: ArrayLike) -> Array:
        made = as_array(x)
        at = self.dim % made.ndim
        shape = (*made.shape[:at], *self.unflattened_size, *made.shape[at + 1 :])
        return rnp.reshape(made, shape)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, unflattened_size={self.unflattened_size}"


def quantize_linear_layers(module: Module, scheme: str = "q8_0") -> Module:
    """The weights of all `Linear` layers inside packed by a scheme, in place. The numbers of inputs
    must be multiples of the scheme's block."""
    for found in module.modules():
        if isinstance(found, Linear) and isinstance(found.weight, Array):
            found.weight = F.quantize(found.weight, scheme)
    return module
