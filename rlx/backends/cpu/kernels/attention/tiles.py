"""Prefill tiles: how scores, queries and values lie, and the micro-kernels of QKᵀ and PV.

Scores are kept transposed, [keys][rows]. Keys then need no rearrangement (they are the broadcast
operand), softmax runs along the lanes without horizontal steps, and the probabilities lie as PV
wants its broadcast operand. A query panel is `vectors` registers of rows, packed as
[head_dim][rows]. Values are packed in panels of `width` registers of columns.

With the bf16 dot product (`vdpbf16ps`) a lane holds a pair of neighbours on the summed axis: two
dimensions of a query, or the probabilities of two keys and their values.

Queries are packed into panels; the keys and values of a KV block are copied together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import add

from rlx.backends.cpu.kernels.attention.problem import KV_BLOCK, Args, Problem, Rows, load_q8
from rlx.ir.dtype import DType
from rlx.llvm.builder import Function, Module, Type, Value, bf16, i16, i64, ptr, vec
from rlx.llvm.storage import load, memory_type
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
        if columns <= _SMALL_HEAD and lanes % 4 == 0:
            vectors, tile_rows, keys, block = 2, room // 3, room // 3, 128
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
    steps = t.dim_steps // t.parts
    unroll = next(n for n in (_UNROLL, 4, 2, 1) if steps % n == 0)

    def step(d: Value, acc: list[Value]) -> list[Value]:
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

    def chain(part: Value) -> list[Value]:
        sums = f.carry(zeros)
        for d in sums.range(part, t.dim_steps, unroll * t.parts):
            sums.values = step(d, sums.values)
        return sums.values

    score = f.carry(chain(f.i64(0)))
    for part in score.range(1, t.parts):
        score.values = list(map(add, score.values, chain(part)))
    return score.values


def emit_pv(
    f: Function, t: Tiling, probs: Value, values: Value, count: Value, start: list[Value]
) -> list[Value]:
    """start + PV of one tile over `count` keys: `t.width` registers of a row, then of the next.

    `probs` points at the tile's first row in the first key's probabilities, `values` at the panel.
    """
    total = f.carry(start)
    for k in total.range(0, (count + (t.pair - 1)).udiv(t.pair)):
        w, v = f.gep(probs, k, t.score_row_bytes), f.gep(values, k, t.v_row_bytes)
        columns = [f.load(v, t.vector, j * t.vector.bytes) for j in range(t.width)]
        out = []
        for i in range(t.rows):
            p = f.broadcast_load(w, t.acc, t.lanes, i * t.acc.bytes)
            for j, column in enumerate(columns):
                out.append(multiply_add(f, t.pair, p, column, total.values[i * t.width + j]))
        total.values = out
    return total.values


_MAX_UNROLL = 16  # vectors of a row that are copied without a loop


def emit_copy_kv(m: Module, name: str, problem: Problem, t: Tiling) -> Function:
    """void copy_k(ptr src, i64 row, i64 step, i64 count, ptr dst): `count` rows of k or v.

    Keys become [count][head_dim], values panels of [block][width]. The copy avoids cache conflicts:
    rows of a KV cache or of a concatenated tensor are a power of two apart. The last key is
    repeated up to a whole tile; with the bf16 dot product an odd last value is paired with itself.
    """
    params = [("src", ptr), ("row", i64), ("step", i64), ("count", i64), ("dst", ptr)]
    f = m.function(f"copy_{name}", params, internal=True)
    lanes = problem.vector_width(name, f.target)
    is_values, last = name == "v", f["count"] - 1
    width = t.width * t.lanes if is_values else t.head_dim
    rows, vectors = (t.pair, 1) if is_values else (1, t.pair)
    repeats = rows if is_values else t.keys
    for row in f.range(0, f.ceil_div(f["count"], repeats) * repeats, rows):
        sources = [f.gep(f["src"], f.min(row + i, last) * f["row"]) for i in range(rows)]
        row_bytes = width * t.acc.bytes // vectors
        dst = f.gep(f["dst"], row.udiv(rows), row_bytes)
        for first in range(0, t.head_dim, width):
            to = f.gep(dst, first // width * t.v_panel_bytes)
            for d in _steps(f, min(width, t.head_dim - first), lanes * vectors):
                found = [
                    _load_kv(f, name, source, d + (first + i * lanes), lanes, problem)
                    for source in sources
                    for i in range(vectors)
                ]
                f.store(_as_bf16(f, found, is_values), f.gep(to, d, t.acc.bytes // vectors))
    return f


def _load_kv(f: Function, name: str, row: Value, at: Value, lanes: int, problem: Problem) -> Value:
    if problem.q8_kv:
        return load_q8(f, row, at, lanes, problem.acc)
    strided = name in problem.strided
    return _read(f, row, at, f["step"], problem.dtype(name), lanes, problem, strided)


def _as_bf16(f: Function, found: list[Value], interleaved: bool) -> Value:
    """One vector as it is, or two as bf16."""
    if len(found) == 1:
        return found[0]
    return interleave_bf16(f, *found) if interleaved else to_bf16(f, *found)


def _steps(f: Function, count: int, step: int) -> Iterator[Value]:
    """Multiples of step below count, unrolled when they are few."""
    if count > step * _MAX_UNROLL:
        yield from f.range(0, count, step)
    else:
        yield from (f.i64(i) for i in range(0, count, step))


def _read(
    f: Function,
    row: Value,
    at: Value,
    step: Value,
    dtype: DType,
    lanes: int,
    problem: Problem,
    strided: bool,
) -> Value:
    where = f.gep(row, at * step) if strided else f.gep(row, at, memory_type(dtype))
    return load(f, where, dtype, lanes, problem.acc)


def emit_pack_q(m: Module, problem: Problem, t: Tiling) -> Function:
    """void pack(args, batch, head, row, dst): a query panel, scaled, as [head_dim][rows] (bf16
    pairs: [head_dim / 2][rows]). Rows beyond the last repeat it."""
    item = [(name, i64) for name in ("batch", "head", "row")]
    f = m.function("pack", [("args", ptr), *item, ("dst", ptr)], internal=True)
    if "q" in problem.strided or problem.head_dim % 4 or t.panel % 4:
        _pack_scalar(f, problem, t)
    else:
        _pack_transposed(f, problem, t)
    return f


def _row_address(f: Function, problem: Problem) -> Callable[[Value], Value]:
    """The address of each row of the panel."""
    rows = Rows(f, problem)
    address, last = rows.addresses("q", f["batch"], f["head"]), rows.count - 1
    return lambda number: address(f.min(f["row"] + number, last))


def _pack_scalar(f: Function, problem: Problem, t: Tiling) -> None:
    strided, step = "q" in problem.strided, Args(f).row_bytes("q", problem, "step")
    address = _row_address(f, problem)
    for r in f.range(0, t.panel):
        row = address(r)
        for d in f.range(0, t.head_dim):
            value = _read(f, row, d, step, problem.q, 1, problem, strided)
            to = f.gep(f.gep(f["dst"], d, t.score_row_bytes), r, t.acc)
            f.store(value * problem.query_factor, to)


def _pack_transposed(f: Function, problem: Problem, t: Tiling) -> None:
    """4x4 blocks of rows and dimensions, transposed in registers."""
    address = _row_address(f, problem)
    for r in f.range(0, t.panel, 4):
        rows = [address(r + i) for i in range(4)]
        for d in f.range(0, t.head_dim, 4):
            a, b, c, e = (
                load(f, f.gep(row, d, memory_type(problem.q)), problem.q, 4, problem.acc)
                for row in rows
            )
            to = f.gep(f.gep(f["dst"], d.udiv(t.pair), t.score_row_bytes), r, t.acc)
            low = f.shuffle(a, b, [0, 4, 1, 5]), f.shuffle(c, e, [0, 4, 1, 5])
            high = f.shuffle(a, b, [2, 6, 3, 7]), f.shuffle(c, e, [2, 6, 3, 7])
            transposed = []
            for i, (x, y) in enumerate((low, low, high, high)):
                half = [2 * (i % 2), 2 * (i % 2) + 1]
                scale = f.const(problem.query_factor, vec(4, t.acc))
                transposed.append(f.shuffle(x, y, [*half, *(h + 4 for h in half)]) * scale)
            for i in range(0, 4, t.pair):
                step = _as_bf16(f, transposed[i : i + t.pair], interleaved=True)
                f.store(step, to, i // t.pair * t.score_row_bytes)
