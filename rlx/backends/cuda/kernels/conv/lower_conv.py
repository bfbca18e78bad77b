"""Lowering of convolutions: windows as rows of a product by tensor cores, some pictures at a time;
those with groups, or few products, tap by tap."""

from __future__ import annotations

from math import prod

from rlx.backends.cuda.builder import THREADS
from rlx.backends.cuda.kernels.conv.conv_form import Convolution, convolution_of, suits
from rlx.backends.cuda.kernels.conv.direct_conv import DirectConv
from rlx.backends.cuda.kernels.conv.split_windows import SplitWindows
from rlx.backends.cuda.kernels.gemm.epilogue import Epilogue
from rlx.backends.cuda.kernels.gemm.group_gemm import GroupGemm, GroupTile
from rlx.backends.cuda.kernels.gemm.many_rows import are_added_in_pairs, are_fixed
from rlx.backends.cuda.kernels.gemm.plan import BLOCKS, HOPPER, Plan, plan_product
from rlx.backends.cuda.kernels.gemm.split_rows import (
    PARTS,
    SplitRows,
    is_folded,
    padded,
    row_numbers,
)
from rlx.backends.cuda.lowering import (
    Context,
    Counters,
    KernelArg,
    KernelLaunch,
    Layouts,
    lowers,
)
from rlx.backends.cuda.tensor_map import Matrix, TensorMap
from rlx.backends.kernel_args import Pointer, Scratch
from rlx.ir.dim import Dim, upper_bound
from rlx.ir.dtype import DType, f16
from rlx.ir.lir import aligned
from rlx.ir.node import Node
from rlx.support.records import dataclass

_LEAST = 1 << 18  # products, for which three launches pay
_LEAST_K = 8  # of a sum
_FEW_SUMS = 64  # of a thread, where a bias is loaded beside the scales
_MOST_ROWS = 512 << 20  # bytes of windows that are written at a time, but for one picture's


@dataclass(frozen=True)
class _Room:
    """How the product of a convolution is computed, and where what is in scratch memory begins."""

    element: DType
    parts: int
    pictures: int  # at a time
    plan: Plan
    weight: int
    x_scales: int
    weight_scales: int
    partial: int
    bytes: int


def _room(c: Convolution) -> _Room | None:
    """None where the convolution is computed tap by tap."""
    live, k, n = c.node.graph.live, c.windows.k, c.out
    batch, places = upper_bound(c.batch, live), upper_bound(c.places, live)
    if c.groups > 1 or n % 2 or k < _LEAST_K or batch * places * k * n < _LEAST:
        return None
    whole = c.x is c.w and c.x.bytes == 2 and k % 8 == 0
    element, parts = (c.x, 1) if whole else (f16, PARTS)
    row = 2 * (padded(k) if whole else row_numbers(k))
    pictures = batch
    if isinstance(c.batch, int):
        pictures = max(1, min(batch, _MOST_ROWS // (row * places)))
    m, sums = pictures * places, 256 if c.bias is None else _FEW_SUMS
    plan = plan_product(m, parts * padded(k), n, element, element, groups=True, planes=0, sums=sums)
    ends = [0]
    for size in (row * m, 0 if whole else row * n, 4 * m, 4 * n, plan.bytes):
        ends.append(ends[-1] + aligned(size))
    return _Room(element, parts, pictures, plan, *ends[1:])


def _scratch(node: Node) -> int:
    room = _room(convolution_of(node))
    return 0 if room is None else room.bytes


def _reads(node: Node, layouts: Layouts) -> tuple[int, ...]:
    """Pictures may lie anyhow."""
    return (0,)


@lowers("conv", "conv_act", when=suits, scratch=_scratch, strided=_reads)
def lower_conv(node: Node, ctx: Context) -> list[KernelLaunch]:
    if 0 in node.output.shape.dims:
        return []
    c = convolution_of(node)
    room = _room(c)
    if room is None or ctx.cpu != HOPPER:
        return [_direct(c, ctx)]
    w = node.inputs[1]
    if not are_added_in_pairs(c.out, node.inputs[2:], ctx) or not isinstance(ctx.offset(w), int):
        return [_direct(c, ctx)]
    made = _Product(c, ctx, room)
    launches = [] if room.parts == 1 else [made.split_weight()]
    step = room.pictures
    for first in range(0, upper_bound(c.batch, ctx.lir.live), step):
        count = c.batch if not isinstance(c.batch, int) else min(step, c.batch - first)
        launches += [made.split_windows(first, count), made.gemm(first, count)]
    return launches


def _direct(c: Convolution, ctx: Context) -> KernelLaunch:
    x, w, *bias = c.node.inputs
    kernel = DirectConv(
        c.windows, c.groups, c.out, c.x, c.w, c.bias, c.node.output.dtype, c.activation
    )
    args: list[KernelArg] = [
        Pointer(x), *c.strides(ctx), Pointer(w), Pointer(bias[0]) if bias else 0,
        Pointer(c.node.output), *c.size, *c.counts, c.batch,
    ]  # fmt: skip
    count = ctx.upper(prod(c.node.output.shape.dims, start=1))
    return KernelLaunch(kernel, args, blocks=-(-count // THREADS))


@dataclass(frozen=True)
class _Product:
    """Windows [m, k] times the rows of the weight [out, k]."""

    c: Convolution
    ctx: Context
    room: _Room

    def _at(self, offset: int) -> Scratch:
        return Scratch(self.c.node, offset)

    def split_weight(self) -> KernelLaunch:
        c, room, k = self.c, self.room, self.c.windows.k
        kernel = SplitRows(k, True, False, k % 4 == 0 and c.w.bytes == 4, c.w)
        args: list[KernelArg] = [
            Pointer(c.node.inputs[1]), 0, 0, 1, k, 1, self._at(room.weight),
            self._at(room.weight_scales), c.out, c.out,
        ]  # fmt: skip
        return KernelLaunch(kernel, args, blocks=kernel.blocks(c.out))

    def split_windows(self, first: int, count: Dim) -> KernelLaunch:
        """The windows of `count` pictures from `first` on."""
        c, room, strides = self.c, self.room, self.c.strides(self.ctx)
        kernel = SplitWindows(
            c.windows.k, False, True, False, c.x, c.windows, whole=room.parts == 1
        )
        rows = count * c.places
        args: list[KernelArg] = [
            Pointer(c.node.inputs[0], strides[0] * first), *strides, c.counts[0], self._at(0),
            self._at(room.x_scales), c.counts[1], rows, *c.size,
        ]  # fmt: skip
        return KernelLaunch(kernel, args, blocks=kernel.blocks(self.ctx.upper(rows)))

    def gemm(self, first: int, count: Dim) -> KernelLaunch:
        c, room, plan, scaled = self.c, self.room, self.room.plan, self.room.parts > 1
        assert isinstance(plan.tile, GroupTile)
        k, node = room.parts * padded(c.windows.k), c.node
        epilogue = Epilogue(node.output.dtype, c.activation, c.bias)
        weight = node.inputs[1]
        kernel = GroupGemm(
            plan.tile, room.element, 1, k, c.out, scaled, scaled, plan.splits, epilogue,
            not scaled and are_fixed([weight], self.ctx), pictures=True,
            folded=scaled and is_folded(c.windows.k), parts=plan.parts,
        )  # fmt: skip
        row = row_numbers(c.windows.k) if scaled else k
        most = room.pictures * upper_bound(c.places, self.ctx.lir.live)
        start = self._at(room.weight) if scaled else Pointer(weight)
        shared: list[KernelArg] = [0, 0]
        if plan.splits > 1:
            shared = [self._at(room.partial), Counters(plan.tiles)]
        blocks = min(plan.tiles * plan.splits, BLOCKS)
        bias = [Pointer(v) for v in node.inputs[2:]]
        args: list[KernelArg] = [
            TensorMap(self._at(0), Matrix(room.element, most, row, row, plan.tile.m)), 0,
            self._at(room.x_scales) if scaled else 0,
            TensorMap(start, Matrix(room.element, c.out, row, row, kernel.box)), 0,
            self._at(room.weight_scales) if scaled else 0, *shared, count * c.places, blocks,
            c.places, Pointer(node.output, c.places * (c.out * first)), *bias,
        ]  # fmt: skip
        return KernelLaunch(kernel, args, blocks=blocks)
