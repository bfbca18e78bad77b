"""Artifacts on disk: found again by other processes, checked before use, never in the way."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from small_model import CLOSE, build, component, expected, inputs, weights

import rlx
from rlx import AotCache, CompileOptions, ModelCompilePipeline, ParamStore
from rlx.llvm.jit import counters as jit
from rlx.passes.report import counters
from rlx.runtime import container
from rlx.runtime.artifact import Artifact

ONE = CompileOptions(threads=1)
HERE = str(Path(__file__).resolve().parent)


def pipeline(cache: AotCache, device: str = "cpu") -> ModelCompilePipeline:
    return ModelCompilePipeline(device, params=ParamStore(weights()), aot=cache)


def check(compiled: rlx.CompiledGraph, seq: int = 4) -> None:
    x = inputs(1, seq)
    np.testing.assert_allclose(compiled.run(x=x)[0], expected(x, weights()), **CLOSE)


def stored(cache: AotCache) -> Path:
    """One artifact in the cache, and its file."""
    pipeline(cache).get_or_specialize_aot(component(), build, ONE)
    (entry,) = cache.entries()
    return entry.path


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([HERE, *(p for p in sys.path if p)])
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": paths} | environment,
    )  # fmt: skip


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_a_second_pipeline_loads_what_the_first_stored(device: str, tmp_path: Path) -> None:
    cache = AotCache(tmp_path)
    first, manifest = pipeline(cache, device).get_or_specialize_aot(component(), build, ONE)
    check(first)
    assert (cache.counters.misses, cache.counters.stores, cache.counters.hits) == (1, 1, 0)
    passes, plans, llvm = counters.passes, counters.plans, jit.compilations
    again, loaded = pipeline(cache, device).get_or_specialize_aot(component(), build, ONE)
    assert (counters.passes, counters.plans, jit.compilations) == (passes, plans, llvm)
    assert cache.counters.hits == 1 and loaded == manifest
    check(again)
    plan = again.executable.lir  # read from the file when it is asked for
    assert plan.graph.same_as(first.executable.lir.graph)
    assert again.profile(x=inputs(1, 4)).seconds > 0


def test_the_mode_of_a_component_and_a_known_model_key(tmp_path: Path) -> None:
    cache = AotCache(tmp_path)
    asked = component().with_compilation_mode("aot")
    check(pipeline(cache).get_or_compile_component(asked, build, ONE)[0])
    assert len(cache.entries()) == 1 and cache.entries()[0].name.startswith(asked.aot_disk_base())
    p = pipeline(cache)
    p.get_or_specialize_aot(component(), build, ONE, model_key="small-1")

    def never() -> rlx.GraphModule:
        raise AssertionError("a hit builds nothing")

    check(pipeline(cache).get_or_specialize_aot(component(), never, ONE, model_key="small-1")[0])


def test_dynamic_dims_states_and_bad_indices_survive_the_disk(tmp_path: Path) -> None:
    def model() -> rlx.Graph:
        g = rlx.Graph("rows")
        row = g.gather(g.param("table", [5, 4]), g.input("ids", ["seq"], "i32"))
        updated = g.state_update(g.state("cache", [16, 4]), row, axis=0, start="past_seq")
        g.set_outputs({"sum": g.sum(g.narrow(updated, 0, 0, "past_seq + seq"), 0)})
        return g

    variant = rlx.ModelVariant.decode(1, rlx.UpTo(15), rlx.UpTo(4))
    asked = rlx.ModelComponent(variant, rlx.KernelDispatchConfig())
    cache = AotCache(tmp_path)
    table = np.arange(20, dtype=np.float32).reshape(5, 4)
    for _ in range(2):
        p = ModelCompilePipeline("cpu", params=ParamStore({"table": table}), aot=cache)
        f, _ = p.get_or_specialize_aot(asked, model, ONE)
        first = f.run(ids=np.array([1, 2], np.int32), sizes={"past_seq": 0})[0]
        second = f.run(ids=np.array([4], np.int32), sizes={"past_seq": 2})[0]
        np.testing.assert_array_equal(first, table[1] + table[2])
        np.testing.assert_array_equal(second, table[1] + table[2] + table[4])
        with pytest.raises(rlx.InputError, match=r"\[gather\] an index is out of range"):
            f.run(ids=np.array([5], np.int32), sizes={"past_seq": 0})
        with pytest.raises(rlx.BindingError, match="past its end"):
            f.run(ids=np.array([1, 1], np.int32), sizes={"past_seq": 15})
    assert cache.counters.hits == 1


_KEYS = """
from small_model import build, component
from rlx import AotCache, ModelCompilePipeline
cache = AotCache({root!r})
ModelCompilePipeline("cpu", aot=cache).get_or_specialize_aot(component(), build, {{"threads": 1}})
(entry,) = cache.entries()
print(component().cache_key(), entry.name, cache.counters.hits)
"""


@pytest.mark.slow
def test_processes_and_hash_seeds_agree_on_key_and_name(tmp_path: Path) -> None:
    code = _KEYS.format(root=str(tmp_path))
    outputs = []
    for seed in ("0", "1", "4711"):
        done = python(code, PYTHONHASHSEED=seed)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout.split())
    assert len({(key, name) for key, name, _ in outputs}) == 1
    assert [hits for *_, hits in outputs] == ["0", "1", "1"]


_START = """
import sys
sys.modules["llvmlite"] = None  # an import of it fails
from small_model import build, component, inputs
import numpy as np
from rlx import AotCache, ModelCompilePipeline, ParamStore
from small_model import expected, weights
p = ModelCompilePipeline("cpu", params=ParamStore(weights()), aot=AotCache({root!r}))
f, _ = p.get_or_specialize_aot(component(), build, {{"threads": 1}})
x = inputs(1, 4)
assert np.allclose(f.run(x=x)[0], expected(x, weights()), rtol=2e-5, atol=2e-5)
from rlx.llvm.jit import counters as jit
from rlx.passes.report import counters
assert p.aot.counters.hits == 1
assert sys.modules["llvmlite"] is None and "rlx.llvm.emit_object" not in sys.modules
print(counters.passes, counters.plans, jit.compilations)
"""


def test_a_start_from_disk_runs_no_pass_and_imports_no_llvm(tmp_path: Path) -> None:
    stored(AotCache(tmp_path))
    done = python(_START.format(root=str(tmp_path)))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "0", "0"]


# -- what cannot be used --------------------------------------------------------------------------


def test_every_flipped_byte_is_found_before_anything_is_used(tmp_path: Path) -> None:
    cache = AotCache(tmp_path)
    path = stored(cache)
    whole = path.read_bytes()
    rng = random.Random(5)
    places = [*range(64), *sorted(rng.sample(range(64, len(whole)), 300)), len(whole) - 1]
    for at in places:
        damaged = bytearray(whole)
        damaged[at] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(rlx.FormatError):
            container.read(path)
    for size in (0, 7, 63, 64, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(rlx.FormatError):
            container.read(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(rlx.FormatError):
        container.read(path)


def test_a_damaged_artifact_is_made_again_with_a_warning(tmp_path: Path) -> None:
    cache = AotCache(tmp_path)
    path = stored(cache)
    whole = path.read_bytes()
    path.write_bytes(whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:])
    assert list(cache.verify()) == [path]
    with pytest.warns(RuntimeWarning, match=r"is rebuilt: .*damaged"):
        check(pipeline(cache).get_or_specialize_aot(component(), build, ONE)[0])
    assert not cache.verify()
    hits = cache.counters.hits
    check(pipeline(cache).get_or_specialize_aot(component(), build, ONE)[0])
    assert cache.counters.hits == hits + 1


def changed(path: Path, **fields: object) -> None:
    """Write the artifact anew, whole but with other contents."""
    artifact = Artifact.from_parts(container.read(path).parts)
    for name, value in fields.items():
        setattr(artifact, name, value)
    container.write(path, artifact.to_parts())


def test_a_foreign_artifact_is_made_again_with_a_warning(tmp_path: Path) -> None:
    cache = AotCache(tmp_path)
    changed(stored(cache), material="00")
    with pytest.warns(RuntimeWarning, match="another artifact"):
        check(pipeline(cache).get_or_specialize_aot(component(), build, ONE)[0])


def test_an_outdated_artifact_is_renewed_without_a_word(tmp_path: Path) -> None:
    """Also where another version wrote what this one cannot read."""
    cache = AotCache(tmp_path)
    path = stored(cache)
    parts = container.read(path).parts
    for changes in ({"stamp": b"0" * 64}, {"stamp": b"0" * 64, "about": b"?"}):
        container.write(path, parts | changes)
        assert "another version" in cache.verify()[path]
        rejected = cache.counters.rejected
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check(pipeline(cache).get_or_specialize_aot(component(), build, ONE)[0])
        assert cache.counters.rejected == rejected + 1 and not cache.verify()


def test_code_for_another_cpu_is_never_loaded(tmp_path: Path) -> None:
    from rlx.backends.cpu.executor.control_block import ABI
    from rlx.backends.cpu.relocatable import read_target
    from rlx.ir.serial.writer import Writer
    from rlx.llvm.target import Target

    cache = AotCache(tmp_path)
    path = stored(cache)
    artifact = Artifact.from_parts(container.read(path).parts)
    host = read_target(artifact.parts)
    assert host == Target.host()
    richer = Target(host.triple, host.cpu, (*host.features, "+of-the-future"), host.arch)
    other = Target.named("apple-m1" if host.arch == "x86_64" else "x86-64")
    for target in (richer, other):
        about = (ABI, target.triple, target.cpu, target.features, target.arch)
        changed(path, parts={**artifact.parts, "target": Writer().value(about)})
        with pytest.warns(RuntimeWarning, match="code for another CPU"):
            check(pipeline(cache).get_or_specialize_aot(component(), build, ONE)[0])


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files have no owners here")
def test_files_that_others_may_write_are_refused(tmp_path: Path) -> None:
    cache = AotCache(tmp_path / "own")
    path = stored(cache)
    path.chmod(0o666)
    with pytest.warns(RuntimeWarning, match="others may write"):
        check(pipeline(cache).get_or_specialize_aot(component(), build, ONE)[0])
    assert path.stat().st_mode & 0o077 == 0
    cache.root.chmod(0o777)
    with pytest.warns(RuntimeWarning, match=r"is rebuilt: others may write to it"):
        assert cache.load(path.name.removesuffix(".rlx")) is None
    path.unlink()
    with pytest.warns(RuntimeWarning, match=r"not written: .*others may write"):
        check(pipeline(cache).get_or_specialize_aot(component(), build, ONE)[0])
    assert not cache.entries()
    cache.root.chmod(0o700)
    target = tmp_path / "elsewhere.rlx"
    stored(cache).rename(target)
    path.symlink_to(target)
    with pytest.warns(RuntimeWarning, match="is rebuilt"):
        pipeline(cache).get_or_specialize_aot(component(), build, ONE)


def test_a_full_or_missing_disk_is_no_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    with pytest.warns(RuntimeWarning, match="not written|is rebuilt"):
        check(pipeline(AotCache(blocked)).get_or_specialize_aot(component(), build, ONE)[0])


# -- the directory --------------------------------------------------------------------------------


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    cache = AotCache(tmp_path)
    p = pipeline(cache)
    for seq in (2, 3, 4):
        p.get_or_specialize_aot(component(1, seq), build, ONE)
    size = max(e.num_bytes for e in cache.entries())
    for age, entry in enumerate(sorted(cache.entries(), key=lambda e: e.name)):
        os.utime(entry.path, (1000 + age, 1000 + age))
    oldest = cache.entries()[-1].name.removesuffix(".rlx")
    assert cache.load(oldest) is not None  # now it is the latest
    second = cache.entries()[-1].path
    small = AotCache(tmp_path, limit_bytes=2 * size + size // 2)
    assert small.trim() == 1 and not second.exists()
    assert cache.path(oldest).exists() and small.num_bytes <= small.limit_bytes
    assert cache.clear() == 2 and not cache.entries() and cache.num_bytes == 0


def test_prepared_weights_are_mapped_and_checked(tmp_path: Path) -> None:
    cache = AotCache(tmp_path)
    tensors = {
        "prepared.a": np.arange(700_000, dtype=np.float32).reshape(7, -1),
        "prepared.b": np.arange(5, dtype=np.int8),
        "prepared.none": np.zeros((0, 3), np.float16),
    }
    assert cache.store_weights("w", tensors, "source 1")
    found = cache.load_weights("w", "source 1")
    assert found is not None and found.keys() == tensors.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(found[name], array, strict=True)
        assert not found[name].flags.writeable and found[name].ctypes.data % 64 == 0
    assert cache.load_weights("w", "source 2") is None
    assert cache.counters.rejected == 1
    path = cache.path("w", ".weights")
    data = bytearray(path.read_bytes())
    for at in (70, len(data) // 2, len(data) - 1):
        data[at] ^= 4
        path.write_bytes(data)
        with pytest.warns(RuntimeWarning, match="damaged"):
            assert cache.load_weights("w", "source 1") is None
        data[at] ^= 4


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden"])
def test_names_stay_inside_the_directory(tmp_path: Path, name: str) -> None:
    with pytest.raises(rlx.OptionError, match="not the name of an artifact"):
        AotCache(tmp_path).load(name)


def test_settings_move_and_turn_off_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path))
    found = AotCache.default()
    assert found is not None and found.root == tmp_path / "artifacts"
    monkeypatch.setenv("RLX_CACHE_LIMIT", "3")
    assert AotCache(tmp_path).limit_bytes == 3 << 20
    monkeypatch.setenv("RLX_CACHE", "0")
    assert AotCache.default() is None
    check(ModelCompilePipeline("cpu", params=ParamStore(weights()))
          .get_or_specialize_aot(component(), build, ONE)[0])  # fmt: skip
    assert not list(tmp_path.iterdir())


# -- many processes -------------------------------------------------------------------------------

_WRITER = """
import sys
from rlx import AotCache
from rlx.runtime import container
from rlx.runtime.artifact import Artifact
source, root, first = sys.argv[1:]
artifact = Artifact.from_parts(container.read(__import__("pathlib").Path(source)).parts)
cache = AotCache(root)
print("ready", flush=True)
number = int(first)
while True:
    cache.store(f"a{number % 5}", artifact)
    print(number, flush=True)
    number += 1
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no way to kill a process outright")
@pytest.mark.slow
def test_writers_killed_at_any_moment_leave_nothing_damaged(tmp_path: Path) -> None:
    source = stored(AotCache(tmp_path / "source"))
    cache = AotCache(tmp_path / "shared")
    paths = os.pathsep.join([HERE, *(p for p in sys.path if p)])
    rng = random.Random(1)
    writes, kills, deadline = 0, 0, time.monotonic() + 60
    while (writes < 200 or kills < 12) and time.monotonic() < deadline:
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", _WRITER, str(source), str(cache.root), str(i)],
                stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": paths},
            )
            for i in range(4)
        ]  # fmt: skip
        for writer in writers:
            assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
        for writer in writers:
            time.sleep(rng.uniform(0.02, 0.12))
            writer.send_signal(signal.SIGKILL)
        for writer in writers:
            assert writer.stdout is not None
            writes += len(writer.stdout.read().splitlines())
            writer.wait()
            kills += 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not cache.verify()
            for i in range(5):
                assert cache.load(f"a{i}") is not None or not cache.path(f"a{i}").exists()
    assert writes >= 200 and kills >= 12
    artifact = Artifact.from_parts(container.read(source).parts)
    assert cache.store("a0", artifact)  # and what they left half-written is swept away
    assert not [p for p in cache.root.iterdir() if p.name.startswith(".new-")]
