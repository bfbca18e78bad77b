"""Scaled dot-product attention with grouped key/value heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rlx.errors import AttributeValueError, DTypeError, ShapeError
from rlx.ir.attrs import MaskKind
from rlx.ir.dim import Dim, same
from rlx.ir.dtype import DType, u8
from rlx.ir.op import Array, Cost, Op, op
from rlx.ir.ops._common import (
    cast,
    compute,
    quiet,
    require_float,
    require_rank,
    require_same,
    rounded,
    upcast,
    wide,
)
from rlx.ir.quant.scheme import GGUF_SCHEMES, QuantScheme, decode
from rlx.ir.shape import Shape, broadcast_dims

if TYPE_CHECKING:
    from rlx.ir.graph import Graph
    from rlx.ir.node import Value

LAYOUTS = ("bshd", "bhsd")


class Heads(NamedTuple):
    """The sizes of a tensor that is split into heads."""

    batch: Dim
    length: Dim
    heads: Dim


def require_layout(layout: str, where: str) -> None:
    if layout not in LAYOUTS:
        raise AttributeValueError("unknown layout", where=where, got=layout, expected=LAYOUTS)


def head_sizes(x: Shape, head_dim: int, layout: str, what: str) -> Heads:
    """Sizes of [B, S, H*D], or of rank 4 in `layout`; the width must be whole heads."""
    expected = f"[B, H, S, {head_dim}]"
    if layout == "bshd":
        expected = f"[B, S, H*{head_dim}] or [B, S, H, {head_dim}]"
    if x.rank != 4 and (x.rank != 3 or layout != "bshd"):
        raise ShapeError(f"{what} has the wrong rank", got=x, expected=expected)
    width = x.dims[-1]
    heads = width // head_dim
    if (x.rank == 4 and not same(width, head_dim)) or not same(heads * head_dim, width):
        raise ShapeError(f"{what} is not made of whole heads", got=x, expected=expected)
    if x.rank == 3:
        return Heads(x.dims[0], x.dims[1], heads)
    first, second = x.dims[1:3]
    return Heads(x.dims[0], first, second) if layout == "bshd" else Heads(x.dims[0], second, first)


def split_heads(x: Array, head_dim: int, layout: str) -> Array:
    """An array of either rank as [B, H, S, D]."""
    if layout == "bhsd":
        return x
    batch, length = x.shape[:2]
    heads = x.shape[2] if x.ndim == 4 else x.shape[2] // head_dim
    return x.reshape(batch, length, heads, head_dim).transpose(0, 2, 1, 3)


def join_heads(x: Array, like: Array, layout: str) -> Array:
    """[B, H, S, D] back in the layout of `like`."""
    return x if layout == "bhsd" else x.transpose(0, 2, 1, 3).reshape(like.shape)


def check_heads(op: Any) -> None:
    """Check the attributes that all attention ops share."""
    for field in ("num_heads", "num_kv_heads", "head_dim"):
        if getattr(op, field) < 1:
            raise AttributeValueError(
                "must be positive", where=f"{op.name}.{field}", got=getattr(op, field)
            )
    if op.num_heads % op.num_kv_heads:
        raise AttributeValueError(
            "query heads do not divide among the key heads", where=op.name,
            got=f"num_heads={op.num_heads}", expected=f"a multiple of {op.num_kv_heads}",
        )  # fmt: skip
    if not (op.softcap >= 0 and math.isfinite(op.softcap)):
        raise AttributeValueError(
            "not a bound of scores", where=f"{op.name}.softcap", got=op.softcap,
            expected="a positive number, or 0 for none",
        )  # fmt: skip
    if op.scale is not None and not math.isfinite(op.scale):
        raise AttributeValueError("not a finite number", where=f"{op.name}.scale", got=op.scale)


@op("attention", is_anchor=True, runs_in_low_precision=True)
class Attention(Op):
    """softmax(scale · q kᵀ, masked) v per head; query head h uses key head h // (heads/kv_heads).

    q, k, v are [B, S, H*D], [B, S, H, D] ("bshd") or [B, H, S, D] ("bhsd"); the result is like q.
    Query i is at position Sk - Sq + i. With a softcap c the scaled scores s become c·tanh(s/c)
    before the mask. A mask tensor broadcasts to [B, H, Sq, Sk]: a bool mask of keys to keep
    (CUSTOM, or LOCAL with fewer keys), or numbers added to the scores (BIAS). A query without any
    key gives zeros.
    With a `kv_scheme`, k and v are bytes of rank 4, each head of a token packed by the scheme.
    Sinks [H] are the scores of one more key per head, whose value is zero. `coarse` lets a device
    multiply in bf16.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    mask_kind: MaskKind = MaskKind.NONE
    scale: float | None = None
    softcap: float = 0.0
    q_layout: str = "bshd"
    kv_layout: str = "bshd"
    kv_scheme: QuantScheme | None = None
    has_sinks: bool = False
    coarse: bool = False

    def check(self) -> None:
        check_heads(self)
        require_layout(self.q_layout, f"{self.name}.q_layout")
        require_layout(self.kv_layout, f"{self.name}.kv_layout")
        if self.kv_scheme not in (None, GGUF_SCHEMES["Q8_0"]):
            raise AttributeValueError(
                "not a scheme of keys and values", where=f"{self.name}.kv_scheme",
                got=self.kv_scheme, expected="none or Q8_0",
            )  # fmt: skip
        self.row_width()

    def row_width(self) -> int:
        """Stored elements of one head of a key or value."""
        return self.kv_scheme.row_bytes(self.head_dim) if self.kv_scheme else self.head_dim

    @property
    def score_scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim) if self.scale is None else self.scale

    def extras(self, *given: Any) -> tuple[Any, Any]:
        """The operands after v as (mask, sinks); absent ones leave no gap."""
        there = [t for t in given if t is not None]
        sinks = there.pop() if self.has_sinks and there else None
        if len(there) > 1 or (sinks is None) == self.has_sinks:
            raise ShapeError(
                "operands and flags disagree", where=self.name, got=f"{len(there)} extra operands",
                expected=f"a mask at most, has_sinks={self.has_sinks}",
            )  # fmt: skip
        return there[0] if there else None, sinks

    def infer(
        self, q: Shape, k: Shape, v: Shape, mask: Shape | None = None, sinks: Shape | None = None
    ) -> Shape:
        mask, sinks = self.extras(mask, sinks)
        if sinks is not None:
            require_sinks(sinks, self.num_heads)
        sizes = []
        for x, what, layout, heads in (
            (q, "q", self.q_layout, self.num_heads),
            (k, "k", self.kv_layout, self.num_kv_heads),
            (v, "v", self.kv_layout, self.num_kv_heads),
        ):
            packed = self.kv_scheme is not None and what != "q"
            _require_packed(x, what) if packed else require_float(x, what)
            found = head_sizes(x, self.row_width() if packed else self.head_dim, layout, what)
            require_same(found.heads, heads, f"heads of {what} {x}")
            sizes.append(found)
        for found, what in ((sizes[1], "k"), (sizes[2], "v")):
            require_same(found.batch, sizes[0].batch, f"batch of {what} against q")
        require_same(sizes[2].length, sizes[1].length, "length of v against k")
        batch, rows, _ = sizes[0]
        self._check_mask(mask, (batch, self.num_heads, rows, sizes[1].length))
        return q

    def _check_mask(self, mask: Shape | None, scores: tuple[Dim, ...]) -> None:
        local = self.mask_kind.kind == "local"
        if mask is None or not (self.mask_kind.needs_mask or local):
            if (mask is not None) != self.mask_kind.needs_mask:
                raise ShapeError(
                    f"mask kind {self.mask_kind} {'needs a' if mask is None else 'takes no'} mask",
                    got=mask or "none",
                    hint="custom takes flags of the keys to keep, bias numbers to add",
                )
            return
        if self.mask_kind == MaskKind.BIAS:
            require_float(mask, "a bias mask")
        elif mask.dtype.kind != "bool":
            raise DTypeError(
                f"a {self.mask_kind.kind} mask holds flags", got=mask, expected="bool",
                hint="numbers to add to the scores are mask_kind=BIAS",
            )  # fmt: skip
        met = broadcast_dims(mask.dims, scores)
        if len(met) != len(scores) or not all(map(same, met, scores)):
            raise ShapeError(
                "mask does not broadcast to the scores", got=mask,
                expected=f"[{', '.join(map(str, scores))}]",
            )  # fmt: skip

    def reference(
        self, q: Array, k: Array, v: Array, mask: Array | None = None, sinks: Array | None = None
    ) -> Array:
        mask, sinks = self.extras(mask, sinks)
        dtype = DType.of(q.dtype)
        k, v = self.unpacked(k, v)
        with quiet():
            scores = self.reference_scores(q, k, mask)
            out = attention_weights(scores, sinks) @ self._repeated(compute(v))
        return rounded(join_heads(out, q, self.q_layout), dtype)

    def unpacked(self, k: Array, v: Array) -> tuple[Array, Array]:
        """Keys and values as numbers."""
        if self.kv_scheme is None:
            return k, v
        return decode(self.kv_scheme, k), decode(self.kv_scheme, v)

    def reference_scores(self, q: Array, k: Array, mask: Array | None) -> Array:
        """Masked scores [B, H, Sq, Sk]."""
        scores = self._scores(*upcast(q, k))
        if mask is not None and self.mask_kind == MaskKind.BIAS:
            scores = scores + compute(mask)
        elif mask is not None:
            scores = np.where(mask, scores, scores.dtype.type(-np.inf))
        keep = self._visible(*scores.shape[2:])
        return scores if keep is None else np.where(keep, scores, scores.dtype.type(-np.inf))

    def _repeated(self, x: Array) -> Array:
        """Keys or values as [B, num_heads, Sk, D]."""
        split = split_heads(x, self.head_dim, self.kv_layout)
        return np.repeat(split, self.num_heads // self.num_kv_heads, axis=1)

    def _scores(self, q: Array, k: Array) -> Array:
        rows = split_heads(q, self.head_dim, self.q_layout)
        scores = rows @ self._repeated(k).transpose(0, 1, 3, 2)
        scores = scores * scores.dtype.type(self.score_scale)
        if self.softcap:
            cap = scores.dtype.type(self.softcap)
            scores = cap * np.tanh(scores / cap)
        return scores

    def _visible(self, rows: int, keys: int) -> Array | None:
        """The bool mask [Sq, Sk] of a causal, sliding-window or local mask."""
        kind = self.mask_kind
        if kind.ahead is None:
            return None
        ahead = np.arange(keys)[None, :] - np.arange(keys - rows, keys)[:, None]
        keep = ahead <= kind.ahead
        return keep if kind.behind is None else keep & (ahead >= -kind.behind)

    def decompose(
        self, g: Graph, q: Value, k: Value, v: Value, mask: Value | None = None,
        sinks: Value | None = None,
    ) -> Any:  # fmt: skip
        mask, sinks = self.extras(mask, sinks)
        v = self._unpacked(g, v)
        _, _, raw = attention_scores(g, self, q, k)
        scores = self.capped(g, raw)
        values = self.shared(g, transposed_heads(g, v, self.head_dim, self.kv_layout))
        y = g.matmul(_masked_softmax(g, scores, mask, self.mask_kind, sinks), values)
        if self.q_layout == "bshd":
            y = g.reshape(g.transpose(y, axes=(0, 2, 1, 3)), shape=q.shape.dims)
        return cast(g, y, q.shape.dtype)

    def capped(self, g: Graph, scores: Value) -> Any:
        """Scores with the softcap."""
        if not self.softcap:
            return scores
        return g.mul(g.tanh(g.div(scores, self.softcap)), self.softcap)

    def _unpacked(self, g: Graph, x: Value) -> Any:
        """Packed keys or values as f32."""
        if self.kv_scheme is None:
            return x
        rows = g.reshape(x, shape=(-1, self.row_width()))
        numbers = g.dequant_gather(rows, g.iota(shape=rows.shape.dims[:1]), scheme=self.kv_scheme)
        return g.reshape(numbers, shape=(*x.shape.dims[:-1], self.head_dim))

    def shared(self, g: Graph, x: Value) -> Any:
        """Repeat every key head for each query head of its group."""
        group = self.num_heads // self.num_kv_heads
        if group == 1:
            return x
        batch, heads, length, width = x.shape.dims
        x = g.reshape(x, shape=(batch, heads, 1, length, width))
        x = g.expand(x, shape=(batch, heads, group, length, width))
        return g.reshape(x, shape=(batch, self.num_heads, length, width))

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        """Two dot products per visible (query, key) pair; a causal mask halves the pairs."""
        batch, rows, _ = head_sizes(inputs[0], self.head_dim, self.q_layout, "q")
        _, keys, _ = head_sizes(inputs[1], self.row_width(), self.kv_layout, "k")
        traffic: Dim = 0
        for shape in (*inputs, *outputs):
            traffic = traffic + shape.size_bytes
        pairs = self._twice_pairs(rows, keys)
        return Cost(batch * pairs * (2 * self.num_heads * self.head_dim), traffic)

    def _twice_pairs(self, rows: Dim, keys: Dim) -> Dim:
        """Twice the number of visible pairs: an integer also when symbolic."""
        behind, ahead = self.mask_kind.behind, self.mask_kind.ahead
        if ahead is None:
            return rows * keys * 2
        if isinstance(rows, int) and isinstance(keys, int):
            at = np.arange(keys - rows, keys)
            first = np.zeros_like(at) if behind is None else (at - behind).clip(0)
            return 2 * int(((at + ahead + 1).clip(0, keys) - first).clip(0).sum())
        # every query counts a full window, as in long sequences
        return rows * (keys * 2 - rows + 1) if behind is None else rows * 2 * (behind + ahead + 1)


def _require_packed(x: Shape, what: str) -> None:
    if x.rank != 4 or x.dtype is not u8:
        raise ShapeError(
            f"packed {what} is not bytes by head", got=x, expected="rank 4, u8",
            hint="make them with quantize_blocks",
        )  # fmt: skip


def require_sinks(sinks: Shape, heads: int) -> None:
    require_float(sinks, "sinks")
    require_rank(sinks, 1, "sinks")
    require_same(sinks.dims[0], heads, "sinks against query heads")


def attention_weights(scores: Array, sinks: Array | None) -> Array:
    """softmax over the keys of [B, H, Sq, Sk] and, if given, the sink of each head."""
    if sinks is None:
        return _softmax(scores)
    more = compute(sinks).astype(scores.dtype)[None, :, None, None]
    more = np.broadcast_to(more, (*scores.shape[:3], 1))
    return _softmax(np.concatenate([scores, more], axis=-1))[..., :-1]


def _softmax(scores: Array) -> Array:
    """Over the last axis; a row of -inf alone gives zeros."""
    if scores.shape[-1] == 0:
        return scores
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isneginf(top), 0, top))
    total = weights.sum(axis=-1, keepdims=True)
    return weights / np.where(total == 0, 1, total)


# -- decomposition ----------------------------------------------------------------------------

_MASKED = float("-inf")


def by_head(g: Graph, x: Value, head_dim: int) -> Any:
    """[B, S, H*D] as [B, S, H, D]; rank 4 as it is."""
    if x.shape.rank == 4:
        return x
    batch, seq, width = x.shape.dims
    return g.reshape(x, shape=(batch, seq, width // head_dim, head_dim))


def transposed_heads(g: Graph, x: Value, head_dim: int, layout: str) -> Any:
    """[B, H, S, D], wide."""
    x = by_head(g, wide(g, x), head_dim)
    return g.transpose(x, axes=(0, 2, 1, 3)) if layout == "bshd" else x


def attention_scores(g: Graph, op: Attention, q: Value, k: Value) -> tuple[Any, Any, Any]:
    """(queries [B, H, Sq, D], the keys of their heads [B, H, Sk, D], scores without a softcap)"""
    rows = transposed_heads(g, q, op.head_dim, op.q_layout)
    keys = transposed_heads(g, op._unpacked(g, k), op.head_dim, op.kv_layout)
    keys = op.shared(g, keys)
    scores = g.matmul(rows, g.transpose(keys, axes=(0, 1, 3, 2)))
    return rows, keys, g.mul(scores, op.score_scale)


def masked_scores(g: Graph, scores: Value, mask: Value | None, kind: MaskKind) -> Any:
    """Scores with −inf for keys that are not kept, or with a bias."""
    if kind == MaskKind.NONE:
        return scores
    if kind == MaskKind.BIAS:
        assert mask is not None  # inference requires it
        return g.add(scores, wide(g, mask))
    return g.where(_visible_keys(g, scores, kind, mask), scores, _MASKED)


def log_sum_exp(
    g: Graph, op: Attention, q: Value, k: Value, mask: Value | None, sinks: Value | None
) -> Any:
    """ln Σ exp(scores) [B, H, Sq], with the sink of the head if given."""
    mask, sinks = op.extras(mask, sinks)
    scores = op.capped(g, attention_scores(g, op, q, k)[2])
    scores = masked_scores(g, scores, mask, op.mask_kind)
    if sinks is not None:
        scores = _with_sinks(g, scores, sinks)
    top = g.max(scores, axis=(-1,), keepdims=True)
    top = g.where(g.is_finite(top), top, 0.0)
    total = g.log(g.sum(g.exp(g.sub(scores, top)), axis=(-1,), keepdims=True))
    return g.reshape(g.add(total, top), shape=scores.shape.dims[:-1])


def _masked_softmax(
    g: Graph, scores: Value, mask: Value | None, kind: MaskKind, sinks: Value | None
) -> Any:
    """softmax over the keys to keep; zeros in a row without any."""
    if kind == MaskKind.NONE:
        return _softmax_value(g, scores, sinks)
    scores = masked_scores(g, scores, mask, kind)
    # softmax of a row of -inf is NaN; the mask makes it zeros
    return g.where(g.ne(scores, _MASKED), _softmax_value(g, scores, sinks), 0.0)


def _softmax_value(g: Graph, scores: Value, sinks: Value | None) -> Any:
    """softmax over the keys and, if given, the sink of each head."""
    if sinks is None:
        return g.softmax(scores, axis=-1)
    keys = scores.shape.dims[-1]
    weights = g.softmax(_with_sinks(g, scores, sinks), axis=-1)
    return g.narrow(weights, axis=3, start=0, length=keys)


def _with_sinks(g: Graph, scores: Value, sinks: Value) -> Any:
    """Scores with that of the head's sink after those of the keys."""
    *outer, _ = scores.shape.dims
    more = g.reshape(wide(g, sinks), shape=(outer[1], 1, 1))
    return g.concat(scores, g.expand(more, shape=(*outer, 1)), axis=3)


def _visible_keys(g: Graph, scores: Value, kind: MaskKind, mask: Value | None) -> Any:
    """The bool mask of keys inside each query's window and kept by `mask`."""
    rows, keys = scores.shape.dims[2:]
    at = g.reshape(g.iota(shape=(rows,), start=keys - rows), shape=(rows, 1))
    key = g.iota(shape=(keys,))
    kept = [] if mask is None else [mask]
    if kind.ahead is not None:
        kept.append(g.le(key, g.add(at, kind.ahead) if kind.ahead else at))
    if kind.behind is not None:
        kept.append(g.ge(key, g.sub(at, kind.behind)))
    return reduce(g.logical_and, kept)
