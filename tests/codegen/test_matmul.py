"""Native products against sums in f64.

A sum of k terms, each rounded at 2^-24 of the partial sum, is off by √k·2^-24 of the sum of
magnitudes for typical signs; four times that is asked for, and 1.2 more because activations used
here change a difference by that factor at most. Results in 16 bits are rounded once more.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from program_support import HOST, SETUPS, TARGETS, Native, kernels_for

from rlx.backends.cpu import matmul, matmul_steps  # noqa: F401
from rlx.backends.cpu.pack import pack_weights
from rlx.codegen.matmul import CHUNK, TERMS
from rlx.errors import ShapeError
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph
from rlx.ir.interp import evaluate
from rlx.ir.ops.pack import PackMatMul, unpack
from rlx.passes.prepare import split_prepare

UNIT = {"f64": 2.0**-53, "f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
UNIT |= {"f8e4m3": 2.0**-4, "f8e5m2": 2.0**-3}


def draw(seed, *dims, dtype="f32"):
    rng = np.random.default_rng(seed)
    kind = DType.of(dtype)
    if kind.kind == "complex":
        parts = rng.standard_normal((2, *dims))
        return (parts[0] + 1j * parts[1]).astype(kind.numpy)
    if kind.is_float:
        return rng.standard_normal(dims).astype(kind.numpy)
    return rng.integers(0 if kind.kind == "uint" else -100, 100, dims).astype(kind.numpy)


def native(graph, arrays, target, workers, sizes=None, bounds=None, packed=True):
    """Results of the graph's kernels; work on params runs beforehand, as `prepare` does."""
    graph = graph.copy()
    if packed:
        graph = pack_weights(graph, target)
        assert any(n.op.name.startswith("pack") for n in graph.nodes)
    main, prepare = split_prepare(graph)
    params = {n.name for n in prepare.sources("param")}
    made = evaluate(prepare, {k: v for k, v in arrays.items() if k in params})
    given = arrays | dict(zip(prepare.output_names, made, strict=True))
    names = {n.name for kind in ("input", "param") for n in main.sources(kind)}
    program = Native(main, target, workers, bounds or sizes or {})
    return program.run({k: v for k, v in given.items() if k in names}, sizes)


def close(got, want, magnitude, terms):
    """got is want, up to the rounding of sums of `terms` terms of that magnitude."""
    assert got.shape == want.shape
    assert not np.isnan(got.astype(np.float64)).any()
    dtype = DType.of(got.dtype)
    sums = UNIT["f64" if dtype.name == "f64" else "f32"]
    room = 4.8 * math.sqrt(terms + 4) * sums * magnitude
    if dtype.bytes < 4:
        room = room + UNIT[dtype.name] * 1.01 * np.abs(want) + 1e-7
    assert (np.abs(got.astype(np.float64) - want) <= room).all()


def check(graph, arrays, want, magnitude, terms, setups=SETUPS, **options):
    for target, workers in setups:
        (got,) = native(graph, arrays, target, workers, **options)
        close(got, want, magnitude, terms)


def wide(*arrays):
    return [a.astype(np.float64) for a in arrays]


def product(x, w, param=True):
    """A graph of x·w with the arrays, and the exact product with its magnitude."""
    g = Graph()
    arrays = {"x": x, "w": w}
    source = g.param if param else g.input
    left = g.input("x", x.shape, DType.of(x.dtype))
    g.set_outputs(g.matmul(left, source("w", w.shape, DType.of(w.dtype))))
    a, b = wide(x, w)
    return g, arrays, a @ b, np.abs(a) @ np.abs(b), x.shape[-1]


SIZES = [
    (1, 1, 1),
    (1, 64, 64),
    (1, 200, 1030),
    (2, 70, 5),
    (3, 64, 100),
    (5, 33, 800),
    (6, 129, 31),
    (7, 130, TERMS + 1),
    (23, 17, 64),
    (64, 256, 384),
    (CHUNK + 9, 100, 2 * TERMS + 3),
    (400, 96, 40),
    (0, 64, 8),
    (4, 0, 8),
    (4, 8, 0),
]


@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_packed_sizes(m, n, k):
    check(*product(draw(m, m, k), draw(n, k, n)))


@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_unpacked_sizes(m, n, k):
    check(*product(draw(m, m, k), draw(n, k, n), param=False), packed=False)


@pytest.mark.parametrize("w", ["f16", "bf16", "f8e4m3", "f8e5m2", "f32", "f64"])
@pytest.mark.parametrize("x", ["f32", "f16", "bf16"])
def test_float_types(x, w):
    for m in (1, 9):
        a, b = draw(1, m, 70, dtype=x), draw(2, 70, 90, dtype=w)
        check(*product(a, b), setups=[(t, 2) for t in TARGETS])


def test_results_are_rounded_to_the_promoted_type():
    g, arrays, want, *_ = product(draw(1, 4, 32, dtype="f16"), draw(2, 32, 8, dtype="f16"))
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
    g, arrays, *_ = product(a, b)
    for target, workers in SETUPS:
        np.testing.assert_array_equal(native(g, arrays, target, workers)[0], want)


def test_mixed_integers_and_floats():
    check(*product(draw(1, 3, 40, dtype="i8"), draw(2, 40, 20)))
    check(*product(draw(1, 3, 40), draw(2, 40, 20, dtype="u16")))
    check(*product(draw(1, 3, 40, dtype="f64"), draw(2, 40, 20, dtype="f8e4m3")))


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
@pytest.mark.parametrize(("m", "n", "k"), [(1, 96, 64), (8, 45, 30), (40, 130, TERMS + 40)])
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


# -- layouts ----------------------------------------------------------------------------------


def test_weight_stored_the_other_way_round():
    x, w = draw(1, 5, 300), draw(2, 130, 300)
    g = Graph()
    g.set_outputs(g.matmul(g.input("x", x.shape), g.transpose(g.param("w", w.shape), (1, 0))))
    a, b = wide(x, w)
    check(g, {"x": x, "w": w}, a @ b.T, np.abs(a) @ np.abs(b.T), 300)


BATCHES = [
    ((3, 4, 20, 16), (3, 4, 16, 24)),
    ((3, 4, 20, 16), (4, 16, 24)),
    ((2, 5, 7), (7, 9)),
    ((20, 16), (3, 16, 24)),
    ((3, 1, 8, 16), (1, 4, 16, 70)),
    ((5, 1, 16), (5, 16, 70)),
    ((16,), (16, 24)),
    ((20, 16), (16,)),
    ((2, 20, 16), (16,)),
    ((2, 20, 16), (2, 16, 1)),
    ((16,), (16,)),
    ((2, 3, 1, 8), (2, 1, 8, 1)),
    ((0, 4, 5), (0, 5, 6)),
]


@pytest.mark.parametrize(("left", "right"), BATCHES)
def test_batches(left, right):
    check(*product(draw(1, *left), draw(2, *right), param=False), packed=False)


@pytest.mark.parametrize("dtype", ["f32", "f16", "i32"])
@pytest.mark.parametrize(("left", "right"), [(False, True), (True, False), (True, True)])
def test_transposed_operands(left, right, dtype):
    x, w = draw(1, 2, 3, 23, 45, dtype=dtype), draw(2, 2, 3, 45, 70, dtype=dtype)
    g = Graph()
    arrays = {"x": x.swapaxes(2, 3) if left else x, "w": w.swapaxes(2, 3) if right else w}
    arrays = {k: np.ascontiguousarray(v) for k, v in arrays.items()}
    operands = [g.input(k, v.shape, dtype) for k, v in arrays.items()]
    turned = [
        g.transpose(v, (0, 1, 3, 2)) if flag else v
        for v, flag in zip(operands, (left, right), strict=True)
    ]
    g.set_outputs(g.matmul(*turned))
    a, b = wide(x, w)
    if dtype == "i32":
        for target, workers in SETUPS:
            (got,) = native(g, arrays, target, workers, packed=False)
            np.testing.assert_array_equal(got, a @ b)
        return
    check(g, arrays, a @ b, np.abs(a) @ np.abs(b), 45, packed=False)


def test_heads_as_views():
    """Scores of attention written in primitives: both operands are heads inside [B, S, H*D]."""
    q, k = draw(1, 2, 9, 4 * 16), draw(2, 2, 13, 4 * 16)
    g = Graph()

    def heads(name, array):
        value = g.input(name, array.shape)
        return g.reshape(value, (2, array.shape[1], 4, 16))

    left = g.transpose(heads("q", q), (0, 2, 1, 3))
    right = g.transpose(heads("k", k), (0, 2, 3, 1))
    g.set_outputs(g.matmul(left, right))
    a, b = (v.reshape(2, -1, 4, 16).transpose(0, 2, 1, 3) for v in wide(q, k))
    b = b.swapaxes(2, 3)
    check(g, {"q": q, "k": k}, a @ b, np.abs(a) @ np.abs(b), 16, packed=False)


def test_every_second_column():
    x, w = draw(1, 7, 40), draw(2, 20, 60)
    g = Graph()
    left = g.slice(g.input("x", x.shape), starts=(0, 0), stops=(7, 40), steps=(1, 2))
    right = g.slice(g.input("w", w.shape), starts=(0, 1), stops=(20, 60), steps=(1, 2))
    g.set_outputs(g.matmul(left, right))
    a, b = wide(x[:, ::2], w[:, 1::2])
    check(g, {"x": x, "w": w}, a @ b, np.abs(a) @ np.abs(b), 20, packed=False)


# -- live sizes -------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 1, 4, 6, 7, 50])
def test_live_rows(rows):
    x, w = draw(1, rows, 500), draw(2, 500, 70)
    g = Graph()
    g.set_outputs(g.matmul(g.input("x", ["seq", 500]), g.param("w", w.shape)))
    a, b = wide(x, w)
    options = {"sizes": {"seq": rows}, "bounds": {"seq": 64}}
    check(g, {"x": x, "w": w}, a @ b, np.abs(a) @ np.abs(b), 500, **options)


@pytest.mark.parametrize("size", [1, 5, 130, 600])
def test_live_terms_and_columns(size):
    x, w, v = draw(1, 2, 3, 24), draw(2, 2, size, 24), draw(3, 2, size, 10)
    g = Graph()
    keys = g.transpose(g.input("w", [2, "past", 24]), (0, 2, 1))
    scores = g.matmul(g.input("x", [2, 3, 24]), keys)
    g.set_outputs(g.matmul(scores, g.input("v", [2, "past", 10])))
    a, b, c = wide(x, w, v)
    want = a @ b.swapaxes(1, 2) @ c
    magnitude = np.abs(a) @ np.abs(b).swapaxes(1, 2) @ np.abs(c)
    options = {"sizes": {"past": size}, "bounds": {"past": 700}, "packed": False}
    check(g, {"x": x, "w": w, "v": v}, want, magnitude, size + 24, **options)


# -- several products -------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_lora(dtype, packed):
    x, w = draw(1, 2, 5, 40, dtype=dtype), draw(2, 40, 33, dtype=dtype)
    a, b = draw(3, 40, 4, dtype=dtype), draw(4, 4, 33, dtype=dtype)
    arrays = {"x": x, "w": w, "a": a, "b": b}
    g = Graph()
    values = [
        (g.param if packed and k != "x" else g.input)(k, v.shape, dtype) for k, v in arrays.items()
    ]
    g.set_outputs(g.lora_matmul(*values, scale=0.5))
    c, d, e, f = wide(x, w, a, b)
    want = c @ d + 0.5 * (c @ e @ f)
    magnitude = np.abs(c) @ np.abs(d) + np.abs(c) @ np.abs(e) @ np.abs(f)
    check(g, arrays, want, magnitude, 44, packed=packed)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("index", ["i32", "i64", "u8"])
@pytest.mark.parametrize("tokens", [0, 1, 8, 250])
def test_grouped(tokens, index, packed):
    x, w = draw(1, tokens, 30), draw(2, 5, 30, 70)
    expert = np.random.default_rng(3).choice([0, 1, 1, 1, 4], tokens).astype(DType.of(index).numpy)
    g = Graph()
    left = g.input("x", x.shape)
    weight = (g.param if packed else g.input)("w", w.shape)
    g.set_outputs(g.grouped_matmul(left, weight, g.input("e", expert.shape, index)))
    a, b = wide(x, w)
    want = np.einsum("tk,tkn->tn", a, b[expert])
    magnitude = np.einsum("tk,tkn->tn", np.abs(a), np.abs(b[expert]))
    check(g, {"x": x, "w": w, "e": expert}, want, magnitude, 30, packed=packed)


def test_grouped_long_sums_of_one_expert():
    """More rows than a chunk, more terms than a block."""
    x, w = draw(1, CHUNK + 20, TERMS + 20), draw(2, 2, TERMS + 20, 40)
    expert = np.zeros(len(x), np.int32)
    expert[3] = 1
    g = Graph()
    operands = [g.input("x", x.shape), g.param("w", w.shape), g.input("e", expert.shape, "i32")]
    g.set_outputs(g.grouped_matmul(*operands))
    a, b = wide(x, w)
    want = np.where(expert[:, None] == 0, a @ b[0], a @ b[1])
    magnitude = np.abs(a) @ np.abs(b).max(0)
    check(g, {"x": x, "w": w, "e": expert}, want, magnitude, TERMS + 20)


def test_grouped_reports_an_expert_that_does_not_exist():
    g = Graph()
    operands = [g.input("x", (3, 4)), g.input("w", (2, 4, 5)), g.input("e", (3,), "i32")]
    g.set_outputs(g.grouped_matmul(*operands))
    program = Native(g, HOST, 2, {})
    for bad in (2, -1):
        expert = np.array([0, bad, 1], np.int32)
        program.made.status[0] = 0
        program.run({"x": draw(1, 3, 4), "w": draw(2, 2, 4, 5), "e": expert})
        assert program.made.status[0] == g.outputs[0].node.id + 1


# -- the packed layout ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "i8"])
@pytest.mark.parametrize(
    ("dims", "turned"), [((9, 7), False), ((1100, 40), True), ((3, 70, 33), False)]
)
def test_pack_puts_every_weight_in_its_place(dims, turned, dtype):
    w = draw(1, *dims, dtype=dtype)
    if turned:
        w = np.asfortranarray(w)
    packed = PackMatMul("panel16").reference(w)
    *outer, k, n = dims
    assert packed.shape == (*outer, -(-n // 16), k, 16)
    assert packed.dtype == w.dtype and packed.ctypes.data % 64 == 0
    for at in ((0, 0), (k - 1, n - 1), (k // 2, n // 3)):
        row, column = at
        place = (..., column // 16, row, column % 16)
        np.testing.assert_array_equal(packed[place], w[..., row, column])
    assert not packed[..., -1, :, n % 16 or 16 :].astype(np.float32).any()
    np.testing.assert_array_equal(unpack(packed, "panel16", n)[0], w)


def test_pack_of_a_pair_puts_up_beside_gate():
    gate, up = draw(1, 6, 10), draw(2, 6, 10)
    packed = PackMatMul("pair8").reference(gate, up)
    assert packed.shape == (3, 6, 8)
    np.testing.assert_array_equal(packed[1], np.hstack([gate[:, 4:8], up[:, 4:8]]))
    with pytest.raises(ShapeError, match="takes two weights"):
        g = Graph()
        g.pack_matmul(g.param("w", (4, 4)), layout="pair8")


def test_large_weights_are_packed_by_several_threads_alike():
    w = np.arange(3000 * 2000, dtype=np.float32).reshape(3000, 2000)
    for array in (w, np.asfortranarray(w)):
        packed = PackMatMul("panel64").reference(array)
        np.testing.assert_array_equal(unpack(packed, "panel64", 2000)[0], w)


def test_packed_references_are_those_of_the_plain_ops():
    x, w, expert = draw(1, 6, 20), draw(2, 3, 20, 30), np.array([0, 2, 2, 1, 0, 0], np.int32)
    g = Graph()
    operands = [g.input("x", x.shape), g.param("w", w.shape), g.input("e", (6,), "i32")]
    g.set_outputs(g.grouped_matmul(*operands))
    arrays = {"x": x, "w": w, "e": expert}
    (want,) = evaluate(g, arrays)
    (got,) = evaluate(pack_weights(g, HOST), arrays)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_narrow_weights_that_would_grow_stay_as_they_are():
    g = Graph()
    g.set_outputs(g.matmul(g.input("x", ["rows", 30000]), g.param("w", (30000, 3))))
    assert [n.op.name for n in pack_weights(g, HOST).nodes] == ["input", "param", "matmul"]


@pytest.mark.parametrize("name", ["x86-64", "x86-64-v3", "x86-64-v4", "aarch64"])
def test_kernels_are_made_for_every_target(name):
    g = Graph()
    x, w = g.input("x", (9, 40), "f16"), g.input("w", (40, 50), "bf16")
    half = g.fused_swiglu(x, w, w)
    experts, route = g.input("v", (2, 50, 8)), g.input("e", (9,), "i32")
    c = g.input("c", (8, 8), "c64")
    g.set_outputs(g.grouped_matmul(half, experts, route), g.matmul(c, c))
    assert kernels_for(g, name) == 4
