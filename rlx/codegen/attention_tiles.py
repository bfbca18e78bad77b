"""How a block of many rows is held, and the two products on it.

Scores are kept transposed, [keys][rows]. Keys then need no rearrangement (they are the operand that
is broadcast), softmax runs down the lanes without any horizontal step, and the weights lie as the
second product wants its broadcast operand. A panel is `vectors` registers of rows; the rows of q
are packed per panel, [head_dim][rows]. Values lie in slabs of `width` registers of columns.

Where numbers are multiplied in pairs of bf16, a lane holds two neighbours on the axis that is
summed over: two dimensions of a query, the weights of two keys and their values.
"""

from __future__ import annotations

from rlx.codegen.attention import Problem
from rlx.codegen.attention_pairs import multiply
from rlx.codegen.emit import Function, Type, Value, vec
from rlx.codegen.target import Target
from rlx.support.records import dataclass

_NARROW = 4  # registers of a head up to which rows are padded less: its products are short


@dataclass(frozen=True)
class Tiling:
    sums: Type
    head_dim: int
    lanes: int
    vectors: int
    """Registers of rows in a panel."""
    keys: int
    """Keys of a tile of scores."""
    rows: int
    """Rows of a tile of results; a panel is a multiple."""
    width: int
    """Registers of columns in a tile of results."""
    slabs: int
    panels: int
    """Panels of a block of rows."""
    block: int
    """Keys that are copied at a time; an even number."""
    pair: int
    """Numbers that a lane multiplies at once."""

    @staticmethod
    def of(target: Target, problem: Problem, rows: int) -> Tiling:
        """For a target; `rows` is the most that there can be of a key head (0: not known)."""
        lanes = problem.lanes(target)
        room = 24 if target.num_vector_registers >= 32 else 12  # registers for a tile
        # A block is enough rows to make up for copying as many keys and values once for all.
        vectors, tile_rows, keys, block = 3, 6, room // 3, 96
        columns = -(-problem.head_dim // lanes)
        if room == 24 and columns <= _NARROW and lanes % 4 == 0:
            vectors, tile_rows, keys, block = 2, 8, 8, 128
        if 0 < rows <= 2 * lanes and lanes % 4 == 0:
            vectors, tile_rows, block = -(-rows // lanes), 4, 96
            keys = min(room // vectors, 12)
        slabs = -(-columns // (room // tile_rows))
        panel = vectors * lanes
        panels = max(1, block // panel)
        if rows:
            panels = min(panels, -(-rows // panel))
        return Tiling(
            sums=problem.sums,
            head_dim=problem.head_dim,
            lanes=lanes,
            vectors=vectors,
            keys=keys,
            rows=tile_rows,
            width=-(-columns // slabs),
            slabs=slabs,
            panels=panels,
            block=block,
            pair=2 if problem.pairs else 1,
        )

    @property
    def vector(self) -> Type:
        return vec(self.lanes, self.sums)

    @property
    def panel(self) -> int:
        """Rows of a panel."""
        return self.vectors * self.lanes

    @property
    def panel_bytes(self) -> int:
        """One step of a panel: a key's scores, or one (pair of) dimension(s) of the queries."""
        return self.panel * self.sums.bytes

    @property
    def slab_bytes(self) -> int:
        """One (pair of) key's values in a slab."""
        return self.width * self.lanes * self.sums.bytes

    @property
    def columns(self) -> int:
        """Columns of values, with padding."""
        return self.slabs * self.width * self.lanes

    @property
    def dim_steps(self) -> int:
        """Steps of a product over the dimensions of a head."""
        return self.head_dim // self.pair

    @property
    def key_bytes(self) -> int:
        return self.dim_steps * self.sums.bytes

    @property
    def query_bytes(self) -> int:
        """A panel of queries."""
        return self.dim_steps * self.panel_bytes

    @property
    def slab_block_bytes(self) -> int:
        """A slab of the values of a block of keys."""
        return self.block // self.pair * self.slab_bytes

    def multiply(self, f: Function, a: Value, b: Value, total: Value) -> Value:
        """total + a * b, or the sum of both products of every lane."""
        return f.fma(a, b, total) if self.pair == 1 else multiply(f, a, b, total)


@dataclass(frozen=True)
class Places:
    """Byte offsets in the working memory of one worker. Tables have an entry for each row of a
    block: where its part of the mask begins, and between which keys it sees. `factors` and
    `inverses` have one for each row of a panel."""

    keys: int
    values: int
    scores: int
    queries: int
    factors: int
    inverses: int
    masks: int
    ends: int
    starts: int
    size: int

    @staticmethod
    def of(t: Tiling) -> Places:
        count = t.panels * t.panel
        sizes = [
            t.block * t.key_bytes,
            t.slabs * t.slab_block_bytes,
            (t.block + t.pair - 1) * t.panel_bytes,
            t.panels * t.query_bytes,
            t.panel_bytes,
            t.panel_bytes,
            count * 8,
            *[count * 4] * 2,
        ]
        offsets = [0]
        for size in sizes:
            offsets.append(offsets[-1] + -(-size // 64) * 64)
        return Places(*offsets)


def emit_scores(f: Function, t: Tiling, queries: Value, keys: Value) -> list[Value]:
    """Scores [keys][rows] of one tile: `t.keys` keys against a panel of queries."""
    size = t.sums.bytes
    unroll = 2 if t.dim_steps % 2 == 0 else 1

    def step(d: Value, *sums: Value) -> list[Value]:
        total = list(sums)
        q, k = f.gep(queries, d, t.panel_bytes), f.gep(keys, d, size)
        for u in range(unroll):
            rows = [
                f.load(q, t.vector, u * t.panel_bytes + j * t.vector.bytes)
                for j in range(t.vectors)
            ]
            for i in range(t.keys):
                key = f.broadcast_load(k, t.sums, t.lanes, i * t.key_bytes + u * size)
                for j, row in enumerate(rows):
                    at = i * t.vectors + j
                    total[at] = t.multiply(f, row, key, total[at])
        return total

    zero = f.const(0.0, t.vector)
    return f.loop(0, t.dim_steps, unroll, [zero] * (t.keys * t.vectors), step)


def emit_values(
    f: Function, t: Tiling, weights: Value, values: Value, count: Value, start: list[Value]
) -> list[Value]:
    """start + weights · values for a tile of rows and `count` keys: `t.width` registers of a row,
    then those of the next.

    `weights` points at the tile's first row in the first key's scores, `values` at the slab.
    """

    def step(k: Value, *total: Value) -> list[Value]:
        w, v = f.gep(weights, k, t.panel_bytes), f.gep(values, k, t.slab_bytes)
        columns = [f.load(v, t.vector, j * t.vector.bytes) for j in range(t.width)]
        out = []
        for i in range(t.rows):
            weight = f.broadcast_load(w, t.sums, t.lanes, i * t.sums.bytes)
            for j, column in enumerate(columns):
                out.append(t.multiply(f, weight, column, total[i * t.width + j]))
        return out

    return f.loop(0, (count + (t.pair - 1)).udiv(t.pair), 1, start, step)
