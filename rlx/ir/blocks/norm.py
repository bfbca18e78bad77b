"""Normalisations over the last axis, alone and after a residual sum."""

from __future__ import annotations

from rlx.ir.blocks._parts import cast, wide
from rlx.ir.dtype import promote
from rlx.ir.graph import Graph
from rlx.ir.hir import Block, block
from rlx.ir.node import Value
from rlx.ir.ops.norm import require_eps


def rms_scaled(g: Graph, x: Value, eps: float) -> Value:
    """x · rsqrt(mean(x²) + eps)"""
    power = g.mean(g.square(x), axis=(-1,), keepdims=True)
    return g.mul(x, g.rsqrt(g.add(power, eps)))


def standardized(g: Graph, x: Value, eps: float) -> Value:
    """(x - mean) · rsqrt(variance + eps)"""
    return rms_scaled(g, g.sub(x, g.mean(x, axis=(-1,), keepdims=True)), eps)


def affine(g: Graph, x: Value, gamma: Value, beta: Value | None) -> Value:
    """x · gamma (+ beta)"""
    y = g.mul(x, wide(g, gamma))
    return y if beta is None else g.add(y, wide(g, beta))


class _Norm(Block):
    eps: float

    def check(self) -> None:
        require_eps(self.eps, self.label)

    def scaled(self, g: Graph, x: Value) -> Value:
        """`x` normalised, before gamma and beta."""
        raise NotImplementedError

    def fusable(self, g: Graph, x: Value, gamma: Value, beta: Value | None = None) -> Value:
        given = [v.shape.dtype for v in (x, gamma, beta) if v is not None]
        y = affine(g, self.scaled(g, wide(g, x)), gamma, beta)
        return cast(g, y, promote(*given))


@block("rms_norm")
class RmsNorm(_Norm):
    """x · rsqrt(mean(x²) + eps) · gamma (+ beta)"""

    eps: float = 1e-6

    def scaled(self, g: Graph, x: Value) -> Value:
        return rms_scaled(g, x, self.eps)

    def direct(self, g: Graph, x: Value, gamma: Value, beta: Value | None = None) -> Value:
        return g.rms_norm(x, gamma, beta, eps=self.eps)


@block("layer_norm")
class LayerNorm(_Norm):
    """(x - mean) · rsqrt(variance + eps) · gamma (+ beta)"""

    eps: float = 1e-5

    def scaled(self, g: Graph, x: Value) -> Value:
        return standardized(g, x, self.eps)

    def direct(self, g: Graph, x: Value, gamma: Value, beta: Value | None = None) -> Value:
        return g.layer_norm(x, gamma, beta, eps=self.eps)


class _ResidualNorm(Block):
    eps: float

    def check(self) -> None:
        require_eps(self.eps, self.label)

    def scaled(self, g: Graph, x: Value) -> Value:
        """`x` normalised, before gamma and beta."""
        raise NotImplementedError

    def fusable(
        self, g: Graph, x: Value, residual: Value, gamma: Value, beta: Value | None = None
    ) -> tuple[Value, Value]:
        summed = promote(x.shape.dtype, residual.shape.dtype)
        rest = [v.shape.dtype for v in (gamma, beta) if v is not None]
        total = g.add(wide(g, x), wide(g, residual))
        y = affine(g, self.scaled(g, total), gamma, beta)
        return cast(g, y, promote(summed, *rest)), cast(g, total, summed)


@block("residual_rms_norm")
class ResidualRmsNorm(_ResidualNorm):
    """(rms_norm(x + residual), x + residual)"""

    eps: float = 1e-6

    def scaled(self, g: Graph, x: Value) -> Value:
        return rms_scaled(g, x, self.eps)

    def direct(
        self, g: Graph, x: Value, residual: Value, gamma: Value, beta: Value | None = None
    ) -> tuple[Value, Value]:
        return g.fused_residual_rms_norm(x, residual, gamma, beta, eps=self.eps)


@block("residual_layer_norm")
class ResidualLayerNorm(_ResidualNorm):
    """(layer_norm(x + residual), x + residual)"""

    eps: float = 1e-5

    def scaled(self, g: Graph, x: Value) -> Value:
        return standardized(g, x, self.eps)

    def direct(
        self, g: Graph, x: Value, residual: Value, gamma: Value, beta: Value | None = None
    ) -> tuple[Value, Value]:
        return g.fused_residual_layer_norm(x, residual, gamma, beta, eps=self.eps)
