"""Normalisations as layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import rlx.numpy as rnp
from rlx.errors import InputError, ShapeError
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.nn import functional as F
from rlx.nn.functional.operands import ArrayLike, call
from rlx.nn.module import Module
from rlx.numpy.array import Array, Tracer
from rlx.numpy.dispatch import as_array


class LayerNorm(Module):
    """`functional.layer_norm` over the last axes."""

    weight: Array | None
    bias: Array | None

    def __init__(
        self, normalized_shape: int | Sequence[int], eps: float = 1e-5,
        elementwise_affine: bool = True, bias: bool = True, *, dtype: Any = rnp.float32,
    ) -> None:  # fmt: skip
        self.normalized_shape = _sizes(normalized_shape)
        self.eps = float(eps)
        self.weight = rnp.ones(self.normalized_shape, dtype=dtype) if elementwise_affine else None
        has_bias = elementwise_affine and bias
        self.bias = rnp.zeros(self.normalized_shape, dtype=dtype) if has_bias else None

    def __call__(self, x: ArrayLike) -> Array:
        axes = len(self.normalized_shape)
        return F.layer_norm(x, self.weight, self.bias, self.eps, axes)

    def extra_repr(self) -> str:
        affine = self.weight is not None
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={affine}"


def _sizes(shape: int | Sequence[int]) -> tuple[int, ...]:
    return (shape,) if isinstance(shape, int) else tuple(shape)


class RMSNorm(Module):
    """`functional.rms_norm` over the last axes."""

    weight: Array | None

    def __init__(
        self, normalized_shape: int | Sequence[int], eps: float = 1e-6,
        elementwise_affine: bool = True, *, dtype: Any = rnp.float32,
    ) -> None:  # fmt: skip
        self.normalized_shape = _sizes(normalized_shape)
        self.eps = float(eps)
        self.weight = rnp.ones(self.normalized_shape, dtype=dtype) if elementwise_affine else None

    def __call__(self, x: ArrayLike) -> Array:
        return F.rms_norm(x, self.weight, None, self.eps, len(self.normalized_shape))

    def extra_repr(self) -> str:
        affine = self.weight is not None
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={affine}"


class GroupNorm(Module):
    """`functional.group_norm`."""

    weight: Array | None
    bias: Array | None

    def __init__(
        self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True, *,
        dtype: Any = rnp.float32,
    ) -> None:  # fmt: skip
        if num_channels % num_groups:
            raise ShapeError(
                "channels do not split into groups", where="GroupNorm", got=num_channels,
                expected=f"a multiple of {num_groups}",
            )  # fmt: skip
        self.num_groups, self.num_channels, self.eps = num_groups, num_channels, float(eps)
        self.weight = rnp.ones((num_channels,), dtype=dtype) if affine else None
        self.bias = rnp.zeros((num_channels,), dtype=dtype) if affine else None

    def __call__(self, x: ArrayLike) -> Array:
        return F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.num_groups}, {self.num_channels}, eps={self.eps}"


class _BatchNorm(Module):
    """Batch normalisation by channel.

    While training it takes the statistics of the batch and moves its running ones towards them;
    `eval()` takes the running ones. A jitted function gets a copy of a module: it returns the
    module for the caller to have the new statistics, `y, model = step(model, x)`.
    """

    ranks: tuple[int, ...] = (2, 3, 4, 5)
    buffers_of_class = ("running_mean", "running_var", "num_batches_tracked")
    weight: Array | None
    bias: Array | None
    running_mean: Array | None
    running_var: Array | None
    num_batches_tracked: Array | None

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1,
        affine: bool = True, track_running_stats: bool = True, *, dtype: Any = rnp.float32,
    ) -> None:  # fmt: skip
        self.num_features, self.eps, self.momentum = num_features, float(eps), momentum
        shape = (num_features,)
        self.weight = rnp.ones(shape, dtype=dtype) if affine else None
        self.bias = rnp.zeros(shape, dtype=dtype) if affine else None
        self.running_mean = self.running_var = self.num_batches_tracked = None
        if track_running_stats:
            self.running_mean = rnp.zeros(shape, dtype=dtype)
            self.running_var = rnp.ones(shape, dtype=dtype)
            self.num_batches_tracked = as_array(np.zeros((), np.int64))

    def __call__(self, x: ArrayLike) -> Array:
        made = as_array(x)
        name = type(self).__name__
        if made.ndim not in self.ranks or made.shape[1] != self.num_features:
            raise ShapeError(
                "x does not fit", where=name, got=str(list(made.shape)),
                expected=f"[batch, {self.num_features}, …] with {self.ranks} axes",
            )  # fmt: skip
        mean, var = self.running_mean, self.running_var
        if self.training or mean is None or var is None:
            found, spread = F.batch_statistics(made)
            if self.training and mean is not None:
                self._track(made, found, spread)
            mean, var = found, spread
        return F.batch_norm(made, mean, var, self.weight, self.bias, self.eps)

    def _track(self, x: Array, mean: Array, var: Array) -> None:
        """Move the running statistics; the running variance is the unbiased one."""
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None
        if isinstance(x, Tracer) and not isinstance(self.running_mean, Tracer):
            raise InputError(
                "a module that trains is captured by rlx.jit", where=type(self).__name__,
                got="running statistics outside the trace",
                hint="pass the module as an argument and return it, or call eval()",
            )  # fmt: skip
        batches = rnp.add(self.num_batches_tracked, 1)
        unbiased = call(_unbiased, [var, x])
        share: Any = self.momentum
        if share is None:  # the mean over all batches
            share = rnp.divide(1.0, rnp.astype(batches, var.dtype))
        self.running_mean = _moved(self.running_mean, mean, share)
        self.running_var = _moved(self.running_var, unbiased, share)
        self.num_batches_tracked = batches

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, momentum={self.momentum}"


def _unbiased(g: Graph, var: Value, x: Value) -> Any:
    """var · n / (n − 1), n elements of each channel of x."""
    count: Any = x.shape.dims[0]
    for n in x.shape.dims[2:]:
        count = count * n
    number = g.dim_value(count, dtype=var.shape.dtype)
    return g.mul(var, g.div(number, g.maximum(g.sub(number, 1.0), 1.0)))


def _moved(old: Array, new: Array, share: Any) -> Array:
    kept = rnp.multiply(old, rnp.subtract(1.0, share))
    return rnp.astype(rnp.add(kept, rnp.multiply(new, share)), old.dtype)


class BatchNorm1d(_BatchNorm):
    __doc__ = f"{_BatchNorm.__doc__}\n\n    x is [B, C] or [B, C, n]."
    ranks = (2, 3)


class BatchNorm2d(_BatchNorm):
    __doc__ = f"{_BatchNorm.__doc__}\n\n    x is [B, C, h, w]."
    ranks = (4,)


class BatchNorm3d(_BatchNorm):
    __doc__ = f"{_BatchNorm.__doc__}\n\n    x is [B, C, d, h, w]."
    ranks = (5,)


class InstanceNorm2d(Module):
    """`functional.instance_norm` of images [B, C, h, w]."""

    weight: Array | None
    bias: Array | None

    def __init__(
        self, num_features: int, eps: float = 1e-5, affine: bool = False, *,
        dtype: Any = rnp.float32,
    ) -> None:  # fmt: skip
        self.num_features, self.eps = num_features, float(eps)
        self.weight = rnp.ones((num_features,), dtype=dtype) if affine else None
        self.bias = rnp.zeros((num_features,), dtype=dtype) if affine else None

    def __call__(self, x: ArrayLike) -> Array:
        return F.instance_norm(x, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}"
