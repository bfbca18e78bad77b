"""A CUDA driver without a GPU: the functions that the device calls, on host memory.

Addresses are real ones, so kernels compiled for the host can run on them: `HostKernels` emits the
same kernels with the threads of a launch as numbers in a loop. Everything but PTX is as on a GPU.
"""

from __future__ import annotations

import ctypes
import pickle
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_int32, c_void_p
from typing import Any

import numpy as np
import pytest
from simulator import run_kernel

from rlx.backends.cuda import driver
from rlx.backends.cuda.backend import CudaBackend
from rlx.backends.cuda.builder import KernelFunction, KernelModule
from rlx.backends.cuda.kernel import BlockKernel, GpuKernel, KernelLoader
from rlx.llvm.builder import Value, i32, i64, ptr, void
from rlx.llvm.jit import Kernel, Unit, compile_many
from rlx.llvm.target import Target

_THREADS = 7  # of every launch: grid-stride loops make up for the others


class FakeDriver:
    """Functions of libcuda by name; `calls` are those that were made."""

    def __init__(
        self, version: int = 13000, gpus: int = 1, memory: int = 1 << 30, warp: int = 1
    ) -> None:
        self.version, self.gpus, self.total, self.warp = version, gpus, memory, warp
        self.calls: list[str] = []
        self.blocks: dict[int, Any] = {}  # address → bytes
        self.pinned: dict[int, Any] = {}
        self.modules: dict[int, Kernel | bytes] = {}
        self.functions: dict[int, Any] = {}
        self.graphs: dict[int, list[tuple[int, int, int]]] = {}
        self.capturing: dict[int, list[tuple[int, int, int]]] = {}
        self.kernels: dict[int, BlockKernel] = {}  # those that are simulated
        self.events: dict[int, float] = {}
        self._handles = iter(range(1, 1 << 30))
        self._linked: Any = None

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("cu"):
            self.calls.append(name)
        return object.__getattribute__(self, name)

    # -- devices ----------------------------------------------------------------------------------

    def cuInit(self, flags: int) -> int:
        return 0 if self.gpus else 100

    def cuGetErrorString(self, status: int, text: Any) -> int:
        text._obj.value = {2: b"out of memory", 100: b"no CUDA-capable device"}.get(status, b"bad")
        return 0

    def cuDriverGetVersion(self, out: Any) -> int:
        out._obj.value = self.version
        return 0

    def cuDeviceGetCount(self, out: Any) -> int:
        out._obj.value = self.gpus
        return 0

    def cuDeviceGet(self, out: Any, index: int) -> int:
        out._obj.value = index
        return 0

    def cuDeviceGetName(self, text: Any, size: int, handle: Any) -> int:
        text.value = b"Stand-in"
        return 0

    def cuDeviceGetAttribute(self, out: Any, number: int, handle: Any) -> int:
        out._obj.value = {75: 9, 76: 0, 16: 4, 97: 232448}[number]
        return 0

    def cuDevicePrimaryCtxRetain(self, out: Any, handle: Any) -> int:
        out._obj.value = 1
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        return 0

    # -- memory -----------------------------------------------------------------------------------

    @property
    def used(self) -> int:
        return sum(len(b) for b in list(self.blocks.values()))

    def cuMemGetInfo_v2(self, free: Any, total: Any) -> int:
        free._obj.value, total._obj.value = self.total - self.used, self.total
        return 0

    def cuMemAlloc_v2(self, out: Any, size: Any) -> int:
        if self.used + size.value > self.total:
            return 2
        out._obj.value = self._new(self.blocks, size.value, 0x5C)
        return 0

    def cuMemHostAlloc(self, out: Any, size: Any, flags: int) -> int:
        out._obj.value = self._new(self.pinned, size.value, 0x5C)
        return 0

    def _new(self, where: dict[int, Any], size: int, fill: int) -> int:
        block = (ctypes.c_ubyte * (size + 256))()
        start = -ctypes.addressof(block) % 256
        ctypes.memset(ctypes.addressof(block), fill, size + 256)  # whatever was there before
        where[ctypes.addressof(block) + start] = block
        return ctypes.addressof(block) + start

    def cuMemFree_v2(self, address: Any) -> int:
        del self.blocks[address.value]
        return 0

    def cuMemFreeHost(self, address: Any) -> int:
        del self.pinned[address.value]
        return 0

    def _inside(self, address: int, size: int) -> None:
        start = max(a for a in list(self.blocks) if a <= address)  # others free meanwhile
        assert address + size <= start + len(self.blocks[start]), "outside its allocation"

    def _inside_all(self, addresses: Any, size: int) -> None:
        """As `_inside`, for an array, pinned memory included."""
        every = sorted([*self.blocks.items(), *self.pinned.items()])
        starts = np.array([a for a, _ in every])
        ends = np.array([a + len(b) for a, b in every])
        number = np.searchsorted(starts, addresses, side="right") - 1
        assert (number >= 0).all(), "outside all allocations"
        assert (addresses + size <= ends[number]).all(), "outside its allocation"

    def cuMemcpyHtoDAsync_v2(self, to: Any, of: Any, size: Any, stream: Any) -> int:
        self._inside(to.value, size.value)
        ctypes.memmove(to.value, of.value, size.value)
        return 0

    def cuMemcpyDtoHAsync_v2(self, to: Any, of: Any, size: Any, stream: Any) -> int:
        self._inside(of.value, size.value)
        ctypes.memmove(to.value, of.value, size.value)
        return 0

    def cuMemcpyDtoDAsync_v2(self, to: Any, of: Any, size: Any, stream: Any) -> int:
        self._inside(to.value, size.value)
        self._inside(of.value, size.value)
        ctypes.memmove(to.value, of.value, size.value)
        return 0

    def cuMemsetD8Async(self, to: Any, byte: Any, size: Any, stream: Any) -> int:
        self._inside(to.value, size.value)
        ctypes.memset(to.value, byte.value, size.value)
        return 0

    # -- streams, modules, launches and graphs ----------------------------------------------------

    def cuStreamCreate(self, out: Any, flags: int) -> int:
        out._obj.value = next(self._handles)
        return 0

    def cuStreamDestroy_v2(self, stream: Any) -> int:
        return 0

    def cuStreamSynchronize(self, stream: Any) -> int:
        return 0

    def cuEventCreate(self, out: Any, flags: int) -> int:
        out._obj.value = next(self._handles)
        return 0

    def cuEventDestroy_v2(self, event: Any) -> int:
        self.events.pop(event.value, None)
        return 0

    def cuEventRecord(self, event: Any, stream: Any) -> int:
        self.events[event.value] = time.perf_counter()
        return 0

    def cuEventSynchronize(self, event: Any) -> int:
        return 0

    def cuEventElapsedTime(self, out: Any, first: Any, last: Any) -> int:
        out._obj.value = (self.events[last.value] - self.events[first.value]) * 1e3
        return 0

    def cuModuleLoadDataEx(self, out: Any, image: bytes, *options: Any) -> int:
        out._obj.value = next(self._handles)
        is_object = image.startswith(b"\x7fELF")
        self.modules[out._obj.value] = Kernel("stand-in", image) if is_object else image
        return 0

    def cuModuleGetFunction(self, out: Any, module: Any, name: bytes) -> int:
        found = self.modules[module.value]
        out._obj.value = next(self._handles)
        if isinstance(found, Kernel):
            types = (None, c_void_p, c_int32, c_int32, c_void_p)
            self.functions[out._obj.value] = found.function(name.decode(), *types)
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, params: Any, extra: Any) -> int:
        how = config._obj
        assert 0 < how.grid[0] < 1 << 31
        known = self.kernels.get(function.value)
        assert how.block[0] == (known.threads if known else 256)
        assert known is None or how.shared == known.shared
        args = ctypes.cast(params[0], ctypes.POINTER(ctypes.c_ulonglong))[0]
        self._inside(args, 0)
        recorded = self.capturing.get(how.stream or 0)
        if recorded is not None:
            recorded.append((function.value, args, how.grid[0]))
        else:
            self._run(function.value, args, how.grid[0])
        return 0

    def _run(self, function: int, args: int, blocks: int) -> None:
        """Warp by warp; the threads of a warp run side by side, with memory to exchange values.
        Kernels of blocks are simulated."""
        if function in self.kernels:
            run_kernel(self.kernels[function], blocks, args, self._inside_all)
            return
        for first in range(0, _THREADS * self.warp, self.warp):
            shared = (ctypes.c_longlong * (2 + self.warp))()
            given = (_THREADS * self.warp, ctypes.addressof(shared))
            call = self.functions[function]
            others = [
                threading.Thread(target=call, args=(args, first + lane, *given))
                for lane in range(1, self.warp)
            ]
            for thread in others:
                thread.start()
            call(args, first, *given)
            for thread in others:
                thread.join()

    def cuStreamBeginCapture_v2(self, stream: Any, mode: int) -> int:
        self.capturing[stream.value] = []
        return 0

    def cuStreamEndCapture(self, stream: Any, out: Any) -> int:
        out._obj.value = next(self._handles)
        self.graphs[out._obj.value] = self.capturing.pop(stream.value)
        return 0

    def cuGraphInstantiateWithFlags(self, out: Any, graph: Any, flags: Any) -> int:
        out._obj.value = next(self._handles)
        self.graphs[out._obj.value] = self.graphs[graph.value]
        return 0

    def cuGraphDestroy(self, graph: Any) -> int:
        del self.graphs[graph.value]
        return 0

    def cuGraphExecDestroy(self, graph: Any) -> int:
        del self.graphs[graph.value]
        return 0

    def cuGraphLaunch(self, graph: Any, stream: Any) -> int:
        for function, args, blocks in self.graphs[graph.value]:
            self._run(function, args, blocks)
        return 0

    def cuTensorMapEncodeTiled(
        self, out: Any, kind: int, rank: int, address: Any, dims: Any, strides: Any, box: Any,
        steps: Any, *modes: int,
    ) -> int:  # fmt: skip
        """The numbers as they are, which the simulator reads."""
        columns, rows = list(dims)
        fine = out.value % 64 == 0 and address.value % 16 == 0 and strides[0] % 16 == 0
        fine = fine and box[0] % 8 == 0 and (modes[1] == 0 or box[0] == 64)  # mode, permutation
        if not fine or rank != 2 or min(rows, columns) < 1 or box[1] > 256:
            return 1
        numbers = (address.value, rows, columns, strides[0], box[1], box[0], modes[1] != 0)
        whole = (ctypes.c_longlong * 16)(*numbers)
        ctypes.memmove(out.value, whole, 128)
        return 0

    def cuLinkCreate_v2(self, count: int, names: Any, values: Any, out: Any) -> int:
        out._obj.value = next(self._handles)
        return 0

    def cuLinkAddData_v2(self, state: Any, kind: int, data: bytes, *rest: Any) -> int:
        self._linked = ctypes.create_string_buffer(b"CUBIN of " + data)
        return 0 if data.startswith((b"\n//", b"//")) else 218

    def cuLinkComplete(self, state: Any, image: Any, size: Any) -> int:
        image._obj.value = ctypes.addressof(self._linked)
        size._obj.value = len(self._linked)
        return 0

    def cuLinkDestroy(self, state: Any) -> int:
        return 0


class HostFunction(KernelFunction):
    """Threads are numbered by a parameter; those of a warp exchange values through memory."""

    def thread_index(self) -> Value:
        return self["tid"].to(i64)

    def thread_count(self) -> Value:
        return self["nth"].to(i64)

    @property
    def warp(self) -> int:
        assert isinstance(self.module, HostModule)
        return self.module.warp

    def lane(self) -> Value:
        return self.thread_index() & self.warp - 1

    def exchange(self, value: Value, distance: int) -> Value:
        whole = value.bits().to(i64, signed=False)
        places = self.gep(self["shared"], 16)
        self.atomic_store(whole, self.gep(places, self.lane(), 8))
        self._wait_for_all()
        other = self.atomic_load(self.gep(places, self.lane() ^ distance, 8), i64)
        self._wait_for_all()
        return other.to(value.type.as_int).bits(value.type)

    def _wait_for_all(self) -> None:
        counter = self["shared"]
        before = self.atomic_rmw("add", counter, self.i64(1))
        wanted = (before.udiv(self.warp) + 1) * self.warp

        def count(*_: Value) -> list[Value]:
            return [self.atomic_load(counter, i64)]

        self.while_(count(), lambda found: found < wanted, count)


class HostModule(KernelModule):
    function_class = HostFunction
    warp = 1

    def begin_kernel(self) -> HostFunction:
        params = [("args", ptr), ("tid", i32), ("nth", i32), ("shared", ptr)]
        made = self.function("kernel", params, void)
        assert isinstance(made, HostFunction)
        return made


class HostKernels(KernelLoader):
    """The same kernels as machine code of the host."""

    warp = 1

    def new_module(self) -> HostModule:
        made = HostModule(Target.host())
        made.warp = self.warp
        return made

    def images(self, units: Sequence[Unit]) -> list[bytes]:
        return [kernel.object for kernel in compile_many(units)]

    def cubins(self, kernels: Sequence[GpuKernel]) -> list[bytes]:
        """Kernels of blocks are pickled, to be simulated where they are loaded."""
        rest = [k for k in kernels if not k.by_blocks]
        objects = dict(zip(rest, super().cubins(rest), strict=True))
        return [b"SIM" + pickle.dumps(k) if k.by_blocks else objects[k] for k in kernels]

    def load(self, kernel: GpuKernel, digest: str, image: bytes) -> c_void_p:
        if not image.startswith(b"SIM"):
            return super().load(kernel, digest, image)
        found: BlockKernel = pickle.loads(image[3:])
        return self.functions([found])[found]

    def functions(self, kernels: Iterable[GpuKernel]) -> dict[GpuKernel, c_void_p]:
        """Kernels of blocks are not compiled but simulated."""
        wanted = list(dict.fromkeys(kernels))
        fake, made = driver.library(), dict[GpuKernel, c_void_p]()
        for kernel in wanted:
            if isinstance(kernel, BlockKernel):
                handle = next(fake._handles)
                fake.kernels[handle] = kernel
                made[kernel] = c_void_p(handle)
        return made | super().functions([k for k in wanted if not isinstance(k, BlockKernel)])


@contextmanager
def installed(fake: FakeDriver) -> Iterator[FakeDriver]:
    """The fake in the place of libcuda."""
    with pytest.MonkeyPatch.context() as patch:
        driver.library.cache_clear()
        patch.setattr(driver, "_load", lambda: fake)
        try:
            yield fake
        finally:
            driver.library.cache_clear()


def make_stand_in() -> CudaBackend:
    """The device on the host; a fake must be installed for as long as it is used."""
    gpu = driver.Gpu()
    kernels = HostKernels(gpu)
    kernels.warp = driver.library().warp
    return CudaBackend(gpu, kernels)
