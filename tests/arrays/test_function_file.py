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


def test_one_program_serves_all_sizes_up_to_a_bound(tmp_path: Path) -> None:
    """No size here but the first was ever run. Sizes that are held equal share the bound, and
    `x_0 // 4`, which the graph has of its own, follows."""

    def f(x: Any, w: Any) -> Any:
        by_fours = rnp.reshape(x, (-1, 4, x.shape[1]))
        return rnp.tanh(x @ w) + rnp.sum(by_fours), by_fours.shape[0]

    jitted = rlx.jit(f)
    jitted(draw(8, 3), draw(3, 4))
    jitted.save(tmp_path / "f.rlx", up_to={"x_0": 100, "x_1": 20})
    loaded = rlx.load_function(tmp_path / "f.rlx")
    for rows, inner in ((8, 3), (12, 20), (100, 2), (8, 7)):
        x, w = draw(rows, inner), draw(inner, 4)
        found, fours = loaded(x, w)
        want = np.tanh(x.astype(np.float64) @ w) + x.astype(np.float64).sum()
        np.testing.assert_allclose(np.asarray(found), want, atol=1e-4)  # sums of 240 f32
        assert fours == rows // 4
    for rows, inner, columns in ((104, 3, 4), (8, 21, 4), (9, 3, 4), (8, 3, 5), (8, 1, 4)):
        with pytest.raises(
            rlx.InputError, match=r"x \[x_0, x_1\] f32, w \[w_0, 4\] f32, x_0 <= 100"
        ):
            loaded(draw(rows, inner), draw(inner, columns))


def test_bounds_that_do_not_fit_are_errors(tmp_path: Path) -> None:
    jitted = rlx.jit(lambda x: x + 1)
    jitted(draw(6))
    with pytest.raises(rlx.InputError, match=r"names no size.*got n; expected some of x_0"):
        jitted.save(tmp_path / "f.rlx", up_to={"n": 5})
    with pytest.raises(rlx.InputError, match=r"larger size.*got x_0 = 6; expected at most 5"):
        jitted.save(tmp_path / "f.rlx", up_to={"x_0": 5})


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
