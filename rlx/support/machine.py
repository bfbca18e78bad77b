"""The machine: cores, worker threads and memory that this process may use, and the CPU's name.

Affinity and the limits of a container (cgroups) count.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import sys
from functools import cache
from pathlib import Path

from rlx.errors import OptionError
from rlx.support.settings import setting

MAX_WORKERS = 250


def usable_cores() -> int:
    """CPUs this process may run on at once, within the quota of its container."""
    return max(1, min(len(_cpus()), _cpu_quota(), MAX_WORKERS))


@cache
def _cpu_quota() -> int:
    """Cached: planning a variant reads it for every node."""
    return _read_cpu_quota(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))


def physical_cores() -> int:
    """Usable cores, SMT siblings counted once."""
    return max(1, min(_physical(tuple(_cpus())), usable_cores()))


@cache
def _physical(cpus: tuple[int, ...]) -> int:
    siblings = set()
    for cpu in cpus:
        path = f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        try:
            siblings.add(Path(path).read_text())
        except OSError:
            siblings.add(str(cpu))
    return len(siblings)


def worker_count(requested: int | None = None) -> int:
    """Worker threads to use: the argument, else RLX_NUM_THREADS, else one per physical core.

    Never more than usable cores: oversubscribed barriers cost 100 times as much.
    """
    if requested is None:
        requested = _from_environment()
    if requested is None:
        return physical_cores()
    if requested < 1:
        raise OptionError("number of threads", where="threads", got=requested, expected="1 or more")
    return min(requested, usable_cores())


def _from_environment() -> int | None:
    text = setting("RLX_NUM_THREADS")
    if not text:
        return None
    if not text.isdigit() or int(text) < 1:
        raise OptionError(
            "RLX_NUM_THREADS is not a number of threads", where="threads", got=repr(text)
        )
    return int(text)


def _cpus() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _read_cpu_quota(membership: Path, root: Path) -> int:
    """CPUs that cgroup v2 or v1 grants, rounded up; the limits of all parent groups count."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return MAX_WORKERS
    best = float(MAX_WORKERS)
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            group, read = root / path.lstrip("/"), _read_v2
        elif "cpu" in controllers.split(","):
            group, read = root / "cpu" / path.lstrip("/"), _read_v1
        else:
            continue
        for level in (group, *group.parents):
            best = min(best, read(level))
            if level == root:
                break
    return max(1, math.ceil(best))


def _read_v2(group: Path) -> float:
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return math.inf if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return math.inf


def _read_v1(group: Path) -> float:
    try:
        quota = int((group / "cpu.cfs_quota_us").read_text())
        period = int((group / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return math.inf
    return quota / period if quota > 0 and period > 0 else math.inf


_UNLIMITED = 1 << 62


def cpu_name() -> str:
    """The model name of the CPU."""
    if sys.platform == "linux":
        for line in _text(Path("/proc/cpuinfo")).splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model"):
                return value.strip()
    return platform.processor() or platform.machine()


def total_memory() -> int:
    """Bytes of memory that this process may use."""
    found = _meminfo("MemTotal") or _sysconf("SC_PHYS_PAGES") or _windows(0)
    return min(found, _cgroup_limit())


def free_memory() -> int:
    """Bytes that are available without swapping; page cache counts as free."""
    found = _meminfo("MemAvailable") or _sysconf("SC_AVPHYS_PAGES") or _windows(1)
    limit = _cgroup_limit()
    if limit == _UNLIMITED:
        return found
    used = _number(Path("/sys/fs/cgroup/memory.current"))
    cached = _cgroup_cache()
    return max(0, min(found, limit - used + cached))


def _meminfo(key: str) -> int:
    for line in _text(Path("/proc/meminfo")).splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0


def _sysconf(pages: str) -> int:
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


def _cgroup_limit() -> int:
    """The memory limit of a container (cgroup v2)."""
    return _number(Path("/sys/fs/cgroup/memory.max")) or _UNLIMITED


def _cgroup_cache() -> int:
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
