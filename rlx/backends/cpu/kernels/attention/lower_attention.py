"""Lowering of attention: choice of kernel, operand strides, split-KV combine."""

from __future__ import annotations

from dataclasses import replace

from rlx.backends.cpu.kernels.attention.combine import CombineSplitKV
from rlx.backends.cpu.kernels.attention.decode import MAX_ROWS, Decode
from rlx.backends.cpu.kernels.attention.decode_heads import CombineHeads, DecodeHeads
from rlx.backends.cpu.kernels.attention.prefill import Prefill
from rlx.backends.cpu.kernels.attention.problem import (
    ARGS,
    Q8_0,
    AttentionKernel,
    Problem,
    QuantizeBlocks,
)
from rlx.backends.cpu.kernels.attention.tiles import has_bf16_dot
from rlx.backends.cpu.kernels.spec import KernelSpec
from rlx.backends.cpu.lowering import Context, KernelArg, KernelLaunch, Pointer, Scratch, lowers
from rlx.errors import UnsupportedError
from rlx.ir.dim import Dim, same
from rlx.ir.lir import contiguous_strides
from rlx.ir.node import Node, Value
from rlx.ir.ops.attention import Attention, Heads, head_sizes
from rlx.llvm.target import Target

Strides = tuple[Dim, ...]

_MAX_PARTIALS = 4 << 20  # bytes of partial results of all heads of a batch


def _problem(node: Node, target: Target) -> Problem:
    """The constants of a node with contiguous operands."""
    op = node.op
    assert isinstance(op, Attention)
    q, k, v = (value.dtype for value in node.inputs[:3])
    mask, sinks = op.extras(*node.inputs[3:])
    return Problem(
        q=q,
        k=k,
        v=v,
        head_dim=op.head_dim,
        kv_heads=op.num_kv_heads,
        gqa_group=op.num_heads // op.num_kv_heads,
        scale=op.score_scale,
        kind=op.mask_kind,
        softcap=op.softcap,
        mask=None if mask is None else mask.dtype,
        sinks=None if sinks is None else sinks.dtype,
        q8_kv=op.kv_scheme is not None,
        bf16_pairs=op.coarse and has_bf16_dot(target, op.head_dim),
        lse=len(node.outputs) > 1,
    )


def _sizes(node: Node, name: str) -> Heads:
    op = node.op
    assert isinstance(op, Attention)
    layout, width = (op.q_layout, op.head_dim) if name == "q" else (op.kv_layout, op.row_width())
    return head_sizes(node.inputs["qkv".index(name)].shape, width, layout, name)


def _decode(node: Node, target: Target, kernel: Decode, near: bool) -> Decode:
    """The kernel, or the one for heads that are neighbours in memory (`near`)."""
    batch = _sizes(node, "q").batch
    if not near or not isinstance(batch, int) or kernel.problem.kv_heads == 1:
        return kernel
    heads = DecodeHeads(kernel.problem, kernel.rows, batch, queries=kernel.queries)
    return heads if heads.partials_bytes(target) <= _MAX_PARTIALS else kernel


def _kernels(node: Node, problem: Problem, target: Target, near: bool) -> list[AttentionKernel]:
    """Decode or prefill by the number of rows; both when that is dynamic. `near`: the heads of a
    key are neighbours in memory."""
    length, keys, group = _sizes(node, "q").length, _sizes(node, "k").length, problem.gqa_group
    lanes = problem.lanes(target)
    f32_acc = problem.acc.bits == 32
    if problem.lse:  # training: many rows
        return [Prefill(problem)]
    if isinstance(length, int):
        rows = length * group
        if rows <= MAX_ROWS and f32_acc:
            return [_decode(node, target, Decode(problem, rows=max(rows, 1)), near)]
        few = rows <= 2 * lanes
        return [Prefill(problem, rows=-(-max(rows, 1) // lanes) * lanes if few else 0)]
    if group > MAX_ROWS or not f32_acc or same(length, keys):  # then one query has one key
        return [Prefill(problem)]
    one = _decode(node, target, Decode(problem, rows=group, queries="one"), near)
    return [one, Prefill(problem, queries="more")]


def _scratch(node: Node, target: Target, threads: int) -> int:
    problem = replace(_problem(node, target), bf16_pairs=False)  # the worst case
    kernels = [k for near in (False, True) for k in _kernels(node, problem, target, near)]
    return max(_scratch_of(kernel, target, threads) for kernel in kernels)


def _scratch_of(kernel: AttentionKernel, target: Target, threads: int) -> int:
    if isinstance(kernel, DecodeHeads):
        return kernel.scratch_bytes(target, threads)
    return threads * kernel.layout(target).worker_bytes


@lowers("attention", "attention_with_lse", scratch=_scratch, strided=True)
def lower_attention(node: Node, ctx: Context) -> list[KernelLaunch]:
    problem = _problem(node, ctx.target)
    strides = _strides(node, ctx)
    strided = "".join(n for n in "qkv" if problem.head_dim > 1 and strides[f"{n}_step"] != 1)
    if problem.q8_kv and strided.strip("q"):
        raise UnsupportedError(
            "the bytes of quantised keys are not contiguous", where=node.op.name,
            got=repr(node), hint="give keys and values whose last axis was not moved",
        )  # fmt: skip
    mask_rows = any(strides[f"mask_{axis}"] != 0 for axis in ("head", "row"))
    problem = replace(
        problem, strided=strided, mask_rows=mask_rows, bf16_pairs=problem.bf16_pairs and not strided
    )
    args = _args(node, strides)
    steps = []
    near = all(same(strides[f"{n}_row"], problem.kv_heads * strides[f"{n}_head"]) for n in "kv")
    for kernel in _kernels(node, problem, ctx.target, near):
        specs: list[KernelSpec] = [kernel]
        if isinstance(kernel, DecodeHeads):
            specs.append(CombineHeads(kernel.layout(ctx.target), kernel))
        elif ctx.threads > 1:
            specs.append(CombineSplitKV(kernel.layout(ctx.target)))
        steps += [
            KernelLaunch(s, args, node.inputs, node.outputs, uses_scratch=True) for s in specs
        ]
    for step in steps:
        step.bytes = node.outputs[0].shape.size_bytes  # combining moves no more than the result
    cost = node.op.cost([v.shape for v in node.inputs], [node.outputs[0].shape])
    main = [step for step in steps if not isinstance(step.spec, CombineSplitKV)][-1]
    main.flops, main.bytes = cost.flops, cost.bytes
    return steps


@lowers("quantize_blocks")
def lower_quantize_blocks(node: Node, ctx: Context) -> list[KernelLaunch]:
    (x,) = node.inputs
    args: list[KernelArg] = [
        Pointer(x),
        Pointer(node.output),
        x.shape.num_elements // Q8_0.block_size,
    ]
    cost = node.op.cost([x.shape], [node.output.shape])
    spec = QuantizeBlocks(x.dtype)
    return [KernelLaunch(spec, args, node.inputs, node.outputs, flops=cost.flops, bytes=cost.bytes)]


def _args(node: Node, strides: dict[str, Dim]) -> list[KernelArg]:
    op = node.op
    assert isinstance(op, Attention)
    given = (*node.inputs[:3], *op.extras(*node.inputs[3:]))
    names = ("q", "k", "v", "mask", "sinks")
    found: dict[str, KernelArg] = {
        n: 0 if x is None else Pointer(x) for n, x in zip(names, given, strict=True)
    }
    out, *lse = node.outputs
    found |= {"out": Pointer(out), "scratch": Scratch(node), "lse": Pointer(lse[0]) if lse else 0}
    found |= {"batch": _sizes(node, "q").batch, "queries": _sizes(node, "q").length}
    found |= {"keys": _sizes(node, "k").length, **strides}
    return [found[name] for name in ARGS]


def _strides(node: Node, ctx: Context) -> dict[str, Dim]:
    op = node.op
    assert isinstance(op, Attention)
    found: dict[str, Dim] = {}
    operands = {"q": ctx.strides(node.inputs[0]), "out": contiguous_strides(node.outputs[0].shape)}
    operands |= {"k": ctx.strides(node.inputs[1]), "v": ctx.strides(node.inputs[2])}
    for name, strides in operands.items():
        layout = op.kv_layout if name in "kv" else op.q_layout
        batch, row, head, step = by_axis(strides, layout, op.head_dim)
        found |= {f"{name}_batch": batch, f"{name}_row": row}
        found |= {f"{name}_head": head, f"{name}_step": step}
    mask, _ = op.extras(*node.inputs[3:])
    axes = ("batch", "head", "row", "step")
    return found | dict(zip((f"mask_{a}" for a in axes), _mask_strides(mask, ctx), strict=True))


def by_axis(strides: Strides, layout: str, head_dim: int) -> Strides:
    """Strides of (batch entry, token, head, element) of a tensor split into heads."""
    if len(strides) == 3:
        batch, row, step = strides
        return batch, row, step * head_dim, step
    batch, first, second, step = strides
    return (batch, first, second, step) if layout == "bshd" else (batch, second, first, step)


def _mask_strides(mask: Value | None, ctx: Context) -> Strides:
    """Strides over [batch, heads, queries, keys]; 0 where the mask is broadcast."""
    if mask is None:
        return (0, 0, 0, 0)
    pairs = zip(mask.shape.dims, ctx.strides(mask), strict=True)
    found = [0 if same(size, 1) else stride for size, stride in pairs]
    return (*[0] * (4 - len(found)), *found)
