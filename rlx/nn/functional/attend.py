"""Attention, rotary positions, the KV cache, and the recurrences that take attention's place."""

from __future__ import annotations

from typing import Any

import numpy as np

import rlx.numpy as rnp
from rlx.errors import InputError, OptionError, ShapeError
from rlx.ir.attrs import MaskKind
from rlx.ir.dtype import bool_, i64
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.ir.quant.scheme import QuantScheme
from rlx.nn.functional.operands import ArrayLike, call, call_many, fixed, require_rank
from rlx.numpy.array import Array
from rlx.numpy.dispatch import as_array


def _attention(
    g: Graph, q: Value, k: Value, v: Value, mask: Value | None, sinks: Value | None,
    heads: tuple[int, int, int], kind: MaskKind, causal: bool, scale: float | None,
    softcap: float, scheme: QuantScheme | None,
) -> Any:  # fmt: skip
    many, few, width = heads
    q = fixed(g, q, (None, many, None, width))
    row = width if scheme is None else scheme.row_bytes(width)
    k, v = (fixed(g, t, (None, few, None, row)) for t in (k, v))
    if sinks is not None:
        sinks = fixed(g, sinks, (many,))
    if mask is not None and mask.shape.rank == 4:
        mask = fixed(g, mask, (None, many, None, None))
    if mask is not None and causal:
        mask = _with_causal(g, mask, q.shape.dims[2], k.shape.dims[2], kind)
    extra = [t for t in (mask, sinks) if t is not None]
    return g.attention(
        q, k, v, *extra, num_heads=many, num_kv_heads=few, head_dim=width, mask_kind=kind,
        scale=scale, softcap=softcap, q_layout="bhsd", kv_layout="bhsd",
        has_sinks=sinks is not None, kv_scheme=scheme,
    )  # fmt: skip


def _with_causal(g: Graph, mask: Value, rows: Any, keys: Any, kind: MaskKind) -> Value:
    """A mask without the keys that come after a query."""
    at = g.reshape(g.iota((rows,), dtype=i64, start=keys - rows), (rows, 1))
    seen = g.le(g.iota((keys,), dtype=i64), at)
    if kind == MaskKind.BIAS:
        return g.where(seen, mask, float("-inf"))
    return g.logical_and(seen, mask)


def _mask_kind(mask: Array | None, is_causal: bool, window: int | None) -> MaskKind:
    if window is not None:
        if mask is not None:
            raise OptionError(
                "a window or a mask", where="scaled_dot_product_attention", got="both",
                hint="put the window into the mask",
            )  # fmt: skip
        return MaskKind.SLIDING_WINDOW(window) if is_causal else MaskKind.LOCAL(window)
    if mask is not None:
        return MaskKind.CUSTOM if mask.dtype is bool_ else MaskKind.BIAS
    return MaskKind.CAUSAL if is_causal else MaskKind.NONE


def scaled_dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, mask: ArrayLike | None = None, *,
    is_causal: bool = False, scale: float | None = None, window: int | None = None,
    softcap: float = 0.0, sinks: ArrayLike | None = None, kv_scheme: str | None = None,
) -> Array:  # fmt: skip
    """softmax(scale · q kᵀ, masked) v for query [..., heads, L, D], key and value
    [..., kv_heads, S, D]; query head h takes key head h // (heads / kv_heads).

    A bool mask, broadcast to [..., heads, L, S], says which keys to keep, a float one is added to
    the scores. The last query is at the position of the last key, so a causal mask fits a KV cache
    too. With `window` = w a causal query sees the last w keys up to its own, another one those up
    to w away on both sides. `softcap` c makes scores s into c · tanh(s / c); `sinks` [heads] are
    scores of one more key whose value is 0. `scale` is 1 / √D by default. With `kv_scheme="q8_0"`
    key and value are bytes of `quantize_blocks`. A query without any key gives zeros.
    """
    q, k, v = as_array(query), as_array(key), as_array(value)
    if not q.ndim == k.ndim == v.ndim >= 3:
        raise ShapeError(
            "wrong number of axes", where="scaled_dot_product_attention",
            got=f"{q.ndim}, {k.ndim}, {v.ndim}", expected="[..., heads, length, width], all alike",
        )  # fmt: skip
    lead = q.shape[:-3]
    q, k, v = (rnp.reshape(t, (-1, *t.shape[-3:])) if len(lead) != 1 else t for t in (q, k, v))
    given = None if mask is None else as_array(mask)
    if given is not None and len(lead) > 1:
        given = rnp.broadcast_to(given, (*lead, q.shape[1], q.shape[2], k.shape[2]))
        given = rnp.reshape(given, (-1, *given.shape[-3:]))
    heads = (int(q.shape[1]), int(k.shape[1]), int(q.shape[3]))
    if heads[0] % heads[1]:
        raise ShapeError(
            "heads do not share key heads evenly", where="scaled_dot_product_attention",
            got=heads[0], expected=f"a multiple of {heads[1]}",
        )  # fmt: skip
    kind = _mask_kind(given, is_causal, window)
    number = None if scale is None else float(scale)
    scheme = None if kv_scheme is None else QuantScheme.parse(kv_scheme)
    options = (heads, kind, is_causal, number, float(softcap), scheme)
    y = call(_attention, [q, k, v, given, sinks], *options)
    return y if len(lead) == 1 else rnp.reshape(y, (*lead, *y.shape[1:]))


# -- rotary positions -------------------------------------------------------------------------


def rope_tables(
    length: int, head_dim: int, base: float = 10000.0, dtype: Any = rnp.float32
) -> tuple[Array, Array]:
    """cos and sin of the angles of positions 0 … length − 1, [length, head_dim / 2] each. A length
    that is symbolic inside `rlx.jit` stays so."""
    if head_dim % 2:
        raise ShapeError("pairs of dims are rotated", where="rope_tables", got=head_dim)
    inverse = Array(base ** (-np.arange(0, head_dim, 2) / head_dim))
    # in f64: far positions have large angles
    angles = rnp.arange(length, dtype=rnp.float64)[:, None] * inverse
    return rnp.cos(angles).astype(dtype), rnp.sin(angles).astype(dtype)


def _rope(
    g: Graph, x: Value, cos: Value, sin: Value, positions: Value | None, heads: int, width: int,
    half: int, interleaved: bool,
) -> Any:  # fmt: skip
    x = fixed(g, x, (None, heads, None, width))
    cos, sin = (fixed(g, t, (None, half)) for t in (cos, sin))
    more = () if positions is None else (positions,)
    return g.rope(
        x, cos, sin, *more, head_dim=width, n_rot=2 * half, interleaved=interleaved, layout="bhsd"
    )


def rope(
    x: ArrayLike, cos: ArrayLike, sin: ArrayLike, positions: ArrayLike | None = None,
    interleaved: bool = False,
) -> Array:  # fmt: skip
    """x [B, heads, L, D] with pairs of dims rotated by the angles of the positions ([L] or [B, L];
    by default 0, 1, …), rows of the tables of `rope_tables`.

    Pairs are (i, i + half), or (2i, 2i + 1) when interleaved. Tables narrower than D / 2 leave the
    other dims as they are.
    """
    made = require_rank(x, (4,), "rope", "[batch, heads, length, width]")
    half = int(as_array(cos).shape[-1])
    heads, width = int(made.shape[1]), int(made.shape[3])
    return call(_rope, [made, cos, sin, positions], heads, width, half, bool(interleaved))


# -- KV cache ---------------------------------------------------------------------------------


def _update(g: Graph, cache: Value, new: Value, position: Value, axis: int) -> Any:
    count = new.shape.dims[axis]
    at = g.add(g.iota((count,), dtype=i64), g.cast(position, i64))
    return g.scatter(cache, at, g.cast(new, cache.shape.dtype), axis=axis)


def update_cache(cache: ArrayLike, new: ArrayLike, position: int | Array, axis: int = 2) -> Array:
    """The cache with `new` written from `position` on along an axis. Donate the cache to
    `rlx.jit`, and it is written in place."""
    old, number = as_array(cache), as_array(position)
    if number.ndim or not number.dtype.is_integer:
        raise InputError("not a position", where="update_cache", got=repr(position))
    return call(_update, [old, new, number], axis % old.ndim)


def _visible(g: Graph, q: Value, k: Value, position: Value) -> Any:
    rows, keys = q.shape.dims[2], k.shape.dims[2]
    at = g.add(g.reshape(g.iota((rows,), dtype=i64), (rows, 1)), g.cast(position, i64))
    return g.le(g.iota((keys,), dtype=i64), at)


def cache_mask(query: ArrayLike, cache: ArrayLike, position: int | Array) -> Array:
    """Which keys of a cache [B, heads, capacity, D] queries [B, heads, L, D] from `position` on
    see: those up to their own, bool [L, capacity]."""
    return call(_visible, [query, cache, as_array(position)])


# -- other mixers of tokens -------------------------------------------------------------------


def _gated_delta_net(
    g: Graph, q: Value, k: Value, v: Value, gate: Value, beta: Value, state: Value | None, n: int
) -> Any:
    q, k, v = (fixed(g, t, (None, None, None, n)) for t in (q, k, v))
    more = () if state is None else (fixed(g, state, (None, None, n, n)),)
    return g.gated_delta_net(q, k, v, gate, beta, *more, state_size=n)


def gated_delta_net(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, gate: ArrayLike, beta: ArrayLike,
    state: ArrayLike | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """The gated delta rule, token by token: S ← exp(gate)·S; S ← S + k ((v − kᵀS)·beta)ᵀ;
    y = (q / √D)ᵀS. q, k, v are [B, L, heads, D], gate and beta [B, L, heads], S
    [B, heads, D, D]; returns y and the last S."""
    made = require_rank(q, (4,), "gated_delta_net", "[batch, length, heads, width]")
    operands = [made, k, v, gate, beta, state]
    y, last = call_many(_gated_delta_net, operands, int(made.shape[-1]))
    return y, last


def _selective_scan(
    g: Graph, u: Value, delta: Value, a: Value, b: Value, c: Value, d: Value | None,
    state: Value | None,
) -> Any:  # fmt: skip
    more = [t for t in (d, state) if t is not None]
    return g.selective_scan(
        u, delta, a, b, c, *more, has_d=d is not None, has_state=state is not None
    )


def selective_scan(
    u: ArrayLike, delta: ArrayLike, a: ArrayLike, b: ArrayLike, c: ArrayLike,
    d: ArrayLike | None = None, state: ArrayLike | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Mamba's scan: h ← exp(delta·a)·h + delta·b·u; y = Σ c·h + d·u. u and delta are [B, L, D], a
    [D, N], b and c [B, L, N], d [D], h [B, D, N]; returns y and the last h."""
    y, last = call_many(_selective_scan, [u, delta, a, b, c, d, state])
    return y, last


def _causal_conv(g: Graph, x: Value, w: Value, past: Value | None, channels: int, taps: int) -> Any:
    x, w = fixed(g, x, (None, None, channels)), fixed(g, w, (channels, taps))
    if past is None:
        zero = g.constant(np.array(0, x.shape.dtype.numpy))
        past = g.expand(zero, (x.shape.dims[0], taps - 1, channels))
    return g.depthwise_conv1d_causal(x, w, fixed(g, past, (None, taps - 1, channels)))


def causal_conv1d(x: ArrayLike, weight: ArrayLike, past: ArrayLike | None = None) -> Array:
    """Each channel of x [B, L, C] convolved with its taps of a weight [C, K], seeing the past only;
    `past` [B, K − 1, C] came before x, zeros by default."""
    made = require_rank(x, (3,), "causal_conv1d", "[batch, length, channels]")
    channels, taps = (int(n) for n in as_array(weight).shape)
    return call(_causal_conv, [made, weight, past], channels, taps)


def _paged(
    g: Graph, q: Value, k: Value, v: Value, table: Value, rows: Value, positions: Value,
    sinks: Value | None, options: tuple[tuple[str, Any], ...],
) -> Any:  # fmt: skip
    more = () if sinks is None else (sinks,)
    return g.paged_attention(q, k, v, table, rows, positions, *more, **dict(options))


def paged_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, table: ArrayLike, rows: ArrayLike,
    positions: ArrayLike, *, num_heads: int, num_kv_heads: int, head_dim: int, page: int,
    window: int = 0, scale: float | None = None, softcap: float = 0.0,
    sinks: ArrayLike | None = None,
) -> Array:  # fmt: skip
    """Attention over a KV cache in pages: each token of `query` attends to its own sequence, up to
    and with itself. `table` names the pages of each sequence, `rows` and `positions` say which
    sequence a token belongs to and where (`paged_attention` in docs/ops.md)."""
    options = tuple({
        "num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "page": page,
        "window": window, "scale": scale, "softcap": softcap,
    }.items())  # fmt: skip
    return call(_paged, [query, key, value, table, rows, positions, sinks], options)
