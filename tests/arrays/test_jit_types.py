"""What a type checker sees of a jitted function: its own signature and result."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import rlx

PROGRAM = """
from typing import reveal_type
import rlx
import rlx.numpy as rnp
from rlx import Array

@rlx.jit
def f(x: Array, n: int = 2) -> dict[str, Array]:
    return {"a": x * n}

@rlx.jit(static="n", donate=["x"])
def g(x: Array, n: int) -> tuple[Array, int]:
    return x, n

class Model:
    w: Array
    @rlx.jit
    def method(self, x: Array) -> Array:
        return x @ self.w

x = rnp.zeros(3)
reveal_type(f(x))  # dict[str, Array]
reveal_type(g(x, 2))  # tuple[Array, int]
reveal_type(Model().method(x))  # Array
reveal_type(rlx.scan(lambda c, r: (c + r, [c]), x, x))  # tuple[Array, list[Array]]
reveal_type(rlx.cond(x, lambda: 1, lambda: 2))  # int
reveal_type(rlx.while_loop(lambda c: c, lambda c: c, x))  # Array
reveal_type(rlx.fori_loop(0, 3, lambda i, c: c, x))  # Array
reveal_type(rlx.map(lambda r: {"y": r}, x))  # dict[str, Array]
f("no")  # error
f(x, m=3)  # error
Model().method(1)  # error
"""


@pytest.mark.slow  # mypy reads the whole package
def test_mypy_sees_signatures_and_results(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM, encoding="utf-8")
    root = Path(rlx.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(file)],
        capture_output=True, text=True, cwd=root, check=False,
    )  # fmt: skip
    found: dict[int, str] = {}
    for line in done.stdout.splitlines():
        match = re.match(r".*program\.py:(\d+): (.*)", line)
        if match is not None:
            found.setdefault(int(match[1]), match[2])
    for number, text in enumerate(PROGRAM.splitlines(), 1):
        wanted = text.rpartition("  # ")[2] if "  # " in text else ""
        shown = found.get(number, "").replace("rlx.numpy.array.", "")
        if wanted == "error":
            assert shown.startswith("error"), (text, shown)
        else:
            assert not shown.startswith("error"), (text, shown)
            assert f'"{wanted}"' in shown or not wanted, (text, shown)
