"""Return the compiler's memory to the system after compiling.

LLVM runs for a second or two at the first start of a model. What it touched of its library, some
65 MB of code and tables, would stay resident for as long as the model does, and so would free
memory between what was allocated meanwhile.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

# a private read-only mapping in smaps: its addresses, its file, its counters
_MAP = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) r-.p \S+ \S+ \S+ +(/.*)\n((?:\w+:.*\n)+)", re.M)


def trim_compiler_memory() -> None:
    """Drop LLVM's clean pages and trim the heap. A later compilation reads the pages again."""
    compiler = sys.modules.get("llvmlite")
    if sys.platform != "linux" or compiler is None:
        return
    libc = ctypes.CDLL(None)
    for start, size in _unchanged(os.path.dirname(str(compiler.__file__))):
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
