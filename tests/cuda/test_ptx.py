"""Every kernel of the parity table as PTX, assembled where `ptxas` is installed; no GPU needed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "parity"))
from cases import Case, cases
from fake_driver import FakeDriver, installed, make_stand_in

import rlx
from rlx.backends.cuda.backend import CudaBackend
from rlx.backends.cuda.builder import target_for
from rlx.backends.cuda.kernel import GpuKernel
from rlx.backends.cuda.lowering import lower_graph
from rlx.backends.cuda.ptx import GpuModule
from rlx.llvm.jit import Unit
from rlx.runtime.template import make_template
from rlx.specialize.options import CompileOptions

OPS = sorted({case.op for case in cases()})
PTXAS = shutil.which("ptxas")
needs_ptxas = pytest.mark.skipif(PTXAS is None, reason="ptxas is not installed")


@pytest.fixture(scope="module")
def backend() -> Iterator[CudaBackend]:
    with installed(FakeDriver()):
        yield make_stand_in()


def kernels_of(case: Case, backend: CudaBackend, cpu: str = "sm_90a") -> list[GpuKernel]:
    """The kernels of a case at its largest size, in order."""
    template = make_template(case.graph(), CompileOptions(), backend)
    plan = template.plan(dict.fromkeys(template.open_symbols, case.sizes[-1]))
    launches = lower_graph(plan, cpu)
    return [x.kernel for x in launches if x.kernel is not None]


@cache
def ptx_of(kernel: GpuKernel, capability: tuple[int, int] = (9, 0)) -> str:
    module = GpuModule(target_for(capability))
    kernel.emit(module)
    return Unit(module.text(), module.target).assembly()


def assemble(ptx: str, arch: str) -> str:
    """What ptxas says of the PTX."""
    command = [PTXAS or "", f"-arch={arch}", "-v", "-o", "/dev/null", "-"]
    done = subprocess.run(command, input=ptx, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


@needs_ptxas
@pytest.mark.parametrize("op", OPS)
def test_kernels_are_assembled_without_spills(op: str, backend: CudaBackend) -> None:
    step = 5 if op == "attention" else 1  # its cases differ little, and ptxas takes seconds
    chosen = [case for case in cases() if case.op == op][::step]
    found = [k for case in chosen for k in kernels_of(case, backend)]
    for kernel in dict.fromkeys(found):
        said = assemble(ptx_of(kernel), "sm_90a")
        numbers = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores", said)
        assert numbers is not None
        most = 8 if kernel.label == "scatter" else 0  # around the call of a 64-bit division
        if kernel.label.startswith("dequant("):  # a table of scales that is indexed
            assert int(numbers[1]) <= 256 and not int(numbers[2]), kernel.label
            continue
        assert max(map(int, numbers.groups())) <= most, kernel.label


def kernel_of(name: str, backend: CudaBackend) -> GpuKernel:
    case = next(c for c in cases() if c.id == name)
    return kernels_of(case, backend)[0]


@needs_ptxas
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_kernels_are_made_for_all_supported_gpus(
    capability: tuple[int, int], backend: CudaBackend
) -> None:
    cpu = target_for(capability).cpu
    for name in (
        "softmax-f32-axis-1", "add-bf16", "gather-f32", "matmul-f16", "matmul-bf16-weight",
        "attention-f16-causal-0.0", "sample-plain", "dequant_matmul-Q8_0", "rope-f32",
    ):  # fmt: skip
        named = [c for c in cases() if c.id == name or c.id.startswith(name)]
        for kernel in kernels_of(named[0], backend, cpu):
            assemble(ptx_of(kernel, capability), cpu)


def test_memory_is_accessed_as_global(backend: CudaBackend) -> None:
    ptx = ptx_of(kernel_of("softmax-f32-axis-1", backend))
    assert ".maxntid 256" in ptx
    assert ".target sm_90a" in ptx
    loads = re.findall(r"\b(?:ld|st)\.(\w+)", ptx)
    assert set(loads) == {"param", "global"}


def test_what_rounds_twice_is_not_joined(backend: CudaBackend) -> None:
    """ptxas may join `mul` and `add`, but never `mul.rn` and `add.rn`."""
    ptx = ptx_of(kernel_of("add-f32", backend))
    assert "add.rn.f32" in ptx
    assert "add.f32" not in ptx


def test_a_warp_shares_long_rows(backend: CudaBackend) -> None:
    """Its threads combine their accumulators; a value of the row is stored by one of them."""
    ptx = ptx_of(kernel_of("sum-f32-whole", backend))
    distances = re.findall(r"shfl\.sync\.bfly\.b32 .*, (\d+), 31, -1;", ptx)
    assert distances == [d for d in ("16", "8", "4", "2", "1") for _ in range(2)]  # two halves
    assert "shfl" not in ptx_of(kernel_of("sum-f32-axes-1", backend))


def test_newer_gpus_run_the_ptx_of_older_ones() -> None:
    names = {(8, 0): "sm_80", (9, 0): "sm_90a", (8, 8): "sm_87", (12, 0): "sm_100"}
    assert {c: target_for(c).cpu for c in names} == names


def test_older_gpus_are_refused() -> None:
    with pytest.raises(rlx.UnsupportedError, match=r"too old; got compute capability 7\.5"):
        target_for((7, 5))
