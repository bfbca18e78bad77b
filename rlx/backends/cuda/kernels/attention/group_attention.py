"""Attention of many queries on Hopper: the copy engine brings keys and values, groups of four warps
multiply.

A group has 64 queries of one head; one thread of another group begins copies. The scores of a tile
of keys are computed while the values of the tile before are summed. Tiles come from the last key to
the first, so that those with a mask come first. Where there are few queries, two groups share them:
each has every second tile, and the first merges the results. Queries and weights are rounded to the
type of the keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rlx.backends.cuda.builder import BlockFunction, KernelModule
from rlx.backends.cuda.kernel import BlockKernel
from rlx.backends.cuda.kernels.attention.attention_problem import AttentionForm
from rlx.backends.cuda.kernels.attention.attention_tile import (
    AttentionTile,
    Scores,
    Softmax,
    merge_queries,
)
from rlx.backends.cuda.kernels.gemm.group_gemm import GROUP, transposed
from rlx.backends.cuda.kernels.gemm.weight_rows import load_run
from rlx.backends.cuda.tensor_map import TILE_COLUMNS
from rlx.llvm.builder import Value, f32, i32, i64
from rlx.llvm.storage import memory_type
from rlx.support.records import dataclass

ROWS = 64  # queries of a group
_LINE = 2 * TILE_COLUMNS  # bytes of a row of a tile
_FIRST = 1024  # where queries begin in shared memory
_FULL, _EMPTY = (0, 32), (64, 96)  # mbarriers of keys and of values
_MEET, _MEET_ALL = 2, 4  # barriers: of the first group, of both
_GROUPS = 2
_MANY, _FEW = 240, 24  # registers of those that multiply, and of those that copy


@dataclass(frozen=True)
class GroupAttention(BlockKernel):
    """args: as those of `AttentionTile`, but for k and v the tensor maps, and in the place of
    strides: rows from a sequence to the next, rows and columns from a head to the next"""

    form: AttentionForm
    keys: int  # of a tile
    shares: bool = False  # groups have the same queries

    @property
    def label(self) -> str:
        return f"attention({self.queries}x{self.keys}{'x2' if self.shares else ''})"

    @property
    def queries(self) -> int:
        return ROWS if self.shares else ROWS * _GROUPS

    @property
    def stages(self) -> int:
        return 4 if self.shares else 2

    @property
    def threads(self) -> int:
        return GROUP * (_GROUPS + 1)

    @property
    def query_bytes(self) -> int:
        """Of a group."""
        return 2 * ROWS * self.form.dim

    @property
    def tile_bytes(self) -> int:
        return 2 * self.keys * self.form.dim

    @property
    def shared(self) -> int:
        return _FIRST + _GROUPS * self.query_bytes + 2 * self.stages * self.tile_bytes

    def emit(self, m: KernelModule) -> None:
        _Emitter(m.begin_block(self.threads, self.shared), self).emit()


class _Emitter(AttentionTile):
    def __init__(self, f: BlockFunction, kernel: GroupAttention) -> None:
        super().__init__(f, kernel.form, kernel.queries)
        self.kernel, self.size = kernel, kernel.keys
        self.group = f.uniform(f.thread() >> 7)
        self.thread = f.thread() & GROUP - 1
        self.is_first = self.thread.eq(0)  # of its group
        self.top = self.first  # the first query of the group
        self.number, self.apart = f.i32(0), 1  # of the group's first tile, and to its next
        if kernel.shares:
            self.number, self.apart = self.group, 2
        else:
            self.top = self.first + self.group * ROWS
        self.own = self.top + (self.thread >> 5) * 16
        self.query = self.group * kernel.query_bytes + _FIRST
        keys = _FIRST + _GROUPS * kernel.query_bytes
        self.places = keys, keys + kernel.stages * kernel.tile_bytes  # of keys and of values

    def emit(self) -> None:
        f = self.f
        readers = 1 if self.kernel.shares else _GROUPS  # of a tile
        f.let_next_start()

        def begin() -> None:
            for kind in range(2):
                for i in range(self.kernel.stages):
                    f.init_mbarrier(f.i32(_FULL[kind] + 8 * i), 1)
                    f.init_mbarrier(f.i32(_EMPTY[kind] + 8 * i), readers)
            f.fence_mbarriers()
            for tensor_map in (self.k, self.v):
                f.acquire_map(tensor_map)

        f.if_(f.thread().eq(_GROUPS * GROUP), begin)
        f.barrier()
        f.wait_for_previous()
        f.if_(self.group.eq(_GROUPS), self._emit_copies, self._emit_products)

    def _tiles(self) -> tuple[Value, Value, Value]:
        """The first key, the first behind the last, and the number of tiles: one for each group at
        least."""
        low, high = self.range()
        return low, high, self.f.max(self.f.ceil_div(high - low, self.size), self.apart)

    def _stage(self, i: Value) -> tuple[Value, Value]:
        """Where tile i is, and the parity of its phase."""
        stages = self.kernel.stages
        return i & stages - 1, i.udiv(stages) & 1

    # -- copies -----------------------------------------------------------------------------------

    def _emit_copies(self) -> None:
        f = self.f
        f.take_registers(_FEW, more=False)
        f.if_(self.is_first & self.has_work, self._copy_tiles)

    def _copy_tiles(self) -> None:
        f, kernel = self.f, self.kernel
        low, _, count = self._tiles()
        head = self.head.udiv(self.form.group)
        starts = []
        for name in "kv":
            by_batch, by_head, across = (s.to(i32) for s in self.strides[name])
            starts.append((self.sequence * by_batch + head * by_head, head * across))

        def emit_tile(i: Value) -> None:
            stage, parity = self._stage(i)
            key = low + (count - 1 - i) * self.size
            for kind, tensor_map in enumerate((self.k, self.v)):
                row, column = starts[kind]
                full = stage * 8 + _FULL[kind]
                f.wait_phase(stage * 8 + _EMPTY[kind], parity ^ 1)
                f.expect_bytes(full, kernel.tile_bytes)
                to = stage * kernel.tile_bytes + self.places[kind]
                for c in range(self.form.dim // TILE_COLUMNS):
                    at = to + c * (self.size * _LINE)
                    f.copy_tile(at, tensor_map, column + c * TILE_COLUMNS, row + key, full)

        for i in f.range(f.i32(0), count, 1):
            emit_tile(i)

    # -- products ---------------------------------------------------------------------------------

    def _emit_products(self) -> None:
        f = self.f
        f.take_registers(_MANY, more=True)
        f.if_(self.has_work, self._multiply)

    def _multiply(self) -> None:
        f, form = self.f, self.form
        low, high, count = self._tiles()
        self._load_query()
        key = low + (count - 1 - self.number) * self.size
        f.wait_phase(self.number * 8 + _FULL[0], f.i32(0))
        scores = f.finish_group(self._begin_scores(self.number))
        self._free(0, self.number)
        found = self.finished(_by_fours(scores), key, high)
        weights, softmax, _ = self.weigh(found, self.begin())
        f.wait_phase(self.number * 8 + _FULL[1], f.i32(0))
        self._clear_values(high - key)
        out = [f.const(0.0, f32)] * (form.dim // 2)
        state = [*softmax.values, *self._packed(weights), *out]
        state = self._all_tiles(low, high, count, state)
        left = 0 if self.apart == 1 else count - 1 - self.number & 1
        stage, _ = self._stage(count - 1 - left)
        self._finish(stage, state)

    def _all_tiles(
        self, low: Value, high: Value, count: Value, state: list[Value]
    ) -> list[Value]:  # fmt: skip
        """All tiles but the first, those that hide keys before those that do not."""
        f, form, apart = self.f, self.form, self.apart
        step = partial(self._step, low, high, count)
        first = self.number + apart
        if form.behind is not None or form.mask:
            return f.loop(first, count, apart, state, partial(step, True))
        seen = high
        if form.ahead is not None:
            seen = f.min(high, self.keys - self.rows + self.first + (form.ahead + 1))
        whole = f.max(count - f.max(seen - low, 0).udiv(self.size), first)
        if apart > 1:
            whole = whole + (whole - first & 1)
        state = f.loop(first, whole, apart, state, partial(step, True))
        return f.loop(whole, count, apart, state, partial(step, False))

    def _split(self, state: Sequence[Value]) -> tuple[Softmax, list[Value], list[Value]]:
        """Softmax, packed weights and sums of values."""
        known, rest = Softmax(list(state[:2]), list(state[2:4])), list(state[4:])
        return known, rest[: self.size // 4], rest[self.size // 4 :]

    def _step(
        self, low: Value, high: Value, count: Value, hides: bool, i: Value, *state: Value
    ) -> list[Value]:
        """Scores of tile i while the values of the one before are summed."""
        f = self.f
        known, weights, out = self._split(state)
        (stage, parity), (before, _) = self._stage(i), self._stage(i - self.apart)
        key = low + (count - 1 - i) * self.size
        f.wait_phase(stage * 8 + _FULL[0], parity)
        scores = self._begin_scores(stage)
        out = self._begin_values(weights, before, out)
        scores = f.finish_group(scores, 1)
        self._free(0, stage)
        found = self.finished(_by_fours(scores), key, high, hides)
        made, softmax, shrinks = self.weigh(found, known)
        out = f.finish_group(out)
        self._free(1, before)
        out = [v * shrinks[n // 2 % 2] for n, v in enumerate(out)]
        f.wait_phase(stage * 8 + _FULL[1], parity)
        return [*softmax.values, *self._packed(made), *out]

    def _begin_scores(self, stage: Value) -> list[Value]:
        """Begin to multiply queries and keys."""
        f, sums = self.f, list[Value]()
        start = stage * self.kernel.tile_bytes + self.places[0]
        f.begin_group()
        for k in range(self.form.dim // 16):
            c, at = k // 4, k % 4 * 32
            a, b = self.query + (c * ROWS * _LINE + at), start + (c * self.size * _LINE + at)
            sums = f.multiply_group(a, b, sums, self.size, self.element)
        f.commit_group()
        return sums

    def _begin_values(self, weights: list[Value], stage: Value, out: list[Value]) -> list[Value]:
        """Begin to add weights times values."""
        f = self.f
        start = stage * self.kernel.tile_bytes + self.places[1]
        f.begin_group()
        for k in range(self.size // 16):
            four, at = weights[4 * k : 4 * k + 4], start + k * 16 * _LINE
            out = f.multiply_weights(four, at, out, self.size * _LINE, self.element)
        f.commit_group()
        return out

    def _packed(self, weights: Scores) -> list[Value]:
        """Weights as the left side of products, 16 keys at a time."""
        f = self.f
        return [
            f.pack_halves(w[2 * half], w[2 * half + 1], self.element)
            for w in weights
            for half in range(2)
        ]

    def _free(self, kind: int, stage: Value) -> None:
        """This group has read a stage."""
        f = self.f
        f.if_(self.is_first, lambda: f.arrive(stage * 8 + _EMPTY[kind]))

    # -- memory -----------------------------------------------------------------------------------

    def _load_query(self) -> None:
        """The queries of this group, in the form of tiles."""
        f, form = self.f, self.form
        pieces = form.dim // 8  # of a query
        for i in range(ROWS * pieces // GROUP):
            item = self.thread + i * GROUP
            row = item.udiv(pieces)
            piece = item - row * pieces
            there = f.max(f.min(self.top + row, self.rows - 1), 0)
            base = f.gep(self.q, self.at("q", self.head, there), form.q.bytes)
            numbers = load_run(f, base, (piece * 8).to(i64), 8, form.q)
            pairs = zip(numbers[::2], numbers[1::2], strict=True)
            words = [f.pack_halves(a, b, self.element) for a, b in pairs]
            at = (piece >> 3) * (ROWS * _LINE) + row * _LINE + (((piece ^ row) & 7) << 4)
            f.store_shared(f.join(words), self.query + at, align=16)
        f.fence_shared()
        f.meet(self.group + _MEET, GROUP)

    def _clear_values(self, valid: Value) -> None:
        """Values behind the last key count nothing, whatever lies there: 0 · ∞ would."""
        f, zero = self.f, self.f.i32(0)

        def clear() -> None:
            pieces = _LINE // 16 * (self.form.dim // TILE_COLUMNS)
            first = f.max(valid, 0) * pieces
            for item in f.range(first + self.thread, f.i32(self.size * pieces), GROUP):
                row = item.udiv(pieces)
                piece = item - row * pieces
                at = (piece >> 3) * (self.size * _LINE) + row * _LINE + ((piece & 7) << 4)
                f.store_shared(f.join([zero] * 4), at + self.places[1], align=16)
            f.fence_shared()
            f.meet(self.group + _MEET, GROUP)

        f.if_(valid < self.size, clear)

    def _finish(self, stage: Value, state: list[Value]) -> None:
        """Add the values of the last tile, and store."""
        softmax, weights, out = self._split(state)
        out = self.f.finish_group(self._begin_values(weights, stage, out))
        if self.kernel.shares:
            self._merge(softmax, out)
        else:
            self._store_all(softmax, out)

    def _merge(self, softmax: Softmax, out: list[Value]) -> None:
        """The first group merges what the second has found, and stores the result."""
        f, state = self.f, [*softmax.values, *out]
        place = self.thread * 4 + self.places[0]

        def give() -> None:
            for i, v in enumerate(state):
                f.store_shared(v, place, 4 * GROUP * i)

        def take() -> None:
            others = [f.load_shared(place, f32, 4 * GROUP * i) for i in range(len(state))]
            made = merge_queries(f, state, others)
            self._store_all(Softmax(made[:2], made[2:4]), made[4:])

        f.meet(f.i32(_MEET_ALL), 2 * GROUP)  # nobody reads keys any more
        f.if_(self.group.eq(1), give)
        f.meet(f.i32(_MEET_ALL), 2 * GROUP)
        f.if_(self.group.eq(0), take)

    def _store_all(self, softmax: Softmax, out: list[Value]) -> None:
        for half, numbers in enumerate(self.results(softmax, out)):
            self._store(self.own + self.row + 8 * half, numbers)

    def _store(self, query: Value, numbers: list[Value]) -> None:
        f, out = self.f, self.form.out
        at = self.at("out", self.head, f.max(f.min(query, self.rows - 1), 0))
        base, inside = f.gep(self.out, at, out.bytes), query < self.rows
        pairs = [numbers[i : i + 2] for i in range(0, len(numbers), 2)]  # of each 8 columns
        if out.bytes == 2:
            for j in range(0, len(pairs), 4):
                words = [f.pack_halves(a, b, memory_type(out)) for a, b in pairs[j : j + 4]]
                whole = f.join(transposed(f, words))
                to = f.gep(base, ((f.thread() & 3) * 8 + 8 * j).to(i64), 2)
                f.if_(inside, partial(f.store, whole, to, align=16))
        else:
            for j, pair in enumerate(pairs):
                to = f.gep(base, (self.column + 8 * j).to(i64), 4)
                f.if_(inside, partial(f.store, f.join(pair), to, align=8))


def _by_fours(values: Sequence[Value]) -> Scores:
    return [list(values[i : i + 4]) for i in range(0, len(values), 4)]
