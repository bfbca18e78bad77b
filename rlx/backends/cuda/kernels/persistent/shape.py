"""The sizes of a dense model as a persistent kernel has them: who has which rows, and where."""

from __future__ import annotations

from functools import cached_property

from rlx.llvm.builder import Type, bf16, f16
from rlx.support.records import dataclass

WARPS = 16  # that multiply; one more copies
THREADS = 32 * WARPS
TILE = 16  # rows that a tensor core multiplies at a time
PIECE = 32  # positions of the KV cache that are copied and read together
_PAYLOAD = 8192  # weights of a slot
_PAD = 16  # bytes behind a row in shared memory: eight rows lie in different banks
_MOST_SHARED = 232_448  # bytes that a block may have
_FEWEST_SLOTS = 6


@dataclass(frozen=True)
class Part:
    """What a block has of a matrix, in slots of the ring: of each, `height` rows of `width`
    columns."""

    rows: int
    columns: int

    @property
    def width(self) -> int:
        return min(self.columns, _PAYLOAD // TILE)

    @property
    def height(self) -> int:
        return _PAYLOAD // self.width

    @property
    def slabs(self) -> int:
        """Slots side by side."""
        return self.columns // self.width

    @property
    def tiles(self) -> int:
        """Slots above each other."""
        return self.rows // self.height

    @property
    def slots(self) -> int:
        return self.tiles * self.slabs

    @property
    def stride(self) -> int:
        """Bytes from row to row in a slot."""
        return 2 * self.width + _PAD

    @property
    def teams(self) -> int:
        """Groups of warps, each of which has 16 rows of a slot."""
        return self.height // TILE

    @property
    def fits(self) -> bool:
        return (
            self.columns % self.width == 0
            and self.width in (256, 512)
            and self.rows > 0
            and self.rows % self.height == 0
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
        return Part(2 * self.ffn // self.blocks, self.hidden)

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
        return Part(TILE, self.hidden)

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
    def at_out(self) -> int:
        return self.at_weights + 2 * self.blocks * self.group

    @property
    def at_gated(self) -> int:
        return self.at_out + self.kv_heads * self.hidden

    @property
    def at_down(self) -> int:
        return self.at_gated + self.ffn

    @property
    def words(self) -> int:
        """All of them, and the number of layers that have run."""
        return self.at_down + self.splits * self.hidden + 4

    # -- shared memory, in bytes ------------------------------------------------------------------

    @property
    def slot_bytes(self) -> int:
        parts = (self.qkv, self.out, self.gate_up, self.down)
        return max(p.height * p.stride for p in parts)

    @cached_property
    def slots(self) -> int:
        return min(12, (_MOST_SHARED - self._behind) // self.slot_bytes)

    @property
    def planes_bytes(self) -> int:
        """Of a warp: its columns of what is multiplied, as three 16-bit numbers each."""
        return 192 * max(self.qkv.slabs, self.gate_up.slabs, self.down.slabs, self.head.slabs)

    @property
    def sums_bytes(self) -> int:
        """Sums of each warp for each row; there are two buffers of them."""
        most = max(self.qkv.rows, self.out.rows, self.gate_up.rows, self.down.rows)
        return SUM_STRIDE * max(most, HEAD_TILES * TILE)  # the head has half of its own in each

    @property
    def _sizes(self) -> tuple[int, ...]:
        group = self.group
        return (
            8 * 2 * 12,  # mbarriers
            WARPS * self.planes_bytes,
            2 * self.sums_bytes,
            2 * 4 * WARPS,  # sums of squares
            192 * (self.group_columns // 32),  # planes of the result of attention
            4 * self.group_columns,  # queries
            8 * self.head_dim,  # the new key and value
            2 * 4 * WARPS * group,  # largest scores and sums of weights
            4 * WARPS * self.group_columns,  # sums of values
        )

    @property
    def _behind(self) -> int:
        return sum((size + 15) // 16 * 16 for size in self._sizes)

    def place(self, i: int) -> int:
        """Where the i-th of `_sizes` begins; the ring is in front."""
        before = sum((size + 15) // 16 * 16 for size in self._sizes[:i])
        return self.slots * self.slot_bytes + before

    @property
    def shared(self) -> int:
        return self.slots * self.slot_bytes + self._behind

    def unsuited(self) -> str:
        """Why there is no kernel for this shape; empty where there is one."""
        if self.hidden % THREADS:
            return f"the hidden size {self.hidden} is no multiple of {THREADS}"
        if self.head_dim != 128:
            return f"heads have {self.head_dim} numbers, not 128"
        if self.group not in (1, 2, 4) or self.group_columns % 256:
            return f"{self.group} heads share a key head"
        if self.ranks not in (2, 4, 8, 16, 32):
            return f"{self.ranks} blocks a key head are no power of two"
        if self.context % PIECE:
            return f"a context of {self.context} is no multiple of {PIECE}"
        if self.vocab % TILE:
            return f"a vocabulary of {self.vocab} is no multiple of {TILE}"
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
HEAD_TILES = 4  # tiles of the head between two barriers
BARRIERS, PLANES, SUMS, SQUARES, OUT_PLANES, QUERIES, NEW_KV, MAXIMA, VALUES = range(9)
