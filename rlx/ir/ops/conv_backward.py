"""Backward of convolutions and of max pooling: what has no form as a forward op."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from rlx.errors import ShapeError
from rlx.ir.dim import Dim
from rlx.ir.dtype import promote
from rlx.ir.op import Cost, op
from rlx.ir.ops._common import cast, require_float, require_same, traffic, wide
from rlx.ir.ops.composite import Composite
from rlx.ir.ops.conv import (
    Conv,
    Window,
    dilated,
    make_window,
    padded,
    require_positive,
    spatial_axes,
    window_counts,
    window_taps,
)
from rlx.ir.ops.pool import MaxPool
from rlx.ir.shape import Shape

if TYPE_CHECKING:
    from rlx.ir.graph import Graph
    from rlx.ir.node import Value


@op("conv_weight_backward")
class ConvWeightBackward(Composite):
    """dw `[O, C/groups, *kernel]` of conv(x, w), from x and the cotangent `dy [B, O, *windows]`.

    For each tap it is the sum over images and windows of dy · x.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...] = (1,)
    padding: tuple[int, ...] = (0,)
    dilation: tuple[int, ...] = (1,)
    groups: int = 1

    def check(self) -> None:
        require_positive(f"{self.name}.kernel", self.kernel)
        self.forward  # noqa: B018  checks the attributes

    @property
    def forward(self) -> Conv:
        """The op that this is a backward of."""
        return Conv(self.stride, self.padding, self.dilation, self.groups)

    @property
    def window(self) -> Window:
        return make_window(self.kernel, self.stride, self.padding, self.dilation)

    def check_operands(self, x: Shape, dy: Shape) -> None:
        for shape, what in ((x, "x"), (dy, "dy")):
            require_float(shape, what)
            if spatial_axes(shape, what) != len(self.kernel):
                raise ShapeError(f"{what} does not fit the kernel", got=shape, expected=self.kernel)
        for size, what in ((x.dims[1], "channels of x"), (dy.dims[1], "channels of dy")):
            if isinstance(size, int) and size % self.groups:
                raise ShapeError(f"{what} do not split into groups", got=size, expected=self.groups)
        wanted = (x.dims[0], *window_counts(x.dims[2:], self.window))
        for found, size in zip((dy.dims[0], *dy.dims[2:]), wanted, strict=True):
            require_same(found, size, "dy")

    def decompose(self, g: Graph, x: Value, dy: Value) -> Any:
        """One matmul a group: [O/G, B·windows] with [B·windows, C/G·taps]."""
        result = promote(x.shape.dtype, dy.shape.dtype)
        window, groups = self.window, self.groups
        taps = list(window_taps(g, padded(g, wide(g, x), window, 0.0), window))
        batch, channels, *counts = taps[0].shape.dims
        filters = dy.shape.dims[1]
        count = prod(counts, start=1)
        per = channels // groups
        columns = [g.reshape(t, shape=(batch, groups, per, 1, count)) for t in taps]
        joined = g.transpose(g.concat(*columns, axis=3), axes=(1, 0, 4, 2, 3))
        joined = g.reshape(joined, shape=(groups, batch * count, per * len(taps)))
        rows = g.reshape(wide(g, dy), shape=(batch, groups, filters // groups, count))
        rows = g.transpose(rows, axes=(1, 2, 0, 3))
        rows = g.reshape(rows, shape=(groups, filters // groups, batch * count))
        dw = g.reshape(g.matmul(rows, joined), shape=(filters, per, *self.kernel))
        return cast(g, dw, result)

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        """A multiply and an add per element of dy and tap."""
        taps = prod(outputs[0].dims[1:], start=1)
        return Cost(inputs[1].num_elements * taps * 2, traffic(inputs, outputs))


@op("max_pool_backward")
class MaxPoolBackward(Composite):
    """dx of max_pool(x) from x and the cotangent of the result: each goes to the first largest
    element of its window, and where windows share elements they add up."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = (0,)

    @property
    def forward(self) -> MaxPool:
        """The op that this is the backward of."""
        return MaxPool(self.kernel, self.stride, self.padding)

    def check(self) -> None:
        self.forward  # noqa: B018  checks the attributes

    def check_operands(self, x: Shape, dy: Shape) -> None:
        require_float(x, "x")
        require_float(dy, "dy")
        for found, wanted in zip(dy.dims, self.forward.infer(x).dims, strict=True):
            require_same(found, wanted, "dy")

    def infer(self, x: Shape, dy: Shape) -> Shape:
        self.check_operands(x, dy)
        return x

    def decompose(self, g: Graph, x: Value, dy: Value) -> Any:
        """Tap by tap: where it is the first that equals the largest, its part of dy."""
        window = self.forward.window(x.shape.rank - 2)
        around = padded(g, x, window, float("-inf"))
        taps = list(window_taps(g, around, window))
        largest = g.max_pool(x, kernel=self.kernel, stride=self.stride, padding=self.padding)
        zero = g.constant(0, dy.shape.dtype)
        free: Value | None = None
        total: Any = None
        for place, tap in zip(product(*map(range, window.kernel)), taps, strict=True):
            hit = g.logical_or(g.eq(tap, largest), g.ne(tap, tap))  # a NaN is the largest
            mine = hit if free is None else g.logical_and(hit, free)
            rest = g.logical_not(hit)
            free = rest if free is None else g.logical_and(free, rest)
            part = _placed(g, g.where(mine, dy, zero), window, place, around.shape.dims[2:])
            total = part if total is None else g.add(total, part)
        for axis, n in enumerate(x.shape.dims[2:]):
            if window.low[axis] or window.high[axis]:
                total = g.narrow(total, axis=axis + 2, start=window.low[axis], length=n)
        return cast(g, total, x.shape.dtype)

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        taps = prod(self.forward.window(inputs[0].rank - 2).kernel)
        return Cost(inputs[1].num_elements * taps * 2, traffic(inputs, outputs))


def _placed(
    g: Graph, part: Value, window: Window, place: Sequence[int], sizes: Sequence[Dim]
) -> Any:
    """Elements of all windows at the positions of one tap in the padded tensor, zeros around."""
    for i, (at, size) in enumerate(zip(place, sizes, strict=True)):
        made: Any = dilated(g, part, i + 2, window.stride[i])
        counts: list[Any] = [at, size - at - made.shape.dims[i + 2]]
        zero = g.constant(0, part.shape.dtype)
        around: list[Any] = []
        for n in counts:
            dims = tuple([n if axis == i + 2 else d for axis, d in enumerate(made.shape.dims)])
            around += [] if n == 0 else [g.expand(zero, dims)]
        before, behind = around[: counts[0] != 0], around[counts[0] != 0 :]
        part = g.concat(*before, made, *behind, axis=i + 2) if around else made
    return part
