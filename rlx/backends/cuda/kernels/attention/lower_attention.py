"""Lowering of attention: decode for one query a sequence, flash attention for more."""

from __future__ import annotations

from typing import Any

from rlx.backends.cuda.batch_invariance import is_asked
from rlx.backends.cuda.kernels.attention.attention_problem import (
    Attend,
    AttentionForm,
    attend_of,
    suits,
)
from rlx.backends.cuda.kernels.attention.decode_attention import DecodeAttention
from rlx.backends.cuda.kernels.attention.f32_attention import F32_DIMS, F32Attention
from rlx.backends.cuda.kernels.attention.flash_attention import KEYS, QUERIES, FlashAttention
from rlx.backends.cuda.kernels.attention.group_attention import ROWS, GroupAttention
from rlx.backends.cuda.kernels.attention.key_rows import key_rows
from rlx.backends.cuda.kernels.gemm.plan import BLOCKS, HOPPER
from rlx.backends.cuda.kernels.gemm.problem import is_aligned
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
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.passes.legalize import legalize

_KEYS = 64  # of a block, at least
_BLOCKS = 128  # of a decode step: enough to fill a GPU
_FEW_BLOCKS = 256  # of a prefill: at most so many leave room for a second group of warps each
_EXACT_ROWS = 128  # queries up to which blocks of Q8_0 are not rounded
_MANY_ROWS = 32  # queries for which products pay
_MOST_SCORES = 1 << 28  # bytes
MOST_SHARED = 160 << 10  # bytes of shared memory of a block, on the GPUs that we know


def _splits(items: int, keys: int) -> int:
    """Into how many parts the keys of `items` queries of key heads are divided."""
    return 1 if is_asked() else max(1, min(-(-_BLOCKS // items), keys // _KEYS, 64))


def _lengths(node: Node) -> tuple[Dim, Dim, Dim]:
    """Sequences, queries and keys."""
    op: Any = node.op
    q, k = (v.shape.dims for v in node.inputs[:2])
    places = [2 if layout == "bhsd" else 1 for layout in (op.q_layout, op.kv_layout)]
    return q[0], q[places[0]], k[places[1]]


def _by_tensor_cores(node: Node) -> bool:
    """Whether there are tiles of queries, and keys in 16 bits."""
    op: Any = node.op
    q, k = (v.dtype for v in node.inputs[:2])
    rows = _lengths(node)[1]
    if is_asked():
        kinds = ("f32", "f16" if op.kv_scheme is not None else k.name)
        suited = (k.bytes == 2 or op.kv_scheme is not None) and q.name in kinds
    elif op.kv_scheme is not None:  # few queries are multiplied as exactly as they can be
        suited = upper_bound(rows, node.graph.live) > _EXACT_ROWS and q.name in ("f32", "f16")
    else:
        suited = rows != 1 and k.bytes == 2 and q.name in ("f32", k.name)
    return suited and op.head_dim % 16 == 0


def _by_f32_tiles(node: Node) -> bool:
    """Whether there are many queries of keys in f32, with few numbers to a head."""
    op: Any = node.op
    rows = upper_bound(_lengths(node)[1], node.graph.live)
    types = all(v.dtype.name == "f32" for v in (*node.inputs[:3], node.output))
    return types and op.head_dim in F32_DIMS and rows >= _MANY_ROWS and not is_asked()


def expand_attention(graph: Graph) -> Graph:
    """Many queries of keys in f32 as two products of f32 and a softmax, as far as the scores fit:
    one query after the other would read all keys."""
    if is_asked() or not any(_is_expanded(node) for node in graph.nodes):
        return graph
    return legalize(graph, lambda node: not _is_expanded(node))


def _is_expanded(node: Node) -> bool:
    if node.op.name != "attention" or any(v.dtype.name != "f32" for v in node.inputs[:3]):
        return False
    if _by_f32_tiles(node):
        return False
    op: Any = node.op
    batch, rows, keys = (upper_bound(d, node.graph.live) for d in _lengths(node))
    scores = 4 * batch * op.num_heads * rows * keys
    sizes = (d for v in node.inputs[:3] for d in v.shape.dims)
    is_static = all(isinstance(d, int) for d in sizes)  # else products are loop nests
    return is_static and rows >= _MANY_ROWS and keys % 2 == 0 and scores <= _MOST_SCORES


def _scratch(node: Node) -> int:
    op: Any = node.op
    if _by_tensor_cores(node) or _by_f32_tiles(node):
        return 0
    batch, rows, keys = (upper_bound(d, node.graph.live) for d in _lengths(node))
    splits = _splits(max(batch * rows * op.num_kv_heads, 1), keys)
    return 0 if splits == 1 else 4 * batch * rows * op.num_heads * splits * (op.head_dim + 2)


def _reads(node: Node, layouts: Layouts) -> bool:
    return attend_of(node, layouts) is not None


@lowers("attention", "rounded_attention", when=suits, scratch=_scratch, strided=_reads)
def lower_attention(node: Node, ctx: Context) -> list[KernelLaunch]:
    attend = attend_of(node, ctx)
    assert attend is not None  # operands that lie otherwise were copied
    if 0 in node.output.shape.dims:
        return []
    if _by_f32_tiles(node):
        return [_f32_tiles(attend, ctx)]
    if not _by_tensor_cores(node):
        return [_decode(attend, ctx)]
    if is_asked():
        return [_flash(attend, ctx)]
    return [_by_groups(attend, ctx) or _flash(attend, ctx)]


def _by_groups(attend: Attend, ctx: Context) -> KernelLaunch | None:
    """By groups of four warps, where there are such: queries are rounded to the type of keys."""
    form = attend.form
    if ctx.cpu != HOPPER or form.dim not in (64, 128) or not is_aligned(attend.node.output, ctx):
        return None
    if form.q8 or not (form.q is form.kv or form.coarse):
        return None
    kernel = _group_kernel(form, ctx.upper(attend.batch), ctx.upper(attend.rows))
    found = [key_rows(attend, i, kernel.keys, ctx) for i in (1, 2)]
    maps = [x for x in found if x is not None]
    if len(maps) < len(found):
        return None
    heads = attend.batch * form.heads
    q, _, _, *others = attend.pointers
    strides = [attend.strides[0], *(places for _, places in maps), attend.strides[3]]
    numbers = [s for of in strides for s in of]
    args = [
        q, *(tensor_map for tensor_map, _ in maps), *others, heads, attend.rows, attend.keys,
        *numbers, *attend.mask_strides,
    ]  # fmt: skip
    tiles = -(-ctx.upper(attend.rows) // kernel.queries)
    return KernelLaunch(kernel, args, blocks=ctx.upper(heads) * tiles)


def _group_kernel(form: AttentionForm, batch: int, rows: int) -> GroupAttention:
    """Two groups of a block have queries of their own where that leaves enough blocks; else they
    share them."""
    if batch * form.heads * -(-rows // ROWS) >= 2 * BLOCKS:
        return GroupAttention(form, 128)
    return GroupAttention(form, 64, shares=True)


def _flash(attend: Attend, ctx: Context) -> KernelLaunch:
    heads = attend.batch * attend.form.heads
    tiles = -(-ctx.upper(attend.rows) // QUERIES)
    args = [*attend.pointers, heads, *_sizes(attend)]
    blocks = ctx.upper(heads) * tiles
    kernel = FlashAttention(attend.form, 2)
    if is_asked():
        kernel = FlashAttention(attend.form, fixed=True)
    elif blocks > _FEW_BLOCKS or ctx.upper(attend.keys) <= KEYS or kernel.shared > MOST_SHARED:
        kernel = FlashAttention(attend.form)
    return KernelLaunch(kernel, args, blocks=blocks)


def _f32_tiles(attend: Attend, ctx: Context) -> KernelLaunch:
    heads = attend.batch * attend.form.heads
    tiles = -(-ctx.upper(attend.rows) // QUERIES)
    args = [*attend.pointers, heads, *_sizes(attend)]
    return KernelLaunch(F32Attention(attend.form), args, blocks=ctx.upper(heads) * tiles)


def _sizes(attend: Attend) -> list[KernelArg]:
    strides = [s for of in attend.strides for s in of]
    return [attend.rows, attend.keys, *strides, *attend.mask_strides]


def _decode(attend: Attend, ctx: Context) -> KernelLaunch:
    pairs = attend.batch * attend.form.kv_heads
    items = ctx.upper(pairs) * ctx.upper(attend.rows)
    kernel = DecodeAttention(attend.form, _splits(max(items, 1), ctx.upper(attend.keys)))
    shared: list[KernelArg] = [0, 0]
    if kernel.splits > 1:
        shared = [Scratch(attend.node), Counters(items)]
    args = [*attend.pointers, *shared, pairs, *_sizes(attend)]
    return KernelLaunch(kernel, args, blocks=items * kernel.splits)
