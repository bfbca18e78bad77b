"""The JIT: IR text to native functions; each distinct unit is compiled once and cached on disk.

    unit = Unit(module.text(), target)
    kernel = compile_unit(unit)                  # memory, then disk, then LLVM
    kernel.address("kernel")                     # for a program's step table
    kernel.function("kernel", None, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32)(...)
    kernel.object                                # bytes, for artifacts

`counters` counts compilations and cache hits.

Return the compiler's memory to the system after compiling.

LLVM runs for a second or two at the first start of a model. What it touched of its library, some
65 MB of code and tables, would stay resident for as long as the model does, and so would free
memory between what was allocated meanwhile.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import mmap
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from rlx.errors import CodegenError, OptionError
from rlx.llvm.disk_cache import DiskCache
from rlx.llvm.elf import Image
from rlx.llvm.target import Target
from rlx.support.progress import COMPILING, current
from rlx.support.records import dataclass

OPTIMIZERS = ("none", "combine", "O2")
_FORMAT = "rlx-kernel-1"


@dataclass(frozen=True)
class Unit:
    """One module to compile, with everything that can change the code it becomes.

    `opt`: "none" (the text as it is), "combine" (peephole only) or "O2"; `level`: LLVM's effort in
    code generation, 0 to 3.
    """

    text: str
    target: Target
    opt: str = "none"
    level: int = 2

    def __post_init__(self) -> None:
        if self.opt not in OPTIMIZERS:
            raise OptionError("unknown optimiser", where="jit", got=self.opt, expected=OPTIMIZERS)
        if self.level not in range(4):
            raise OptionError("unknown level", where="jit", got=self.level, expected="0 to 3")

    @cached_property
    def key(self) -> str:
        """sha256 of all fields and the compiler's version, each prefixed by its length."""
        digest = hashlib.sha256()
        parts = (_FORMAT, self.text, self.target.key, self.opt, str(self.level), compiler_version())
        for part in parts:
            data = part.encode()
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
        return digest.hexdigest()

    def compile(self) -> bytes:
        """Run LLVM, bypassing the caches."""
        from rlx.llvm import emit_object

        return emit_object.make_object(self.text, self.target, self.opt, self.level)

    def assembly(self) -> str:
        """Assembly text of the unit, for debugging."""
        from rlx.llvm import emit_object

        return emit_object.make_assembly(self.text, self.target, self.opt, self.level)


@dataclass
class Counters:
    """Compilations and cache hits of this process; `seconds` is the time inside LLVM."""

    compilations: int = 0
    memory_hits: int = 0
    disk_hits: int = 0
    seconds: float = 0.0

    def reset(self) -> None:
        for item in fields(self):
            setattr(self, item.name, item.default)


class Kernel:
    """Object code, linked when a function is first used."""

    def __init__(self, key: str, data: bytes) -> None:
        self.key, self.object = key, data

    @cached_property
    def image(self) -> Image:
        return Image(self.object, f"kernel {self.key[:12]}")

    def address(self, name: str = "kernel") -> int:
        """Address of a function; valid while this kernel lives."""
        return self.image.address(name)

    def function(self, name: str, result: Any, *params: Any) -> Callable[..., Any]:
        """A ctypes callable; it keeps the code alive and releases the GIL."""
        made = ctypes.CFUNCTYPE(result, *params)(self.address(name))
        made.kernel = self  # type: ignore[attr-defined]
        return made


counters = Counters()
_kernels: dict[str, Kernel] = {}
_compiling: dict[str, threading.Event] = {}  # what threads compile now
_lock = threading.RLock()


def compile_unit(unit: Unit, cache_dir: Path | None = None) -> Kernel:
    """The unit's kernel, compiled if neither memory nor disk has it."""
    return compile_many([unit], cache_dir)[0]


def compile_many(units: Sequence[Unit], cache_dir: Path | None = None) -> list[Kernel]:
    """Kernels of all units, in order; large batches are spread over worker processes. Threads may
    compile at once, so that a small batch does not wait for a large one."""
    known = {unit.key: _kernels.get(unit.key) for unit in units}
    if None not in known.values():
        counters.memory_hits += len(units)
    else:
        disk = DiskCache.open(cache_dir)
        while wanted := [u for u in units if known[u.key] is None]:
            missing, others = _claim(wanted, known, disk)
            try:
                if missing:
                    known |= _compile_missing(missing, disk)
            finally:
                with _lock:
                    for key in missing:
                        _compiling.pop(key, threading.Event()).set()
            for other in others:
                other.wait()
    return [kernel for unit in units if (kernel := known[unit.key]) is not None]


def _claim(
    units: Sequence[Unit], known: dict[str, Kernel | None], disk: DiskCache | None
) -> tuple[dict[str, Unit], list[threading.Event]]:
    """What is to be compiled here, and what to wait for as another thread compiles it; `known` gets
    what there is."""
    missing: dict[str, Unit] = {}
    others: list[threading.Event] = []
    with _lock:
        for unit in units:
            key = unit.key
            if known[key] is not None or key in missing:
                continue
            known[key] = _find(unit, disk)
            if known[key] is not None:
                continue
            if key in _compiling:
                others.append(_compiling[key])
            else:
                missing[key], _compiling[key] = unit, threading.Event()
    return missing, others


def _compile_missing(missing: dict[str, Unit], disk: DiskCache | None) -> dict[str, Kernel]:
    from rlx.llvm import parallel_compile  # imported late: stored programs never need it

    start = time.perf_counter()
    reporter = current()
    reporter.expect(COMPILING, len(missing))
    objects = parallel_compile.compile_all(
        list(missing.values()), on_unit=partial(reporter.advance, COMPILING)
    )
    made = {key: Kernel(key, data) for key, data in zip(missing, objects, strict=True)}
    with _lock:
        counters.seconds += time.perf_counter() - start
        counters.compilations += len(missing)
        _kernels.update(made)
    if disk:
        for key, kernel in made.items():
            disk.store(key, kernel.object)
    return made


def _find(unit: Unit, disk: DiskCache | None) -> Kernel | None:
    if unit.key in _kernels:
        counters.memory_hits += 1
        return _kernels[unit.key]
    data = disk.load(unit.key) if disk else None
    if data is None:
        return None
    counters.disk_hits += 1
    return _kernels.setdefault(unit.key, Kernel(unit.key, data))


def adopt(key: str, data: bytes) -> Kernel:
    """The kernel of an object from an artifact; each key is loaded once."""
    with _lock:
        return _kernels.setdefault(key, Kernel(key, data))


def _after_fork() -> None:
    """A new lock in the child: a thread that held the old one does not exist there."""
    global _lock
    _lock = threading.RLock()
    _compiling.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def forget() -> None:
    """Empty the memory cache. Kernels still referenced stay usable."""
    with _lock:
        _kernels.clear()


def has_compiler() -> bool:
    """Whether llvmlite is installed; stored programs run without it."""
    return importlib.util.find_spec("llvmlite") is not None


@cache
def compiler_version() -> str:
    """Identity of the LLVM in use, found without importing it."""
    spec = importlib.util.find_spec("llvmlite")
    if spec is None or spec.origin is None:
        raise CodegenError("llvmlite is not installed", where="jit", hint="pip install llvmlite")
    version = Path(os.path.dirname(spec.origin)) / "_version.py"
    if version.exists():
        return hashlib.sha256(version.read_bytes()).hexdigest()[:16]
    from importlib.metadata import version as installed

    return installed("llvmlite")


# a private read-only mapping in smaps: its addresses, its file, its counters
_MAP = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) r-.p \S+ \S+ \S+ +(/.*)\n((?:\w+:.*\n)+)", re.M)


def trim_compiler_memory() -> None:
    """Drop LLVM's clean pages and trim the heap. A later compilation reads the pages again."""
    compiler = sys.modules.get("llvmlite")
    if sys.platform != "linux" or compiler is None:
        return
    libc = ctypes.CDLL(None)
    for start, size in _unchanged(os.path.dirname(os.path.realpath(str(compiler.__file__)))):
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED)
    if hasattr(libc, "malloc_trim"):  # the GNU library has it
        libc.malloc_trim(0)


def _unchanged(folder: str) -> Iterator[tuple[int, int]]:
    """Start and size of the clean mappings of libraries in a folder; those with pages that differ
    from the file, such as relocated data, are left out."""
    for found in _MAP.finditer(Path("/proc/self/smaps").read_text(encoding="utf-8")):
        start, end, path, counts = found.groups()
        same = {"Anonymous:0", "Swap:0"} <= {"".join(c.split()[:2]) for c in counts.splitlines()}
        if path.startswith(f"{folder}{os.sep}") and same:
            yield int(start, 16), int(end, 16) - int(start, 16)
