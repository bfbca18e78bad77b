"""Attention of many queries by tensor cores, key tile by key tile, with a running softmax.

A block has 64 queries of one head, a warp 16 of them. Keys and values are copied to shared memory
a tile ahead. Where there are few blocks, two groups of warps take the tiles in turn, and the first
merges the results. Queries in f32 are the sum of two 16-bit numbers, and so are the weights then:
their products are as exact as those of f32.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cuda.builder import WARP, BlockFunction, KernelModule
from rlx.backends.cuda.kernel import BlockKernel
from rlx.backends.cuda.kernels.attention.attention_problem import AttentionForm
from rlx.backends.cuda.kernels.attention.attention_tile import AttentionTile, Softmax, merge_queries
from rlx.backends.cuda.kernels.attention.key_pieces import load_piece, numbers_of
from rlx.llvm.builder import Value, f32, i32, i64, vec
from rlx.llvm.storage import store
from rlx.support.records import dataclass

_WARPS = 4
_GROUP = _WARPS * WARP
_OWN = 16  # queries of a warp
QUERIES = _WARPS * _OWN
KEYS = 64  # of a tile

Planes = list[list[Value]]  # a matrix [16 16] as one or two sets of 4 values of 32 bits


@dataclass(frozen=True)
class FlashAttention(BlockKernel):
    """args: q, k, v, result, mask, sinks, batch · heads, queries, keys, strides of q, k, v and the
    result (batch, head, token), of the mask (batch, head, query, key)"""

    form: AttentionForm
    groups: int = 1  # of warps that share the keys
    fixed: bool = False  # tiles of keys begin at multiples of their size, for any query

    @property
    def label(self) -> str:
        return "attention(flash)"

    @property
    def threads(self) -> int:
        return self.groups * _GROUP

    @property
    def pitch(self) -> int:
        """Bytes from a key to the next in shared memory: an odd multiple of 16."""
        return 2 * self.form.dim + 16

    @property
    def shared(self) -> int:
        return self.groups * self.group_bytes

    @property
    def group_bytes(self) -> int:
        return 4 * KEYS * self.pitch  # two tiles of keys, two of values

    def emit(self, m: KernelModule) -> None:
        FlashEmitter(m.begin_block(self.threads, self.shared), self).emit()


class FlashEmitter(AttentionTile):
    def __init__(self, f: BlockFunction, kernel: FlashAttention) -> None:
        form = kernel.form
        self.exact = form.q.bytes == 4 and not form.coarse  # products of two 16-bit numbers each
        self.kernel = kernel
        super().__init__(f, form, QUERIES)
        self.lane = f.lane32()
        self.group, self.thread = f.i32(0), f.thread()
        if kernel.groups > 1:
            self.group, self.thread = f.thread() >> 7, f.thread() & _GROUP - 1
        self.base = self.group * kernel.group_bytes  # of the group's shared memory
        self.own = self.first + (self.thread >> 5) * _OWN

    def emit(self) -> None:
        f = self.f
        f.let_next_start()
        f.wait_for_previous()
        f.if_(self.has_work, self._emit_tile)

    def _emit_tile(self) -> None:
        low, high = self.range()
        if self.kernel.fixed:
            low = low - (low & (KEYS - 1))
        state = self.sum_keys(low, high)
        if self.kernel.groups == 1:
            self._finish(state)
        else:
            self._merge_groups(state)

    def sum_keys(self, low: Value, high: Value) -> list[Value]:
        """The running softmax of the keys from `low` to `high`, with the sums of values."""
        f = self.f
        step = KEYS * self.kernel.groups
        count = f.ceil_div(high - low, step)
        low = low + self.group * KEYS
        self._copy_tile(low, high, f.i32(0))
        f.commit_copies()
        query = self._query()

        def body(i: Value, *state: Value) -> list[Value]:
            key = low + i * step
            self._copy_tile(key + step, high, i + 1 & 1)
            f.commit_copies()
            f.wait_copies(1)
            f.barrier()
            new = self._tile(query, key, high, i & 1, state)
            f.barrier()
            return new

        state = f.loop(f.i32(0), count, 1, self.start(), body)
        f.wait_copies(0)
        return list(state)

    def start(self) -> list[Value]:
        """The softmax of no keys."""
        return [*self.begin().values, *[self.f.const(0.0, f32)] * (self.form.dim // 2)]

    def _merge_groups(self, state: list[Value]) -> None:
        """The first group merges what the second has found, and stores the result."""
        f = self.f
        place = self.thread * 4

        def give() -> None:
            for i, v in enumerate(state):
                f.store_shared(v, place, 4 * _GROUP * i)

        def take() -> None:
            others = [f.load_shared(place, f32, 4 * _GROUP * i) for i in range(len(state))]
            self._finish(merge_queries(f, state, others))

        f.barrier()
        f.if_(self.group.eq(1), give)
        f.barrier()
        f.if_(self.group.eq(0), take)

    # -- memory -----------------------------------------------------------------------------------

    def _copy_tile(self, key: Value, high: Value, stage: Value) -> None:
        """Begin to copy the keys and values from `key` on; those from `high` on are 0."""
        f, form, pitch = self.f, self.form, self.kernel.pitch
        pieces = form.dim // 8  # of 16 bytes
        copy = self._decode_piece if form.q8 else self._copy_piece
        for item in f.range(self.thread, f.i32(KEYS * pieces), _GROUP):
            number = item.udiv(pieces)
            piece = item - number * pieces
            wanted = key + number
            rows = self.rows_at(f.max(f.min(wanted, self.keys - 1), 0))
            for row, at in zip(rows, (0, 2 * KEYS * pitch), strict=True):
                start = self.base + stage * (KEYS * pitch) + at
                copy(start + number * pitch + piece * 16, row, piece, wanted < high)

    def rows_at(self, key: Value) -> tuple[Value, Value]:
        """Where a key and its value are."""
        f, head = self.f, self.head.udiv(self.form.group)
        places = ((self.k, self.at("k", head, key)), (self.v, self.at("v", head, key)))
        k, v = (f.gep(base, at, self.form.key_bytes) for base, at in places)
        return k, v

    def _copy_piece(self, to: Value, row: Value, piece: Value, inside: Value) -> None:
        valid = self.f.select(inside, self.f.i32(16), 0)
        self.f.copy_async(to, self.f.gep(row, piece.to(i64), 16), valid)

    def _decode_piece(self, to: Value, row: Value, piece: Value, inside: Value) -> None:
        """Blocks of Q8_0 are rounded to 16 bits: an error of 2⁻¹², where theirs is 2⁻⁸."""
        f = self.f
        numbers, scale = numbers_of(f, self.form, load_piece(f, self.form, row, piece))
        assert scale is not None
        found = [f.select(inside, v * scale, 0.0) for v in numbers]
        pairs = zip(found[::2], found[1::2], strict=True)
        words = [f.pack_halves(a, b, self.element) for a, b in pairs]
        f.store_shared(f.join(words), to, align=16)

    def _query(self) -> list[Planes]:
        """The queries of this warp, 16 numbers at a time."""
        f, form = self.f, self.form
        found: list[Planes] = []
        bases = [self.query_at(self.own + self.row + 8 * i) for i in range(2)]
        for k in range(0, form.dim, 16):
            places = [(bases[i % 2], self.column + (k + 8 * (i // 2))) for i in range(4)]
            if form.q.bytes == 2:
                found.append([[f.load(f.gep(b, at.to(i64), 2), i32, align=4) for b, at in places]])
                continue
            pairs = [f.load(f.gep(b, at.to(i64), 4), vec(2, f32), align=8) for b, at in places]
            numbers = [[f.extract(p, i) for i in range(2)] for p in pairs]
            found.append(self._planes(numbers))
        return found

    def query_at(self, query: Value) -> Value:
        """Where a query of the tile is; behind the last there is anything."""
        there = self.f.min(query, self.rows - 1)
        return self.f.gep(self.q, self.at("q", self.head, there), self.form.q.bytes)

    def result_at(self, query: Value) -> tuple[Value, Value]:
        """Where its result goes, and whether there is one."""
        at = self.at("out", self.head, query)
        return self.f.gep(self.out, at, self.form.out.bytes), query < self.rows

    def _planes(self, pairs: Sequence[Sequence[Value]]) -> Planes:
        """Pairs of f32 as 16-bit numbers; where products are exact, with what is left of them."""
        f = self.f
        high = [f.pack_halves(a, b, self.element) for a, b in pairs]
        if not self.exact:
            return [high]
        low = []
        for (a, b), packed in zip(pairs, high, strict=True):
            x, y = f.unpack_halves(packed, self.element)
            low.append(f.pack_halves(a - x, b - y, self.element))
        return [high, low]

    # -- a tile -----------------------------------------------------------------------------------

    def _tile(
        self, query: list[Planes], key: Value, high: Value, stage: Value, state: Sequence[Value]
    ) -> list[Value]:
        known, out = Softmax(list(state[:2]), list(state[2:4])), list(state[4:])
        scores = self._scores(query, self.base + stage * (KEYS * self.kernel.pitch))
        weights, new, shrinks = self.weigh(self.finished(scores, key, high), known)
        out = [v * shrinks[i // 2 % 2] for i, v in enumerate(out)]
        out = self._values(weights, out, self.base + (stage + 2) * (KEYS * self.kernel.pitch))
        return [*new.values, *out]

    def _matrices(self, start: Value, row: int, piece: int, transposed: bool) -> list[Value]:
        """Two pairs of matrices of a tile: of keys `row` on and numbers 8 · `piece` on. Pairs are
        of neighbouring numbers for keys, of neighbouring keys for values."""
        i, r = (self.lane >> 3), self.lane & 7
        low, high = i & 1, i >> 1
        down, right = (low, high) if transposed else (high, low)
        at = start + (down * 8 + r + row) * self.kernel.pitch + (right + piece) * 16
        return self.f.load_matrices(at, 4, transposed)

    def _scores(self, query: list[Planes], start: Value) -> list[list[Value]]:
        """Queries times keys: 4 values for each 8 keys."""
        f = self.f
        zero = f.const(0.0, f32)
        scores = [[zero] * 4 for _ in range(KEYS // 8)]
        for k, planes in enumerate(query):
            for j in range(0, KEYS // 8, 2):
                found = self._matrices(start, 8 * j, 2 * k, transposed=False)
                for i in range(2):
                    for plane in planes:
                        pair = found[2 * i : 2 * i + 2]
                        scores[j + i] = f.multiply(plane, pair, scores[j + i], self.element)
        return scores

    def _values(self, weights: list[list[Value]], out: list[Value], start: Value) -> list[Value]:
        """Add weights times values to the result."""
        f, form = self.f, self.form
        for k in range(KEYS // 16):
            first, second = weights[2 * k : 2 * k + 2]
            pairs = [first[:2], first[2:], second[:2], second[2:]]
            planes = self._planes(pairs)
            for j in range(0, form.dim // 8, 2):
                found = self._matrices(start, 16 * k, j, transposed=True)
                for i in range(2):
                    at = 4 * (j + i)
                    for plane in planes:
                        pair = found[2 * i : 2 * i + 2]
                        out[at : at + 4] = f.multiply(plane, pair, out[at : at + 4], self.element)
        return out

    # -- the result -------------------------------------------------------------------------------

    def _finish(self, state: list[Value]) -> None:
        made = self.results(Softmax(state[:2], state[2:4]), state[4:])
        for half, numbers in enumerate(made):
            self._store(half, numbers)

    def _store(self, half: int, numbers: Sequence[Value]) -> None:
        f, form = self.f, self.form
        base, inside = self.result_at(self.own + self.row + 8 * half)

        def write() -> None:
            for i, v in enumerate(numbers):
                at = self.column + (8 * (i // 2) + i % 2)
                store(f, v, f.gep(base, at.to(i64), form.out.bytes), form.out)

        f.if_(inside, write)
