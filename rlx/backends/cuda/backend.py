"""A GPU as a device: kernels, launched in order on one stream."""

from __future__ import annotations

from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING

from rlx.backends.base import Backend, Parts, PlanInfo
from rlx.backends.cuda.builder import gpu_of_target
from rlx.backends.cuda.decode_loop import ADVANCE
from rlx.backends.cuda.driver import Gpu, version_text
from rlx.backends.cuda.executable import CudaExecutable
from rlx.backends.cuda.kernel import GpuKernel, KernelLoader
from rlx.backends.cuda.memory import CudaAllocator
from rlx.backends.cuda.stored_program import StoredKernel, StoredProgram, write_program
from rlx.errors import UnsupportedError
from rlx.ir.graph import Graph
from rlx.ir.lir import Lir
from rlx.ir.node import Node
from rlx.specialize.compile_profile import CompileProfile
from rlx.specialize.options import CompileOptions
from rlx.support.settings import setting

if TYPE_CHECKING:
    from rlx.backends.cuda.compiler import Compiler
    from rlx.backends.cuda.inspection import CudaInspection


class AbsentGpu(Gpu):
    """The largest GPU of a target: code is made for it, whether or not there is one here."""

    def __init__(self, target: str) -> None:
        self.__dict__["name"] = target
        found = gpu_of_target(target)
        self.__dict__["capability"], self.__dict__["multiprocessors"] = found


class CudaBackend(Backend):
    name = "cuda"
    long_chunk = 4096

    batch_invariant = False

    def __init__(self, gpu: Gpu, kernels: KernelLoader | None = None) -> None:
        self.gpu, self.memory = gpu, CudaAllocator(gpu)
        self.kernels = kernels or KernelLoader(gpu)

    def for_profile(self, profile: CompileProfile) -> Backend:
        made = self.for_target(profile.target)
        return self._invariant if made is self and profile.batch_invariant else made

    @cached_property
    def _invariant(self) -> CudaBackend:
        """The same device, whose programs are batch-invariant."""
        made = copy(self)
        for name in ("compiler", "_invariant"):
            made.__dict__.pop(name, None)
        made.batch_invariant = True
        return made

    @property
    def allocator(self) -> CudaAllocator:
        return self.memory

    @cached_property
    def compiler(self) -> Compiler:
        from rlx.backends.cuda.compiler import Compiler  # artifacts load without it

        cpu, count = self.kernels.target.cpu, self.gpu.multiprocessors
        return Compiler(cpu, count, self.batch_invariant)

    def has_native(self, node: Node) -> bool:
        return self.compiler.has_native(node)

    def runs_on_host(self, node: Node) -> bool:
        return self.compiler.runs_on_host(node)

    def rewrite_template(self, graph: Graph) -> Graph:
        return self.compiler.rewrite_template(graph)

    def rewrite_variant(self, graph: Graph) -> Graph:
        return self.compiler.rewrite_variant(graph)

    def scratch(self, node: Node) -> int:
        return self.compiler.scratch(node)

    def compile(self, lir: Lir, options: CompileOptions) -> CudaExecutable:
        program = self.compiler.program(lir)
        found = [x.kernel for x in program.launches]
        made = self.kernels.functions([k for k in found if k is not None])
        functions = [None if k is None else made[k] for k in found]
        return CudaExecutable(program, functions, PlanInfo.of(lir), self.memory, self.kernels)

    # -- programs on disk -------------------------------------------------------------------------

    def export(self, lir: Lir, options: CompileOptions) -> Parts:
        program = self.compiler.program(lir)
        used = [x.kernel for x in program.launches if x.kernel is not None]
        kernels: list[GpuKernel] = list(dict.fromkeys([*used, ADVANCE]))
        cubins = dict(zip(kernels, self.kernels.cubins(kernels), strict=True))
        return write_program(program, cubins, self.kernels.target.cpu, ADVANCE)

    def restore(self, parts: Parts, info: PlanInfo, options: CompileOptions) -> CudaExecutable:
        program = StoredProgram(parts, self.kernels.target.cpu)
        functions = [
            self.kernels.load(x.kernel, x.kernel.digest, program.cubins[x.kernel.digest])
            if isinstance(x.kernel, StoredKernel)
            else None
            for x in program.launches
        ]
        self.kernels.load(ADVANCE, program.advance, program.cubins[program.advance])
        return CudaExecutable(program, functions, info, self.memory, self.kernels)

    @property
    def target_key(self) -> str:
        form = f"{setting('RLX_PERSISTENT')} of {self.gpu.multiprocessors}"
        form += "; batch-invariant" if self.batch_invariant else ""
        return f"{self.kernels.target.key};{version_text()};persistent {form}"

    @property
    def compile_count(self) -> int:
        return self.kernels.compilations

    def inspection(self) -> CudaInspection:
        from rlx.backends.cuda.inspection import CudaInspection

        return CudaInspection(self)


class CodeBackend(CudaBackend):
    """Makes code for a GPU that need not be here: it is shown, and cannot run."""

    def __init__(self, target: str) -> None:
        self.gpu = AbsentGpu(target)
        self.kernels = KernelLoader(self.gpu)

    @property
    def allocator(self) -> CudaAllocator:
        raise self._shown_only()

    def compile(self, lir: Lir, options: CompileOptions) -> CudaExecutable:
        raise self._shown_only()

    def _shown_only(self) -> UnsupportedError:
        return UnsupportedError(
            "code for this target is shown only", where=self.kernels.target.cpu,
            hint='device="cuda" makes code for the GPU that is here, and runs it',
        )  # fmt: skip
