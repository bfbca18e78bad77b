"""Strassen's GEMM: as exact as the largest numbers allow, at every number of rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gemm_support import close, draw, native, wide
from program_support import HOST, V3, kernels_for

from rlx.backends.cpu.kernels.gemm.pack_weights import pack_weights
from rlx.backends.cpu.kernels.gemm.strassen import MC, MIN_ROWS, tall_tile
from rlx.backends.cpu.layouts.pack import PackedMatMul, PackMatMul, unpack
from rlx.errors import ShapeError
from rlx.ir.graph import Graph
from rlx.llvm.target import Target

WIDE = Target.named("x86-64-v4")
NARROW = Target.named("x86-64-v2")
TARGETS = [t for t in (WIDE, V3) if t.runs_on(HOST)]
on_targets = pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.cpu)

# One step of the scheme multiplies sums of up to four blocks, so that both operands of a product
# are twice as large as usual ones; rounding is of that, for every row of a pair of tiles. Two steps
# do it twice.
_LARGER = {"panel": 1, "strassen": 4, "twice": 16}


def graph_of(x, w, rows=None, **attributes):
    g = Graph()
    left = g.input("x", (rows or x.shape[0], x.shape[1]))
    g.set_outputs(g.fused_matmul_bias_act(left, g.param("w", w.shape), strassen=True, **attributes))
    return g


def near(got, x, w, target):
    a, b = wide(x, w)
    larger = _LARGER[layout_of(x.shape, w.shape, target).rstrip("0123456789")]
    close(got, a @ b, larger * (np.abs(a) @ np.abs(b)).max(initial=0), x.shape[1])


SIZES = [
    (MIN_ROWS - 1, 96, 192),
    (MIN_ROWS, 96, 192),
    (MIN_ROWS + 1, 192, 224),
    (MIN_ROWS + 3, 96, 384),
    (MC, 384, 384),
    (MC + 3, 480, 800),  # several blocks of k, more pairs of panels than are kept at once
    (2 * MC + 30, 96, 1536),
    (1, 96, 192),
    (0, 96, 192),
    # two steps: fours of tiles alone, with rows left over, with too few for three workers
    (64, 192, 384),
    (MIN_ROWS, 192, 384),
    (100, 384, 384),
    (131, 192, 1536),
    (70, 5 * 192, 384),  # more fours of panels than rows are summed for at once
    (65, 192, 2304),  # several blocks of k
]


@on_targets
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_sizes(m, n, k, target):
    x, w = draw(m, m, k), draw(n, k, n)
    for workers in (1, 2, 3):
        (got,) = native(graph_of(x, w), {"x": x, "w": w}, target, workers)
        near(got, x, w, target)


@on_targets
def test_every_number_of_rows_of_one_program(target):
    for k, n, most in ((192, 96, MIN_ROWS + 40), (384, 192, 64 + 40)):
        w = draw(2, k, n)
        g = graph_of(draw(1, 1, k), w, rows="m")
        for m in range(most - 42, most):
            x = draw(m, m, k)
            (got,) = native(g, {"x": x, "w": w}, target, 2, sizes={"m": m}, bounds={"m": 200})
            near(got, x, w, target)


@on_targets
@pytest.mark.parametrize(("m", "n", "k"), [(70, 96, 224), (70, 192, 384)])
def test_bias_activation_and_residual(m, n, k, target):
    x, w, bias, residual = draw(1, m, k), draw(2, k, n), draw(3, n), draw(4, m, n)
    g = Graph()
    operands = [g.input("x", x.shape), g.param("w", w.shape)]
    operands += [g.input("b", bias.shape), g.input("r", residual.shape)]
    flags = {"has_bias": True, "has_residual": True, "strassen": True}
    g.set_outputs(g.fused_matmul_bias_act(*operands, activation="relu", **flags))
    a, b = wide(x, w)
    want = np.maximum(a @ b + bias, 0) + residual
    (got,) = native(g, {"x": x, "w": w, "b": bias, "r": residual}, target, 2)
    close(got, want, max(_LARGER.values()) * (np.abs(a) @ np.abs(b)).max(), k)


@on_targets
def test_small_rows_lose_digits_beside_large_ones(target):
    """What the attribute allows, and the reason why it must be asked for."""
    x, w = draw(1, 64, 192), draw(2, 192, 96)
    tile = tall_tile(target).mr
    x[tile : 2 * tile] *= 1e6  # the lower tile of the first pair
    (got,) = native(graph_of(x, w), {"x": x, "w": w}, target, 1)
    a, b = wide(x, w)
    error = np.abs(got - a @ b).max(1)
    assert (error[:tile] > 1e-3).all() and (error[2 * tile :] < 1e-4).all()
    near(got, x, w, target)


# -- the choice -------------------------------------------------------------------------------


def layout_of(x, w, target=WIDE, strassen=True):
    g = Graph()
    product = g.fused_matmul_bias_act(
        g.input("x", x, "f32"), g.param("w", w[:2], *w[2:]), strassen=strassen
    )
    g.set_outputs(product)
    packed = next(n for n in pack_weights(g, target).nodes if n.op.name == "packed_matmul")
    assert isinstance(packed.op, PackedMatMul)
    return packed.op.layout


def test_only_where_it_is_asked_for_and_pays():
    assert layout_of((64, 384), (384, 192)) == "twice48"
    assert layout_of((64, 384), (384, 96)) == "strassen48"  # no whole four of panels
    assert layout_of((64, 352), (352, 192)) == "strassen48"  # too few terms for two steps
    assert layout_of((64, 768), (768, 3072)) == "strassen48"  # sums would take too much memory
    assert layout_of((64, 384), (384, 192), strassen=False) == "panel64"
    assert layout_of((64, 384), (384, 192), replace(WIDE, cpu="znver5")) == "strassen48"
    assert layout_of((64, 384), (384, 192), V3) == "strassen16"
    assert layout_of((64, 384), (384, 192), NARROW) == "panel8"
    assert layout_of((64, 384), (384, 100)) == "panel64"  # no whole pair of panels
    assert layout_of((64, 390), (390, 192)) == "panel64"  # no whole vectors in half of k
    assert layout_of((64, 64), (64, 192)) == "panel64"  # too few terms to make up for the sums
    assert layout_of((64, 384), (384, 192, "f16")) == "panel64"


def test_weights_of_inputs_are_multiplied_as_ever():
    g = Graph()
    x, w = g.input("x", (64, 384)), g.input("w", (384, 192))
    g.set_outputs(g.fused_matmul_bias_act(x, w, strassen=True))
    assert kernels_for(g, "x86-64-v4") == 1


# -- the layout -------------------------------------------------------------------------------


def test_sums_of_blocks_lie_behind_the_panels():
    w = np.arange(4 * 8, dtype=np.float32).reshape(4, 8) ** 2
    packed = PackMatMul("strassen2").reference(w)
    assert packed.shape == (8, 4, 2)
    np.testing.assert_array_equal(unpack(packed, "strassen2", 8)[0], w)
    for pair in range(2):
        (b11, b12), (b21, b22) = (
            (w[r, 4 * pair : 4 * pair + 2], w[r, 4 * pair + 2 : 4 * pair + 4])
            for r in (slice(0, 2), slice(2, 4))
        )
        t2 = b22 - (b12 - b11)
        sums = np.concatenate(packed[4 + 2 * pair : 6 + 2 * pair])
        np.testing.assert_array_equal(sums, np.concatenate([b12 - b11, t2, b22 - b12, b21 - t2]))


def test_sums_of_sums_lie_behind_those():
    """Products by the scheme's own formulas, from the layout, are the product."""
    rng = np.random.default_rng(5)
    x, w = (rng.integers(-9, 10, dims).astype(np.float32) for dims in ((4, 8), (8, 16)))
    packed = PackMatMul("twice2").reference(w)
    assert packed.shape == (8 + 8 + 14, 8, 2)
    np.testing.assert_array_equal(unpack(packed, "twice2", 16)[0], w)
    outer_sums = packed[8:16].reshape(4, 4, 4, 2)  # of pairs of panels: T1 to T4, halves of k
    inner_sums = packed[16:].reshape(2, 7, 4, 2, 2)  # of fours: operands, T1 to T4, quarters of k

    def operands(b11, b21, b22, sums):
        t1, t2, t3, t4 = sums
        return [b11, b21, b22, t4, t1, t2, t3]

    def product(a, right):
        """The two by two blocks of the product of `a` with what `right` are the operands of."""
        half = a.shape[1] // 2
        top, low = a[: len(a) // 2], a[len(a) // 2 :]
        a11, a12, a21, a22 = top[:, :half], top[:, half:], low[:, :half], low[:, half:]
        s1 = a21 + a22
        s2 = s1 - a11
        left = [a11, a12, a12 - s2, a22, s1, s2, a11 - a21]
        p = [r(a) if callable(r) else a @ r for a, r in zip(left, right, strict=True)]
        u = p[0] + p[5]
        v = u + p[6]
        return np.block([[p[0] + p[1], u + p[4] + p[2]], [v + p[3], v + p[4]]])

    for four in range(2):
        pairs = [packed[4 * four + 2 * i :][:2].reshape(4, 4, 2) for i in range(2)]
        outer = [
            operands(b11, b21, b22, outer_sums[2 * four + i])
            for i, (b11, b21, _, b22) in enumerate(pairs)
        ]
        right = []
        for o, (first, second) in enumerate(zip(*outer, strict=True)):
            inner = operands(first[:2], first[2:], second[2:], inner_sums[four, o])
            right.append(lambda a, inner=inner: product(a, inner))
        got = product(x, right)
        # columns of a block are those of panels 0 and 2, then of 1 and 3
        panels = [w[:, 8 * four + 2 * i :][:, :2] for i in (0, 2, 1, 3)]
        np.testing.assert_array_equal(got, x @ np.concatenate(panels, axis=1))


def test_a_weight_that_has_no_whole_blocks_is_refused():
    g = Graph()
    with pytest.raises(ShapeError, match="not a weight of whole blocks"):
        g.pack_matmul(g.param("w", (4, 6)), layout="strassen2")
    with pytest.raises(ShapeError, match="not a weight of whole blocks"):
        g.pack_matmul(g.param("v", (3, 8)), layout="strassen2")
    for number, dims in enumerate([(6, 8), (4, 12)]):
        with pytest.raises(ShapeError, match="not a weight of whole blocks"):
            g.pack_matmul(g.param(f"u{number}", dims), layout="twice2")
