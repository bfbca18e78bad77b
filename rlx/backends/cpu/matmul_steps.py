"""Products that take several steps: adapters beside a weight, rows routed to experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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
from rlx.backends.cpu.matmul import Case, matmul_launch, plain_case, spec_of, worker_bytes
from rlx.codegen.grouped_matmul import GroupedMatmul, Route, table_bytes
from rlx.codegen.matmul import Matmul
from rlx.codegen.matmul_finish import Epilogue
from rlx.codegen.target import Target
from rlx.ir.dim import Dim, upper_bound
from rlx.ir.dtype import DType, f32, f64
from rlx.ir.lir import aligned
from rlx.ir.node import Node


class _Lora:
    """scale·(x·a)·b into scratch, in f32 at least, then x·w with that as a residual."""

    def __init__(self, node: Node, target: Target, threads: int) -> None:
        op: Any = node.op
        x, _, a, b = node.inputs
        wide = f64 if node.output.dtype is f64 else f32
        base = plain_case(node)
        rank, n = b.shape.dims
        down = replace(base, w=a, n=rank, w_term=rank)
        up = replace(base, w=b, k=rank, x_line=rank)
        specs = (
            spec_of(down, Epilogue(wide)),
            replace(spec_of(up, Epilogue(wide, scale=op.scale)), x=wide),
            spec_of(base, Epilogue(node.output.dtype, residual=wide)),
        )
        self.parts: list[tuple[Case, Matmul]] = list(zip((down, up, base), specs, strict=True))
        live = node.graph.live
        rows = upper_bound(base.m, live)
        each = max(worker_bytes(case, spec, target, node) for case, spec in self.parts)
        self.narrow = each * threads
        self.added = self.narrow + aligned(rows * upper_bound(rank, live) * wide.bytes)
        self.size = self.added + aligned(rows * upper_bound(n, live) * wide.bytes)
        self.x_bytes = x.dtype.bytes, wide.bytes


def _lora_scratch(node: Node, target: Target, threads: int) -> int:
    return _Lora(node, target, threads).size


@lowers("lora_matmul", scratch=_lora_scratch)
def lower_lora(node: Node, ctx: Context) -> list[KernelLaunch]:
    lora = _Lora(node, ctx.target, ctx.threads)
    narrow, added = Scratch(node, lora.narrow), Scratch(node, lora.added)
    size = lora.x_bytes[1]
    (down, first), (up, second), (base, third) = lora.parts
    args: list[dict[str, KernelArg]] = [
        {"out": narrow},
        {"x": narrow, "out": added, "x_line": up.x_line * size, "x_term": size},
        {"residual": added},
    ]
    pairs = zip((down, up, base), (first, second, third), args, strict=True)
    return [matmul_launch(node, ctx, case, spec, given) for case, spec, given in pairs]


class _Grouped:
    """The case of one expert, the kernel, and where its scratch lies behind the table."""

    def __init__(self, node: Node, target: Target, threads: int) -> None:
        op: Any = node.op
        x, w, expert = node.inputs
        packed = op.name == "packed_grouped_matmul"
        k, n = (op.k, op.n) if packed else w.shape.dims[1:]
        self.case = Case(x, w, x.shape.dims[0], n, k, k, 1, 1, n)
        plain = spec_of(self.case, Epilogue(node.output.dtype), packed)
        self.spec = GroupedMatmul(x.dtype, w.dtype, plain.epilogue, packed)
        self.experts: Dim = w.shape.dims[0]
        self.expert_bytes: Dim = w.shape.with_dims(w.shape.dims[1:]).size_bytes
        live = node.graph.live
        self.table = table_bytes(upper_bound(self.case.m, live), upper_bound(self.experts, live))
        self.size = self.table + worker_bytes(self.case, self.spec, target, node) * threads
        self.index: DType = expert.dtype


def _grouped_scratch(node: Node, target: Target, threads: int) -> int:
    return _Grouped(node, target, threads).size


@lowers("grouped_matmul", "packed_grouped_matmul", scratch=_grouped_scratch)
def lower_grouped(node: Node, ctx: Context) -> list[KernelLaunch]:
    group = _Grouped(node, ctx.target, ctx.threads)
    table, expert = Scratch(node), Pointer(node.inputs[2])
    route: list[KernelArg] = [
        expert,
        table,
        group.case.m,
        group.experts,
        Status(),
        NodeNumber(node),
    ]
    given: dict[str, KernelArg] = {"table": table, "w_expert": group.expert_bytes}
    return [
        KernelLaunch(Route(group.index), route, [node.inputs[2]], solo=True, uses_scratch=True),
        matmul_launch(node, ctx, group.case, group.spec, given, group.table),
    ]
