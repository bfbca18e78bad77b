"""The sizes of a dense model as a persistent kernel has them: who has which rows, and where."""

from __future__ import annotations

from functools import cached_property

from rlx.llvm.builder import Type, bf16, f16
from rlx.support.records import dataclass

WARPS = 16  # that multiply; one more copies
THREADS = 32 * WARPS
TILE = 16  # rows that a tensor core multiplies at a time
SLOT = 16_384  # bytes of a slot of the ring
ROUND = 16 * WARPS  # columns of which each warp has 16
_BOX_ROW = 128  # bytes
_MOST_SHARED = 232_448  # bytes that a block may have
_FEWEST_SLOTS = 6


@dataclass(frozen=True)
class Part:
    """What a block has of a matrix, in slots of the ring.

    A slot has `boxes` boxes of 64 columns and `height` rows each, as the copy engine writes them:
    in rows of 128 bytes, permuted. With `halves` the upper and the lower half of the rows come from
    two matrices.
    """

    rows: int
    columns: int
    halves: int = 1

    @property
    def height(self) -> int:
        return next((h for h in (64, 48, 32, 16) if self.rows % h == 0), 0)

    @property
    def boxes(self) -> int:
        most = SLOT // max(self.height, 1) // _BOX_ROW
        return next((n for n in (8, 4, 2) if n <= most and self.columns % (64 * n) == 0), 0)

    @property
    def box_bytes(self) -> int:
        return self.height * _BOX_ROW

    @property
    def box_rows(self) -> int:
        """Rows that are copied at a time."""
        return self.height // self.halves

    @property
    def across(self) -> int:
        """Slots side by side."""
        return self.columns // (64 * self.boxes)

    @property
    def down(self) -> int:
        """Slots above each other."""
        return self.rows // self.height

    @property
    def slots(self) -> int:
        return self.across * self.down

    @property
    def tiles(self) -> int:
        """Tiles of 16 rows in a slot."""
        return self.height // TILE

    @property
    def rounds(self) -> int:
        """How often each warp has 16 columns of a row."""
        return self.columns // ROUND

    @property
    def registers(self) -> int:
        """Of a thread, to hold all weights."""
        return self.rows // TILE * self.rounds * 4

    @property
    def fits(self) -> bool:
        return (
            self.rows > 0
            and self.columns % ROUND == 0
            and self.height > 0
            and self.box_rows % 8 == 0
            and self.boxes > 0
        )


@dataclass(frozen=True)
class DenseShape:
    """A dense model with RMS norms, rotated heads in groups, and a gated FFN; one row."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int  # positions of the KV cache
    ranks: int  # blocks that share a key head
    eps: float
    head_eps: float  # of the norms of heads
    scale: float  # of attention
    has_head_norms: bool
    kv_name: str = "f16"
    piece: int = 32  # positions of the KV cache that are copied and read together: 32 or 64

    # -- blocks -----------------------------------------------------------------------------------

    @property
    def blocks(self) -> int:
        return self.kv_heads * self.ranks

    @property
    def group(self) -> int:
        """Heads that share a key head."""
        return self.heads // self.kv_heads

    @property
    def group_columns(self) -> int:
        return self.group * self.head_dim

    @property
    def kv(self) -> Type:
        return f16 if self.kv_name == "f16" else bf16

    @property
    def qkv_rows(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @cached_property
    def qkv(self) -> Part:
        return Part(self.qkv_rows // self.blocks, self.hidden)

    @cached_property
    def out(self) -> Part:
        """Of the product behind attention: the columns of the block's key head."""
        return Part(self.hidden // self.ranks, self.group_columns)

    @cached_property
    def gate_up(self) -> Part:
        return Part(2 * self.ffn // self.blocks, self.hidden, 2)

    @cached_property
    def splits(self) -> int:
        """Blocks that share the columns of a row of the last product of a layer."""
        split = 1
        while self.hidden * split // self.blocks < TILE:
            split *= 2
        return split

    @cached_property
    def down(self) -> Part:
        return Part(self.hidden * self.splits // self.blocks, self.ffn // self.splits)

    @cached_property
    def head(self) -> Part:
        return Part(HEAD_ROWS, self.hidden)

    @property
    def own(self) -> int:
        """Columns of x that a thread has."""
        return self.hidden // THREADS

    # -- values that are handed over, in words ----------------------------------------------------

    @property
    def at_qkv(self) -> int:
        return 0

    @property
    def at_parts(self) -> int:
        return self.qkv_rows

    @property
    def at_weights(self) -> int:
        """The largest score and the sum of weights of each part of attention."""
        return self.at_parts + self.blocks * self.group_columns

    @property
    def at_gated(self) -> int:
        return self.at_weights + 2 * self.blocks * self.group

    @property
    def at_added(self) -> int:
        """Sums in fixed point, of what is added to x behind attention and behind the FFN: of this
        launch, and of the next."""
        return (self.at_gated + self.ffn + 3) // 4 * 4

    @property
    def at_counts(self) -> int:
        """How many layers and launches there have been."""
        return self.at_added + 8 * self.hidden

    @property
    def words(self) -> int:
        return self.at_counts + 2

    # -- shared memory, in bytes ------------------------------------------------------------------

    @cached_property
    def slots(self) -> int:
        return min(12, (_MOST_SHARED - self._behind) // SLOT)

    @property
    def planes_bytes(self) -> int:
        """Of a warp: its columns of what is multiplied, as three 16-bit numbers each."""
        return PLANES_OF_ROUND * max(self.qkv.rounds, self.down.rounds)

    @property
    def sums_bytes(self) -> int:
        """Sums of each warp for each row; there are two buffers of them."""
        most = max(self.qkv.rows, self.out.rows, self.gate_up.rows, self.down.rows)
        return SUM_STRIDE * max(most, HEAD_TILES * HEAD_ROWS)

    @property
    def _sizes(self) -> tuple[int, ...]:
        group = self.group
        return (
            8 * 2 * 12,  # mbarriers
            WARPS * self.planes_bytes,
            2 * self.sums_bytes,
            2 * 4 * WARPS,  # sums of squares
            PLANES_OF_ROUND * (self.group_columns // 16),  # planes of the result of attention
            4 * self.group_columns,  # queries
            8 * self.head_dim,  # the new key and value
            2 * 4 * WARPS * group,  # largest scores and sums of weights
            4 * WARPS * self.group_columns,  # sums of values
            8 * (FIXED_ARGS + LAYER_ARGS * self.layers),  # args
        )

    @property
    def _behind(self) -> int:
        return sum((size + 15) // 16 * 16 for size in self._sizes)

    def place(self, i: int) -> int:
        """Where the i-th of `_sizes` begins; the ring is in front."""
        before = sum((size + 15) // 16 * 16 for size in self._sizes[:i])
        return self.slots * SLOT + before

    @property
    def shared(self) -> int:
        return self.slots * SLOT + self._behind

    def unsuited(self) -> str:
        """Why there is no kernel for this shape; empty where there is one."""
        for name, number in (("hidden size", self.hidden), ("FFN's share", self.down.columns)):
            if number % THREADS:
                return f"the {name} {number} is no multiple of {THREADS}"
        if self.head_dim != 128:
            return f"heads have {self.head_dim} numbers, not 128"
        if self.group not in (1, 2, 4) or self.group_columns % 256:
            return f"{self.group} heads share a key head"
        if self.ranks not in (2, 4, 8, 16, 32):
            return f"{self.ranks} blocks a key head are no power of two"
        if self.context % self.piece:
            return f"a context of {self.context} is no multiple of {self.piece}"
        if self.ffn % (self.blocks * self.splits) or self.qkv_rows % self.blocks:
            return f"rows do not divide among {self.blocks} blocks"
        for name in ("qkv", "out", "gate_up", "down"):
            part: Part = getattr(self, name)
            if not part.fits:
                return f"{part.rows} rows of {part.columns} of {name} in a block"
        if self.slots < _FEWEST_SLOTS:
            return f"only {self.slots} slots of weights fit into shared memory"
        return ""


SUM_STRIDE = 4 * WARPS + 16  # bytes from row to row of the sums of warps
HEAD_ROWS = 32  # of the head in a slot
HEAD_TILES = 2  # times so many between two barriers
PLANES_OF_ROUND = 96  # bytes of 16 numbers
FIXED_ARGS = 13
LAYER_ARGS = 11
BARRIERS, PLANES, SUMS, SQUARES, OUT_PLANES, QUERIES, NEW_KV, MAXIMA, VALUES, ARGS = range(10)
