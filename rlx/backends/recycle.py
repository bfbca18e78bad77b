"""Memory for results of runs: large blocks are used again.

A fresh block of the system costs a page fault for every page that is written, which takes longer
than most kernels run. So the block of a large result goes to a free list when the last array that
views it is gone, and a later result of about the same size takes it from there. All of this is
without a lock, by list operations that are atomic: arrays may die in any thread, at any moment.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import partial
from math import prod
from mmap import mmap
from typing import Any

import numpy as np

from rlx.backends.buffer import map_pages, require_memory
from rlx.ir.op import Array

_LARGE = 1 << 20  # bytes: smaller results are left to malloc, which recycles them
_VECTORS = 1 << 14  # bytes: with more, vectors that cross cache lines cost more than to align them
_LINE = 64
_ROUND = 1 << 16
KEPT_BYTES, _KEPT_BLOCKS = 256 << 20, 16  # of free blocks, at most


class Block:
    """Pages of the system."""

    __slots__ = ("address", "nbytes", "pages")

    def __init__(self, nbytes: int) -> None:
        self.pages: mmap = map_pages(nbytes)
        self.nbytes = nbytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.pages))


free: list[Block] = []


class _Lease:
    """What arrays in a block have as their base. The last of them frees the block."""

    __slots__ = ("__array_interface__", "_block")

    def __init__(self, block: Block, nbytes: int) -> None:
        self._block = block
        self.__array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (block.address, False), "version": 3,
        }  # fmt: skip

    def __del__(
        self, free: list[Block] = free, limits: tuple[int, int] = (KEPT_BYTES, _KEPT_BLOCKS)
    ) -> None:
        # defaults: at exit, the names of a module may be gone before the last array
        free.append(self._block)
        while sum([b.nbytes for b in free]) > limits[0] or len(free) > limits[1]:
            try:
                free.pop(0)
            except IndexError:  # another thread was faster
                return


def result_maker(shape: tuple[int, ...], dtype: Any) -> Callable[[], Array]:
    """A function that returns arrays of this shape with any elements."""
    nbytes = prod(shape) * int(np.dtype(dtype).itemsize)
    make = np.empty if nbytes < _VECTORS else _aligned if nbytes < _LARGE else _recycled
    return partial(make, shape, dtype)


def copied(array: Array) -> Array:
    """A row-major copy in memory that suits kernels."""
    made = result_maker(array.shape, array.dtype)()
    np.copyto(made, array)
    return made


def _aligned(shape: tuple[int, ...], dtype: Any) -> Array:
    nbytes = prod(shape) * int(np.dtype(dtype).itemsize)
    raw = np.empty(nbytes + _LINE, np.uint8)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(raw.data)) % _LINE
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def _recycled(shape: tuple[int, ...], dtype: Any) -> Array:
    require_memory(shape, dtype)
    nbytes = prod(shape) * int(np.dtype(dtype).itemsize)
    block = _take(nbytes) or Block(-(-nbytes // _ROUND) * _ROUND)
    return np.asarray(_Lease(block, nbytes)).view(dtype).reshape(shape)


def is_only_view(array: Array) -> bool:
    """Whether `array` is a view of a result, and no other array views that memory."""
    if type(array.base) is not np.ndarray:
        return False
    owner: object = array.base.base
    return (owner is None or type(owner) is _Lease) and _uses_of(array) <= _ONE


def _uses_of(array: Array) -> int:
    return sys.getrefcount(array.base)


_ONE = _uses_of(np.empty(8, np.uint8).view(np.int8).reshape(8))


def _take(nbytes: int) -> Block | None:
    """The most recently freed block that holds so many bytes and is not much larger."""
    for block in reversed(free[:]):
        if nbytes <= block.nbytes <= nbytes + nbytes // 4:
            try:
                free.remove(block)
            except ValueError:
                continue  # another thread has it
            return block
    return None


def release() -> None:
    """Give all free blocks back to the system."""
    free.clear()
