"""Native pooling and resizing against the ops' references."""

from __future__ import annotations

import numpy as np
import pytest
from program_support import SETUPS, compare, kernels_for

from rlx.ir.dtype import DType
from rlx.ir.graph import Graph

POOLS = [
    ((2, 3, 9, 11), {"kernel": (2,)}),
    ((1, 2, 12, 40), {"kernel": (3,), "stride": (2,), "padding": (1,)}),
    ((1, 2, 7, 100), {"kernel": (2, 3), "stride": (1, 1), "padding": (1, 0, 0, 2)}),
    ((2, 3, 70), {"kernel": (4,), "stride": (3,), "padding": (2,)}),
    ((2, 5, 7, 7), {"kernel": (7,)}),  # one window: vectors lie along it
    ((1, 2, 40, 41), {"kernel": (20, 37), "stride": (5, 4), "padding": (3, 6)}),
    ((1, 2, 3, 60), {"kernel": (2, 10), "stride": (1, 6), "padding": (0, 9)}),
    ((1, 1, 1, 1), {"kernel": (1,)}),
    ((0, 2, 4, 4), {"kernel": (2,)}),
]


def graph_of(kind, shape, dtype, attributes):
    g = Graph()
    g.set_outputs(getattr(g, kind)(g.input("x", shape, dtype), **attributes))
    return g


def values(shape, dtype, seed=0):
    kind = DType.of(dtype)
    rng = np.random.default_rng(seed)
    if kind.is_integer:
        info = np.iinfo(kind.numpy)
        return rng.integers(info.min, info.max, shape, kind.numpy, endpoint=True)
    return rng.standard_normal(shape).astype(kind.numpy)


@pytest.mark.parametrize(("shape", "attributes"), POOLS)
@pytest.mark.parametrize("kind", ["max_pool", "avg_pool"])
def test_pool(kind, shape, attributes):
    # a maximum is exact; a mean of up to 740 elements is a sum off by some √740·ε of a typical one
    tolerance = 0 if kind == "max_pool" else 2e-6
    g = graph_of(kind, shape, "f32", attributes)
    compare(g, {"x": values(shape, "f32")}, tolerance)


@pytest.mark.parametrize(("shape", "attributes"), POOLS)
def test_mean_of_what_exists(shape, attributes):
    g = graph_of("avg_pool", shape, "f32", attributes | {"count_include_pad": False})
    compare(g, {"x": values(shape, "f32")}, 2e-6, setups=SETUPS[1::3])


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f64", "i8", "u8", "i16", "i32", "u32", "i64",
                                   "u64"])  # fmt: skip
@pytest.mark.parametrize("kernel", [2, 9])
def test_maximum_of_every_type(dtype, kernel):
    shape = (2, 3, 10, 19)
    g = graph_of("max_pool", shape, dtype, {"kernel": (kernel,), "padding": (1,)})
    compare(g, {"x": values(shape, dtype)}, 0, setups=SETUPS[1::3])


@pytest.mark.parametrize(("dtype", "tolerance"), [("f16", 2**-10), ("bf16", 2**-7), ("f64", 1e-14)])
def test_mean_of_other_types(dtype, tolerance):
    shape = (2, 3, 10, 19)
    g = graph_of("avg_pool", shape, dtype, {"kernel": (3,), "padding": (1,)})
    compare(g, {"x": values(shape, dtype)}, tolerance, setups=SETUPS[1::3])


def test_nan_wins_and_infinities_stay():
    x = values((1, 2, 8, 40), "f32")
    x[0, 0, 3, 5], x[0, 1, 7, 39], x[0, 1, 0, 0] = np.nan, np.inf, -np.inf
    x[0, 1, :2, 2:4] = -np.inf  # a window of nothing else
    for kernel in (2, 8):
        for kind in ("max_pool", "avg_pool"):
            g = graph_of(kind, x.shape, "f32", {"kernel": (kernel,)})
            compare(g, {"x": x}, 1e-6, setups=SETUPS[1::3])


def test_dynamic_dims():
    sizes = {"batch": 2, "height": 9, "width": 30}
    for kind in ("max_pool", "avg_pool"):
        attributes = {"kernel": (3,), "stride": (2,), "padding": (1,)}
        g = graph_of(kind, ("batch", 3, "height", "width"), "f32", attributes)
        bounds = {"batch": 4, "height": 20, "width": 40}
        compare(g, {"x": values((2, 3, 9, 30), "f32")}, 1e-6, sizes, SETUPS[1::3], bounds)


RESIZES = [
    ((2, 3, 5, 7), (9, 16)),
    ((1, 2, 20, 40), (7, 300)),
    ((1, 2, 20, 600), (20, 513)),
    ((2, 3, 11), (23,)),
    ((2, 3, 11), (1,)),
    ((1, 1, 1, 1), (4, 5)),
    ((1, 2, 4, 4), (0, 3)),
    ((0, 2, 4, 4), (3, 3)),
]


@pytest.mark.parametrize(("shape", "sizes"), RESIZES)
@pytest.mark.parametrize("corners", [False, True])
def test_linear(shape, sizes, corners):
    # Positions are found in f64 as in the reference; two mixtures round four times each.
    attributes = {"sizes": sizes, "mode": "linear", "align_corners": corners}
    compare(graph_of("resize", shape, "f32", attributes), {"x": values(shape, "f32")}, 5e-7)


@pytest.mark.parametrize(("shape", "sizes"), RESIZES)
def test_nearest(shape, sizes):
    g = graph_of("resize", shape, "f32", {"sizes": sizes})
    compare(g, {"x": values(shape, "f32")}, 0)


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f64", "i8", "u16", "i32", "u64"])
def test_nearest_of_every_type(dtype):
    g = graph_of("resize", (1, 2, 5, 9), dtype, {"sizes": (8, 37)})
    compare(g, {"x": values((1, 2, 5, 9), dtype)}, 0, setups=SETUPS[1::3])


def test_nearest_moves_bits():
    parts = values((2, 1, 2, 9), "f32")
    for dtype, array in (("bool", parts[0] > 0), ("c64", parts[0] + 1j * parts[1])):
        g = graph_of("resize", (1, 2, 9), dtype, {"sizes": (20,)})
        compare(g, {"x": array.astype(DType.of(dtype).numpy)}, 0, setups=SETUPS[1::3])


@pytest.mark.parametrize(("dtype", "tolerance"), [("f16", 2**-10), ("bf16", 2**-7), ("f64", 1e-15)])
def test_linear_of_other_types(dtype, tolerance):
    g = graph_of("resize", (1, 2, 5, 9), dtype, {"sizes": (8, 37), "mode": "linear"})
    compare(g, {"x": values((1, 2, 5, 9), dtype)}, tolerance, setups=SETUPS[1::3])


def test_dynamic_resize():
    sizes = {"batch": 2, "height": 6, "width": 10}
    attributes = {"sizes": ("height", 25), "mode": "linear"}
    g = graph_of("resize", ("batch", 3, 5, "width"), "f32", attributes)
    compare(g, {"x": values((2, 3, 5, 10), "f32")}, 5e-7, sizes, SETUPS[1::3])


@pytest.mark.parametrize("name", ["aarch64", "x86-64"])
def test_other_targets(name):
    for kind, attributes in (
        ("max_pool", {"kernel": (3,), "stride": (2,)}),
        ("avg_pool", {"kernel": (9,), "count_include_pad": False}),
        ("resize", {"sizes": (4, 4), "mode": "linear"}),
        ("resize", {"sizes": (4, 4)}),
    ):
        for dtype in ("f32", "f16"):
            assert kernels_for(graph_of(kind, (1, 2, 9, 9), dtype, attributes), name)
