"""Native GEMM of views and batches, with dynamic dims, of experts and adapters; packing."""

from __future__ import annotations

import numpy as np
import pytest
from gemm_support import check, draw, gemm, native, wide
from program_support import HOST, SETUPS, Native

from rlx.backends.cpu.kernels.gemm.epilogue import Epilogue
from rlx.backends.cpu.kernels.gemm.gemm import KC, MC, NARROW_KC, Gemm
from rlx.backends.cpu.kernels.gemm.pack_weights import pack_weights
from rlx.backends.cpu.layouts.pack import PackMatMul, unpack
from rlx.errors import ShapeError
from rlx.ir.dtype import DType, f32
from rlx.ir.graph import Graph
from rlx.ir.interp import evaluate
from rlx.llvm.target import Target

# -- layouts ----------------------------------------------------------------------------------


def test_weight_stored_the_other_way_round():
    x, w = draw(1, 5, 300), draw(2, 130, 300)
    g = Graph()
    g.set_outputs(g.matmul(g.input("x", x.shape), g.transpose(g.param("w", w.shape), (1, 0))))
    a, b = wide(x, w)
    check(g, {"x": x, "w": w}, a @ b.T, np.abs(a) @ np.abs(b.T), 300)


@pytest.mark.parametrize("view", ["neither", "x", "w"])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(300, 8, KC + 5), (101, 16, 600), (3, 30, 40), (9, 3, 70)]
)
def test_few_columns(m, n, k, view):
    """The last tile of 101 or 300 packed rows is padded further than that of wide results."""
    x, w = draw(1, m, k), draw(2, k, n)
    g = Graph()
    if view == "x":
        left = g.transpose(g.input("x", (k, m)), (1, 0))
    else:
        left = g.input("x", (m, k))
    right = g.transpose(g.input("w", (n, k)), (1, 0)) if view == "w" else g.input("w", (k, n))
    g.set_outputs(g.matmul(left, right))
    given = {"x": x.T.copy() if view == "x" else x, "w": w.T.copy() if view == "w" else w}
    a, b = wide(x, w)
    check(g, given, a @ b, np.abs(a) @ np.abs(b), k, packed=False)


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
    check(*gemm(draw(1, *left), draw(2, *right), param=False), packed=False)


ONE_ROW = [
    ((3, 1, 45), (3, 45, 2100)),
    ((3, 1, 45), (45, 9)),
    ((700, 45), (45, 1)),
    ((1, 0), (0, 5)),
]


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "f64"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("left", "right"), ONE_ROW)
def test_one_row_or_column(left, right, turned, dtype):
    """Matrices are read as they lie, along k or along the columns."""
    x, w = draw(1, *left, dtype=dtype), draw(2, *right, dtype=dtype)
    g = Graph()
    arrays = {"x": x, "w": np.ascontiguousarray(w.swapaxes(-1, -2)) if turned else w}
    a, b = (g.input(k, v.shape, dtype) for k, v in arrays.items())
    g.set_outputs(
        g.matmul(a, g.transpose(b, (*range(w.ndim - 2), w.ndim - 1, w.ndim - 2)) if turned else b)
    )
    wide_x, wide_w = wide(x, w)
    magnitude = np.abs(wide_x) @ np.abs(wide_w)
    check(g, arrays, wide_x @ wide_w, magnitude, x.shape[-1], packed=False)


def test_one_row_of_integers():
    for right in ((50, 37), (50, 1)):
        a, b = draw(1, 37 if right[1] == 1 else 1, 50, dtype="i8"), draw(2, *right, dtype="i8")
        g, arrays, *_ = gemm(a, b, param=False)
        want = (a.astype(np.int64) @ b.astype(np.int64)).astype(np.int8)
        for target, workers in SETUPS:
            (got,) = native(g, arrays, target, workers, packed=False)
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", ["f32", "f16", "i32"])
@pytest.mark.parametrize(("left", "right"), [(False, True), (True, False), (True, True)])
def test_transposed_operands(left, right, dtype):
    x, w = draw(1, 2, 3, 23, 45, dtype=dtype), draw(2, 2, 3, 45, 91, dtype=dtype)
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


# -- dynamic dims -------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 1, 4, 6, 7, 50])
def test_dynamic_rows(rows):
    x, w = draw(1, rows, 500), draw(2, 500, 70)
    g = Graph()
    g.set_outputs(g.matmul(g.input("x", ["seq", 500]), g.param("w", w.shape)))
    a, b = wide(x, w)
    options = {"sizes": {"seq": rows}, "bounds": {"seq": 64}}
    check(g, {"x": x, "w": w}, a @ b, np.abs(a) @ np.abs(b), 500, **options)


@pytest.mark.parametrize("size", [1, 5, 130, 600])
def test_dynamic_terms_and_columns(size):
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


# -- several GEMMs ----------------------------------------------------------------------------


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


@pytest.mark.parametrize("terms", [KC + 20, 40 * KC])
def test_grouped_long_sums_of_one_expert(terms):
    """More rows than a chunk, more terms than a block, and a row alone, which is not cut."""
    x, w = draw(1, MC + 20, terms), draw(2, 2, terms, 40)
    expert = np.zeros(len(x), np.int32)
    expert[3] = 1
    g = Graph()
    operands = [g.input("x", x.shape), g.param("w", w.shape), g.input("e", expert.shape, "i32")]
    g.set_outputs(g.grouped_matmul(*operands))
    a, b = wide(x, w)
    want = np.where(expert[:, None] == 0, a @ b[0], a @ b[1])
    magnitude = np.abs(a) @ np.abs(b).max(0)
    check(g, {"x": x, "w": w, "e": expert}, want, magnitude, terms)


def test_grouped_reports_an_expert_that_does_not_exist():
    g = Graph()
    operands = [g.input("x", (3, 4)), g.input("w", (2, 4, 5)), g.input("e", (3,), "i32")]
    g.set_outputs(g.grouped_matmul(*operands))
    program = Native(g, HOST, 2, {})
    for bad in (2, -1):
        expert = np.array([0, bad, 1], np.int32)
        program.linked.status[0] = 0
        program.run({"x": draw(1, 3, 4), "w": draw(2, 2, 4, 5), "e": expert})
        assert program.linked.status[0] == g.outputs[0].node.id + 1


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


def test_blocks_fit_the_caches_of_cpus_with_few_registers():
    """32 kB of L1 hold a panel and a tile's rows, 512 kB of L2 a block of rows and partial sums."""
    spec, target = Gemm(f32, f32, Epilogue(f32)), Target.named("x86-64-v3")
    tile = spec.tile_shape(target)
    assert (tile.nr + tile.mr) * 4 * NARROW_KC <= 32 << 10
    assert 4 * MC * NARROW_KC + spec.scratch(target, MC, 4096, 4096) <= 512 << 10
