"""Device memory: buffers, and the allocator that allocates, copies and clears them.

A device executes its work in order, as one stream. A run may return before it is done; a copy to
the host waits for everything queued before it, and `Allocator.synchronize` waits for all.

Host memory needs no copies: a `HostBuffer` is a NumPy array with the methods of a buffer. A device
with memory of its own implements six methods of `DeviceAllocator`, on handles and byte offsets.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from math import prod
from typing import Any

import numpy as np

from rlx.errors import InputError, OutOfMemoryError, UnsupportedError
from rlx.ir.op import Array
from rlx.support.machine import total_memory

_ALIGNMENT = 64  # bytes: a cache line, and the widest vector
_LARGE, _HUGE, _VAST = 1 << 20, 4 << 20, 1 << 30  # bytes
_HUGE_PAGES_TO = 384 << 20  # bytes of a mapping, see map_pages


class Buffer(ABC):
    """Row-major elements in the memory of one device, with NumPy's `shape`, `dtype`, `nbytes`."""

    __slots__ = ()

    @property
    @abstractmethod
    def allocator(self) -> Allocator: ...

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]: ...

    @property
    @abstractmethod
    def dtype(self) -> Any: ...

    @property
    @abstractmethod
    def nbytes(self) -> int: ...

    @abstractmethod
    def view(self, offset: int, shape: Sequence[int], dtype: Any) -> Buffer:
        """A view of the elements from byte `offset` on."""

    @property
    def device(self) -> str:
        return self.allocator.device

    @property
    def array(self) -> Array:
        """The memory itself as a NumPy array; host memory only."""
        raise UnsupportedError(
            "the host cannot access this memory", where=self.device, got=repr(self),
            hint="copy_out() returns a copy",
        )  # fmt: skip

    def copy_in(self, array: Array) -> None:
        self.allocator.copy_in(self, array)

    def copy_out(self) -> Array:
        """A copy of the elements in host memory."""
        return self.allocator.copy_out(self)

    def zero(self) -> None:
        self.allocator.zero(self)

    def use_huge_pages(self, on: bool) -> None:  # noqa: B027
        """Advice on host memory that was not used yet: huge pages stream faster, small ones are
        there only for what is written."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.array, dtype, copy=copy)

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __repr__(self) -> str:
        dims = ", ".join(map(str, self.shape))
        return f"<Buffer [{dims}] {self.dtype} on {self.device}>"


class HostBuffer(Buffer):
    """A NumPy array as a buffer: no copy, and no cost beyond the object."""

    __slots__ = ("array",)

    def __init__(self, array: Array) -> None:
        self.array: Array = array  # C-contiguous

    @property
    def allocator(self) -> Allocator:
        return HOST

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    @property
    def nbytes(self) -> int:
        return int(self.array.nbytes)

    def use_huge_pages(self, on: bool) -> None:
        _advise_huge(self.array, on)

    def view(self, offset: int, shape: Sequence[int], dtype: Any) -> HostBuffer:
        raw = _bytes(self.array)[offset : offset + _size(shape, dtype)]
        return HostBuffer(raw.view(dtype).reshape(shape))


class DeviceBuffer(Buffer):
    """A range of an allocation in memory that only the device can access."""

    __slots__ = ("_allocation", "_dtype", "_nbytes", "_shape", "offset")

    def __init__(
        self, allocation: Allocation, offset: int, shape: Sequence[int], dtype: Any
    ) -> None:
        self._allocation, self.offset = allocation, offset  # in bytes
        self._shape, self._dtype = tuple(shape), np.dtype(dtype)
        self._nbytes = _size(shape, dtype)

    @property
    def handle(self) -> Any:
        """The allocator's handle of the whole allocation: an address, a key."""
        return self._allocation.handle

    @property
    def allocator(self) -> Allocator:
        return self._allocation.allocator

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def dtype(self) -> Any:
        return self._dtype

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def view(self, offset: int, shape: Sequence[int], dtype: Any) -> DeviceBuffer:
        if not 0 <= offset <= offset + _size(shape, dtype) <= self._nbytes:
            raise InputError(
                "a view past the end of a buffer", where=self.device,
                got=f"{_size(shape, dtype)} bytes at {offset}", expected=f"{self._nbytes} bytes",
            )  # fmt: skip
        return DeviceBuffer(self._allocation, self.offset + offset, shape, dtype)


class Allocation:
    """Owns device memory; it is freed with the last buffer in it."""

    __slots__ = ("allocator", "handle")

    def __init__(self, allocator: DeviceAllocator, handle: Any) -> None:
        self.allocator, self.handle = allocator, handle

    def __del__(self) -> None:
        self.allocator._free(self.handle)


class Allocator(ABC):
    """The memory of one device."""

    device: str
    is_host = False  # whether its buffers are HostBuffers

    @abstractmethod
    def alloc(self, shape: Sequence[int], dtype: Any) -> Buffer:
        """A new buffer of zeros; it is freed with the last reference to it."""

    def alloc_arena(self, nbytes: int) -> Buffer:
        """Zeroed bytes for the arena of an executable."""
        return self.alloc((nbytes,), np.uint8)

    def put(self, array: Array) -> Buffer:
        """The array as a buffer: the same memory on the host, else a copy."""
        buffer = self.alloc(array.shape, array.dtype)
        self.copy_in(buffer, array)
        return buffer

    def staging(self, shape: Sequence[int], dtype: Any) -> Array:
        """Host memory for fast copies from and to the device: pinned, where there is such."""
        return np.zeros(shape, dtype)

    def from_dlpack(self, value: Any) -> Buffer | None:
        """The memory of a DLPack object as a buffer; None if it is another device's."""
        return None

    def free_bytes(self) -> int | None:
        """Bytes of free device memory; None for host memory."""
        return None

    @abstractmethod
    def copy_in(self, buffer: Buffer, array: Array) -> None:
        """Write the elements of a host array; the caller may change it as soon as this returns."""

    @abstractmethod
    def copy_out(self, buffer: Buffer, out: Array | None = None) -> Array:
        """Wait for all earlier work, then read the elements into `out` or a new array."""

    def read_later(self, buffer: Buffer) -> Callable[[], Array]:
        """Queue a read. The function it returns gives the elements once; it waits for the work
        queued before, and where the device can, for nothing queued since."""
        found = self.copy_out(buffer)
        return lambda: found

    @abstractmethod
    def copy(self, target: Buffer, source: Buffer) -> None:
        """Copy between buffers; `source` may be another device's."""

    @abstractmethod
    def zero(self, buffer: Buffer) -> None: ...

    def synchronize(self) -> None:  # noqa: B027
        """Wait for all queued work; raise the error of a run that had already returned."""


class HostAllocator(Allocator):
    """NumPy's memory, shared by all devices that run on the host. Nothing is queued."""

    device = "host"
    is_host = True

    def alloc(self, shape: Sequence[int], dtype: Any) -> HostBuffer:
        size = _size(shape, dtype)
        require_memory(shape, dtype)
        try:
            raw = np.zeros(size + _ALIGNMENT, np.uint8)
        except MemoryError as error:
            raise _out_of_memory(self.device, shape, dtype) from error
        start = -raw.ctypes.data % _ALIGNMENT
        return HostBuffer(raw[start : start + size].view(dtype).reshape(shape))

    def alloc_arena(self, nbytes: int) -> HostBuffer:
        """Large arenas are fresh pages of the system, which are zero already: clearing memory that
        was used before would cost more than everything else of a new variant."""
        if nbytes < _LARGE:
            return self.alloc((nbytes,), np.uint8)
        require_memory((nbytes,), np.uint8)
        try:
            return HostBuffer(np.frombuffer(map_pages(nbytes), np.uint8))
        except OSError as error:
            raise _out_of_memory(self.device, (nbytes,), np.uint8) from error

    def put(self, array: Array) -> HostBuffer:
        return HostBuffer(array)

    def copy_in(self, buffer: Buffer, array: Array) -> None:
        _require_fit(buffer, array)
        buffer.array[...] = array.reshape(buffer.shape)

    def copy_out(self, buffer: Buffer, out: Array | None = None) -> Array:
        if out is None:
            return buffer.array.copy()
        _require_fit(buffer, out)
        out[...] = buffer.array.reshape(out.shape)
        return out

    def copy(self, target: Buffer, source: Buffer) -> None:
        self.copy_in(target, source.array if source.allocator is self else source.copy_out())

    def zero(self, buffer: Buffer) -> None:
        buffer.array.fill(0)


class DeviceAllocator(Allocator):
    """Memory that the host cannot access. A device implements the six underscored methods."""

    def alloc(self, shape: Sequence[int], dtype: Any) -> DeviceBuffer:
        size = _size(shape, dtype)
        try:
            handle = self._alloc(size)
        except MemoryError as error:
            raise _out_of_memory(self.device, shape, dtype, self.free_bytes()) from error
        buffer = DeviceBuffer(Allocation(self, handle), 0, shape, dtype)
        self._zero(handle, 0, size)
        return buffer

    def copy_in(self, buffer: Buffer, array: Array) -> None:
        _require_fit(buffer, array)
        target = self._own(buffer)
        self._copy_in(target.handle, target.offset, _bytes(np.ascontiguousarray(array)).data)

    def copy_out(self, buffer: Buffer, out: Array | None = None) -> Array:
        source = self._own(buffer)
        result = np.empty(buffer.shape, buffer.dtype) if out is None else out
        _require_fit(buffer, result)
        self._copy_out(_bytes(result).data, source.handle, source.offset)
        return result

    def copy(self, target: Buffer, source: Buffer) -> None:
        if source.allocator is not self:  # by way of the host
            return self.copy_in(target, source.copy_out())
        _require_fit(target, source)
        to, of = self._own(target), self._own(source)
        return self._copy(to.handle, to.offset, of.handle, of.offset, of.nbytes)

    def zero(self, buffer: Buffer) -> None:
        own = self._own(buffer)
        self._zero(own.handle, own.offset, own.nbytes)

    def _own(self, buffer: Buffer) -> DeviceBuffer:
        if not isinstance(buffer, DeviceBuffer) or buffer.allocator is not self:
            raise InputError(
                "a buffer of another device", where=self.device, got=repr(buffer),
                hint="Allocator.copy copies between devices",
            )  # fmt: skip
        return buffer

    @abstractmethod
    def _alloc(self, nbytes: int) -> Any:
        """Allocate memory and return its handle; MemoryError if there is not enough."""

    @abstractmethod
    def _free(self, handle: Any) -> None:
        """Free memory, after the work queued so far."""

    @abstractmethod
    def _copy_in(self, handle: Any, offset: int, data: memoryview) -> None:
        """Queue a write; `data` must be read before this returns."""

    @abstractmethod
    def _copy_out(self, data: memoryview, handle: Any, offset: int) -> None:
        """Wait for all queued work, then fill `data`."""

    @abstractmethod
    def _copy(self, target: Any, at: int, source: Any, offset: int, nbytes: int) -> None:
        """Queue a copy between two allocations."""

    @abstractmethod
    def _zero(self, handle: Any, offset: int, nbytes: int) -> None:
        """Queue a fill with zeros."""


HOST = HostAllocator()


class Mirror:
    """A host array that mirrors a buffer: the same memory if the host can access it, else staging
    memory, which `push` copies to the device and `pull` copies back."""

    __slots__ = ("array", "buffer", "is_copy")

    def __init__(self, buffer: Buffer) -> None:
        self.buffer, self.is_copy = buffer, not buffer.allocator.is_host
        staging = buffer.allocator.staging
        self.array = staging(buffer.shape, buffer.dtype) if self.is_copy else buffer.array

    def push(self) -> None:
        if self.is_copy:
            self.buffer.copy_in(self.array)

    def pull(self) -> Array:
        if self.is_copy:
            self.buffer.allocator.copy_out(self.buffer, self.array)
        return self.array


_NORESERVE = 0x4000 if sys.platform == "linux" else 0


def map_pages(size: int) -> mmap.mmap:
    """Pages of the system, huge ones where it has them, to save page table walks. For the arena of
    a training step, they would save a percent of its time; but a virtual machine that gives free
    memory back to its host gets huge pages anew at some 2 s a GB, small ones at a sixth of that.

    An arena is as large as the bounds of its sizes, most of it never used: it is not reserved, or
    a process with such arenas could not fork."""
    if size < _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, size)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    pages = mmap.mmap(-1, size, flags=flags)
    if size <= _HUGE_PAGES_TO:
        with suppress(OSError):  # a kernel built without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def _advise_huge(array: Array, on: bool) -> None:
    """Ask the system for huge pages in memory that was not used yet, or for none."""
    name = "MADV_HUGEPAGE" if on else "MADV_NOHUGEPAGE"
    if array.nbytes < _HUGE or not hasattr(mmap, name) or sys.platform != "linux":
        return
    first = -(-array.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (array.ctypes.data + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    # it is advice: a kernel that takes none goes on as before
    ctypes.CDLL(None).madvise(
        ctypes.c_void_p(first), ctypes.c_size_t(last - first), getattr(mmap, name)
    )


def _size(shape: Sequence[int], dtype: Any) -> int:
    return prod(shape) * int(np.dtype(dtype).itemsize)


_limit: ContextVar[int | None] = ContextVar("bytes of one allocation", default=None)


@contextmanager
def allocation_limit(nbytes: int) -> Iterator[None]:
    """Inside, no arena and no tensor of host memory is larger; below a MiB nothing is checked."""
    token = _limit.set(nbytes)
    try:
        yield
    finally:
        _limit.reset(token)


def require_memory(shape: Sequence[int], dtype: Any) -> None:
    """Refuse what the machine can never hold: a system that overcommits would grant it, and end the
    process when it is used. And what is beyond the limit."""
    size, limit = _size(shape, dtype), _limit.get()
    if limit is not None and size > limit:
        raise _out_of_memory(HOST.device, shape, dtype, limit, "which is the limit here")
    if size >= _VAST and size > (total_memory() or size):  # 0: the system does not say
        raise _out_of_memory(HOST.device, shape, dtype, total_memory(), "which this machine has")


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def _require_fit(buffer: Buffer, other: Buffer | Array) -> None:
    if (buffer.nbytes, buffer.dtype) != (other.nbytes, other.dtype):
        raise InputError(
            "a copy that does not fit its buffer", where=buffer.device,
            got=f"{list(other.shape)} {other.dtype}",
            expected=f"{list(buffer.shape)} {buffer.dtype}",
        )  # fmt: skip


def _out_of_memory(
    device: str,
    shape: Sequence[int],
    dtype: Any,
    free: int | None = None,
    free_is: str = "which are free",
) -> OutOfMemoryError:
    size = _size(shape, dtype)
    return OutOfMemoryError(
        "out of memory", where=device, got=f"{size:,} bytes requested",
        expected=None if free is None else f"at most {free:,} bytes, {free_is}",
        origin=f"a buffer {list(shape)} {np.dtype(dtype)}",
        hint="a smaller context or batch needs less; free what is not in use",
    )  # fmt: skip
