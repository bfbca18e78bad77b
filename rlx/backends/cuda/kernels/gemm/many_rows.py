"""The launches of a product of many rows: planes of x where it has other numbers, then tiles."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cuda.kernels.gemm.epilogue import Epilogue
from rlx.backends.cuda.kernels.gemm.gemm import Gemm, Tile
from rlx.backends.cuda.kernels.gemm.group_gemm import GroupGemm, GroupTile
from rlx.backends.cuda.kernels.gemm.plan import BLOCKS, Plan
from rlx.backends.cuda.kernels.gemm.planes import Planes
from rlx.backends.cuda.kernels.gemm.problem import is_aligned
from rlx.backends.cuda.lowering import Context, Counters, KernelArg, KernelLaunch
from rlx.backends.cuda.tensor_map import Matrix, TensorMap
from rlx.backends.kernel_args import NodeArg, Pointer, Scratch
from rlx.ir.dim import Dim
from rlx.ir.dtype import DType
from rlx.ir.node import Node, Value
from rlx.support.records import dataclass

Place = Pointer | Scratch


@dataclass(frozen=True)
class ManyRows:
    """x [m, k] · wᵀ [n, k]; m is at most `most`. Scratch memory of the plan begins at `scratch`."""

    node: Node
    plan: Plan
    x: Value
    x_stride: Dim
    m: Dim
    most: int
    k: int
    n: int
    weight: DType
    epilogue: Epilogue
    epilogue_args: Sequence[NodeArg]
    scratch: int = 0
    fixed: bool = False  # no kernel writes the weights

    def launches(
        self, weights: Sequence[Place], by_rows: bool = False, column_scales: KernelArg = 0
    ) -> list[KernelLaunch]:
        groups = isinstance(self.plan.tile, GroupTile)
        last = self._by_groups(weights, column_scales) if groups else self._by_warps(
            weights, by_rows)  # fmt: skip
        return [*self._planes(), last]

    def _at(self, offset: int = 0) -> Scratch:
        return Scratch(self.node, self.scratch + offset)

    @property
    def _scales(self) -> KernelArg:
        return self._at(self.plan.scales_at) if self.plan.scaled else 0

    @property
    def _shared(self) -> list[KernelArg]:
        """Where parts of sums lie, and counters of them."""
        plan = self.plan
        return [self._at(plan.partial_at), Counters(plan.tiles)] if plan.splits > 1 else [0, 0]

    def _planes(self) -> list[KernelLaunch]:
        plan = self.plan
        if not plan.planes:
            return []
        kernel = Planes(self.x.dtype, self.weight, plan.planes, self.k, plan.scaled)
        args = [
            Pointer(self.x), self.x_stride, self._at(), self.most * self.k, self._scales, self.m,
        ]  # fmt: skip
        return [KernelLaunch(kernel, args, blocks=kernel.blocks(self.most))]

    def _by_warps(self, weights: Sequence[Place], by_rows: bool) -> KernelLaunch:
        plan = self.plan
        assert isinstance(plan.tile, Tile)
        kernel = Gemm(
            plan.tile, self.weight, max(plan.planes, 1), self.k, self.n, by_rows, plan.scaled,
            plan.splits, self.epilogue,
        )  # fmt: skip
        x: list[KernelArg] = [Pointer(self.x), self.x_stride, 0, 0]
        if plan.planes:
            x = [self._at(), self.k, self.most * self.k, self._scales]
        second: KernelArg = weights[1] if self.epilogue.pair else 0
        args = [*x, weights[0], second, *self._shared, self.m, *self.epilogue_args]
        return KernelLaunch(kernel, args, blocks=plan.tiles * plan.splits)

    def _by_groups(self, weights: Sequence[Place], column_scales: KernelArg) -> KernelLaunch:
        plan, k = self.plan, self.k
        assert isinstance(plan.tile, GroupTile)
        kernel = GroupGemm(
            plan.tile, self.weight, max(plan.planes, 1), k, self.n, plan.scaled,
            column_scales != 0, plan.splits, self.epilogue, self.fixed,
            parts=plan.parts,
        )  # fmt: skip
        if plan.planes:
            rows = Matrix(self.weight, plan.planes * self.most, k, k, plan.tile.m)
            x = TensorMap(self._at(), rows)
        else:
            assert isinstance(self.x_stride, int)
            x = TensorMap(
                Pointer(self.x), Matrix(self.weight, self.most, k, self.x_stride, plan.tile.m)
            )
        matrix = Matrix(self.weight, self.n, k, k, kernel.box)
        maps: list[KernelArg] = [TensorMap(w, matrix) for w in weights]
        if len(maps) == 1:
            maps.append(0)
        blocks = min(plan.tiles * plan.splits, BLOCKS)
        apart = self.most if plan.planes > 1 else 0
        args = [
            x, apart, self._scales, *maps, column_scales, *self._shared, self.m, blocks,
            *self.epilogue_args,
        ]  # fmt: skip
        return KernelLaunch(kernel, args, blocks=blocks)


def are_fixed(weights: Sequence[Value], ctx: Context) -> bool:
    """Whether no kernel of a program writes the weights."""
    return all(ctx.lir.home(w)[1].kind in ("param", "constant") for w in weights)


def can_be_mapped(x: Value, stride: Dim, m: Dim, ctx: Context) -> bool:
    """Whether a tensor map can describe x: it lies at a known place, and all rows that a run could
    have are there."""
    is_placed = isinstance(ctx.offset(x), int) and isinstance(stride, int)
    return is_placed and (isinstance(m, int) or ctx.lir.home(x)[1].kind == "arena")


def are_added_in_pairs(n: int, extras: Sequence[Value], ctx: Context) -> bool:
    """Whether two neighbours of the result, and of what is added to it, can be read together."""
    return n % 2 == 0 and all(is_aligned(v, ctx) for v in extras)
