"""Normalisations. Means and sums run in f32 (f64 for f64); the result promotes all operands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from rlx.errors import AttributeValueError, ShapeError
from rlx.ir.dim import Dim, same
from rlx.ir.dtype import DType, promote
from rlx.ir.op import Array, Cost, Op, op
from rlx.ir.ops._common import compute, quiet, require_float, rounded
from rlx.ir.shape import Shape, normalize_axis


def require_eps(eps: float, where: str) -> None:
    if not (eps >= 0 and math.isfinite(eps)):
        raise AttributeValueError("not a small positive number", where=f"{where}.eps", got=eps)


def require_gain(shape: Shape, size: Dim, what: str) -> None:
    """A vector of one entry per normalised element."""
    require_float(shape, what)
    if shape.rank != 1 or not same(shape.dims[0], size):
        raise ShapeError(f"{what} does not fit x", got=shape, expected=f"[{size}]")


def _normed_shape(x: Shape, gamma: Shape, beta: Shape | None) -> Shape:
    """The result of a norm over the last axis."""
    require_float(x, "x")
    if x.rank == 0:
        raise ShapeError("x is a scalar", got=x, expected="[..., C]")
    require_gain(gamma, x.dims[-1], "gamma")
    if beta is not None:
        require_gain(beta, x.dims[-1], "beta")
    return x.with_dtype(promote(*[s.dtype for s in (x, gamma, beta) if s is not None]))


def common_type(*arrays: Array | None) -> DType:
    """The promoted element type of the operands that are there."""
    return promote(*[DType.of(a.dtype) for a in arrays if a is not None])


def _mean(x: Array, axes: tuple[int, ...]) -> Array:
    # not np.mean, which warns of empty axes where there is nothing to normalise either
    return x.sum(axis=axes, keepdims=True) / x.dtype.type(math.prod(x.shape[a] for a in axes))


def standardized(x: Array, eps: float, axes: tuple[int, ...] = (-1,)) -> Array:
    """(x - mean) / sqrt(variance + eps) of a widened array."""
    centred = x - _mean(x, axes)
    return centred / np.sqrt(_mean(np.square(centred), axes) + x.dtype.type(eps))


def rms_scaled(x: Array, eps: float) -> Array:
    """x / sqrt(mean(x²) + eps) of a widened array, over the last axis."""
    return x / np.sqrt(_mean(np.square(x), (-1,)) + x.dtype.type(eps))


def affine(x: Array, gamma: Array, beta: Array | None) -> Array:
    """x · gamma (+ beta), widened."""
    scaled = x * compute(gamma)
    return scaled if beta is None else scaled + compute(beta)


def elementwise_cost(inputs: Sequence[Shape], outputs: Sequence[Shape], per_element: int) -> Cost:
    """So many operations per element of the first operand; every tensor touched once."""
    traffic: Dim = 0
    for shape in (*inputs, *outputs):
        traffic = traffic + shape.size_bytes
    return Cost(inputs[0].num_elements * per_element, traffic)


class RowNorm(Op):
    """A norm over the last axis: rows scaled, then gamma (+ beta)."""

    eps: float
    work: ClassVar[int]  # operations for an element

    @staticmethod
    def scaled(x: Array, eps: float) -> Array:
        """The rows of a widened array before gamma and beta."""
        raise NotImplementedError

    def check(self) -> None:
        require_eps(self.eps, self.name)

    def infer(self, x: Shape, gamma: Shape, beta: Shape | None = None) -> Shape:
        return _normed_shape(x, gamma, beta)

    def reference(self, x: Array, gamma: Array, beta: Array | None = None) -> Array:
        dtype = common_type(x, gamma, beta)
        with quiet():
            return rounded(affine(self.scaled(compute(x), self.eps), gamma, beta), dtype)

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        return elementwise_cost(inputs, outputs, self.work)


@op("layer_norm")
class LayerNorm(RowNorm):
    """(x - mean) / sqrt(variance + eps) · gamma (+ beta), over the last axis."""

    eps: float = 1e-5
    work, scaled = 8, staticmethod(standardized)


@op("rms_norm")
class RmsNorm(RowNorm):
    """x / sqrt(mean(x²) + eps) · gamma (+ beta), over the last axis."""

    eps: float = 1e-6
    work, scaled = 4, staticmethod(rms_scaled)


@op("group_norm")
class GroupNorm(Op):
    """x [B, C, ...] standardised over C/groups channels and all places, then gamma, beta [C]."""

    groups: int
    eps: float = 1e-5

    def check(self) -> None:
        require_eps(self.eps, self.name)
        if self.groups < 1:
            raise AttributeValueError(
                "not a number of groups", where=f"{self.name}.groups", got=self.groups
            )

    def infer(self, x: Shape, gamma: Shape, beta: Shape) -> Shape:
        require_float(x, "x")
        if x.rank < 2:
            raise ShapeError("x has no channels", got=x, expected="[batch, channels, ...]")
        channels = x.dims[1]
        if not same(channels // self.groups * self.groups, channels):
            raise ShapeError(
                "channels do not divide into the groups", got=f"{channels} channels",
                expected=f"a multiple of {self.groups}",
            )  # fmt: skip
        require_gain(gamma, channels, "gamma")
        require_gain(beta, channels, "beta")
        return x.with_dtype(promote(x.dtype, gamma.dtype, beta.dtype))

    def reference(self, x: Array, gamma: Array, beta: Array) -> Array:
        dtype = common_type(x, gamma, beta)
        wide = compute(x)
        batch, channels, *places = x.shape
        grouped = wide.reshape(batch, self.groups, channels // self.groups, *places)
        per_channel = (channels,) + (1,) * len(places)
        with quiet():
            normed = standardized(grouped, self.eps, tuple(range(2, grouped.ndim)))
            gain, shift = gamma.reshape(per_channel), beta.reshape(per_channel)
            return rounded(affine(normed.reshape(x.shape), gain, shift), dtype)

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        return elementwise_cost(inputs, outputs, 8)


@op("l2_norm")
class L2Norm(Op):
    """x / sqrt(sum(x²) + eps) along `axis`."""

    axis: int = -1
    eps: float = 1e-6

    def check(self) -> None:
        require_eps(self.eps, self.name)

    def infer(self, x: Shape) -> Shape:
        require_float(x, "x")
        if x.rank == 0:
            raise ShapeError("x is a scalar", got=x, expected="rank 1 or more")
        normalize_axis(self.axis, x.rank)
        return x

    def reference(self, x: Array) -> Array:
        wide = compute(x)
        with quiet():
            length = np.square(wide).sum(axis=self.axis, keepdims=True)
            return rounded(wide / np.sqrt(length + wide.dtype.type(self.eps)), DType.of(x.dtype))

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        return elementwise_cost(inputs, outputs, 4)
