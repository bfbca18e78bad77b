"""Networks with channels last: convolutions and pooling against the reference with channels first,
for every target and several workers, in memory that is NaN beforehand."""

from __future__ import annotations

import numpy as np
import pytest
from program_support import TARGETS, Native, reference

from rlx.backends.cpu.kernels.conv.choose_layout import choose_layout
from rlx.ir.graph import Graph
from rlx.ir.interp import evaluate
from rlx.passes.prepare import split_prepare

TOLERANCE = 2e-5  # of the largest result: sums of up to 1,000 terms in another order


def network(x, *layers):
    """Two 1×1 convolutions, so that channels are last, then the layers: a convolution's filters and
    attributes, or a function of the graph and the value. A graph and its operands."""
    g, rng = Graph(), np.random.default_rng(0)
    arrays = {}
    y = g.input("x", x)
    plain = (x[1], x[1], *(1,) * (len(x) - 2)), {}
    for i, layer in enumerate([plain, plain, *layers]):
        if callable(layer):
            y = layer(g, y)
            continue
        w, attributes = layer
        values = rng.standard_normal(w) / np.sqrt(np.prod(w[1:]))
        arrays |= {f"w{i}": values.astype(np.float32), f"b{i}": rng.standard_normal(w[0])}
        arrays[f"b{i}"] = arrays[f"b{i}"].astype(np.float32)
        y = g.conv(y, g.param(f"w{i}", w), g.param(f"b{i}", (w[0],)), **attributes)
    arrays["x"] = rng.standard_normal(x).astype(np.float32)
    return g.set_outputs(y), arrays


def chosen(graph, arrays, target):
    """The graph with layouts chosen, and its operands; `graph` itself is changed."""
    main, prepared = split_prepare(choose_layout(graph, target))
    packed = evaluate(prepared, {k: v for k, v in arrays.items() if k in prepared._sources})
    given = arrays | dict(zip(prepared.output_names, packed, strict=True))
    return main, {k: v for k, v in given.items() if k in main._sources}


def check(*made):
    """The results of every target with 1 and 3 workers. Returns the names of the ops that ran."""
    [want] = reference(*network(*made))
    limit = TOLERANCE * max(np.abs(want).max(), 1)
    names = []
    for target in TARGETS:
        graph, arrays = network(*made)
        main, given = chosen(graph, arrays, target)
        for workers in (1, 3):
            [got] = Native(main, target, workers, {}).run(given)
            np.testing.assert_allclose(got, want, rtol=0, atol=limit)
        names = [n.op.name for n in main.nodes]
    return names


CONVOLUTIONS = [
    ((2, 24, 9, 11), (12, 24, 2, 2), {}),  # one vector, one masked
    ((1, 12, 13, 40), (24, 12, 2, 2), {"padding": (0, 0, 1, 1)}),
    ((1, 40, 13, 3), (33, 40, 3, 3), {"padding": (1,), "stride": (2,)}),  # rows shorter than a tile
    ((3, 16, 1, 1), (70, 16, 3, 3), {"padding": (1,)}),
    ((2, 8, 5, 6), (9, 4, 3, 2), {"padding": (2, 1, 0, 1), "dilation": (2, 1), "groups": 1}),
    ((2, 32, 7, 7), (64, 8, 3, 3), {"padding": (1,), "groups": 4}),
    ((1, 130, 10, 10), (20, 130, 3, 3), {"padding": (1,), "stride": (2, 1)}),  # two chunks
    ((2, 6, 50), (12, 6, 5), {"padding": (2,), "stride": (3,)}),
]  # fmt: skip


@pytest.mark.parametrize(("x", "w", "attributes"), CONVOLUTIONS)
def test_convolution(x, w, attributes):
    if w[1] * attributes.get("groups", 1) != x[1]:
        x = (x[0], w[1], *x[2:])
    names = check(x, (w, attributes))
    assert names.count("conv_channels_last") == 3


@pytest.mark.parametrize("channels", [3, 24, 72])
@pytest.mark.parametrize(
    ("size", "taps", "attributes"),
    [
        ((7, 7), (3, 3), {"padding": (1,)}),
        ((5, 37), (5, 5), {"padding": (2,)}),
        ((14, 15), (5, 3), {"padding": (2, 1), "stride": (2,)}),
        ((20, 40), (7, 7), {"padding": (3,), "stride": (3, 1)}),
        ((9, 30), (3, 3), {"padding": (2,), "dilation": (2,)}),
        ((4, 21), (1, 11), {"padding": (0, 5)}),  # a row of taps that is a loop
        ((1, 1), (3, 3), {"padding": (1,)}),
    ],
)
def test_depthwise(channels, size, taps, attributes):
    w = (channels, 1, *taps)
    check((2, channels, *size), (w, {**attributes, "groups": channels}))


@pytest.mark.parametrize("channels", [24, 80])
@pytest.mark.parametrize("kind", ["max", "mean", "inner"])
@pytest.mark.parametrize(
    ("kernel", "attributes"),
    [
        ((3, 3), {"stride": (2,), "padding": (1,)}),
        ((2, 2), {"stride": (1,)}),
        ((4, 9), {"stride": (4,), "padding": (2, 4)}),
    ],
)
def test_pooling(channels, kind, kernel, attributes):
    def pool(g, y):
        if kind == "max":
            return g.max_pool(y, kernel=kernel, **attributes)
        return g.avg_pool(y, kernel=kernel, count_include_pad=kind == "mean", **attributes)

    names = check((2, channels, 13, 26), pool)
    assert "pool_channels_last" in names


def test_a_pixel_has_the_same_bits_in_any_batch():
    """Tiles begin elsewhere; sums do not."""
    layers = [((40, 24, 3, 3), {"stride": (2,), "padding": (1,)}),
              ((40, 1, 5, 5), {"padding": (2,), "groups": 40}), ((20, 40, 1, 1), {})]  # fmt: skip

    def run(images, target):
        graph, arrays = network((len(images), *images.shape[1:]), *layers)
        main, given = chosen(graph, arrays | {"x": images}, target)
        return Native(main, target, 2, {}).run(given)[0]

    images = np.random.default_rng(1).standard_normal((3, 24, 11, 13)).astype(np.float32)
    for target in TARGETS:
        together = run(images, target)
        for i in range(3):
            np.testing.assert_array_equal(run(images[i : i + 1], target)[0], together[i])


def test_a_result_with_other_readers_is_computed_once():
    """x + x · mean(x): the convolution takes in no sum when something else reads its result."""

    def squeeze(g, y):
        return g.add(y, g.mul(y, g.mean(y, axis=(2, 3), keepdims=True)))

    names = check((2, 8, 6, 7), ((16, 8, 1, 1), {}), squeeze)
    assert names.count("conv_channels_last") == 3


def test_a_transposed_convolution_takes_in_scale_shift_and_activation():
    """Its kernels do not overlap, so it is a 1×1 convolution; then batch norm and an activation."""

    def transposed(g, y):
        rng = np.random.default_rng(2)

        def constant(*dims):
            return g.constant(rng.uniform(0.5, 1.5, dims).astype(np.float32))

        y = g.conv_transpose(y, constant(8, 5, 2, 3), constant(5), stride=(2, 3))
        y = g.sub(g.mul(y, constant(1, 5, 1, 1)), constant(5, 1, 1))
        return g.relu(y)

    names = check((2, 8, 6, 7), transposed)
    assert names.count("conv_channels_last") == 3
    assert not {"conv_transpose", "mul", "sub", "add", "relu"} & set(names)
