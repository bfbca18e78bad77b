"""Kernels of the table of cases as object code for machines other than this one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from cases import cases

from rlx.backends.cpu.backend import CpuBackend
from rlx.backends.cpu.kernels.spec import KernelSpec, unit_of
from rlx.backends.cpu.lowering import Context, lower_graph
from rlx.ir.binding import DimBinding, bind_graph
from rlx.llvm.target import Target
from rlx.passes.pipeline import run_pipeline
from rlx.passes.plan import plan

# e_machine of the ELF header
MACHINES = {"x86-64": 62, "sapphirerapids": 62, "aarch64": 183, "neoverse-n1": 183}


def specs_for(target: Target) -> dict[KernelSpec, str]:
    """Distinct kernels that the cases need on a target, each with a case that needs it."""
    backend = CpuBackend(target)
    found: dict[KernelSpec, str] = {}
    for case in cases():
        graph = case.graph()
        result = run_pipeline(graph, has_native=backend.has_native, lower=backend.rewrite_template)
        binding = DimBinding().set_live("n", 67)
        bound = backend.rewrite_variant(bind_graph(result.graph, binding))
        lir = plan(bound, prepare=result.prepare, scratch=backend.scratch)
        for step in lower_graph(Context(lir, target, 2)):
            if step.spec is not None:
                found.setdefault(step.spec, case.id)
    return found


def one_of_each(specs: dict[KernelSpec, str]) -> dict[KernelSpec, str]:
    """A kernel of each class for each op and first option, mostly a dtype, of the table."""
    found: dict[tuple[object, ...], tuple[KernelSpec, str]] = {}
    for spec, case in specs.items():
        found.setdefault((type(spec), *case.split("-")[:2]), (spec, case))
    return dict(found.values())


@pytest.mark.parametrize(
    "name",
    [n if n == "neoverse-n1" else pytest.param(n, marks=pytest.mark.nightly) for n in MACHINES],
)
def test_each_kernel_and_op_becomes_an_object_of_the_target(name: str) -> None:
    specs = specs_for(Target.named(name))
    chosen = one_of_each(specs)
    assert {type(spec) for spec in chosen} == {type(spec) for spec in specs}
    assert len(chosen) > 150, "the table must reach the families"
    compile_and_check(name, chosen)


@pytest.mark.nightly
@pytest.mark.parametrize("name", MACHINES)
def test_every_kernel_becomes_an_object_of_the_target(name: str) -> None:
    specs = specs_for(Target.named(name))
    assert len(specs) > 300, "the table must reach the families"
    compile_and_check(name, specs)


def compile_and_check(name: str, specs: dict[KernelSpec, str]) -> None:
    target = Target.named(name)
    for spec, case in specs.items():
        data = unit_of(spec, target).compile()
        assert data[:4] == b"\x7fELF", case
        machine = int.from_bytes(data[18:20], "little")
        assert machine == MACHINES[name], f"{case}: machine {machine}"
