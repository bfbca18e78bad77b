"""Scaled dot-product attention becomes our fused op; its backward part too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlx.errors import UnsupportedError
from rlx.ir.attrs import MaskKind
from rlx.ir.dim import same
from rlx.ir.dtype import i64
from rlx.ir.node import Value
from rlx.pytorch.aten.table import aten

if TYPE_CHECKING:
    from rlx.pytorch.lower_aten import Lowering


def _heads(low: Lowering, q: Value, k: Value) -> dict[str, Any]:
    """The attributes that shapes give, for [batch, heads, length, width]."""
    sizes = (q.shape.dims[1], k.shape.dims[1], q.shape.dims[3])
    many, few, width = (low.number(n, "attention") for n in sizes)
    return {
        "num_heads": many, "num_kv_heads": few, "head_dim": width,
        "q_layout": "bhsd", "kv_layout": "bhsd",
    }  # fmt: skip


def _masking(
    low: Lowering, q: Value, k: Value, mask: Value | None, is_causal: bool
) -> tuple[Value | None, MaskKind]:
    """PyTorch lets the first query see the first key alone; our causal mask lets the last one see
    the last key. They are one where there are as many queries as keys."""
    rows, keys = q.shape.dims[2], k.shape.dims[2]
    if mask is None and is_causal and same(rows, keys):
        return None, MaskKind.CAUSAL
    if is_causal:
        g = low.g
        mask = g.le(g.iota((1, keys), axis=1, dtype=i64), g.iota((rows, 1), dtype=i64))
    if mask is None:
        return None, MaskKind.NONE
    if mask.shape.dtype.kind == "bool":
        return mask, MaskKind.CUSTOM
    return low.cast(mask, q.shape.dtype), MaskKind.BIAS


def _require_no_dropout(p: Any) -> None:
    if p:
        raise UnsupportedError("dropout inside attention", where="attention", got=p, expected=0)


@aten(
    "_scaled_dot_product_flash_attention_for_cpu.default",
    "_scaled_dot_product_flash_attention.default",
)
def flash_attention(
    low: Lowering, q: Value, k: Value, v: Value, dropout_p: float = 0.0, is_causal: bool = False,
    *, attn_mask: Value | None = None, scale: float | None = None, **_: Any,
) -> tuple[Value, Value | None]:  # fmt: skip
    _require_no_dropout(dropout_p)
    mask, kind = _masking(low, q, k, attn_mask, is_causal)
    given = [t for t in (q, k, v, mask) if t is not None]
    options = {**_heads(low, q, k), "mask_kind": kind, "scale": scale}
    if low.uses(1):
        return low.g.attention_with_lse(*given, **options)
    return low.g.attention(*given, **options), None


@aten("_scaled_dot_product_flash_attention_for_cpu_backward.default")
def flash_attention_backward(
    low: Lowering, dout: Value, q: Value, k: Value, v: Value, out: Value, lse: Value,
    dropout_p: float, is_causal: bool, *, attn_mask: Value | None = None,
    scale: float | None = None,
) -> tuple[Value, ...]:  # fmt: skip
    _require_no_dropout(dropout_p)
    mask, kind = _masking(low, q, k, attn_mask, is_causal)
    more = () if mask is None else (mask,)
    made: tuple[Value, ...] = low.g.attention_backward(
        q, k, v, out, lse, dout, *more, **_heads(low, q, k), mask_kind=kind, scale=scale
    )
    return made


@aten("scaled_dot_product_attention.default")
def attention(
    low: Lowering, q: Value, k: Value, v: Value, mask: Value | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
    enable_gqa: bool = False, **named: Any,
) -> Value:  # fmt: skip
    """Any number of axes before [length, width]; other widths of v than of q go the long way."""
    _require_no_dropout(dropout_p)
    mask = named.get("attn_mask", mask)
    if not same(q.shape.dims[-1], v.shape.dims[-1]) or q.shape.rank > 4:
        return _plain_attention(low, q, k, v, mask, is_causal, scale)
    lead = q.shape.dims[:-2]
    rows = [
        t if t.shape.rank == 4
        else low.reshape(t, (*[1] * (4 - t.shape.rank), *t.shape.dims)) for t in (q, k, v)
    ]  # fmt: skip
    found, kind = _masking(low, rows[0], rows[1], mask, is_causal)
    more = () if found is None else (found,)
    out = low.g.attention(*rows, *more, **_heads(low, rows[0], rows[1]), mask_kind=kind,
                          scale=scale)  # fmt: skip
    return low.reshape(out, (*lead, *out.shape.dims[2:]))


def _plain_attention(
    low: Lowering, q: Value, k: Value, v: Value, mask: Value | None, is_causal: bool,
    scale: float | None,
) -> Value:  # fmt: skip
    g, rank = low.g, q.shape.rank
    turned = g.transpose(k, axes=(*range(rank - 2), rank - 1, rank - 2))
    width = low.number(q.shape.dims[-1], "attention")
    scores = g.mul(g.matmul(q, turned), width**-0.5 if scale is None else scale)
    if is_causal:
        rows, keys = scores.shape.dims[-2:]
        mask = g.le(g.iota((1, keys), axis=1, dtype=i64), g.iota((rows, 1), dtype=i64))
    if mask is not None and mask.shape.dtype.kind == "bool":
        scores = g.where(mask, scores, low.scalar(float("-inf"), scores.shape.dtype))
    elif mask is not None:
        scores = g.add(scores, mask)
    return g.matmul(g.softmax(scores, axis=-1), v)
