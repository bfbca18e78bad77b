"""Convolutions on the stand-in: by tensor cores, tap by tap, pictures that lie anyhow."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from fake_driver import FakeDriver, installed, make_stand_in
from test_ptx import assemble, needs_ptxas, ptx_of

import rlx
from rlx.backends.cuda.backend import CudaBackend
from rlx.backends.cuda.kernels.conv import lower_conv
from rlx.backends.cuda.kernels.conv.conv_form import Windows
from rlx.backends.cuda.kernels.conv.direct_conv import DirectConv
from rlx.backends.cuda.kernels.conv.split_windows import SplitWindows
from rlx.backends.cuda.kernels.gemm.epilogue import Epilogue
from rlx.backends.cuda.kernels.gemm.group_gemm import GroupGemm, GroupTile
from rlx.ir.dtype import DType
from rlx.ir.dtype import bf16 as BF16
from rlx.ir.dtype import f16 as F16
from rlx.ir.dtype import f32 as F32
from rlx.ir.graph import Graph
from rlx.ir.interp import evaluate
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.template import make_template
from rlx.specialize.options import CompileOptions


@pytest.fixture(scope="module")
def backend() -> Iterator[CudaBackend]:
    with installed(FakeDriver()):
        yield make_stand_in()


def graph_of(x: Any, w: Any, dtype: str, bias: bool, last: bool = False, **how: Any) -> Graph:
    """`last`: pictures with their channels last."""
    g = Graph("conv")
    given = g.input("x", [x[0], *x[2:], x[1]] if last else list(x), dtype)
    if last:
        given = g.transpose(given, (0, len(x) - 1, *range(1, len(x) - 1)))
    operands = [given, g.param("w", list(w), dtype)]
    operands += [g.param("b", [w[0]], dtype)] if bias else []
    g.set_outputs(g.conv(*operands, **how))
    return g


def compiled(backend: CudaBackend, graph: Graph, **options: Any) -> CompiledGraph:
    return CompiledGraph(make_template(graph, CompileOptions(**options), backend))


def numbers(*dims: int, dtype: str, seed: int) -> Any:
    drawn = np.random.default_rng(seed).standard_normal(dims)
    return drawn.astype(DType.of(dtype).numpy)


def labels(made: CompiledGraph) -> list[str]:
    program: Any = made.executable.program  # type: ignore[attr-defined]
    return [x.label.split("(")[0] for x in program.launches]


# sizes of x and w, the options, what is launched
FORMS: dict[str, tuple[Any, Any, dict[str, Any], list[str]]] = {
    "3x3": ((2, 8, 14, 13), (24, 8, 3, 3), {"padding": (1,)}, ["split", "windows", "gemm"]),
    "strides": (
        (3, 6, 21, 18), (32, 6, 3, 5), {"stride": (2, 3), "padding": (0, 2, 2, 1)},
        ["split", "windows", "gemm"],
    ),
    "dilation": (
        (2, 16, 12, 12), (16, 16, 3, 3), {"dilation": (2,)}, ["split", "windows", "gemm"],
    ),
    "1x1": ((1, 128, 9, 9), (70, 128, 1, 1), {}, ["split", "windows", "gemm"]),
    "one axis": ((2, 16, 90), (40, 16, 7), {"padding": (3,)}, ["split", "windows", "gemm"]),
    "depthwise": ((2, 10, 9, 8), (20, 1, 3, 3), {"groups": 10, "padding": (1,)}, ["conv"]),
    "groups": ((2, 12, 7, 7), (9, 4, 3, 3), {"groups": 3, "stride": (2,)}, ["conv"]),
    "odd": ((2, 8, 14, 13), (25, 8, 3, 3), {"padding": (1,)}, ["conv"]),
    "large kernel": ((1, 2, 12, 12), (3, 2, 8, 8), {}, ["conv"]),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("last", [False, True])
def test_forms_of_f32(backend: CudaBackend, form: str, last: bool) -> None:
    """Numbers of two parts have 22 bits of a window's largest; sums of taps are in f32."""
    x, w, how, launches = FORMS[form]
    graph = graph_of(x, w, "f32", bias=form != "1x1", last=last, **how)
    made = compiled(backend, graph)
    assert labels(made) == launches
    params = {"w": numbers(*w, dtype="f32", seed=1), "b": numbers(w[0], dtype="f32", seed=2)}
    params = {node.name: params[node.name] for node in graph.sources("param")}
    made.set_params(params)
    given = numbers(*(graph.sources("input")[0].output.shape.static_dims), dtype="f32", seed=3)
    given[0] *= 1e6
    if len(given) > 1:
        given[1] *= 1e-6
    [want] = evaluate(graph, {"x": given, **params})
    taps = float(np.prod(w[1:]))
    for _ in range(2):  # counters are 0 again after a run
        [got] = made.run(x=given)
        for ours, theirs in zip(got, want, strict=True):
            biggest = np.abs(theirs).max()
            assert np.abs(ours - theirs).max() <= 2**-20 * np.sqrt(taps) * biggest


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("form", ["3x3", "strides", "depthwise", "odd"])
def test_numbers_of_16_bits(backend: CudaBackend, dtype: str, form: str) -> None:
    """They are multiplied as they are where windows have multiples of eight; then one rounding."""
    x, w, how, launches = FORMS[form]
    graph = graph_of(x, w, dtype, bias=True, **how)
    made = compiled(backend, graph)
    whole = form == "3x3"
    assert labels(made) == (["windows", "gemm"] if whole else launches)
    params = {"w": numbers(*w, dtype=dtype, seed=1), "b": numbers(w[0], dtype=dtype, seed=2)}
    made.set_params(params)
    given = numbers(*x, dtype=dtype, seed=3)
    [want] = (np.asarray(v, np.float32) for v in evaluate(graph, {"x": given, **params}))
    [got] = made.run(x=given)
    bits = 8 if dtype == "bf16" else 11
    error = np.abs(got.astype(np.float32) - want)
    assert (error <= 2.0**-bits * np.abs(want) + 1e-5 * np.abs(want).max()).all()


def test_pictures_are_taken_some_at_a_time(
    backend: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w, how, _ = FORMS["3x3"]
    monkeypatch.setattr(lower_conv, "_MOST_ROWS", 2 * 2 * 3 * 72 * 14 * 13)
    graph = graph_of((5, *x[1:]), w, "f32", bias=True, **how)
    made = compiled(backend, graph)
    assert labels(made) == ["split", *["windows", "gemm"] * 3]
    params = {"w": numbers(*w, dtype="f32", seed=1), "b": numbers(w[0], dtype="f32", seed=2)}
    given = numbers(5, *x[1:], dtype="f32", seed=3)
    [got] = made.set_params(params).run(x=given)
    [want] = evaluate(graph, {"x": given, **params})
    np.testing.assert_allclose(got, want, rtol=0, atol=2**-18 * np.abs(want).max())


def test_activations_and_the_layers_of_a_network(backend: CudaBackend) -> None:
    """What is read elsewhere too, or behind a sum, stays by itself."""
    g = Graph("network")
    x = g.input("x", [2, 8, 14, 14])
    y = g.relu(g.conv(x, g.param("w0", [16, 8, 3, 3]), g.param("b0", [16]), padding=(1,)))
    z = g.conv(y, g.param("w1", [16, 16, 3, 3]), padding=(1,))
    z = g.relu(g.add(z, y))
    z = g.silu(g.conv(z, g.param("w2", [16, 1, 3, 3]), g.param("b2", [16]), groups=16))
    both = g.conv(z, g.param("w3", [4, 16, 1, 1]))
    g.set_outputs(g.gelu(both), both)
    made = compiled(backend, g)
    assert labels(made) == [
        *["split", "windows", "gemm"] * 2, "region", "conv", "conv", "region",
    ]  # fmt: skip
    params = {n.name: numbers(*n.output.shape.static_dims, dtype="f32", seed=i) / 3
              for i, n in enumerate(g.sources("param"))}  # fmt: skip
    given = numbers(2, 8, 14, 14, dtype="f32", seed=9)
    made.set_params(params)
    for got, want in zip(made.run(x=given), evaluate(g, {"x": given, **params}), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2**-17 * np.abs(want).max())


def test_dynamic_sizes(backend: CudaBackend) -> None:
    graph = graph_of(("b", 6, "h", "w"), (16, 6, 3, 3), "f32", bias=True, padding=(1,), stride=(2,))
    made = compiled(
        backend, graph, binding={"b": rlx.UpTo(3), "h": rlx.UpTo(20), "w": rlx.UpTo(24)}
    )
    assert labels(made) == ["split", "windows", "gemm"]
    params = {"w": numbers(16, 6, 3, 3, dtype="f32", seed=1), "b": numbers(16, dtype="f32", seed=2)}
    made.set_params(params)
    for dims in ((3, 20, 24), (1, 11, 7), (2, 1, 24)):
        given = numbers(dims[0], 6, *dims[1:], dtype="f32", seed=3)
        sizes = dict(zip("bhw", dims, strict=True))
        [want] = evaluate(graph, {"x": given, **params}, sizes)
        [got] = made.run(x=given)
        np.testing.assert_allclose(got, want, rtol=0, atol=2**-18 * np.abs(want).max())


_THREE = Windows(64, (3, 3), (2, 2), (1, 1), (1, 1))


@needs_ptxas
@pytest.mark.parametrize(
    "kernel",
    [
        SplitWindows(576, False, True, False, F32, _THREE),
        SplitWindows(147, False, True, False, F32, Windows(3, (7, 7), (2, 2), (3, 3), (1, 1))),
        SplitWindows(576, False, True, False, BF16, _THREE, whole=True),
        GroupGemm(GroupTile(128, 128), F16, 1, 1728, 256, True, True, 1, Epilogue(F32),
                  pictures=True),
        GroupGemm(GroupTile(128, 64), F16, 1, 1728, 64, True, True, 2, Epilogue(F32, bias=F32),
                  pictures=True),
        GroupGemm(GroupTile(128, 128), BF16, 1, 576, 256, False, False, 1,
                  Epilogue(BF16, bias=BF16), True, pictures=True),
        DirectConv(Windows(1, (3, 3), (1, 1), (1, 1), (1, 1)), 32, 32, F32, F32, F32, F32),
        DirectConv(Windows(4, (7, 7), (1, 1), (3, 3), (1, 1)), 8, 32, BF16, BF16, None, BF16),
    ],
    ids=lambda kernel: f"{kernel.label}",
)  # fmt: skip
def test_kernels_are_assembled_without_spills(kernel: Any) -> None:
    said = assemble(ptx_of(kernel), "sm_90a")
    found = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores", said)
    assert found is not None
    assert found.groups() == ("0", "0"), said
