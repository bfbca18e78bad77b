"""Lowering of paged attention."""

from __future__ import annotations

from rlx.backends.cuda.batch_invariance import is_asked
from rlx.backends.cuda.kernels.attention.attention_problem import AttentionForm
from rlx.backends.cuda.kernels.attention.fixed_attention import FixedPagedFlash, fixed_flash
from rlx.backends.cuda.kernels.attention.flash_attention import KEYS
from rlx.backends.cuda.kernels.attention.lower_attention import MOST_SHARED
from rlx.backends.cuda.kernels.attention.paged_attention import (
    PagedDecode,
    PagedFlash,
    tile_tokens,
)
from rlx.backends.cuda.kernels.gemm.problem import ALIGNMENT
from rlx.backends.cuda.lowering import Context, Counters, KernelArg, KernelLaunch, lowers
from rlx.backends.kernel_args import NodeNumber, Pointer, Scratch, Status
from rlx.ir.attrs import MaskKind
from rlx.ir.dim import upper_bound
from rlx.ir.dtype import f16
from rlx.ir.node import Node
from rlx.ir.ops.paged import PagedAttention

_FLOATS = ("f32", "bf16", "f16")
_KEYS = 64  # of a part, at least
_BLOCKS = 264  # of single tokens: two for each multiprocessor of the GPUs that we know
_MOST_BLOCKS = 4 * _BLOCKS
_MOST_PARTS = 64
_FEW = 8  # tokens that are taken alone, whatever they are


def _op(node: Node) -> PagedAttention:
    op = node.op
    assert isinstance(op, PagedAttention)
    return op


def _suits(node: Node) -> bool:
    op = _op(node)
    q, k, v, table, rows, positions, *sinks = node.inputs
    read = [q] if op.kv_scheme is not None else [q, k, v]
    if any(x.dtype.name not in _FLOATS for x in (*read, *sinks)) or k.dtype is not v.dtype:
        return False
    if any(x.dtype.name != "i32" for x in (table, rows, positions)) or op.head_dim > 256:
        return False
    return all(op.head_dim * x.dtype.bytes % ALIGNMENT == 0 for x in read)


def _form(node: Node) -> AttentionForm:
    op = _op(node)
    q, k, *_ = node.inputs
    kind = MaskKind.SLIDING_WINDOW(op.window) if op.window else MaskKind.CAUSAL
    sinks = node.inputs[6].dtype if len(node.inputs) > 6 else None
    q8 = op.kv_scheme is not None
    return AttentionForm(
        q.dtype, f16 if q8 else k.dtype, node.output.dtype, op.num_heads, op.num_kv_heads,
        op.head_dim, kind.ahead, kind.behind, op.score_scale, op.softcap, "", sinks, op.coarse, q8,
    )  # fmt: skip


def _runs(node: Node, form: AttentionForm) -> bool:
    """Whether runs of tokens have tiles of their own."""
    tokens = upper_bound(node.inputs[0].shape.dims[1], node.graph.live)
    return _by_tiles(form) and tokens > _FEW and tile_tokens(form) > 1


def _by_tiles(form: AttentionForm) -> bool:
    """Whether tensor cores take its keys."""
    suited = form.kv.bytes == 2 and form.q.name in ("f32", form.kv.name) and form.dim % 16 == 0
    return suited and tile_tokens(form) > 0


def _decode(node: Node) -> PagedDecode:
    form, table = _form(node), node.inputs[3].shape
    live, page = node.graph.live, _op(node).page
    items = upper_bound(node.inputs[0].shape.dims[1], live) * form.kv_heads
    blocks = max(_BLOCKS, min(items, _MOST_BLOCKS))
    parts = min(_MOST_PARTS, -(-upper_bound(table.dims[1] * page, live) // _KEYS), blocks)
    early = all(v.node.op.name == "input" for v in node.inputs[3:6])
    return PagedDecode(form, page, blocks, max(parts, 1), _runs(node, form), early)


def _scratch(node: Node) -> int:
    if is_asked():
        fixed, tokens = _fixed_kernel(node), node.inputs[0].shape.dims[1]
        if isinstance(fixed, PagedDecode):
            return 0
        return fixed.partial_bytes(upper_bound(tokens, node.graph.live))
    kernel = _decode(node)
    form = kernel.form
    return 4 * kernel.blocks * form.group * (form.dim + 2) if kernel.most > 1 else 0


@lowers("paged_attention", "rounded_paged_attention", when=_suits, scratch=_scratch, strided=False)
def lower_paged(node: Node, ctx: Context) -> list[KernelLaunch]:
    if 0 in node.output.shape.dims:
        return []
    if is_asked():
        return [_fixed(node, ctx)]
    decode = _decode(node)
    args, form = _args(node, decode.page, decode.most > 1, decode.blocks), decode.form
    made = [KernelLaunch(decode, args, blocks=decode.blocks)]
    if decode.runs:
        tiles = -(-ctx.upper(node.inputs[0].shape.dims[1]) // tile_tokens(form))
        flash = PagedFlash(form, 2, page=decode.page)
        if (
            flash.shared > MOST_SHARED
            or ctx.upper(node.inputs[3].shape.dims[1]) * decode.page <= KEYS
        ):
            flash = PagedFlash(form, 1, page=decode.page)
        made.insert(0, KernelLaunch(flash, args, blocks=tiles * form.kv_heads))
    return made


def _fixed_kernel(node: Node) -> FixedPagedFlash | PagedDecode:
    """A kernel that adds up in the same order for any tokens."""
    form, page, live = _form(node), _op(node).page, node.graph.live
    tokens = upper_bound(node.inputs[0].shape.dims[1], live)
    most = upper_bound(node.inputs[3].shape.dims[1] * page, live)
    if _by_tiles(form):
        return fixed_flash(form, page, max(tokens, 1), most, tile_tokens(form))
    blocks = min(max(tokens * form.kv_heads, 1), _MOST_BLOCKS)
    return PagedDecode(form, page, blocks, 1, runs=False)


def _fixed(node: Node, ctx: Context) -> KernelLaunch:
    kernel, tokens = _fixed_kernel(node), ctx.upper(node.inputs[0].shape.dims[1])
    if isinstance(kernel, PagedDecode):
        return KernelLaunch(kernel, _args(node, kernel.page, False, 0), blocks=kernel.blocks)
    counters = tokens * kernel.form.kv_heads
    args = _args(node, kernel.page, kernel.pieces > 1, counters)
    return KernelLaunch(kernel, args, blocks=kernel.blocks(tokens))


def _args(node: Node, page: int, is_divided: bool, counters: int) -> list[KernelArg]:
    q, k, v, table, rows, positions, *sinks = node.inputs
    op = _op(node)
    slots, width = k.shape.dims[2], op.row_width()
    shared: list[KernelArg] = [Scratch(node), Counters(counters)] if is_divided else [0, 0]
    tokens = op.num_heads * op.head_dim
    return [
        Pointer(q), Pointer(k), Pointer(v), Pointer(node.output),
        Pointer(sinks[0]) if sinks else 0, Pointer(table), Pointer(rows), Pointer(positions),
        *shared, Status(), NodeNumber(node), q.shape.dims[1], *table.shape.dims,
        slots // page, tokens, tokens, *(slots * width, width) * 2,
    ]  # fmt: skip
