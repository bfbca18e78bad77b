"""A GPU kernel by its constants: equal ones are one function, compiled and loaded once.

From IR to a function on the GPU: LLVM writes PTX, the driver makes a cubin of it, which is kept
on disk. A start that finds all cubins there runs no compiler.
"""

from __future__ import annotations

import hashlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_void_p

from rlx.backends.cuda.builder import THREADS, KernelModule, target_for
from rlx.backends.cuda.driver import CudaModule, Gpu, driver_version, make_cubin
from rlx.backends.cuda.ptx import GpuModule
from rlx.llvm.disk_cache import DiskCache
from rlx.llvm.jit import Unit
from rlx.support.progress import COMPILING, current
from rlx.support.settings import debug

_COMPILERS = 8  # threads in which the driver compiles


class GpuKernel(ABC):
    """Base of kernels: frozen dataclasses of what is constant in the code."""

    @abstractmethod
    def emit(self, m: KernelModule) -> None:
        """Define the kernel in the module, for any number of threads."""

    @property
    def by_blocks(self) -> bool:
        """Whether its launches say how many blocks they have."""
        return False

    @property
    def starts_early(self) -> bool:
        """Whether it may start before the kernel in front has ended although it is the first one of
        a program: it reads no args that differ from run to run before it waits."""
        return False

    @property
    def label(self) -> str:
        """What profiles and dumps call it."""
        return type(self).__name__.lower()

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return THREADS

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block."""
        return 0


class BlockKernel(GpuKernel):
    """Base of kernels whose blocks have a fixed number of threads, which work together."""

    @property
    def by_blocks(self) -> bool:
        return True


class KernelLoader:
    """Makes the kernels of one GPU and loads them; safe to call from several threads."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.target = gpu, target_for(gpu.capability)
        self.compilations, self.seconds = 0, 0.0
        self._functions: dict[GpuKernel, c_void_p] = {}
        self._units: dict[GpuKernel, Unit] = {}
        self._modules: dict[str, CudaModule] = {}
        self._lock = threading.RLock()

    def functions(self, kernels: Iterable[GpuKernel]) -> dict[GpuKernel, c_void_p]:
        """The kernels on the GPU; they stay loaded."""
        with self._lock:
            wanted = list(dict.fromkeys(kernels))
            units = {self.unit(k).key: self.unit(k) for k in wanted if k not in self._functions}
            missing = [unit for key, unit in units.items() if key not in self._modules]
            for unit, image in zip(missing, self.images(missing), strict=True):
                self._modules[unit.key] = CudaModule(self.gpu, image)
            for kernel in wanted:
                if kernel not in self._functions:
                    found = self._modules[self.unit(kernel).key].function(shared=kernel.shared)
                    self._functions[kernel] = found
            return {k: self._functions[k] for k in wanted}

    def load(self, kernel: GpuKernel, digest: str, image: bytes) -> c_void_p:
        """A stored kernel on the GPU, from machine code with this digest."""
        with self._lock:
            if kernel not in self._functions:
                if digest not in self._modules:
                    self._modules[digest] = CudaModule(self.gpu, image)
                found = self._modules[digest].function(shared=kernel.shared)
                self._functions[kernel] = found
            return self._functions[kernel]

    def cubins(self, kernels: Sequence[GpuKernel]) -> list[bytes]:
        """The machine code of kernels, to be stored."""
        with self._lock:
            units = {unit.key: unit for unit in map(self.unit, kernels)}
            found = dict(zip(units, self.images([*units.values()]), strict=True))
            return [found[self.unit(kernel).key] for kernel in kernels]

    def unit(self, kernel: GpuKernel) -> Unit:
        """The kernel as LLVM IR."""
        found = self._units.get(kernel)
        if found is None:
            module = self.new_module()
            kernel.emit(module)
            found = self._units[kernel] = Unit(module.text(), module.target)
            debug(5, f"; {kernel}\n{found.text}")
        return found

    def new_module(self) -> KernelModule:
        return GpuModule(self.target)

    def images(self, units: Sequence[Unit]) -> list[bytes]:
        """The cubins of units, from disk where they are there."""
        disk = DiskCache.open()
        keys = [cubin_key(unit) for unit in units]
        found = {key: disk.load(key) if disk else None for key in keys}
        missing = [(k, u) for k, u in zip(keys, units, strict=True) if found[k] is None]
        if missing:
            start = time.perf_counter()
            for (key, _), made in zip(missing, self._compiled(missing), strict=True):
                found[key] = made
                if disk:
                    disk.store(key, made)
            self.seconds += time.perf_counter() - start
            self.compilations += len(missing)
            debug(1, f"{len(units)} distinct kernels, {len(missing)} compiled now")
        return [image for key in keys if (image := found[key]) is not None]

    def _compiled(self, missing: Sequence[tuple[str, Unit]]) -> list[bytes]:
        """LLVM writes the PTX of one kernel while the driver compiles those before it."""
        with ThreadPoolExecutor(_COMPILERS) as pool:
            reporter = current()
            reporter.expect(COMPILING, len(missing))
            waiting = [pool.submit(make_cubin, self.gpu, u.assembly()) for _, u in missing]
            for made in waiting:
                made.add_done_callback(lambda _: reporter.advance(COMPILING))
            return [made.result() for made in waiting]


def cubin_key(unit: Unit) -> str:
    """The IR, the target and LLVM are in the unit's key; the driver's compiler counts too."""
    return hashlib.sha256(f"cubin {driver_version()} {unit.key}".encode()).hexdigest()
