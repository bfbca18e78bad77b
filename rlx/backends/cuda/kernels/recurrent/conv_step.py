"""Causal convolutions of channels: a thread has a channel of a token.

The state, which is the tokens before, is usually written by a concatenation, a slice and an update.
Where there is one token, and nothing else reads these, the kernel moves the tokens along itself.
"""

from __future__ import annotations

from typing import Any

from rlx.backends.cuda.builder import THREADS, KernelModule
from rlx.backends.cuda.kernel import BlockKernel, GpuKernel
from rlx.backends.cuda.lowering import Context, KernelArg, KernelLaunch, lowers
from rlx.backends.kernel_args import Pointer
from rlx.ir.dim import same
from rlx.ir.dtype import DType
from rlx.ir.node import Node, Value
from rlx.ir.shape import normalize_axis
from rlx.llvm.builder import f32, i64
from rlx.llvm.storage import load, memory_type, store
from rlx.support.records import dataclass

_FLOATS = ("f32", "bf16", "f16")
_MOST_TAPS = 16


@dataclass(frozen=True)
class ConvStep(BlockKernel):
    """args: x, weights, tokens before, result, the state (else 0), sequences, channels"""

    x: DType
    w: DType
    before: DType
    out: DType
    taps: int
    keeps: bool  # the state

    @property
    def label(self) -> str:
        return f"conv_step({self.taps})"

    def emit(self, m: KernelModule) -> None:
        f = m.begin_block(self.threads)
        f.let_next_start()
        f.wait_for_previous()
        args, taps = f["args"], self.taps
        x, w, before, out, state = (f.arg(args, i) for i in range(5))
        sequences, channels = f.arg(args, 5, i64), f.arg(args, 6, i64)
        item = f.block_number().to(i64) * THREADS + f.thread().to(i64)

        def emit_channel() -> None:
            sequence = item.udiv(channels)
            channel = item - sequence * channels
            first = sequence * (taps - 1) * channels + channel
            places = [first + channels * j for j in range(taps - 1)]
            tokens = [
                load(f, f.gep(before, p, memory_type(self.before)), self.before, 1, f32)
                for p in places
            ]
            tokens.append(load(f, f.gep(x, item, memory_type(self.x)), self.x, 1, f32))
            total = f.const(0.0, f32)
            for j, token in enumerate(tokens):
                at = f.gep(w, channel * taps + j, memory_type(self.w))
                total = f.fma(token, load(f, at, self.w, 1, f32), total)
            store(f, total, f.gep(out, item, memory_type(self.out)), self.out)
            for p, token in zip(places if self.keeps else [], tokens[1:], strict=False):
                store(f, token, f.gep(state, p, memory_type(self.before)), self.before)

        f.if_(item < sequences * channels, emit_channel)


@dataclass(frozen=True)
class ConvTokens(GpuKernel):
    """args: x, weights, tokens before, result, sequences, tokens, channels"""

    x: DType
    w: DType
    before: DType
    out: DType
    taps: int

    @property
    def label(self) -> str:
        return f"conv({self.taps})"

    def emit(self, m: KernelModule) -> None:
        f = m.begin_kernel()
        args, taps = f["args"], self.taps
        x, w, before, out = (f.arg(args, i) for i in range(4))
        sequences, tokens, channels = (f.arg(args, i, i64) for i in (4, 5, 6))
        for item in f.elements(sequences * tokens * channels):
            row = item.udiv(channels)
            channel, sequence = item - row * channels, row.udiv(tokens)
            token, total = row - sequence * tokens, f.const(0.0, f32)
            for j in range(taps):
                place = token + (j + 1 - taps)
                early = sequence * (taps - 1) + f.min(place + (taps - 1), taps - 2)
                late = sequence * tokens + f.max(place, 0)
                given, kept = (
                    load(f, f.gep(base, r * channels + channel, memory_type(t)), t, 1, f32)
                    for base, r, t in ((x, late, self.x), (before, early, self.before))
                )
                at = f.gep(w, channel * taps + j, memory_type(self.w))
                number = f.select(place < 0, kept, given)
                total = f.fma(number, load(f, at, self.w, 1, f32), total)
            store(f, total, f.gep(out, item, memory_type(self.out)), self.out)


def _suits(node: Node) -> bool:
    taps = node.inputs[1].shape.dims[1]
    floats = all(v.dtype.name in _FLOATS for v in (*node.inputs, node.output))
    return floats and isinstance(taps, int) and 1 < taps <= _MOST_TAPS


@lowers("depthwise_conv1d_causal", when=_suits, strided=False)
def lower_conv(node: Node, ctx: Context) -> list[KernelLaunch]:
    x, w, before = node.inputs
    batch, tokens, channels = x.shape.dims
    taps = w.shape.dims[1]
    assert isinstance(taps, int)
    if tokens != 1:
        many = ConvTokens(x.dtype, w.dtype, before.dtype, node.output.dtype, taps)
        pointers = [Pointer(v) for v in (*node.inputs, node.output)]
        count = ctx.upper(x.shape.num_elements)
        return [KernelLaunch(many, [*pointers, batch, tokens, channels], count)] if count else []
    update = _update_of(node, ctx)
    kernel = ConvStep(x.dtype, w.dtype, before.dtype, node.output.dtype, taps, update is not None)
    ends: list[KernelArg] = [0 if update is None else Pointer(update.inputs[0]), batch, channels]
    if update is not None:
        ctx.absorbed.update(_between(update))
    args = [Pointer(x), Pointer(w), Pointer(before), Pointer(node.output), *ends]
    blocks = -(-ctx.upper(batch * channels) // THREADS)
    return [KernelLaunch(kernel, args, blocks=blocks)] if blocks else []


def _between(update: Node) -> list[Node]:
    """The update, the slice and the concatenation."""
    part = update.inputs[1].node
    return [update, part, part.inputs[0].node]


def _update_of(node: Node, ctx: Context) -> Node | None:
    """The update that makes the tokens before, without the first of them, and x the state, if that
    alone reads what is made for it."""
    x, _, state = node.inputs
    if state.node.op.name != "state":
        return None
    readers = [n for n in ctx.users(state) if n is not node]
    found = [n for n in readers if n.op.name == "state_update"]
    joins = [n for n in readers if n.op.name == "concat"]
    if len(readers) != 2 or len(found) != 1 or len(joins) != 1:
        return None
    [update], [join] = found, joins
    op: Any = update.op
    if len(update.inputs) != 2 or op.start != 0 or update.inputs[0] is not state:
        return None
    part = update.inputs[1].node
    if not _is_end(part, join, x, state) or not same(
        update.inputs[1].shape.dims[1], state.shape.dims[1]
    ):
        return None
    alone = all(len(ctx.users(n.output)) == 1 for n in (join, part))
    outputs = set(ctx.lir.outputs)
    kept = bool(outputs & {join.output, part.output, update.output})
    later = all(ctx.position(n) > ctx.position(node) for n in (update, join, part))
    unread = not ctx.users(update.output)
    return update if alone and not kept and later and unread else None


def _is_end(part: Node, join: Node, x: Value, state: Value) -> bool:
    """Whether `part` is all but the first token of the joined ones."""
    if part.op.name != "narrow" or part.inputs[0] is not join.output:
        return False
    joined: Any = join.op
    op: Any = part.op
    axes = [normalize_axis(o.axis, 3) for o in (joined, op)]
    parts = len(join.inputs) == 2 and join.inputs[0] is state and join.inputs[1] is x
    return axes == [1, 1] and op.start == 1 and parts
