"""What a GPU shows of itself, of its kernels and of the programs made for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from rlx.backends.cuda.driver import count_devices, version_text
from rlx.backends.cuda.kernel import GpuKernel, KernelLoader
from rlx.backends.cuda.lower_program import LoweredProgram
from rlx.backends.cuda.lowering import KernelLaunch
from rlx.backends.inspection import Inspection, LaunchInfo, NativeProgram
from rlx.ir.lir import Lir
from rlx.llvm.jit import Unit
from rlx.specialize.options import CompileOptions

if TYPE_CHECKING:
    from rlx.backends.cuda.backend import CudaBackend


class EmittedKernel(NamedTuple):
    """A kernel of a program, for the GPU that it is made for."""

    kernel: GpuKernel
    loader: KernelLoader

    def emit(self) -> Unit:
        return self.loader.unit(self.kernel)

    def __hash__(self) -> int:
        return hash(self.kernel)


class CudaInspection(Inspection):
    backend: CudaBackend

    @property
    def has_native_code(self) -> bool:
        return True

    def machine(self, threads: int | None = None) -> dict[str, Any]:
        gpu = self.backend.gpu
        free, total = gpu.memory()
        return {
            "gpu": gpu.name,
            "gpus": count_devices(),
            "gpu_target": self.backend.kernels.target.cpu,
            "multiprocessors": gpu.multiprocessors,
            "gpu_memory_bytes": total,
            "free_gpu_memory_bytes": free,
            "gpu_driver": version_text(),
        }

    def program(self, lir: Lir, options: CompileOptions) -> NativeProgram:
        target = self.backend.kernels.target.cpu
        made = LoweredProgram(lir, target, self.backend.gpu.multiprocessors)
        launches = [self._launch(x) for x in made.launches]
        return NativeProgram(lir, launches, lambda: [False] * len(launches), 1, target)

    def _launch(self, x: KernelLaunch) -> LaunchInfo:
        if x.kernel is None:
            how = "in Python" if x.on_host else "a jump of the host"
            return LaunchInfo(x.label, x.node, None, how)
        return LaunchInfo(x.label, x.node, EmittedKernel(x.kernel, self.backend.kernels), "")

    def compile_seconds(self) -> float:
        return self.backend.kernels.seconds
