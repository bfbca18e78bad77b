"""Convolutions over one, two or three axes, plain and transposed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlx.errors import UnsupportedError
from rlx.ir.node import Value
from rlx.nn.functional import convolution as functional
from rlx.pytorch.aten.table import aten

if TYPE_CHECKING:
    from rlx.pytorch.lower_aten import Lowering


def geometry(
    x: Value, stride: Any, padding: Any, dilation: Any, groups: int, extra: Any = 0
) -> tuple[functional.Geometry, tuple[int, ...]]:
    """The geometry over the spatial axes of x, and the output padding."""
    rank = x.shape.rank - 2

    def spread(given: Any) -> tuple[int, ...]:
        numbers = [int(n) for n in given] if isinstance(given, (list, tuple)) else [int(given)]
        return tuple(numbers * rank if len(numbers) == 1 else numbers)

    pads = spread(padding)
    made = functional.Geometry(spread(stride), pads, pads, spread(dilation), int(groups))
    return made, spread(extra)


@aten("convolution.default")
def convolution(
    low: Lowering, x: Value, w: Value, bias: Value | None, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int,
) -> Value:  # fmt: skip
    if x.shape.rank not in (3, 4, 5):
        raise UnsupportedError("a convolution without a batch axis", where="convolution",
                               got=x.shape)  # fmt: skip
    moved, extra = geometry(x, stride, padding, dilation, groups, output_padding)
    made: Value
    if transposed:
        made = functional.transposed_values(low.g, x, w, bias, moved, extra)
    else:
        made = functional.conv_values(low.g, x, w, bias, moved)
    return made


def folded(low: Lowering, y: Value, scale: Value, shift: Value) -> Value | None:
    """y · scale + shift per channel inside the convolution that gives y, where its weights are
    params and nothing else reads it: one pass over the images less, at no cost in a run."""
    source = y.node
    if source.op.name != "conv" or len(low.node.args[0].users) > 1:
        return None
    x, w, *rest = source.inputs
    if not all(is_param(v) for v in (w, scale, *rest)):
        return None
    g, count = low.g, w.shape.dims[0]
    weight = g.mul(w, g.reshape(scale, shape=(count, *[1] * (w.shape.rank - 1))))
    bias = g.add(g.mul(rest[0], scale), shift) if rest else shift
    made: Value = g.append(source.op, [x, weight, bias])
    return made


def is_param(value: Value, depth: int = 12) -> bool:
    """Whether a value depends on params and constants alone."""
    node = value.node
    if node.op.is_source:
        return node.op.name in ("param", "constant")
    return depth > 0 and all(is_param(v, depth - 1) for v in node.inputs)


@aten("convolution_backward.default")
def convolution_backward(
    low: Lowering, gradient: Value, x: Value, w: Value, bias_sizes: Any, stride: Any, padding: Any,
    dilation: Any, transposed: bool, output_padding: Any, groups: int, wanted: Sequence[bool],
) -> tuple[Value | None, ...]:  # fmt: skip
    """The rule of derivatives of our own op; only what is wanted stays in the graph."""
    from rlx.pytorch.aten.gradient_ops import pulled_back

    if x.shape.rank == 5:
        raise UnsupportedError("the gradient of a convolution over three axes",
                               where="convolution_backward", got=x.shape)  # fmt: skip
    moved, extra = geometry(x, stride, padding, dilation, groups, output_padding)
    options = moved.inner()
    if transposed:
        options["output_padding"] = extra
    node = low.g.apply("conv_transpose" if transposed else "conv", x, w, **options).node
    dx, dw = pulled_back(low, node, gradient)
    dbias = None
    if wanted[2]:
        dbias = low.g.sum(gradient, axis=(0, *range(2, gradient.shape.rank)))
    return (dx if wanted[0] else None, dw if wanted[1] else None, dbias)
