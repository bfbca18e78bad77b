"""A GPU kernel by its constants: equal ones are one function, compiled and loaded once.

From IR to a function on the GPU: LLVM writes PTX, the driver makes a cubin of it, which is kept
on disk. A start that finds all cubins there runs no compiler.
"""

from __future__ import annotations

import hashlib
import threading
import time
from abc import ABC, abstractmethod
from ctypes import c_void_p

from rlx.backends.cuda.builder import GpuModule, KernelModule, target_for
from rlx.backends.cuda.driver import CudaModule, Gpu, driver_version, make_cubin
from rlx.llvm.disk_cache import DiskCache
from rlx.llvm.jit import Unit
from rlx.support.settings import debug


class GpuKernel(ABC):
    """Base of kernels: frozen dataclasses of what is constant in the code."""

    @abstractmethod
    def emit(self, m: KernelModule) -> None:
        """Define the kernel in the module, for any number of threads."""

    @property
    def label(self) -> str:
        """What profiles and dumps call it."""
        return type(self).__name__.lower()


class KernelLoader:
    """Makes the kernels of one GPU and loads them; safe to call from several threads."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.target = gpu, target_for(gpu.capability)
        self.compilations, self.seconds = 0, 0.0
        self._functions: dict[GpuKernel, c_void_p] = {}
        self._units: dict[GpuKernel, Unit] = {}
        self._modules: dict[str, CudaModule] = {}
        self._lock = threading.RLock()

    def function(self, kernel: GpuKernel) -> c_void_p:
        """The kernel on the GPU; it stays loaded."""
        with self._lock:
            found = self._functions.get(kernel)
            if found is None:
                unit = self.unit(kernel)
                if unit.key not in self._modules:
                    self._modules[unit.key] = CudaModule(self.gpu, self.image(unit))
                found = self._functions[kernel] = self._modules[unit.key].function()
            return found

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

    def image(self, unit: Unit) -> bytes:
        """The cubin of a unit, from disk if it is there."""
        key = hashlib.sha256(f"cubin {driver_version()} {unit.key}".encode()).hexdigest()
        disk = DiskCache.open()
        found = disk.load(key) if disk else None
        if found is None:
            start = time.perf_counter()
            found = make_cubin(self.gpu, unit.assembly())
            self.seconds += time.perf_counter() - start
            self.compilations += 1
            if disk:
                disk.store(key, found)
        return found
