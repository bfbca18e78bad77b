"""Matmuls with dense and with packed weights, against sums written out."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
from run_op import cost, infer, run

from rlx.errors import (
    AttributeValueError,
    DTypeError,
    InputError,
    OptionError,
    RlxError,
    ShapeError,
)
from rlx.ir.dtype import f16, i8, i32
from rlx.ir.quant.scheme import QuantScheme, decode, encode
from rlx.ir.shape import Shape

rng = np.random.default_rng(7)


def normal(*dims, dtype=np.float64):
    return rng.standard_normal(dims).astype(dtype)


def summed(a, b):
    """Plain 2-D product in Python floats."""
    out = np.zeros((a.shape[0], b.shape[1]))
    for i, j in np.ndindex(out.shape):
        out[i, j] = sum(float(a[i, k]) * float(b[k, j]) for k in range(a.shape[1]))
    return out


# -- matmul -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "out"),
    [
        ((3, 5), (5, 4), (3, 4)),
        ((5,), (5,), ()),
        ((5,), (5, 4), (4,)),
        ((3, 5), (5,), (3,)),
        ((2, 3, 5), (5, 4), (2, 3, 4)),
        ((2, 1, 3, 5), (6, 5, 4), (2, 6, 3, 4)),
        ((5,), (2, 5, 4), (2, 4)),
        ((2, 3, 5), (5,), (2, 3)),
        ((0, 5), (5, 4), (0, 4)),
        ((3, 0), (0, 4), (3, 4)),
    ],
)
def test_matmul_follows_numpys_ranks(a, b, out):
    left, right = normal(*a), normal(*b)
    found = run("matmul", left, right)
    assert found.shape == out
    wide_a = left[None] if left.ndim == 1 else left
    wide_b = right[:, None] if right.ndim == 1 else right
    batch = np.broadcast_shapes(wide_a.shape[:-2], wide_b.shape[:-2])
    wide_a = np.broadcast_to(wide_a, batch + wide_a.shape[-2:])
    wide_b = np.broadcast_to(wide_b, batch + wide_b.shape[-2:])
    expected = np.zeros((*batch, wide_a.shape[-2], wide_b.shape[-1]))
    for at in np.ndindex(*batch):
        expected[at] = summed(wide_a[at], wide_b[at])
    # f64 sums of five products of normal numbers: a few units of 1e-16
    np.testing.assert_allclose(found, expected.reshape(out), rtol=0, atol=1e-14)


def test_f16_matmuls_are_summed_in_f32_and_rounded_once():
    # 2048 + 1 is not an f16: a sum in f16 would stay at 2048
    a = np.array([[2048, *[1.0] * 64]], np.float16)
    b = np.ones((65, 1), np.float16)
    found = run("matmul", a, b)
    assert found.dtype == np.float16
    assert found[0, 0] == np.float16(2048 + 64)


def test_bf16_with_f16_gives_f32():
    a, b = normal(2, 3, dtype=ml_dtypes.bfloat16), normal(3, 2, dtype=np.float16)
    found = run("matmul", a, b)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, summed(a, b), rtol=1e-6, atol=1e-6)


def test_integers_wrap_in_the_promoted_type():
    a, b = np.array([[100, 100]], np.int8), np.array([[2], [1]], np.int8)
    assert run("matmul", a, b)[0, 0] == (300 + 128) % 256 - 128
    mixed = run("matmul", a, np.array([[200], [200]], np.uint8))
    assert mixed.dtype == np.int16
    assert mixed[0, 0] == (40000 + 2**15) % 2**16 - 2**15
    floats = run("matmul", a, np.array([[0.5], [0.25]], np.float32))
    assert floats.dtype == np.float32
    assert floats[0, 0] == 75.0


def test_complex_matmuls():
    a, b = normal(2, 3) + 1j * normal(2, 3), normal(3, 2) + 1j * normal(3, 2)
    found = run("matmul", a.astype(np.complex64), b.astype(np.complex64))
    expected = np.array(
        [[sum(a[i, k] * b[k, j] for k in range(3)) for j in (0, 1)] for i in (0, 1)]
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


def test_matmul_infers_symbols():
    assert infer("matmul", ["batch", "seq", 64], [64, 10]) == "[batch, seq, 10] f32"
    assert infer("matmul", ["batch", 4, "seq", "d"], ["batch", 1, "d", "keys"]) == (
        "[batch, 4, seq, keys] f32"
    )
    assert infer("matmul", ["rows", "batch * seq"], ["rows", 3]) == "[rows, 3] f32"
    assert infer("matmul", ["n"], ["n"]) == "[] f32"


@pytest.mark.parametrize(
    ("a", "b", "kind", "part"),
    [
        (["batch", 64], [63, 10], ShapeError, "got 64; expected 63"),
        (["batch", "seq"], ["past_seq", 10], ShapeError, "got seq; expected past_seq"),
        ([2, 3, 4], [3, 4, 5], ShapeError, "2 against 3"),
        ([], [3, 4], ShapeError, "a is a scalar"),
        (Shape([2, 3], "bool"), [3, 4], DTypeError, "[2, 3] bool"),
        (Shape([2, 3], "u64"), Shape([3, 4], "i8"), DTypeError, "u64 and i8"),
    ],
)
def test_matmul_refuses(a, b, kind, part):
    with pytest.raises(kind) as error:
        infer("matmul", a, b)
    assert part in str(error.value)
    assert error.value.where == "matmul"


def test_matmul_cost_is_two_flops_per_term():
    found = cost("matmul", Shape([7, 3, 5], f16), Shape([5, 4], f16))
    assert found.flops == 2 * 7 * 3 * 4 * 5
    assert found.bytes == 2 * (7 * 3 * 5 + 5 * 4 + 7 * 3 * 4)
    assert str(cost("matmul", ["seq", 8], [8, 4]).flops) == "64 * seq"


# -- dot_general ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "text", "axes"),
    [
        ((3, 4), (4, 5), "ik,kj->ij", ((1,), (0,))),
        ((3, 4, 2), (5, 2, 4), "iab,jba->ij", ((1, 2), (2, 1))),
        ((6, 3, 4), (4, 6, 5), "bik,kbj->bij", ((2,), (0,), (0,), (1,))),
        ((2, 3, 6, 4), (6, 4, 2, 5), "xiyk,ykxj->xyij", ((3,), (1,), (0, 2), (2, 0))),
        ((3, 4), (5,), "ik,j->ikj", ((), ())),
        ((3, 4), (3, 4), "ik,ik->ik", ((), (), (0, 1), (0, 1))),
        ((4, 3), (4, 3), "ki,ki->", ((0, 1), (0, 1))),
        ((3, 4), (4, 5), "ik,kj->ij", ((-1,), (-2,))),
        ((0, 4), (4, 5), "ik,kj->ij", ((1,), (0,))),
    ],
)
def test_dot_general_is_the_einsum(a, b, text, axes):
    left, right = normal(*a), normal(*b)
    names = ("lhs_contract", "rhs_contract", "lhs_batch", "rhs_batch")
    found = run("dot_general", left, right, **dict(zip(names, axes, strict=False)))
    np.testing.assert_allclose(found, np.einsum(text, left, right), rtol=0, atol=1e-14)


def test_dot_general_infers_symbols_and_costs():
    axes = {"lhs_contract": 2, "rhs_contract": 2, "lhs_batch": 0, "rhs_batch": 0}
    shapes = ["batch", "seq", 8], ["batch", "past_seq", 8]
    assert infer("dot_general", *shapes, **axes) == "[batch, seq, past_seq] f32"
    assert str(cost("dot_general", *shapes, **axes).flops) == "16 * batch * past_seq * seq"


@pytest.mark.parametrize(
    ("axes", "kind", "part"),
    [
        (((1,), (0, 1)), AttributeValueError, "(1,) and (0, 1)"),
        (((1,), (0,), (0,), ()), AttributeValueError, "(0,) and ()"),
        (((0,), (0,)), ShapeError, "got 3; expected 4"),
        (((5,), (0,)), ShapeError, "lhs_contract out of range"),
        (((1,), (0,), (1,), (1,)), ShapeError, "an axis of lhs is named twice"),
    ],
)
def test_dot_general_refuses(axes, kind, part):
    names = ("lhs_contract", "rhs_contract", "lhs_batch", "rhs_batch")
    with pytest.raises(kind) as error:
        infer("dot_general", [3, 4], [4, 5], **dict(zip(names, axes, strict=False)))
    assert part in str(error.value)


# -- lora and experts -------------------------------------------------------------------------


def test_lora_matmul_adds_the_scaled_adapter():
    x, w, a, b = normal(2, 3, 6), normal(6, 5), normal(6, 2), normal(2, 5)
    found = run("lora_matmul", x, w, a, b, scale=0.25)
    for i in range(2):
        expected = summed(x[i], w) + 0.25 * summed(summed(x[i], a), b)
        np.testing.assert_allclose(found[i], expected, rtol=0, atol=1e-13)


def test_lora_matmul_shapes_and_cost():
    shapes = ["rows", 6], [6, 5], [6, 2], [2, 5]
    assert infer("lora_matmul", *shapes) == "[rows, 5] f32"
    # per row: 2·6·5 for w, 2·6·2 and 2·2·5 for the adapter, a scale and an add per output
    assert str(cost("lora_matmul", *shapes).flops) == f"{60 + 24 + 20 + 10} * rows"
    with pytest.raises(ShapeError, match="columns of b against columns of w"):
        infer("lora_matmul", [3, 6], [6, 5], [6, 2], [2, 4])
    with pytest.raises(ShapeError, match="rows of b against columns of a"):
        infer("lora_matmul", [3, 6], [6, 5], [6, 2], [3, 5])
    with pytest.raises(DTypeError, match="must be of a float type"):
        infer("lora_matmul", Shape([3, 6], i8), [6, 5], [6, 2], [2, 5])


def test_grouped_matmul_sends_each_row_to_its_expert():
    x, w = normal(7, 3), normal(4, 3, 5)
    expert = np.array([2, 0, 3, 2, 2, 0, 3], np.int32)  # expert 1 gets nothing
    found = run("grouped_matmul", x, w, expert)
    expected = np.concatenate([summed(x[t : t + 1], w[expert[t]]) for t in range(7)])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-14)
    assert run("grouped_matmul", x[:0], w, expert[:0]).shape == (0, 5)


def test_grouped_matmul_refuses():
    x, w = normal(2, 3, dtype=np.float32), normal(4, 3, 5, dtype=np.float32)
    with pytest.raises(InputError, match=r"expert out of range; got 1 … 4; expected 0 … 3"):
        run("grouped_matmul", x, w, np.array([4, 1], np.int32))
    with pytest.raises(InputError, match="expert out of range; got -1"):
        run("grouped_matmul", x, w, np.array([-1, 1], np.int32))
    with pytest.raises(DTypeError, match="expert must be of an integer type"):
        infer("grouped_matmul", [2, 3], [4, 3, 5], [2])
    with pytest.raises(ShapeError, match="entries of expert"):
        infer("grouped_matmul", ["rows", 3], [4, 3, 5], Shape(["seq"], i32))
    with pytest.raises(ShapeError, match="w has the wrong rank"):
        infer("grouped_matmul", [2, 3], [3, 5], Shape([2], i32))


def test_grouped_cost_counts_only_experts_that_can_be_reached():
    few = cost("grouped_matmul", [2, 3], [8, 3, 5], Shape([2], i32))
    assert few.flops == 2 * 2 * 3 * 5
    assert few.bytes == 4 * (2 * 3 + 2 * 3 * 5 + 2 * 5 + 2)
    many = cost("grouped_matmul", [9, 3], [8, 3, 5], Shape([9], i32))
    assert many.bytes == 4 * (9 * 3 + 8 * 3 * 5 + 9 * 5 + 9)


# -- packed weights ---------------------------------------------------------------------------

SCHEMES = [
    "Q8_0",
    "Q4_0",
    "Q4_1",
    "F16",
    "int8",
    "int8_b32_asym",
    "int4",
    "int4_b32_asym",
    "fp8_e4m3",
]


def packed(scheme, *dims):
    parts = encode(QuantScheme.parse(scheme), normal(*dims, dtype=np.float32))
    return [p for p in parts if p is not None]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_dequant_matmul_is_a_matmul_with_the_decoded_rows(scheme):
    w, *sides = packed(scheme, 5, 64)
    weights = decode(QuantScheme.parse(scheme), w, *sides)  # [N, K]
    x = normal(3, 64)
    found = run("dequant_matmul", x, w, *sides, scheme=scheme)
    np.testing.assert_allclose(found, summed(x, weights.T), rtol=0, atol=1e-12)
    half = run("dequant_matmul", x[0].astype(np.float16), w, *sides, scheme=scheme)
    assert half.dtype == np.float16
    exact = summed(x[:1].astype(np.float16), weights.T)[0]
    # half a unit of f16, and the f32 sum of 64 products before it
    assert np.all(
        np.abs(half - exact) <= np.spacing(np.abs(exact).astype(np.float16)) * 0.51 + 1e-4
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_dequant_grouped_matmul_and_moe_weights(scheme):
    w, *sides = packed(scheme, 3, 4, 64)
    weights = decode(QuantScheme.parse(scheme), w, *sides)  # [E, N, K]
    x, expert = normal(5, 64), np.array([2, 0, 2, 2, 0], np.int32)
    found = run("dequant_grouped_matmul", x, w, expert, *sides, scheme=scheme)
    for t in range(5):
        expected = summed(x[t : t + 1], weights[expert[t]].T)[0]
        np.testing.assert_allclose(found[t], expected, rtol=0, atol=1e-12)
    chosen = run("dequant_moe_weights", w, expert, *sides, scheme=scheme)
    assert chosen.shape == (5, 64, 4)
    for t, k, n in itertools.product(range(5), (0, 31, 63), range(4)):
        assert chosen[t, k, n] == weights[expert[t], n, k]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_dequant_gather_decodes_the_rows_asked_for(scheme):
    table, *sides = packed(scheme, 6, 64)
    rows = decode(QuantScheme.parse(scheme), table, *sides)
    ids = np.array([[5, 0, 5], [1, 2, 3]], np.int64)
    found = run("dequant_gather", table, ids, *sides, scheme=scheme)
    assert found.dtype == np.float32
    for at in np.ndindex(2, 3):
        np.testing.assert_array_equal(found[at], rows[ids[at]])
    one = run("dequant_gather", table, np.array(4, np.int32), *sides, scheme=scheme)
    np.testing.assert_array_equal(one, rows[4])


def test_packed_shapes_with_symbols():
    q4 = Shape([11, 36], "u8")  # two blocks of 32 weights, 18 bytes each
    assert (
        infer("dequant_matmul", ["batch", "seq", 64], q4, scheme="Q4_0") == "[batch, seq, 11] f32"
    )
    ids = Shape(["batch", "seq"], i32)
    assert infer("dequant_gather", q4, ids, scheme="Q4_0") == "[batch, seq, 64] f32"
    experts = Shape([3, 11, 36], "u8")
    route = Shape(["rows"], i32)
    x = Shape(["rows", 64], f16)
    assert infer("dequant_grouped_matmul", x, experts, route, scheme="Q4_0") == "[rows, 11] f16"
    assert infer("dequant_moe_weights", experts, route, scheme="Q4_0") == "[rows, 64, 11] f32"


def test_packed_cost_counts_packed_bytes():
    found = cost("dequant_matmul", [3, 64], Shape([11, 36], "u8"), scheme="Q4_0")
    assert found.flops == 2 * 3 * 64 * 11
    assert found.bytes == 3 * 64 * 4 + 11 * 36 + 3 * 11 * 4
    looked_up = cost("dequant_gather", Shape([1000, 36], "u8"), Shape([2], i32), scheme="Q4_0")
    assert looked_up.bytes == 2 * 4 + 2 * 36 + 2 * 64 * 4


INT8 = Shape([5, 64], i8)


@pytest.mark.parametrize(
    ("shapes", "scheme", "kind", "part"),
    [
        (([3, 32], Shape([5, 36], "u8")), "Q4_0", ShapeError, "got 32; expected 64"),
        (([3, "k"], Shape([5, 36], "u8")), "Q4_0", ShapeError, "got k; expected 64"),
        (([3, 64], Shape([5, 35], "u8")), "Q4_0", ShapeError, "multiple of 18"),
        (([3, 64], Shape([5, "k"], "u8")), "Q4_0", ShapeError, "fixed size"),
        (([3, 64], Shape([5, 36], i8)), "Q4_0", DTypeError, "expected u8"),
        (([3, 64], Shape([2, 5, 36], "u8")), "Q4_0", ShapeError, "rank 2"),
        (([3, 64], Shape([5, 36], "u8"), [5, 2]), "Q4_0", ShapeError, "have no separate scale"),
        (
            ([3, 64], INT8),
            "int8",
            ShapeError,
            "need a separate scale; got none; expected [5, 1] f32",
        ),
        (([3, 64], INT8, [5, 2]), "int8", ShapeError, "one entry per row"),
        (([3, 64], INT8, [5, 1]), "int8_b32", ShapeError, "one entry per 32 columns"),
        (([3, 64], INT8, Shape([5, 1], f16)), "int8", DTypeError, "expected f32"),
        (([3, 64], INT8, [5, 1]), "int8_asym", ShapeError, "need a separate zp"),
        (([3, 64], INT8, [5, 1], Shape([5, 1], i8)), "int8", ShapeError, "have no separate zp"),
        ((Shape([3, 64], i8), INT8, [5, 1]), "int8", DTypeError, "x must be of a float type"),
        (([3, 64], INT8), "int9", OptionError, "unknown quantisation scheme"),
    ],
)
def test_dequant_matmul_refuses(shapes, scheme, kind, part):
    with pytest.raises(kind) as error:
        infer("dequant_matmul", *shapes, scheme=scheme)
    assert part in str(error.value)


def test_packed_lookups_refuse_what_is_not_there():
    table = packed("Q8_0", 4, 32)[0]
    with pytest.raises(InputError, match=r"ids out of range; got 4 … 4; expected 0 … 3"):
        run("dequant_gather", table, np.array([4], np.int32), scheme="Q8_0")
    with pytest.raises(InputError, match="expert out of range"):
        run("dequant_moe_weights", table[None], np.array([1], np.int32), scheme="Q8_0")
    with pytest.raises(RlxError, match="ids must be of an integer type"):
        infer("dequant_gather", Shape([4, 34], "u8"), [3], scheme="Q8_0")
