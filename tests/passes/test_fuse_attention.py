"""Decomposed attention is recognised: masks, scales, softcap, grouped heads and layouts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pass_support import assert_same_results, fused, op_names, reasons

from rlx.ir.attrs import MaskKind
from rlx.ir.graph import Graph
from rlx.ir.node import Value

H, KV, D = 4, 2, 8
RULE = "decomposed attention"


def heads(g: Graph, keys: object = "seq", kv: int = H, dtype: str = "f32") -> tuple[Value, ...]:
    """q, k, v as [B, H, S, D]"""
    q = g.input("q", ["batch", H, "seq", D], dtype)
    return (q, *(g.input(n, ["batch", kv, keys, D], dtype) for n in "kv"))


def scores(g: Graph, q: Value, k: Value, scale: float | None = None) -> Value:
    product = g.matmul(q, g.transpose(k, axes=(0, 1, 3, 2)))
    return product * (1 / math.sqrt(D) if scale is None else scale)


def attended(g: Graph, s: Value, v: Value) -> Value:
    return g.matmul(g.softmax(s, axis=-1), v)  # type: ignore[no-any-return]


def check(g: Graph, **expected: Any) -> Any:
    """One attention op, views aside, with these attributes."""
    after, report = fused(g, "attention", "views")
    assert report.count(RULE) == 1, report
    (node,) = [n for n in after.nodes if n.op.name == "attention"]
    views = {"reshape", "transpose"}
    assert {k for k in op_names(after) if k not in views} <= {"attention", "where", *MASK_OPS}
    for field, value in expected.items():
        assert getattr(node.op, field) == value
    return node


MASK_OPS = {"iota", "le", "ge", "lt", "gt", "sub", "add", "logical_not", "logical_and", "dim_value"}


def test_plain() -> None:
    g = Graph("plain")
    q, k, v = heads(g)
    g.set_outputs(attended(g, scores(g, q, k), v))
    check(g, scale=None, softcap=0.0, mask_kind=MaskKind.NONE, num_heads=H, num_kv_heads=H)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_16_bit_attention_with_softmax_in_f32(dtype: str) -> None:
    g = Graph("half")
    q, k, v = heads(g, dtype=dtype)
    s = g.cast(scores(g, q, k), "f32")
    g.set_outputs(g.matmul(g.cast(g.softmax(s), dtype), v))
    check(g)


SCALES: dict[str, Callable[[Graph, Value, Value], Value]] = {
    "after": lambda g, q, k: scores(g, q, k, 0.3),
    "divided": lambda g, q, k: g.matmul(q, g.transpose(k, axes=(0, 1, 3, 2))) / (1 / 0.3),
    "on q": lambda g, q, k: g.matmul(q * 0.3, g.transpose(k, axes=(0, 1, 3, 2))),
    "on k": lambda g, q, k: g.matmul(q, g.transpose(k, axes=(0, 1, 3, 2)) * 0.3),
    "on both": lambda g, q, k: g.matmul(q * 0.6, g.transpose(k, axes=(0, 1, 3, 2)) * 0.5),
}


@pytest.mark.parametrize("where", SCALES)
def test_the_scale_is_found_wherever_it_stands(where: str) -> None:
    g = Graph("scale")
    q, k, v = heads(g)
    g.set_outputs(attended(g, SCALES[where](g, q, k), v))
    node = check(g)
    assert math.isclose(node.op.scale, 0.3, rel_tol=1e-6)


def test_softcap() -> None:
    for cap in (30.0, 32.0):  # a power of two is divided by as a product
        g = Graph("cap")
        q, k, v = heads(g)
        g.set_outputs(attended(g, g.tanh(scores(g, q, k) / cap) * cap, v))
        check(g, softcap=cap)
    g = Graph("no cap")
    q, k, v = heads(g)
    g.set_outputs(attended(g, g.tanh(scores(g, q, k) / 30.0) * 20.0, v))
    after, _ = fused(g, "attention")
    assert "attention" not in op_names(after)


# -- masks -------------------------------------------------------------------------------------


def flags(g: Graph, rows: object, keys: Any, form: str) -> Value:
    """Keys at or before the query, in one of the ways it is written."""
    shift = g.dim_value(dim=keys - rows) if not isinstance(keys - rows, int) else keys - rows  # type: ignore[operator]
    row, column = g.iota(shape=(rows,)), g.iota(shape=(keys,))
    at = g.reshape(row, shape=(rows, 1)) + shift
    if form == "le":
        return g.le(column, at)  # type: ignore[no-any-return]
    if form == "ge":
        return g.ge(at, g.reshape(column, shape=(1, keys)))  # type: ignore[no-any-return]
    if form == "lt":
        return g.lt(column, at + 1)  # type: ignore[no-any-return]
    if form == "difference":
        return g.ge(at - column, 0)  # type: ignore[no-any-return]
    if form == "full iotas":
        rows2, keys2 = (g.iota(shape=(rows, keys), axis=a) for a in (0, 1))
        return g.le(keys2, rows2 + shift)  # type: ignore[no-any-return]
    assert form == "not above"
    return g.logical_not(g.gt(column, at))  # type: ignore[no-any-return]


FORMS = ["le", "ge", "lt", "difference", "full iotas", "not above"]


@pytest.mark.parametrize("hidden", [-math.inf, -1e9, -3.4e38])
@pytest.mark.parametrize("form", FORMS)
def test_causal_masks_from_iotas(form: str, hidden: float) -> None:
    g = Graph("causal")
    past = g.input("past", ["past_seq"])
    total = past.shape.dims[0] + g.input("now", ["seq"]).shape.dims[0]
    q, k, v = heads(g, keys=total)
    keep = flags(g, q.shape.dims[2], total, form)
    g.set_outputs(attended(g, g.where(keep, scores(g, q, k), hidden), v))
    check(g, mask_kind=MaskKind.CAUSAL)


def test_a_causal_mask_as_a_bias_of_a_triangle() -> None:
    g = Graph("triangle")
    q, k, v = heads(g)
    rows = q.shape.dims[2]
    bias = g.where(flags(g, rows, rows, "le"), 0.0, g.constant(-math.inf))
    g.set_outputs(attended(g, scores(g, q, k) + bias, v))
    check(g, mask_kind=MaskKind.CAUSAL)


def test_a_constant_triangle() -> None:
    g = Graph("constant")
    q, k, v = (g.input(n, ["batch", H, s, D]) for n, s in (("q", 3), ("k", 5), ("v", 5)))
    keep = np.tri(3, 5, 2, dtype=bool)
    g.set_outputs(attended(g, g.where(g.constant(keep), scores(g, q, k), -math.inf), v))
    check(g, mask_kind=MaskKind.CAUSAL)
    keep[0, 0] = False
    g.set_outputs(attended(g, g.where(g.constant(keep), scores(g, q, k), -math.inf), v))
    check(g, mask_kind=MaskKind.CUSTOM)


def test_masked_fill_with_flags_of_what_is_hidden() -> None:
    g = Graph("fill")
    q, k, v = heads(g)
    rows = q.shape.dims[2]
    hide = g.logical_not(flags(g, rows, rows, "le"))
    g.set_outputs(attended(g, g.where(hide, g.constant(-math.inf), scores(g, q, k)), v))
    check(g, mask_kind=MaskKind.CAUSAL)


@pytest.mark.parametrize("width", [1, 3])
def test_sliding_windows(width: int) -> None:
    g = Graph("window")
    q, k, v = heads(g)
    rows = q.shape.dims[2]
    at = g.reshape(g.iota(shape=(rows,)), shape=(rows, 1))
    column = g.iota(shape=(rows,))
    keep = g.logical_and(g.le(column, at), g.gt(column, at - width))
    g.set_outputs(attended(g, g.where(keep, scores(g, q, k), -math.inf), v))
    check(g, mask_kind=MaskKind.SLIDING_WINDOW(width))


def test_one_query_sees_every_key() -> None:
    g = Graph("decode")
    q = g.input("q", ["batch", H, 1, D])
    k, v = (g.input(n, ["batch", H, "n", D]) for n in "kv")
    keys = k.shape.dims[2]
    at = g.iota(shape=(1,), start=keys - 1)
    keep = g.le(g.iota(shape=(keys,)), g.reshape(at, shape=(1, 1)))
    g.set_outputs(attended(g, g.where(keep, scores(g, q, k), -math.inf), v))
    check(g, mask_kind=MaskKind.CAUSAL)


def test_an_iota_mask_that_is_not_causal_is_a_custom_one() -> None:
    g = Graph("shifted")
    q, k, v = heads(g)
    rows = q.shape.dims[2]
    at = g.reshape(g.iota(shape=(rows,), start=1), shape=(rows, 1))  # sees one key ahead
    keep = g.le(g.iota(shape=(rows,)), at)
    g.set_outputs(attended(g, g.where(keep, scores(g, q, k), -math.inf), v))
    check(g, mask_kind=MaskKind.CUSTOM)


def test_flags_given_as_a_tensor() -> None:
    g = Graph("flags")
    q, k, v = heads(g)
    keep = g.input("keep", ["batch", 1, 1, "seq"], "bool")
    one = g.logical_or(keep, g.eq(g.iota(shape=("seq",)), 0))  # no row without a key
    g.set_outputs(attended(g, g.where(one, scores(g, q, k), -math.inf), v))
    after, _ = fused(g, "attention")
    (node,) = [n for n in after.nodes if n.op.name == "attention"]
    assert node.op.mask_kind == MaskKind.CUSTOM  # type: ignore[attr-defined]


def test_rows_without_keys_stay_what_they_were() -> None:
    """Hidden by a number, a row without keys is the mean of all values; the op must agree."""
    g = Graph("empty rows")
    q, k, v = heads(g)
    keep = g.input("keep", ["batch", 1, "seq", "seq"], "bool")
    g.set_outputs(attended(g, g.where(keep, scores(g, q, k), -1e9), v))
    data = {"keep": np.zeros((2, 1, 5, 5), bool)}
    data["keep"][:, :, 1:, :2] = True
    after, report = fused(g, "attention")
    assert report.count(RULE) == 1
    (node,) = [n for n in after.nodes if n.op.name == "attention"]
    assert node.op.mask_kind == MaskKind.BIAS  # type: ignore[attr-defined]
    assert_same_results(g, after, given=data)


def test_scores_lowered_a_little_are_no_mask() -> None:
    g = Graph("little")
    q, k, v = heads(g)
    keep = g.input("keep", ["batch", 1, 1, "seq"], "bool")
    g.set_outputs(attended(g, g.where(keep, scores(g, q, k), -1e4), v))
    after, report = fused(g, "attention")
    assert "attention" not in op_names(after)
    assert "-10000.0 only" in reasons(report, RULE)[0]


def test_a_bias_on_the_scores() -> None:
    g = Graph("bias")
    q, k, v = heads(g)
    bias = g.input("bias", [H, "seq", "seq"])
    g.set_outputs(attended(g, bias + scores(g, q, k), v))
    check(g, mask_kind=MaskKind.BIAS)


# -- heads and layouts -------------------------------------------------------------------------


def repeated(g: Graph, x: Value, axis: int, how: str) -> Value:
    """Heads of x [.., KV, ..] along `axis`, each H/KV times."""
    dims = x.shape.dims
    group = H // KV
    if how == "gather":
        return g.gather(x, g.constant(np.repeat(np.arange(KV), group)), axis=axis)  # type: ignore[no-any-return]
    one = g.reshape(x, shape=(*dims[: axis + 1], 1, *dims[axis + 1 :]))
    wide = g.expand(one, shape=(*dims[: axis + 1], group, *dims[axis + 1 :]))
    return g.reshape(wide, shape=(*dims[:axis], H, *dims[axis + 1 :]))  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["expand", "gather"])
def test_repeated_heads(how: str) -> None:
    g = Graph("grouped")
    q, k, v = heads(g, kv=KV)
    k, v = (repeated(g, x, 1, how) for x in (k, v))
    g.set_outputs(attended(g, scores(g, q, k), v))
    check(g, num_heads=H, num_kv_heads=KV)


@pytest.mark.parametrize("how", ["expand", "gather"])
@pytest.mark.parametrize("before", [True, False], ids=["repeat, transpose", "transpose, repeat"])
def test_repeated_heads_in_the_layout_of_projections(how: str, before: bool) -> None:
    g = Graph("bshd")
    q = g.transpose(g.input("q", ["batch", "seq", H, D]), axes=(0, 2, 1, 3))
    parts = []
    for name in "kv":
        x = g.input(name, ["batch", "seq", KV, D])
        if before:
            parts.append(g.transpose(repeated(g, x, 2, how), axes=(0, 2, 1, 3)))
        else:
            parts.append(repeated(g, g.transpose(x, axes=(0, 2, 1, 3)), 1, how))
    y = attended(g, scores(g, q, parts[0]), parts[1])
    g.set_outputs(g.transpose(y, axes=(0, 2, 1, 3)))
    after, _ = fused(g, "attention", "views")
    assert op_names(after) == ["attention"]
    node = after.outputs[0].node
    assert (node.op.q_layout, node.op.kv_layout) == ("bshd", "bshd")  # type: ignore[attr-defined]
    assert node.op.num_kv_heads == KV  # type: ignore[attr-defined]


def test_tiled_heads_are_not_grouped_ones() -> None:
    g = Graph("tiled")
    q, k, v = heads(g, kv=KV)
    order = np.tile(np.arange(KV), H // KV)
    k, v = (g.gather(x, g.constant(order), axis=1) for x in (k, v))
    g.set_outputs(attended(g, scores(g, q, k), v))
    after, _ = fused(g, "attention")
    (node,) = [n for n in after.nodes if n.op.name == "attention"]
    assert node.op.num_kv_heads == H  # type: ignore[attr-defined]


def test_groups_as_an_axis_of_their_own() -> None:
    g = Graph("five")
    q = g.input("q", ["batch", KV, H // KV, "seq", D])
    k, v = (g.input(n, ["batch", KV, 1, "seq", D]) for n in "kv")
    s = g.matmul(q, g.transpose(k, axes=(0, 1, 2, 4, 3))) / math.sqrt(D)
    rows = q.shape.dims[3]
    keep = flags(g, rows, rows, "le")
    g.set_outputs(attended(g, g.where(keep, s, -math.inf), v))
    check(g, num_heads=H, num_kv_heads=KV, mask_kind=MaskKind.CAUSAL)


def test_one_key_head_for_all() -> None:
    g = Graph("mqa")
    q, k, v = heads(g, kv=1)
    g.set_outputs(attended(g, scores(g, q, k), v))
    check(g, num_heads=H, num_kv_heads=1)


@pytest.mark.parametrize("rank", [2, 3])
def test_single_heads(rank: int) -> None:
    g = Graph("single")
    outer = ["batch"][: rank - 2]
    q, k, v = (g.input(n, [*outer, "seq", D]) for n in "qkv")
    swap = (0, 2, 1) if rank == 3 else (1, 0)
    s = g.matmul(q, g.transpose(k, axes=swap)) / math.sqrt(D)
    if rank == 3:
        s = s + g.input("bias", ["batch", "seq", "seq"])
    g.set_outputs(attended(g, s, v))
    check(g, num_heads=1)


def test_weights_that_are_wanted_keep_the_pattern_apart() -> None:
    g = Graph("weights")
    q, k, v = heads(g)
    w = g.softmax(scores(g, q, k))
    g.set_outputs(g.matmul(w, v), w)
    after, report = fused(g, "attention")
    assert "attention" not in op_names(after)
    assert reasons(report, RULE) == ["the softmax inside is a graph output"]
    g.set_outputs(g.matmul(w, v), g.sum(w))
    assert reasons(fused(g, "attention")[1], RULE) == ["the softmax inside has another user"]


def test_values_of_another_size_are_left_alone() -> None:
    g = Graph("mla")
    q, k, _ = heads(g)
    v = g.input("wide", ["batch", H, "seq", 2 * D])
    g.set_outputs(attended(g, scores(g, q, k), v))
    after, report = fused(g, "attention")
    assert "attention" not in op_names(after)
    assert "heads differ in size" in reasons(report, RULE)[0]


def test_softmax_over_another_axis_is_not_attention() -> None:
    g = Graph("axis")
    q, k, v = heads(g)
    g.set_outputs(g.matmul(g.softmax(scores(g, q, k), axis=-2), v))
    after, _ = fused(g, "attention")
    assert "attention" not in op_names(after)


def test_a_mask_that_broadcasts_the_scores_is_left_alone() -> None:
    g = Graph("stretch")
    q, k = (g.input(n, [1, H, "seq", D]) for n in "qk")
    v = g.input("v", ["batch", H, "seq", D])
    bias = g.input("bias", ["batch", 1, "seq", "seq"])
    g.set_outputs(attended(g, scores(g, q, k) + bias, v))
    after, report = fused(g, "attention")
    assert "attention" not in op_names(after)
    assert "broadcasts" in reasons(report, RULE)[0]
