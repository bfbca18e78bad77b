"""Lowering of attention: decode for one query a sequence, flash attention for more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlx.backends.cuda.kernels.attention.attention_problem import Attend, attend_of, suits
from rlx.backends.cuda.kernels.attention.decode_attention import DecodeAttention
from rlx.backends.cuda.lowering import (
    Context,
    Counters,
    KernelArg,
    KernelLaunch,
    Layouts,
    lowers,
)
from rlx.backends.kernel_args import Scratch
from rlx.ir.dim import Dim, upper_bound
from rlx.ir.node import Node

_KEYS = 64  # of a block, at least
_BLOCKS = 256  # enough to fill a GPU


def _splits(batch: int, kv_heads: int, keys: int) -> int:
    wanted = -(-_BLOCKS // (batch * kv_heads))
    return max(1, min(wanted, keys // _KEYS, 64))


def _kernel(attend: Attend, upper: Callable[[Dim], int]) -> DecodeAttention:
    form = attend.form
    return DecodeAttention(form, _splits(upper(attend.batch), form.kv_heads, upper(attend.keys)))


def _scratch(node: Node) -> int:
    op: Any = node.op
    q, k = node.inputs[:2]
    live = node.graph.live
    batch = upper_bound(q.shape.dims[0], live)
    keys = upper_bound(k.shape.dims[2 if op.kv_layout == "bhsd" else 1], live)
    splits = _splits(batch, op.num_kv_heads, keys)
    return 0 if splits == 1 else 4 * batch * op.num_heads * splits * (op.head_dim + 2)


def _is_decode(node: Node) -> bool:
    """Whether each sequence has one query."""
    op: Any = node.op
    return suits(node) and node.inputs[0].shape.dims[2 if op.q_layout == "bhsd" else 1] == 1


def _reads(node: Node, layouts: Layouts) -> bool:
    return attend_of(node, layouts) is not None


@lowers("attention", when=_is_decode, scratch=_scratch, strided=_reads)
def lower_attention(node: Node, ctx: Context) -> list[KernelLaunch]:
    attend = attend_of(node, ctx)
    assert attend is not None  # operands that lie otherwise were copied
    if 0 in node.output.shape.dims:
        return []
    return [_decode(attend, ctx)]


def _decode(attend: Attend, ctx: Context) -> KernelLaunch:
    kernel, batch = _kernel(attend, ctx.upper), ctx.upper(attend.batch)
    pairs = batch * attend.form.kv_heads
    q, k, v, _ = attend.strides
    shared: list[KernelArg] = [0, 0]
    if kernel.splits > 1:
        shared = [Scratch(attend.node), Counters(pairs)]
    mask = attend.mask_strides
    args = [
        *attend.pointers, *shared, attend.keys, *q[:2], *k, *v, mask[0], mask[1], mask[3],
    ]  # fmt: skip
    return KernelLaunch(kernel, args, blocks=pairs * kernel.splits)
