"""Winograd's kernel against the op's reference, which sums over all taps.

Its inputs are sums of four and its filters of nine numbers, its results sums of nine points: their
errors are those of a sum over all taps, and the tolerance is that of `test_conv`.
"""

from __future__ import annotations

import numpy as np
import pytest
from program_support import HOST, SETUPS, TARGETS, Native, check, compare, kernels_for, reference
from test_conv import TOLERANCE, make

from rlx.backends.cpu.kernels.conv.direct import DirectConv
from rlx.backends.cpu.kernels.conv.lower_conv import pack_conv
from rlx.backends.cpu.kernels.conv.winograd import WinogradConv
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph
from rlx.ir.interp import evaluate
from rlx.passes.prepare import split_prepare


def runs_winograd(graph, target=HOST):
    return any(isinstance(n.spec, WinogradConv) for n in Native(graph, target, 1, {}).launches)


SHAPES = [
    ((2, 16, 20, 40), (16, 16, 3, 3), {"padding": (1,)}),
    ((1, 9, 19, 33), (21, 9, 3, 3), {"padding": (1,)}),  # odd sizes, a last tile of five filters
    ((1, 8, 19, 35), (18, 8, 3, 3), {}),  # blocks that begin inside the image
    ((1, 8, 3, 64), (8, 8, 3, 3), {"padding": (0, 3, 4, 1)}),  # windows wholly outside of it
    ((3, 70, 34, 34), (8, 70, 3, 3), {"padding": (1,)}),  # several panels, cut within a row
    ((0, 8, 20, 20), (8, 8, 3, 3), {}),
]


@pytest.mark.parametrize(("x", "w", "attributes"), SHAPES)
def test_winograd(x, w, attributes):
    graph, arrays = make("conv", x, w, **attributes)
    assert runs_winograd(graph)
    compare(graph, arrays, TOLERANCE["f32"])


def test_what_it_is_not_for():
    for x, w, attributes in (
        ((1, 8, 20, 40), (8, 8, 3, 3), {"stride": (2,)}),
        ((1, 8, 20, 40), (8, 8, 3, 3), {"dilation": (1, 2)}),
        ((1, 16, 20, 40), (16, 8, 3, 3), {"groups": 2}),
        ((1, 8, 20, 40), (8, 8, 3, 5), {}),
        ((1, 4, 20, 40), (8, 4, 3, 3), {}),
        ((1, 300, 9, 40), (8, 300, 3, 3), {}),
        ((1, 8, 20, 5), (8, 8, 3, 3), {}),
    ):
        assert not runs_winograd(make("conv", x, w, **attributes)[0])
    assert not runs_winograd(make("conv", (1, 8, 9, 40), (8, 8, 3, 3), ("f64",) * 3)[0])


@pytest.mark.parametrize("dtypes", [("f16",) * 3, ("bf16",) * 3, ("f16", "f32", "bf16")])
def test_element_types(dtypes):
    graph, arrays = make("conv", (2, 8, 9, 37), (8, 8, 3, 3), dtypes, padding=(1,))
    assert runs_winograd(graph)
    tolerance = TOLERANCE[graph.outputs[0].shape.dtype.name]
    compare(graph, arrays, tolerance, setups=SETUPS[1::3])


def test_dynamic_dims():
    dims, bounds = ("batch", 8, "height", "width"), {"batch": 4, "height": 40, "width": 40}
    for batch, height, width in ((1, 9, 12), (3, 1, 30), (4, 40, 40), (2, 2, 1)):
        sizes = {"batch": batch, "height": height, "width": width}
        graph, arrays = make("conv", dims, (12, 8, 3, 3), padding=(1,), sizes=sizes)
        compare(graph, arrays, TOLERANCE["f32"], sizes, setups=SETUPS[1::3], bounds=bounds)


def test_infinities_nan_and_overflow_are_those_of_the_reference():
    """Only these images are computed again, and they are computed as a sum over all taps."""
    graph, arrays = make("conv", (4, 8, 18, 33), (8, 8, 3, 3), padding=1, bias=False)
    arrays["x"][0, 1, 2, 3] = np.nan
    arrays["x"][0, 2, 5, 19] = np.inf
    arrays["x"][2, :, 4:6, 8:10] = 2e38  # sums of two of them are infinite
    arrays["w"] *= np.float32(2**-8)
    compare(graph, arrays, TOLERANCE["f32"], setups=SETUPS[1::3])
    for target in TARGETS:
        native = Native(graph, target, 2, {})
        mixed = native.run(arrays)[0]
        plain = {**arrays, "x": np.where(np.isfinite(arrays["x"]), arrays["x"], 0)}
        np.testing.assert_array_equal(native.run(plain)[0][[1, 3]], mixed[[1, 3]])
        assert np.isfinite(mixed[2]).all()


def test_an_infinite_filter():
    graph, arrays = make("conv", (1, 8, 18, 33), (8, 8, 3, 3), padding=1)
    arrays["w"][1, 0, 0, 0] = np.inf  # meets zeros of the padding: NaN there
    compare(graph, arrays, TOLERANCE["f32"], setups=SETUPS[1::3])


def test_an_image_alone_has_the_bits_it_has_in_a_batch():
    _, arrays = make("conv", (5, 8, 30, 31), (24, 8, 3, 3), padding=1)
    for target in TARGETS:
        found = []
        for images, workers in (([0, 1, 2, 3, 4], 1), ([0, 1, 2, 3, 4], 3), ([3], 2), ([3], 1)):
            x = arrays["x"][images]
            graph, _ = make("conv", x.shape, (24, 8, 3, 3), padding=1)
            out = Native(graph, target, workers, {}).run({**arrays, "x": x})[0]
            found.append(out[images.index(3)].view(np.int32))
        for other in found[1:]:
            np.testing.assert_array_equal(other, found[0])


def packed_or_not(source, dtype):
    """A convolution whose filters are an input or a param, and an activation behind it."""
    g = Graph()
    x, w = g.input("x", (2, 8, 9, 37), dtype), getattr(g, source)("w", (12, 8, 3, 3), dtype)
    return g.set_outputs(g.silu(g.conv(x, w, g.param("b", (12,), dtype), padding=(1,))))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_packed_filters(dtype):
    """Constant filters are transformed once, to what every run makes of those that are inputs."""
    rng = np.random.default_rng(3)
    shapes = {"x": (2, 8, 9, 37), "w": (12, 8, 3, 3), "b": (12,)}
    arrays = {n: rng.standard_normal(s).astype(DType.of(dtype).numpy) for n, s in shapes.items()}
    for target in TARGETS:
        plain = packed_or_not("input", dtype)
        [want] = reference(plain, arrays)
        main, prepared = split_prepare(pack_conv(packed_or_not("param", dtype), target))
        made = evaluate(prepared, {"w": arrays["w"]})
        packed = dict(zip(prepared.output_names, made, strict=True))
        given = {k: v for k, v in (arrays | packed).items() if k in main._sources}
        check(evaluate(main, given)[0], want, TOLERANCE[dtype])
        native = Native(main, target, 2, {})
        specs = [type(launch.spec) for launch in native.launches]
        assert specs == [WinogradConv, DirectConv]
        got = native.run(given)[0]
        check(got, want, TOLERANCE[dtype])
        if dtype == "f32":  # the activation is no part of the other kernel; it rounds twice
            unpacked = Native(plain, target, 2, {}).run(arrays)[0]
            np.testing.assert_allclose(got, unpacked, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["aarch64", "x86-64"])
def test_other_targets(name):
    assert kernels_for(make("conv", (1, 8, 9, 40), (8, 8, 3, 3))[0], name)
