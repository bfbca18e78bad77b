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
from rlx.backends.cuda.kernels.attention.attention_problem import LOG2_E, LOWEST, AttentionForm
from rlx.backends.cuda.kernels.attention.decode_attention import merge
from rlx.ir.dtype import DType
from rlx.llvm.builder import Value, f32, i8, i32, i64, vec
from rlx.llvm.storage import load, memory_type, store
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
        _Emitter(m.begin_block(self.threads, self.shared), self).emit()


class _Emitter:
    def __init__(self, f: BlockFunction, kernel: FlashAttention) -> None:
        self.f, self.kernel, self.form = f, kernel, kernel.form
        self.element = memory_type(self.form.kv)
        self.exact = self.form.q.bytes == 4  # products of two 16-bit numbers each
        args = f["args"]
        self.q, self.k, self.v, self.out, self.mask, self.sinks = (f.arg(args, i) for i in range(6))
        heads, self.rows, self.keys = (f.arg(args, i, i32) for i in (6, 7, 8))
        places = range(9, 25)
        numbers = [f.arg(args, i, i64) for i in places]
        self.strides = {
            name: numbers[3 * i : 3 * i + 3] for i, name in enumerate(("q", "k", "v", "out"))
        }
        self.mask_strides = numbers[12:16]
        block = f.block_number()
        tile = block.udiv(heads)
        number = block - tile * heads
        tiles = f.ceil_div(self.rows, QUERIES)
        self.first = (tiles - 1 - tile) * QUERIES  # the last queries see most keys
        self.has_work = tile < tiles
        self.sequence = number.udiv(self.form.heads)
        self.head = number - self.sequence * self.form.heads
        self.lane = f.lane32()
        self.group, self.thread = f.i32(0), f.thread()
        if kernel.groups > 1:
            self.group, self.thread = f.thread() >> 7, f.thread() & _GROUP - 1
        self.base = self.group * kernel.group_bytes  # of the group's shared memory
        self.own = self.first + (self.thread >> 5) * _OWN  # queries of this warp
        self.row = self.lane >> 2  # and row + 8, in this warp's queries
        self.column = (self.lane & 3) << 1

    def emit(self) -> None:
        f = self.f
        f.let_next_start()
        f.wait_for_previous()
        f.if_(self.has_work, self._emit_tile)

    def _emit_tile(self) -> None:
        f, form = self.f, self.form
        low, high = self._range()
        step = KEYS * self.kernel.groups
        count = f.ceil_div(high - low, step)
        low = low + self.group * KEYS
        self._copy_tile(low, high, f.i32(0))
        f.commit_copies()
        query = self._query()
        zero = f.const(0.0, f32)
        start = [f.const(LOWEST, f32)] * 2 + [zero] * 2 + [zero] * (form.dim // 2)

        def body(i: Value, *state: Value) -> list[Value]:
            key = low + i * step
            self._copy_tile(key + step, high, i + 1 & 1)
            f.commit_copies()
            f.wait_copies(1)
            f.barrier()
            new = self._tile(query, key, high, i & 1, state)
            f.barrier()
            return new

        state = f.loop(f.i32(0), count, 1, start, body)
        f.wait_copies(0)
        if self.kernel.groups == 1:
            self._finish(list(state))
        else:
            self._merge_groups(list(state))

    def _merge_groups(self, state: list[Value]) -> None:
        """The first group merges what the second has found, and stores the result."""
        f = self.f
        place = self.thread * 4

        def give() -> None:
            for i, v in enumerate(state):
                f.store_shared(v, place, 4 * _GROUP * i)

        def take() -> None:
            others = [f.load_shared(place, f32, 4 * _GROUP * i) for i in range(len(state))]
            made = list(state)
            for half in range(2):
                numbers = [i for i in range(4, len(state)) if (i - 4) // 2 % 2 == half]
                at = [half, 2 + half, *numbers]
                for i, v in zip(
                    at, merge(f, [state[i] for i in at], [others[i] for i in at]), strict=True
                ):
                    made[i] = v
            self._finish(made)

        f.barrier()
        f.if_(self.group.eq(1), give)
        f.barrier()
        f.if_(self.group.eq(0), take)

    # -- memory -----------------------------------------------------------------------------------

    def _range(self) -> tuple[Value, Value]:
        """The keys that any query of the block sees."""
        f, form = self.f, self.form
        before = self.keys - self.rows
        low, high = f.i32(0), self.keys
        if form.behind is not None:
            low = f.max(before + self.first - form.behind, 0)
        if form.ahead is not None:
            last = f.min(self.first + QUERIES, self.rows)
            high = f.max(f.min(before + last + form.ahead, self.keys), 0)
        return low, f.max(high, low)

    def _at(self, name: str, head: Value, token: Value) -> Value:
        batch, by_head, by_token = self.strides[name]
        return self._offset((self.sequence, batch), (head, by_head), (token, by_token))

    def _offset(self, *terms: tuple[Value, Value]) -> Value:
        """The sum of numbers (i32) times strides (i64)."""
        products = [number.to(i64) * stride for number, stride in terms]
        return sum(products[1:], products[0])

    def _copy_tile(self, key: Value, high: Value, stage: Value) -> None:
        """Begin to copy the keys and values from `key` on; those from `high` on are 0."""
        f, form, pitch = self.f, self.form, self.kernel.pitch
        pieces = form.dim // 8  # of 16 bytes
        head = self.head.udiv(form.group)
        for base, name, at in ((self.k, "k", 0), (self.v, "v", 2 * KEYS * pitch)):
            start = self.base + stage * (KEYS * pitch) + at
            for item in f.range(self.thread, f.i32(KEYS * pieces), _GROUP):
                number = item.udiv(pieces)
                piece = item - number * pieces
                wanted = key + number
                there = f.max(f.min(wanted, self.keys - 1), 0)
                source = f.gep(base, self._at(name, head, there) + (piece * 8).to(i64), 2)
                valid = f.select(wanted < high, f.i32(16), 0)
                f.copy_async(start + number * pitch + piece * 16, source, valid)

    def _query(self) -> list[Planes]:
        """The queries of this warp, 16 numbers at a time; f32 ones are scaled."""
        f, form = self.f, self.form
        found: list[Planes] = []
        rows = [f.min(self.own + self.row + 8 * i, self.rows - 1) for i in range(2)]
        bases = [f.gep(self.q, self._at("q", self.head, r), form.q.bytes) for r in rows]
        for k in range(0, form.dim, 16):
            places = [(bases[i % 2], self.column + (k + 8 * (i // 2))) for i in range(4)]
            if not self.exact:
                found.append([[f.load(f.gep(b, at.to(i64), 2), i32, align=4) for b, at in places]])
                continue
            pairs = [f.load(f.gep(b, at.to(i64), 4), vec(2, f32), align=8) for b, at in places]
            numbers = [[f.extract(p, i) * form.scale for i in range(2)] for p in pairs]
            found.append(self._planes(numbers))
        return found

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
        f, form = self.f, self.form
        scores = self._scores(query, self.base + stage * (KEYS * self.kernel.pitch))
        scores = [self._masked(s, key, high, j) for j, s in enumerate(scores)]
        tops, sums, out = list(state[:2]), list(state[2:4]), list(state[4:])
        shrinks = []
        for half in range(2):
            top = tops[half]
            for s in scores:
                top = f.max_fast(f.max_fast(top, s[2 * half]), s[2 * half + 1])
            top = f.warp_max(top, 4)
            shrinks.append(f.exp2_fast(tops[half] - top))
            tops[half] = top
        weights = [[f.exp2_fast(v - tops[i // 2]) for i, v in enumerate(s)] for s in scores]
        for half in range(2):
            total = sums[half] * shrinks[half]
            for w in weights:
                total = total + w[2 * half] + w[2 * half + 1]
            sums[half] = total
        out = [v * shrinks[i // 2 % 2] for i, v in enumerate(out)]
        out = self._values(weights, out, self.base + (stage + 2) * (KEYS * self.kernel.pitch))
        assert len(out) == form.dim // 2
        return [*tops, *sums, *out]

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

    def _masked(self, scores: list[Value], key: Value, high: Value, j: int) -> list[Value]:
        """Scores to the base 2, LOWEST or less where a query does not see a key."""
        f, form = self.f, self.form
        made = []
        for i, s in enumerate(scores):
            at = key + self.column + (8 * j + i % 2)
            query = self.own + self.row + 8 * (i // 2)
            if not self.exact:
                s = s * form.scale
            if form.softcap:
                s = f.activate("tanh", s * (1 / form.softcap)) * form.softcap
            s = s * LOG2_E
            if form.mask:
                s = self._with_mask(s, f.min(query, self.rows - 1), f.min(at, self.keys - 1))
            ahead = at - query - (self.keys - self.rows)
            keeps = at < high
            if form.ahead is not None:
                keeps = keeps & (ahead <= form.ahead)
            if form.behind is not None:
                keeps = keeps & (ahead >= -form.behind)
            made.append(f.select(keeps, s, float("-inf")))
        return made

    def _with_mask(self, score: Value, query: Value, key: Value) -> Value:
        f, form = self.f, self.form
        batch, head, row, column = self.mask_strides
        at = self._offset((self.sequence, batch), (self.head, head), (query, row), (key, column))
        if form.mask == "bool":
            keeps = f.load(f.gep(self.mask, at), i8).ne(0)
            return f.select(keeps, score, float("-inf"))
        dtype = DType.of(form.mask)
        added = load(f, f.gep(self.mask, at, memory_type(dtype).bytes), dtype, 1, f32)
        return score + added * LOG2_E

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
        f, form = self.f, self.form
        tops, out = state[:2], state[4:]
        sums = [f.warp_sum(v, 4) for v in state[2:4]]
        for half in range(2):
            mine = [out[4 * j + 2 * half + i] for j in range(form.dim // 8) for i in range(2)]
            total = sums[half]
            if form.sinks is not None:
                there = f.gep(self.sinks, self.head.to(i64), memory_type(form.sinks).bytes)
                sink = load(f, there, form.sinks, 1, f32) * LOG2_E
                zero = f.const(0.0, f32)
                given = [sink, zero + 1.0, *[zero] * len(mine)]
                _, total, *mine = merge(f, [tops[half], total, *mine], given)
            self._store(half, mine, total)

    def _store(self, half: int, numbers: Sequence[Value], total: Value) -> None:
        f, form = self.f, self.form
        query = self.own + self.row + 8 * half
        some = total > 0.0
        factor = f.select(some, 1.0 / f.select(some, total, 1.0), 0.0)

        def write() -> None:
            base = f.gep(self.out, self._at("out", self.head, query), form.out.bytes)
            for i, v in enumerate(numbers):
                at = self.column + (8 * (i // 2) + i % 2)
                store(f, v * factor, f.gep(base, at.to(i64), form.out.bytes), form.out)

        f.if_(query < self.rows, write)
