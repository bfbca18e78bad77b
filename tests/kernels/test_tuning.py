"""Tunables and autotuning: results stay the same, the faster value wins, the table is checked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.backends.cpu import thread_pool, tuning
from rlx.backends.cpu.autotune import Autotuner
from rlx.backends.cpu.kernels.spec import KernelSpec, emit_unit, unit_of
from rlx.backends.registry import get_backend
from rlx.ir.quant.scheme import QuantScheme, encode
from rlx.llvm.builder import Module
from rlx.llvm.jit import Kernel, compile_many
from rlx.llvm.target import Target
from rlx.specialize.options import CompileOptions
from rlx.support.records import dataclass


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@dataclass(frozen=True)
class Spin(KernelSpec):
    """args: out. Counts to a tunable number; `useless` is another that changes nothing."""

    counts: tuple[int, ...]

    def emit(self, m: Module) -> None:
        f = m.kernel()
        m.tunable("useless", 1, 2)
        count = f.carry([f.i64(0)])
        for _ in count.range(0, m.tunable("count", *self.counts)):
            f.relax()
            count.values = [count.values[0] + 1]
        f.store(f.i64(7), f.arg(f["args"], 0))


# -- tunables ---------------------------------------------------------------------------------


def test_a_tunable_has_its_default_or_a_listed_value() -> None:
    for tuned, expected in (({}, 8), ({"n": 4}, 4), ({"n": 5}, 8), ({"other": 4}, 8)):
        module = Module(Target.host(), tuned)
        assert module.tunable("n", 8, 4, 8, 16) == expected
        assert module.tunables == {"n": (8, 4, 16)}


def _graph(kind: str) -> tuple[rlx.CompiledGraph, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((70, 512), np.float32)
    w = rng.standard_normal((512, 96), np.float32)
    if kind == "f32":
        module = rlx.GraphModule.define(
            "gemm", lambda g: g.matmul(g.input("x", ["batch", 512]), g.param("w", [512, 96]))
        )
        compiled = rlx.Session("cpu").compile(module)
        compiled.set_param("w", w)
        return compiled, {"x": x}
    scheme = QuantScheme.parse(kind)
    packed = encode(scheme, np.ascontiguousarray(w.T)).data
    module = rlx.GraphModule.define(
        "qgemm",
        lambda g: g.dequant_matmul(
            g.input("x", ["batch", 512]), g.param("w", list(packed.shape), "u8"), scheme=scheme
        ),
    )
    compiled = rlx.Session("cpu").compile(module)
    compiled.set_param("w", packed)
    return compiled, {"x": x}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["f32", "Q4_0", "Q4_K"])
def test_no_value_of_a_tunable_changes_a_result(kind: str) -> None:
    compiled, inputs = _graph(kind)
    target = Target.host()
    tried = 0
    for rows in (1, 3, 70):
        given = {"x": inputs["x"][:rows]}
        (expected,) = compiled.run(**given)
        executable: Any = compiled.executable
        program = get_backend("cpu").inspection().program(executable.lir, CompileOptions())
        for spec in {x.kernel.spec for x in program.launches if x.kernel is not None}:
            _, tunables = emit_unit(spec, target, {})
            for values in product(*tunables.values()):
                unit, _ = emit_unit(spec, target, dict(zip(tunables, values, strict=True)))
                (kernel,) = compile_many([unit])
                assert executable.replace_kernels({unit_of(spec, target).key: kernel})
                (got,) = compiled.run(**given)
                assert got.tobytes() == expected.tobytes()
                tried += 1
    assert tried >= 9


# -- autotuning -------------------------------------------------------------------------------


class Clockwork:
    """An executable of one launch, whose time follows from the kernel that it runs."""

    def __init__(self, spec: Spin, seconds: Mapping[int, float], noise: float = 0.0) -> None:
        target = Target.host()
        self.seconds: dict[str, float] = {}
        for count, useless in product(spec.counts, (1, 2)):
            unit, _ = emit_unit(spec, target, {"count": count, "useless": useless})
            self.seconds[unit.key] = seconds[count]
        self.own = self.now = unit_of(spec, target).key
        self.rng, self.noise = np.random.default_rng(1), noise

    def replace_kernels(self, kernels: Mapping[str, Kernel]) -> set[str]:
        if self.own in kernels:
            self.now = kernels[self.own].key
        return set(kernels) & {self.own}

    @contextmanager
    def recording(self) -> Iterator[Any]:
        seconds = self.seconds[self.now] * (1 + self.noise * self.rng.standard_normal())
        row = SimpleNamespace(seconds=seconds)
        yield SimpleNamespace(profile=lambda: SimpleNamespace(rows=[row]))


def _tuned(spec: Spin, executable: Any) -> Any:
    tuner = Autotuner(executable, [spec], Target.host(), lambda: None, lambda label: None)
    return tuner.tune()


def test_the_fastest_value_wins_and_is_stored() -> None:
    spec = Spin((40, 10, 20))
    assert unit_of(spec, Target.host()).key == emit_unit(spec, Target.host(), {})[0].key
    program = _tuned(spec, Clockwork(spec, {40: 4.0, 10: 1.0, 20: 2.0}))
    (kernel,) = program.kernels
    assert kernel.best == {"count": 10}
    assert kernel.defaults == {"useless": 1, "count": 40}
    assert (kernel.speedup, program.before, program.after) == (4.0, 4.0, 1.0)
    assert tuning.tuned_values(spec, Target.host()) == {"count": 10}
    other = Spin((40, 10, 21))
    assert tuning.tuned_values(other, Target.host()) == {}


def test_noise_does_not_win() -> None:
    """Ten tunings of kernels that differ by luck alone: none leaves the defaults."""
    for seed in range(10):
        spec = Spin((40, 10, 20 + seed))
        same = dict.fromkeys(spec.counts, 1.0)
        executable = Clockwork(spec, same, noise=0.05)
        executable.rng = np.random.default_rng(seed)
        assert _tuned(spec, executable).kernels[0].best == {}
        assert tuning.tuned_values(spec, Target.host()) == {}


def test_the_default_comes_back_where_it_is_best() -> None:
    spec = Spin((30, 10))
    tuning.store_tuned({tuning.kernel_name(spec): {"count": 10}}, Target.host())
    assert unit_of(spec, Target.host()).key != emit_unit(spec, Target.host(), {})[0].key
    assert _tuned(spec, Clockwork(spec, {30: 1.0, 10: 5.0})).kernels[0].best == {}
    assert tuning.tuned_values(spec, Target.host()) == {}


# -- the table --------------------------------------------------------------------------------


def test_the_table_changes_units_and_the_key_of_artifacts() -> None:
    spec, backend = Spin((50, 5)), get_backend("cpu")
    assert backend.tuning_key == ""
    tuning.store_tuned({tuning.kernel_name(spec): {"count": 5}}, Target.host())
    assert unit_of(spec, Target.host()) == emit_unit(spec, Target.host(), {"count": 5})[0]
    first = backend.tuning_key
    assert first
    tuning.store_tuned({tuning.kernel_name(Spin((50, 6))): {"count": 6}}, Target.host())
    assert backend.tuning_key not in ("", first)
    backend.inspection().forget_tuning()
    assert backend.tuning_key == ""


def test_without_a_cache_nothing_is_stored(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLX_CACHE", "0")
    assert tuning.store_tuned({"Spin x": {"count": 5}}, Target.host()) is None
    assert not own_cache.exists()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"{", "Expecting"),
        (b"[" * 100_000, "recursion"),
        (b"[]", "another format"),
        (b'{"format": 1, "target": "x", "kernels": {}}', "another CPU"),
        ({"kernels": []}, "no kernels"),
        ({"kernels": {"Spin": 3}}, "not a number"),
        ({"kernels": {"Spin": {"count": "5"}}}, "not a number"),
    ],
)
def test_a_damaged_table_is_left_aside(own_cache: Path, content: Any, why: str) -> None:
    target = Target.host()
    path = tuning.store_tuned({"Spin x": {"count": 5}}, target)
    assert path is not None
    if isinstance(content, dict):
        content = json.dumps({"format": 1, "target": target.key, **content}).encode()
    path.write_bytes(content)
    tuning._read.cache_clear()
    with pytest.warns(RuntimeWarning, match=f"is not used: .*{why}"):
        assert tuning.tuned_values(Spin((1, 2)), target) == {}
    tuning.store_tuned({tuning.kernel_name(Spin((1, 2))): {"count": 2}}, target)  # written again
    assert tuning.tuned_values(Spin((1, 2)), target) == {"count": 2}


# -- the clock --------------------------------------------------------------------------------


def test_an_interruption_does_not_falsify_the_rate_of_the_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread loses its core for 0.7 s between the two clocks of the first reading."""
    now = {"seconds": 0.0, "readings": 0}

    def perf_counter() -> float:
        now["seconds"] += 1e-6
        return now["seconds"]

    def ticks() -> int:
        now["readings"] += 1
        now["seconds"] += 0.7 if now["readings"] == 1 else 1e-7
        return int(now["seconds"] * 3e9)

    monkeypatch.setattr(thread_pool.time, "perf_counter", perf_counter)
    native = thread_pool._Native.__new__(thread_pool._Native)
    native.now = ticks
    assert native._ticks_per_second() == pytest.approx(3e9, rel=0.01)
