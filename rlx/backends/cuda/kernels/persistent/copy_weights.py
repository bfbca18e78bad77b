"""The warp that copies: a block's weights, keys and values, in the order in which they are used."""

from __future__ import annotations

from collections.abc import Callable

from rlx.backends.cuda.builder import WARP, BlockFunction
from rlx.backends.cuda.kernels.persistent.layer_args import (
    DOWN,
    GATE,
    KEYS,
    OTHERS,
    OUT,
    QKV,
    UP,
    VALUES,
    LayerArgs,
)
from rlx.backends.cuda.kernels.persistent.ring import Ring, Slot
from rlx.backends.cuda.kernels.persistent.shape import (
    ARGS,
    FIXED_ARGS,
    HEAD_ROWS,
    DenseShape,
)
from rlx.llvm.builder import Value, i64, ptr


class Copies:
    def __init__(self, f: BlockFunction, shape: DenseShape, ring: Ring) -> None:
        self.f, self.shape, self.ring, self.args = f, shape, ring, f["args"]
        # a value of its own: registers of the other warps would hold what both make of it
        self.block = f.uniform(f.block_number())
        self.group = self.block.udiv(shape.ranks)
        self.rank = self.block - self.group * shape.ranks

    def emit(self, wait: Callable[[], Value]) -> None:
        """`wait` waits for the kernel in front, and gives the new position. The first weights are
        under way before."""
        f = self.f
        self._acquire()
        slot, parity = self.ring.start()
        is_first = f.lane32().eq(0)
        place = f.if_(
            is_first,
            lambda: list(self._fill_qkv(f.i32(0), (slot, parity))),
            lambda: [slot, parity],
        )
        pieces = self.shape.pieces(wait())
        f.fence_copies()  # the cache was written by kernels before
        for _ in f.when(is_first):
            self._copy_all(pieces, (place[0], place[1]))

    def _head(self) -> list[Value]:
        """The tensor maps of the head."""
        beside = range(FIXED_ARGS, self.shape.fixed_args)
        return [self.f.arg(self.args, i, ptr) for i in (3, *beside)]

    def _acquire(self) -> None:
        """Make all tensor maps known to the copy engine."""
        f, shape = self.f, self.shape
        for tensor_map in self._head():
            f.acquire_map(tensor_map)
        for i in f.range(f.lane32(), f.i32(shape.maps * shape.layers), f.i32(WARP)):
            number = i.udiv(shape.maps)
            at = number * (8 * shape.layer_args) + (i - number * shape.maps) * 8
            f.acquire_map(f.load_shared_pointer(at, shape.place(ARGS) + 8 * shape.fixed_args))
        f.warp_barrier()

    def _copy_all(self, pieces: Value, place: Slot) -> None:
        """By one thread; the weights of q k v of the first layer are there."""
        f, shape = self.f, self.shape

        def layer(number: Value, slot: Value, parity: Value) -> list[Value]:
            slot, parity = self._fill_rest(number, pieces, (slot, parity))
            return f.if_(
                number + 1 < shape.layers,
                lambda: list(self._fill_qkv(number + 1, (slot, parity))),
                lambda: [slot, parity],
            )

        slot, parity = f.loop(f.i32(0), f.i32(shape.layers), f.i32(1), list(place), layer)

        head = self._head()

        def rows(number: Value, slot: Value, parity: Value) -> list[Value]:
            place = slot, parity
            return list(self.ring.fill_part(shape.head, [head], number * HEAD_ROWS, 0, place))

        parts = f.i32(shape.head_parts)
        f.loop(self.block, parts, f.i32(shape.blocks), [slot, parity], rows)

    def _fill_qkv(self, number: Value, place: Slot) -> Slot:
        shape, layer = self.shape, LayerArgs(self.f, self.shape, number)
        row, maps = self.block * shape.qkv.rows, layer.maps(QKV)
        if shape.other_v is None:
            return self.ring.fill_part(shape.qkv, [maps], row, 0, place)
        rows, _ = layer.rows(self.block)
        place = self.ring.fill_part(shape.qkv, [maps], row, 0, place, rows)
        row, left = row + rows - shape.qk_rows, shape.qkv.rows - rows
        return self.ring.fill_part(shape.other_v, [layer.maps(OTHERS)], row, 0, place, left)

    def _fill_rest(self, number: Value, pieces: Value, place: Slot) -> Slot:
        """What a layer needs behind q k v."""
        f, shape, ring = self.f, self.shape, self.ring
        layer = LayerArgs(f, shape, number)

        def piece(number: Value, slot: Value, parity: Value) -> list[Value]:
            at = (self.group * shape.context + number * shape.piece).to(i64)
            keys, values = (f.gep(layer[i], at, 2 * shape.head_dim) for i in (KEYS, VALUES))
            return list(ring.fill_piece(keys, values, (slot, parity)))

        slot, parity = f.loop(self.rank, pieces, f.i32(shape.ranks), list(place), piece)
        place = slot, parity
        row, column = self.rank * shape.out.rows, self.group * shape.group_columns
        place = ring.fill_part(shape.out, [layer.maps(OUT)], row, column, place)
        row = self.block * (shape.gate_up.rows // 2)
        both = [layer.maps(GATE), layer.maps(UP)]
        place = ring.fill_part(shape.gate_up, both, row, 0, place)
        team = self.block.udiv(shape.splits)
        row = team * shape.down.rows
        column = (self.block - team * shape.splits) * shape.down.columns
        if shape.other_down is None:
            return ring.fill_part(shape.down, [layer.maps(DOWN)], row, column, place)
        _, rows = layer.rows(self.block)
        place = ring.fill_part(shape.down, [layer.maps(DOWN)], row, column, place, rows)
        maps, left = layer.maps(len(shape.parts) - 1), shape.down.rows - rows
        return ring.fill_part(shape.other_down, [maps], row, column, place, left)
