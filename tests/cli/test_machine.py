"""`rlx doctor`, `cache`, `list` and `pull`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_support import CONTEXT, KV_HEADS, LAYERS

from rlx.backends.cpu.backend import CpuBackend
from rlx.backends.registry import Device
from rlx.llvm.disk_cache import DiskCache
from rlx.llvm.target import Target
from rlx.support import machine

HEAD_BYTES = 8 * 2  # eight elements of f16


def test_doctor_knows_the_machine(rlx: Any, own_cache: Path) -> None:
    done = rlx("doctor", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["machine"]["native_code"] == "works"
    assert 0 < found["machine"]["free_memory_bytes"] <= found["machine"]["memory_bytes"]
    assert found["machine"]["threads"] >= 1
    assert ("avx2" in found["machine"]["features"]) == (found["machine"]["vector_bits"] >= 256)
    dot = found["machine"]["int8_dot_product"].removeprefix("AMX, one row ")
    assert dot in ("vpdpbusd", "pmaddubsw", "sdot", "as floats")
    assert found["cache"]["kernels_directory"] == str(own_cache / "kernels")
    assert "native code" in rlx("doctor").stdout


@pytest.mark.parametrize(
    ("name", "dot", "tiles"),
    [
        ("sapphirerapids", "AMX, one row vpdpbusd", True),
        ("icelake-server", "vpdpbusd", False),
        ("x86-64-v3", "pmaddubsw", False),
        ("x86-64", "as floats", False),
    ],
)
def test_doctor_names_the_instruction_of_int8_products(name: str, dot: str, tiles: bool) -> None:
    found = CpuBackend(Target.named(name)).inspection().machine()
    assert found["int8_dot_product"] == dot
    assert ("amx_int8" in found["features"]) == ("amx_bf16" in found["features"]) == tiles


def test_a_device_without_native_code() -> None:
    shown = Device.of("reference").backend.inspection()
    assert (shown.has_native_code, shown.runs_here, shown.targets()) == (False, True, ["host"])
    assert (shown.machine(), shown.roofline(1), shown.cached_kernels()) == ({}, [], [])


def test_doctor_measures_a_model(rlx: Any, tiny: Path) -> None:
    found = json.loads(rlx("doctor", tiny, "--device", "reference", "--json").stdout)["model"]
    per_token = 2 * LAYERS * KV_HEADS * HEAD_BYTES  # keys and values
    assert found["file_bytes"] == tiny.stat().st_size
    assert found["cache_bytes_per_token"] == per_token
    assert found["cache_bytes"] == per_token * CONTEXT
    assert found["needed_bytes"] == sum(
        found[k] for k in ("weight_bytes", "cache_bytes", "working_bytes")
    )
    assert found["fits"] is True
    assert found["largest_context"] == CONTEXT
    wide = json.loads(rlx("doctor", tiny, "--device", "reference", "--kv", "f32", "--json").stdout)
    assert wide["model"]["cache_bytes_per_token"] == 2 * per_token


def test_doctor_says_when_a_model_does_not_fit(
    rlx: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("doctor", tiny, "--device", "reference", "--json")
    whole = json.loads(rlx(*command).stdout)["model"]
    room = whole["weight_bytes"] + whole["working_bytes"] + 100 * whole["cache_bytes_per_token"]
    monkeypatch.setattr(machine, "free_memory", lambda: room)
    done = rlx(*command)
    found = json.loads(done.stdout)["model"]
    assert (done.exit_code, found["fits"], found["largest_context"]) == (1, False, 100)
    monkeypatch.setattr(machine, "free_memory", lambda: 1000)
    assert json.loads(rlx(*command).stdout)["model"]["largest_context"] == 0
    assert "fits " in rlx("doctor", tiny, "--device", "reference").stdout


def test_doctor_tells_of_native_code_that_fails(rlx: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no executable memory")

    monkeypatch.setattr("rlx.runtime.session.Session.compile", broken)
    done = rlx("doctor", "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["machine"]["native_code"] == "RuntimeError: no executable memory"


def test_a_container_bounds_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/meminfo": "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 800 kB\n",
        "/sys/fs/cgroup/memory.max": "512000\n",
        "/sys/fs/cgroup/memory.current": "500000\n",
        "/sys/fs/cgroup/memory.stat": "anon 1\ninactive_file 300000\n",
    }
    monkeypatch.setattr(machine, "_text", lambda path: files.get(str(path), ""))
    assert machine.total_memory() == 512000
    assert machine.free_memory() == 512000 - 500000 + 300000
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert machine.total_memory() == 1000 * 1024
    assert machine.free_memory() == 800 * 1024


@pytest.fixture
def kernels(own_cache: Path) -> list[Path]:
    """Three kernels on disk, the second one damaged."""
    disk = DiskCache(own_cache / "kernels")
    disk.root.mkdir(mode=0o700, parents=True)
    keys = [f"{i}{i}{'f' * 62}" for i in range(3)]
    for key in keys:
        disk.store(key, key.encode())
    paths = [disk.path(key) for key in keys]
    data = bytearray(paths[1].read_bytes())
    data[-1] ^= 1
    paths[1].write_bytes(data)
    return paths


def test_cache_lists_and_measures(rlx: Any, kernels: list[Path], own_cache: Path) -> None:
    found = json.loads(rlx("cache", "list", "--json").stdout)
    assert {k["path"] for k in found} == {str(p) for p in kernels}
    assert rlx("cache", "list").stdout.count("104 B") == 3  # a header of 40 and a key of 64
    size = json.loads(rlx("cache", "size", "--json").stdout)
    assert size["kernels"] == {
        "directory": str(own_cache / "kernels"), "count": 3, "bytes": 3 * 104,
    }  # fmt: skip
    assert size["models"]["count"] == 0
    assert "312 B" in rlx("cache", "size").stdout


def test_cache_finds_damage(rlx: Any, kernels: list[Path]) -> None:
    done = rlx("cache", "verify")
    assert done.exit_code == 1
    assert done.stdout == f"{kernels[1]}: damaged\n3 files checked, 1 cannot be used\n"
    fixed = rlx("cache", "verify", "--fix", "--json")
    assert fixed.exit_code == 0
    assert json.loads(fixed.stdout) == {"checked": 3, "unusable": {str(kernels[1]): "damaged"}}
    assert [p.exists() for p in kernels] == [True, False, True]
    assert rlx("cache", "verify").stdout == "2 files checked, 0 cannot be used\n"


def test_cache_clears(rlx: Any, kernels: list[Path], own_cache: Path) -> None:
    model = own_cache / "models" / "smollm2-135m"
    model.mkdir(parents=True)
    (model / "weights").write_bytes(b"12345")
    refused = rlx("cache", "clear", input="n\n")
    assert "Delete 3 kernels, artifacts and indexes (312 B)?" in refused.stderr
    assert refused.exit_code == 1 and all(p.exists() for p in kernels)
    unasked = rlx("cache", "clear")  # nobody there to answer
    assert unasked.exit_code == 1 and all(p.exists() for p in kernels)
    cleared = rlx("cache", "clear", input="y\n")
    assert cleared.stdout.endswith("deleted 3 files and 0 models, 312 B\n")
    assert not any(p.exists() for p in kernels)
    assert model.exists()
    assert rlx("cache", "clear").stdout == "deleted 0 files and 0 models, 0 B\n"
    kept = rlx("cache", "clear", "--models", input="n\n")
    assert (kept.exit_code, model.exists()) == (1, True)
    assert "deleted" not in kept.stdout
    done = rlx("cache", "clear", "--models", "--yes", "--json")
    assert json.loads(done.stdout) == {"files": 0, "models": ["smollm2-135m"], "bytes": 5}
    assert not model.exists()


def test_a_cache_that_is_off(rlx: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_CACHE", "0")
    assert "off (RLX_CACHE=0)" in rlx("cache", "size").stdout
    assert rlx("cache", "verify").stdout == "0 files checked, 0 cannot be used\n"


def test_list(rlx: Any, own_cache: Path) -> None:
    found = json.loads(rlx("list", "--json").stdout)
    default = next(m for m in found if m["default"])
    assert (default["name"], default["path"]) == ("smollm2-135m", None)
    kept = own_cache / "models" / default["name"] / "SmolLM2-135M-Instruct.Q4_1.gguf"
    kept.parent.mkdir(parents=True)
    with open(kept, "wb") as file:
        file.truncate(default["bytes"])  # what is here is known by its size
    found = json.loads(rlx("list", "--json").stdout)
    assert next(m for m in found if m["default"])["path"] == str(kept)
    assert str(kept) in rlx("list").stdout
    assert json.loads(rlx("pull", "default", "--json").stdout) == {
        "name": "default", "path": str(kept), "bytes": default["bytes"],
    }  # fmt: skip


def test_pull(rlx: Any, tiny: Path) -> None:
    assert rlx("pull", tiny).stdout == f"{tiny}\n"
    done = rlx("pull", "smollm3")
    assert done.exit_code == 1
    assert "no such model" in done.stderr
    assert "smollm2-135m" in done.stderr
