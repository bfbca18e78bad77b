"""Facts about the machine: processor and memory, within the limits of a container."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from pathlib import Path

_UNLIMITED = 1 << 62


def cpu_name() -> str:
    """What the maker calls the processor."""
    if sys.platform == "linux":
        for line in _text(Path("/proc/cpuinfo")).splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model"):
                return value.strip()
    return platform.processor() or platform.machine()


def total_memory() -> int:
    """Bytes of memory that this process may come to use."""
    found = _meminfo("MemTotal") or _from_system("SC_PHYS_PAGES") or _windows(0)
    return min(found, _group_limit())


def free_memory() -> int:
    """Bytes that can be had without swapping; what caches hold counts as free."""
    found = _meminfo("MemAvailable") or _from_system("SC_AVPHYS_PAGES") or _windows(1)
    limit = _group_limit()
    if limit == _UNLIMITED:
        return found
    used = _number(Path("/sys/fs/cgroup/memory.current"))
    cached = _group_cache()
    return max(0, min(found, limit - used + cached))


def _meminfo(key: str) -> int:
    for line in _text(Path("/proc/meminfo")).splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0


def _from_system(pages: str) -> int:
    try:
        return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 0


def _windows(which: int) -> int:
    if sys.platform != "win32":
        return 0

    class Status(ctypes.Structure):
        _fields_ = [("length", ctypes.c_uint32), ("load", ctypes.c_uint32)] + [
            (name, ctypes.c_uint64) for name in ("total", "free", "a", "b", "c", "d", "e")
        ]

    status = Status(length=ctypes.sizeof(Status))
    ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))
    return int(status.free if which else status.total)


def _group_limit() -> int:
    """What a container allows (cgroup version 2)."""
    return _number(Path("/sys/fs/cgroup/memory.max")) or _UNLIMITED


def _group_cache() -> int:
    for line in _text(Path("/sys/fs/cgroup/memory.stat")).splitlines():
        if line.startswith("inactive_file "):
            return int(line.split()[1])
    return 0


def _number(path: Path) -> int:
    text = _text(path).strip()
    return int(text) if text.isdigit() else 0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
