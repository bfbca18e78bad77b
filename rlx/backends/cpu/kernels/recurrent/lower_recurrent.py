"""Lowering of recurrences over a sequence: the selective scan and the gated delta rule."""

from __future__ import annotations

from typing import Any

from rlx.backends.carried_state import carried_state
from rlx.backends.cpu.kernels.recurrent.delta_net import DeltaStep, DeltaTokens, Rule
from rlx.backends.cpu.kernels.recurrent.selective_scan import SelectiveScan
from rlx.backends.cpu.lowering import Context, KernelArg, KernelLaunch, Pointer, Scratch, lowers
from rlx.ir.node import Node, Value
from rlx.llvm.target import Target


@lowers("selective_scan", when=lambda node: isinstance(node.inputs[2].shape.dims[1], int))
def lower_scan(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    names = ["u", "delta", "a", "b", "c", *["d"] * op.has_d, *["state"] * op.has_state]
    given: dict[str, Value] = dict(zip(names, node.inputs, strict=True))
    y, last = node.outputs
    size = given["a"].shape.dims[1]
    assert isinstance(size, int)
    types: dict[str, Any] = {"d": None, "state": None}
    types |= {name: value.shape.dtype for name, value in given.items()}
    spec = SelectiveScan(**types, last=last.shape.dtype, size=size)
    batch, seq, inner = given["u"].shape.dims
    home = carried_state(last, ctx)
    args: list[KernelArg] = [Pointer(v) for v in (*node.inputs, y, home)]
    cost = op.cost([v.shape for v in node.inputs], [y.shape, last.shape])
    return [
        KernelLaunch(
            spec, [*args, batch, seq, inner], list(node.inputs), [y, home],
            flops=cost.flops, bytes=cost.bytes,
        )
    ]  # fmt: skip


def _rule(node: Node) -> Rule:
    names = ["q", "k", "v", "g", "beta", "state"]
    types: dict[str, Any] = {"state": None}
    types |= {n: v.shape.dtype for n, v in zip(names, node.inputs, strict=False)}
    o, last = node.outputs
    size = o.shape.dims[3]
    assert isinstance(size, int)
    return Rule(**types, o=o.shape.dtype, last=last.shape.dtype, size=size)


def _is_step(node: Node) -> bool:
    return node.inputs[0].shape.dims[1] == 1


def _scratch(node: Node, target: Target, threads: int) -> int:
    return 0 if _is_step(node) else threads * DeltaTokens(_rule(node)).scratch(target)


@lowers("gated_delta_net", scratch=_scratch)
def lower_delta_net(node: Node, ctx: Context) -> list[KernelLaunch]:
    rule = _rule(node)
    o, last = node.outputs
    batch, seq, heads, _ = o.shape.dims
    home = carried_state(last, ctx)
    args: list[KernelArg] = [Pointer(v) for v in (*node.inputs, o, home)]
    cost = node.op.cost([v.shape for v in node.inputs], [o.shape, last.shape])
    reads, writes = list(node.inputs), [o, home]
    if _is_step(node):
        args.append(batch * heads)
        return [
            KernelLaunch(DeltaStep(rule), args, reads, writes, flops=cost.flops, bytes=cost.bytes)
        ]
    spec = DeltaTokens(rule)
    args += [Scratch(node), batch, seq, heads]
    return [
        KernelLaunch(
            spec, args, reads, writes, uses_scratch=True, flops=cost.flops, bytes=cost.bytes
        )
    ]
