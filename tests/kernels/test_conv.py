"""Native convolutions against the ops' references.

Tolerances are shares of the largest result. A sum of n products in f32 is off by about √n·ε of a
typical result; no case here sums more than 1,000 products, so 4e-6 holds with room. Results in 16
bits are rounded once from such a sum: they differ by one unit of the last place at most, 2^-10
(f16) and 2^-7 (bf16) of the largest.
"""

from __future__ import annotations

import numpy as np
import pytest
from program_support import HOST, SETUPS, TARGETS, Native, check, compare, kernels_for, reference

from rlx.backends.cpu.kernels.conv.lower_conv import pack_conv
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph
from rlx.ir.interp import evaluate
from rlx.passes.prepare import split_prepare

TOLERANCE = {"f32": 4e-6, "f64": 1e-14, "f16": 2**-10, "bf16": 2**-7}


def make(kind, x, w, dtypes=("f32", "f32", "f32"), bias=True, seed=0, **attributes):
    """A graph of one convolution, and operands for it."""
    g = Graph()
    out = w[0] if kind == "conv" else w[1] * attributes.get("groups", 1)
    dims = {"x": x, "w": w} | ({"b": (out,)} if bias else {})
    sizes = attributes.pop("sizes", {})
    operands = [g.input(n, d, t) for (n, d), t in zip(dims.items(), dtypes, strict=False)]
    g.set_outputs(getattr(g, kind)(*operands, **attributes))
    rng = np.random.default_rng(seed)
    bound = {n: [sizes.get(d, d) for d in shape] for n, shape in dims.items()}
    arrays = {
        n: rng.standard_normal(d).astype(DType.of(t).numpy)
        for (n, d), t in zip(bound.items(), dtypes, strict=False)
    }
    return g, arrays


PLAIN = [
    ((1, 3, 5, 5), (4, 3, 3, 3), {}),
    ((2, 3, 9, 11), (7, 3, 3, 3), {"padding": (1,)}),
    ((2, 8, 23, 19), (14, 4, 3, 2), {"padding": (1, 0, 2, 1), "stride": (2, 1),
                                     "dilation": (1, 2), "groups": 2}),
    ((2, 8, 40), (13, 8, 5), {"padding": (2,), "stride": (3,)}),
    ((1, 4, 33, 70), (16, 4, 7, 7), {"padding": (3,), "stride": (2,)}),
    ((1, 3, 33, 37), (5, 3, 8, 8), {"stride": (8,)}),
    ((1, 2, 20, 50), (3, 2, 1, 3), {"stride": (1, 4), "dilation": (1, 3)}),
    ((1, 40, 7, 7), (9, 40, 3, 3), {"padding": (1,)}),  # more channels than are packed at once
    ((1, 5, 60, 60), (17, 5, 1, 1), {}),
    ((0, 3, 5, 5), (4, 3, 3, 3), {}),
    ((1, 1, 6), (9, 1, 3), {"padding": (4,)}),  # windows wholly outside the image
    ((2, 3, 1, 1), (2, 3, 1, 1), {}),
]  # fmt: skip


@pytest.mark.parametrize(("x", "w", "attributes"), PLAIN)
def test_conv(x, w, attributes):
    compare(*make("conv", x, w, **attributes), TOLERANCE["f32"])


def test_conv_without_bias():
    compare(*make("conv", (2, 3, 8, 8), (4, 3, 3, 3), bias=False), TOLERANCE["f32"])


DEPTHWISE = [
    ((2, 6, 17, 33), (6, 1, 3, 3), {"padding": (1,)}),
    ((1, 3, 9, 140), (6, 1, 3, 5), {"padding": (1, 2), "stride": (2,), "dilation": (2, 1)}),
    ((1, 3, 9, 141), (3, 1, 2, 2), {"padding": (1, 0, 0, 1), "stride": (1, 5)}),
    ((2, 5, 90), (5, 1, 4), {"padding": (3, 0)}),
    ((1, 4, 70, 70), (4, 1, 1, 1), {}),
    ((2, 4, 3, 3), (4, 1, 3, 3), {"padding": (2,)}),
]


@pytest.mark.parametrize(("x", "w", "attributes"), DEPTHWISE)
def test_depthwise(x, w, attributes):
    compare(*make("conv", x, w, groups=x[1], **attributes), TOLERANCE["f32"])


TRANSPOSED = [
    ((2, 6, 9, 9), (6, 5, 3, 3), {"stride": (2,), "padding": (1,), "output_padding": (1,)}),
    ((2, 6, 9), (6, 3, 4), {"stride": (3,), "padding": (1,), "dilation": (2,), "groups": 2}),
    ((2, 6, 9, 4), (6, 3, 2, 5), {"stride": (3, 2), "padding": (0, 1, 1, 2), "groups": 2}),
    ((1, 6, 5, 4), (6, 3, 2, 2), {"stride": (4, 3), "dilation": (2, 1), "groups": 2}),
    ((1, 4, 6, 7), (4, 3, 3, 3), {}),
    ((1, 4, 6, 7), (4, 1, 3, 3), {"groups": 4, "stride": (2,)}),
]


@pytest.mark.parametrize(("x", "w", "attributes"), TRANSPOSED)
def test_conv_transpose(x, w, attributes):
    compare(*make("conv_transpose", x, w, **attributes), TOLERANCE["f32"])


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("dtypes", [("f16",) * 3, ("bf16",) * 3, ("f64",) * 3,
                                    ("f16", "f32", "bf16"), ("f32", "f64", "f32")])  # fmt: skip
def test_element_types(dtypes, groups):
    g, arrays = make(
        "conv", (2, 4, 6, 21), (8, 4 // groups, 3, 3), dtypes, groups=groups, padding=(1,),
        stride=(1, 2),
    )  # fmt: skip
    out = g.outputs[0].shape.dtype.name
    # f32 operands among f64 ones are summed in f32 by the reference
    tolerance = TOLERANCE["f32"] if "f32" in dtypes and out == "f64" else TOLERANCE[out]
    compare(g, arrays, tolerance, setups=SETUPS[1::3])


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("height", "width"), [(9, 12), (1, 30)])
def test_dynamic_dims(batch, height, width):
    sizes = {"batch": batch, "height": height, "width": width}
    for w, attributes in (((6, 4, 3, 3), {}), ((4, 1, 3, 3), {"groups": 4})):
        g, arrays = make(
            "conv", ("batch", 4, "height", "width"), w, padding=(1,), stride=(2,),
            sizes=sizes, **attributes,
        )  # fmt: skip
        bounds = {"batch": 4, "height": 20, "width": 40}
        compare(g, arrays, TOLERANCE["f32"], sizes, setups=SETUPS[1::3], bounds=bounds)


def test_dynamic_dims_transposed():
    sizes = {"batch": 2, "width": 5}
    attributes = {"stride": (3,), "padding": (1,), "sizes": sizes}
    g, arrays = make("conv_transpose", ("batch", 4, "width"), (4, 2, 4), **attributes)
    compare(g, arrays, TOLERANCE["f32"], sizes, setups=SETUPS[1::3])


def test_infinities_and_nan_are_those_of_the_reference():
    for groups in (1, 3):
        g, arrays = make("conv", (1, 3, 6, 20), (3, 3 // groups, 3, 3), groups=groups, padding=1)
        arrays["x"][0, 1, 2, 3] = np.nan
        arrays["x"][0, 2, 5, 19] = np.inf
        arrays["w"][1, 0, 0, 0] = np.inf  # meets zeros of the padding: NaN there
        compare(g, arrays, TOLERANCE["f32"], setups=SETUPS[1::3])


@pytest.mark.parametrize("kind", ["conv", "conv_transpose"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "f64"])
def test_packed_filters(kind, dtype):
    """Filters that are parameters are packed once; the op's own reference knows the layout too."""
    # A 16-bit result is rounded after the activation instead of before and after it.
    tolerance = TOLERANCE[dtype]
    for target in TARGETS:
        g = Graph()
        x, w = g.input("x", (2, 6, 9, 9), dtype), g.param("w", (6, 3, 3, 2), dtype)
        b = g.param("b", (3 if kind == "conv_transpose" else 6,), dtype)
        if kind == "conv":
            y = g.conv(x, w, b, groups=2, padding=(1,), stride=(2, 1))
        else:
            y = g.conv_transpose(x, w, b, padding=(1,), stride=(2, 3))
        g.set_outputs(g.silu(y))
        rng = np.random.default_rng(3)
        arrays = {
            n.name: rng.standard_normal(n.output.shape.static_dims).astype(DType.of(dtype).numpy)
            for n in g.nodes if n.op.is_source
        }  # fmt: skip
        [want] = reference(g, arrays)
        main, prepared = split_prepare(pack_conv(g, target))
        assert [n.op.name for n in prepared.nodes if not n.op.is_source] == ["pack_conv"]
        packed = dict(
            zip(prepared.output_names, evaluate(prepared, {"w": arrays["w"]}), strict=True)
        )
        given = {k: v for k, v in (arrays | packed).items() if k in main._sources}
        assert [n.op.name for n in main.nodes if not n.op.is_source] == ["packed_conv"]
        check(evaluate(main, given)[0], want, tolerance)
        check(Native(main, target, 2, {}).run(given)[0], want, tolerance)


CAUSAL = [(2, 7, 5, 4), (1, 1, 33, 4), (2, 300, 16, 3), (1, 2, 40, 5), (3, 4, 20, 1), (1, 0, 8, 4)]


@pytest.mark.parametrize(("batch", "seq", "channels", "taps"), CAUSAL)
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_causal_depthwise(batch, seq, channels, taps, dtype):
    g = Graph()
    shapes = {"x": ("batch", "seq", channels), "w": (channels, taps)}
    shapes["left"] = ("batch", taps - 1, channels)
    g.set_outputs(g.depthwise_conv1d_causal(*[g.input(n, s, dtype) for n, s in shapes.items()]))
    sizes, rng = {"batch": batch, "seq": seq}, np.random.default_rng(1)
    arrays = {
        n: rng.standard_normal([sizes.get(d, d) for d in s]).astype(DType.of(dtype).numpy)
        for n, s in shapes.items()
    }
    compare(g, arrays, TOLERANCE[dtype], sizes, bounds={"batch": 3, "seq": 300})


def test_a_program_in_the_pool():
    """Two convolutions and a depthwise one, run by real workers, several times over."""
    from rlx.backends.cpu.thread_pool import ThreadPool

    g = Graph()
    x = g.input("x", (2, 8, 20, 20), "f32")
    w1, w2 = g.input("w1", (16, 8, 3, 3), "f32"), g.input("w2", (16, 1, 3, 3), "f32")
    y = g.conv(g.conv(x, w1, padding=(1,)), w2, padding=(1,), groups=16)
    g.set_outputs(g.conv_transpose(y, g.input("w3", (16, 4, 2, 2), "f32"), stride=(2,)))
    rng = np.random.default_rng(2)
    arrays = {
        n.name: rng.standard_normal(n.output.shape.static_dims).astype(np.float32)
        for n in g.nodes if n.op.is_source
    }  # fmt: skip
    [want] = reference(g, arrays)
    pool = ThreadPool(2, oversubscribe=True)
    native = Native(g, HOST, 2, {})
    first = native.run(arrays, pool=pool.run)[0].copy()
    assert np.abs(first - want).max() <= 1e-5 * np.abs(want).max()  # three sums, one on the other
    for _ in range(3):
        np.testing.assert_array_equal(native.run(arrays, pool=pool.run)[0], first)


@pytest.mark.parametrize("name", ["aarch64", "x86-64"])
def test_other_targets(name):
    for kind, w, groups in (("conv", (4, 2, 3, 3), 1), ("conv", (2, 1, 3, 3), 2),
                            ("conv_transpose", (2, 4, 3, 3), 1)):  # fmt: skip
        g, _ = make(kind, (1, 2, 9, 9), w, groups=groups, stride=(2,))
        assert kernels_for(g, name)
