"""Attention as steps: which kernel, how the operands lie, and how items are put together again."""

from __future__ import annotations

from dataclasses import replace

from rlx.backends.cpu.lowering import Context, KernelArg, KernelLaunch, Pointer, Scratch, lowers
from rlx.codegen.attention import ARGS, AttentionKernel, Problem
from rlx.codegen.attention_blocks import Q8_0, QuantizeBlocks
from rlx.codegen.attention_decode import MOST_ROWS, Decode
from rlx.codegen.attention_finish import Join
from rlx.codegen.attention_pairs import has_pairs
from rlx.codegen.attention_prefill import Prefill
from rlx.codegen.target import Target
from rlx.errors import UnsupportedError
from rlx.ir.dim import Dim, same
from rlx.ir.lir import contiguous_strides
from rlx.ir.node import Node, Value
from rlx.ir.ops.attention import Attention, Heads, head_sizes

Strides = tuple[Dim, ...]


def _problem(node: Node, target: Target) -> Problem:
    """The constants of a node whose operands lie without gaps."""
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
        group=op.num_heads // op.num_kv_heads,
        scale=op.score_scale,
        kind=op.mask_kind,
        softcap=op.softcap,
        mask=None if mask is None else mask.dtype,
        sinks=None if sinks is None else sinks.dtype,
        packed=op.kv_scheme is not None,
        pairs=op.coarse and has_pairs(target, op.head_dim),
    )


def _sizes(node: Node, name: str) -> Heads:
    op = node.op
    assert isinstance(op, Attention)
    layout, width = (op.q_layout, op.head_dim) if name == "q" else (op.kv_layout, op.row_width())
    return head_sizes(node.inputs["qkv".index(name)].shape, width, layout, name)


def _kernels(node: Node, problem: Problem, target: Target, heads: int) -> list[AttentionKernel]:
    """The kernel for the rows there are; both kinds when the number arrives with a run."""
    length, keys, group = _sizes(node, "q").length, _sizes(node, "k").length, problem.group
    lanes = problem.lanes(target)
    streams = problem.sums.bits == 32
    if isinstance(length, int):
        rows = length * group
        if rows <= MOST_ROWS and streams:
            return [Decode(problem, rows=max(rows, 1), heads=heads)]
        few = rows <= 2 * lanes
        return [Prefill(problem, rows=-(-max(rows, 1) // lanes) * lanes if few else 0)]
    if group > MOST_ROWS or not streams or same(length, keys):  # one query has one key then
        return [Prefill(problem)]
    one = Decode(problem, rows=group, heads=heads, queries="one")
    return [one, Prefill(problem, queries="more")]


def _scratch(node: Node, target: Target, threads: int) -> int:
    problem = replace(_problem(node, target), pairs=False)  # which takes more
    kernels = [
        kernel
        for heads in (1, problem.kv_heads)
        for kernel in _kernels(node, problem, target, heads)
    ]
    return threads * max(kernel.worker_bytes(target) for kernel in kernels)


@lowers("attention", scratch=_scratch, strided=True)
def lower_attention(node: Node, ctx: Context) -> list[KernelLaunch]:
    problem = _problem(node, ctx.target)
    strides = _strides(node, ctx)
    gaps = "".join(n for n in "qkv" if problem.head_dim > 1 and strides[f"{n}_step"] != 1)
    if problem.packed and gaps.strip("q"):
        raise UnsupportedError(
            "the bytes of packed keys do not lie side by side", where=node.op.name,
            got=repr(node), hint="give keys and values whose last axis was not moved",
        )  # fmt: skip
    by_row = any(strides[f"mask_{axis}"] != 0 for axis in ("head", "row"))
    problem = replace(problem, gaps=gaps, mask_rows=by_row, pairs=problem.pairs and not gaps)
    args = _args(node, strides)
    steps = []
    for kernel in _kernels(node, problem, ctx.target, _heads_together(problem, strides)):
        specs = [kernel, Join(kernel)] if ctx.threads > 1 else [kernel]
        steps += [
            KernelLaunch(s, args, node.inputs, node.outputs, uses_scratch=True) for s in specs
        ]
    for step in steps:
        step.bytes = node.output.shape.size_bytes  # a join moves no more than the result
    cost = node.op.cost([v.shape for v in node.inputs], [node.output.shape])
    main = [step for step in steps if not isinstance(step.spec, Join)][-1]
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


def _heads_together(problem: Problem, strides: dict[str, Dim]) -> int:
    """All key heads are read together where the heads of one token lie side by side."""
    row, head = strides["k_row"], strides["k_head"]
    beside = isinstance(row, int) and isinstance(head, int) and head < row
    return problem.kv_heads if beside else 1


def _args(node: Node, strides: dict[str, Dim]) -> list[KernelArg]:
    op = node.op
    assert isinstance(op, Attention)
    given = (*node.inputs[:3], *op.extras(*node.inputs[3:]))
    names = ("q", "k", "v", "mask", "sinks")
    found: dict[str, KernelArg] = {
        n: 0 if x is None else Pointer(x) for n, x in zip(names, given, strict=True)
    }
    found |= {"out": Pointer(node.output), "scratch": Scratch(node)}
    found |= {"batch": _sizes(node, "q").batch, "queries": _sizes(node, "q").length}
    found |= {"keys": _sizes(node, "k").length, **strides}
    return [found[name] for name in ARGS]


def _strides(node: Node, ctx: Context) -> dict[str, Dim]:
    op = node.op
    assert isinstance(op, Attention)
    found: dict[str, Dim] = {}
    lying = {"q": ctx.strides(node.inputs[0]), "out": contiguous_strides(node.output.shape)}
    lying |= {"k": ctx.strides(node.inputs[1]), "v": ctx.strides(node.inputs[2])}
    for name, strides in lying.items():
        layout = op.kv_layout if name in "kv" else op.q_layout
        batch, row, head, step = by_axis(strides, layout, op.head_dim)
        found |= {f"{name}_batch": batch, f"{name}_row": row}
        found |= {f"{name}_head": head, f"{name}_step": step}
    mask, _ = op.extras(*node.inputs[3:])
    axes = ("batch", "head", "row", "step")
    return found | dict(zip((f"mask_{a}" for a in axes), _mask_strides(mask, ctx), strict=True))


def by_axis(strides: Strides, layout: str, head_dim: int) -> Strides:
    """Strides of (batch entry, token, head, element) of a tensor that is divided into heads."""
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
