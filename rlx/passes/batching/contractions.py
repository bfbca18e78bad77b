"""Matrix products and convolutions: the batch is a batch axis, rows, or groups of channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx.ir.dim import Dim
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.ir.ops._common import cast, result_type, wide
from rlx.ir.shape import broadcast_dims
from rlx.passes.batching.rules import (
    Flags,
    MappedAxis,
    Values,
    aligned,
    batched,
    element,
    folded,
    moved,
    spread,
    unfolded,
)


@batched("matmul")
def _matmul(op: Any, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis) -> Values:
    (a, b), ranks = inputs, [element(x, m).rank for x, m in zip(inputs, mapped, strict=True)]
    if mapped == [True, False] and ranks[0] == 1 and ranks[1] <= 2:
        return [g.matmul(a, b)]  # vectors as the rows of a matrix
    if mapped == [False, True] and ranks[1] == 1 and ranks[0] <= 2:
        return [g.matmul(b, g.transpose(a, axes=(1, 0)) if ranks[0] == 2 else a)]
    dims = _product_dims(inputs, mapped)
    a, b = _as_matrix(g, a, mapped[0], -1), _as_matrix(g, b, mapped[1], 0)
    rank = max(element(x, m).rank for x, m in ((a, mapped[0]), (b, mapped[1])))
    made = g.matmul(aligned(g, a, mapped[0], rank), aligned(g, b, mapped[1], rank))
    return [g.reshape(made, shape=(over.size, *dims))]


def _product_dims(inputs: Values, mapped: Flags) -> tuple[Dim, ...]:
    """Dims of the product of one element, vectors taken as they are."""
    a, b = (element(x, m).dims for x, m in zip(inputs, mapped, strict=True))
    columns = b[-1:] if len(b) > 1 else ()
    return (*broadcast_dims(a[:-2], b[:-2]), *a[-2:-1], *columns)


def _as_matrix(g: Graph, x: Value, is_mapped: bool, side: int) -> Value:
    """A vector as a matrix of one row (side −1) or of one column (side 0)."""
    dims = element(x, is_mapped).dims
    if len(dims) > 1:
        return x
    lead = x.shape.dims[:1] if is_mapped else ()
    return g.reshape(x, shape=(*lead, 1, *dims) if side else (*lead, *dims, 1))


@batched("dot_general")
def _dot_general(op: Any, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis) -> Values:
    a, b = inputs
    ranks = [element(x, m).rank for x, m in zip(inputs, mapped, strict=True)]
    left, right = (
        [[i + m for i in axes] for axes in side]
        for side, m in zip(op.axes(*ranks), mapped, strict=True)
    )
    (batch, contract, free), (r_batch, r_contract, _) = left, right
    both = all(mapped)
    if both:
        batch, r_batch = [0, *batch], [0, *r_batch]
    made = g.dot_general(
        a, b, lhs_contract=tuple(contract), rhs_contract=tuple(r_contract),
        lhs_batch=tuple(batch), rhs_batch=tuple(r_batch),
    )  # fmt: skip
    if both:
        return [made]
    return [moved(g, made, len(batch) + (0 if mapped[0] else len(free)), 0)]


# -- convolutions -----------------------------------------------------------------------------


@batched("conv", "conv_transpose")
def _conv(op: Any, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis) -> Values | None:
    """Images of all elements in one batch; weights of their own make groups of channels."""
    if any(mapped[2:]):
        return [_biased(op, g, inputs, mapped, over)]
    if not mapped[1]:
        made = g.append_node(op, [folded(g, inputs[0], True, over), *inputs[1:]]).output
        return [unfolded(g, made, element(inputs[0], True).dims[0], over)]
    if not isinstance(over.size, int) or not over.size:
        return None  # the number of groups is an attribute
    return [_grouped(op, g, inputs, mapped, over)]


def _biased(op: Any, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis) -> Value:
    """A bias of each element, added afterwards; the sum is rounded once."""
    result = result_type(*[x.shape for x in inputs])
    x, w, bias = (wide(g, v) for v in inputs)
    if mapped[0] or mapped[1]:
        body = Graph(op.name)
        shapes = [element(v, m) for v, m in zip((x, w), mapped, strict=False)]
        given = [body.input(f"x{i}", s) for i, s in enumerate(shapes)]
        body.set_outputs(body.append_node(op, given).output)
        from rlx.passes.batching.vectorize import run

        (y,), _ = run(g, body, [x, w], mapped[:2], over)
    else:
        y = spread(g, g.append_node(op, [x, w]).output, False, over)
    size, channels = bias.shape.dims
    shift = g.reshape(bias, shape=(size, 1, channels, *[1] * (y.shape.rank - 3)))
    return cast(g, g.add(y, shift), result)


def _grouped(op: Any, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis) -> Value:
    """[N, S·C, …] with weights [S·O, …]: the channels of an element are its own groups."""
    x, w, *bias = inputs
    image = folded(g, x, mapped[0], over, 1)
    weight = folded(g, w, True, over)
    shift = [folded(g, b, False, over) for b in bias]
    whole = op.replace(groups=op.groups * over.size)
    made = g.append_node(whole, [image, weight, *shift]).output
    return unfolded(g, made, _channels(op, element(w, True).dims), over, 1)


def _channels(op: Any, w: Sequence[Dim]) -> Dim:
    return w[0] if op.name == "conv" else w[1] * op.groups
