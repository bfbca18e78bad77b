"""How a product of many rows is computed: its tile, in how many parts, where its scratch lies.

On Hopper the tile is the one of the least estimated time: blocks take tiles in waves, and a step of
a wave takes as long as its products, or as the copy of its operands.
"""

from __future__ import annotations

from rlx.backends.cuda.batch_invariance import is_asked
from rlx.backends.cuda.kernels.gemm.gemm import LARGE, SMALL, Tile
from rlx.backends.cuda.kernels.gemm.group_gemm import GroupTile
from rlx.backends.cuda.tensor_map import TILE_COLUMNS as STEP
from rlx.ir.dtype import DType
from rlx.ir.lir import aligned
from rlx.support.records import dataclass

HOPPER = "sm_90a"  # has products of groups of four warps
BLOCKS = 132  # of a launch that fills a GPU
_MOST_SPLITS = 8
_EXACT_ROWS = 128  # up to so many rows memory is the limit, and the third plane costs nothing
_LEAST_COLUMNS = 64  # of a tile
_SUMS_OF_PARTS = 64  # of a thread, which leave room for those of the parts before
GROUP_TILES = tuple(GroupTile(m, n) for m in (128, 64) for n in (256, 192, 128, 64))
# of a multiprocessor in a cycle: products; bytes copied, and those of all together
_PRODUCTS, _COPIED, _ALL_COPIED = 2048, 80, 8000
# cycles: of a step at least, of a launch and of each block; of each sum, and of each in parts
_STEP_COST, _LAUNCH_COST, _BLOCK_COST, _SUM_COST, _PART_COST = 330, 1500, 8, 0.05, 0.2
_NEXT_PART = 400  # cycles until a block's next part is under way


@dataclass(frozen=True)
class Plan:
    """How a product of up to `m` rows is computed, and where its scratch memory lies."""

    tile: Tile | GroupTile
    tiles: int
    splits: int
    planes: int  # 0: x is read as it is
    scaled: bool
    scales_at: int
    partial_at: int
    bytes: int
    parts: int = 1  # of the columns of x that a block sums up one after another


def plan_product(
    m: int, k: int, n: int, x: DType, w: DType, pair: bool = False, groups: bool = False,
    planes: int | None = None, batch: int = 1, sums: int = 256,
) -> Plan:  # fmt: skip
    """`groups`: by groups of four warps; `planes`: of x, if not those that its types ask for;
    `batch`: so many products; `sums`: of a thread at most, times planes."""
    fixed = is_asked()
    if planes is None:
        planes = 0 if x is w else 2 if fixed or w.name == "f16" or m > _EXACT_ROWS else 3
    columns, parts = 2 * n if pair else n, 1
    tile: Tile | GroupTile
    if fixed:
        found = fixed_parts(columns, k)
        tile, splits, parts = _cheapest_of(m, columns, k, max(planes, 1), found) if groups else (
            _largest(m, columns)[0], found, 1)  # fmt: skip
        tiles = -(-m // tile.m) * -(-columns // tile.n)
    elif groups:
        tile, splits = _cheapest(m, columns, k, max(planes, 1), batch, sums)
        tiles = batch * -(-m // tile.m) * -(-columns // tile.n)
    else:
        tile, tiles = _largest(m, columns)
        splits = 1
        while 2 * splits * tiles <= BLOCKS and splits < _MOST_SPLITS and k // splits >= 512:
            splits *= 2
    scaled = planes > 0 and w.name == "f16"
    scales_at = aligned(2 * planes * m * k)
    partial_at = scales_at + aligned(4 * m if scaled else 0)
    partial = 4 * tiles * splits * tile.m * tile.n if splits > 1 else 0
    size = partial_at + partial
    return Plan(tile, tiles, splits, planes, scaled, scales_at, partial_at, size, parts)


def fixed_parts(columns: int, k: int) -> int:
    """Into how many parts the columns of x are divided, whatever the number of rows: so many that a
    few rows fill a GPU."""
    steps, tiles = -(-k // STEP), -(-columns // _LEAST_COLUMNS)
    parts = 1
    while 2 * parts * tiles <= BLOCKS and parts < _MOST_SPLITS and steps // (2 * parts) >= 4:
        parts *= 2
    each = -(-steps // parts)
    return -(-steps // each)  # none is empty


def _cheapest_of(
    m: int, columns: int, k: int, planes: int, parts: int
) -> tuple[GroupTile, int, int]:
    """The tile of the least estimated time, and whether blocks share the parts of a sum or take
    them one after another."""
    steps = -(-k // STEP)
    found: list[tuple[float, GroupTile, int, int]] = []
    for tile in GROUP_TILES:
        if 3 * (planes * tile.m + tile.n) * 2 * STEP > 225 << 10 or tile.sums * planes > 256:
            continue
        shared = estimated_cycles(m, columns, steps, planes, tile, parts)
        found.append((shared, tile, parts, 1))
        if parts > 1 and tile.sums <= _SUMS_OF_PARTS:
            alone = estimated_cycles(m, columns, steps, planes, tile, 1)
            found.append((alone + parts * _NEXT_PART, tile, 1, parts))
    return min(found, key=lambda c: c[0])[1:]


def _largest(m: int, columns: int) -> tuple[Tile, int]:
    """The largest tile of which there are enough to fill a GPU, or else the smallest."""
    known = LARGE, SMALL
    counts = [-(-m // t.m) * -(-columns // t.n) for t in known]
    found = next((i for i, count in enumerate(counts) if count >= BLOCKS), len(known) - 1)
    return known[found], counts[found]


def _cheapest(
    m: int, columns: int, k: int, planes: int, batch: int, sums: int
) -> tuple[GroupTile, int]:
    """The tile and the number of parts of the least estimated time."""
    steps = -(-k // STEP)
    found: list[tuple[float, GroupTile, int]] = []
    for tile in GROUP_TILES:
        if 3 * (planes * tile.m + tile.n) * 2 * STEP > 225 << 10 or tile.sums * planes > sums:
            continue
        for splits in (1, 2, 3, 4, 6, 8):
            each = -(-steps // splits)
            if splits == 1 or (each >= 4 and (splits - 1) * each < steps):
                cost = estimated_cycles(m, columns, steps, planes, tile, splits, batch)
                found.append((cost, tile, splits))
    _, tile, splits = min(found, key=lambda c: c[0])
    return tile, splits


def estimated_cycles(
    m: int, columns: int, steps: int, planes: int, tile: GroupTile, splits: int, batch: int = 1
) -> float:
    """Cycles of a product by tiles of this size, each by `splits` blocks."""
    items = batch * -(-m // tile.m) * -(-columns // tile.n) * splits
    active, waves = min(items, BLOCKS), -(-items // BLOCKS)
    products = planes * tile.m * tile.n * STEP / _PRODUCTS
    copied = (planes * tile.m + tile.n) * 2 * STEP / min(_COPIED, _ALL_COPIED / active)
    step = max(products, copied, _STEP_COST)
    cost = waves * (-(-steps // splits) * step + _SUM_COST * tile.m * tile.n)
    if splits > 1:
        cost += waves * _PART_COST * tile.m * tile.n * (1 + splits)
    return cost + _LAUNCH_COST + _BLOCK_COST * active
