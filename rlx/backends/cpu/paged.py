"""Attention over pages as steps: runs of tokens, then those that stand alone."""

from __future__ import annotations

from rlx.backends.cpu.lowering import (
    Context,
    KernelArg,
    KernelLaunch,
    NodeNumber,
    Pointer,
    Scratch,
    Status,
    lowers,
)
from rlx.codegen.attention import Problem
from rlx.codegen.attention_decode import MOST_ROWS
from rlx.codegen.attention_paged import PAGED_ARGS, Paged
from rlx.codegen.target import Target
from rlx.ir.attrs import MaskKind
from rlx.ir.node import Node
from rlx.ir.ops.paged import PagedAttention

_BLOCK = 64  # keys that a kernel takes at once: no page may end inside


def _kernels(node: Node) -> list[Paged]:
    op = node.op
    assert isinstance(op, PagedAttention)
    q, k, v = (value.dtype for value in node.inputs[:3])
    group = op.num_heads // op.num_kv_heads
    kind = MaskKind.SLIDING_WINDOW(op.window) if op.window else MaskKind.CAUSAL
    sinks = node.inputs[6].dtype if len(node.inputs) > 6 else None
    problem = Problem(
        q, k, v, op.head_dim, op.num_kv_heads, group, op.score_scale, kind, op.softcap, sinks=sinks
    )
    run = max(MOST_ROWS // group, 1)
    sizes = [run, 1] if run > 1 else [1]
    return [Paged(problem, rows=n * group, page=op.page, tokens=n) for n in sizes]


def _can(node: Node) -> bool:
    op = node.op
    assert isinstance(op, PagedAttention)
    few = op.num_heads // op.num_kv_heads <= 2 * MOST_ROWS
    plain = all(v.dtype.bits <= 32 for v in node.inputs[:3])
    plain = plain and all(v.dtype.name == "i32" for v in node.inputs[3:6])
    return few and plain and op.page % _BLOCK == 0


def _scratch(node: Node, target: Target, threads: int) -> int:
    return threads * max(kernel.worker_bytes(target) for kernel in _kernels(node))


@lowers("paged_attention", when=_can, scratch=_scratch)
def lower_paged(node: Node, ctx: Context) -> list[KernelLaunch]:
    op = node.op
    assert isinstance(op, PagedAttention)
    args = _args(node, op)
    cost = op.cost([v.shape for v in node.inputs], [node.output.shape])
    steps = [
        KernelLaunch(kernel, args, node.inputs, node.outputs, uses_scratch=True)
        for kernel in _kernels(node)
    ]
    steps[0].flops, steps[0].bytes = cost.flops, cost.bytes
    return steps


def _args(node: Node, op: PagedAttention) -> list[KernelArg]:
    q, k, v, table, rows, positions, *sinks = node.inputs
    slots, dim = k.shape.dims[2], op.head_dim
    found: dict[str, KernelArg] = {
        "q": Pointer(q), "k": Pointer(k), "v": Pointer(v), "mask": 0,
        "sinks": Pointer(sinks[0]) if sinks else 0, "out": Pointer(node.output),
        "scratch": Scratch(node), "batch": 1, "queries": q.shape.dims[1], "keys": slots,
        "table": Pointer(table), "rows": Pointer(rows), "positions": Pointer(positions),
        "status": Status(), "node": NodeNumber(node), "sequences": table.shape.dims[0],
        "pages": table.shape.dims[1], "most": slots // op.page,
    }  # fmt: skip
    token, key = (0, op.num_heads * dim, dim, 1), (0, dim, slots * dim, 1)
    for name, strides in (("q", token), ("k", key), ("v", key), ("out", token)):
        axes = zip(("batch", "row", "head", "step"), strides, strict=True)
        found |= {f"{name}_{axis}": stride for axis, stride in axes}
    return [found.get(name, 0) for name in PAGED_ARGS]
