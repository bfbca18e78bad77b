"""Streaming stores: results that bypass the CPU caches are the same bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from region_support import graph_for, named, plain

from rlx import CompileOptions, Session
from rlx.backends.cpu.compiler import Compiler
from rlx.backends.cpu.kernels import spec
from rlx.backends.cpu.kernels.attention.rotary import RotaryEmbedding
from rlx.backends.cpu.kernels.loops import rows
from rlx.backends.cpu.kernels.loops.lower_region import NestKernel
from rlx.backends.registry import get_backend
from rlx.llvm.target import Target

BUILDS = {
    "gelu": lambda g, x: g.gelu(x),
    "softmax": lambda g, x: g.softmax(x),
    "layer_norm": lambda g, x: g.layer_norm(x, g.sum(x, axis=(0,))),
    "two results": lambda g, x: g.fused_residual_rms_norm(x, x, g.sum(x, axis=(0,))),
    "narrow": lambda g, x: g.cast(g.mul(x, x), dtype="f16"),
    "flags": lambda g, x: g.gt(x, 0.0),
    "strided": lambda g, x: g.exp(
        g.transpose(g.reshape(x, shape=(2, -1, x.shape.dims[1])), axes=(1, 0, 2))
    ),
    "columns": lambda g, x: g.softmax(x, axis=0),
    "transposed": lambda g, x: g.contiguous(g.transpose(x, axes=(1, 0))),
    "row values": lambda g, x: (g.sum(x, axis=(1,)), g.neg(x)),
}


@pytest.fixture
def caches(monkeypatch):
    """Sets the size of the caches, for launches that are lowered from now on."""

    def set_size(size: int) -> None:
        monkeypatch.setattr(rows, "_CACHES", size)
        monkeypatch.setattr(get_backend("cpu"), "_compiler", Compiler(Target.host()))

    return set_size


def results(build, arrays, in_slots, threads):
    """In slots results are aligned to cache lines; elsewhere as it happens."""
    f = Session("cpu").compile(graph_for(build, arrays), CompileOptions(threads=threads))
    if not in_slots:
        return f.run(**named(arrays))
    for name, value in named(arrays).items():
        f.slot(name)[...] = value
    f.run_slots()
    return [np.array(f.slot(name)) for name in f.output_names]


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
@pytest.mark.parametrize("size", [(6, 64), (4, 1024), (2, 77), (8, 3), (2, 20000), (0, 64)])
@pytest.mark.parametrize("in_slots", [True, False])
def test_streamed_results_are_the_same(caches, build, size, in_slots) -> None:
    x = plain("f32", *size)
    expected = results(build, [x], in_slots, 1)
    caches(0)
    for threads in (1, 2):
        got = results(build, [x], in_slots, threads)
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_array_equal(a, b)


def test_only_large_results_are_streamed(monkeypatch, caches) -> None:
    classes = (NestKernel, RotaryEmbedding)

    def streamed() -> bool:
        made: list[bool] = []
        original = spec.unit_of

        def watched(spec, target: Target):
            unit = original(spec, target)
            made.append(isinstance(spec, classes) and "!nontemporal" in unit.text)
            return unit

        monkeypatch.setattr(spec, "unit_of", watched)
        results(BUILDS["softmax"], [plain("f32", 5, 48)], True, 1)
        monkeypatch.setattr(spec, "unit_of", original)
        return any(made)

    assert not streamed()
    caches(5 * 48 * 4)
    assert streamed()


@pytest.mark.parametrize("head_dim", [64, 32, 6])
def test_streamed_rotation_is_the_same(caches, head_dim) -> None:
    x, angle = plain("f32", 1, 5, 2 * head_dim), plain("f32", 5, head_dim // 2)

    def build(g, x, angle):
        return g.rope(x, angle, angle, head_dim=head_dim)

    expected = results(build, [x, angle], True, 1)
    caches(0)
    np.testing.assert_array_equal(results(build, [x, angle], True, 2)[0], expected[0])
