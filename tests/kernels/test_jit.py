"""Compiling once, caching safely, linking objects, refusing damaged ones."""

from __future__ import annotations

import ctypes
import os
import random
import struct
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from kernel_support import run_module

from rlx.backends.cpu.backend import MANY_NODES
from rlx.errors import CodegenError, OptionError
from rlx.llvm import jit, parallel_compile
from rlx.llvm.builder import Module, f32, f64, i32, i64, ptr, vec
from rlx.llvm.disk_cache import DiskCache
from rlx.llvm.elf import Image, ObjectFile
from rlx.llvm.jit import Unit, compile_many, compile_unit, counters
from rlx.llvm.target import Target
from rlx.runtime.session import Session

ROOT = Path(__file__).resolve().parents[2]
FOREIGN = [
    "x86-64",
    "x86-64-v3",
    "x86-64-v4",
    "sapphirerapids",
    "aarch64",
    "neoverse-n1",
    "apple-m1",
]


def adder(number: int, target: Target | None = None) -> Unit:
    """args[0][0] += number"""
    m = Module(target)
    f = m.kernel()
    p = f.arg(f["args"], 0)
    f.store(f.load(p, i64) + number, p)
    return Unit(m.text(), m.target)


def run_adder(kernel: jit.Kernel) -> int:
    cell = np.array([1], np.int64)
    args = np.array([cell.ctypes.data], np.int64)
    call = kernel.function("kernel", None, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32)
    call(args.ctypes.data, 0, 1)
    return int(cell[0])


@pytest.fixture
def fresh(tmp_path):
    jit.forget()
    counters.reset()
    yield tmp_path / "cache"
    jit.forget()


def test_each_unit_is_compiled_once(fresh):
    units = [adder(n) for n in (5, 6, 5)]
    kernels = compile_many(units, fresh)
    assert [run_adder(k) for k in kernels] == [6, 7, 6]
    assert kernels[0] is kernels[2]
    assert (counters.compilations, counters.disk_hits, counters.memory_hits) == (2, 0, 0)
    compile_unit(adder(5), fresh)
    assert counters.memory_hits == 1
    jit.forget()
    assert run_adder(compile_unit(adder(5), fresh)) == 6
    assert (counters.compilations, counters.disk_hits) == (2, 1)
    assert counters.seconds > 0


def test_key_covers_everything_that_changes_code():
    base = adder(5, Target.named("x86-64"))
    others = [
        adder(6, Target.named("x86-64")),
        adder(5, Target.named("x86-64-v3")),
        Unit(base.text, base.target, "O2"),
        Unit(base.text, base.target, "none", 1),
    ]
    assert len({base.key, *(o.key for o in others)}) == 5
    assert base.key == adder(5, Target.named("generic")).key, "another name for the same target"
    with pytest.raises(OptionError, match="optimiser"):
        Unit(base.text, base.target, "fast")
    with pytest.raises(OptionError, match="level"):
        Unit(base.text, base.target, "none", 4)


@pytest.mark.parametrize("opt", jit.OPTIMIZERS)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_every_setting_gives_the_same_answer(fresh, opt, level):
    unit = adder(41)
    assert run_adder(compile_unit(Unit(unit.text, unit.target, opt, level), fresh)) == 42


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "magic", "swap"])
def test_damaged_cache_files_are_compiled_again(fresh, damage):
    unit = adder(7)
    compile_unit(unit, fresh)
    path = DiskCache(fresh).path(unit.key)
    data = bytearray(path.read_bytes())
    if damage == "truncate":
        data = data[: len(data) // 2]
    elif damage == "flip":
        data[len(data) // 2] ^= 1
    elif damage == "empty":
        data = bytearray()
    elif damage == "magic":
        data[0] ^= 1
    else:  # a healthy file of another key
        other = adder(8)
        compile_unit(other, fresh)
        data = bytearray(DiskCache(fresh).path(other.key).read_bytes())
    path.write_bytes(data)
    jit.forget()
    counters.reset()
    with pytest.warns(RuntimeWarning, match="compiled again: damaged"):
        assert run_adder(compile_unit(unit, fresh)) == 8
    assert (counters.compilations, counters.disk_hits) == (1, 0)
    jit.forget()
    compile_unit(unit, fresh)
    assert counters.disk_hits == 1, "the file was replaced by a good one"


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no owners here")
def test_files_that_others_may_write_are_refused(fresh):
    unit = adder(9)
    compile_unit(unit, fresh)
    path = DiskCache(fresh).path(unit.key)
    path.chmod(0o666)
    jit.forget()
    with pytest.warns(RuntimeWarning, match="others may write"):
        compile_unit(unit, fresh)
    assert counters.compilations == 2
    path.unlink()
    path.symlink_to("/etc/hostname")
    jit.forget()
    with pytest.warns(RuntimeWarning, match="compiled again"):
        compile_unit(unit, fresh)
    assert not path.is_symlink()
    fresh.chmod(0o777)
    jit.forget()
    with pytest.warns(RuntimeWarning, match="not used"):
        assert run_adder(compile_unit(unit, fresh)) == 10
    if os.geteuid() == 0:
        other = fresh.parent / "other"
        other.mkdir()
        os.chown(other, 12345, 12345)
        with pytest.warns(RuntimeWarning, match="another user"):
            assert DiskCache.open(other) is None


def test_unwritable_and_disabled_caches_only_cost_time(fresh, monkeypatch):
    blocked = fresh.parent / "file"
    blocked.write_text("not a directory")
    with pytest.warns(RuntimeWarning, match="not used"):
        assert run_adder(compile_unit(adder(10), blocked)) == 11
    monkeypatch.setenv("RLX_CACHE", "0")
    jit.forget()
    compile_unit(adder(11), fresh)
    assert not fresh.exists()


def test_writers_at_the_same_time_leave_one_good_file(fresh):
    code = (
        "import sys; sys.path.insert(0, 'tests/kernels')\n"
        "from test_jit import *\n"
        f"compile_many([adder(n) for n in range(20)], Path({str(fresh)!r}))"
    )
    children = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) for _ in range(3)]
    assert [c.wait(timeout=60) for c in children] == [0, 0, 0]
    kernels = compile_many([adder(n) for n in range(20)], fresh)
    assert [run_adder(k) for k in kernels] == list(range(1, 21))
    assert counters.compilations == 0
    assert not list(fresh.rglob(".new-*"))


def test_cached_kernels_need_no_llvm(fresh):
    units = [adder(n) for n in range(3)]
    compile_many(units, fresh)
    code = (
        "import sys; sys.path.insert(0, 'tests/kernels')\n"
        "from test_jit import *\n"
        f"ks = compile_many([adder(n) for n in range(3)], Path({str(fresh)!r}))\n"
        "assert [run_adder(k) for k in ks] == [1, 2, 3]\n"
        "assert counters.disk_hits == 3\n"
        "assert not [m for m in sys.modules if m.startswith('llvmlite')]"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_worker_processes_compile_and_failures_fall_back(fresh):
    units = [adder(n) for n in range(12)]
    try:
        done: list[None] = []
        count = partial(done.append, None)
        objects = parallel_compile.compile_all(units, workers=2, on_unit=count)
        assert len(done) == len(units)
        assert [run_adder(jit.Kernel(str(n), o)) for n, o in enumerate(objects)] == list(
            range(1, 13)
        )
        assert objects == [u.compile() for u in units], "the same code wherever it was made"
        workers = list(parallel_compile._pool)
        for worker in workers:
            worker.process.kill()
        assert parallel_compile.compile_all(units, workers=2, on_unit=count) == objects
        assert len(done) == 2 * len(units), "each once, those of dead workers too"
        bad = Unit("define void @kernel() { ret i32 1 }", Target.host())
        with pytest.raises(CodegenError, match="LLVM refuses"):
            parallel_compile.compile_all([*units, bad], workers=1)
    finally:
        parallel_compile.stop()


def test_a_helper_makes_the_same_code():
    worker = parallel_compile.WorkerProcess()
    unit = adder(3)
    assert worker.compile(unit) == unit.compile()
    assert worker.compile(Unit("nonsense", Target.host())) is None
    assert worker.alive, "a unit that cannot be compiled does not end the worker"
    worker.close()
    assert not worker.alive
    assert worker.process.returncode is not None


def test_small_batches_start_no_process():
    assert parallel_compile._num_workers([adder(n) for n in range(20)]) == 0


def test_large_graphs_start_a_worker_before_their_passes(monkeypatch):
    monkeypatch.setattr(parallel_compile, "_num_cores", lambda: 2)
    device = Session("cpu").device.backend
    parallel_compile.stop()
    try:
        device.expect_graph(MANY_NODES - 1)
        assert not parallel_compile._pool
        device.expect_graph(MANY_NODES)
        (worker,) = parallel_compile._pool
        device.expect_graph(MANY_NODES)
        assert parallel_compile._pool == [worker], "one that runs is enough"
        assert worker.compile(adder(3)) == adder(3).compile()
    finally:
        parallel_compile.stop()


def test_llvm_errors_show_the_line():
    text = "define i32 @kernel(i32 %x) {\n  %y = add i64 %x, 1\n  ret i32 %y\n}"
    with pytest.raises(CodegenError, match=r"line 2: .*\n(.*\n)*.*2> +%y = add i64"):
        Unit(text, Target.host()).compile()
    undominated = """define i32 @kernel(i1 %c) {
      br i1 %c, label %a, label %b
    a:
      %x = add i32 1, 2
      br label %b
    b:
      ret i32 %x
    }"""
    with pytest.raises(CodegenError, match="dominate"):
        Unit(undominated, Target.host()).compile()


def busy_module(target: Target) -> Module:
    """Calls, tables, constants, switches, vectors: something for every kind of relocation."""
    m = Module(target)
    helper = m.function("helper", [("p", ptr), ("x", f64)], f64, internal=True)
    helper.ret(helper["x"] * 1.25 + helper.load(m.table(helper, struct.pack("<d", 0.3)), f64))
    visible = m.function("visible", [("x", i64)], i64)
    cases = {n: (lambda n=n: visible.i64(n * n + 7)) for n in range(12)}
    [picked] = visible.switch(visible["x"], cases, lambda: visible.i64(-1))
    visible.ret(picked)
    f = m.kernel()
    out = f.arg(f["args"], 0)
    n = f.arg(f["args"], 1, i64)
    f.store(f.call(visible, n), out)
    f.store(f.call(helper, out, n.to(f64)), out, 8)
    lanes = f.splat(n.to(f32), 4) * f.const([1.5, 2.5, 3.5, 4.5], vec(4, f32))
    f.store(lanes, out, 16)
    address = f.instr("ptrtoint ptr @visible to i64", i64)
    f.store(f.call_pointer(f.bitcast(address, ptr), i64, n + 1), out, 32)
    return m


def test_linking_calls_tables_and_addresses(target):
    out = np.zeros(5, np.int64)
    run_module(busy_module(target), [out, 3])
    assert out[0] == 16
    assert out[4] == 23
    assert out[1:2].view(np.float64)[0] == 3 * 1.25 + 0.3
    np.testing.assert_array_equal(out[2:4].view(np.float32), [4.5, 7.5, 10.5, 13.5])


def test_libc_symbols_of_the_allow_list_are_reachable():
    """The C library lies gigabytes away from the image, further than a call reaches."""
    m = Module()
    f = m.kernel()
    dst, src = f.arg(f["args"], 0), f.arg(f["args"], 1)
    f.intrinsic("memcpy", ptr, dst, src, f.i64(800))
    a, b = np.zeros(100, np.int64), np.arange(100, dtype=np.int64)
    run_module(m, [a, b])
    np.testing.assert_array_equal(a, b)


def test_undefined_symbols_are_refused():
    m = Module()
    f = m.kernel()
    f.store(f.intrinsic("sinf", f32, f.const(1.0, f32)), f["args"])
    with pytest.raises(CodegenError, match=r"does not exist; got sinf"):
        compile_unit(Unit(m.text(), m.target)).address()
    good = compile_unit(adder(3))
    with pytest.raises(CodegenError, match="no such function; got nothing"):
        good.address("nothing")


@pytest.mark.parametrize("name", FOREIGN)
def test_objects_for_other_machines(name):
    target = Target.named(name)
    obj = ObjectFile(Unit(busy_module(target).text(), target).compile())
    assert obj.machine.arch == target.arch
    image, symbols = obj.link(0x10_0000_0000, lambda symbol: 0x7000_0000_0000)
    assert {"kernel", "visible"} <= set(symbols)
    assert "helper" not in symbols
    assert len(image) % 4096 == 0
    if target.arch != Target.host().arch:
        with pytest.raises(CodegenError, match=f"another machine; got {target.arch}"):
            Image(obj.data)


def test_aarch64_calls_and_addresses_are_encoded(monkeypatch):
    """The linked words are decoded by the rules of the architecture manual."""
    target = Target.named("aarch64")
    m = busy_module(target)
    f = m.function("far", [])
    f.intrinsic("usleep", i32, f.i32(1))
    obj = ObjectFile(Unit(m.text(), target).compile())
    base, outside = 0x4321_0000, 0x7777_1234_5678
    image, symbols = obj.link(base, lambda symbol: outside)

    def word(address):
        return struct.unpack_from("<I", image, address - base)[0]

    def calls(start, count):
        for address in range(start, start + 4 * count, 4):
            if word(address) >> 26 in (0b100101, 0b000101):  # bl, b
                offset = word(address) & 0x3FFFFFF
                yield address + 4 * (offset - (1 << 26) * (offset >> 25))

    assert symbols["visible"] in list(calls(symbols["kernel"], 40))
    stubs = [a for a in calls(symbols["far"], 6) if word(a) == 0x58000050]  # ldr x16, #8
    assert stubs, "the call of an outside function goes through a stub"
    assert word(stubs[0] + 4) == 0xD61F0200  # br x16
    assert struct.unpack_from("<Q", image, stubs[0] - base + 8)[0] == outside
    pages = [
        a
        for a in range(symbols["kernel"], symbols["kernel"] + 160, 4)
        if word(a) & 0x9F000000 == 0x90000000
    ]
    assert pages, "constants are addressed by page"
    for address in pages:
        immediate = (word(address) >> 5 & 0x7FFFF) << 2 | word(address) >> 29 & 3
        immediate -= (1 << 21) * (immediate >> 20)
        page = ((address >> 12) + immediate) << 12
        assert base <= page < base + len(image)


def test_damaged_objects_never_crash():
    """Every damage raises a CodegenError, or leaves a linkable object (which is not run)."""
    data = Unit(busy_module(Target.host()).text(), Target.host()).compile()
    rng = random.Random(11)
    refused = 0
    for trial in range(1500):
        damaged = bytearray(data)
        if trial % 3 == 0:
            damaged = damaged[: rng.randrange(len(data))]
        else:
            for _ in range(rng.randrange(1, 6)):
                damaged[rng.randrange(len(damaged))] = rng.choice([0, 255, rng.randrange(256)])
        try:
            ObjectFile(bytes(damaged)).link(1 << 32, lambda symbol: 0)
        except CodegenError:
            refused += 1
    assert refused > 500
    for nonsense in (b"", b"\x7fELF", os.urandom(4096)):
        with pytest.raises(CodegenError, match="not a usable object"):
            Image(nonsense)


def test_pages_are_never_writable_and_executable():
    kernel = compile_unit(adder(77))
    address = kernel.address()
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no /proc")
    for line in maps.read_text().splitlines():
        span, mode = line.split()[:2]
        low, high = (int(x, 16) for x in span.split("-"))
        if low <= address < high:
            assert mode.startswith("r-x")
            return
    pytest.fail("the code is not mapped")


def test_images_are_unmapped_when_nobody_holds_them():
    before = Path("/proc/self/maps").read_text().count("\n")
    data = adder(5).compile()
    for _ in range(200):
        image = Image(data)
        assert image.address("kernel")
    del image
    assert Path("/proc/self/maps").read_text().count("\n") < before + 20


def test_assembly_is_readable():
    text = adder(12345).assembly()
    assert "kernel:" in text
    assert "12345" in text


def test_no_warning_in_a_normal_compile(fresh):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compile_unit(adder(1), fresh)
