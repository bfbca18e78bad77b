"""Native GEMM against sums in f64: sizes, element types, epilogues, and every target."""

from __future__ import annotations

import math

import numpy as np
import pytest
from gemm_support import check, draw, gemm, native, wide
from program_support import HOST, SETUPS, TARGETS, kernels_for

from rlx.backends.cpu.kernels.gemm.gemm import KC, MC
from rlx.backends.cpu.kernels.gemm.pack_weights import pack_weights
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph

SIZES = [
    (1, 1, 1),
    (1, 64, 64),
    (1, 200, 1030),
    (2, 70, 5),
    (3, 64, 100),
    (5, 33, 800),
    (6, 129, 31),
    (7, 130, KC + 1),
    (23, 17, 64),
    (64, 256, 384),
    (MC + 9, 100, 2 * KC + 3),
    (400, 96, 40),
    (0, 64, 8),
    (4, 0, 8),
    (4, 8, 0),
]


@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_packed_sizes(m, n, k):
    check(*gemm(draw(m, m, k), draw(n, k, n)))


@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_unpacked_sizes(m, n, k):
    check(*gemm(draw(m, m, k), draw(n, k, n), param=False), packed=False)


@pytest.mark.parametrize("w", ["f16", "bf16", "f8e4m3", "f8e5m2", "f32", "f64"])
@pytest.mark.parametrize("x", ["f32", "f16", "bf16"])
def test_float_types(x, w):
    for m in (1, 9):
        a, b = draw(1, m, 70, dtype=x), draw(2, 70, 90, dtype=w)
        check(*gemm(a, b), setups=[(t, 2) for t in TARGETS])


def test_results_are_rounded_to_the_promoted_type():
    g, arrays, want, *_ = gemm(draw(1, 4, 32, dtype="f16"), draw(2, 32, 8, dtype="f16"))
    (got,) = native(g, arrays, HOST, 1)
    assert got.dtype == np.float16
    # f32 sums are exact enough for the nearest half in all but ties; so at most one step away
    assert (np.abs(got.astype(np.float64) - want) <= np.spacing(np.abs(got)) * 0.51).all()


INTEGERS = ["i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64"]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_wrap(dtype):
    element = DType.of(dtype).numpy
    a, b = draw(1, 7, 50, dtype=dtype), draw(2, 50, 37, dtype=dtype)
    a = a * element.type(77)  # sums leave the narrow types
    with np.errstate(over="ignore"):
        want = (a[:, :, None] * b[None]).sum(1, dtype=element)
    g, arrays, *_ = gemm(a, b)
    for target, workers in SETUPS:
        np.testing.assert_array_equal(native(g, arrays, target, workers)[0], want)


def test_mixed_integers_and_floats():
    check(*gemm(draw(1, 3, 40, dtype="i8"), draw(2, 40, 20)))
    check(*gemm(draw(1, 3, 40), draw(2, 40, 20, dtype="u16")))
    check(*gemm(draw(1, 3, 40, dtype="f64"), draw(2, 40, 20, dtype="f8e4m3")))


@pytest.mark.parametrize("turned", [False, True])
def test_complex(turned):
    a, b = draw(1, 2, 5, 33, dtype="c64"), draw(2, 33, 19, dtype="c64")
    g = Graph()
    left = g.input("x", a.shape, "c64")
    right = g.input("w", b.T.shape if turned else b.shape, "c64")
    g.set_outputs(g.matmul(left, g.transpose(right, (1, 0)) if turned else right))
    want = a.astype(np.complex128) @ b.astype(np.complex128)
    for target, workers in SETUPS:
        arrays = {"x": a, "w": np.ascontiguousarray(b.T) if turned else b}
        (got,) = native(g, arrays, target, workers, packed=False)
        assert np.abs(got - want).max() <= 1e-6 * np.abs(want).max()


def test_complex_with_real():
    a, b = draw(1, 3, 4), draw(2, 4, 5, dtype="c64")
    g = Graph()
    g.set_outputs(g.matmul(g.input("x", a.shape), g.input("w", b.shape, "c64")))
    rewritten = pack_weights(g, HOST)
    assert {v.dtype.name for n in rewritten.nodes if n.op.name == "matmul" for v in n.inputs} == {
        "c64"
    }


# -- epilogues --------------------------------------------------------------------------------


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


ACTIVATIONS = {
    "none": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "tanh": np.tanh,
    "sigmoid": sigmoid,
    "silu": lambda x: x * sigmoid(x),
    "gelu_quick": lambda x: x * sigmoid(1.702 * x),
    "gelu": lambda x: x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "gelu_tanh": lambda x: x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "leaky_relu": lambda x: np.where(x >= 0, x, 0.01 * x),
    "elu": lambda x: np.where(x >= 0, x, np.expm1(x)),
}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_with_bias_and_residual(activation, packed):
    for m, n, k in ((1, 75, 64), (9, 75, 64)):
        x, w, bias, residual = draw(1, m, k), draw(2, k, n) * 0.2, draw(3, n), draw(4, m, n)
        g = Graph()
        source = g.param if packed else g.input
        operands = [g.input("x", x.shape), source("w", w.shape)]
        operands += [g.input("b", bias.shape), g.input("r", residual.shape)]
        g.set_outputs(
            g.fused_matmul_bias_act(
                *operands, activation=activation, has_bias=True, has_residual=True
            )
        )
        a, b = wide(x, w)
        want = ACTIVATIONS[activation](a @ b + bias) + residual
        magnitude = np.abs(a) @ np.abs(b) + np.abs(bias) + np.abs(residual)
        arrays = {"x": x, "w": w, "b": bias, "r": residual}
        setups = [(t, 2) for t in TARGETS]
        check(g, arrays, want, magnitude, k, setups, packed=packed)


@pytest.mark.parametrize(("bias", "residual"), [(True, False), (False, True)])
def test_one_extra_of_another_type(bias, residual):
    x, w, extra = draw(1, 4, 20, dtype="bf16"), draw(2, 20, 30, dtype="f16"), draw(3, 4, 30)
    extra = extra[0] if bias else extra
    g = Graph()
    operands = [
        g.input("x", x.shape, "bf16"),
        g.param("w", w.shape, "f16"),
        g.input("e", extra.shape),
    ]
    g.set_outputs(g.fused_matmul_bias_act(*operands, has_bias=bias, has_residual=residual))
    a, b = wide(x, w)
    magnitude = np.abs(a) @ np.abs(b) + np.abs(extra)
    check(g, {"x": x, "w": w, "e": extra}, a @ b + extra, magnitude, 20)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 96, 64), (8, 45, 30), (40, 130, KC + 40)])
def test_swiglu(m, n, k, packed):
    x, gate, up = draw(1, m, k), draw(2, k, n) * 0.1, draw(3, k, n) * 0.1
    g = Graph()
    source = g.param if packed else g.input
    operands = [g.input("x", x.shape), source("gate", gate.shape), source("up", up.shape)]
    g.set_outputs(g.fused_swiglu(*operands))
    a, b, c = wide(x, gate, up)
    first, second = a @ b, a @ c
    want = first * sigmoid(first) * second
    sums = np.abs(a) @ np.abs(b), np.abs(a) @ np.abs(c)
    magnitude = sums[0] * np.abs(second) + sums[1] * np.abs(first)
    check(g, {"x": x, "gate": gate, "up": up}, want, magnitude, k, packed=packed)


@pytest.mark.parametrize("name", ["x86-64", "x86-64-v3", "x86-64-v4", "aarch64"])
def test_kernels_are_made_for_every_target(name):
    g = Graph()
    x, w = g.input("x", (9, 40), "f16"), g.input("w", (40, 50), "bf16")
    half = g.fused_swiglu(x, w, w)
    experts, route = g.input("v", (2, 50, 8)), g.input("e", (9,), "i32")
    c = g.input("c", (8, 8), "c64")
    g.set_outputs(g.grouped_matmul(half, experts, route), g.matmul(c, c))
    assert kernels_for(g, name) == 4
