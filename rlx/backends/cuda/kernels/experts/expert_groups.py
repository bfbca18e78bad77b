"""Products of many rows with weights of their experts on Hopper: the tiles of `group_gemm`.

A tile has rows of one expert, in the order of `sort_rows`. The copy engine takes rows and weights
from any row on; what it copies beside the expert's is multiplied, but not stored.
"""

from __future__ import annotations

from rlx.backends.cuda.builder import BlockFunction, KernelModule
from rlx.backends.cuda.kernels.experts.sort_rows import ENTRY
from rlx.backends.cuda.kernels.gemm.group_gemm import Emitter, GroupGemm, GroupTile
from rlx.llvm.builder import Value, i32, i64
from rlx.support.records import dataclass

_WIDTHS = (256, 192, 128, 64)


def tile_for(rows: int, n: int) -> GroupTile:
    """The tile of so many rows that takes the least time: a tile costs as 64 columns more would."""
    return GroupTile(rows, min(_WIDTHS, key=lambda w: -(-n // w) * (w + 64)))


@dataclass(frozen=True)
class ExpertGroupGemm(GroupGemm):
    """args: those of a product in one part; then the tiles, the number of the first tile of each
    expert (i32), the numbers (i32) of the rows, the first expert of those whose weights these are,
    and how many there are

    Weights are [experts, n, k].
    """

    @property
    def label(self) -> str:
        return f"expert gemm({self.tile.m}x{self.tile.n}x{self.k})"

    def emit(self, m: KernelModule) -> None:
        _Emitter(m.begin_block(self.threads, self.shared), self).emit()


class _Emitter(Emitter):
    def __init__(self, f: BlockFunction, kernel: GroupGemm) -> None:
        super().__init__(f, kernel)
        args = f["args"]
        self.tiles, self.begins, self.order = (f.arg(args, i) for i in (11, 12, 13))
        self.first_expert, self.count = (f.arg(args, i, i32) for i in (14, 15))

    def begin_tiles(self) -> None:
        """The tiles of these experts follow each other."""
        f = self.f
        ends = [
            f.load(f.gep(self.begins, e.to(i64), 4), i32)
            for e in (self.first_expert, self.first_expert + self.count)
        ]
        self.first_tile = ends[0]
        self.items = (ends[1] - ends[0]) * self.across

    def place(self, item: Value) -> tuple[Value, Value, Value, Value, Value]:
        """Neighbouring items read the same rows. The product is the number of an expert."""
        f = self.f
        number = item.udiv(self.across)
        entry = f.gep(self.tiles, (self.first_tile + number).to(i64), ENTRY)
        expert, row, end = (f.load(entry, i32, 4 * i) for i in range(3))
        self.m = end
        column = (item - number * self.across) * self.kernel.columns
        return item, f.i32(0), row, column, expert - self.first_expert

    def corner(self, row: Value, column: Value, product: Value) -> tuple[Value, Value]:
        return row, column + product * self.kernel.n

    def first_row(self, product: Value) -> Value | None:
        return None

    def first_scale(self, product: Value) -> Value:
        return product * self.kernel.n

    def target(self, row: Value) -> Value:
        return self.f.load(self.f.gep(self.order, row, 4), i32).to(i64)
