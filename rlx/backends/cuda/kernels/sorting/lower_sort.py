"""Lowering of sort and argsort, and of what takes many of sorted rows."""

from __future__ import annotations

from math import prod
from typing import Any

from rlx.backends.cuda.kernels.sorting.sort_runs import TILE, MergeRuns, SortTiles, TakeSorted
from rlx.backends.cuda.lowering import Context, KernelArg, KernelLaunch, lowers
from rlx.backends.kernel_args import Pointer, Scratch
from rlx.ir.dim import Dim, upper_bound
from rlx.ir.lir import aligned
from rlx.ir.node import Node, Value
from rlx.ir.shape import normalize_axis


def _sizes(node: Node) -> tuple[Dim, Dim, Dim]:
    """Rows, their elements, and the stride of these."""
    op: Any = node.op
    x = node.inputs[0].shape
    axis = normalize_axis(op.axis, x.rank)
    inner = prod(x.dims[axis + 1 :], start=1)
    return prod(x.dims[:axis], start=1) * inner, x.dims[axis], inner


def sorted_scratch(node: Node) -> int:
    """Keys and places, twice."""
    total = upper_bound(node.inputs[0].shape.num_elements, node.graph.live)
    return 2 * (aligned(8 * total) + aligned(4 * total))


def sorted_rows(
    node: Node, ctx: Context, values: Value | None, indices: Value | None, count: Dim,
    largest: bool, nan_first: bool,
) -> list[KernelLaunch]:  # fmt: skip
    """The first `count` of each row in order, and their indices."""
    x = node.inputs[0]
    rows, size, stride = _sizes(node)
    total, most = rows * size, ctx.upper(size)
    if not ctx.upper(total):
        return []
    all_of = ctx.upper(total)
    each = aligned(8 * all_of) + aligned(4 * all_of)
    halves = [
        (Scratch(node, i * each), Scratch(node, i * each + aligned(8 * all_of))) for i in (0, 1)
    ]
    tiles = -(-most // TILE)
    now, other = halves
    args: list[KernelArg] = [Pointer(x), *now, rows, size, stride, tiles]
    sort = SortTiles(x.dtype, largest, nan_first)
    launches = [KernelLaunch(sort, args, blocks=ctx.upper(rows) * tiles)]
    length = TILE
    while length < most:
        merge = MergeRuns(length.bit_length() + 1)
        launches.append(KernelLaunch(merge, [*now, *other, total, size, length], all_of))
        now, other, length = other, now, 2 * length
    take = TakeSorted(
        x.dtype.bytes, 4 if indices is None else indices.dtype.bytes, values is not None,
        indices is not None,
    )  # fmt: skip
    ends: list[KernelArg] = [0 if v is None else Pointer(v) for v in (values, indices)]
    args = [Pointer(x), now[1], *ends, rows, size, stride, count]
    return [*launches, KernelLaunch(take, args, ctx.upper(rows * count))]


@lowers("sort", "argsort", scratch=sorted_scratch, strided=False)
def lower_sort(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    _, size, _ = _sizes(node)
    values, indices = (node.output, None) if op.name == "sort" else (None, node.output)
    down = op.descending
    return sorted_rows(node, ctx, values, indices, size, down, nan_first=down)
