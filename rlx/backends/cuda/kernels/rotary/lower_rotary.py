"""Lowering of rotary embeddings, and of casts that only feed a state.

Where a result is only cast and appended to a state, as keys and values are to the KV cache, the
kernel writes to the state at once; `append_of` finds such chains.
"""

from __future__ import annotations

from typing import Any

from rlx.backends.cuda.append import Append, source_strides
from rlx.backends.cuda.kernels.rotary.rotary_kernel import RotaryKernel
from rlx.backends.cuda.kernels.rotary.slots import slot_args
from rlx.backends.cuda.lower_loops import launch_for, lower_region, scratch_bytes
from rlx.backends.cuda.lowering import Context, KernelLaunch, Layouts, lowers
from rlx.backends.kernel_args import Pointer
from rlx.ir.dim import Dim
from rlx.ir.node import Node, Value
from rlx.loops.strided_copies import StridedView, copy
from rlx.loops.trace import Buffer

_FLOATS = ("f32", "bf16", "f16")
_MOST = 512  # numbers of a head


def _suits(node: Node) -> bool:
    op: Any = node.op
    floats = [v for v in node.inputs if v.dtype.is_float]
    _, cos, sin, _ = _operands(node)
    known = all(v.dtype.name in _FLOATS for v in floats) and cos.dtype is sin.dtype
    return known and op.head_dim <= _MOST


def _operands(node: Node) -> tuple[Value | None, Value, Value, Value | None]:
    """gamma, cos, sin, positions"""
    _, *rest = node.inputs
    gamma = rest.pop(0) if node.op.name == "fused_qk_norm_rope" else None
    return gamma, rest[0], rest[1], rest[2] if len(rest) > 2 else None


def _reads(node: Node, layouts: Layouts) -> bool:
    tables = [v for v in _operands(node) if v is not None]
    return layouts.strides(node.inputs[0])[-1] == 1 and all(map(layouts.is_plain, tables))


@lowers("rope", "fused_qk_norm_rope", when=_suits, strided=_reads)
def lower_rotary(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    x, (gamma, cos, sin, positions) = node.inputs[0], _operands(node)
    if 0 in x.shape.dims:
        return []
    append, target = _append(node, ctx)
    out = node.output if append is None else append.state
    batch, tokens, heads = _sizes(x, op)
    given = None if positions is None else positions.dtype
    kernel = RotaryKernel(
        x.dtype, out.dtype, None if gamma is None else gamma.dtype, cos.dtype, given,
        op.head_dim, op.n_rot or op.head_dim, op.interleaved, getattr(op, "eps", 0.0),
        append is not None and append.slots is not None,
    )  # fmt: skip
    pointers = [Pointer(v) if v is not None else 0 for v in (x, gamma, cos, sin, positions)]
    items = batch * tokens * heads
    rows = positions.shape.dims[-1] if positions is not None and positions.shape.rank == 2 else 0
    args = [
        *pointers, Pointer(out, 0 if append is None else append.offset),
        *slot_args(node, append), tokens, heads, items, op.offset, cos.shape.dims[0],
        *_strides(x, op, ctx),
        *target, rows,
    ]  # fmt: skip
    blocks = -(-ctx.upper(items) // kernel.items)
    reads = [v for v in (x, gamma, cos, sin, positions) if v is not None]
    update = None if append is None else append.node
    return [KernelLaunch(kernel, args, blocks=blocks, node=update, reads=reads, writes=[out])]


def _append(node: Node, ctx: Context) -> tuple[Append | None, tuple[Dim, ...]]:
    """The state that the result goes to, if any, and the strides there or of the result."""
    op: Any = node.op
    own, append = _strides(node.output, op, ctx), ctx.append_of(node)
    if (
        append is None
        or append.stride(op.head_dim, 1) != 1
        or append.state.dtype.name not in _FLOATS
    ):
        return None, own
    pairs = zip(_sizes(node.output, op), own, strict=True)
    found = [append.stride(size, stride) for size, stride in pairs]
    strides = tuple([s for s in found if s is not None])
    if len(strides) < len(own) or not append.has_tokens(_sizes(node.output, op)[1], own[1]):
        return None, own
    ctx.absorb(append)
    if append.slots is not None:
        strides = (strides[0], append.axis[1], strides[2])
    return append, strides


@lowers("cast", scratch=scratch_bytes)
def lower_cast(node: Node, ctx: Context) -> list[KernelLaunch]:
    """A cast whose result is only appended to a state writes there."""
    x, append = node.inputs[0], ctx.append_of(node)
    strides = None if append is None else source_strides(append, x, ctx.strides(x))
    if append is None or strides is None or 0 in x.shape.dims:
        return lower_region(node, ctx)
    state = append.state
    heads = _as_heads(append, x, strides, ctx)
    if heads is not None:
        ctx.absorb(append)
        return [heads]
    if append.slots is not None:
        return lower_region(node, ctx)
    ctx.absorb(append)
    target = StridedView(
        Buffer("operand", 0), state.dtype, tuple([s for _, s, _ in append.dims]), append.offset
    )
    source = StridedView(Buffer("operand", 1), x.dtype, tuple(strides))
    scheduled = copy(tuple([d for d, _, _ in append.dims]), source, target)
    made = launch_for(node, ctx, scheduled, operands=(state, x))
    made.node = append.node
    return [made]


def _as_heads(append: Append, x: Value, strides: list[Dim], ctx: Context) -> KernelLaunch | None:
    """A cast of whole heads, as a rotation of none of their numbers: it can be merged with those
    of its neighbours."""
    *outer, last = append.dims
    size = last[0]
    if (
        strides[-1] != 1
        or last[1] != 1
        or not isinstance(size, int)
        or size > _MOST
        or len(outer) > 3
    ):
        return None
    if x.dtype.name not in _FLOATS or append.state.dtype.name not in _FLOATS:
        return None
    axes = _axes(append, outer, strides)
    if axes is None:
        return None
    batch, tokens, heads = (d for d, _, _ in axes)
    kernel = RotaryKernel(
        x.dtype, append.state.dtype, None, x.dtype, None, size, 0, False, 0.0,
        append.slots is not None,
    )  # fmt: skip
    items = batch * tokens * heads
    args = [
        Pointer(x), 0, 0, 0, 0, Pointer(append.state, append.offset),
        *slot_args(append.node, append), tokens, heads, items, 0, 0, *(own for _, _, own in axes),
        *(s for _, s, _ in axes), 0,
    ]  # fmt: skip
    blocks = -(-ctx.upper(items) // kernel.items)
    return KernelLaunch(
        kernel, args, blocks=blocks, node=append.node, reads=[x], writes=[append.state]
    )


Axis = tuple[Dim, Dim, Dim]  # a size, its stride in the state and in the value


def _axes(append: Append, outer: list[Axis], strides: list[Dim]) -> list[Axis] | None:
    """Sequences, tokens and heads; what has slots are the tokens."""
    none: Axis = (1, 0, 0)
    axes = [(d, s, own) for (d, s, _), own in zip(outer, strides[:-1], strict=True)]
    if append.slots is None:
        return [*[none] * (3 - len(axes)), *axes]
    token: Axis | None = (1, append.axis[1], 0) if append.axis[0] == 1 else None
    if append.axis in outer:
        token = axes.pop(outer.index(append.axis))
    if token is None or len(axes) > 2:
        return None
    first, last = ([none] * (2 - len(axes)) + axes)[:2]
    return [first, token, last]


def _sizes(x: Value, op: Any) -> tuple[Dim, Dim, Dim]:
    """Sequences, tokens, heads."""
    dims = x.shape.dims
    if x.shape.rank == 3:
        return dims[0], dims[1], dims[2] // op.head_dim
    return (dims[0], dims[2], dims[1]) if op.layout == "bhsd" else (dims[0], dims[1], dims[2])


def _strides(x: Value, op: Any, ctx: Layouts) -> tuple[Dim, Dim, Dim]:
    """By sequence, token and head."""
    found = ctx.strides(x)
    if x.shape.rank == 3:
        return found[0], found[1], op.head_dim
    return (found[0], found[2], found[1]) if op.layout == "bhsd" else (found[0], found[1], found[2])
