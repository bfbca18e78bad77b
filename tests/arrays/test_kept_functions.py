"""The first variant of a jitted function is kept on disk for the next process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import rlx
from rlx.runtime.lazy_template import function_cache

PROGRAM = """
import sys
import numpy as np
import rlx, rlx.numpy as rnp
from rlx.llvm.jit import counters

f = rlx.jit(lambda x, w: rnp.tanh(x @ w) * 0.5)
x, w = np.ones((3, 4), np.float32), np.full((4, 2), 0.25, np.float32)
np.testing.assert_array_equal(np.asarray(f(x, w)), np.asarray(f(x, w)))
made = "rlx.runtime.template" in sys.modules, "rlx.backends.cpu.compiler" in sys.modules
print(*made, counters.compilations > 0, np.asarray(f(x, w))[0, 0])
assert f(np.ones((5, 4), np.float32), w).shape == (5, 2)  # another variant: from the template
print(len(f.variants()), "rlx.runtime.template" in sys.modules)
"""


def run(folder: Path) -> list[str]:
    env = {"RLX_CACHE_DIR": str(folder), "PYTHONPATH": str(Path(rlx.__file__).parent.parent)}
    command = [sys.executable, "-W", "error", "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert not done.returncode, done.stderr
    return done.stdout.splitlines()


def test_the_next_process_needs_no_compiler(tmp_path: Path) -> None:
    first, second = run(tmp_path / "cache"), run(tmp_path / "cache")
    assert first[0].startswith("True True True")
    assert second[0].startswith("False False False")
    assert first[0].split()[-1] == second[0].split()[-1]
    assert first[1] == second[1] == "1 True"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path))
    return tmp_path / "functions"


def scale(x: rlx.Array) -> rlx.Array:
    return x * 3.0


def test_a_damaged_file_is_made_again(folder: Path) -> None:
    x = np.arange(5, dtype=np.float32)
    rlx.jit(scale)(x)
    [file] = folder.iterdir()
    file.write_bytes(file.read_bytes()[:-100] + bytes(100))

    with pytest.warns(RuntimeWarning, match="rebuilt"):
        found = rlx.jit(scale)(x)
    np.testing.assert_array_equal(np.asarray(found), x * 3)
    np.testing.assert_array_equal(np.asarray(rlx.jit(scale)(x)), x * 3)  # without a warning


def test_only_the_first_variant_is_kept(folder: Path) -> None:
    f = rlx.jit(scale)
    for n in (5, 6, 7):
        f(np.ones(n, np.float32))
    assert len(list(folder.iterdir())) == 1


def test_other_constants_sizes_and_types_are_other_functions(folder: Path) -> None:
    x = np.arange(5, dtype=np.float32)
    for factor in (3.0, 4.0):
        found = rlx.jit(lambda x, by: x * by, static=["by"])(x, factor)
        np.testing.assert_array_equal(np.asarray(found), x * factor)
    for other in (x[:4], x.astype(np.float64), x.reshape(5, 1)):
        np.testing.assert_array_equal(np.asarray(rlx.jit(scale)(other)), other * 3)
    assert len(list(folder.iterdir())) == 2 + 3


def test_the_cache_may_be_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_CACHE", "0")
    assert function_cache() is None
    np.testing.assert_array_equal(np.asarray(rlx.jit(scale)(np.ones(3, np.float32))), 3)
    assert not folder.exists()
