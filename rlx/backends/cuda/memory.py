"""Memory of a GPU behind the buffer protocol: one stream orders all copies and runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import byref, c_size_t, c_ubyte, c_ulonglong, c_void_p
from math import prod
from typing import Any

import numpy as np

from rlx.backends.buffer import Buffer, DeviceAllocator
from rlx.backends.cuda.driver import Event, Gpu, Stream, call
from rlx.ir.op import Array

_SMALL = 1 << 15  # bytes
_MOST_SOURCES = 1024  # queued copies whose bytes are kept


class CudaAllocator(DeviceAllocator):
    """A handle is an address. Frees wait for the work that was queued before them."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.stream = gpu, Stream(gpu)
        self.device = f"cuda:{gpu.index}"
        self._checks: dict[int, Callable[[], None]] = {}  # of queued runs, by owner
        self._sources: list[bytes] = []  # of queued copies
        self._reads: dict[
            int, list[tuple[Array, Event]]
        ] = {}  # pinned memory to read into, by size

    # -- the six methods ------------------------------------------------------------------------

    def _alloc(self, nbytes: int) -> int:
        self.gpu.activate()
        address = c_ulonglong()
        call("cuMemAlloc_v2", byref(address), c_size_t(max(nbytes, 1)))
        return address.value

    def _free(self, handle: int) -> None:
        self.gpu.release("cuMemFree_v2", handle)

    def _copy_in(self, handle: int, offset: int, data: memoryview) -> None:
        if len(data) <= _SMALL:  # a copy of it costs less than to wait
            self.queue_copy_in(handle + offset, bytes(data))
            return
        self._queue_in(handle + offset, _address(data), len(data))
        self.stream.synchronize()  # the caller may change the array as soon as this returns

    def _copy_out(self, data: memoryview, handle: int, offset: int) -> None:
        if len(data):
            self.gpu.activate()
            to, of = c_void_p(_address(data)), c_ulonglong(handle + offset)
            call("cuMemcpyDtoHAsync_v2", to, of, c_size_t(len(data)), self.stream.handle)
        self.synchronize()

    def _copy(self, target: int, at: int, source: int, offset: int, nbytes: int) -> None:
        if nbytes:
            self.gpu.activate()
            to, of = c_ulonglong(target + at), c_ulonglong(source + offset)
            call("cuMemcpyDtoDAsync_v2", to, of, c_size_t(nbytes), self.stream.handle)

    def _zero(self, handle: int, offset: int, nbytes: int) -> None:
        if nbytes:
            self.gpu.activate()
            where = c_ulonglong(handle + offset)
            call("cuMemsetD8Async", where, c_ubyte(0), c_size_t(nbytes), self.stream.handle)

    # -- more -----------------------------------------------------------------------------------

    def staging(self, shape: Sequence[int], dtype: Any) -> Array:
        """Pinned host memory, which the GPU can also read and write at the same address."""
        self.gpu.activate()
        size = prod(shape) * np.dtype(dtype).itemsize
        raw = np.asarray(_PinnedMemory(self.gpu, size))
        raw.fill(0)
        return raw[:size].view(dtype).reshape(shape)

    def read_later(self, buffer: Buffer) -> Callable[[], Array]:
        source, size = self._own(buffer), buffer.nbytes
        free = self._reads.setdefault(size, [])
        raw, event = free.pop() if free else (self.staging((size,), np.uint8), Event(self.stream))
        self.gpu.activate()
        to, of = c_void_p(raw.ctypes.data), c_ulonglong(source.handle + source.offset)
        call("cuMemcpyDtoHAsync_v2", to, of, c_size_t(size), self.stream.handle)
        event.record()

        def wait() -> Array:
            event.wait()
            self._run_checks()
            found = raw.view(buffer.dtype).reshape(buffer.shape).copy()
            free.append((raw, event))
            return found

        return wait

    def free_bytes(self) -> int:
        return self.gpu.memory()[0]

    def queue_copy_in(self, address: int, data: bytes) -> None:
        """Write bytes that nobody will change, without waiting."""
        if len(self._sources) >= _MOST_SOURCES:
            self.stream.synchronize()
            self._sources.clear()
        self._sources.append(data)
        self._queue_in(address, _address(memoryview(data)), len(data))

    def check_later(self, owner: object, check: Callable[[], None]) -> None:
        """Call `check` once, when the work queued so far is done."""
        self._checks[id(owner)] = check

    def synchronize(self) -> None:
        self.stream.synchronize()
        self._sources.clear()
        self._run_checks()

    def _run_checks(self) -> None:
        while self._checks:
            self._checks.popitem()[1]()

    def _queue_in(self, address: int, source: int, size: int) -> None:
        if size:
            self.gpu.activate()
            to, of = c_ulonglong(address), c_void_p(source)
            call("cuMemcpyHtoDAsync_v2", to, of, c_size_t(size), self.stream.handle)


class _PinnedMemory:
    """Page-locked bytes, freed with the last array in them."""

    def __init__(self, gpu: Gpu, size: int) -> None:
        self._gpu, self._address = gpu, c_void_p()
        call("cuMemHostAlloc", byref(self._address), c_size_t(max(size, 1)), 0)
        self.__array_interface__ = {
            "version": 3,
            "shape": (max(size, 1),),
            "typestr": "|u1",
            "data": (self._address.value, False),
        }

    def __del__(self) -> None:
        if self._address:
            self._gpu.release("cuMemFreeHost", self._address)


def _address(data: memoryview) -> int:
    """Where the bytes of a buffer lie, whether or not they may be written."""
    return int(np.frombuffer(data, np.uint8).ctypes.data) if len(data) else 0
