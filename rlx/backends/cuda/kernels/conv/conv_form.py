"""A convolution as kernels see it: sizes, strides, the geometry of its windows."""

from __future__ import annotations

from math import prod
from typing import Any

from rlx.backends.cuda.lowering import Layouts
from rlx.ir.dim import Dim
from rlx.ir.dtype import DType
from rlx.ir.node import Node
from rlx.llvm.builder import Value
from rlx.support.records import dataclass

_FLOATS = ("f32", "bf16", "f16")
Pair = tuple[int, int]


@dataclass(frozen=True)
class Windows:
    """What is constant in the code of windows: of one spatial axis, the first is 1."""

    channels: int  # of a group
    kernel: Pair
    stride: Pair
    low: Pair  # padding in front
    dilation: Pair

    @property
    def taps(self) -> int:
        return self.kernel[0] * self.kernel[1]

    @property
    def k(self) -> int:
        """Products of a sum."""
        return self.channels * self.taps

    def place(self, k: Value) -> tuple[Value, Value, Value]:
        """Channel, and distances down and across, of product `k` (i32) of a sum."""
        across = self.kernel[1]
        channel = k.udiv(self.taps) if self.taps > 1 else k
        tap = k - channel * self.taps
        down = tap.udiv(across) if across > 1 else tap
        return channel, down * self.dilation[0], (tap - down * across) * self.dilation[1]


@dataclass(frozen=True)
class Convolution:
    """x [batch, groups · channels, *size] with w [out, channels, *kernel]."""

    node: Node
    windows: Windows
    groups: int
    out: int
    batch: Dim
    size: tuple[Dim, Dim]
    counts: tuple[Dim, Dim]  # windows down and across

    @property
    def places(self) -> Dim:
        return prod(self.counts, start=1)

    @property
    def x(self) -> DType:
        return self.node.inputs[0].dtype

    @property
    def w(self) -> DType:
        return self.node.inputs[1].dtype

    @property
    def activation(self) -> str:
        return getattr(self.node.op, "activation", "none")

    @property
    def bias(self) -> DType | None:
        return self.node.inputs[2].dtype if len(self.node.inputs) > 2 else None

    def strides(self, ctx: Layouts) -> list[Dim]:
        """Of x: batch, channel, down, across."""
        batch, channel, *rest = ctx.strides(self.node.inputs[0])
        return [batch, channel, *[0] * (2 - len(rest)), *rest]


def suits(node: Node) -> bool:
    """Whether there are kernels for the node, by its types and sizes alone."""
    floats = all(v.dtype.name in _FLOATS for v in (*node.inputs, node.output))
    return floats and all(isinstance(d, int) for d in node.inputs[1].shape.dims)


def convolution_of(node: Node) -> Convolution:
    op: Any = node.op
    x, w = (v.shape.dims for v in node.inputs[:2])
    window = op.window(w)
    front, ones = 4 - len(x), (1,) * (4 - len(x))

    def pair(values: Any, fill: int) -> Any:
        return (*[fill] * front, *values)

    windows = Windows(
        int(w[1]), pair(window.kernel, 1), pair(window.stride, 1), pair(window.low, 0),  # type: ignore[arg-type]
        pair(window.dilation, 1),
    )  # fmt: skip
    size, counts = (*ones, *x[2:]), (*ones, *node.output.shape.dims[2:])
    return Convolution(node, windows, op.groups, int(w[0]), x[0], size, counts)  # type: ignore[arg-type]
