"""The sizes of a dense model as a persistent kernel has them: who has which rows, and where."""

from __future__ import annotations

from functools import cached_property
from math import gcd

from rlx.backends.cuda.builder import WARP
from rlx.llvm.builder import Type, Value, bf16, f16
from rlx.support.records import dataclass

WARPS = 16  # that multiply; one more copies
THREADS = 32 * WARPS
TILE = 16  # rows that a tensor core multiplies at a time; a slot has a multiple of so many
_BOX_ROW = 128  # bytes
COPY_UNIT = 16  # bytes: where a tile begins in a row, and how wide it is
_MOST_BOXES = 8
_MOST_SHARED = 232_448  # bytes that a block may have
_FEWEST_SLOTS = 6


@dataclass(frozen=True)
class Side:
    """What packed weights have beside their quants: `unit` bytes for so many columns of a row."""

    name: str  # of the part of a row, see `row_planes`
    columns: int
    unit: int

    def used(self, columns: int) -> int:
        """Bytes that so many columns have."""
        return -(-columns // self.columns) * self.unit

    def bytes(self, columns: int) -> int:
        """What is copied of a row, wherever a multiple of so many columns begins: tiles begin at
        multiples of 16 bytes only. Rows of higher bits are an odd number of such apart, so that
        eight of them are read at a time without conflicts."""
        used = self.used(columns)
        before = COPY_UNIT - gcd(used, COPY_UNIT)
        units = -(-(before + used) // COPY_UNIT)
        return COPY_UNIT * (units | 1 if self.name == "high" else units)


@dataclass(frozen=True)
class Weights:
    """How a type of weights lies in the ring."""

    per_box: int  # columns in 128 bytes
    step: int  # columns that a warp multiplies at a time
    slot: int  # bytes of a slot
    sides: tuple[Side, ...] = ()


_SCALES, _PAIRS = Side("scales", 32, 2), Side("supers", 256, 4)
_SLOT = 19_456  # bytes: 64 rows of 512 columns of Q4_K
WEIGHTS = {
    "": Weights(64, 16, 16_384),  # bf16
    "Q8_0": Weights(128, 32, 17_408, (_SCALES,)),
    "Q4_0": Weights(256, 32, _SLOT, (_SCALES,)),
    "Q4_K": Weights(256, 32, _SLOT, (_SCALES, _PAIRS)),
    "Q5_K": Weights(256, 32, _SLOT, (_SCALES, _PAIRS, Side("high", 32, 4))),
    "Q6_K": Weights(256, 32, _SLOT, (_SCALES, Side("supers", 256, 2), Side("high", 32, 8))),
}


@dataclass(frozen=True)
class Part:
    """What a block has of a matrix, in slots of the ring.

    A slot has `boxes` boxes of 128 bytes of `height` rows, as the copy engine writes them,
    permuted. Behind them is what lies beside packed quants, row by row. With `halves` the upper and
    the lower half of the rows come from two matrices, whose rows have `whole` columns.
    """

    rows: int
    columns: int
    whole: int
    halves: int = 1
    scheme: str = ""
    tallest: int = 64

    @property
    def weights(self) -> Weights:
        return WEIGHTS[self.scheme]

    @property
    def maps(self) -> int:
        """Tensor maps of the matrix."""
        return 1 + len(self.weights.sides)

    @property
    def height(self) -> int:
        heights = [h for h in (64, 48, 32, 16) if h <= self.tallest]
        return next((h for h in heights if self.rows % h == 0), 0)

    @property
    def teams(self) -> int:
        """Warps of each team divide the columns, teams the rows of a slot."""
        return 2 if 2 * self.columns == WARPS * self.weights.step else 1

    @property
    def round(self) -> int:
        """Columns of which each warp of a team has a step."""
        return WARPS * self.weights.step // self.teams

    @property
    def round_boxes(self) -> int:
        return self.round // self.weights.per_box

    @property
    def boxes(self) -> int:
        """As many as fit, in whole rounds; or half a round."""
        most, each = _MOST_BOXES, self.round_boxes
        for n in range(most, 0, -1):
            rounds = n % each == 0 or 2 * n == each
            across = self.columns % (n * self.weights.per_box) == 0
            if rounds and across and self._slot_bytes(n) <= self.weights.slot:
                return n
        return 0

    @property
    def box_bytes(self) -> int:
        return self.height * _BOX_ROW

    @property
    def box_rows(self) -> int:
        """Rows that are copied at a time."""
        return self.height // self.halves

    @property
    def slot_columns(self) -> int:
        return self.boxes * self.weights.per_box

    def side_bytes(self, i: int) -> int:
        """Of a row of a slot."""
        return self.weights.sides[i].bytes(self.slot_columns)

    def side_at(self, i: int) -> int:
        """Where what lies beside the quants begins in a slot."""
        before = sum(self.height * self.side_bytes(j) for j in range(i))
        return self.boxes * self.box_bytes + before

    def _slot_bytes(self, boxes: int) -> int:
        columns = boxes * self.weights.per_box
        row = boxes * _BOX_ROW + sum(s.bytes(columns) for s in self.weights.sides)
        return self.height * row

    @property
    def slot_bytes(self) -> int:
        return self._slot_bytes(self.boxes)

    @property
    def across(self) -> int:
        """Slots side by side."""
        return self.columns // self.slot_columns

    @property
    def down(self) -> int:
        """Slots above each other."""
        return self.rows // self.height

    @property
    def slots(self) -> int:
        return self.across * self.down

    @property
    def tile(self) -> int:
        """Rows that a warp multiplies at a time: of packed weights, one or two lanes have a row."""
        return WARP if self.scheme and self.height % (WARP * self.teams) == 0 else TILE

    @property
    def lanes(self) -> int:
        """Of a row of packed weights."""
        return WARP // self.tile

    @property
    def tiles(self) -> int:
        """Tiles of a slot that a warp has."""
        return self.height // self.tile // self.teams

    @property
    def rounds(self) -> int:
        """How often each warp has a step of a row."""
        return self.columns // self.round

    def left(self, share: Value | int) -> Value | int:
        """Slots that are left of the `share`-th piece of a row of the matrix, as far as that
        matters: where copies of what lies beside quants begin."""
        used = [side.used(self.columns) for side in self.weights.sides]
        return share * self.across if any(n % COPY_UNIT for n in used) else 0

    @property
    def registers(self) -> int:
        """Of a thread, to hold all weights."""
        return self.down * self.tiles * self.rounds * self.tile_registers

    @property
    def tile_registers(self) -> int:
        """The same for a tile and a step."""
        weights = self.weights
        beside = sum(max(1, side.unit // 4) for side in weights.sides)
        return weights.step * 128 // weights.per_box * self.tile // (4 * WARP) + beside

    @property
    def fits(self) -> bool:
        return (
            self.rows > 0
            and self.columns % self.round == 0
            and self.height % (TILE * self.teams) == 0
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
    schemes: tuple[str, ...] = ("",) * 5  # of q k v, out, gate and up, down, head; empty for bf16
    others: tuple[str, str] = ("", "")  # of v and of down in some of the layers, if they differ
    widest: int = 6144  # columns of the FFN's last product that a block has, at most

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

    @property
    def qk_rows(self) -> int:
        return (self.heads + self.kv_heads) * self.head_dim

    @cached_property
    def qkv(self) -> Part:
        return self._qkv(self.schemes[0])

    def _qkv(self, scheme: str) -> Part:
        """A block has rows of q and k of one type and rows of v of another, if need be: then they
        are copied 16 at a time."""
        rows = self.qkv_rows // self.blocks
        tallest = TILE if self.others[0] and self.qk_rows % rows else 64
        return Part(rows, self.hidden, self.hidden, scheme=scheme, tallest=tallest)

    @cached_property
    def out(self) -> Part:
        """Of the product behind attention: the columns of the block's key head."""
        columns = self.heads * self.head_dim
        return Part(self.hidden // self.ranks, self.group_columns, columns, scheme=self.schemes[1])

    @cached_property
    def gate_up(self) -> Part:
        rows = 2 * self.ffn // self.blocks
        return Part(rows, self.hidden, self.hidden, 2, self.schemes[2])

    @cached_property
    def splits(self) -> int:
        """Blocks that share the columns of a row of the last product of a layer."""
        split = 1
        while self.hidden * split // self.blocks < TILE:
            split *= 2
        while self.ffn // split > self.widest and self.ffn % (2 * split * THREADS) == 0:
            split *= 2
        return split

    @cached_property
    def down(self) -> Part:
        return self._down(self.schemes[3])

    def _down(self, scheme: str) -> Part:
        rows = self.hidden * self.splits // self.blocks
        return Part(rows, self.ffn // self.splits, self.ffn, scheme=scheme)

    @cached_property
    def other_v(self) -> Part | None:
        """Rows of v where they have another type."""
        return self._qkv(self.others[0]) if self.others[0] else None

    @cached_property
    def other_down(self) -> Part | None:
        return self._down(self.others[1]) if self.others[1] else None

    @cached_property
    def head(self) -> Part:
        return Part(HEAD_ROWS, self.hidden, self.hidden, scheme=self.schemes[4])

    @property
    def head_parts(self) -> int:
        """Slots above each other of the head, of all blocks."""
        return -(-self.vocab // HEAD_ROWS)

    @property
    def is_packed(self) -> bool:
        return bool(self.schemes[0])

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Of the matrices of a layer: q k v, out, gate, up, down, then those of other types."""
        others = [part for part in (self.other_v, self.other_down) if part is not None]
        return self.qkv, self.out, self.gate_up, self.gate_up, self.down, *others

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
        """Sums in fixed point of what attention and the FFN add to x: of this launch, the next."""
        return (self.at_gated + self.ffn + 3) // 4 * 4

    @property
    def at_counts(self) -> int:
        """How many layers and launches there have been."""
        return self.at_added + 8 * self.hidden

    @property
    def at_x(self) -> int:
        """x at the start, as it is read again."""
        return (self.at_counts + 2 + 3) // 4 * 4

    @property
    def words(self) -> int:
        return self.at_x + self.hidden

    @property
    def ahead(self) -> int:
        """Slots that are best filled at a time: weights of narrow layers are less in the way of
        values when there are fewer of them under way."""
        return 2 if self.own <= 2 else 3

    # -- shared memory, in bytes ------------------------------------------------------------------

    @cached_property
    def slot_bytes(self) -> int:
        """Room for what a slot holds, a multiple of 1024."""
        pieces = min(4 * self.piece * self.head_dim, 2 * 64 * self.head_dim)
        most = max(pieces, *(part.slot_bytes for part in (*self.parts, self.head)))
        return -(-most // 1024) * 1024

    @cached_property
    def slots(self) -> int:
        return min(12, (_MOST_SHARED - self._before(len(self._sizes))) // self.slot_bytes)

    @property
    def step(self) -> int:
        """Columns that a warp multiplies at a time."""
        return self.qkv.weights.step

    @property
    def record(self) -> int:
        """Bytes of such columns: planes of three 16-bit numbers, or digits and their scale."""
        return 112 if self.is_packed else 96

    @property
    def planes_bytes(self) -> int:
        """Of a warp: its columns of what is multiplied."""
        return self.record * max(self.qkv.rounds, self.down.rounds)

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
            max(2 * self.sums_bytes, 4 * WARPS * self.group_columns),  # of rows, or of values
            2 * 4 * WARPS,  # sums of squares
            self.record * (self.group_columns // self.step),  # planes of the result of attention
            4 * self.group_columns,  # queries
            8 * self.head_dim,  # the new key and value
            2 * 4 * WARPS * group,  # largest scores and sums of weights
            8 * (self.fixed_args + self.layer_args * self.layers),  # args
        )

    # -- args -------------------------------------------------------------------------------------

    @property
    def maps(self) -> int:
        """Tensor maps of a layer; those of a matrix follow each other."""
        return sum(part.maps for part in self.parts)

    @property
    def layer_args(self) -> int:
        return self.maps + POINTERS

    @property
    def fixed_args(self) -> int:
        """Those of the launch; at the end are the maps of what lies beside the head's quants."""
        return FIXED_ARGS + self.head.maps - 1

    def _before(self, i: int) -> int:
        return sum((size + 15) // 16 * 16 for size in self._sizes[:i])

    def place(self, i: int) -> int:
        """Where the i-th of `_sizes` begins; the ring is in front."""
        return self.slots * self.slot_bytes + self._before(i)

    @property
    def at_position(self) -> int:
        """Where the new position is, among the args; behind it how many layers there have been."""
        return self.place(ARGS) + 8 * POSITION

    def pieces(self, position: Value) -> Value:
        """Those of the KV cache before a position."""
        return (position + (self.piece - 1)).udiv(self.piece)

    @property
    def shared(self) -> int:
        return self.place(len(self._sizes))

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
        if any(bool(s) != self.is_packed for s in (*self.schemes, *filter(None, self.others))):
            return "some weights are packed, others are not"
        for name in ("qkv", "out", "gate_up", "down", "head", "other_v", "other_down"):
            part: Part | None = getattr(self, name)
            if part is not None and not part.fits:
                return f"{part.rows} rows of {part.columns} of {name} in a block"
        if self.slots < _FEWEST_SLOTS:
            return f"only {self.slots} slots of weights fit into shared memory"
        return ""


SUM_STRIDE = 4 * WARPS + 16  # bytes from row to row of the sums of warps
HEAD_ROWS = 32  # of the head in a slot
HEAD_TILES = 2  # times so many between two barriers
FIXED_ARGS = 13
POSITION = 6  # which of them
POINTERS = 7  # of a layer, beside tensor maps; the last says which matrices are of other types
BARRIERS, PLANES, SUMS, SQUARES, OUT_PLANES, QUERIES, NEW_KV, MAXIMA, ARGS = range(9)
