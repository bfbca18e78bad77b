"""Lowering of matmul ops to GEMM kernels: operand strides, choice of kernel, scratch memory.

LoRA adapters and grouped (mixture-of-experts) matmuls take several steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from rlx.backends.cpu.kernels.gemm.bf16_gemm import Bf16Gemm
from rlx.backends.cpu.kernels.gemm.complex_gemm import ComplexGemm
from rlx.backends.cpu.kernels.gemm.epilogue import Epilogue
from rlx.backends.cpu.kernels.gemm.gemm import Gemm
from rlx.backends.cpu.kernels.gemm.gemv import GemvAxpy, GemvColumns, GemvDot
from rlx.backends.cpu.kernels.gemm.grouped_gemm import GroupedGemm, Route, table_bytes
from rlx.backends.cpu.kernels.gemm.strassen import Strassen
from rlx.backends.cpu.kernels.gemm.strassen_twice import StrassenTwice
from rlx.backends.cpu.layouts.pack import read_layout
from rlx.backends.cpu.lowering import (
    Context,
    KernelArg,
    KernelLaunch,
    NodeNumber,
    Pointer,
    Scratch,
    Status,
    lowers,
    scratch_per_worker,
)
from rlx.ir.dim import Dim, same, upper_bound
from rlx.ir.dtype import DType, f32, f64
from rlx.ir.lir import aligned, contiguous_strides
from rlx.ir.node import Node, Value
from rlx.llvm.nest.elements import can_activate
from rlx.llvm.target import Target
from rlx.support.records import dataclass

Strides = tuple[Dim, ...]


@dataclass(frozen=True)
class GemmProblem:
    """x [.., m, k] times w [.., k, n]: sizes, and strides in elements."""

    x: Value
    w: Value
    m: Dim
    n: Dim
    k: Dim
    x_stride_m: Dim
    x_stride_k: Dim
    w_stride_n: Dim = 1
    w_stride_k: Dim = 0
    batch: tuple[tuple[Dim, Dim, Dim], ...] = ()  # size, stride of x, stride of w

    @property
    def x_unit(self) -> str:
        if same(self.x_stride_k, 1) or same(self.k, 1):
            return "k"
        return "m" if same(self.x_stride_m, 1) else "none"

    @property
    def w_unit(self) -> str:
        if same(self.w_stride_n, 1) or same(self.n, 1):
            return "n"
        return "k" if same(self.w_stride_k, 1) or same(self.k, 1) else "none"

    def args(self) -> dict[str, KernelArg]:
        x, w = self.x.dtype.bytes, self.w.dtype.bytes
        found: dict[str, KernelArg] = {"x": Pointer(self.x), "w": Pointer(self.w)}
        found |= {"m": self.m, "n": self.n, "k": self.k}
        found |= {"x_stride_m": self.x_stride_m * x, "x_stride_k": self.x_stride_k * x}
        found |= {"w_stride_n": self.w_stride_n * w, "w_stride_k": self.w_stride_k * w}
        for i, (size, x_step, w_step) in enumerate(self.batch):
            found |= {f"size{i}": size, f"x_batch{i}": x_step * x, f"w_batch{i}": w_step * w}
        return found


def contiguous_problem(node: Node) -> GemmProblem:
    """The problem of a matmul by NumPy's rules with row-major operands."""
    x, w = node.inputs[:2]
    return problem_of(node, contiguous_strides(x.shape), contiguous_strides(w.shape))


def problem_of(node: Node, x_strides: Strides, w_strides: Strides) -> GemmProblem:
    x, w = node.inputs[:2]
    x_axes = list(zip(x.shape.dims, x_strides, strict=True))
    w_axes = list(zip(w.shape.dims, w_strides, strict=True))
    x_axes = [(1, 0), *x_axes] if len(x_axes) == 1 else x_axes
    w_axes = [*w_axes, (1, 0)] if len(w_axes) == 1 else w_axes
    (m, x_stride_m), (k, x_stride_k) = x_axes[-2:]
    (_, w_stride_k), (n, w_stride_n) = w_axes[-2:]
    batch = _batch_axes(x_axes[:-2], w_axes[:-2])
    problem = GemmProblem(x, w, m, n, k, x_stride_m, x_stride_k, w_stride_n, w_stride_k)
    return _collapse_batch(problem, batch)


def _batch_axes(
    x_axes: list[tuple[Dim, Dim]], w_axes: list[tuple[Dim, Dim]]
) -> list[tuple[Dim, Dim, Dim]]:
    """(size, stride of x, stride of w) of the broadcast batch axes; axes of size 1 have none."""
    rank = max(len(x_axes), len(w_axes))
    left = [(1, 0)] * (rank - len(x_axes)) + x_axes
    right = [(1, 0)] * (rank - len(w_axes)) + w_axes
    axes = []
    for (a, x_step), (b, w_step) in zip(left, right, strict=True):
        size = b if a == 1 else a
        if size != 1:
            axes.append((size, 0 if a == 1 else x_step, 0 if b == 1 else w_step))
    return axes


def _collapse_batch(problem: GemmProblem, axes: list[tuple[Dim, Dim, Dim]]) -> GemmProblem:
    """Collapse batch axes: into m where w is shared, and contiguous neighbours into one."""
    m, stride_m = problem.m, problem.x_stride_m
    while axes and axes[-1][2] == 0 and (m == 1 or same(axes[-1][1], m * stride_m)):
        size, step, _ = axes.pop()
        m, stride_m = (size, step) if m == 1 else (size * m, stride_m)
    batch: list[tuple[Dim, Dim, Dim]] = []
    for size, x_step, w_step in reversed(axes):
        if batch:
            inner, x_inner, w_inner = batch[0]
            if same(x_step, inner * x_inner) and same(w_step, inner * w_inner):
                batch[0] = (size * inner, x_inner, w_inner)
                continue
        batch.insert(0, (size, x_step, w_step))
    return replace(problem, m=m, x_stride_m=stride_m, batch=tuple(batch))


def _transposed(problem: GemmProblem) -> GemmProblem:
    """x·w as wᵀ·xᵀ, for n = 1: the rows become the columns that vectors run along."""
    batch = tuple((size, w_step, x_step) for size, x_step, w_step in problem.batch)
    return GemmProblem(
        problem.w, problem.x, problem.n, problem.m, problem.k, problem.w_stride_n,
        problem.w_stride_k, problem.x_stride_m, problem.x_stride_k, batch,
    )  # fmt: skip


# -- one GEMM ---------------------------------------------------------------------------------


_FEW_COLUMNS = (8, 16, 32)  # such as the rank of an adapter: kernels with tiles of their own


def spec_of(problem: GemmProblem, epilogue: Epilogue, packed: bool = False) -> Gemm:
    single_row = packed and problem.m == 1 and not problem.batch
    return Gemm(
        problem.x.dtype, problem.w.dtype, epilogue, packed, problem.x_unit,
        "n" if packed else problem.w_unit, len(problem.batch), single_row,
        0 if packed or epilogue.pair else _few_columns(problem),
    )  # fmt: skip


def _few_columns(problem: GemmProblem) -> int:
    n, k = problem.n, problem.k
    if not isinstance(n, int) or (isinstance(k, int) and k < _FEW_COLUMNS[-1]):
        return 0  # a product that is all overhead needs no kernel of its own
    return next((most for most in _FEW_COLUMNS if n <= most), 0)


def worker_bytes(problem: GemmProblem, spec: Gemm, target: Target, node: Node) -> int:
    """Scratch bytes of each worker."""
    m, n, k = (upper_bound(d, node.graph.live) for d in (problem.m, problem.n, problem.k))
    return scratch_per_worker(spec.scratch(target, m, n, k))


def gemm_launch(
    node: Node,
    ctx: Context,
    problem: GemmProblem,
    spec: Gemm,
    given: Mapping[str, KernelArg],
    offset: int = 0,
) -> KernelLaunch:
    each = worker_bytes(problem, spec, ctx.target, node)
    args: dict[str, KernelArg] = {"scratch": Scratch(node, offset), "worker_bytes": each}
    args |= {"out": Pointer(node.output)} | problem.args() | dict(given)
    cost = node.op.cost([v.shape for v in node.inputs], [v.shape for v in node.outputs])
    return KernelLaunch(
        spec, [args[w] for w in spec.args], node.inputs, node.outputs, uses_scratch=True,
        flops=cost.flops, bytes=cost.bytes,
    )  # fmt: skip


def _matmul_scratch(node: Node, target: Target, threads: int) -> int:
    problem = contiguous_problem(node)
    if node.output.dtype.kind == "complex":
        return 0
    # Strides are not known yet. They decide which batch axes collapse into m, and whether x must
    # be packed: take the worst case.
    rows = node.output.shape.with_dims(node.output.shape.dims[: None if problem.n == 1 else -1])
    most = replace(
        problem, m=rows.num_elements, n=rows.num_elements if problem.n == 1 else problem.n
    )
    spec = replace(spec_of(most, Epilogue(node.output.dtype)), x_unit="none")
    return worker_bytes(most, spec, target, node) * threads


_MANY_ROWS = 256


def _reads_transposed_weight(node: Node) -> bool:
    """Whether w may be a strided view. For many rows a transposed matrix is copied once instead:
    packing would transpose it anew for each block of rows."""
    w, rows = node.inputs[1], node.output.shape.dims[:-1]
    counts = [d for d in rows if isinstance(d, int)]
    many = len(counts) == len(rows) and prod(counts) >= _MANY_ROWS
    return not (many and w.shape.rank == 2 and w.node.op.name == "transpose")


def _strided_matmul(node: Node) -> tuple[int, ...]:
    return (0, 1) if _reads_transposed_weight(node) else (0,)


def _strided_weight(node: Node) -> tuple[int, ...]:
    return (1,) if _reads_transposed_weight(node) else ()


@lowers("matmul", scratch=_matmul_scratch, strided=_strided_matmul)
def lower_matmul(node: Node, ctx: Context) -> list[KernelLaunch]:
    x, w = node.inputs
    problem = problem_of(node, ctx.strides(x), ctx.strides(w))
    single_column = problem.n == 1
    if single_column:
        problem = _transposed(problem)
    if node.output.dtype.kind == "complex":
        columns_contiguous = problem.w_unit == "n"
        return [
            _scratchless_step(
                node,
                problem,
                ComplexGemm(columns_contiguous, len(problem.batch), node.output.dtype),
            )
        ]
    kind = _gemv_kind(problem, single_column) if problem.m == 1 else None
    if kind is not None:
        spec = kind(problem.x.dtype, problem.w.dtype, node.output.dtype, len(problem.batch))
        return [_scratchless_step(node, problem, spec)]
    return [gemm_launch(node, ctx, problem, spec_of(problem, Epilogue(node.output.dtype)), {})]


def _gemv_kind(problem: GemmProblem, single_column: bool) -> type[GemvDot | GemvAxpy] | None:
    """The GEMV for one row; `single_column`: rows and columns have been swapped."""
    if single_column and problem.x_unit == "k" and same(problem.w_stride_k, 1):
        return GemvDot
    if problem.w_unit == "n":
        return GemvAxpy
    return GemvColumns if problem.x_unit == problem.w_unit == "k" else None


def _scratchless_step(
    node: Node, problem: GemmProblem, spec: ComplexGemm | GemvDot | GemvAxpy,
    given: Mapping[str, KernelArg] | None = None,
) -> KernelLaunch:  # fmt: skip
    """A step of a kernel without scratch."""
    args = problem.args() | {"out": Pointer(node.output)} | dict(given or {})
    cost = node.op.cost([v.shape for v in node.inputs], [v.shape for v in node.outputs])
    return KernelLaunch(
        spec, [args[w] for w in spec.args], node.inputs, node.outputs, flops=cost.flops,
        bytes=cost.bytes,
    )  # fmt: skip


def _extras(node: Node) -> tuple[DType | None, DType | None, dict[str, KernelArg]]:
    """Element types of bias and residual, the operands after x and w, and their args."""
    op: Any = node.op
    names = ["bias"] * op.has_bias + ["residual"] * op.has_residual
    values = dict(zip(names, node.inputs[2:], strict=True))
    bias, residual = (values[n].dtype if n in values else None for n in ("bias", "residual"))
    return bias, residual, {n: Pointer(v) for n, v in values.items()}


def _swiglu(node: Node) -> tuple[GemmProblem, Gemm, dict[str, KernelArg]]:
    op: Any = node.op
    problem = contiguous_problem(node)
    epilogue = Epilogue(node.output.dtype, op.activation, pair=True)
    return problem, spec_of(problem, epilogue), {"up": Pointer(node.inputs[2])}


def _packed_gemm(node: Node) -> tuple[GemmProblem, Gemm, dict[str, KernelArg]]:
    op: Any = node.op
    x, w = node.inputs[:2]
    bias, residual, args = _extras(node)
    rows = x.shape.with_dims(x.shape.dims[:-1]).num_elements
    problem = GemmProblem(x, w, rows, op.n, op.k, op.k, 1)
    layout = read_layout(op.layout, op.name)
    epilogue = Epilogue(node.output.dtype, op.activation, bias, residual, layout.is_pair, op.scale)
    if layout.levels:
        kind = StrassenTwice if layout.levels > 1 else Strassen
        return problem, kind(x.dtype, w.dtype, epilogue), args
    if layout.tiles:
        return problem, Bf16Gemm(x.dtype, w.dtype, epilogue), args
    return problem, spec_of(problem, epilogue, packed=True), args


_FUSED_GEMMS = {
    "fused_swiglu": _swiglu,
    "packed_matmul": _packed_gemm,
}


def _fused_scratch(node: Node, target: Target, threads: int) -> int:
    problem, spec, _ = _FUSED_GEMMS[node.op.name](node)
    return worker_bytes(problem, spec, target, node) * threads


def _is_native(node: Node) -> bool:
    """There is code for the activation, and gate and up weights have one element type."""
    op: Any = node.op
    alike = op.name != "fused_swiglu" or node.inputs[1].dtype is node.inputs[2].dtype
    return alike and can_activate(op.activation)


@lowers(*_FUSED_GEMMS, when=_is_native, scratch=_fused_scratch)
def lower_fused_gemm(node: Node, ctx: Context) -> list[KernelLaunch]:
    problem, spec, args = _FUSED_GEMMS[node.op.name](node)
    return [gemm_launch(node, ctx, problem, spec, args)]


def _bias_act_epilogue(node: Node) -> tuple[Epilogue, dict[str, KernelArg]]:
    op: Any = node.op
    bias, residual, args = _extras(node)
    return Epilogue(node.output.dtype, op.activation, bias, residual), args


def _bias_act_scratch(node: Node, target: Target, threads: int) -> int:
    problem = contiguous_problem(node)  # rows of w cost no more scratch than columns
    return (
        worker_bytes(problem, spec_of(problem, _bias_act_epilogue(node)[0]), target, node) * threads
    )


@lowers(
    "fused_matmul_bias_act", when=_is_native, scratch=_bias_act_scratch, strided=_strided_weight
)
def lower_bias_act(node: Node, ctx: Context) -> list[KernelLaunch]:
    """Weights that are no params are not packed, and are often transposed views: as in PyTorch."""
    x, w = node.inputs[:2]
    problem = problem_of(node, contiguous_strides(x.shape), ctx.strides(w))
    epilogue, args = _bias_act_epilogue(node)
    kind = _gemv_kind(problem, False) if problem.m == 1 and not problem.batch else None
    if kind is GemvAxpy or kind is GemvColumns:
        spec = kind(x.dtype, w.dtype, node.output.dtype, epilogue=epilogue)
        return [_scratchless_step(node, problem, spec, args)]
    return [gemm_launch(node, ctx, problem, spec_of(problem, epilogue), args)]


class _Lora:
    """Three GEMMs: scale·(x·a)·b into scratch, in f32 at least, then x·w with it as residual."""

    def __init__(self, node: Node, target: Target, threads: int) -> None:
        op: Any = node.op
        x, _, a, b = node.inputs
        wide = f64 if node.output.dtype is f64 else f32
        base = contiguous_problem(node)
        rank, n = b.shape.dims
        down = replace(base, w=a, n=rank, w_stride_k=rank)
        up = replace(base, w=b, k=rank, x_stride_m=rank)
        specs = (
            spec_of(down, Epilogue(wide)),
            replace(spec_of(up, Epilogue(wide, scale=op.scale)), x=wide),
            spec_of(base, Epilogue(node.output.dtype, residual=wide)),
        )
        self.gemms: list[tuple[GemmProblem, Gemm]] = list(zip((down, up, base), specs, strict=True))
        live = node.graph.live
        rows = upper_bound(base.m, live)
        each = max(worker_bytes(problem, spec, target, node) for problem, spec in self.gemms)
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
    (down, first), (up, second), (base, third) = lora.gemms
    args: list[dict[str, KernelArg]] = [
        {"out": narrow},
        {"x": narrow, "out": added, "x_stride_m": up.x_stride_m * size, "x_stride_k": size},
        {"residual": added},
    ]
    pairs = zip((down, up, base), (first, second, third), args, strict=True)
    return [gemm_launch(node, ctx, problem, spec, given) for problem, spec, given in pairs]


class _Grouped:
    """The problem of one expert, the kernel, and its scratch after the routing table."""

    def __init__(self, node: Node, target: Target, threads: int) -> None:
        op: Any = node.op
        x, w, expert = node.inputs
        packed = op.name == "packed_grouped_matmul"
        k, n = (op.k, op.n) if packed else w.shape.dims[1:]
        self.problem = GemmProblem(x, w, x.shape.dims[0], n, k, k, 1, 1, n)
        plain = spec_of(self.problem, Epilogue(node.output.dtype), packed)
        self.spec = GroupedGemm(x.dtype, w.dtype, plain.epilogue, packed)
        self.experts: Dim = w.shape.dims[0]
        self.expert_bytes: Dim = w.shape.with_dims(w.shape.dims[1:]).size_bytes
        live = node.graph.live
        self.table = table_bytes(upper_bound(self.problem.m, live), upper_bound(self.experts, live))
        self.size = self.table + worker_bytes(self.problem, self.spec, target, node) * threads
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
        group.problem.m,
        group.experts,
        Status(),
        NodeNumber(node),
    ]
    given: dict[str, KernelArg] = {"table": table, "w_expert": group.expert_bytes}
    return [
        KernelLaunch(Route(group.index), route, [node.inputs[2]], solo=True, uses_scratch=True),
        gemm_launch(node, ctx, group.problem, group.spec, given, group.table),
    ]
