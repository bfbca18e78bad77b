"""All layers of a dense model and its head as one kernel, for one token.

Each block stays on its multiprocessor. A warp of it copies the block's weights, layer after layer,
through a ring in shared memory and waits for nothing but room; sixteen warps multiply. Blocks hand
each other values whose lowest bits say of which layer they are, so nothing else is waited for:

    x → norm, q k v → heads → parts of attention → their sum, out → x → norm, gate, up → down → x

What is added to x are sums in fixed point, to which blocks add in any order. A place is written
again only by blocks that have received something of all blocks which had read it: x depends on all
of them, behind attention as behind the FFN, and each of the other places is used once between. What
is added behind attention and behind the FFN are different sums, since a block that has half of the
columns of `down` may be done before all have received what attention gave.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rlx.backends.cuda.builder import WARP, BlockFunction, KernelModule
from rlx.backends.cuda.kernel import BlockKernel
from rlx.backends.cuda.kernels.persistent.attend import Attention, Exchange, Heads
from rlx.backends.cuda.kernels.persistent.copy_weights import Copies
from rlx.backends.cuda.kernels.persistent.layer_args import (
    GAIN,
    KEY_GAIN,
    KEYS,
    QUERY_GAIN,
    SECOND_GAIN,
    VALUES,
    LayerArgs,
)
from rlx.backends.cuda.kernels.persistent.packed_product import PackedProducts
from rlx.backends.cuda.kernels.persistent.product import Columns, Products, Rows
from rlx.backends.cuda.kernels.persistent.ring import Ring, Slot
from rlx.backends.cuda.kernels.persistent.shape import (
    ARGS,
    HEAD_ROWS,
    HEAD_TILES,
    POSITION,
    THREADS,
    TILE,
    WARPS,
    DenseShape,
    Part,
)
from rlx.backends.cuda.kernels.qgemm.packed_rows import decode_one
from rlx.backends.cuda.kernels.qgemm.row_planes import offsets
from rlx.llvm.builder import Value, bf16, f32, i32, i64, ptr
from rlx.support.records import dataclass

MARKS = 24  # clocks of a layer that a profile notes
_MOST_ROUNDS = 6  # whose operands registers hold
_MOST_KEPT = 2  # numbers of x at the start that a thread keeps: more are read again
_MOST_WHILE_ATTENDING = 4  # such numbers in registers


@dataclass(frozen=True)
class PersistentDecode(BlockKernel):
    """args: x or the token, logits, gain of the last norm, head, tables of cosines and sines,
    position, values that are handed over, clocks, embedding, status, error number, rows of the
    embedding, what lies beside the head's quants; then of each layer q k v, out, gate, up, down,
    both gains, those of query and key heads, cache of keys and of values. Matrices are tensor maps,
    of packed weights one of the quants and others of what lies beside them.

    With `embeds`, x is a row of the embedding, of bf16 or of the packed type `table`. With `marks`
    a block notes its clock between the stages.
    """

    shape: DenseShape
    ahead: int = 0  # slots that are being filled at a time; 0: as suits the shape
    early: bool = False  # look for values before weights are fetched
    embeds: bool = False
    table: str = ""
    marks: bool = False
    patience: int = 1 << 32  # clocks that a wait may take: some seconds

    @property
    def label(self) -> str:
        return f"persistent({self.shape.layers} layers)"

    @property
    def threads(self) -> int:
        return THREADS + WARP

    @property
    def shared(self) -> int:
        return self.shape.shared

    @property
    def starts_early(self) -> bool:
        return True

    def emit(self, m: KernelModule) -> None:
        f = m.begin_block(self.threads, self.shared)
        f.patience = self.patience
        _Emitter(f, self).emit()


def _added(*terms: list[Value]) -> list[Value]:
    """The sum of vectors, of which a thread has some numbers."""
    first, *rest = terms
    for other in rest:
        first = [a + b for a, b in zip(first, other, strict=True)]
    return first


OUT_SUMS, DOWN_SUMS = range(2)  # what is added to x behind attention, and behind the FFN


class _Emitter:
    def __init__(self, f: BlockFunction, kernel: PersistentDecode) -> None:
        self.f, self.kernel, self.shape = f, kernel, kernel.shape
        self.args = f["args"]
        self.ring = Ring(f, kernel.shape, kernel.ahead or kernel.shape.ahead)
        self.thread, self.block = f.thread(), f.block_number()
        self.group = self.block.udiv(self.shape.ranks)
        self.rank = self.block - self.group * self.shape.ranks
        self._mark = 0

    def emit(self) -> None:
        f = self.f
        for _ in f.when(self.thread.eq(0)):
            self.ring.init()
        f.let_next_start()
        count = self.shape.fixed_args + self.shape.layer_args * self.shape.layers
        table = self.shape.place(ARGS)
        for i in f.range(self.thread, f.i32(count), f.i32(self.kernel.threads)):
            f.store_shared(f.load(f.gep(self.args, i.to(i64), 8), i64), i * 8 + table)
        f.barrier()
        copying = (self.thread >> 5).eq(WARPS)
        f.if_(copying, lambda: Copies(f, self.shape, self.ring).emit(self._wait), self._compute)

    def _wait(self) -> Value:
        """Wait for the kernel in front: until here nothing is read that differs from run to run.
        Returned is the new position."""
        self.f.wait_for_previous()
        return self.f.arg(self.args, POSITION, i32)

    # -- the warps that multiply ------------------------------------------------------------------

    def _compute(self) -> None:
        f, shape = self.f, self.shape
        position = self._wait()
        made = PackedProducts if shape.is_packed else Products
        self.products = made(f, shape, self.ring)
        self.base = f.arg(self.args, 7, ptr)
        counts = f.gep(self.base, shape.at_counts, 4)
        first, launches = f.load(counts, i32), f.load(counts, i32, 4)
        for _ in f.when(self.thread.eq(0)):  # they are read again: registers are few
            f.store_shared(position, f.i32(shape.at_position))
            f.store_shared(first, f.i32(shape.at_position), 4)
        f.barrier(THREADS)
        self._choose_sums(launches)
        cos, sin = (f.arg(self.args, i, ptr) for i in (4, 5))
        self.attention = Attention(self.products, cos, sin, position)
        start = self._start()

        def layer(number: Value, slot: Value, parity: Value, *attended: Value) -> list[Value]:
            self._mark = 0
            tag = f.load_shared(f.i32(shape.at_position), i32, 4) + number + 1 & 3
            return self._layer(number, tag, (slot, parity), start, list(attended))

        nothing = [f.const(0.0, f32)] * shape.own
        begin = [*self.ring.start(), *nothing]
        slot, parity, *attended = f.loop(f.i32(0), f.i32(shape.layers), f.i32(1), begin, layer)
        last = self._received(DOWN_SUMS, f.i32(shape.layers * shape.splits & 255), None)
        self._head(_added(start(), attended, last), (slot, parity))
        for _ in f.when(self.block.eq(0) & self.thread.eq(0)):
            f.store(f.load(counts, i32) + shape.layers, counts)
            f.store(f.load(counts, i32, 4) + 1, counts, 4)

    def _start(self) -> Callable[[], list[Value]]:
        """What gives the thread's numbers of x: they are kept, or read again where they are many.
        What gave them may be overwritten by then, so a thread reads what it has stored (and other
        blocks too: the same)."""
        f, own = self.f, range(self.shape.own)
        read = (
            self._embedded() if self.kernel.embeds else partial(self._vector, f.arg(self.args, 0))
        )
        if len(own) > _MOST_KEPT and self.kernel.embeds and not self.kernel.table:
            return read
        known = read()
        if len(own) <= _MOST_KEPT:
            return lambda: known
        at = f.gep(self.base, self.products.column.to(i64), 4)
        for i in own:
            f.store(known[i], at, 4 * (self.shape.at_x + THREADS * i))
        return lambda: [f.load(at, f32, 4 * (self.shape.at_x + THREADS * i)) for i in own]

    def _embedded(self) -> Callable[[], list[Value]]:
        """What reads the thread's numbers of the token's row; a token outside of the embedding is
        reported."""
        f, table, hidden = self.f, self.kernel.table, self.shape.hidden
        token, rows = f.load(f.arg(self.args, 0, ptr), i32), f.arg(self.args, 12, i32)
        if not table:
            token = f.select(token < 0, token + rows, token)
        inside = (token >= 0) & (token < rows)
        for _ in f.when(~inside & self.thread.eq(0)):
            f.store(f.arg(self.args, 11, i64), f.arg(self.args, 10, ptr))
        size = offsets(table, hidden)[1] if table else 2 * hidden
        row = f.gep(f.arg(self.args, 9, ptr), f.select(inside, token, 0).to(i64), size)
        column = self.products.column
        at = f.gep(row, column.to(i64), 2)

        def read() -> list[Value]:
            words = [f.load(at, bf16.as_int, 2 * THREADS * i) for i in range(self.shape.own)]
            return [(w.to(i32, signed=False) << 16).bits(f32) for w in words]

        def decode() -> list[Value]:
            firsts = [(column + THREADS * i).to(i64) for i in range(self.shape.own)]
            return [decode_one(f, table, row, first, hidden) for first in firsts]

        return decode if table else read

    def _choose_sums(self, launches: Value) -> None:
        """Launches take turns with two buffers of sums; each clears those of the next one."""
        f, hidden = self.f, self.shape.hidden
        added = f.gep(self.base, self.shape.at_added, 4)
        mine = (launches & 1) * (2 * hidden)
        other = f.gep(added, (2 * hidden - mine).to(i64), 8)
        self.sums = f.gep(added, mine.to(i64), 8)
        each = -(-2 * hidden // self.shape.blocks)
        for i in f.range(self.thread, f.i32(each), f.i32(THREADS)):
            column = self.block * each + i
            for _ in f.when(column < 2 * hidden):
                f.store(f.i64(0), f.gep(other, column.to(i64), 8))

    def _sums(self, which: int) -> Value:
        """The thread's first sum of what is added behind attention, or behind the FFN."""
        at = self.products.column + which * self.shape.hidden
        return self.f.gep(self.sums, at.to(i64), 8)

    def _look(self, which: int) -> list[Value]:
        offsets = [8 * THREADS * i for i in range(self.shape.own)]
        return self.f.look_at_sums(self._sums(which), offsets)

    def _received(self, which: int, count: Value, seen: list[Value] | None) -> list[Value]:
        """Sums to which so many blocks have added."""
        offsets = [8 * THREADS * i for i in range(self.shape.own)]
        found = self._look(which) if seen is None else seen
        return self.f.receive_sums(self._sums(which), offsets, count, found)

    def _vector(self, gain: Value) -> list[Value]:
        """The thread's numbers of a vector."""
        f = self.f
        at = f.gep(gain, self.products.column.to(i64), 4)
        return [f.load(at, f32, 4 * THREADS * i) for i in range(self.shape.own)]

    def _layer(
        self, number: Value, tag: Value, place: Slot, start: Callable[[], list[Value]],
        attended: list[Value],
    ) -> list[Value]:  # fmt: skip
        """`attended` is what was added behind attention before; returned is also what is now."""
        f, shape = self.f, self.shape
        layer = LayerArgs(f, shape, number)
        self._note(number)
        exchange = Exchange(self.base, tag, self.group, self.rank)
        early = shape.own <= _MOST_KEPT  # or gains are read while sums are under way
        first, second = (self._vector(layer[i]) if early else [] for i in (GAIN, SECOND_GAIN))
        heads = Heads(layer[QUERY_GAIN], layer[KEY_GAIN], *self._caches(layer))

        known: dict[str, list[Value]] = {}

        def normed(seen: list[Value] | None) -> Columns:
            x, gains = start(), first or self._vector(layer[GAIN])
            known["down"] = self._received(DOWN_SUMS, number * shape.splits & 255, seen)
            self._note(number)
            now = _added(x, attended, known["down"])
            return self._normed(now, gains, shape.qkv, 0)

        qkv = self._rows(layer)[0]
        place = self._product(qkv, place, 0, lambda: self._look(DOWN_SUMS), normed, number)
        self._send_qkv(tag)
        self._note(number)
        lays_aside = shape.own > _MOST_WHILE_ATTENDING and 128 * shape.own <= shape.planes_bytes
        if lays_aside:
            self.products.lay_aside(known["down"])
        place = self.attention.emit(heads, exchange, place)
        self._note(number)
        place = self._add_attention(exchange, number, place)

        def normed_again(seen: list[Value] | None) -> Columns:
            x, gains = start(), second or self._vector(layer[SECOND_GAIN])
            if lays_aside:
                known["down"] = self.products.take_back(shape.own)
            count = (number + 1) * shape.kv_heads & 255
            known["out"] = self._received(OUT_SUMS, count, seen)
            self._note(number)
            now = _added(x, known["out"], known["down"])
            return self._normed(now, gains, shape.gate_up, 0)

        place = self._product(
            Rows(shape.gate_up), place, 0, lambda: self._look(OUT_SUMS), normed_again, number
        )
        self._send_gated(tag)
        self._note(number)

        down = self._rows(layer)[1]
        return [*self._add_ffn(down, tag, number, place), *known["out"]]

    def _rows(self, layer: LayerArgs) -> tuple[Rows, Rows]:
        """The block's rows of q k v, and of down."""
        shape = self.shape
        if not any(shape.others):
            return Rows(shape.qkv), Rows(shape.down)
        qkv, down = layer.rows(self.block)
        return (
            Rows(shape.qkv, shape.other_v, qkv if shape.other_v else None),
            Rows(shape.down, shape.other_down, down if shape.other_down else None),
        )

    def _add_attention(self, exchange: Exchange, number: Value, place: Slot) -> Slot:
        """Multiply what the blocks of the key head have found, and add it to x."""
        f, shape, products = self.f, self.shape, self.products
        parts = self.attention.parts(exchange)

        def combined(seen: list[Value] | None) -> Columns:
            self.attention.combine_blocks(exchange, parts, seen)
            self._note(number)
            f.barrier(THREADS)
            return products.out_columns(shape.out)

        place = self._product(
            Rows(shape.out), place, 1, lambda: f.look(parts), combined, number, self.group
        )
        self._add(shape.out, self.rank * shape.out.rows + OUT_SUMS * shape.hidden)
        self._note(number)
        return place

    def _add_ffn(self, down: Rows, tag: Value, number: Value, place: Slot) -> Slot:
        """Multiply what the gates have let through, and add it to x."""
        f, shape, products = self.f, self.shape, self.products
        share = self.block - self.block.udiv(shape.splits) * shape.splits
        at = f.gep(self.base, (products.column + share * shape.down.columns).to(i64), 4)
        gates = [
            (at, 4 * (shape.at_gated + THREADS * i), 1)
            for i in range(shape.down.columns // THREADS)
        ]

        def gated(seen: list[Value] | None) -> Columns:
            values = f.receive(gates, tag, f.look(gates) if seen is None else seen)
            self._note(number)
            products.put(values)
            return products.columns(shape.down) if self._at_once(down) else []

        place = self._product(down, place, 1, lambda: f.look(gates), gated, number, share)
        row = self.block.udiv(shape.splits) * shape.down.rows
        self._add(shape.down, row + DOWN_SUMS * shape.hidden)
        self._note(number)
        return place

    def _caches(self, layer: LayerArgs) -> list[Value]:
        f, shape = self.f, self.shape
        step = 2 * shape.context * shape.head_dim
        return [f.gep(layer[i], self.group.to(i64), step) for i in (KEYS, VALUES)]

    def _at_once(self, rows: Rows) -> bool:
        others = 4 * (self.shape.own - _MOST_KEPT)  # numbers of x and what is added to it
        return all(
            part.tallest > TILE
            and part.registers <= self.products.most_registers - others
            and part.slots < self.shape.slots
            for part in rows.parts
        )

    def _normed(self, x: list[Value], gains: list[Value], part: Part, buffer: int) -> Columns:
        """The norm of x as operands, but for the factor that all columns have in common."""
        products = self.products
        products.put([v * g for v, g in zip(x, gains, strict=True)])
        products.put_squares(x, buffer)
        return products.columns(part) if part.rounds <= _MOST_ROUNDS else []

    def _product(
        self,
        rows: Rows,
        place: Slot,
        buffer: int,
        look: Callable[[], list[Value]],
        columns: Callable[[list[Value] | None], Columns],
        number: Value,
        share: Value | int = 0,
    ) -> Slot:
        """Multiply, and store the sums of warps; weights are fetched while values are under way.
        The block has the `share`-th piece of each row of the matrix."""
        f, products = self.f, self.products
        seen = look() if self.kernel.early else None
        if self._at_once(rows):
            tiles, place = products.fetch(rows, place, share)
            self._note(number)
            products.finish(rows, tiles, columns(seen), buffer)
        else:
            self._note(number)
            place = products.stream(rows, place, buffer, columns(seen), share)
        self._note(number)
        f.barrier(THREADS)
        return place

    # -- what is handed over ----------------------------------------------------------------------

    def _add(self, part: Part, row: Value) -> None:
        """Add the product's rows to x."""
        f = self.f
        for _ in f.when(self.thread < part.rows):
            value = self.products.total(part, self.thread, 1)
            f.add_fixed(value, f.gep(self.sums, (row + self.thread).to(i64), 8))

    def _send_qkv(self, tag: Value) -> None:
        f, shape, products = self.f, self.shape, self.products
        for _ in f.when(self.thread < shape.qkv.rows):
            value = products.total(shape.qkv, self.thread, 0) * products.norm(0)
            row = self.block * shape.qkv.rows + self.thread + shape.at_qkv
            f.hand_over(value, f.gep(self.base, row.to(i64), 4), tag)

    def _send_gated(self, tag: Value) -> None:
        f, shape = self.f, self.shape
        half = shape.gate_up.rows // 2
        for _ in f.when(self.thread < half):
            factor = self.products.norm(0)
            each = shape.gate_up.box_rows  # rows of the gate, then as many of up
            row = self.thread + self.thread.udiv(each) * each if each < half else self.thread
            part = shape.gate_up
            gate, up = (self.products.total(part, row + each * i, 0) * factor for i in range(2))
            value = f.activate("silu", gate) * up
            at = (self.block * half + self.thread + shape.at_gated).to(i64)
            f.hand_over(value, f.gep(self.base, at, 4), tag)

    # -- the head ---------------------------------------------------------------------------------

    def _head(self, x: list[Value], place: Slot) -> None:
        """Some tiles of the head at a time; sums lie in two buffers in turns."""
        f, shape, products = self.f, self.shape, self.products
        logits = f.arg(self.args, 1, ptr)
        columns = self._normed(x, self._vector(f.arg(self.args, 2, ptr)), shape.head, 0)
        f.barrier(THREADS)
        factor = products.norm(0)
        parts, blocks = shape.head_parts, shape.blocks

        def some(first: Value, slot: Value, parity: Value, buffer: Value) -> list[Value]:
            for i in range(HEAD_TILES):

                def one(slot: Value = slot, parity: Value = parity, i: int = i) -> list[Value]:
                    at = buffer * HEAD_TILES + i
                    return list(products.stream_rows(shape.head, (slot, parity), at, columns))

                def same(slot: Value = slot, parity: Value = parity) -> list[Value]:
                    return [slot, parity]

                slot, parity = f.if_(first + i * blocks < parts, one, same)
            f.barrier(THREADS)
            row = (first + (self.thread >> 5) * blocks) * HEAD_ROWS + (self.thread & 31)
            for _ in f.when((self.thread < HEAD_TILES * HEAD_ROWS) & (row < shape.vocab)):
                at = self.thread + buffer * (HEAD_TILES * HEAD_ROWS)
                value = products.total(shape.head, at, 0) * factor
                f.store(value, f.gep(logits, row.to(i64), 4))
            return [slot, parity, f.i32(1) - buffer]

        begin = [*place, f.i32(0)]
        f.loop(self.block, f.i32(parts), f.i32(HEAD_TILES * blocks), begin, some)

    def _note(self, layer: Value) -> None:
        """Note the clock of the block's first thread."""
        if not self.kernel.marks:
            return
        f, number = self.f, self._mark
        self._mark += 1
        assert number < MARKS
        for _ in f.when(self.thread.eq(0)):
            row = (self.block * self.shape.layers + layer) * MARKS + number
            at = f.gep(f.arg(self.args, 8, ptr), row.to(i64), 4)
            f.store(f.ticks(), at)
