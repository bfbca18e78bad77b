"""Saved functions: they run without a compiler, and what is not saved is an error."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import rlx
import rlx.numpy as rnp
from rlx.runtime.bundle import load_bundle, write_bundle

rng = np.random.default_rng(3)
WEIGHTS = rng.standard_normal((3, 4)).astype(np.float32)


def draw(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


@dataclass
class Pair:
    a: Any
    b: Any


class Point(NamedTuple):
    x: Any
    y: Any


def saved(f: Any, path: Path, *calls: tuple[Any, ...]) -> Any:
    jitted = rlx.jit(f) if not isinstance(f, rlx.JitFunction) else f
    for args in calls:
        jitted(*args)
    jitted.save(path)
    return jitted


def test_a_loaded_function_gives_the_same(tmp_path: Path) -> None:
    weights = rnp.asarray(WEIGHTS)

    def f(x: Any, params: Any) -> Any:
        y = rnp.tanh(x @ weights) * params["scale"]
        return {"y": y, "n": x.shape[0] * 2, "name": "f", "w": weights}, None

    params = {"scale": np.float32(2), "unused": [draw(3)]}
    calls = [(draw(n, 3), params) for n in (2, 5)]
    saved(f, tmp_path / "f.rlx", *calls)
    loaded = rlx.load_function(tmp_path / "f.rlx")
    for x, _ in calls:
        found, nothing = loaded(x, params)
        np.testing.assert_allclose(np.asarray(found["y"]), np.tanh(x @ WEIGHTS) * 2, rtol=1e-5)
        assert nothing is None and found["n"] == len(x) * 2 and found["name"] == "f"
        assert np.array_equal(np.asarray(found["w"]), WEIGHTS)
    assert len(loaded.variants()) == 1 and loaded.variants()[0].calls == 2


_WITHOUT_A_COMPILER = """
import sys
sys.modules["llvmlite"] = None  # an import of it fails
import numpy as np
import rlx
f = rlx.load_function(sys.argv[1])
found = f(np.arange(6, dtype=np.float32).reshape(2, 3))
from rlx.llvm import jit
from rlx.passes.report import counters
assert "rlx.runtime.template" not in sys.modules and "rlx.llvm.emit_object" not in sys.modules
print(counters.passes, counters.plans, jit.counters.compilations, float(found))
"""


def test_it_runs_where_there_is_no_compiler(tmp_path: Path) -> None:
    path = tmp_path / "f.rlx"
    saved(lambda x: rnp.sum(rnp.exp(x) * 2), path, (draw(2, 3),))
    run = subprocess.run(
        [sys.executable, "-c", _WITHOUT_A_COMPILER, str(path)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    passes, plans, compilations, value = run.stdout.split()
    assert (passes, plans, compilations) == ("0", "0", "0")
    assert float(value) == pytest.approx(2 * np.exp(np.arange(6)).sum(), rel=1e-5)


def test_guards_and_static_values_choose_the_trace(tmp_path: Path) -> None:
    @rlx.jit(static=["power", "mode"])
    def f(x: Any, power: int, mode: Any = None) -> Any:
        y = x * 2 if x.shape[0] > 4 else x * 3
        return y**power if mode is None else -y

    x, y = draw(3), draw(6)
    calls = [(x, 1), (y, 1), (x, 2), (x, 1, ("a", 1.5))]
    saved(f, tmp_path / "f.rlx", *calls)
    loaded = rlx.load_function(tmp_path / "f.rlx")
    for args in calls:
        assert np.array_equal(np.asarray(loaded(*args)), np.asarray(f(*args)))
    assert np.array_equal(np.asarray(loaded(x, power=2)), np.asarray(f(x, 2)))
    for args in ((draw(7), 1), (x, 3), (x, True), (x.astype(np.float64), 1), (draw(3, 1), 1)):
        with pytest.raises(rlx.InputError, match=r"(?s)no saved variant.*x \[3\] f32, power=2"):
            loaded(*args)
    with pytest.raises(rlx.UnsupportedError, match="no body to trace"):
        rlx.jit(lambda x: loaded(x, 1))(x)


def test_dataclasses_and_named_tuples_are_given_when_it_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "f.rlx"
    saved(lambda p: Point(p.a + 1, [p.b]), path, (Pair(draw(2), draw(3)),))
    with pytest.raises(rlx.InputError, match=r"types=\[P"):
        rlx.load_function(path)
    found = rlx.load_function(path, types=[Pair, Point])(Pair(np.ones(2, np.float32), draw(3)))
    assert isinstance(found, Point) and np.array_equal(np.asarray(found.x), [2, 2])


def test_what_cannot_be_saved_is_an_error(tmp_path: Path) -> None:
    path, x = tmp_path / "f.rlx", draw(3)
    with pytest.raises(rlx.InputError, match="nothing to save"):
        rlx.jit(lambda x: x).save(path)
    with pytest.raises(rlx.UnsupportedError, match="a result that is not saved"):
        saved(lambda x: (x + 1, {1, 2}), path, (x,))
    with pytest.raises(rlx.UnsupportedError, match="static argument"):
        saved(rlx.jit(lambda x, f: f(x), static=["f"]), path, (x, rnp.exp))
    with pytest.raises(rlx.UnsupportedError, match="prints"):
        saved(lambda x: (x + 1, rlx.debug.print("{}", x))[0], path, (x,))
    assert not path.exists()


def test_damaged_and_foreign_files_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "f.rlx"
    saved(lambda x: x + 1, path, (draw(3),))
    data = path.read_bytes()
    for changed in (data[:-1], data[:200] + bytes([data[200] ^ 1]) + data[201:], b"text"):
        (tmp_path / "damaged.rlx").write_bytes(changed)
        with pytest.raises(rlx.FormatError):
            rlx.load_function(tmp_path / "damaged.rlx")
    bundle = load_bundle(path)
    for table in (b"", b"(", bundle.extras["function"][:-3], bundle.extras["function"] + b"x"):
        write_bundle(tmp_path / "table.rlx", bundle.artifacts, extras={"function": table})
        with pytest.raises(rlx.RlxError):
            rlx.load_function(tmp_path / "table.rlx")
    write_bundle(tmp_path / "other.rlx", bundle.artifacts)
    with pytest.raises(rlx.FormatError, match="not a saved function"):
        rlx.load_function(tmp_path / "other.rlx")
