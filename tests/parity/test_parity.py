"""Every case of the table on every device against the op's own reference.

The native one also makes code for a lesser CPU, where this one has more: what is tuned for wide
vectors must be right without them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from cases import Case, cases
from comparison import compare

from rlx.backends.registry import Device, available_devices
from rlx.ir.interp import evaluate
from rlx.llvm.target import Target
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.template import make_template
from rlx.specialize.options import CompileOptions

ALL = cases()
LESSER = "x86-64-v3"
_TARGETS = ["host", LESSER] if Target.host().avx512 else ["host"]
_HAS_GPU = "cuda" in available_devices()
DEVICES = [
    ("reference", "host"),
    *(("cpu", name) for name in _TARGETS),
    *([("cuda", "host")] if _HAS_GPU else []),
]


@pytest.mark.skipif(not _HAS_GPU, reason="no NVIDIA GPU: see tests/cuda/run_on_gpu.py")
def test_the_table_runs_on_the_gpu() -> None:
    assert ("cuda", "host") in DEVICES


@pytest.mark.parametrize(("device", "target"), DEVICES)
@pytest.mark.parametrize("case", ALL, ids=lambda c: c.id)
def test_parity(case: Case, device: str, target: str) -> None:
    graph = case.graph()
    backend = Device(device).backend
    if target != "host":
        backend = backend.for_target(target)
    compiled = CompiledGraph(make_template(graph, CompileOptions(), backend))
    if case.consts:
        compiled.set_params(case.consts)
    for n in case.sizes:
        data = case.data(n)
        sizes = {"n": n} if "n" in graph.symbols() else None
        wanted = evaluate(graph, {**data, **case.consts}, sizes)
        for got, want in zip(compiled.run(data, sizes=sizes), wanted, strict=True):
            compare(case, got, want)
