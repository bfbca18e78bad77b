"""Every case of the table on both devices against the op's own reference.

The native one also makes code for a lesser CPU, where this one has more: what is tuned for wide
vectors must be right without them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from cases import Case, cases, eps, smallest_normal

from rlx.backends.registry import Device
from rlx.ir.interp import evaluate
from rlx.llvm.target import Target
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.template import make_template
from rlx.specialize.options import CompileOptions

ALL = cases()
LESSER = "x86-64-v3"
_TARGETS = ["host", LESSER] if Target.host().avx512 else ["host"]
DEVICES = [("reference", "host"), *(("cpu", name) for name in _TARGETS)]


def compare(case: Case, got: np.ndarray, wanted: np.ndarray) -> None:
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    if got.size == 0:
        return
    wide = np.complex128 if got.dtype.kind == "c" else np.float64
    if got.dtype.kind in "biu" or case.ulps == 0:
        same = np.array_equal(got, wanted, equal_nan=got.dtype.kind not in "biu")
        assert same, f"\n{got}\n{wanted}"
        return
    g, w = got.astype(wide), wanted.astype(wide)
    assert np.array_equal(np.isnan(g), np.isnan(w))
    assert np.array_equal(g[np.isinf(w)], w[np.isinf(w)])
    fine = np.isfinite(w)
    size = np.abs(w[fine])
    if case.mode == "sum":
        size = np.full_like(size, size.max(initial=0.0))
    tiny = smallest_normal(got)  # below it units in the last place stop shrinking
    allowed = case.ulps * eps(got) * np.maximum(size, tiny)
    off = np.abs(g[fine] - w[fine])
    assert (off <= allowed).all(), (
        f"off by {np.max(off / np.maximum(allowed, 1e-300)):.2f} × allowed"
    )


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
