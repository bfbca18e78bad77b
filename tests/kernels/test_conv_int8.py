"""Convolutions of 8-bit integers: sums are exact, so every comparison is of equal numbers."""

from __future__ import annotations

import numpy as np
import pytest
from program_support import TARGETS, Native, kernels_for, reference

from rlx.backends.cpu.kernels.conv.channels_last_int8 import ChannelsLastInt8
from rlx.backends.cpu.kernels.conv.choose_int8 import decompose_unsuited
from rlx.backends.cpu.kernels.conv.choose_layout import choose_layout
from rlx.backends.cpu.kernels.conv.depthwise_int8 import DepthwiseInt8
from rlx.errors import AttributeValueError, DTypeError, ShapeError
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph
from rlx.ir.interp import evaluate
from rlx.llvm.target import Target
from rlx.passes.prepare import split_prepare


def make(
    x,
    w,
    types=("u8", "u8"),
    bias=True,
    seed=0,
    integer=False,
    activation="none",
    added=None,
    **geometry,
):
    """A graph of one convolution with weights as params, and its operands."""
    g, rng = Graph(), np.random.default_rng(seed)
    terms = int(np.prod(w[1:]))

    def whole(dtype, *dims):
        info = np.iinfo(DType.of(dtype).numpy)
        return rng.integers(info.min, info.max, dims, endpoint=True).astype(info.dtype)

    arrays = {"x": whole(types[0], *x), "w": whole("i8", *w), "x_zero": whole(types[0])}
    operands = [g.input("x", x, types[0]), g.param("w", w, "i8"), g.param("x_zero", (), types[0])]
    if integer:
        return g.set_outputs(g.conv_integer(*operands, **geometry)), arrays
    scale = rng.uniform(0.5, 1.0, w[0]) * 60 / (np.sqrt(terms) * 100 * 74)
    arrays |= {"scale": scale.astype(np.float32), "y_zero": whole(types[1])}
    operands += [g.param("scale", (w[0],)), g.param("y_zero", (), types[1])]
    if bias:
        arrays["bias"] = rng.integers(-5000, 5000, w[0]).astype(np.int32)
        operands.append(g.param("bias", (w[0],), "i32"))
    if added is not None:  # types of the residual and of the sum
        shape = g.qlinear_conv(*operands, **geometry).shape
        arrays["residual"], arrays["r_zero"] = whole(added[0], *shape.static_dims), whole(added[0])
        arrays["factors"] = np.float32([0.021, 0.034, 0.047])
        arrays["sum_zero"] = whole(added[1])
        operands += [
            g.input("residual", shape.dims, added[0]), g.param("r_zero", (), added[0]),
            g.param("factors", (3,)), g.param("sum_zero", (), added[1]),
        ]  # fmt: skip
    return g.set_outputs(g.qlinear_conv(*operands, activation=activation, **geometry)), arrays


def chosen(graph, target):
    """The graph with layouts chosen, split into what runs and what is prepared."""
    return split_prepare(choose_layout(decompose_unsuited(graph, target), target))


def prepared_arrays(main, prepared, arrays):
    """The operands of `main`."""
    made = evaluate(prepared, {k: v for k, v in arrays.items() if k in prepared._sources})
    packed = dict(zip(prepared.output_names, made, strict=True))
    return {k: v for k, v in (arrays | packed).items() if k in main._sources}


def uses_kernel(native):
    kinds = (ChannelsLastInt8, DepthwiseInt8)
    return any(isinstance(launch.spec, kinds) for launch in native.launches)


CASES = [
    ((2, 8, 9, 11), (20, 8, 3, 3), {"padding": (1,)}),
    ((2, 16, 9, 11), (33, 16, 3, 3), {"padding": (1,), "stride": (2,), "types": ("i8", "i8"),
                                      "activation": "relu"}),
    ((1, 3, 30, 31), (64, 3, 7, 7), {"padding": (3,), "stride": (2,)}),
    ((1, 5, 13, 12), (7, 5, 3, 2), {"types": ("i8", "u8"), "bias": False}),
    ((1, 64, 14, 14), (96, 64, 1, 1), {"types": ("i8", "u8")}),
    ((1, 512, 7, 7), (40, 512, 3, 3), {"padding": (1,), "activation": "relu"}),  # two chunks
    ((1, 32, 17, 17), (64, 8, 3, 3), {"padding": (1, 2, 2, 0), "dilation": (2,), "groups": 4}),
    ((2, 8, 41), (12, 8, 5), {"padding": (2,), "stride": (3,), "types": ("u8", "i8")}),
    ((1, 12, 1, 200), (10, 12, 1, 1), {"integer": True, "types": ("i8", "i8")}),
    ((2, 4, 5, 5), (4, 4, 3, 3), {"integer": True, "padding": (4,)}),  # windows beside the image
    ((1, 6, 1, 1), (5, 6, 1, 1), {}),
    ((0, 8, 5, 5), (4, 8, 3, 3), {}),
    # a residual, whole vectors and masked ones
    ((2, 16, 9, 11), (32, 16, 3, 3), {"padding": (1,), "added": ("u8", "u8")}),
    ((1, 64, 14, 13), (96, 64, 1, 1), {"types": ("i8", "i8"), "added": ("i8", "i8"),
                                       "activation": "relu"}),
    ((1, 512, 7, 7), (40, 512, 3, 3), {"padding": (1,), "added": ("i8", "u8")}),
    ((1, 8, 6, 7), (21, 8, 1, 1), {"types": ("u8", "i8"), "added": ("u8", "i8"),
                                   "activation": "relu"}),
    # depthwise: one block of each width, blocks that share channels, both ends of every row
    ((2, 64, 9, 11), (64, 1, 3, 3), {"padding": (1,), "groups": 64}),
    ((2, 72, 9, 12), (72, 1, 3, 3), {"padding": (1,), "groups": 72, "types": ("i8", "i8"),
                                     "activation": "relu"}),
    ((1, 16, 17, 18), (16, 1, 3, 3), {"padding": (1,), "stride": (2,), "groups": 16,
                                      "types": ("i8", "u8")}),
    ((1, 40, 14, 14), (40, 1, 5, 5), {"padding": (2,), "groups": 40, "bias": False}),
    ((1, 120, 13, 14), (120, 1, 5, 5), {"padding": (2, 2, 1, 0), "stride": (2,), "groups": 120,
                                        "types": ("u8", "i8"), "activation": "relu"}),
    ((1, 33, 15, 16), (33, 1, 3, 3), {"padding": (2,), "dilation": (2,), "groups": 33}),
    ((2, 20, 41), (20, 1, 7), {"padding": (3,), "groups": 20}),
    ((1, 64, 2, 3), (64, 1, 3, 3), {"padding": (3,), "groups": 64}),  # windows beside the image
]  # fmt: skip


@pytest.mark.parametrize(("x", "w", "options"), CASES)
def test_results_are_those_of_the_reference(x, w, options):
    for target in TARGETS:
        graph, arrays = make(x, w, **options)
        [want] = reference(graph, arrays)
        if want.dtype.itemsize == 1 and want.size:
            assert len(np.unique(want)) > 4  # not all clamped
        main, prepared = chosen(graph, target)
        given = prepared_arrays(main, prepared, arrays)
        np.testing.assert_array_equal(evaluate(main, given)[0], want)
        for workers in (1, 3):
            native = Native(main, target, workers, {})
            assert uses_kernel(native)
            np.testing.assert_array_equal(native.run(given)[0], want)


@pytest.mark.parametrize(
    "factors",
    [(2e-20, 3e-20, 4e-20), (3e37, 1e37, 2e37), (1e-3, 2e37, 1e-2), (0.02, np.nan, 0.05),
     (0.1, 0.3, 0.0), (0.013, 0.0999999, 0.1), (1 / 3, 1 / 7, 1.9999999)],
)  # fmt: skip
def test_sums_with_a_residual_are_divided_exactly(factors):
    for target in TARGETS:
        graph, arrays = make((1, 32, 20, 21), (64, 32, 1, 1), added=("i8", "u8"))
        arrays["factors"] = np.float32(factors)
        with np.errstate(all="ignore"):
            [want] = reference(graph, arrays)
        main, prepared = chosen(graph, target)
        given = prepared_arrays(main, prepared, arrays)
        np.testing.assert_array_equal(Native(main, target, 2, {}).run(given)[0], want)


@pytest.mark.parametrize("groups", [1, 2])
def test_the_reference_against_a_loop(groups):
    graph, arrays = make((1, 4, 5, 6), (4, 4 // groups, 2, 3), padding=(1, 0, 0, 2), groups=groups)
    [found] = reference(graph, arrays)
    x = np.pad(arrays["x"].astype(int) - int(arrays["x_zero"]), ((0, 0), (0, 0), (1, 0), (0, 2)))
    w, per = arrays["w"].astype(int), 4 // groups
    for o in range(4):
        first = o // per * per
        for i in range(5):
            for j in range(6):
                part = x[0, first : first + per, i : i + 2, j : j + 3]
                total = int((part * w[o]).sum()) + int(arrays["bias"][o])
                scaled = np.float32(total) * arrays["scale"][o]
                code = int(np.rint(scaled)) + int(arrays["y_zero"])
                assert found[0, o, i, j] == min(max(code, 0), 255)


def test_what_has_no_kernel_is_computed_with_floats():
    """Depthwise of few channels; groups of channels that are no whole words."""
    for x, w, groups in (((1, 8, 9, 9), (8, 1, 3, 3), 8), ((1, 6, 9, 9), (4, 3, 3, 3), 2)):
        for target in TARGETS:
            graph, arrays = make(x, w, groups=groups, padding=(1,))
            [want] = reference(graph, arrays)
            main, _ = chosen(graph, target)
            names = {n.op.name for n in main.nodes}
            assert "conv_channels_last_int8" not in names and "qlinear_conv" not in names
            _, arrays = make(x, w, groups=groups, padding=(1,))
            again, _ = make(x, w, groups=groups, padding=(1,))
            floats = decompose_unsuited(again, target)
            np.testing.assert_array_equal(evaluate(floats, arrays)[0], want)


def test_a_scale_that_is_no_number_gives_the_zero_point():
    graph, arrays = make((1, 8, 6, 6), (16, 8, 1, 1))
    arrays["scale"][3:5] = np.nan, np.inf
    [want] = reference(graph, arrays)
    assert (want[0, 3] == arrays["y_zero"]).all()
    for target in TARGETS:
        main, prepared = chosen(graph.copy(), target)
        given = prepared_arrays(main, prepared, arrays)
        np.testing.assert_array_equal(Native(main, target, 2, {}).run(given)[0], want)


def test_errors_say_what_was_expected():
    g = Graph()
    x, w, z = g.input("x", (1, 4, 5, 5), "u8"), g.input("w", (3, 4, 1, 1), "i8"), g.input("z", ())
    with pytest.raises(DTypeError, match="x_zero has the wrong element type"):
        g.conv_integer(x, w, z)
    zeros = g.input("zs", (3,), "u8")
    with pytest.raises(ShapeError, match="x_zero is not one number"):
        g.conv_integer(x, w, zeros)
    with pytest.raises(DTypeError, match="w has the wrong element type"):
        g.conv_integer(x, g.input("w2", (3, 4, 1, 1), "u8"), g.input("z2", (), "u8"))
    one, scale = g.input("z3", (), "u8"), g.input("s", (3,))
    with pytest.raises(AttributeValueError, match="unknown activation"):
        g.qlinear_conv(x, w, one, scale, one, activation="gelu")
    with pytest.raises(ShapeError, match="scale"):
        g.qlinear_conv(x, w, one, g.input("s2", (4,)), one)


@pytest.mark.parametrize("name", ["x86-64-v2", "x86-64-v3", "x86-64-v4", "alderlake", "aarch64"])
def test_other_targets(name):
    target = Target.named(name)
    plain = make((1, 8, 9, 40), (20, 8, 3, 3), padding=(1,), added=("i8", "u8"))[0]
    one = make((1, 8, 5, 5), (3, 8, 1, 1))[0]  # one vector, masked
    depthwise = make((1, 48, 9, 9), (48, 1, 3, 3), padding=(1,), groups=48)[0]
    for graph, op in (
        (plain, "conv_channels_last_int8"), (one, "conv_channels_last_int8"),
        (depthwise, "depthwise_channels_last_int8"),
    ):  # fmt: skip
        main, _ = chosen(graph, target)
        assert op in {n.op.name for n in main.nodes}
        assert kernels_for(main, name) >= 1
