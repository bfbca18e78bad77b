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
WARP = 32  # threads that run together and can exchange values
PTX = "+ptx86"  # the PTX version that every driver from CUDA 12.7 on reads
# targets of that version; what ends in `a` uses instructions that only this GPU has
_TARGETS = {
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 7): "sm_87",
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
}
_OLDEST = min(_TARGETS)
_TRIPLE = "nvptx64-nvidia-cuda"


def target_for(capability: tuple[int, int]) -> Target:
    """The target of a GPU: (9, 0) is sm_90a. Unknown ones run the PTX of the newest before them."""
    major, minor = capability
    if capability < _OLDEST:
        raise UnsupportedError(
            "the GPU is too old", where="cuda", got=f"compute capability {major}.{minor}",
            expected=f"{_OLDEST[0]}.{_OLDEST[1]} (Ampere) or newer",
        )  # fmt: skip
    known = max(c for c in _TARGETS if c <= capability)
    name = _TARGETS[known] if known == capability else f"sm_{known[0]}{known[1]}"
    return Target(_TRIPLE, name, (PTX,), "nvptx64")


class KernelFunction(Function):
    """A kernel that many threads run; a machine says how they are numbered."""

    def thread_index(self) -> Value:
        """The number of this thread among all of the launch, as an i64."""
        raise NotImplementedError

    def thread_count(self) -> Value:
        """How many threads the launch has, as an i64."""
        raise NotImplementedError

    def elements(self, total: Value | int, team: int = 1) -> Iterator[Value]:
        """A grid-stride loop: `for i in f.elements(n)` gives each i below n to one thread, or to
        one team of neighbouring threads."""
        first, count = self.thread_index(), self.thread_count()
        if team > 1:
            first, count = first.udiv(team), count.udiv(team)
        yield from self.range(first, self.const(total, i64), count)

    @property
    def warp(self) -> int:
        """How many neighbouring threads can exchange values."""
        return 1

    def lane(self) -> Value:
        """The number of this thread in its warp, as an i64."""
        return self.i64(0)

    def exchange(self, value: Value, distance: int) -> Value:
        """The value of the thread whose lane differs in the bit `distance`; all threads of the
        warp must take part."""
        raise NotImplementedError


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

    @property
    def warp(self) -> int:
        return WARP

    def lane(self) -> Value:
        return self.intrinsic("llvm.nvvm.read.ptx.sreg.laneid", i32).to(i64, signed=False)

    def exchange(self, value: Value, distance: int) -> Value:
        if value.type.bits < 32:
            wide = self.exchange(value.bits().to(i32, signed=False), distance)
            return wide.to(value.type.as_int).bits(value.type)
        if value.type.bits == 64:
            whole = value.bits()
            low, high = (
                self.exchange(part.to(i32), distance).to(i64, signed=False)
                for part in (whole, whole >> 32)
            )
            return (low | (high << 32)).bits(value.type)
        mask, width = self.i32(-1), self.i32(WARP - 1)
        there = self.intrinsic(
            "llvm.nvvm.shfl.sync.bfly.i32", i32, mask, value.bits(), self.i32(distance), width
        )
        return there.bits(value.type)

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
