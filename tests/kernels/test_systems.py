"""macOS and Windows, as far as their rules can be checked on Linux: calls that the loader makes of
faked systems, and the conventions of emitted code."""

from __future__ import annotations

import ctypes
import re
from types import SimpleNamespace
from typing import Any

import pytest

from rlx.backends.cpu import thread_pool
from rlx.backends.cpu.executor.emit import executor_unit
from rlx.backends.cpu.kernels.gemm.epilogue import Epilogue
from rlx.backends.cpu.kernels.gemm.gemm import Gemm
from rlx.backends.cpu.kernels.spec import unit_of
from rlx.errors import CodegenError
from rlx.ir.dtype import DType
from rlx.llvm import code_memory, elf
from rlx.llvm.builder import Module, i32
from rlx.llvm.code_memory import ALLOWED, Mac, Posix, Windows
from rlx.llvm.elf import Image, ObjectFile
from rlx.llvm.jit import Unit
from rlx.llvm.target import Target


class Call:
    """A function of a faked library: it notes its arguments, and answers as told."""

    def __init__(self, log: list[Any], name: str, answer: Any) -> None:
        self.log, self.name, self.answer = log, name, answer

    def __call__(self, *args: Any) -> Any:
        self.log.append((self.name, *args))
        return self.answer(*args) if callable(self.answer) else self.answer


def library(log: list[Any], **functions: Any) -> SimpleNamespace:
    return SimpleNamespace(**{n: Call(log, n, answer) for n, answer in functions.items()})


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`system("win32")`: everything takes this for that system."""

    def pretend(name: str) -> None:
        for module in ("rlx.llvm.target", "rlx.llvm.code_memory", "rlx.backends.cpu.thread_pool"):
            monkeypatch.setattr(f"{module}.sys", SimpleNamespace(platform=name))

    return pretend


# -- page protection ----------------------------------------------------------------------------


def mac(log: list[Any], protects: bool) -> Mac:
    memory = ctypes.create_string_buffer(3 * code_memory.PAGE)
    libc = library(
        log,
        mmap=ctypes.addressof(memory),
        munmap=0,
        mprotect=0 if protects else -1,
        pthread_jit_write_protect_np=None,
        sys_icache_invalidate=None,
    )
    made = Mac(libc)
    made.kept = memory  # type: ignore[attr-defined]
    return made


def test_macos_makes_written_pages_executable_and_flushes_them() -> None:
    log: list[Any] = []
    memory = mac(log, protects=True)
    base = memory.map(96)
    memory.write(base, b"code")
    memory.seal(base, 32, 64, 96)
    assert ctypes.string_at(base, 4) == b"code"
    read_write, private_anonymous = 3, 0x1002  # as macOS numbers them
    assert log[-4:] == [
        ("mmap", None, 96, read_write, private_anonymous, -1, 0),
        ("mprotect", base, 32, 5),
        ("mprotect", base + 32, 32, 1),
        ("sys_icache_invalidate", base, 32),
    ]


def test_a_hardened_process_of_macos_gets_a_jit_region() -> None:
    log: list[Any] = []
    memory = mac(log, protects=False)
    base = memory.map(64)
    memory.write(base, b"code")
    memory.seal(base, 32, 64, 64)
    probe = log[:3]
    assert [name for name, *_ in probe] == ["mmap", "mprotect", "munmap"], "tried on one page"
    assert log[3:] == [
        ("mmap", None, 64, 7, 0x1802, -1, 0),  # MAP_JIT; all protections at once
        ("pthread_jit_write_protect_np", 0),
        ("pthread_jit_write_protect_np", 1),
        ("sys_icache_invalidate", base, 32),
    ]
    with pytest.raises(CodegenError, match=r"does not allow executable memory.*variables"):
        memory.seal(base, 32, 64, 96)


def test_windows_protects_by_its_own_functions() -> None:
    log: list[Any] = []
    room = ctypes.create_string_buffer(96)
    base = ctypes.addressof(room)
    libc = ctypes.CDLL(None)
    kernel = library(
        log, VirtualAlloc=base, VirtualProtect=1, VirtualFree=1, FlushInstructionCache=1
    )
    libraries = {"kernel32": kernel, "msvcrt": libc}

    def load(name: str) -> Any:
        if name not in libraries:
            raise OSError(name)
        return libraries[name]

    memory = Windows(load)
    assert memory.map(96) == base
    memory.write(base, b"code")
    memory.seal(base, 32, 64, 96)
    memory.free(base, 96)
    places = [call[-1] for call in log if call[0] == "VirtualProtect"]
    assert log == [
        ("VirtualAlloc", None, 96, 0x3000, 0x04),  # MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE
        ("VirtualProtect", base, 32, 0x20, places[0]),  # PAGE_EXECUTE_READ
        ("VirtualProtect", base + 32, 32, 0x02, places[1]),  # PAGE_READONLY
        ("FlushInstructionCache", -1, base, 32),
        ("VirtualFree", base, 0, 0x8000),  # MEM_RELEASE, of the whole
    ]
    there = ctypes.cast(libc.memcpy, ctypes.c_void_p).value
    assert memory.address("memcpy") == there, "the second library that may have it"
    assert memory.address("WaitOnAddress") is None and memory.address("usleep") is None
    kernel.VirtualAlloc.answer = None
    with pytest.raises(CodegenError, match="no memory"):
        memory.map(96)
    kernel.VirtualProtect.answer = 0
    with pytest.raises(CodegenError, match="does not allow executable memory"):
        memory.seal(base, 32, 64, 96)


def test_each_system_has_its_memory(system: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_memory, "Windows", lambda: "windows")
    monkeypatch.setattr(code_memory, "Mac", lambda: "mac")
    choose = code_memory.code_memory.__wrapped__
    for name, found in (("darwin", "mac"), ("win32", "windows")):
        system(name)
        assert choose() == found
    system("linux")
    assert type(choose()) is Posix


def test_an_image_goes_through_the_memory_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole path with macOS's class on Linux's functions: what it makes runs."""
    libc = ctypes.CDLL(None, use_errno=True)
    flushed: list[Any] = []
    libc.sys_icache_invalidate = Call(flushed, "flush", None)
    memory = Mac(libc)
    memory.anonymous = 0x22  # Linux's number
    monkeypatch.setattr(elf, "code_memory", lambda: memory)
    m = Module()
    f = m.function("seven", [], i32)
    f.ret(f.i32(7))
    image = Image(Unit(m.text(), m.target).compile())
    assert ctypes.CFUNCTYPE(ctypes.c_int32)(image.address("seven"))() == 7
    assert len(flushed) == 1


# -- conventions --------------------------------------------------------------------------------


def windows(name: str, system: Any) -> Target:
    system("win32")
    target = Target.named(name)
    assert target.is_windows and target.triple.endswith("-pc-windows-msvc-elf")
    return target


def body_of(assembly: str, function: str) -> list[str]:
    lines = [line.strip() for line in assembly.splitlines()]
    start = lines.index(f"{function}:")
    return [x for x in lines[start : lines.index(".cfi_endproc", start)] if x]


BIG_FRAME = """
define void @kernel(ptr %args, i32 %tid, i32 %nth) {
  %room = alloca [20000 x i8], align 64
  %x = load <8 x float>, ptr %args, align 4
  call void asm sideeffect "", "~{CLOBBERED}"()
  store <8 x float> %x, ptr %room
  %p = getelementptr i8, ptr %room, i32 %tid
  store i32 %nth, ptr %p
  %again = load volatile i32, ptr %p
  ret void
}
"""


def test_code_for_windows_follows_its_conventions(system: Any) -> None:
    target = windows("x86-64-v3", system)
    text = BIG_FRAME.replace("CLOBBERED", "xmm6")
    body = "\n".join(body_of(Unit(text, target).assembly(), "kernel"))
    assert re.search(r"\(%rcx\), %[xy]mm0", body), "the first argument is in rcx"
    assert "%edx" in body and "%r8d" in body and "%rdi" not in body
    assert re.search(r"vmovaps\s+%xmm6, ", body), "xmm6 is the caller's"
    assert re.search(r"movl\s+\$2\d{4}, %eax\s+callq\s+__chkstk\s+subq\s+%rax, %rsp", body)
    obj = ObjectFile(Unit(text, target).compile())
    assert obj.externals() == ["__chkstk"] and set(obj.externals()) <= ALLOWED
    system("linux")
    here = "\n".join(body_of(Unit(text, Target.named("x86-64-v3")).assembly(), "kernel"))
    assert "(%rdi)" in here and "__chkstk" not in here and "vmovaps\t%xmm6" not in here


def test_windows_on_arm(system: Any) -> None:
    target = windows("neoverse-n1", system)
    text = BIG_FRAME.replace("CLOBBERED", "v8")
    body = "\n".join(body_of(Unit(text, target).assembly(), "kernel"))
    assert re.search(r"bl\s+__chkstk\s+sub\s+sp, sp, x15, lsl #4", body)
    assert "x18" not in body


@pytest.mark.parametrize("name", ["x86-64-v3", "neoverse-n1"])
def test_kernels_for_windows_call_nothing_unknown(name: str, system: Any) -> None:
    target = windows(name, system)
    spec = Gemm(DType.of("f32"), DType.of("f32"), Epilogue(DType.of("f32")))
    obj = ObjectFile(unit_of(spec, target).compile())
    assert set(obj.externals()) <= {"__chkstk", "memcpy", "memset", "memmove"}
    image, symbols = obj.link(0x1_0000_0000, lambda symbol: 0x7000_0000_0000)
    assert "kernel" in symbols and len(image) % code_memory.PAGE == 0


def test_code_for_macos_leaves_x18_alone(system: Any) -> None:
    system("darwin")
    for name in ("aarch64", "neoverse-v2", "apple-m1"):
        target = Target.named(name)
        assert target.has("reserve-x18") and target.system == "darwin"
        spec = Gemm(DType.of("f32"), DType.of("f32"), Epilogue(DType.of("f32")))
        assert not re.search(r"\b[xw]18\b", unit_of(spec, target).assembly())
    system("linux")
    assert not target.runs_on(Target.named("apple-m1")), "its system calls are others"


# -- thread wake-up -----------------------------------------------------------------------------

SLEEPS = {
    "linux": {"syscall", "sched_yield", "sched_getcpu"},
    "darwin": {"os_sync_wait_on_address", "os_sync_wake_by_address_all", "sched_yield"},
    "win32": {"WaitOnAddress", "WakeByAddressAll", "SwitchToThread"},
}


@pytest.mark.parametrize("name", SLEEPS)
@pytest.mark.parametrize("cpu", ["x86-64-v3", "apple-m1"])
def test_workers_sleep_in_their_system(name: str, cpu: str, system: Any) -> None:
    system(name)
    target = Target.named(cpu)
    assert set(ObjectFile(executor_unit(target, True).compile()).externals()) == SLEEPS[name]
    polls = set(ObjectFile(executor_unit(target, False).compile()).externals())
    naps = {"SwitchToThread", "Sleep"} if name == "win32" else {"sched_yield", "usleep"}
    assert polls == naps


def test_arguments_of_the_calls_that_sleep(system: Any) -> None:
    """As the headers declare them: (address, value u64, size, flags), (address, size, flags) of
    macOS; (address, address of the value, size, milliseconds), (address) of Windows."""
    system("darwin")
    text = executor_unit(Target.named("apple-m1"), True).text
    call = re.search(r"call i32 @os_sync_wait_on_address\((.*)\)", text)
    assert call and re.fullmatch(r"ptr \S+, i64 \S+, i64 4, i32 0", call[1])
    assert re.search(r"call i32 @os_sync_wake_by_address_all\(ptr \S+, i64 4, i32 0\)", text)
    system("win32")
    text = executor_unit(Target.named("x86-64-v3"), True).text
    call = re.search(r"call i32 @WaitOnAddress\((.*)\)", text)
    assert call and re.fullmatch(r"ptr \S+, ptr (\S+), i64 4, i32 -1", call[1])
    seen = re.fullmatch(r"ptr \S+, ptr (\S+), i64 4, i32 -1", call[1])
    assert seen and re.search(rf"store i32 \S+, ptr {re.escape(seen[1])}, align 4", text)
    assert re.search(r"call void @WakeByAddressAll\(ptr \S+\)", text)


def test_a_pool_sleeps_natively_where_the_system_can(
    system: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert thread_pool.uses_futex(Target.host())
    linux = Target.named("apple-m1")
    old, new = (SimpleNamespace(address=lambda symbol, a=a: a) for a in (None, 4096))
    system("darwin")
    for memory, sleeps in ((old, False), (new, True)):  # before macOS 14.4, and from then on
        monkeypatch.setattr(thread_pool, "code_memory", lambda memory=memory: memory)
        assert thread_pool.uses_futex(Target.named("apple-m1")) == sleeps
    assert not thread_pool.uses_futex(linux), "an executor that came from Linux"
    system("win32")
    assert thread_pool.uses_futex(Target.named("x86-64-v3"))
