"""Convolutions."""

from __future__ import annotations

from rlx.errors import ShapeError
from rlx.ir.graph import Graph
from rlx.ir.hir import Block, block
from rlx.ir.node import Value
from rlx.ir.ops._common import activate, require_rank
from rlx.ir.ops.conv import DepthwiseConv1dCausal as DepthwiseOp
from rlx.ir.ops.elementwise import require_activation


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
