"""Cases of the blocks that mix tokens: positions, attention, recurrence."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from block_cases import CASES, SIZES, B, Case, S, case, rms, rng, softmax

from rlx.ir.attrs import MaskKind
from rlx.ir.quant.scheme import GGUF_SCHEMES, encode

__all__ = ["CASES", "SIZES", "Case"]

# -- positions --------------------------------------------------------------------------------

_angles = np.outer(np.arange(12), 0.5 ** np.arange(3))
_cos, _sin = np.cos(_angles).astype(np.float32), np.sin(_angles).astype(np.float32)
_tables = {"cos": ([12, 3], _cos), "sin": ([12, 3], _sin)}


def rotate(x: Any, at: Any, interleaved: bool = False) -> Any:
    """Heads [B, S, H, 8] turned in their first 6 dims; `at` [B, S] or [S]. Pairs as complex."""
    out = np.array(x)
    first = slice(0, 6, 2) if interleaved else slice(0, 3)
    second = slice(1, 6, 2) if interleaved else slice(3, 6)
    turn = np.exp(1j * _angles[at])[..., None, :]
    z = (x[..., first] + 1j * x[..., second]) * (turn if np.ndim(at) == 2 else turn[None])
    out[..., first], out[..., second] = z.real, z.imag
    return out


def _split(x: Any, heads: int) -> Any:
    return x.reshape(*x.shape[:2], heads, -1)


def _joined(x: Any) -> Any:
    return x.reshape(*x.shape[:2], -1)


case(
    "rope",
    lambda m, x, c, s: m.rope(x, c, s, head_dim=8, n_rot=6, offset="past_seq"),
    lambda x, c, s: _joined(rotate(_split(x, 2), np.arange(3, 3 + S))),
    x=["batch", "seq", 16], **_tables,
)  # fmt: skip
case(
    "rope/interleaved",
    lambda m, x, c, s: m.rope(x, c, s, head_dim=8, n_rot=6, interleaved=True),
    lambda x, c, s: rotate(x, np.arange(S), True),
    x=["batch", "seq", 2, 8], **_tables,
)  # fmt: skip
_at = rng.integers(0, 12, (B, S)).astype(np.int32)
case(
    "rope/positions-bhsd",
    lambda m, x, c, s, p: m.rope(x, c, s, positions=p, head_dim=8, n_rot=6, layout="bhsd"),
    lambda x, c, s, p: rotate(x.swapaxes(1, 2), p).swapaxes(1, 2),
    x=["batch", 2, "seq", 8], **_tables, p=(["batch", "seq"], _at),
)  # fmt: skip
case(
    "qk_norm_rope",
    lambda m, x, g, c, s: m.qk_norm_rope(x, g, c, s, head_dim=8, n_rot=6, eps=0.01, offset=2),
    lambda x, g, c, s: _joined(rotate(rms(_split(x, 2), g, 0.01), np.arange(2, 2 + S))),
    x=["batch", "seq", 16], g=[8], **_tables,
)  # fmt: skip
case(
    "qk_norm_rope/positions",
    lambda m, x, g, c, s, p: m.qk_norm_rope(x, g, c, s, p, 8, 6),
    lambda x, g, c, s, p: rotate(rms(x, g), p),
    x=["batch", "seq", 2, 8], g=[8], **_tables, p=(["seq"], _at[0]),
)  # fmt: skip

# -- attention --------------------------------------------------------------------------------


def attend(
    q: Any, k: Any, v: Any, keep: Any = None, bias: Any = 0.0, scale: Any = None, cap: float = 0.0
) -> Any:
    """Heads [B, S, H, D], one query at a time."""
    out = np.zeros_like(q)
    group = q.shape[2] // k.shape[2]
    for b, i, h in np.ndindex(*q.shape[:3]):
        s = k[b, :, h // group] @ q[b, i, h] * (scale or 1 / math.sqrt(q.shape[3]))
        s = cap * np.tanh(s / cap) if cap else s
        full = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        s = s + np.broadcast_to(bias, full)[b, h, i]
        seen = np.ones(len(s), bool) if keep is None else np.broadcast_to(keep, full)[b, h, i]
        seen = seen & (s > -np.inf)
        if seen.any():
            out[b, i, h] = softmax(s[seen]) @ v[b, seen, h // group]
    return out


_KEYS = 3 + S
_causal_keep = np.arange(_KEYS)[None] <= 3 + np.arange(S)[:, None]
_window_keep = _causal_keep & (np.arange(_KEYS)[None] > 3 + np.arange(S)[:, None] - 4)
_flags = rng.random((B, 1, S, _KEYS)) < 0.5
_flags[0, 0, 1] = False  # a query that sees nothing
_bias = rng.normal(size=(4, S, _KEYS)).astype(np.float32)
_bias[2, 3] = -np.inf
_past = ["batch", "past_seq + seq", 16]
_qkv = {"q": ["batch", "seq", 32], "k": _past, "v": _past}
SIZES["past_seq + seq"] = _KEYS


def _grouped(name: str, formula: Callable[..., Any], mask: Any = None, **attributes: Any) -> None:
    def build(m: Any, q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        return m.attention(q, k, v, mask, num_heads=4, num_kv_heads=2, **attributes)

    def expected(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        return formula(_split(q, 4), _split(k, 2), _split(v, 2)).reshape(q.shape)

    given = _qkv if mask is None else {**_qkv, "mask": mask}
    case(f"attention/{name}", build, expected, **given)


_grouped("none", attend, head_dim=8)
_grouped("causal", lambda *t: attend(*t, keep=_causal_keep), mask_kind="causal")
_grouped(
    "window-capped",
    lambda *t: attend(*t, keep=_window_keep, scale=0.7, cap=1.5),
    mask_kind=MaskKind.SLIDING_WINDOW(4), scale=0.7, softcap=1.5,
)  # fmt: skip
_grouped(
    "custom", lambda *t: attend(*t, keep=_flags), (["batch", 1, "seq", "past_seq + seq"], _flags)
)
_grouped("bias", lambda *t: attend(*t, bias=_bias), ([4, "seq", "past_seq + seq"], _bias))
case(
    "attention/bhsd",
    lambda m, q, k, v: m.attention(q, k, v, 2, q_layout="bhsd", kv_layout="bhsd"),
    lambda q, k, v: attend(*(t.swapaxes(1, 2) for t in (q, k, v))).swapaxes(1, 2),
    **{t: ["batch", 2, "seq", 8] for t in ("q", "k", "v")},
)
case(
    "attention/more-queries-than-keys",
    lambda m, q, k, v: m.attention(q, k, v, num_heads=2, mask_kind="causal"),
    lambda q, k, v: attend(q, k, v, keep=np.arange(3)[None] <= np.arange(S)[:, None] + 3 - S),
    q=["batch", "seq", 2, 8], k=["batch", 3, 2, 8], v=["batch", 3, 2, 8],
)  # fmt: skip


def _unpacked(packed: Any) -> Any:
    """scale · codes of every block."""
    blocks = packed.reshape(*packed.shape[:-1], -1, 34)
    scale = blocks[..., :2].copy().view(np.float16).astype(np.float64)
    return (scale * blocks[..., 2:].view(np.int8)).reshape(*packed.shape[:-1], -1)


_blocks = [encode(GGUF_SCHEMES["Q8_0"], rng.normal(size=(B, 2, S, 32)).astype(np.float32)).data]
_blocks.append(_blocks[0][:, ::-1].copy())
case(
    "attention/packed",
    lambda m, q, k, v: m.attention(
        q, k, v, num_heads=4, num_kv_heads=2, head_dim=32, kv_layout="bhsd", kv_scheme="Q8_0"
    ),
    lambda q, k, v: attend(_split(q, 4), *(_unpacked(t).swapaxes(1, 2) for t in _blocks)).reshape(
        q.shape
    ),
    q=["batch", "seq", 128],
    **{t: (["batch", 2, "seq", 34], a) for t, a in zip("kv", _blocks, strict=True)},
)

# -- recurrence -------------------------------------------------------------------------------


def delta(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any = None) -> Any:
    b, s, h, n = q.shape
    state = np.zeros((b, h, n, n)) if state is None else np.array(state)
    o = np.zeros_like(q)
    for i, t, j in np.ndindex(b, s, h):
        m = state[i, j] * np.exp(g[i, t, j])
        d = (v[i, t, j] - k[i, t, j] @ m) * beta[i, t, j]
        state[i, j] = m + np.outer(k[i, t, j], d)
        o[i, t, j] = q[i, t, j] / math.sqrt(n) @ state[i, j]
    return o, state


_small = (rng.normal(size=(B, S, 2)) * 0.3).astype(np.float32)
_heads = {t: ["batch", "seq", 2, 4] for t in ("q", "k", "v")}
_per_head = ["batch", "seq", 2]
_gates = {"g": (_per_head, -np.abs(_small)), "beta": (_per_head, np.abs(_small))}
case(
    "gated_delta_net",
    lambda m, *t: m.gated_delta_net(*t, state_size=4),
    lambda *t: delta(*t)[0],
    **_heads, **_gates,
)  # fmt: skip
case(
    "gated_delta_net_carry",
    lambda m, q, k, v, g, beta, s: m.gated_delta_net_carry(q, k, v, g=g, beta=beta, state=s),
    delta,
    **_heads, **_gates, state=["batch", 2, 4, 4],
)  # fmt: skip
