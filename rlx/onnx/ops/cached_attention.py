"""Microsoft's attention operators: packed projections, KV caches, rotary embeddings."""

from __future__ import annotations

from typing import Any

import rlx.numpy as xp
from rlx.nn import functional as F
from rlx.numpy.array import Array
from rlx.onnx.call import Call
from rlx.onnx.graph_ops import graph_op
from rlx.onnx.table import op

DOMAIN = "com.microsoft"


def heads_first(x: Array, heads: int) -> Array:
    """[B, S, heads · D] as [B, heads, S, D]."""
    width = x.shape[-1] // heads
    return xp.permute_dims(xp.reshape(x, (x.shape[0], x.shape[1], heads, width)), (0, 2, 1, 3))


def heads_last(x: Array) -> Array:
    """[B, heads, S, D] as [B, S, heads · D]."""
    turned = xp.permute_dims(x, (0, 2, 1, 3))
    return xp.reshape(turned, (x.shape[0], x.shape[2], x.shape[1] * x.shape[3]))


def _scale(node: Call) -> float | None:
    found = float(node.float("scale", 0.0))
    return found or None


def _attended(
    node: Call, q: Array, k: Array, v: Array, keep: Array | None, bias: Array | None
) -> Array:
    """Attention with a mask of keys to keep, and what is added to the scores."""
    causal = bool(node.int("unidirectional", 0))
    mask = bias
    if keep is not None:
        if bias is None and not causal:
            mask = keep
        else:
            lowest = xp.asarray(-3e38, dtype=q.dtype)
            zero = xp.zeros_like(lowest) if bias is None else bias
            mask = xp.where(keep, zero, lowest)
    return F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal, scale=_scale(node)
    )  # fmt: skip


def _kept(node: Call, mask: Array | None, keys: Any, rows: Any) -> Array | None:
    """Which keys count [B, 1, rows or 1, keys]: from lengths, from a mask, or from both ends."""
    if mask is None:
        return None
    if mask.ndim == 1:
        place = xp.arange(keys, dtype=mask.dtype)
        return xp.reshape(xp.less(place, xp.expand_dims(mask, -1)), (-1, 1, 1, keys))
    given = mask != 0
    if mask.ndim == 2:
        return xp.expand_dims(given, (1, 2))
    if mask.ndim == 3:
        return xp.expand_dims(given, 1)
    if mask.ndim == 4:  # of the longest sequence: the last rows of a square
        return given[:, :, keys - rows : keys, :keys]
    raise node.fault("not a mask", got=list(mask.shape))


@op("Attention", domain=DOMAIN)
def attention(
    node: Call, x: Array, weights: Array, bias: Array | None = None, mask: Array | None = None,
    past: Array | None = None, added: Array | None = None, past_length: Array | None = None,
) -> Any:  # fmt: skip
    heads = node.int("num_heads")
    if node.int("do_rotary", 0) or past_length is not None:
        raise node.unsupported("attention with rotary positions or a shared buffer inside")
    projected = xp.matmul(x, weights)
    projected = projected if bias is None else projected + bias
    total = int(weights.shape[-1])
    sizes = node.ints("qkv_hidden_sizes", None) or (total // 3,) * 3
    if sum(sizes) != total:
        raise node.fault("sizes of q, k and v do not fit", got=list(sizes), expected=total)
    a, b = sizes[0], sizes[0] + sizes[1]
    parts = (projected[..., :a], projected[..., a:b], projected[..., b:])
    q, k, v = (heads_first(p, heads) for p in parts)
    if past is not None:
        k, v = xp.concat([past[0], k], axis=2), xp.concat([past[1], v], axis=2)
    keep = _kept(node, mask, k.shape[2], q.shape[2])
    made = heads_last(_attended(node, q, k, v, keep, added))
    return (made, xp.stack([k, v])) if node.wants(1) else made


@op("MultiHeadAttention", domain=DOMAIN)
def multi_head_attention(
    node: Call, query: Array, key: Array | None = None, value: Array | None = None,
    bias: Array | None = None, padding: Array | None = None, added: Array | None = None,
    past_key: Array | None = None, past_value: Array | None = None,
    past_length: Array | None = None, indirection: Array | None = None,
) -> Any:  # fmt: skip
    heads = node.int("num_heads")
    if past_length is not None or indirection is not None:
        raise node.unsupported("a shared buffer for past keys")
    if query.ndim == 5:  # [B, S, heads, 3, D]
        q, k, v = (xp.permute_dims(query[:, :, :, i], (0, 2, 1, 3)) for i in range(3))
    elif key is not None and key.ndim == 5:  # [B, S, heads, 2, D]
        q = heads_first(_biased(query, bias, 0, 1), heads)
        k, v = (xp.permute_dims(key[:, :, :, i], (0, 2, 1, 3)) for i in range(2))
    elif key is None or value is None:
        raise node.fault("neither keys nor a packed query")
    else:
        width = int(query.shape[-1])
        q = heads_first(_biased(query, bias, 0, width), heads)
        if key.ndim == 4:  # of another sequence, as heads already
            k, v = key, value
        else:
            inner = int(key.shape[-1])
            k = heads_first(_biased(key, bias, width, width + inner), heads)
            v = heads_first(_biased(value, bias, width + inner, None), heads)
    if past_key is not None and past_value is not None:
        k, v = xp.concat([past_key, k], axis=2), xp.concat([past_value, v], axis=2)
    keep = _kept(node, padding, k.shape[2], q.shape[2])
    made = heads_last(_attended(node, q, k, v, keep, added))
    return (made, k, v)


def _biased(x: Array, bias: Array | None, start: int, end: int | None) -> Array:
    return x if bias is None else x + bias[start:end]


# -- grouped queries ------------------------------------------------------------------------------


@op("GroupQueryAttention", domain=DOMAIN, known=(6,))
def group_query_attention(
    node: Call, query: Array, key: Array | None, value: Array | None, past_key: Array | None,
    past_value: Array | None, last: Array, total: Any, cos: Array | None = None,
    sin: Array | None = None, positions: Array | None = None, added: Array | None = None,
    sinks: Array | None = None,
) -> Any:  # fmt: skip
    heads, groups = node.int("num_heads"), node.int("kv_num_heads")
    if node.int("smooth_softmax", 0):
        raise node.unsupported("a smooth softmax")
    if key is None or value is None:  # packed
        width = int(query.shape[-1]) // (heads + 2 * groups)
        ends = (heads * width, (heads + groups) * width)
        query, key, value = (
            query[..., : ends[0]], query[..., ends[0] : ends[1]], query[..., ends[1] :]
        )  # fmt: skip
    q, k, v = heads_first(query, heads), heads_first(key, groups), heads_first(value, groups)
    rows = q.shape[2]
    before = xp.reshape(last.astype(xp.int64) + 1 - rows, (-1, 1))
    if past_key is None or (type(past_key.shape[2]) is int and past_key.shape[2] == 0):
        before = xp.zeros_like(before)  # prompts are padded behind their end
    place = before + xp.arange(rows, dtype=xp.int64)
    if node.int("do_rotary", 0):
        if cos is None or sin is None:
            raise node.fault("rotary positions without tables")
        where = place if positions is None else positions
        interleaved = bool(node.int("rotary_interleaved", 0))
        q, k = (_rotated(x, cos, sin, where, interleaved) for x in (q, k))
    size = total.reshape(-1)[0] if hasattr(total, "reshape") else total
    k_all = _cached(past_key, k, before, size, node)
    v_all = _cached(past_value, v, before, size, node)
    keys = xp.arange(k_all.shape[2], dtype=xp.int64)
    at = xp.expand_dims(place, (1, 3))
    keep = keys <= at
    window = node.int("local_window_size", -1)
    if window > 0:
        keep = xp.logical_and(keep, keys > at - window)
    mask: Any = keep
    if added is not None:
        mask = xp.where(keep, added, xp.asarray(-3e38, dtype=q.dtype))
    made = F.scaled_dot_product_attention(
        q, k_all, v_all, mask, scale=_scale(node), softcap=float(node.float("softcap", 0.0)),
        sinks=sinks,
    )  # fmt: skip
    return heads_last(made), k_all, v_all


def _cached(past: Array | None, new: Array, before: Array, total: Any, node: Call) -> Array:
    """The keys or values of all positions: behind each sequence's own length, or in a buffer that
    has room for them."""
    if past is None or (type(past.shape[2]) is int and past.shape[2] == 0):
        return new
    if type(new.shape[0]) is int and new.shape[0] == 1 and not _has_room(past, total):
        return xp.concat([past, new], axis=2)
    room = past if _has_room(past, total) else xp.concat([past, xp.zeros_like(new)], axis=2)
    count, rows = room.shape[2], new.shape[2]
    step = xp.arange(count, dtype=xp.int64) - before  # [B, count]
    fresh = xp.logical_and(step >= 0, step < rows)
    source = xp.minimum(xp.maximum(step, 0), xp.asarray(rows) - 1)
    shape = (new.shape[0], new.shape[1], count, new.shape[3])
    moved = graph_op(
        "take_along", new, xp.broadcast_to(xp.expand_dims(source, (1, 3)), shape), axis=2
    )
    return xp.where(xp.expand_dims(fresh, (1, 3)), moved, room)


def _has_room(past: Array, total: Any) -> bool:
    """Whether the past is a buffer that the new rows are part of."""
    return bool(past.shape[2] >= total)


@op("RotaryEmbedding", domain=DOMAIN)
def rotary_embedding(node: Call, x: Array, positions: Array, cos: Array, sin: Array) -> Array:
    heads, width = node.int("num_heads", 0), node.int("rotary_embedding_dim", 0)
    if x.ndim == 3:
        size = int(cos.shape[-1]) * 2 if not width else int(x.shape[-1]) // heads
        q = heads_first(x, int(x.shape[-1]) // size)
    else:
        q = x
    if positions.ndim == 1:  # of the first row
        positions = xp.reshape(positions, (1, 1)) + xp.arange(q.shape[2], dtype=positions.dtype)
        positions = xp.broadcast_to(positions, (q.shape[0], q.shape[2]))
    made = _rotated(q, cos, sin, positions, bool(node.int("interleaved", 0)))
    return heads_last(made) if x.ndim == 3 else made


def _rotated(x: Array, cos: Array, sin: Array, positions: Array, interleaved: bool) -> Array:
    """Pairs of the first 2 · columns elements turned by the angles of their positions."""
    half = int(cos.shape[-1])
    c, s = (
        xp.expand_dims(graph_op("gather", table, positions.astype(xp.int64), axis=0), 1)
        for table in (cos, sin)
    )
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        made = xp.reshape(xp.stack([a * c - b * s, a * s + b * c], axis=-1), turned.shape)
    else:
        a, b = turned[..., :half], turned[..., half:]
        made = xp.concat([a * c - b * s, a * s + b * c], axis=-1)
    return made if int(x.shape[-1]) == 2 * half else xp.concat([made, rest], axis=-1)
