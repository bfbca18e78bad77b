"""Prefill tiles: how scores, queries and values lie, and the micro-kernels of QKᵀ and PV.

Scores are kept transposed, [keys][rows]. Keys then need no rearrangement (they are the broadcast
operand), softmax runs along the lanes without horizontal steps, and the probabilities lie as PV
wants its broadcast operand. A query panel is `vectors` registers of rows, packed as
[head_dim][rows]. Values are packed in panels of `width` registers of columns.

With the bf16 dot product (`vdpbf16ps`) a lane holds a pair of neighbours on the summed axis: two
dimensions of a query, or the probabilities of two keys and their values.
"""

from __future__ import annotations

from operator import add

from rlx.backends.cpu.kernels.attention.problem import KV_BLOCK, Problem
from rlx.llvm.builder import Function, Type, Value, bf16, i16, vec
from rlx.llvm.target import Target
from rlx.support.records import dataclass

_UNROLL = 4  # steps of QKᵀ
_LANES = 16  # of the bf16 dot product
_SMALL_HEAD = 4  # registers of a head up to which tiles pad fewer rows: PV is short


def has_bf16_dot(target: Target, head_dim: int) -> bool:
    """Whether the target has a bf16 dot product, and the head is whole vectors of pairs."""
    fits = head_dim % (2 * _LANES) == 0 and target.lanes(32) == _LANES
    return fits and target.is_x86 and target.bf16


def to_bf16(f: Function, first: Value, second: Value) -> Value:
    """Two vectors rounded to bf16, one after the other, as i16."""
    lanes = first.type.lanes
    name = f"llvm.x86.avx512bf16.cvtne2ps2bf16.{32 * lanes}"
    both = f.intrinsic(name, vec(2 * lanes, bf16), second, first)
    return both.bits(vec(2 * lanes, i16))


def interleave_bf16(f: Function, first: Value, second: Value) -> Value:
    """Two vectors rounded to bf16 and interleaved: the first in the low halves of lanes."""
    lanes = first.type.lanes
    order = [i // 2 + i % 2 * lanes for i in range(2 * lanes)]
    return f.shuffle(to_bf16(f, first, second), None, order).bits(first.type)


def dot_bf16(f: Function, a: Value, b: Value, total: Value) -> Value:
    """total + the bf16 dot product of every lane's pairs."""
    lanes = total.type.lanes
    wide = vec(2 * lanes, bf16)
    name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * lanes}"
    return f.intrinsic(name, total.type, total, a.bits(wide), b.bits(wide))


def multiply_add(f: Function, pair: int, a: Value, b: Value, total: Value) -> Value:
    """total + a * b, or the bf16 dot product of every lane's pairs."""
    return f.fma(a, b, total) if pair == 1 else dot_bf16(f, a, b, total)


def split_bf16(both: Value) -> list[Value]:
    """Interleaved bf16 pairs as two vectors: the low and the high halves of lanes."""
    bits = both.bits()
    return [(bits << 16).bits(both.type), (bits & 0xFFFF0000).bits(both.type)]


@dataclass(frozen=True)
class Tiling:
    """Sizes of panels, tiles and blocks for a target."""

    acc: Type
    """Accumulator type."""
    head_dim: int
    lanes: int
    vectors: int
    """Registers of rows in a query panel."""
    keys: int
    """Keys of a QKᵀ tile: a divisor of a KV block."""
    rows: int
    """Rows of a PV tile; a panel is a multiple."""
    width: int
    """Registers of columns in a PV tile."""
    v_panels: int
    """Panels of values."""
    panels: int
    """Panels of a query block."""
    pair: int
    """Elements that a lane multiplies at once: 2 with the bf16 dot product."""
    parts: int
    """Chains of a score."""

    @staticmethod
    def of(target: Target, problem: Problem, rows: int) -> Tiling:
        """For a target; `rows` is the most a KV head can have (0: unknown)."""
        lanes = problem.lanes(target)
        room = 24 if target.num_vector_registers >= 32 else 12  # registers for a tile
        # A query block has enough rows to amortise copying keys and values.
        vectors, tile_rows, keys, block = 3, 6, room // 3, 96
        columns = -(-problem.head_dim // lanes)
        if room == 24 and columns <= _SMALL_HEAD and lanes % 4 == 0:
            vectors, tile_rows, keys, block = 2, 8, 8, 128
        if 0 < rows <= 2 * lanes and lanes % 4 == 0:
            vectors, tile_rows = -(-rows // lanes), 4
            keys = 1 << (room // vectors).bit_length() - 1
        v_panels = -(-columns // (room // tile_rows))
        panel = vectors * lanes
        panels = max(1, block // panel)
        if rows:
            panels = min(panels, -(-rows // panel))
        return Tiling(
            acc=problem.acc,
            head_dim=problem.head_dim,
            lanes=lanes,
            vectors=vectors,
            keys=keys,
            rows=tile_rows,
            width=-(-columns // v_panels),
            v_panels=v_panels,
            panels=panels,
            pair=problem.pair,
            parts=problem.score_parts(target),
        )

    @property
    def vector(self) -> Type:
        return vec(self.lanes, self.acc)

    @property
    def panel(self) -> int:
        """Rows of a query panel."""
        return self.vectors * self.lanes

    @property
    def score_row_bytes(self) -> int:
        """One key's scores, or one (pair of) dimension(s) of a query panel."""
        return self.panel * self.acc.bytes

    @property
    def v_row_bytes(self) -> int:
        """The values of one key (pair) in a panel of values."""
        return self.width * self.lanes * self.acc.bytes

    @property
    def columns(self) -> int:
        """Columns of values, with padding."""
        return self.v_panels * self.width * self.lanes

    @property
    def dim_steps(self) -> int:
        """Steps of QKᵀ over the dimensions of a head."""
        return self.head_dim // self.pair

    @property
    def key_bytes(self) -> int:
        return self.dim_steps * self.acc.bytes

    @property
    def q_panel_bytes(self) -> int:
        """A packed panel of queries."""
        return self.dim_steps * self.score_row_bytes

    @property
    def v_panel_bytes(self) -> int:
        """A panel of values of a KV block."""
        return KV_BLOCK // self.pair * self.v_row_bytes


@dataclass(frozen=True)
class WorkspaceLayout:
    """Byte offsets in the workspace of one worker.

    Per row of a query block: `masks` (its first mask element), `ends` and `starts` (its range of
    visible keys). Per row of a panel: `factors` (which rescale the accumulators) and `inverses`
    (1 / running sum)."""

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
    def of(t: Tiling) -> WorkspaceLayout:
        count = t.panels * t.panel
        sizes = [
            KV_BLOCK * t.key_bytes,
            t.v_panels * t.v_panel_bytes,
            KV_BLOCK * t.score_row_bytes,
            t.panels * t.q_panel_bytes,
            t.score_row_bytes,
            t.score_row_bytes,
            count * 8,
            *[count * 4] * 2,
        ]
        offsets = [0]
        for size in sizes:
            offsets.append(offsets[-1] + -(-size // 64) * 64)
        return WorkspaceLayout(*offsets)


def emit_qk(f: Function, t: Tiling, queries: Value, keys: Value) -> list[Value]:
    """QKᵀ of one tile, [keys][rows]: `t.keys` keys against a query panel. A score is the sum of
    `t.parts` chains (see `Problem.score_parts`)."""
    zeros = [f.const(0.0, t.vector)] * (t.keys * t.vectors)

    def chain(part: Value) -> list[Value]:
        return f.loop(part, t.dim_steps, unroll * t.parts, zeros, step)

    def step(d: Value, *acc: Value) -> list[Value]:
        total = list(acc)
        q, k = f.gep(queries, d, t.score_row_bytes), f.gep(keys, d, t.acc.bytes)
        for u in range(0, unroll * t.parts, t.parts):
            rows = [
                f.load(q, t.vector, u * t.score_row_bytes + j * t.vector.bytes)
                for j in range(t.vectors)
            ]
            for i in range(t.keys):
                key = f.broadcast_load(k, t.acc, t.lanes, i * t.key_bytes + u * t.acc.bytes)
                for j, row in enumerate(rows):
                    at = i * t.vectors + j
                    total[at] = multiply_add(f, t.pair, row, key, total[at])
        return total

    steps = t.dim_steps // t.parts
    unroll = next(n for n in (_UNROLL, 4, 2, 1) if steps % n == 0)
    first = chain(f.i64(0))
    return f.loop(1, t.parts, 1, first, lambda part, *sums: list(map(add, sums, chain(part))))


def emit_pv(
    f: Function, t: Tiling, probs: Value, values: Value, count: Value, start: list[Value]
) -> list[Value]:
    """start + PV of one tile over `count` keys: `t.width` registers of a row, then of the next.

    `probs` points at the tile's first row in the first key's probabilities, `values` at the panel.
    """

    def step(k: Value, *total: Value) -> list[Value]:
        w, v = f.gep(probs, k, t.score_row_bytes), f.gep(values, k, t.v_row_bytes)
        columns = [f.load(v, t.vector, j * t.vector.bytes) for j in range(t.width)]
        out = []
        for i in range(t.rows):
            p = f.broadcast_load(w, t.acc, t.lanes, i * t.acc.bytes)
            for j, column in enumerate(columns):
                out.append(multiply_add(f, t.pair, p, column, total[i * t.width + j]))
        return out

    return f.loop(0, (count + (t.pair - 1)).udiv(t.pair), 1, start, step)
