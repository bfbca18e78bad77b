"""Attention and rope against loops over heads and positions."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from run_op import cost, infer, run

from rlx.errors import AttributeValueError, DTypeError, InputError, ShapeError
from rlx.ir.attrs import MaskKind
from rlx.ir.dtype import f16, i32
from rlx.ir.graph import Graph
from rlx.ir.interp import evaluate
from rlx.ir.quant.scheme import GGUF_SCHEMES, encode
from rlx.ir.shape import Shape

rng = np.random.default_rng(17)


def normal(*dims, dtype=np.float64):
    return rng.standard_normal(dims).astype(dtype)


def heads(num_heads, num_kv_heads, head_dim):
    return {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}


def attend(q, k, v, *, visible, bias=None, scale=None, softcap=0.0):
    """q [B, Sq, H, D], k and v [B, Sk, KV, D]; visible(b, h, i, j) says what query i sees."""
    batch, rows, heads, dim = q.shape
    out = np.zeros(q.shape)
    for b, i, h in np.ndindex(batch, rows, heads):
        kv = h // (heads // k.shape[2])
        scores, values = [], []
        for j in range(k.shape[1]):
            if not visible(b, h, i, j):
                continue
            s = math.fsum(float(q[b, i, h, d]) * float(k[b, j, kv, d]) for d in range(dim))
            s *= 1 / math.sqrt(dim) if scale is None else scale
            if softcap:
                s = softcap * math.tanh(s / softcap)
            if bias is not None:
                s += float(bias[b, h, i, j])
            scores.append(s)
            values.append(v[b, j, kv].astype(np.float64))
        top = max(scores, default=-math.inf)
        if top == -math.inf:
            continue  # nothing to see: zeros
        weights = [math.exp(s - top) for s in scores]
        total = math.fsum(weights)
        out[b, i, h] = sum(w / total * value for w, value in zip(weights, values, strict=True))
    return out


def seen_by(kind, rows, keys, mask=None):
    if kind == "causal":
        return lambda b, h, i, j: j <= keys - rows + i
    if kind == "window":
        return lambda b, h, i, j: keys - rows + i - 3 < j <= keys - rows + i
    if kind == "local":
        return lambda b, h, i, j: abs(j - (keys - rows + i)) <= 1
    if kind == "local, some":
        return lambda b, h, i, j: abs(j - (keys - rows + i)) <= 1 and bool(mask[b, h, i, j])
    if kind == "custom":
        return lambda b, h, i, j: bool(mask[b, h, i, j])
    return lambda b, h, i, j: True


MASKS = {
    "none": MaskKind.NONE,
    "causal": MaskKind.CAUSAL,
    "window": MaskKind.SLIDING_WINDOW(3),
    "local": MaskKind.LOCAL(1),
    "local, some": MaskKind.LOCAL(1),
    "custom": MaskKind.CUSTOM,
    "bias": MaskKind.BIAS,
}


def make_mask(kind, *scores):
    if kind in ("custom", "local, some"):
        mask = rng.random(scores) < 0.6
        mask[0, 0, 0] = False  # one query that sees nothing
        return mask
    if kind == "bias":
        mask = normal(*scores)
        mask[0, 1, 0] = -np.inf
        mask[0, 0, -1, 0] = -np.inf
        return mask
    return None


# f64 all the way: sums of a few products, so a few units of 1e-16
EXACT = {"rtol": 1e-12, "atol": 1e-13}


@pytest.mark.parametrize("kind", list(MASKS))
@pytest.mark.parametrize("counts", [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize(("rows", "keys"), [(5, 5), (2, 6), (1, 4), (4, 2)])
def test_masks_groups_and_lengths(kind, counts, rows, keys):
    q, k, v = (
        normal(2, rows, counts[0], 4),
        normal(2, keys, counts[1], 4),
        normal(2, keys, counts[1], 4),
    )
    mask = make_mask(kind, 2, counts[0], rows, keys)
    operands = (q, k, v) if mask is None else (q, k, v, mask)
    found = run(
        "attention", *operands, num_heads=counts[0], num_kv_heads=counts[1], head_dim=4,
        mask_kind=MASKS[kind],
    )  # fmt: skip
    visible = seen_by(kind, rows, keys, mask)
    expected = attend(q, k, v, visible=visible, bias=mask if kind == "bias" else None)
    np.testing.assert_allclose(found, expected, **EXACT)


@pytest.mark.parametrize("kind", ["causal", "bias"])
@pytest.mark.parametrize("scale", [None, 0.0, 0.7])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_scale_and_softcap(kind, scale, softcap):
    q, k, v = 3 * normal(1, 3, 2, 4), 3 * normal(1, 5, 2, 4), normal(1, 5, 2, 4)
    mask = make_mask(kind, 1, 2, 3, 5)
    operands = (q, k, v) if mask is None else (q, k, v, mask)
    found = run("attention", *operands, **_options(kind, scale, softcap))
    expected = attend(q, k, v, visible=seen_by(kind, 3, 5), bias=mask, scale=scale, softcap=softcap)
    np.testing.assert_allclose(found, expected, **EXACT)


def _options(kind, scale, softcap):
    return {**heads(2, 2, 4), "mask_kind": MASKS[kind], "scale": scale, "softcap": softcap}


def layouts(x):
    """x [B, S, H, D] in the three forms: name of the layout, array."""
    return {
        "flat": ("bshd", x.reshape(*x.shape[:2], -1)),
        "bshd": ("bshd", x),
        "bhsd": ("bhsd", x.transpose(0, 2, 1, 3).copy()),
    }


@pytest.mark.parametrize("q_form", ["flat", "bshd", "bhsd"])
@pytest.mark.parametrize("kv_form", ["flat", "bshd", "bhsd"])
def test_layouts_mean_the_same(q_form, kv_form):
    q, k, v = normal(2, 3, 4, 2), normal(2, 5, 2, 2), normal(2, 5, 2, 2)
    expected = attend(q, k, v, visible=seen_by("causal", 3, 5))
    q_layout, q_array = layouts(q)[q_form]
    kv_layout, k_array = layouts(k)[kv_form]
    found = run(
        "attention", q_array, k_array, layouts(v)[kv_form][1], num_heads=4, num_kv_heads=2,
        head_dim=2, mask_kind="causal", q_layout=q_layout, kv_layout=kv_layout,
    )  # fmt: skip
    np.testing.assert_allclose(found, layouts(expected)[q_form][1], **EXACT)


@pytest.mark.parametrize("dims", [(5,), (3, 1), (2, 1, 1, 5), (1, 2, 3, 5), (1, 1, 1, 1)])
def test_masks_broadcast(dims):
    q, k, v = normal(2, 3, 2, 4), normal(2, 5, 2, 4), normal(2, 5, 2, 4)
    flags = rng.random(dims) < 0.5
    found = run("attention", q, k, v, flags, **heads(2, 2, 4), mask_kind="custom")
    full = np.broadcast_to(flags, (2, 2, 3, 5))
    expected = attend(q, k, v, visible=seen_by("custom", 3, 5, full))
    np.testing.assert_allclose(found, expected, **EXACT)


def test_no_keys_at_all_gives_zeros():
    q, k = normal(2, 3, 8, dtype=np.float32), normal(2, 0, 8, dtype=np.float32)
    found = run("attention", q, k, k, **heads(2, 2, 4))
    np.testing.assert_array_equal(found, np.zeros_like(q))
    assert run("attention", q[:, :0], q, q, **heads(2, 2, 4)).shape == (2, 0, 8)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_narrow_types_sum_in_f32(dtype):
    q, k, v = (normal(1, 6, 2, 8, dtype=dtype) for _ in range(3))
    found = run("attention", q, k, v, **heads(2, 2, 8), mask_kind="causal")
    assert found.dtype == dtype
    expected = attend(q, k, v, visible=seen_by("causal", 6, 6))
    # f32 arithmetic on numbers around 1: 1e-6; then half a unit of the result type
    unit = {np.float16: 2.0**-11, np.float32: 2.0**-24}.get(dtype, 2.0**-8)
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=unit * 1.01, atol=2e-6)


def test_a_narrow_cache_serves_wide_queries():
    q, k = normal(1, 2, 8, dtype=np.float32), normal(1, 4, 8, dtype=np.float16)
    assert run("attention", q, k, k, **heads(2, 2, 4)).dtype == np.float32
    assert (
        run("attention", k, q[:, [0, 0, 1, 1]], q[:, [0, 0, 1, 1]], **heads(2, 2, 4)).dtype
        == np.float16
    )


def test_attention_infers_symbols():
    keys = ["batch", "past_seq + seq", 2, 16]
    attributes = heads(4, 2, 16)
    q = Shape(["batch", "seq", 64], f16)
    assert infer("attention", q, keys, keys, **attributes) == "[batch, seq, 64] f16"
    mask = Shape(["seq", "past_seq + seq"], "bool")
    found = infer("attention", q, keys, keys, mask, **attributes, mask_kind="custom")
    assert found == "[batch, seq, 64] f16"


def flops(rows, keys, kind):
    attributes = {**heads(4, 2, 8), "mask_kind": MASKS[kind]}
    return cost("attention", [3, rows, 32], [3, keys, 16], [3, keys, 16], **attributes).flops


def test_attention_cost_counts_visible_pairs():
    per_pair = 3 * 4 * 8 * 4  # batch, heads, head_dim, two products of two flops
    assert flops(10, 10, "none") == per_pair * 100
    assert flops(10, 10, "causal") == per_pair * 55  # 1 + 2 + … + 10
    assert flops(1, 10, "causal") == per_pair * 10
    assert flops(10, 10, "window") == per_pair * (1 + 2 + 3 * 8)
    assert flops(10, 10, "local") == per_pair * (2 + 3 * 8 + 2)
    assert flops(4, 2, "local") == per_pair * (0 + 1 + 2 + 2)
    assert flops("seq", "seq", "local") == _symbol("seq") * (3 * per_pair)
    assert flops("seq", "seq", "causal") == flops("seq", "seq", "none") // 2 + _symbol("seq") * (
        per_pair // 2
    )
    shapes = [3, 10, 32], [3, 20, 16], [3, 20, 16]
    found = cost("attention", *shapes, num_heads=4, num_kv_heads=2, head_dim=8)
    assert found.bytes == 4 * 3 * (10 * 32 + 2 * 20 * 16 + 10 * 32)


def _symbol(name):
    return Shape([name]).dims[0]


Q, K = [2, 3, 16], [2, 5, 8]
HEADS = heads(4, 2, 4)


BLOCKS = {"head_dim": 32, "kv_scheme": "Q8_0"}
W, P, PACKED = [2, 3, 128], [2, 5, 2, 34], Shape([2, 5, 2, 34], "u8")


def test_packed_keys_are_what_their_blocks_say():
    q, k, v = (normal(2, 4, n, 64) for n in (3, 7, 7))
    k, v = (encode(GGUF_SCHEMES["Q8_0"], x[:, :2].astype(np.float32)).data for x in (k, v))
    options = {**heads(4, 2, 64), "q_layout": "bhsd", "kv_layout": "bhsd"}
    found = run("attention", q, k, v, **options, kv_scheme="Q8_0")
    plain = [blocks(x) for x in (k, v)]
    np.testing.assert_array_equal(found, run("attention", q, *plain, **options))


def blocks(x):
    """scale · codes, block by block."""
    x = x.reshape(*x.shape[:-1], -1, 34)
    scale = x[..., :2].copy().view(np.float16).astype(np.float32)
    return (scale * x[..., 2:].view(np.int8)).reshape(*x.shape[:-2], -1)


@pytest.mark.parametrize(
    ("shapes", "changes", "kind", "part"),
    [
        ((Q, [2, 5, 16], [2, 5, 16]), {}, ShapeError, "heads of k"),
        (([2, 3, 15], K, K), {}, ShapeError, "q is not made of whole heads; got [2, 3, 15]"),
        (([2, 3, 4, 5], K, K), {}, ShapeError, "q is not made of whole heads"),
        (([3, 16], K, K), {}, ShapeError, "q has the wrong rank"),
        ((Q, K, K), {"q_layout": "bhsd"}, ShapeError, "expected [B, H, S, 4]"),
        ((Q, [3, 5, 8], K), {}, ShapeError, "batch of k against q"),
        ((Q, K, [2, 6, 8]), {}, ShapeError, "length of v against k"),
        ((["b", 3, 16], ["c", 5, 8], K), {}, ShapeError, "got c; expected b"),
        ((Shape(Q, i32), K, K), {}, DTypeError, "q must be of a float type"),
        ((Q, K, K), {"mask_kind": "custom"}, ShapeError, "custom needs a mask"),
        ((Q, K, K, [3, 5]), {"mask_kind": "causal"}, ShapeError, "causal takes no mask"),
        ((Q, K, K, [3, 5]), {"mask_kind": "custom"}, DTypeError, "hint: numbers to add"),
        ((Q, K, K, [3, 5]), {"mask_kind": "local(2)"}, DTypeError, "a local mask holds flags"),
        ((Q, K, K), {"mask_kind": "local"}, AttributeValueError, "a local mask needs a distance"),
        ((Q, K, K), {"mask_kind": "causal(2)"}, AttributeValueError, "a sliding window needs"),
        (
            (Q, K, K, Shape([3, 5], "bool")),
            {"mask_kind": "bias"},
            DTypeError,
            "must be of a float type",
        ),
        ((Q, K, K, [2, 5]), {"mask_kind": "bias"}, ShapeError, "2 against 3"),
        (
            ([2, 1, 16], K, K, [3, 5]),
            {"mask_kind": "bias"},
            ShapeError,
            "does not broadcast to the scores; got [3, 5] f32; expected [2, 4, 1, 5]",
        ),
        ((Q, K, K), {"num_kv_heads": 3}, AttributeValueError, "a multiple of 3"),
        ((Q, K, K), {"num_heads": 0}, AttributeValueError, "attention.num_heads"),
        ((Q, K, K), {"softcap": -1.0}, AttributeValueError, "attention.softcap"),
        ((Q, K, K), {"scale": math.inf}, AttributeValueError, "attention.scale"),
        ((Q, K, K), {"kv_layout": "sbhd"}, AttributeValueError, "attention.kv_layout"),
        ((Q, K, K), {"mask_kind": "blind"}, AttributeValueError, "unknown mask kind"),
        ((Q, K, K), {"kv_scheme": "Q4_0"}, AttributeValueError, "expected none or Q8_0"),
        ((Q, K, K), {"kv_scheme": "Q8_0"}, ShapeError, "got 4 columns"),
        ((W, P, PACKED), {**BLOCKS}, ShapeError, "packed k is not bytes by head"),
        ((W, Shape([2, 5, 2, 32], "u8"), PACKED), {**BLOCKS}, ShapeError, "whole heads"),
    ],
)
def test_attention_refuses(shapes, changes, kind, part):
    with pytest.raises(kind) as error:
        infer("attention", *shapes, **{**HEADS, **changes})
    assert part in str(error.value)


# -- rope -------------------------------------------------------------------------------------


def turn(x, cos, sin, row, n_rot, interleaved):
    """x [B, S, H, D]; row(b, s) is the table row of a token."""
    out = np.array(x, np.float64)
    for b, s, h in np.ndindex(x.shape[:3]):
        for i in range(n_rot // 2):
            first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + n_rot // 2)
            c, t = float(cos[row(b, s), i]), float(sin[row(b, s), i])
            u, w = float(x[b, s, h, first]), float(x[b, s, h, second])
            out[b, s, h, first] = u * c - w * t
            out[b, s, h, second] = w * c + u * t
    return out


def tables(rows, half):
    angles = rng.uniform(0, 7, (rows, half))
    return np.cos(angles), np.sin(angles)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("n_rot", [0, 2, 4])
@pytest.mark.parametrize("layout_name", ["flat", "bshd", "bhsd"])
@pytest.mark.parametrize("offset", [0, 3])
def test_rope_turns_pairs(interleaved, n_rot, layout_name, offset):
    x = normal(2, 4, 3, 6)
    cos, sin = tables(9, (n_rot or 6) // 2)
    layout, array = layouts(x)[layout_name]
    found = run(
        "rope", array, cos, sin, head_dim=6, n_rot=n_rot, interleaved=interleaved, offset=offset,
        layout=layout,
    )  # fmt: skip
    expected = turn(x, cos, sin, lambda b, s: offset + s, n_rot or 6, interleaved)
    np.testing.assert_allclose(found, layouts(expected)[layout_name][1], **EXACT)


@pytest.mark.parametrize("layout_name", ["flat", "bshd", "bhsd"])
@pytest.mark.parametrize("per_batch", [False, True])
def test_rope_takes_positions(layout_name, per_batch):
    x = normal(2, 4, 3, 6)
    cos, sin = tables(9, 3)
    positions = rng.integers(0, 9, (2, 4) if per_batch else (4,)).astype(np.int32)
    layout, array = layouts(x)[layout_name]
    found = run("rope", array, cos, sin, positions, head_dim=6, layout=layout)
    expected = turn(
        x, cos, sin, lambda b, s: positions[b, s] if per_batch else positions[s], 6, False
    )
    np.testing.assert_allclose(found, layouts(expected)[layout_name][1], **EXACT)


def test_rope_keeps_the_type_of_x():
    x = normal(1, 2, 8, dtype=np.float16)
    cos, sin = (t.astype(np.float32) for t in tables(4, 2))
    found = run("rope", x, cos, sin, head_dim=4)
    assert found.dtype == np.float16
    exact = turn(x.reshape(1, 2, 2, 4), cos, sin, lambda b, s: s, 4, False).reshape(1, 2, 8)
    assert np.all(np.abs(found - exact) <= np.spacing(np.abs(found)) * 0.501)


def test_rope_with_a_symbolic_offset():
    g = Graph()
    x = g.input("x", ["batch", "seq", 2, 4])
    cos, sin = g.input("cos", [8, 2]), g.input("sin", [8, 2])
    y = g.rope(x, cos, sin, head_dim=4, offset="past_seq")
    assert str(y.shape) == "[batch, seq, 2, 4] f32"
    g.set_outputs(y)
    array = normal(1, 3, 2, 4, dtype=np.float32)
    c, s = (t.astype(np.float32) for t in tables(8, 2))
    (found,) = evaluate(g, [array, c, s], {"past_seq": 5})
    expected = turn(array, c, s, lambda b, t: 5 + t, 4, False)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    with pytest.raises(ShapeError, match=r"got 8 rows; expected at least 9"):
        evaluate(g, [array, c, s], {"past_seq": 6})


def test_rope_refuses_positions_beyond_the_table():
    x, (cos, sin) = normal(1, 2, 4), tables(3, 2)
    with pytest.raises(InputError, match=r"positions out of range; got 0 … 3; expected 0 … 2"):
        run("rope", x, cos, sin, np.array([0, 3], np.int32), head_dim=4)
    with pytest.raises(InputError, match="got -1"):
        run("rope", x, cos, sin, np.array([-1, 0], np.int32), head_dim=4)


def test_rope_cost_reads_only_the_rows_it_needs():
    found = cost("rope", [2, 3, 8], [1000, 2], [1000, 2], head_dim=4)
    assert found.bytes == 4 * (2 * 48 + 2 * 3 * 2)
    assert found.flops == 3 * 48


X, TABLE = [2, 4, 12], [9, 3]


@pytest.mark.parametrize(
    ("shapes", "attributes", "kind", "part"),
    [
        ((X, [9, 2], [9, 2]), {}, ShapeError, "columns of cos against n_rot/2"),
        ((X, TABLE, [8, 3]), {}, ShapeError, "rows of sin against cos"),
        ((X, TABLE, TABLE), {"offset": 6}, ShapeError, "got 9 rows; expected at least 10"),
        ((X, [3, 3], [3, 3]), {}, ShapeError, "expected at least 4"),
        (([2, 4, 13], TABLE, TABLE), {}, ShapeError, "not made of whole heads"),
        ((Shape(X, i32), TABLE, TABLE), {}, DTypeError, "x must be of a float type"),
        ((X, TABLE, TABLE, [4]), {}, DTypeError, "positions must be of an integer type"),
        ((X, TABLE, TABLE, Shape([5], i32)), {}, ShapeError, "expected [4] or [2, 4]"),
        ((X, TABLE, TABLE, Shape([], i32)), {}, ShapeError, "expected [4] or [2, 4]"),
        ((X, TABLE, TABLE, Shape([1, 2, 4], i32)), {}, ShapeError, "expected [4] or [2, 4]"),
        ((X, TABLE, TABLE, Shape([4], i32)), {"offset": 1}, ShapeError, "exclude each other"),
        ((X, TABLE, TABLE), {"n_rot": 3}, AttributeValueError, "rope.n_rot"),
        ((X, TABLE, TABLE), {"n_rot": 8}, AttributeValueError, "head_dim=6"),
        ((X, TABLE, TABLE), {"head_dim": 3}, AttributeValueError, "got 3"),
        ((X, TABLE, TABLE), {"offset": -1}, AttributeValueError, "rope.offset"),
        ((X, TABLE, TABLE), {"layout": "hbsd"}, AttributeValueError, "rope.layout"),
    ],
)
def test_rope_refuses(shapes, attributes, kind, part):
    with pytest.raises(kind) as error:
        infer("rope", *shapes, **{"head_dim": 6, **attributes})
    assert part in str(error.value)
