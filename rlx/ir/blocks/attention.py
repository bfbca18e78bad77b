"""Attention, the append to its KV cache, and rotary embedding of queries and keys."""

from __future__ import annotations

from rlx.errors import ShapeError
from rlx.ir.attrs import MaskKind
from rlx.ir.dim import Dim
from rlx.ir.graph import Graph
from rlx.ir.hir import Block, block
from rlx.ir.node import Value
from rlx.ir.ops._common import cast
from rlx.ir.ops.attention import Attention as AttentionOp
from rlx.ir.ops.fused import FusedQkNormRope
from rlx.ir.ops.rope import Rope as RopeOp
from rlx.ir.quant.scheme import QuantScheme
from rlx.ir.shape import normalize_axis


@block("attention")
class Attention(Block):
    """softmax(scale · q kᵀ, masked) v per head, key heads shared by groups of query heads.

    q, k, v are [B, S, H*D], [B, S, H, D] or, with layout "bhsd", [B, H, S, D]; the result is like
    q. `num_kv_heads` defaults to `num_heads`, `head_dim` to what q has, `scale` to 1/√head_dim, and
    `mask_kind` follows the mask: NONE without one, CUSTOM for bools, BIAS for numbers. Query i is
    at position Sk - Sq + i; a query without any key gives zeros. `kv_scheme` is the scheme of a
    quantised KV cache. With `has_sinks` the last operand is [H]: the scores of one more key per
    head, whose value is zero. `coarse` lets a device multiply in bf16.
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
        return op.decompose(g, q, k, v, *given)


@block("cache_append", has_effect=True)
class CacheAppend(Block):
    """Writes `update` into a state at `start` along `axis`; returns the filled part."""

    start: Dim
    axis: int = 1

    def fusable(self, g: Graph, state: Value, update: Value) -> Value:
        axis = normalize_axis(self.axis, state.shape.rank)
        fitting = cast(g, update, state.shape.dtype)
        written = g.state_update(state, fitting, axis=axis, start=self.start)
        filled = self.start + update.shape.dims[axis]
        return g.narrow(written, axis=axis, start=0, length=filled)


@block("rope")
class Rope(Block):
    """Rotates pairs (i, i + n_rot/2) of each head by the angle of the token's position.

    x is [B, S, H*D], [B, S, H, D] or, with layout "bhsd", [B, H, S, D]; cos and sin are tables
    [positions, n_rot/2]. Token s takes row offset + s, or row positions[s]; pairs are (2i, 2i+1)
    when interleaved; dimensions from n_rot (0 means head_dim) on pass through.
    """

    head_dim: int
    n_rot: int = 0
    interleaved: bool = False
    offset: Dim = 0
    layout: str = "bshd"

    def direct(
        self, g: Graph, x: Value, cos: Value, sin: Value, positions: Value | None = None
    ) -> Value:
        return g.rope(x, cos, sin, positions, **self.attributes())

    def fusable(
        self, g: Graph, x: Value, cos: Value, sin: Value, positions: Value | None = None
    ) -> Value:
        op = RopeOp(**self.attributes())
        return op.decompose(g, x, cos, sin, positions)


@block("qk_norm_rope")
class QkNormRope(Block):
    """rope(rms_norm of each head · gamma [head_dim]); tensors and attributes as for rope."""

    head_dim: int
    n_rot: int = 0
    interleaved: bool = False
    offset: Dim = 0
    eps: float = 1e-6
    layout: str = "bshd"

    def direct(
        self, g: Graph, x: Value, gamma: Value, cos: Value, sin: Value,
        positions: Value | None = None,
    ) -> Value:  # fmt: skip
        return g.fused_qk_norm_rope(x, gamma, cos, sin, positions, **self.attributes())

    def fusable(
        self, g: Graph, x: Value, gamma: Value, cos: Value, sin: Value,
        positions: Value | None = None,
    ) -> Value:  # fmt: skip
        op = FusedQkNormRope(**self.attributes())
        return op.decompose(g, x, gamma, cos, sin, positions)
