"""Loading machine code: mapped, written, then made executable (never both, W^X)."""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache

from rlx.errors import CodegenError
from rlx.llvm.elf import ObjectFile
from rlx.llvm.target import Target

# External functions that generated code may call. LLVM emits calls of the first three for large
# copies; the others are for thread pools.
ALLOWED = frozenset(
    {"memcpy", "memset", "memmove", "syscall", "sched_yield", "sched_getcpu", "usleep"}
)


class Image:
    """One linked object; its code is mapped while the image lives."""

    def __init__(self, data: bytes, name: str = "object") -> None:
        obj = ObjectFile(data, name)
        if obj.machine.arch != Target.host().arch:
            raise CodegenError(
                "object is for another machine",
                where=name,
                got=obj.machine.arch,
                expected=Target.host().arch,
            )
        for symbol in obj.externals():
            _resolve(symbol, name)
        layout = obj.layout()
        self._size, self._base = layout.size, 0
        self._base = _map(layout.size)
        content, self.symbols = obj.link(self._base, lambda symbol: _resolve(symbol, name))
        ctypes.memmove(self._base, bytes(content), layout.size)
        _protect(self._base, layout.text, mmap.PROT_READ | mmap.PROT_EXEC)
        _protect(self._base + layout.text, layout.readonly - layout.text, mmap.PROT_READ)
        _flush_code(self._base, layout.text)

    def address(self, name: str) -> int:
        """The address of a function."""
        found = self.symbols.get(name)
        if found is None:
            raise CodegenError(
                "no such function", where="image", got=name, expected=sorted(self.symbols)
            )
        return found

    def __del__(self) -> None:
        # While the interpreter ends, a daemon thread may still be inside: leave the pages.
        if getattr(self, "_base", 0) and not sys.is_finalizing():
            _libc().munmap(self._base, self._size)


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    size, pointer, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    libc.mmap.restype = pointer
    libc.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_long]
    libc.munmap.argtypes = [pointer, size]
    libc.mprotect.argtypes = [pointer, size, number]
    return libc


def _map(size: int) -> int:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    base = _libc().mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if base is None or base == ctypes.c_void_p(-1).value:
        raise CodegenError("no memory for machine code", where="image", got=f"{size} bytes")
    return int(base)


def _protect(base: int, size: int, protection: int) -> None:
    if size and _libc().mprotect(base, size, protection) != 0:
        raise CodegenError(
            "the system does not allow executable memory",
            where="image",
            got=f"errno {ctypes.get_errno()}",
        )


def _flush_code(base: int, size: int) -> None:
    """Flush the instruction cache: needed on AArch64 macOS; Linux does it in mprotect."""
    if sys.platform == "darwin":
        flush = _libc().sys_icache_invalidate
        flush.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        flush(base, size)


def _resolve(symbol: str, name: str) -> int:
    if symbol not in ALLOWED:
        raise CodegenError(
            "code calls a function that does not exist",
            where=name,
            got=symbol,
            expected="one of " + ", ".join(sorted(ALLOWED)),
            hint="an operation that this target lacks became a library call; emit it otherwise",
        )
    address = ctypes.cast(getattr(_libc(), symbol), ctypes.c_void_p).value
    return int(address or 0)
