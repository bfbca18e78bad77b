"""Lowering of products whose rows have weights of their own.

A few rows read the weights of their experts, each for itself, in one launch. Many rows are put in
the order of their experts, and multiplied by tensor cores, tiles of one expert in one launch.
"""

from __future__ import annotations

from typing import Any

from rlx.backends.cuda.batch_invariance import is_asked
from rlx.backends.cuda.kernels.experts.expert_groups import ExpertGroupGemm, tile_for
from rlx.backends.cuda.kernels.experts.grouped_gemm import GroupedGemm
from rlx.backends.cuda.kernels.experts.sort_rows import ENTRY, MOST_EXPERTS, SortRows
from rlx.backends.cuda.kernels.gemm.epilogue import Epilogue
from rlx.backends.cuda.kernels.gemm.gemm import LARGE, SMALL, Tile
from rlx.backends.cuda.kernels.gemm.gemv import gemv_for
from rlx.backends.cuda.kernels.gemm.plan import BLOCKS, HOPPER
from rlx.backends.cuda.kernels.gemm.planes import Planes
from rlx.backends.cuda.kernels.gemm.problem import is_aligned, row_stride
from rlx.backends.cuda.kernels.gemm.weight_rows import FloatRows, WeightRows
from rlx.backends.cuda.kernels.qgemm.packed_rows import PackedRows
from rlx.backends.cuda.kernels.qgemm.unpack_weight import UnpackWeight
from rlx.backends.cuda.lower_loops import lower_region, scratch_bytes
from rlx.backends.cuda.lowering import Context, KernelArg, KernelLaunch, Layouts, lowers
from rlx.backends.cuda.tensor_map import Matrix, TensorMap
from rlx.backends.kernel_args import NodeNumber, Pointer, Scratch, Status
from rlx.ir.dim import upper_bound
from rlx.ir.dtype import DType, f16
from rlx.ir.lir import aligned
from rlx.ir.node import Node
from rlx.support.records import dataclass

_FLOATS = ("f32", "bf16", "f16")
_FEW = 128  # rows that read weights each for itself
_LARGE_TILE = 96  # rows of an expert, on average, from which on tiles are large
_MOST_UNPACKED = 256 << 20  # bytes of decoded weights in scratch memory
_EXACT_ROWS = 128  # up to so many, all bits of x are kept


@dataclass(frozen=True)
class Problem:
    """x [t, k] · weights of experts [experts, n, k]; scratch memory begins with the planes of x."""

    t: int  # at most
    k: int
    n: int
    experts: int
    x: DType
    w: DType  # as tensor cores read it

    @property
    def tile(self) -> Tile:
        return LARGE if self.t >= _LARGE_TILE * self.experts else SMALL

    @property
    def tiles(self) -> int:
        """There are at most."""
        return -(-self.t // self.tile.m) + min(self.experts, self.t)

    @property
    def planes(self) -> int:
        if self.x is self.w:
            return 1
        return 2 if self.w is f16 or self.t > _EXACT_ROWS else 3

    @property
    def scaled(self) -> bool:
        return self.w is f16 and self.x is not f16

    @property
    def offsets(self) -> list[int]:
        """Of scales, order, tiles, the first of them, and the end."""
        sizes = [2 * self.planes * self.t * self.k, 4 * self.t, 4 * self.t, ENTRY * self.tiles]
        sizes.append(4 * self.experts + 4)
        return [sum(map(aligned, sizes[: i + 1])) for i in range(len(sizes))]

    @property
    def suits(self) -> bool:
        """Whether tensor cores multiply it."""
        even = self.k % 8 == 0 and self.n % 2 == 0 and self.k > 0 and self.n > 0
        wanted = even and self.t > _FEW and not is_asked()
        return wanted and 0 < self.experts <= MOST_EXPERTS


class _Sorted:
    """The launches of tensor cores; scratch memory begins at `at`."""

    def __init__(self, node: Node, p: Problem, stride: Any, at: int, cpu: str) -> None:
        self.node, self.p, self.stride, self.on_hopper = node, p, stride, cpu == HOPPER
        self.planes = Scratch(node, at)
        found = (Scratch(node, at + offset) for offset in p.offsets)
        self.scales, self.order, self.tiles, self.begins, _ = found

    def rows(self) -> list[KernelLaunch]:
        """The rows of x in the order of their experts, as planes."""
        p, (x, _, ids) = self.p, self.node.inputs
        rows = ids.shape.dims[0]
        sort = SortRows(ids.dtype, p.experts, p.tile.m)
        args: list[KernelArg] = [Pointer(ids), rows, self.order, self.tiles, p.tiles]
        args += [Status(), NodeNumber(self.node), self.begins]
        split = Planes(x.dtype, p.w, p.planes, p.k, p.scaled, chosen=True)
        more: list[KernelArg] = [Pointer(x), self.stride, self.planes, p.t * p.k, self.scales]
        more += [rows, self.order]
        return [
            KernelLaunch(sort, args, blocks=1),
            KernelLaunch(split, more, blocks=split.blocks(p.t)),
        ]

    def product(
        self, weights: Pointer | Scratch, columns: KernelArg, first: int, count: int
    ) -> KernelLaunch:
        """With the weights of some experts."""
        return (self._by_groups if self.on_hopper else self._by_warps)(
            weights, columns, first, count
        )

    def _by_groups(
        self, weights: Pointer | Scratch, columns: KernelArg, first: int, count: int
    ) -> KernelLaunch:
        p = self.p
        tile = tile_for(p.tile.m, p.n)
        kernel = ExpertGroupGemm(
            tile,
            p.w,
            p.planes,
            p.k,
            p.n,
            p.scaled,
            columns != 0,
            1,
            Epilogue(self.node.output.dtype),
        )
        x = TensorMap(self.planes, Matrix(p.w, p.planes * p.t, p.k, p.k, tile.m))
        w = TensorMap(weights, Matrix(p.w, count * p.n, p.k, p.k, kernel.box))
        scales: KernelArg = self.scales if p.scaled else 0
        blocks = min(p.tiles * -(-p.n // kernel.columns), BLOCKS)
        args: list[KernelArg] = [
            x, p.t, scales, w, 0, columns, 0, 0, p.t, blocks, Pointer(self.node.output),
            self.tiles, self.begins, self.order, first, count,
        ]  # fmt: skip
        return KernelLaunch(kernel, args, blocks=blocks)

    def _by_warps(
        self, weights: Pointer | Scratch, columns: KernelArg, first: int, count: int
    ) -> KernelLaunch:
        p = self.p
        kernel = GroupedGemm(
            p.tile, p.w, p.planes, p.k, p.n, False, p.scaled, 1, Epilogue(self.node.output.dtype),
            column_scaled=columns != 0,
        )  # fmt: skip
        args: list[KernelArg] = [
            self.planes, p.k, p.t * p.k, self.scales, weights, 0, 0, 0, p.tiles * p.tile.m,
            Pointer(self.node.output), self.tiles, self.order, columns, first, count,
        ]  # fmt: skip
        return KernelLaunch(kernel, args, blocks=p.tiles * -(-p.n // kernel.columns))


def _each(
    node: Node, ctx: Context, weight: WeightRows, sizes: tuple[int, int, int], stride: Any
) -> list[KernelLaunch]:
    """Every row by itself; `sizes` are those of k and n, and the number of experts."""
    x, w, ids = node.inputs
    k, n, experts = sizes
    rows, most = ids.shape.dims[0], ctx.upper(ids.shape.dims[0])
    wide = n if is_asked() else n * min(most, 16)
    kernel = gemv_for(
        weight, x.dtype, 1, k, wide, Epilogue(node.output.dtype), many=True,
        experts=ids.dtype,
    )  # fmt: skip
    args: list[KernelArg] = [Pointer(x), stride, Pointer(w), 0, n, rows, Pointer(node.output)]
    args += [Pointer(ids), experts, Status(), NodeNumber(node)]
    blocks = most * kernel.blocks(n)
    return [KernelLaunch(kernel, args, blocks=blocks, reads=node.inputs, writes=[node.output])]


# -- weights of floats -----------------------------------------------------------------------------


def _sizes(node: Node) -> tuple[int, int, int] | None:
    """k, n and the number of experts, if kernels take such types and sizes."""
    x, w, _ = node.inputs
    if any(v.dtype.name not in _FLOATS for v in (x, w, node.output)):
        return None
    if not all(isinstance(d, int) and d > 0 for d in w.shape.dims):
        return None
    experts, k, n = (int(d) for d in w.shape.dims)  # type: ignore[arg-type]
    return (k, n, experts) if k % (16 // w.dtype.bytes) == 0 else None


def _problem(node: Node, sizes: tuple[int, int, int]) -> Problem | None:
    """The problem of tensor cores, if they multiply it."""
    x, w, ids = node.inputs
    k, n, experts = sizes
    found = Problem(
        upper_bound(ids.shape.dims[0], node.graph.live), k, n, experts, x.dtype, w.dtype
    )
    return found if w.dtype.bytes == 2 and found.suits else None


def _scratch(node: Node) -> int:
    sizes = _sizes(node)
    found = None if sizes is None else _problem(node, sizes)
    return max(scratch_bytes(node), 0 if found is None else found.offsets[-1])


@lowers("grouped_matmul", scratch=_scratch)
def lower_grouped(node: Node, ctx: Context) -> list[KernelLaunch]:
    x, w, _ = node.inputs
    sizes, stride = _sizes(node), row_stride(x, ctx)
    if sizes is None or stride is None or 0 in x.shape.dims or not _lie_well(node, ctx, sizes):
        return lower_region(node, ctx)
    found = _problem(node, sizes)
    if found is None:
        return _each(node, ctx, FloatRows(w.dtype), sizes, stride)
    made = _Sorted(node, found, stride, 0, ctx.cpu)
    return [*made.rows(), made.product(Pointer(w), 0, 0, found.experts)]


def _lie_well(node: Node, layouts: Layouts, sizes: tuple[int, int, int]) -> bool:
    x, w, ids = node.inputs
    k, n, experts = sizes
    wanted = (n * k if experts > 1 else layouts.strides(w)[0], 1, k)
    aligned_ones = is_aligned(x, layouts) and is_aligned(w, layouts)
    return aligned_ones and layouts.is_plain(ids) and tuple(layouts.strides(w)) == wanted


# -- packed weights --------------------------------------------------------------------------------


def _packed_sizes(node: Node) -> tuple[int, int, int]:
    op: Any = node.op
    rows, k = int(node.inputs[1].shape.dims[0]), int(node.inputs[0].shape.dims[1])  # type: ignore[arg-type]
    return k, rows // op.experts, op.experts


def _unpacked(node: Node) -> Problem | None:
    """The problem of tensor cores, if experts are decoded for it."""
    k, n, experts = _packed_sizes(node)
    x, _, ids = node.inputs
    found = Problem(upper_bound(ids.shape.dims[0], node.graph.live), k, n, experts, x.dtype, f16)
    return found if found.suits and 2 * n * k <= _MOST_UNPACKED else None


def _at_once(p: Problem) -> int:
    """How many experts are decoded at a time."""
    return min(p.experts, _MOST_UNPACKED // (2 * p.n * p.k))


def _weights_bytes(p: Problem) -> int:
    """Of decoded weights, and of what their rows are multiplied with."""
    rows = _at_once(p) * p.n
    return aligned(2 * rows * p.k) + aligned(4 * rows)


def _packed_scratch(node: Node) -> int:
    found = _unpacked(node)
    return 0 if found is None else _weights_bytes(found) + found.offsets[-1]


def _reads(node: Node, layouts: Layouts) -> bool:
    x, _, ids = node.inputs
    return row_stride(x, layouts) is not None and is_aligned(x, layouts) and layouts.is_plain(ids)


@lowers("packed_planes_grouped_matmul", strided=_reads, scratch=_packed_scratch)
def lower_packed_grouped(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    x, w, _ = node.inputs
    stride, weight, found = row_stride(x, ctx), PackedRows(op.scheme.name), _unpacked(node)
    if 0 in node.output.shape.dims:
        return []
    if found is None:
        return _each(node, ctx, weight, _packed_sizes(node), stride)
    made, kernel = (
        _Sorted(node, found, stride, _weights_bytes(found), ctx.cpu),
        UnpackWeight(weight, found.k),
    )
    each, launches = _at_once(found), made.rows()
    scales = Scratch(node, aligned(2 * each * found.n * found.k))
    for first in range(0, found.experts, each):
        count = min(each, found.experts - first)
        rows = count * found.n
        packed = Pointer(w, first * found.n * weight.row_bytes(found.k))
        launches += [
            KernelLaunch(
                kernel, [packed, Scratch(node), scales, rows], blocks=-(-rows // kernel.rows)
            ),
            made.product(Scratch(node), scales, first, count),
        ]
    return launches
