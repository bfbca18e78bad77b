"""ONNX Runtime as on a CPU without AVX-512: it has no switch for that.

A library may use AVX-512 only if the operating system saves its registers, and asks for that with
XGETBV. A copy of the library is loaded in which that instruction is replaced by others, of the same
length, that answer as a system without AVX-512 does. AVX-VNNI needs no such registers and stays:
on a CPU that has it RLX_TARGET=alderlake is what compares.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

NAME = "onnxruntime.capi.onnxruntime_pybind11_state"
_ASKS = b"\x31\xc9\x0f\x01\xd0"  # xor ecx, ecx; xgetbv
_ANSWERS = b"\x31\xc9\x6a\x07\x58"  # xor ecx, ecx; push 7; pop rax: x87, SSE and AVX alone


class _Finder:
    """Finds the copy in place of the library."""

    def __init__(self, copy: Path) -> None:
        self.copy = copy

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != NAME:
            return None
        assert path is not None
        [library] = Path(path[0]).glob(name.rpartition(".")[2] + ".*.so")
        code = library.read_bytes()
        if _ASKS not in code:
            raise RuntimeError(f"{library.name} asks for AVX-512 in another way than was expected")
        self.copy.write_bytes(code.replace(_ASKS, _ANSWERS))
        return importlib.util.spec_from_file_location(name, self.copy)


def hold_onnxruntime(folder: Path) -> None:
    """From here on `import onnxruntime` gives one without AVX-512, whose copy lies in `folder`."""
    assert "onnxruntime" not in sys.modules
    sys.meta_path.insert(0, _Finder(folder / "onnxruntime_avx2.so"))
