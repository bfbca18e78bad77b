"""The driver, the allocator and the registry, on a fake libcuda that keeps bytes."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from fake_driver import FakeDriver, installed

import rlx
from rlx.backends import registry
from rlx.backends.cuda import driver
from rlx.backends.cuda.driver import CudaModule, Gpu, Launch, Stream, count_devices, make_cubin
from rlx.backends.cuda.kernel import KernelLoader
from rlx.backends.cuda.memory import CudaAllocator
from rlx.llvm.jit import Unit
from rlx.support.progress import reporting


@pytest.fixture
def fake() -> Iterator[FakeDriver]:
    with installed(FakeDriver(memory=1 << 20)) as made:
        yield made
        gc.collect()


@pytest.fixture
def memory(fake: FakeDriver) -> CudaAllocator:
    return CudaAllocator(Gpu())


def test_arrays_go_in_and_out(memory: CudaAllocator) -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    x.flags.writeable = False
    buffer = memory.put(x)
    np.testing.assert_array_equal(buffer.copy_out(), x)
    row = buffer.view(16, (4,), np.float32)
    np.testing.assert_array_equal(row.copy_out(), x[1])
    other = memory.alloc((4,), np.float32)
    np.testing.assert_array_equal(other.copy_out(), 0)
    memory.copy(other, row)
    row.zero()
    np.testing.assert_array_equal(other.copy_out(), x[1])
    np.testing.assert_array_equal(buffer.copy_out(), x * [[1], [0], [1]])


def test_empty_buffers_need_no_calls(memory: CudaAllocator, fake: FakeDriver) -> None:
    buffer = memory.put(np.zeros((0, 3), np.float32))
    assert buffer.copy_out().shape == (0, 3)
    memory.copy(buffer, memory.alloc((0, 3), np.float32))
    assert not [c for c in fake.calls if c.startswith(("cuMemcpy", "cuMemset"))]


def test_memory_is_freed_with_the_last_buffer(memory: CudaAllocator, fake: FakeDriver) -> None:
    buffer = memory.alloc((100,), np.float32)
    view = buffer.view(4, (1,), np.float32)
    del buffer
    assert fake.used >= 400
    del view
    assert fake.used == 0


def test_too_little_memory_says_what_was_asked_and_what_is_free(memory: CudaAllocator) -> None:
    held = memory.alloc((1 << 19,), np.uint8)
    with pytest.raises(rlx.OutOfMemoryError) as caught:
        memory.alloc((1 << 18,), np.float32)
    assert "1,048,576 bytes requested" in str(caught.value)
    assert f"{memory.free_bytes():,} bytes" in str(caught.value)
    assert memory.free_bytes() <= (1 << 20) - held.nbytes


def test_staging_memory_is_pinned_and_freed(memory: CudaAllocator, fake: FakeDriver) -> None:
    array = memory.staging((2, 3), np.float32)
    assert array.shape == (2, 3)
    assert not array.any()
    assert len(fake.pinned) == 1
    row = array[1]
    del array
    assert len(fake.pinned) == 1
    del row
    assert not fake.pinned


def test_checks_of_runs_are_made_once_when_the_host_waits(memory: CudaAllocator) -> None:
    found: list[int] = []
    memory.check_later(memory, lambda: found.append(1))
    memory.check_later(memory, lambda: found.append(2))  # the same owner: once
    assert not found
    memory.put(np.zeros(1)).copy_out()
    memory.synchronize()
    assert found == [2]


def test_no_driver_is_said_clearly(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    driver.library.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(rlx.UnsupportedError, match="no CUDA driver on this machine"):
        Gpu()
    assert count_devices() == 0


def test_an_old_driver_is_said_clearly() -> None:
    with installed(FakeDriver(version=12020)):
        with pytest.raises(rlx.UnsupportedError, match=r"too old; got CUDA 12\.2; .*12\.7"):
            Gpu()
        assert count_devices() == 0


def test_a_driver_without_a_gpu_is_said_clearly() -> None:
    with installed(FakeDriver(gpus=0)):
        with pytest.raises(rlx.UnsupportedError, match="no CUDA-capable device"):
            Gpu()
        assert "cuda" not in rlx.available_devices()


def test_the_registry_lists_and_makes_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_backends", {})
    assert rlx.Device("cuda").name == "cuda"  # names are known without a driver
    with pytest.raises(rlx.OptionError, match="unknown device"):
        rlx.Device("cpu:1")
    with installed(FakeDriver(gpus=2)):
        assert "cuda" in rlx.available_devices()
        first, second = rlx.Device("cuda").backend, rlx.Device("cuda:1").backend
        assert rlx.Device("cuda:0").backend is first
        assert (first.allocator.device, second.allocator.device) == ("cuda:0", "cuda:1")
        with pytest.raises(rlx.OptionError, match="no such GPU; got 2; expected 0 … 1"):
            rlx.Device("cuda:2").backend.allocator.synchronize()
        facts = first.inspection().machine()
        assert facts["gpu"] == "Stand-in"
        assert facts["gpu_target"] == "sm_90a"
        assert facts["gpu_driver"] == "CUDA 13.0"
        del first, second
        registry._backends.clear()
        gc.collect()


def test_importing_rlx_loads_no_driver() -> None:
    code = (
        "import sys, ctypes; ctypes.CDLL = None; import rlx; rlx.Device('cuda'); "
        "assert not [m for m in sys.modules if m.startswith('rlx.backends.cuda')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_code_is_loaded_and_refused(fake: FakeDriver) -> None:
    gpu = Gpu()
    cubin = make_cubin(gpu, "// PTX")
    assert cubin.startswith(b"CUBIN of // PTX")
    assert CudaModule(gpu, cubin).function()
    with pytest.raises(rlx.CodegenError, match="refuses the PTX"):
        make_cubin(gpu, "not PTX")


def test_progress_counts_the_kernels_that_are_compiled(
    fake: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(Unit, "assembly", lambda unit: f"// {unit.text}")
    loader = KernelLoader(Gpu())
    units = [Unit(f"kernel {n}", loader.target) for n in range(5)]
    calls: list[tuple[str, int, int]] = []
    with reporting(lambda *call: calls.append(call)):
        first = loader.images(units[:3])
        assert loader.images(units)[:3] == first  # from disk
    stage = "compiling kernels"
    assert calls[:4] == [(stage, n, 3) for n in range(4)]
    assert calls[4:] == [(stage, n, 5) for n in (3, 4, 5)]


def test_captured_launches_run_when_the_graph_does(fake: FakeDriver, memory: CudaAllocator) -> None:
    ran: list[int] = []
    table = memory.alloc((1,), np.int64)
    function = ctypes.c_void_p(1)
    fake.functions[1] = lambda args, thread, count, shared: ran.append(thread)
    stream = Stream(memory.gpu)
    with stream.capture() as graph:
        driver.launch(stream, function, Launch(1, 256), [table.handle])
    assert not ran
    graph.launch(memory.stream)
    graph.launch(memory.stream)
    assert ran == [*range(7), *range(7)]
