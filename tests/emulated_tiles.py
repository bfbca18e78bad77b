"""Run tests with AMX's tiles emulated in memory, on a CPU with AVX-512 VNNI:

python -m pytest -p tests.emulated_tiles tests/parity/test_parity.py tests/models
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from rlx.llvm import target

_real = target._host


@cache
def _emulated() -> target.Target:
    return replace(_real(), emulates_amx=True)


target._host = _emulated
