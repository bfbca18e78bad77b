"""Products as steps: how operands lie, which kernel, how much scratch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlx.backends.cpu.lowering import Context, KernelArg, KernelLaunch, Pointer, Scratch, lowers
from rlx.codegen.complex_matmul import ComplexMatmul
from rlx.codegen.matmul import Matmul
from rlx.codegen.matmul_finish import Epilogue
from rlx.codegen.matvec import Matvec
from rlx.codegen.region.elements import can_activate
from rlx.codegen.strassen import Strassen
from rlx.codegen.strassen_twice import StrassenTwice
from rlx.codegen.target import Target
from rlx.codegen.vecmat import Vecmat
from rlx.ir.dim import Dim, same, upper_bound
from rlx.ir.dtype import DType
from rlx.ir.lir import aligned, contiguous_strides
from rlx.ir.node import Node, Value
from rlx.ir.ops.pack import read_layout
from rlx.support.records import dataclass

Strides = tuple[Dim, ...]


@dataclass(frozen=True)
class Case:
    """A product of x [.., m, k] and w [.., k, n]: sizes, and strides in elements."""

    x: Value
    w: Value
    m: Dim
    n: Dim
    k: Dim
    x_line: Dim
    x_term: Dim
    w_line: Dim = 1
    w_term: Dim = 0
    batch: tuple[tuple[Dim, Dim, Dim], ...] = ()  # size, stride of x, stride of w

    @property
    def x_unit(self) -> str:
        if same(self.x_term, 1) or same(self.k, 1):
            return "term"
        return "line" if same(self.x_line, 1) else "none"

    @property
    def w_unit(self) -> str:
        if same(self.w_line, 1) or same(self.n, 1):
            return "line"
        return "term" if same(self.w_term, 1) or same(self.k, 1) else "none"

    def args(self) -> dict[str, KernelArg]:
        x, w = self.x.dtype.bytes, self.w.dtype.bytes
        found: dict[str, KernelArg] = {"x": Pointer(self.x), "w": Pointer(self.w)}
        found |= {"m": self.m, "n": self.n, "k": self.k}
        found |= {"x_line": self.x_line * x, "x_term": self.x_term * x}
        found |= {"w_line": self.w_line * w, "w_term": self.w_term * w}
        for i, (size, x_step, w_step) in enumerate(self.batch):
            found |= {f"size{i}": size, f"x_batch{i}": x_step * x, f"w_batch{i}": w_step * w}
        return found


def plain_case(node: Node) -> Case:
    """The case of a product by NumPy's rules whose operands lie row-major."""
    x, w = node.inputs[:2]
    return case_of(node, contiguous_strides(x.shape), contiguous_strides(w.shape))


def case_of(node: Node, x_strides: Strides, w_strides: Strides) -> Case:
    x, w = node.inputs[:2]
    x_axes = list(zip(x.shape.dims, x_strides, strict=True))
    w_axes = list(zip(w.shape.dims, w_strides, strict=True))
    x_axes = [(1, 0), *x_axes] if len(x_axes) == 1 else x_axes
    w_axes = [*w_axes, (1, 0)] if len(w_axes) == 1 else w_axes
    (m, x_line), (k, x_term) = x_axes[-2:]
    (_, w_term), (n, w_line) = w_axes[-2:]
    batch = _batch_axes(x_axes[:-2], w_axes[:-2])
    case = Case(x, w, m, n, k, x_line, x_term, w_line, w_term)
    return _joined(case, batch)


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


def _joined(case: Case, axes: list[tuple[Dim, Dim, Dim]]) -> Case:
    """Batch axes become rows where they can, neighbours that lie gapless become one."""
    m, line = case.m, case.x_line
    while axes and axes[-1][2] == 0 and (m == 1 or same(axes[-1][1], m * line)):
        size, step, _ = axes.pop()
        m, line = (size, step) if m == 1 else (size * m, line)
    batch: list[tuple[Dim, Dim, Dim]] = []
    for size, x_step, w_step in reversed(axes):
        if batch:
            inner, x_inner, w_inner = batch[0]
            if same(x_step, inner * x_inner) and same(w_step, inner * w_inner):
                batch[0] = (size * inner, x_inner, w_inner)
                continue
        batch.insert(0, (size, x_step, w_step))
    return replace(case, m=m, x_line=line, batch=tuple(batch))


def _turned(case: Case) -> Case:
    """x·w as wᵀ·xᵀ, for one column: rows become the columns that vectors run along."""
    batch = tuple((size, w_step, x_step) for size, x_step, w_step in case.batch)
    return Case(
        case.w, case.x, case.n, case.m, case.k, case.w_line, case.w_term, case.x_line, case.x_term,
        batch,
    )  # fmt: skip


# -- one product ------------------------------------------------------------------------------


def spec_of(case: Case, epilogue: Epilogue, packed: bool = False) -> Matmul:
    one = packed and case.m == 1 and not case.batch
    return Matmul(
        case.x.dtype, case.w.dtype, epilogue, packed, case.x_unit,
        "line" if packed else case.w_unit, len(case.batch), one,
    )  # fmt: skip


def worker_bytes(case: Case, spec: Matmul, target: Target, node: Node) -> int:
    """Scratch of each worker."""
    m, n, k = (upper_bound(d, node.graph.live) for d in (case.m, case.n, case.k))
    return aligned(spec.scratch(target, m, n, k))


def matmul_launch(
    node: Node,
    ctx: Context,
    case: Case,
    spec: Matmul,
    given: Mapping[str, KernelArg],
    offset: int = 0,
) -> KernelLaunch:
    each = worker_bytes(case, spec, ctx.target, node)
    args: dict[str, KernelArg] = {"scratch": Scratch(node, offset), "step": each}
    args |= {"out": Pointer(node.output)} | case.args() | dict(given)
    cost = node.op.cost([v.shape for v in node.inputs], [v.shape for v in node.outputs])
    return KernelLaunch(
        spec, [args[w] for w in spec.args], node.inputs, node.outputs, uses_scratch=True,
        flops=cost.flops, bytes=cost.bytes,
    )  # fmt: skip


def _matmul_scratch(node: Node, target: Target, threads: int) -> int:
    case = plain_case(node)
    if node.output.dtype.kind == "complex":
        return 0
    # Which axes become rows, or columns, depends on strides that are not known yet, and so does
    # whether rows must be packed.
    rows = node.output.shape.with_dims(node.output.shape.dims[: None if case.n == 1 else -1])
    most = replace(case, m=rows.num_elements, n=rows.num_elements if case.n == 1 else case.n)
    spec = replace(spec_of(case, Epilogue(node.output.dtype)), x_unit="none")
    return worker_bytes(most, spec, target, node) * threads


@lowers("matmul", scratch=_matmul_scratch, strided=True)
def lower_matmul(node: Node, ctx: Context) -> list[KernelLaunch]:
    x, w = node.inputs
    case = case_of(node, ctx.strides(x), ctx.strides(w))
    if case.n == 1 and case.m != 1:
        case = _turned(case)
    if node.output.dtype.kind == "complex":
        columns_follow = case.w_unit == "line"
        return [_plain_launch(node, case, ComplexMatmul(columns_follow, len(case.batch)))]
    if case.m == 1 and (case.w_unit == "line" or case.x_unit == case.w_unit == "term"):
        kind = Vecmat if case.w_unit == "line" else Matvec
        spec = kind(case.x.dtype, case.w.dtype, node.output.dtype, len(case.batch))
        return [_plain_launch(node, case, spec)]
    return [matmul_launch(node, ctx, case, spec_of(case, Epilogue(node.output.dtype)), {})]


def _plain_launch(node: Node, case: Case, spec: ComplexMatmul | Matvec | Vecmat) -> KernelLaunch:
    """A kernel without scratch."""
    args = case.args() | {"out": Pointer(node.output)}
    cost = node.op.cost([v.shape for v in node.inputs], [v.shape for v in node.outputs])
    return KernelLaunch(
        spec, [args[w] for w in spec.args], node.inputs, node.outputs, flops=cost.flops,
        bytes=cost.bytes,
    )  # fmt: skip


def _extras(node: Node) -> tuple[DType | None, DType | None, dict[str, KernelArg]]:
    """Element types of bias and residual, which follow x and w, and their args."""
    op: Any = node.op
    names = ["bias"] * op.has_bias + ["residual"] * op.has_residual
    values = dict(zip(names, node.inputs[2:], strict=True))
    bias, residual = (values[n].dtype if n in values else None for n in ("bias", "residual"))
    return bias, residual, {n: Pointer(v) for n, v in values.items()}


def _fused(node: Node) -> tuple[Case, Matmul, dict[str, KernelArg]]:
    op: Any = node.op
    bias, residual, args = _extras(node)
    case = plain_case(node)
    epilogue = Epilogue(node.output.dtype, op.activation, bias, residual)
    return case, spec_of(case, epilogue), args


def _swiglu(node: Node) -> tuple[Case, Matmul, dict[str, KernelArg]]:
    op: Any = node.op
    case = plain_case(node)
    epilogue = Epilogue(node.output.dtype, op.activation, pair=True)
    return case, spec_of(case, epilogue), {"up": Pointer(node.inputs[2])}


def _packed(node: Node) -> tuple[Case, Matmul, dict[str, KernelArg]]:
    op: Any = node.op
    x, w = node.inputs[:2]
    bias, residual, args = _extras(node)
    rows = x.shape.with_dims(x.shape.dims[:-1]).num_elements
    case = Case(x, w, rows, op.n, op.k, op.k, 1)
    layout = read_layout(op.layout, op.name)
    epilogue = Epilogue(node.output.dtype, op.activation, bias, residual, layout.is_pair, op.scale)
    if layout.steps:
        kind = StrassenTwice if layout.steps > 1 else Strassen
        return case, kind(x.dtype, w.dtype, epilogue), args
    return case, spec_of(case, epilogue, packed=True), args


_ONE = {"fused_matmul_bias_act": _fused, "fused_swiglu": _swiglu, "packed_matmul": _packed}


def _one_scratch(node: Node, target: Target, threads: int) -> int:
    case, spec, _ = _ONE[node.op.name](node)
    return worker_bytes(case, spec, target, node) * threads


def _fits(node: Node) -> bool:
    """There is code for the activation; gate and up weights are packed by one function."""
    op: Any = node.op
    alike = op.name != "fused_swiglu" or node.inputs[1].dtype is node.inputs[2].dtype
    return alike and can_activate(op.activation)


@lowers(*_ONE, when=_fits, scratch=_one_scratch)
def lower_one(node: Node, ctx: Context) -> list[KernelLaunch]:
    case, spec, args = _ONE[node.op.name](node)
    return [matmul_launch(node, ctx, case, spec, args)]
