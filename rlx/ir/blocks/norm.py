"""Normalisations over the last axis, alone and after a residual sum."""

from __future__ import annotations

from rlx.ir.graph import Graph
from rlx.ir.hir import Block, block
from rlx.ir.node import Value
from rlx.ir.op import Op, lookup
from rlx.ir.ops.norm import require_eps


class _Norm(Block):
    """Lowers to the MIR op of the same attributes, or to its decomposition."""

    eps: float

    def check(self) -> None:
        require_eps(self.eps, self.label)

    def _op(self) -> Op:
        return lookup(self.label)(self.eps)

    def fusable(self, g: Graph, x: Value, gamma: Value, beta: Value | None = None) -> Value:
        return self._op().decompose(g, x, gamma, beta)

    def direct(self, g: Graph, x: Value, gamma: Value, beta: Value | None = None) -> Value:
        return g.append(self._op(), [v for v in (x, gamma, beta) if v is not None])


@block("rms_norm")
class RmsNorm(_Norm):
    """x · rsqrt(mean(x²) + eps) · gamma (+ beta)"""

    eps: float = 1e-6


@block("layer_norm")
class LayerNorm(_Norm):
    """(x - mean) · rsqrt(variance + eps) · gamma (+ beta)"""

    eps: float = 1e-5


class _ResidualNorm(Block):
    eps: float

    def check(self) -> None:
        require_eps(self.eps, self.label)

    def _op(self) -> Op:
        return lookup(f"fused_{self.label}")(self.eps)

    def fusable(
        self, g: Graph, x: Value, residual: Value, gamma: Value, beta: Value | None = None
    ) -> tuple[Value, Value]:
        return self._op().decompose(g, x, residual, gamma, beta)

    def direct(
        self, g: Graph, x: Value, residual: Value, gamma: Value, beta: Value | None = None
    ) -> tuple[Value, Value]:
        given = [v for v in (x, residual, gamma, beta) if v is not None]
        return g.append(self._op(), given)


@block("residual_rms_norm")
class ResidualRmsNorm(_ResidualNorm):
    """(rms_norm(x + residual), x + residual)"""

    eps: float = 1e-6


@block("residual_layer_norm")
class ResidualLayerNorm(_ResidualNorm):
    """(layer_norm(x + residual), x + residual)"""

    eps: float = 1e-5
