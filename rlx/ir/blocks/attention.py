"""Scaled dot-product attention, and the cache it reads."""

from __future__ import annotations

from functools import reduce

from rlx.errors import ShapeError
from rlx.ir.attrs import MaskKind
from rlx.ir.blocks._parts import cast, wide
from rlx.ir.blocks.rope import split_heads
from rlx.ir.dim import Dim
from rlx.ir.graph import Graph
from rlx.ir.hir import Block, block
from rlx.ir.node import Value
from rlx.ir.ops.attention import Attention as AttentionOp
from rlx.ir.quant import QuantScheme
from rlx.ir.shape import normalize_axis

_MASKED = float("-inf")


@block("attention")
class Attention(Block):
    """softmax(scale · q kᵀ, masked) v per head, key heads shared by groups of query heads.

    q, k, v are [B, S, H*D], [B, S, H, D] or, with layout "bhsd", [B, H, S, D]; the result is like
    q. `num_kv_heads` defaults to `num_heads`, `head_dim` to what q has, `scale` to 1/√head_dim, and
    `mask_kind` to what the mask says: NONE without one, CUSTOM for flags, BIAS for numbers. Query i
    stands at position Sk - Sq + i; a query without any key gives zeros. `kv_scheme` says how
    keys and values are packed, where they are. With `has_sinks` the last operand is [H]: the scores
    of a key more in each head, whose value is zero. `coarse` lets a device round to bf16 what it
    multiplies.
    """

    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    mask_kind: MaskKind | None = None
    scale: float | None = None
    softcap: float = 0.0
    q_layout: str = "bshd"
    kv_layout: str = "bshd"
    kv_scheme: QuantScheme | None = None
    has_sinks: bool = False
    coarse: bool = False

    def op(self, q: Value, mask: Value | None) -> AttentionOp:
        """The MIR op, defaults filled in."""
        width = q.shape.dims[-1] if q.shape.rank else 0
        heads = max(self.num_heads, 1) if q.shape.rank == 3 else 1
        head_dim = self.head_dim if self.head_dim is not None else width // heads
        if not isinstance(head_dim, int):
            raise ShapeError("head_dim cannot be found", got=q.shape, hint="give head_dim=")
        kind = self.mask_kind
        if kind is None:
            kind = MaskKind.NONE
            if mask is not None:
                kind = MaskKind.CUSTOM if mask.shape.dtype.kind == "bool" else MaskKind.BIAS
        kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        return AttentionOp(
            self.num_heads, kv_heads, head_dim, kind, self.scale, self.softcap, self.q_layout,
            self.kv_layout, self.kv_scheme, self.has_sinks, self.coarse,
        )  # fmt: skip

    def direct(
        self, g: Graph, q: Value, k: Value, v: Value, mask: Value | None = None,
        sinks: Value | None = None,
    ) -> Value:  # fmt: skip
        given = tuple(t for t in (mask, sinks) if t is not None)
        made: Value = g.append(self.op(q, self._mask(given)), (q, k, v, *given))
        return made

    def _mask(self, given: tuple[Value, ...]) -> Value | None:
        return given[0] if len(given) > self.has_sinks else None

    def fusable(
        self, g: Graph, q: Value, k: Value, v: Value, mask: Value | None = None,
        sinks: Value | None = None,
    ) -> Value:  # fmt: skip
        given = tuple(t for t in (mask, sinks) if t is not None)
        op = self.op(q, self._mask(given))
        mask, sinks = op.extras(*given)
        k, v = (_unpacked(g, t, op) for t in (k, v))
        rows = _by_head(g, q, op.head_dim, op.q_layout)
        keys, values = (_repeated(g, _by_head(g, t, op.head_dim, op.kv_layout), op) for t in (k, v))
        scores = g.mul(g.matmul(rows, g.transpose(keys, axes=(0, 1, 3, 2))), op.score_scale)
        if op.softcap:
            scores = g.mul(g.tanh(g.div(scores, op.softcap)), op.softcap)
        y = g.matmul(_weights(g, scores, mask, op.mask_kind, sinks), values)
        if op.q_layout == "bshd":
            y = g.reshape(g.transpose(y, axes=(0, 2, 1, 3)), shape=q.shape.dims)
        return cast(g, y, q.shape.dtype)


def _unpacked(g: Graph, x: Value, op: AttentionOp) -> Value:
    """Packed keys or values as f32."""
    if op.kv_scheme is None:
        return x
    rows = g.reshape(x, shape=(-1, op.row_width()))
    numbers = g.dequant_gather(rows, g.iota(shape=rows.shape.dims[:1]), scheme=op.kv_scheme)
    return g.reshape(numbers, shape=(*x.shape.dims[:-1], op.head_dim))


def _by_head(g: Graph, x: Value, head_dim: int, layout: str) -> Value:
    """[B, H, S, D], wide."""
    x = split_heads(g, wide(g, x), head_dim)
    return g.transpose(x, axes=(0, 2, 1, 3)) if layout == "bshd" else x


def _repeated(g: Graph, x: Value, op: AttentionOp) -> Value:
    """Every key head once per query head of its group."""
    group = op.num_heads // op.num_kv_heads
    if group == 1:
        return x
    batch, heads, length, width = x.shape.dims
    x = g.reshape(x, shape=(batch, heads, 1, length, width))
    x = g.expand(x, shape=(batch, heads, group, length, width))
    return g.reshape(x, shape=(batch, op.num_heads, length, width))


def _weights(
    g: Graph, scores: Value, mask: Value | None, kind: MaskKind, sinks: Value | None
) -> Value:
    """softmax over the keys to keep; zeros in a row without any."""
    if kind == MaskKind.NONE:
        return _softmax(g, scores, sinks)
    if kind == MaskKind.BIAS:
        assert mask is not None  # the op's inference asks for it
        scores = g.add(scores, wide(g, mask))
        keep = g.ne(scores, _MASKED)
    else:
        keep = _visible(g, scores, kind, mask)
        scores = g.where(keep, scores, _MASKED)
    # a row of -inf alone is NaN after softmax; the flags turn it into zeros
    return g.where(keep, _softmax(g, scores, sinks), 0.0)


def _softmax(g: Graph, scores: Value, sinks: Value | None) -> Value:
    """softmax over the keys, and over the sink of each head where there are sinks."""
    if sinks is None:
        return g.softmax(scores, axis=-1)
    *outer, keys = scores.shape.dims
    more = g.reshape(wide(g, sinks), shape=(outer[1], 1, 1))
    joined = g.concat(scores, g.expand(more, shape=(*outer, 1)), axis=3)
    return g.narrow(g.softmax(joined, axis=-1), axis=3, start=0, length=keys)


def _visible(g: Graph, scores: Value, kind: MaskKind, mask: Value | None) -> Value:
    """Flags of the keys inside each query's window that the mask keeps."""
    rows, keys = scores.shape.dims[2:]
    at = g.reshape(g.iota(shape=(rows,), start=keys - rows), shape=(rows, 1))
    key = g.iota(shape=(keys,))
    kept = [] if mask is None else [mask]
    if kind.ahead is not None:
        kept.append(g.le(key, g.add(at, kind.ahead) if kind.ahead else at))
    if kind.behind is not None:
        kept.append(g.ge(key, g.sub(at, kind.behind)))
    return reduce(g.logical_and, kept)


@block("cache_append", has_effect=True)
class CacheAppend(Block):
    """Writes `update` into a state at `start` along `axis`; gives the state as filled so far."""

    start: Dim
    axis: int = 1

    def fusable(self, g: Graph, state: Value, update: Value) -> Value:
        axis = normalize_axis(self.axis, state.shape.rank)
        fitting = cast(g, update, state.shape.dtype)
        written = g.state_update(state, fitting, axis=axis, start=self.start)
        filled = self.start + update.shape.dims[axis]
        return g.narrow(written, axis=axis, start=0, length=filled)
