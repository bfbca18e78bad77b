"""Products of two f32 matrices, or of as many pairs of any floats, by tensor cores of Hopper.

Both become f16 in two parts first (`split_rows.py`), whatever their strides are, so that gradients
of weights, products of transposed matrices and attention's own need no copies before.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from rlx.backends.cuda.kernels.gemm.epilogue import Epilogue
from rlx.backends.cuda.kernels.gemm.group_gemm import GroupGemm, GroupTile
from rlx.backends.cuda.kernels.gemm.many_rows import are_added_in_pairs
from rlx.backends.cuda.kernels.gemm.plan import BLOCKS, HOPPER, Plan, plan_product
from rlx.backends.cuda.kernels.gemm.split_rows import (
    PARTS,
    SplitRows,
    is_folded,
    padded,
    row_numbers,
)
from rlx.backends.cuda.lowering import Context, Counters, KernelArg, KernelLaunch, is_multiple
from rlx.backends.cuda.merge import Merged
from rlx.backends.cuda.tensor_map import Matrix, TensorMap
from rlx.backends.kernel_args import Pointer, Scratch
from rlx.ir.dim import Dim, same, upper_bound
from rlx.ir.dtype import f16
from rlx.ir.lir import aligned
from rlx.ir.node import Node, Value
from rlx.support.records import dataclass

_FEWEST = 9  # rows: fewer are multiplied at the bandwidth of memory
_LEAST = 1 << 18  # products, for which three launches pay
_FEW_SUMS = 64  # of a thread, where a bias or residual is loaded beside the scales
OPS = ("matmul", "fused_matmul_bias_act")


@dataclass(frozen=True)
class Sizes:
    """`batch` products of [m, k] by [k, n]."""

    batch: Dim
    m: Dim
    k: int
    n: int


def sizes_of(node: Node) -> Sizes | None:
    """The sizes of a node that is such products, by types and shapes alone; None of others."""
    x, w = (v.shape for v in node.inputs[:2])
    types = ("f32",) if w.rank == 2 else ("f32", "bf16", "f16")  # weights have other kernels
    if node.op.name not in OPS or any(
        v.dtype.name not in types for v in (*node.inputs, node.output)
    ):
        return None
    if x.rank < 2 or w.rank < 2 or not isinstance(w.dims[-2], int):
        return None
    k, n = w.dims[-2:]
    if not isinstance(k, int) or not isinstance(n, int) or n % 2 or not k or not n:
        return None
    if w.rank == 2:
        return Sizes(1, prod(x.dims[:-1], start=1), k, n)
    if x.rank != w.rank or not all(map(same, x.dims[:-2], w.dims[:-2])):
        return None
    return Sizes(prod(x.dims[:-2], start=1), x.dims[-2], k, n)


@dataclass(frozen=True)
class _Room:
    """Where what is in scratch memory begins."""

    plan: Plan
    weight: int
    x_scales: int
    weight_scales: int
    partial: int
    bytes: int


def _room(node: Node, batch: int, m: int, k: int, n: int) -> _Room:
    sums = _FEW_SUMS if len(node.inputs) > 2 else 256
    plan = plan_product(
        m, PARTS * padded(k), n, f16, f16, groups=True, planes=0, batch=batch, sums=sums
    )
    row, ends = 2 * row_numbers(k), [0]
    for size in (row * batch * m, row * batch * n, 4 * batch * m, 4 * batch * n, plan.bytes):
        ends.append(ends[-1] + aligned(size))
    return _Room(plan, *ends[1:])


def f32_scratch(node: Node) -> int:
    """Bytes for the parts of both matrices, and of sums."""
    sizes = sizes_of(node)
    if sizes is None:
        return 0
    batch, m = (upper_bound(d, node.graph.live) for d in (sizes.batch, sizes.m))
    pays = m >= _FEWEST and batch and batch * m * sizes.k * sizes.n >= _LEAST
    return _room(node, batch, m, sizes.k, sizes.n).bytes if pays else 0


def lower_f32(node: Node, ctx: Context) -> list[KernelLaunch] | None:
    """The launches; None where loop nests are to be taken."""
    sizes = sizes_of(node)
    if sizes is None or ctx.cpu != HOPPER:
        return None
    batch, m = ctx.upper(sizes.batch), ctx.upper(sizes.m)
    if m < _FEWEST or batch * m * sizes.k * sizes.n < _LEAST:
        return None
    op: Any = node.op
    extras, bias, residual = node.inputs[2:], None, None
    if extras:
        bias, residual = op.extras(*extras)
        plain = all(ctx.is_plain(v) for v in extras)
        fits = residual is None or residual.shape.same_dims(node.output.shape)
        if not (plain and fits and are_added_in_pairs(sizes.n, extras, ctx)):
            return None
    epilogue = Epilogue(
        node.output.dtype, getattr(op, "activation", "none"),
        None if bias is None else bias.dtype, None if residual is None else residual.dtype,
    )  # fmt: skip
    made = _Product(node, ctx, sizes, batch, m, _room(node, batch, m, sizes.k, sizes.n))
    return made.launches(epilogue, extras)


@dataclass(frozen=True)
class _Product:
    node: Node
    ctx: Context
    sizes: Sizes
    batch: int  # at most
    m: int
    room: _Room

    def launches(self, epilogue: Epilogue, extras: Sequence[Value]) -> list[KernelLaunch] | None:
        room, n = self.room, self.sizes.n
        first = self._split(0, self.sizes.m, self.m, 0, room.x_scales)
        second = self._split(1, n, n, room.weight, room.weight_scales)
        if first is None or second is None:
            return None
        return [*_together(first, second), self._gemm(epilogue, extras)]

    def _split(
        self, number: int, rows: Dim, most: int, at: int, scales: int
    ) -> KernelLaunch | None:  # fmt: skip
        """The parts of an operand; None if no two strides say where its matrices are."""
        value, weight = self.node.inputs[number], number == 1
        dims, strides = list(value.shape.dims), list(self.ctx.strides(value))
        if weight:  # its columns are what is multiplied with rows
            dims[-2:], strides[-2:] = dims[:-3:-1], strides[:-3:-1]
        cut = 0 if self.node.inputs[1].shape.rank == 2 else len(dims) - 2
        outer, inner = levels(dims[:cut], strides[:cut]), levels(dims[cut:-1], strides[cut:-1])
        if len(outer) > 2 or len(inner) > 1:
            return None
        (_, far), (few, apart) = [(1, 0), (1, 0), *outer][-2:]
        row, step = inner[0][1] if inner else 0, strides[-1]
        fours = [far, apart, row, self.ctx.offset(value)]
        kernel = SplitRows(
            self.sizes.k, weight, step != 1 and self.sizes.k > 1,
            step == 1 and all(is_multiple(d, 4) for d in fours), value.dtype,
        )  # fmt: skip
        args: list[KernelArg] = [
            Pointer(value), far, apart, few, row, step, Scratch(self.node, at),
            Scratch(self.node, scales), rows, rows * self.sizes.batch,
        ]  # fmt: skip
        return KernelLaunch(kernel, args, blocks=kernel.blocks(self.batch * most))

    def _gemm(self, epilogue: Epilogue, extras: Sequence[Value]) -> KernelLaunch:
        node, sizes, room, plan = self.node, self.sizes, self.room, self.room.plan
        assert isinstance(plan.tile, GroupTile)
        k, is_batch = PARTS * padded(sizes.k), sizes.batch != 1
        kernel = GroupGemm(
            plan.tile, f16, 1, k, sizes.n, True, True, plan.splits, epilogue, batched=is_batch,
            folded=is_folded(sizes.k),
        )  # fmt: skip
        row = row_numbers(sizes.k)
        rows = Matrix(f16, self.batch * self.m, row, row, plan.tile.m)
        weights = Matrix(f16, self.batch * sizes.n, row, row, kernel.box)
        shared: list[KernelArg] = [0, 0]
        if plan.splits > 1:
            shared = [Scratch(node, room.partial), Counters(plan.tiles)]
        blocks = min(plan.tiles * plan.splits, BLOCKS)  # tiles of all matrices
        args: list[KernelArg] = [
            TensorMap(Scratch(node), rows), 0, Scratch(node, room.x_scales),
            TensorMap(Scratch(node, room.weight), weights), 0, Scratch(node, room.weight_scales),
            *shared, sizes.m, blocks, *([sizes.batch] if is_batch else []), Pointer(node.output),
            *(Pointer(v) for v in extras),
        ]  # fmt: skip
        return KernelLaunch(kernel, args, blocks=blocks)


def _together(first: KernelLaunch, second: KernelLaunch) -> list[KernelLaunch]:
    """Both operands by one launch, if their kernels have as many threads: neither reads what the
    other writes."""
    a, b = first.kernel, second.kernel
    assert isinstance(a, SplitRows) and isinstance(b, SplitRows)
    if a.threads != b.threads:
        return [first, second]
    parts = ((a, first.blocks, len(first.args)), (b, second.blocks, len(second.args)))
    blocks = first.blocks + second.blocks
    return [KernelLaunch(Merged(parts), [*first.args, *second.args], blocks=blocks)]


def levels(dims: Sequence[Dim], strides: Sequence[Dim]) -> list[tuple[Dim, Dim]]:
    """Axes as few pairs of a size and a stride, the first ones first."""
    found: list[tuple[Dim, Dim]] = []
    for dim, step in zip(reversed(dims), reversed(strides), strict=True):
        if dim == 1:
            continue
        if found and same(step, found[0][1] * found[0][0]):
            found[0] = found[0][0] * dim, found[0][1]
        else:
            found.insert(0, (dim, step))
    return found
