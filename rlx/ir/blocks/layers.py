"""Small layers: normalisations over the last axis, convolutions, the gated delta rule."""

from __future__ import annotations

from rlx.errors import ShapeError
from rlx.ir.graph import Graph
from rlx.ir.hir import Block, block, is_state
from rlx.ir.node import Value
from rlx.ir.op import Op, lookup
from rlx.ir.ops._common import activate, require_rank
from rlx.ir.ops.activation import require_activation
from rlx.ir.ops.conv import DepthwiseConv1dCausal as DepthwiseOp
from rlx.ir.ops.norm import require_eps
from rlx.ir.ops.scan import GatedDeltaNet as GatedDeltaNetOp


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


class _Conv(Block):
    rank = 0  # spatial axes
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    activation: str | None

    def check(self) -> None:
        require_activation(self.activation or "none", self.label)

    def _conv(self, g: Graph, *operands: Value) -> Value:
        require_rank(operands[0].shape, self.rank + 2, "x")
        return g.conv(
            *operands, stride=self.stride, padding=self.padding, dilation=self.dilation,
            groups=self.groups,
        )  # fmt: skip

    def fusable(self, g: Graph, x: Value, w: Value, bias: Value | None = None) -> Value:
        y = self._conv(g, x, w)
        if bias is not None:
            require_rank(bias.shape, 1, "bias")
            y = g.add(y, g.reshape(bias, shape=(bias.shape.dims[0], *[1] * self.rank)))
        return activate(g, y, self.activation)

    def direct(self, g: Graph, x: Value, w: Value, bias: Value | None = None) -> Value:
        y = self._conv(g, x, w) if bias is None else self._conv(g, x, w, bias)
        return activate(g, y, self.activation)


@block("conv1d")
class Conv1d(_Conv):
    """activation(conv(x [B, C, n], w [O, C/groups, k]) + bias [O])"""

    rank = 1
    stride: tuple[int, ...] = (1,)
    padding: tuple[int, ...] = (0,)
    dilation: tuple[int, ...] = (1,)
    groups: int = 1
    activation: str | None = None


@block("conv2d")
class Conv2d(_Conv):
    """activation(conv(x [B, C, h, w], w [O, C/groups, kh, kw]) + bias [O])"""

    rank = 2
    stride: tuple[int, ...] = (1,)
    padding: tuple[int, ...] = (0,)
    dilation: tuple[int, ...] = (1,)
    groups: int = 1
    activation: str | None = None


@block("depthwise_conv1d_causal")
class DepthwiseConv1dCausal(Block):
    """Each channel of x [B, S, C] convolved with its K taps of weight [C, K], seeing the past only.

    left_pad [B, K-1, C] is the context before x. `kernel_size` states K; 0 takes it from weight.
    """

    kernel_size: int = 0

    def direct(self, g: Graph, x: Value, weight: Value, left_pad: Value) -> Value:
        if self.kernel_size and weight.shape.dims[-1:] != (self.kernel_size,):
            raise ShapeError(
                "weight has another number of taps", got=weight.shape,
                expected=f"[channels, {self.kernel_size}]",
            )  # fmt: skip
        return g.depthwise_conv1d_causal(x, weight, left_pad)

    def fusable(self, g: Graph, x: Value, weight: Value, left_pad: Value) -> Value:
        return DepthwiseOp().decompose(g, x, weight, left_pad)


@block("gated_delta_net")
class GatedDeltaNet(Block):
    """Per token: S ← exp(g)·S; d = (v − kᵀS)·beta; S ← S + k dᵀ; o = (q/√N)ᵀS, from S = 0.

    q, k, v are [B, S, H, N], g and beta [B, S, H]; returns o. `state_size` states N.
    """

    state_size: int = 0

    def direct(self, graph: Graph, q: Value, k: Value, v: Value, g: Value, beta: Value) -> Value:
        return graph.gated_delta_net(q, k, v, g, beta, state_size=self.state_size)[0]

    def fusable(self, graph: Graph, q: Value, k: Value, v: Value, g: Value, beta: Value) -> Value:
        return GatedDeltaNetOp().decompose(graph, q, k, v, g, beta)[0]


@block("gated_delta_net_carry", has_effect=True)
class GatedDeltaNetCarry(Block):
    """The gated delta rule from a given state [B, H, N, N]; returns (o, the last state).

    A state declared with `state` is updated in place.
    """

    state_size: int = 0

    def direct(
        self, graph: Graph, q: Value, k: Value, v: Value, g: Value, beta: Value, state: Value
    ) -> tuple[Value, Value]:
        o, last = graph.gated_delta_net(q, k, v, g, beta, state, state_size=self.state_size)
        return o, _written(graph, state, last)

    def fusable(
        self, graph: Graph, q: Value, k: Value, v: Value, g: Value, beta: Value, state: Value
    ) -> tuple[Value, Value]:
        o, last = GatedDeltaNetOp().decompose(graph, q, k, v, g, beta, state)
        return o, _written(graph, state, last)


def _written(graph: Graph, state: Value, last: Value) -> Value:
    return graph.state_update(state, last) if is_state(state) else last
