"""Backward of attention against central differences of its forward, in f64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from differences import cotangent
from run_op import infer, run

from rlx.errors import AttributeValueError, ShapeError
from rlx.ir.dtype import f32
from rlx.ir.shape import Shape

RNG = np.random.default_rng(8)
HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 3}


def operands(rows: int, keys: int) -> list[Any]:
    return [RNG.standard_normal((2, n, h * 3)) for n, h in ((rows, 4), (keys, 2), (keys, 2))]


def check(arrays: list[Any], mask: list[Any], **options: Any) -> None:
    dout = RNG.standard_normal(arrays[0].shape)
    given = [*arrays, *mask]
    out, lse = run("attention_with_lse", *given, **HEADS, **options)
    wants = options.get("mask_kind") == "bias"
    found = run(
        "attention_backward", *arrays, out, lse, dout, *mask, **HEADS, **options, wants_bias=wants
    )

    def forward(*x: Any) -> Any:
        return run("attention", *x, **HEADS, **options)

    for i in range(len(found)):
        np.testing.assert_allclose(found[i], cotangent(forward, given, i, dout), atol=2e-9)


@pytest.mark.parametrize("mask", ["none", "causal", "sliding_window(2)", "local(1)"])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_backward_against_central_differences(mask: str, softcap: float) -> None:
    check(operands(3, 5), [], mask_kind=mask, softcap=softcap, scale=0.7)


def test_masks_that_are_tensors() -> None:
    keep = RNG.random((2, 1, 3, 4)) < 0.6
    keep[0, 0, 1] = False  # a query without any key
    check(operands(3, 4), [keep], mask_kind="custom")
    check(operands(3, 4), [RNG.standard_normal((4, 1, 4))], mask_kind="bias", softcap=2.0)


def test_heads_before_rows() -> None:
    arrays = [RNG.standard_normal((1, h, n, 3)) for n, h in ((3, 4), (4, 2), (4, 2))]
    check(arrays, [], mask_kind="causal", q_layout="bhsd", kv_layout="bhsd")


def test_log_sum_exp_of_rows() -> None:
    q, k, v = operands(2, 3)
    sinks = RNG.standard_normal(4)
    _, lse = run("attention_with_lse", q, k, v, sinks, **HEADS, has_sinks=True)
    for b, h, i in np.ndindex(2, 4, 2):
        row, keys = q[b, i].reshape(4, 3)[h], k[b].reshape(3, 2, 3)[:, h // 2]
        scores = np.append(keys @ row / np.sqrt(3), sinks[h])
        np.testing.assert_allclose(lse[b, h, i], np.log(np.exp(scores).sum()))
    q, k, v = operands(3, 1)
    out, lse = run("attention_with_lse", q, k, v, **HEADS, mask_kind="causal")
    assert np.isneginf(lse[:, :, :2]).all()
    assert not out[:, :2].any()


def test_what_does_not_fit_is_named() -> None:
    q, k = Shape(["b", "n", 12], f32), Shape(["b", "m", 6], f32)
    lse = Shape(["b", 4, "n"], f32)
    assert infer("attention_with_lse", q, k, k, **HEADS)[1] == "[b, 4, n] f32"
    with pytest.raises(ShapeError, match="lse"):
        infer("attention_backward", q, k, k, q, Shape(["b", 2, "n"], f32), q, **HEADS)
    with pytest.raises(ShapeError, match="dout"):
        infer("attention_backward", q, k, k, q, lse, k, **HEADS)
    with pytest.raises(ShapeError, match="bias"):
        infer("attention_backward", q, k, k, q, lse, q, **HEADS, wants_bias=True)
    with pytest.raises(AttributeValueError, match="softcap"):
        infer("attention_backward", q, k, k, q, lse, q, **HEADS, softcap=-1.0)
