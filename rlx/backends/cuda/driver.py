"""The CUDA driver API through ctypes: devices, memory, modules, launches and graphs.

Only the driver's own library is needed: no toolkit, no runtime library, nothing to build. Every
call is checked; an error names the call, what the driver says, and what to do.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from functools import cache, cached_property
from typing import Any

from rlx.errors import CodegenError, OptionError, UnsupportedError
from rlx.support.records import dataclass

_LIBRARIES = ("libcuda.so.1", "libcuda.so", "nvcuda.dll")
_OLDEST = 12070  # CUDA 12.7: the first driver that reads the PTX version we write
_OUT_OF_MEMORY = 2  # result of a call
_MAJOR, _MINOR, _MULTIPROCESSORS, _SHARED = 75, 76, 16, 97  # device attributes
_MAX_SHARED = 8  # function attribute: bytes of dynamic shared memory
_PROGRAMMATIC = 6  # launch attribute: may start before the kernel in front of it has ended
_LOG = 1 << 14
MAP_BYTES = 128  # of a tensor map
_SWIZZLE_128, _PROMOTE_128 = 3, 2  # how tiles lie in shared memory, what the L2 cache fetches


class LaunchAttribute(ctypes.Structure):
    _fields_ = [("id", c_int), ("padding", c_int), ("value", ctypes.c_ubyte * 64)]


class LaunchConfig(ctypes.Structure):
    _fields_ = [
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared", c_uint),
        ("stream", c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("count", c_uint),
    ]


@cache
def library() -> Any:
    """The driver's library, initialised; UnsupportedError where there is none or an old one."""
    found = _load()
    status = found.cuInit(0)
    if status:
        raise UnsupportedError(
            "no usable CUDA device", where="cuda", got=_message(found, status),
            hint="`nvidia-smi` shows whether the driver sees a GPU",
        )  # fmt: skip
    version = c_int()
    found.cuDriverGetVersion(byref(version))
    if version.value < _OLDEST:
        raise UnsupportedError(
            "the CUDA driver is too old", where="cuda", got=_version(version.value),
            expected=f"{_version(_OLDEST)} or newer", hint="update the NVIDIA driver",
        )  # fmt: skip
    return found


def _load() -> Any:
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise UnsupportedError(
        "no CUDA driver on this machine", where="cuda", got="none of " + ", ".join(_LIBRARIES),
        hint="install the NVIDIA driver, or use device='cpu'",
    )  # fmt: skip


def _version(number: int) -> str:
    return f"CUDA {number // 1000}.{number % 1000 // 10}"


def _message(driver: Any, status: int) -> str:
    text = c_char_p()
    driver.cuGetErrorString(status, byref(text))
    return f"error {status}" + (f", {text.value.decode()}" if text.value else "")


def call(name: str, *arguments: Any) -> None:
    """Call a driver function; CodegenError unless it succeeds, MemoryError for want of memory."""
    _call(library(), name, *arguments)


def _call(driver: Any, name: str, *arguments: Any) -> None:
    status = getattr(driver, name)(*arguments)
    if status == _OUT_OF_MEMORY:
        raise MemoryError(name)
    if status:
        raise CodegenError("the CUDA driver refuses", where=name, got=_message(driver, status))


def driver_version() -> int:
    """The CUDA version of the driver, such as 12080."""
    found = c_int()
    call("cuDriverGetVersion", byref(found))
    return found.value


def count_devices() -> int:
    """How many GPUs the driver sees; 0 without a driver."""
    try:
        found = c_int()
        call("cuDeviceGetCount", byref(found))
    except UnsupportedError:
        return 0
    return found.value


def version_text() -> str:
    return _version(driver_version())


class Gpu:
    """One GPU: its facts and its primary context, which other libraries in the process share."""

    closed = False  # at the end of the process the driver frees everything by itself

    def __init__(self, index: int = 0) -> None:
        self._driver = library()  # says what is wrong where there is none
        if not 0 <= index < count_devices():
            raise OptionError(
                "no such GPU", where="cuda", got=index, expected=f"0 … {count_devices() - 1}"
            )
        self.index = index
        self._handle = c_int()
        call("cuDeviceGet", byref(self._handle), index)
        self._context = c_void_p()
        call("cuDevicePrimaryCtxRetain", byref(self._context), self._handle)
        self._local = threading.local()
        atexit.register(self._close)

    def _close(self) -> None:
        self.closed = True

    def release(self, name: str, handle: int | c_void_p) -> None:
        """Call a driver function that frees something: an address, or what a handle stands for."""
        if not self.closed:
            self.activate()
            given = c_ulonglong(handle) if isinstance(handle, int) else handle
            _call(self._driver, name, given)

    def activate(self) -> None:
        """Make the context current in the calling thread."""
        if not getattr(self._local, "current", False):
            _call(self._driver, "cuCtxSetCurrent", self._context)
            self._local.current = True

    @cached_property
    def name(self) -> str:
        text = ctypes.create_string_buffer(256)
        call("cuDeviceGetName", text, 256, self._handle)
        return text.value.decode()

    @cached_property
    def capability(self) -> tuple[int, int]:
        """Compute capability, such as (9, 0)."""
        return self._attribute(_MAJOR), self._attribute(_MINOR)

    @cached_property
    def multiprocessors(self) -> int:
        return self._attribute(_MULTIPROCESSORS)

    @cached_property
    def shared_memory(self) -> int:
        """Bytes of shared memory that a block may ask for."""
        return self._attribute(_SHARED)

    def memory(self) -> tuple[int, int]:
        """Free and total bytes."""
        self.activate()
        free, total = c_size_t(), c_size_t()
        call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def _attribute(self, number: int) -> int:
        value = c_int()
        call("cuDeviceGetAttribute", byref(value), number, self._handle)
        return value.value


class Stream:
    """A queue of work; everything in it runs in order."""

    def __init__(self, gpu: Gpu) -> None:
        gpu.activate()
        self.gpu = gpu
        self.handle = c_void_p()
        call("cuStreamCreate", byref(self.handle), 1)  # does not wait for the default stream

    def synchronize(self) -> None:
        self.gpu.activate()
        call("cuStreamSynchronize", self.handle)

    def __del__(self) -> None:
        if self.handle:
            self.gpu.release("cuStreamDestroy_v2", self.handle)

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        """Record the launches inside instead of running them."""
        graph, captured = Graph(self.gpu), c_void_p()
        self.gpu.activate()
        call("cuStreamBeginCapture_v2", self.handle, 2)  # launches of other threads stay outside
        try:
            yield graph
        finally:
            call("cuStreamEndCapture", self.handle, byref(captured))
        graph.instantiate(captured)


class Graph:
    """Captured launches that run with one call."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._executable = gpu, c_void_p()

    def instantiate(self, captured: c_void_p) -> None:
        call("cuGraphInstantiateWithFlags", byref(self._executable), captured, c_ulonglong(0))
        call("cuGraphDestroy", captured)

    def launch(self, stream: Stream) -> None:
        stream.gpu.activate()
        call("cuGraphLaunch", self._executable, stream.handle)

    def __del__(self) -> None:
        if self._executable:
            self._gpu.release("cuGraphExecDestroy", self._executable)


class Event:
    """A point in a stream, to wait for and for timing."""

    def __init__(self, stream: Stream) -> None:
        stream.gpu.activate()
        self.stream, self.handle = stream, c_void_p()
        call("cuEventCreate", byref(self.handle), 0)

    def __del__(self) -> None:
        if self.handle:
            self.stream.gpu.release("cuEventDestroy_v2", self.handle)

    def record(self) -> Event:
        self.stream.gpu.activate()
        call("cuEventRecord", self.handle, self.stream.handle)
        return self

    def wait(self) -> None:
        """Wait until the stream has reached it."""
        self.stream.gpu.activate()
        call("cuEventSynchronize", self.handle)

    def seconds_since(self, start: Event) -> float:
        """Between two recorded events, once the stream has reached this one."""
        self.wait()
        found = c_float()
        call("cuEventElapsedTime", byref(found), start.handle, self.handle)
        return found.value / 1e3


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched; `overlaps` lets it start before the one in front has ended."""

    grid: int
    block: int
    shared: int = 0
    overlaps: bool = False


class CudaModule:
    """Machine code on a GPU, from a cubin or from PTX."""

    def __init__(self, gpu: Gpu, image: bytes) -> None:
        gpu.activate()
        self.gpu, self._handle = gpu, c_void_p()
        errors = ctypes.create_string_buffer(_LOG)
        names = (c_int * 2)(5, 6)  # error log: buffer, size
        values = (c_void_p * 2)(ctypes.addressof(errors), _LOG)
        status = library().cuModuleLoadDataEx(byref(self._handle), image, 2, names, values)
        if status:
            said = errors.value.decode(errors="replace") or _message(library(), status)
            raise CodegenError("the GPU cannot load the code", where="cuda", got=said[:2000])

    def function(self, name: str = "kernel", shared: int = 0) -> c_void_p:
        """A kernel that may use `shared` bytes of dynamic shared memory."""
        found = c_void_p()
        call("cuModuleGetFunction", byref(found), self._handle, name.encode())
        if shared > 48 << 10:
            call("cuFuncSetAttribute", found, _MAX_SHARED, shared)
        return found


def launch(stream: Stream, function: c_void_p, how: Launch, arguments: Sequence[int]) -> None:
    """Queue a kernel whose parameters are 64 bits each."""
    stream.gpu.activate()
    values = (c_ulonglong * max(len(arguments), 1))(*arguments)
    places = [ctypes.addressof(values) + 8 * i for i in range(len(arguments))]
    pointers = (c_void_p * max(len(arguments), 1))(*places)
    attribute = LaunchAttribute(_PROGRAMMATIC, 0)
    attribute.value[0] = 1
    config = LaunchConfig(
        (c_uint * 3)(how.grid, 1, 1),
        (c_uint * 3)(how.block, 1, 1),
        how.shared,
        stream.handle,
        ctypes.pointer(attribute),
        1 if how.overlaps else 0,
    )
    call("cuLaunchKernelEx", byref(config), function, pointers, None)


def encode_tensor_map(
    address: int, is_bf16: bool, rows: int, columns: int, stride: int, box: int, width: int,
    permuted: bool,
) -> bytes:  # fmt: skip
    """The tensor map of a matrix of 16-bit numbers at an address: tiles are `box` rows of `width`
    numbers, permuted or row by row. `stride` is in bytes."""
    room = (c_ulonglong * 24)()
    place = -(-ctypes.addressof(room) // 64) * 64
    call(
        "cuTensorMapEncodeTiled", c_void_p(place), 9 if is_bf16 else 6, 2, c_void_p(address),
        (c_ulonglong * 2)(columns, rows), (c_ulonglong * 1)(stride), (c_uint * 2)(width, box),
        (c_uint * 2)(1, 1), 0, _SWIZZLE_128 if permuted else 0, _PROMOTE_128, 0,
    )  # fmt: skip
    return ctypes.string_at(place, MAP_BYTES)


def make_cubin(gpu: Gpu, ptx: str) -> bytes:
    """PTX compiled by the driver, to be kept: loading a cubin takes a tenth of a millisecond."""
    gpu.activate()
    text = ptx.encode() + b"\0"
    errors = ctypes.create_string_buffer(_LOG)
    names = (c_int * 2)(5, 6)
    values = (c_void_p * 2)(ctypes.addressof(errors), _LOG)
    state, image, size = c_void_p(), c_void_p(), c_size_t()
    call("cuLinkCreate_v2", 2, names, values, byref(state))
    try:
        driver = library()
        status = driver.cuLinkAddData_v2(
            state, 1, text, c_size_t(len(text)), b"kernel", 0, None, None
        ) or driver.cuLinkComplete(state, byref(image), byref(size))
        if status:
            said = errors.value.decode(errors="replace") or _message(driver, status)
            raise CodegenError("the CUDA driver refuses the PTX", where="cuda", got=said[:2000])
        return ctypes.string_at(image, size.value)
    finally:
        call("cuLinkDestroy", state)
