"""An attention node as kernels see it: head sizes, strides, masks."""

from __future__ import annotations

from math import log2
from typing import Any

from rlx.backends.cuda.kernels.gemm.problem import ALIGNMENT, is_aligned
from rlx.backends.cuda.lowering import Layouts, is_multiple
from rlx.backends.kernel_args import NodeArg, Pointer
from rlx.ir.attrs import MaskKind
from rlx.ir.dim import Dim
from rlx.ir.dtype import DType, f16
from rlx.ir.node import Node, Value
from rlx.support.records import dataclass

_FLOATS = ("f32", "bf16", "f16")
LOG2_E = 1.4426950408889634
LOWEST = -1e30  # below every score; finite, so that differences are numbers


@dataclass(frozen=True)
class AttentionForm:
    """What is constant in the code of an attention."""

    q: DType
    kv: DType
    out: DType
    heads: int
    kv_heads: int
    dim: int
    ahead: int | None  # keys that a query sees behind its own, None: all
    behind: int | None
    scale: float
    softcap: float
    mask: str  # "", "bool" or an element type
    sinks: DType | None
    coarse: bool = False  # queries and weights may be rounded to the type of keys
    q8: bool = False  # keys and values are blocks of Q8_0, which are multiplied as `kv`

    @property
    def key_bytes(self) -> int:
        """What strides of keys and values count in."""
        return 1 if self.q8 else self.kv.bytes

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class Attend:
    """An attention with its operands. Strides are (batch, head, token), in elements."""

    node: Node
    form: AttentionForm
    batch: Dim
    rows: Dim  # queries of a sequence
    keys: Dim
    strides: tuple[tuple[Dim, ...], ...]  # of q, k, v and the result
    mask: tuple[Value, tuple[Dim, ...]] | None  # strides by (batch, head, query, key)
    sinks: Value | None

    @property
    def pointers(self) -> list[NodeArg]:
        q, k, v = self.node.inputs[:3]
        mask = 0 if self.mask is None else Pointer(self.mask[0])
        sinks = 0 if self.sinks is None else Pointer(self.sinks)
        return [Pointer(q), Pointer(k), Pointer(v), Pointer(self.node.output), mask, sinks]

    @property
    def mask_strides(self) -> list[NodeArg]:
        return [0, 0, 0, 0] if self.mask is None else list(self.mask[1])


def suits(node: Node) -> bool:
    """Whether there are kernels for the node, by its types and attributes alone."""
    op: Any = node.op
    q, k, v = (x.shape for x in node.inputs[:3])
    given = (q,) if op.kv_scheme is not None else (q, k, v)
    floats = all(x.dtype.name in _FLOATS for x in given) and k.dtype is v.dtype
    mask, sinks = op.extras(*node.inputs[3:])
    if sinks is not None and sinks.dtype.name not in _FLOATS:
        return False
    if mask is not None and mask.dtype.name not in ("bool", *_FLOATS):
        return False
    whole = (op.head_dim * x.dtype.bytes % ALIGNMENT == 0 for x in given)
    return floats and op.head_dim <= 256 and all(whole)


def attend_of(node: Node, ctx: Layouts) -> Attend | None:
    """The attention of a node; None if its operands do not lie as kernels want them."""
    op: Any = node.op
    q, k, v = node.inputs[:3]
    mask, sinks = op.extras(*node.inputs[3:])
    layouts = (op.q_layout, op.kv_layout, op.kv_layout)
    strides = [
        _strides(x, lay, op.head_dim, ctx, x is not q and op.kv_scheme is not None)
        for x, lay in zip((q, k, v), layouts, strict=True)
    ]
    out = _strides(node.output, op.q_layout, op.head_dim, ctx)
    if None in strides or out is None or not all(is_aligned(x, ctx) for x in (q, k, v)):
        return None
    batch, rows, keys = q.shape.dims[0], _length(q, op.q_layout), _length(k, op.kv_layout)
    placed = None if mask is None else (mask, _mask_strides(mask, ctx))
    if sinks is not None and not ctx.is_plain(sinks):
        return None
    return Attend(
        node, _form(op, node, mask, sinks), batch, rows, keys,
        (*(s for s in strides if s is not None), out), placed, sinks,
    )  # fmt: skip


def _form(op: Any, node: Node, mask: Value | None, sinks: Value | None) -> AttentionForm:
    q, k = node.inputs[:2]
    kind: MaskKind = op.mask_kind
    given = "" if mask is None else "bool" if mask.dtype.kind == "bool" else mask.dtype.name
    q8 = op.kv_scheme is not None
    return AttentionForm(
        q.dtype, f16 if q8 else k.dtype, node.output.dtype, op.num_heads, op.num_kv_heads,
        op.head_dim, kind.ahead, kind.behind, op.score_scale, op.softcap, given,
        None if sinks is None else sinks.dtype, op.coarse, q8,
    )  # fmt: skip


def _length(x: Value, layout: str) -> Dim:
    return x.shape.dims[2 if layout == "bhsd" else 1]


def _strides(
    x: Value, layout: str, dim: int, ctx: Layouts, q8: bool = False
) -> tuple[Dim, Dim, Dim] | None:
    """(batch, head, token); None unless the numbers of a head follow each other, aligned."""
    found = ctx.strides(x)
    if found[-1] != 1:
        return None
    picked: tuple[Dim, Dim, Dim]
    if x.shape.rank == 3:
        picked = (found[0], dim, found[1])
    else:
        picked = (found[0], found[1], found[2]) if layout == "bhsd" else (
            found[0], found[2], found[1])  # fmt: skip
    per = 2 if q8 else ALIGNMENT // x.dtype.bytes
    return picked if all(is_multiple(s, per) for s in picked) else None


def _mask_strides(mask: Value, ctx: Layouts) -> tuple[Dim, ...]:
    """Strides by (batch, head, query, key); 0 where the mask is broadcast."""
    found = [0 if d == 1 else s for d, s in zip(mask.shape.dims, ctx.strides(mask), strict=True)]
    return (*[0] * (4 - len(found)), *found)


def power_above(number: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << max(0, int(log2(number - 1)) + 1) if number > 1 else 1
