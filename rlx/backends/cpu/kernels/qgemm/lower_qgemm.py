"""Lowering of quantised ops: gathers, GEMMs that dequantise, GEMMs with integer dot products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx.backends.cpu.kernels.gemm.epilogue import Epilogue
from rlx.backends.cpu.kernels.gemm.grouped_gemm import Route, table_bytes
from rlx.backends.cpu.kernels.qgemm.dequant_gemm import DequantGemm, DequantGroupedGemm
from rlx.backends.cpu.kernels.qgemm.gather import (
    TRANSPOSED_ROWS,
    DequantExperts,
    DequantRows,
    DequantTileRows,
)
from rlx.backends.cpu.kernels.qgemm.qgemm import (
    QuantGemm,
    QuantGroupedGemm,
    QuantizeRoutedRows,
    routed_rows,
)
from rlx.backends.cpu.kernels.qgemm.quantize_rows import QuantizeRows
from rlx.backends.cpu.kernels.qgemm.repack_weights import RepackColumnTiles
from rlx.backends.cpu.kernels.qgemm.transposed_gemm import TransposedDequantGemm
from rlx.backends.cpu.kernels.spec import KernelSpec
from rlx.backends.cpu.layouts.quant_rows import RowLayout
from rlx.backends.cpu.layouts.quant_tiles import column_tile_layout
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
from rlx.ir.dim import Dim, upper_bound
from rlx.ir.dtype import f32
from rlx.ir.lir import aligned
from rlx.ir.node import Node, Value
from rlx.ir.quant.scheme import QuantScheme
from rlx.ir.shape import Shape
from rlx.llvm.target import Target


def _rows(shape: Shape) -> Dim:
    return shape.with_dims(shape.dims[:-1]).num_elements


def _scale_and_zp(given: Sequence[Value]) -> list[KernelArg]:
    """Args of the scale and the zero point; 0 for what the scheme does not have."""
    args: list[KernelArg] = [Pointer(v) for v in given]
    return args + [0] * (2 - len(args))


def _launch(
    node: Node, spec: KernelSpec, args: Sequence[KernelArg], scratch: bool = False
) -> KernelLaunch:
    """The step that does a node's work."""
    cost = node.op.cost([v.shape for v in node.inputs], [v.shape for v in node.outputs])
    return KernelLaunch(
        spec, args, node.inputs, node.outputs, uses_scratch=scratch, flops=cost.flops,
        bytes=cost.bytes,
    )  # fmt: skip


# -- gathers ----------------------------------------------------------------------------------


@lowers("dequant_gather")
def lower_gather(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    table, ids, *scale_and_zp = node.inputs
    k, count = node.output.shape.dims[-1], ids.shape.num_elements
    args: list[KernelArg] = [
        Pointer(table),
        *_scale_and_zp(scale_and_zp),
        Status(),
        NodeNumber(node),
    ]
    args += [Pointer(ids), Pointer(node.output), count, table.shape.dims[0], k]
    spec = DequantRows(op.scheme, ids.dtype)
    return [_launch(node, spec, args)]


def _tile_row_scratch(node: Node, target: Target, threads: int) -> int:
    op: Any = node.op
    return aligned(op.scheme.row_bytes(op.k)) * threads


@lowers("packed_dequant_gather", scratch=_tile_row_scratch)
def lower_tile_gather(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    packed, ids = node.inputs
    args: list[KernelArg] = [Pointer(packed), Scratch(node), _tile_row_scratch(node, ctx.target, 1)]
    args += [Status(), NodeNumber(node), Pointer(ids), Pointer(node.output), ids.shape.num_elements]
    args += [op.n, op.k, packed.shape.dims[-1]]
    return [_launch(node, DequantTileRows(op.scheme, ids.dtype), args, scratch=True)]


def _experts_scratch(node: Node, target: Target, threads: int) -> int:
    k = upper_bound(node.output.shape.dims[1], node.graph.live)
    return aligned(4 * TRANSPOSED_ROWS * k) * threads


@lowers("dequant_moe_weights", scratch=_experts_scratch)
def lower_moe_weights(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    w, expert, *scale_and_zp = node.inputs
    count, k, n = node.output.shape.dims
    args: list[KernelArg] = [Pointer(w), *_scale_and_zp(scale_and_zp), Status(), NodeNumber(node)]
    args += [Pointer(expert), Pointer(node.output), count, w.shape.dims[0], k, n]
    args += [Scratch(node), _experts_scratch(node, ctx.target, 1)]
    spec = DequantExperts(op.scheme, expert.dtype)
    return [_launch(node, spec, args, scratch=True)]


# -- GEMMs that dequantise --------------------------------------------------------------------


def _is_narrow(node: Node) -> bool:
    """Accumulators are f32; f64 results are left to the decomposition."""
    return bool(node.output.dtype.bytes <= 4)


class _DequantProblem:
    """A GEMM with quantised weights: sizes, args, and scratch of each worker."""

    def __init__(self, node: Node, target: Target) -> None:
        op: Any = node.op
        self.scheme: QuantScheme = op.scheme
        x, w, *rest = node.inputs
        self.grouped = op.name == "dequant_grouped_matmul"
        scale_and_zp = rest[1:] if self.grouped else rest
        self.m, self.k, self.n = _rows(x.shape), x.shape.dims[-1], w.shape.dims[-2]
        kind = DequantGroupedGemm if self.grouped else DequantGemm
        epilogue = Epilogue(node.output.dtype)
        self.spec = kind(x.dtype, f32, epilogue, packed=False, w_unit="k", scheme=self.scheme)
        groups = scale_and_zp[0].shape.dims[-1] if scale_and_zp else 0
        scale, zp = _scale_and_zp(scale_and_zp)
        row = w.shape.dims[-1] * w.dtype.bytes
        self.args: dict[str, KernelArg] = {
            "x": Pointer(x), "w": Pointer(w), "out": Pointer(node.output),
            "m": self.m, "n": self.n, "k": self.k,
            "x_stride_m": self.k * x.dtype.bytes, "x_stride_k": x.dtype.bytes,
            "w_stride_n": 0, "w_stride_k": 0, "scale": scale, "zp": zp, "row": row,
            "scale_row": groups * 4, "zp_row": groups if self.scheme.has_zero_point else 0,
            "w_expert": self.n * row,
        }  # fmt: skip
        live = node.graph.live
        m, n, k = (upper_bound(d, live) for d in (self.m, self.n, self.k))
        self.each = scratch_per_worker(self.spec.scratch(target, m, n, k))
        self.table = table_bytes(m, upper_bound(w.shape.dims[0], live)) if self.grouped else 0

    def step(self, node: Node) -> KernelLaunch:
        scratch: dict[str, KernelArg] = {
            "scratch": Scratch(node, self.table),
            "worker_bytes": self.each,
        }
        args = self.args | scratch | {"table": Scratch(node)}
        given = [args[w] for w in self.spec.args]
        return _launch(node, self.spec, given, scratch=True)


def _dequant_scratch(node: Node, target: Target, threads: int) -> int:
    problem = _DequantProblem(node, target)
    return problem.table + problem.each * threads


@lowers("dequant_matmul", when=_is_narrow, scratch=_dequant_scratch)
def lower_dequant(node: Node, ctx: Context) -> list[KernelLaunch]:
    return [_DequantProblem(node, ctx.target).step(node)]


def _transposed_spec(node: Node) -> TransposedDequantGemm:
    op: Any = node.op
    epilogue = Epilogue(node.output.dtype)
    return TransposedDequantGemm(
        node.inputs[0].dtype, f32, epilogue, packed=False, w_unit="n", scheme=op.scheme
    )


def _transposed_scratch(node: Node, target: Target, threads: int) -> int:
    live = node.graph.live
    sizes = (_rows(node.output.shape), *(v.shape.dims[-1] for v in (node.output, node.inputs[0])))
    m, n, k = (upper_bound(d, live) for d in sizes)
    return scratch_per_worker(_transposed_spec(node).scratch(target, m, n, k)) * threads


@lowers("dequant_matmul_transposed", when=_is_narrow, scratch=_transposed_scratch)
def lower_transposed(node: Node, ctx: Context) -> list[KernelLaunch]:
    x, w, *rest = node.inputs
    spec, n = _transposed_spec(node), w.shape.dims[0]
    scale, zp = _scale_and_zp(rest)
    groups = rest[0].shape.dims[-1] if rest else 0
    args: dict[str, KernelArg] = {
        "x": Pointer(x), "w": Pointer(w), "out": Pointer(node.output),
        "scratch": Scratch(node), "worker_bytes": _transposed_scratch(node, ctx.target, 1),
        "m": _rows(x.shape), "n": node.output.shape.dims[-1], "k": n,
        "x_stride_m": n * x.dtype.bytes, "x_stride_k": x.dtype.bytes,
        "w_stride_n": 0, "w_stride_k": 0, "scale": scale, "zp": zp,
        "row": w.shape.dims[-1] * w.dtype.bytes, "scale_row": groups * 4,
        "zp_row": groups if spec.scheme.has_zero_point else 0,
    }  # fmt: skip
    return [_launch(node, spec, [args[name] for name in spec.args], scratch=True)]


@lowers("dequant_grouped_matmul", when=_is_narrow, scratch=_dequant_scratch)
def lower_dequant_grouped(node: Node, ctx: Context) -> list[KernelLaunch]:
    return [_route_launch(node), _DequantProblem(node, ctx.target).step(node)]


def _route_launch(node: Node) -> KernelLaunch:
    """Builds the routing table at the start of the node's scratch."""
    x, w, expert = node.inputs[:3]
    args: list[KernelArg] = [Pointer(expert), Scratch(node), x.shape.dims[0], w.shape.dims[0]]
    args += [Status(), NodeNumber(node)]
    return KernelLaunch(Route(expert.dtype), args, [expert], solo=True, uses_scratch=True)


# -- GEMMs with integer dot products ----------------------------------------------------------


def _sizes(scheme: QuantScheme, layout: RowLayout, k: int) -> dict[str, KernelArg]:
    column_tiles = column_tile_layout(scheme, k)
    assert column_tiles is not None
    return {"k": k, "row": layout.row_bytes(k), "column_tile_bytes": column_tiles.tile_bytes}


@lowers("pack_quant")
def lower_pack(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    w, *scale_and_zp = node.inputs
    rows, width = w.shape.static_dims[-2:]
    k = op.scheme.row_elements(width)
    spec = RepackColumnTiles(op.scheme)
    sizes = spec.sizes(_rows(w.shape) // rows, rows, k, op.pair)
    given: list[KernelArg] = [Pointer(w), *_scale_and_zp(scale_and_zp), Pointer(node.output)]
    return [_launch(node, spec, [*given, *sizes])]


@lowers("quantize_rows")
def lower_rows(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    (x,) = node.inputs
    layout = RowLayout.parse(op.layout, op.name)
    args: list[KernelArg] = [Pointer(x), Pointer(node.output), _rows(x.shape), x.shape.dims[-1]]
    spec = QuantizeRows(x.dtype, layout)
    return [_launch(node, spec, args)]


@lowers("packed_dequant_matmul")
def lower_packed(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    rows, packed, *extras = node.inputs
    names = ["bias"] * op.has_bias + ["residual"] * op.has_residual
    extra = dict(zip(names, extras, strict=True))
    bias, residual = (extra[n].dtype if n in extra else None for n in ("bias", "residual"))
    epilogue = Epilogue(op.dtype, op.activation, bias, residual, op.pair)
    layout = RowLayout.parse(op.layout, op.name)
    spec = QuantGemm(op.scheme, layout, epilogue)
    args: dict[str, KernelArg] = {
        "x": Pointer(rows),
        "w": Pointer(packed),
        "out": Pointer(node.output),
    }
    args |= {"m": _rows(node.output.shape), "n": op.n}
    args |= _sizes(op.scheme, layout, op.k)
    args |= {name: Pointer(v) for name, v in extra.items()}
    given = [args[w] for w in spec.args]
    return [_launch(node, spec, given)]


class _RoutedScratch:
    """Scratch of a grouped GEMM: the routing table, then quantised rows."""

    def __init__(self, node: Node) -> None:
        op: Any = node.op
        x, packed, _ = node.inputs
        self.layout = RowLayout.parse(op.layout, op.name)
        tokens = upper_bound(x.shape.dims[0], node.graph.live)
        experts = packed.shape.dims[0]
        assert isinstance(experts, int)
        self.table = table_bytes(tokens, experts)
        rows = routed_rows(tokens, experts, self.layout.tile)
        self.size = self.table + aligned(rows * self.layout.row_bytes(op.k))


def _routed_scratch(node: Node, target: Target, threads: int) -> int:
    return _RoutedScratch(node).size


@lowers("packed_dequant_grouped", scratch=_routed_scratch)
def lower_packed_grouped(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    x, packed, _ = node.inputs
    routed = _RoutedScratch(node)
    rows, table = Scratch(node, routed.table), Scratch(node)
    m = x.shape.dims[0]
    quantize = QuantizeRoutedRows(x.dtype, routed.layout)
    spec = QuantGroupedGemm(op.scheme, routed.layout, Epilogue(node.output.dtype))
    args: dict[str, KernelArg] = {"x": rows, "w": Pointer(packed), "out": Pointer(node.output)}
    args |= {"m": m, "n": op.n, "table": table} | _sizes(op.scheme, routed.layout, op.k)
    args |= {"w_expert": packed.shape.with_dims(packed.shape.dims[1:]).size_bytes}
    given = [args[w] for w in spec.args]
    return [
        _route_launch(node),
        KernelLaunch(quantize, [Pointer(x), rows, m, op.k, table], [x], uses_scratch=True),
        _launch(node, spec, given, scratch=True),
    ]
