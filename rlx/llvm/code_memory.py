"""Memory for machine code, as each system has it: mapped, written, then made executable (W^X).

Linux and macOS protect pages with mprotect, Windows with VirtualProtect. Where macOS forbids that
(a hardened process that may have a JIT only), code lies in a region that is a thread's to write or
everybody's to run (MAP_JIT). Also finds the few functions of the system that code may call.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from abc import ABC, abstractmethod
from functools import cache, cached_property
from typing import Any

from rlx.errors import CodegenError

# Functions that generated code may call. LLVM emits calls of the first three for large copies, and
# of __chkstk for large frames on Windows; the others are for thread pools.
ALLOWED = frozenset(
    {"memcpy", "memset", "memmove", "__chkstk", "syscall", "sched_yield", "sched_getcpu", "usleep"}
    | {"os_sync_wait_on_address", "os_sync_wake_by_address_all"}  # macOS
    | {"WaitOnAddress", "WakeByAddressAll", "SwitchToThread", "Sleep"}  # Windows
)

PAGE = mmap.PAGESIZE
"""Parts of different protection never share a page (16 KB on Apple's CPUs)."""


class CodeMemory(ABC):
    """What the loader of objects wants of a system."""

    @abstractmethod
    def map(self, size: int) -> int:
        """The address of new pages to write to."""

    def write(self, base: int, content: bytes) -> None:
        ctypes.memmove(base, content, len(content))

    @abstractmethod
    def seal(self, base: int, text: int, readonly: int, size: int) -> None:
        """Make bytes up to `text` executable and those up to `readonly` constant."""

    @abstractmethod
    def free(self, base: int, size: int) -> None: ...

    @abstractmethod
    def address(self, symbol: str) -> int | None:
        """The address of a function of the system; None where it has none of that name."""


class Posix(CodeMemory):
    """Linux. Its kernel makes the instruction cache see new code when pages become executable."""

    READ, WRITE, EXECUTE = 1, 2, 4
    PRIVATE = 2

    def __init__(self, libc: Any = None) -> None:
        self.libc = libc if libc is not None else ctypes.CDLL(None, use_errno=True)
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self.libc.mmap.restype = pointer
        self.libc.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_long]
        self.libc.munmap.argtypes = [pointer, size]
        self.libc.mprotect.argtypes = [pointer, size, number]

    @cached_property
    def anonymous(self) -> int:
        return self.PRIVATE | int(mmap.MAP_ANONYMOUS)

    def map(self, size: int) -> int:
        return self._map(size, self.READ | self.WRITE, self.anonymous)

    def _map(self, size: int, protection: int, flags: int) -> int:
        base = self.libc.mmap(None, size, protection, flags, -1, 0)
        if base is None or base == ctypes.c_void_p(-1).value:
            raise _no_memory(size)
        return int(base)

    def seal(self, base: int, text: int, readonly: int, size: int) -> None:
        parts = ((base, text, self.READ | self.EXECUTE), (base + text, readonly - text, self.READ))
        for start, length, protection in parts:
            if length and self.libc.mprotect(start, length, protection) != 0:
                raise _refused(f"errno {ctypes.get_errno()}")

    def free(self, base: int, size: int) -> None:
        self.libc.munmap(base, size)

    def address(self, symbol: str) -> int | None:
        found = getattr(self.libc, symbol, None)
        return None if found is None else ctypes.cast(found, ctypes.c_void_p).value


class Mac(Posix):
    """macOS: instruction caches are flushed by hand, and hardened processes need MAP_JIT."""

    MAP_JIT, ANONYMOUS = 0x800, 0x1000

    @cached_property
    def anonymous(self) -> int:
        return self.PRIVATE | self.ANONYMOUS

    @cached_property
    def needs_jit_region(self) -> bool:
        """Whether written pages may not become executable here: tried once, on a page."""
        base = super().map(PAGE)
        refused = self.libc.mprotect(base, PAGE, self.READ | self.EXECUTE) != 0
        self.libc.munmap(base, PAGE)
        return bool(refused)

    def map(self, size: int) -> int:
        if not self.needs_jit_region:
            return super().map(size)
        everything = self.READ | self.WRITE | self.EXECUTE
        return self._map(size, everything, self.anonymous | self.MAP_JIT)

    def write(self, base: int, content: bytes) -> None:
        if not self.needs_jit_region:
            super().write(base, content)
            return
        self.libc.pthread_jit_write_protect_np(0)  # of this thread, for all such regions
        try:
            super().write(base, content)
        finally:
            self.libc.pthread_jit_write_protect_np(1)

    def seal(self, base: int, text: int, readonly: int, size: int) -> None:
        if not self.needs_jit_region:
            super().seal(base, text, readonly, size)
        elif size > readonly:
            raise _refused("code with variables of its own in a process that has a JIT region only")
        flush = self.libc.sys_icache_invalidate
        flush.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        flush(base, text)


class Windows(CodeMemory):
    """Windows 8 and later."""

    COMMIT_AND_RESERVE, RELEASE = 0x3000, 0x8000
    READ_ONLY, READ_WRITE, EXECUTE_READ = 0x02, 0x04, 0x20
    ITSELF = -1  # the handle of this process
    # names that code calls -> the libraries that may have them
    LIBRARIES = {
        **dict.fromkeys(("memcpy", "memset", "memmove"), ("ucrtbase", "msvcrt")),
        "__chkstk": ("ntdll",),
        "SwitchToThread": ("kernel32",),
        "Sleep": ("kernel32",),
        **dict.fromkeys(
            ("WaitOnAddress", "WakeByAddressAll"), ("api-ms-win-core-synch-l1-2-0", "kernelbase")
        ),
    }

    def __init__(self, load: Any = None) -> None:
        self.load: Any = load or vars(ctypes)["WinDLL"]
        kernel = self.kernel = self.load("kernel32")
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32
        kernel.VirtualAlloc.restype = pointer
        kernel.VirtualAlloc.argtypes = [pointer, size, number, number]
        kernel.VirtualProtect.argtypes = [pointer, size, number, pointer]
        kernel.VirtualFree.argtypes = [pointer, size, number]
        kernel.FlushInstructionCache.argtypes = [pointer, pointer, size]

    def map(self, size: int) -> int:
        base = self.kernel.VirtualAlloc(None, size, self.COMMIT_AND_RESERVE, self.READ_WRITE)
        if not base:
            raise _no_memory(size)
        return int(base)

    def seal(self, base: int, text: int, readonly: int, size: int) -> None:
        before = ctypes.c_uint32()
        parts = ((base, text, self.EXECUTE_READ), (base + text, readonly - text, self.READ_ONLY))
        for start, length, protection in parts:
            place = ctypes.addressof(before)
            if length and not self.kernel.VirtualProtect(start, length, protection, place):
                raise _refused("VirtualProtect failed")
        self.kernel.FlushInstructionCache(self.ITSELF, base, text)

    def free(self, base: int, size: int) -> None:
        self.kernel.VirtualFree(base, 0, self.RELEASE)

    def address(self, symbol: str) -> int | None:
        for library in self.LIBRARIES.get(symbol, ()):
            try:
                found = getattr(self.load(library), symbol)
            except (OSError, AttributeError):
                continue
            return ctypes.cast(found, ctypes.c_void_p).value
        return None


def _no_memory(size: int) -> CodegenError:
    return CodegenError("no memory for machine code", where="image", got=f"{size} bytes")


def _refused(why: str) -> CodegenError:
    return CodegenError("the system does not allow executable memory", where="image", got=why)


@cache
def code_memory() -> CodeMemory:
    """Of this system."""
    return {"darwin": Mac, "win32": Windows}.get(sys.platform, Posix)()
