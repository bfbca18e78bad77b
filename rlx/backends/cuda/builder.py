"""GPU code through the LLVM builder: what a kernel of many threads has beside a CPU function.

A kernel has one parameter, the address of its args in device memory, so a new size is a small
copy and no new launch. Its threads share the elements by a grid-stride loop: any number of
threads gives the same result.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlx.errors import UnsupportedError
from rlx.llvm.builder import Function, Module, Type, Value, i32, i64, ptr, void
from rlx.llvm.target import Target

THREADS = 256  # of a block
PTX = "+ptx86"  # the PTX version that every driver from CUDA 12.7 on reads
_OLDEST = (8, 0)
_SPECIFIC = ((9, 0), (10, 0), (12, 0))  # capabilities with instructions of their own: sm_90a
_TRIPLE = "nvptx64-nvidia-cuda"


def target_for(capability: tuple[int, int]) -> Target:
    """The target of a GPU; (9, 0) is sm_90a."""
    major, minor = capability
    if capability < _OLDEST:
        raise UnsupportedError(
            "the GPU is too old", where="cuda", got=f"compute capability {major}.{minor}",
            expected=f"{_OLDEST[0]}.{_OLDEST[1]} (Ampere) or newer",
        )  # fmt: skip
    own = "a" if capability in _SPECIFIC else ""
    return Target(_TRIPLE, f"sm_{major}{minor}{own}", (PTX,), "nvptx64")


class KernelFunction(Function):
    """A kernel that many threads run; a machine says how they are numbered."""

    def thread_index(self) -> Value:
        """The number of this thread among all of the launch, as an i64."""
        raise NotImplementedError

    def thread_count(self) -> Value:
        """How many threads the launch has, as an i64."""
        raise NotImplementedError

    def elements(self, total: Value | int) -> Iterator[Value]:
        """A grid-stride loop: `for i in f.elements(n)` gives each i below n to one thread."""
        yield from self.range(self.thread_index(), self.const(total, i64), self.thread_count())


class GpuFunction(KernelFunction):
    """A function of NVPTX."""

    def thread_index(self) -> Value:
        block, size, thread = (self._register(n) for n in ("ctaid", "ntid", "tid"))
        return block * size + thread

    def thread_count(self) -> Value:
        return self._register("nctaid") * self._register("ntid")

    def _register(self, name: str) -> Value:
        found = self.intrinsic(f"llvm.nvvm.read.ptx.sreg.{name}.x", i32)
        return found.to(i64, signed=False)

    def arg(self, args: Value, index: int, type_: Type = ptr) -> Value:
        """Arg `index` of the kernel. Pointers are marked as global: LLVM cannot know that of an
        address that comes from memory."""
        found = super().arg(args, index, type_)
        if type_ is not ptr:
            return found
        there = self.instr(f"addrspacecast ptr {found.name} to ptr addrspace(1)", ptr)
        return self.instr(f"addrspacecast ptr addrspace(1) {there.name} to ptr", ptr)

    def text(self) -> str:
        head, body = super().text().split(" nounwind {\n", 1)
        if self.internal:
            return f"{head} nounwind {{\n{body}"
        head = head.replace("define ", "define ptx_kernel ", 1)
        return f'{head} nounwind "nvvm.maxntid"="{THREADS}" {{\n{body}'


class KernelModule(Module):
    """A module whose kernel is run by many threads."""

    def begin_kernel(self) -> KernelFunction:
        """Begin the kernel; `f["args"]` is the address of its args."""
        raise NotImplementedError


class GpuModule(KernelModule):
    function_class = GpuFunction

    def begin_kernel(self) -> KernelFunction:
        made = self.function("kernel", [("args", ptr)], void)
        assert isinstance(made, KernelFunction)
        return made
