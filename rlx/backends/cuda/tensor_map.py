"""Tensor maps: what the copy engine of Hopper must know of a matrix, in device memory.

A launch names a matrix and where it lies; the driver encodes that once memory has addresses. A map
is never changed: another place is another map, so that work which is queued finds its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rlx.backends.buffer import Buffer, DeviceBuffer
from rlx.backends.cuda.driver import MAP_BYTES, encode_tensor_map
from rlx.backends.kernel_args import Pointer, Scratch
from rlx.ir.dtype import DType
from rlx.support.records import dataclass

if TYPE_CHECKING:
    from rlx.backends.cuda.memory import CudaAllocator

TILE_COLUMNS = 64  # of a tile: 128 bytes
_TOGETHER = 64  # maps of one allocation
_MOST = 4096  # maps that are kept, of buffers that change with each run


@dataclass(frozen=True)
class Matrix:
    """A matrix of 16-bit numbers; rows are `stride` numbers apart. Tiles have `box` rows of `width`
    numbers; they are permuted as `multiply_group` wants them, or lie row by row."""

    element: DType
    rows: int
    columns: int
    stride: int
    box: int
    width: int = TILE_COLUMNS
    permuted: bool = True


@dataclass(frozen=True)
class TensorMap:
    """The address of the tensor map of a matrix that starts there."""

    start: Pointer | Scratch
    matrix: Matrix


class MapStore:
    """The tensor maps of a program, each encoded once."""

    def __init__(self, allocator: CudaAllocator) -> None:
        self._allocator = allocator
        self._known: dict[tuple[Matrix, int], int] = {}
        self._rooms: list[Buffer] = []

    def make_room(self, count: int) -> None:
        """Forget all maps if `count` more would be too many."""
        if len(self._known) + count > _MOST:
            self._allocator.synchronize()  # nothing that is queued needs them
            self._known.clear()

    def address(self, matrix: Matrix, start: int) -> int:
        """Where the tensor map of a matrix at address `start` is."""
        found = self._known.get((matrix, start))
        if found is not None:
            return found
        number = len(self._known)
        if number // _TOGETHER == len(self._rooms):
            self._rooms.append(self._allocator.alloc((_TOGETHER * MAP_BYTES,), np.uint8))
        room = self._rooms[number // _TOGETHER]
        assert isinstance(room, DeviceBuffer)
        place = int(room.handle) + room.offset + number % _TOGETHER * MAP_BYTES
        m = matrix
        encoded = encode_tensor_map(
            start, m.element.name == "bf16", m.rows, m.columns, m.stride * m.element.bytes, m.box,
            m.width, m.permuted,
        )  # fmt: skip
        self._allocator.queue_copy_in(place, encoded)
        self._known[matrix, start] = place
        return place
