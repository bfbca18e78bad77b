"""Normalisations. Means and sums run in f32 (f64 for f64); the result promotes all operands.

Costs count the operations per element; work per row is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from rlx.errors import AttributeValueError, ShapeError
from rlx.ir.dim import same
from rlx.ir.op import Cost, op
from rlx.ir.ops._common import cast, require_float, require_vector, result_type, traffic, wide
from rlx.ir.ops.composite import Composite
from rlx.ir.shape import Shape, normalize_axis

if TYPE_CHECKING:
    from rlx.ir.graph import Graph
    from rlx.ir.node import Value


def require_eps(eps: float, where: str) -> None:
    if not (eps >= 0 and math.isfinite(eps)):
        raise AttributeValueError("not a small positive number", where=f"{where}.eps", got=eps)


def rms_scaled(g: Graph, x: Value, eps: float, axes: tuple[int, ...] = (-1,)) -> Any:
    """x · rsqrt(mean(x²) + eps)"""
    power = g.mean(g.square(x), axis=axes, keepdims=True)
    return g.mul(x, g.rsqrt(g.add(power, eps)))


def standardized(g: Graph, x: Value, eps: float, axes: tuple[int, ...] = (-1,)) -> Any:
    """(x - mean) · rsqrt(variance + eps)"""
    return rms_scaled(g, g.sub(x, g.mean(x, axis=axes, keepdims=True)), eps, axes)


def affine(g: Graph, x: Value, gamma: Value, beta: Value | None) -> Any:
    """x · gamma (+ beta)"""
    y = g.mul(x, wide(g, gamma))
    return y if beta is None else g.add(y, wide(g, beta))


def elementwise_cost(inputs: Sequence[Shape], outputs: Sequence[Shape], per_element: int) -> Cost:
    """`per_element` operations per element of the first operand; every tensor touched once."""
    return Cost(inputs[0].num_elements * per_element, traffic(inputs, outputs))


class Norm(Composite):
    """A normalisation: elementwise work around a reduction, so one region."""

    runs_as_region = True
    eps: float
    work: ClassVar[int]  # operations per element

    def check(self) -> None:
        require_eps(self.eps, self.name)

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        return elementwise_cost(inputs, outputs, self.work)


def row_norm_shape(x: Shape, gamma: Shape, beta: Shape | None = None) -> Shape:
    """The result of a norm over the last axis."""
    require_float(x, "x")
    if x.rank == 0:
        raise ShapeError("x is a scalar", got=x, expected="[..., C]")
    require_vector(gamma, x.dims[-1], "gamma")
    if beta is not None:
        require_vector(beta, x.dims[-1], "beta")
    return x.with_dtype(result_type(x, gamma, beta))


class RowNorm(Norm):
    """A norm over the last axis: rows scaled, then gamma (+ beta)."""

    @staticmethod
    def scaled(g: Graph, x: Value, eps: float) -> Any:
        """The rows of a wide value before gamma and beta."""
        raise NotImplementedError

    def infer(self, x: Shape, gamma: Shape, beta: Shape | None = None) -> Shape:
        return row_norm_shape(x, gamma, beta)

    def decompose(self, g: Graph, x: Value, gamma: Value, beta: Value | None = None) -> Any:
        y = affine(g, self.scaled(g, wide(g, x), self.eps), gamma, beta)
        return cast(g, y, result_type(x, gamma, beta))


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
class GroupNorm(Norm):
    """x [B, C, ...] standardised over C/groups channels and all positions, then gamma, beta [C]."""

    work = 8
    groups: int
    eps: float = 1e-5

    def check(self) -> None:
        super().check()
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
        require_vector(gamma, channels, "gamma")
        require_vector(beta, channels, "beta")
        return x.with_dtype(result_type(x, gamma, beta))

    def decompose(self, g: Graph, x: Value, gamma: Value, beta: Value) -> Any:
        batch, channels, *spatial = x.shape.dims
        dims = (batch, self.groups, channels // self.groups, *spatial)
        y = standardized(g, g.reshape(wide(g, x), shape=dims), self.eps, tuple(range(2, len(dims))))
        per_channel = (channels, *[1] * len(spatial))
        gain, shift = (g.reshape(wide(g, v), shape=per_channel) for v in (gamma, beta))
        y = affine(g, g.reshape(y, shape=x.shape.dims), gain, shift)
        return cast(g, y, result_type(x, gamma, beta))


@op("l2_norm")
class L2Norm(Norm):
    """x / sqrt(sum(x²) + eps) along `axis`."""

    work = 4
    axis: int = -1
    eps: float = 1e-6

    def infer(self, x: Shape) -> Shape:
        require_float(x, "x")
        if x.rank == 0:
            raise ShapeError("x is a scalar", got=x, expected="rank 1 or more")
        normalize_axis(self.axis, x.rank)
        return x

    def decompose(self, g: Graph, x: Value) -> Any:
        real = wide(g, x)
        total = g.sum(g.square(real), axis=(self.axis,), keepdims=True)
        return cast(g, g.mul(real, g.rsqrt(g.add(total, self.eps))), x.shape.dtype)
