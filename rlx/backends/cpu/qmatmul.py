"""Products with and lookups in packed weights as steps."""

from __future__ import annotations

from collections.abc import Sequence
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
from rlx.codegen.grouped_matmul import Route, table_bytes
from rlx.codegen.kernel import KernelSpec
from rlx.codegen.matmul_finish import Epilogue
from rlx.codegen.qmatmul.decoded import DecodedGrouped, DecodedMatmul
from rlx.codegen.qmatmul.gather import LINES, DecodeExperts, DecodeRows, DecodeStripRows
from rlx.codegen.qmatmul.grouped import QuantGrouped, RoutedRows, routed_rows
from rlx.codegen.qmatmul.product import QuantMatmul
from rlx.codegen.qmatmul.repack import RepackStrips
from rlx.codegen.qmatmul.rows import QuantizeRows
from rlx.codegen.target import Target
from rlx.ir.dim import Dim, upper_bound
from rlx.ir.dtype import f32
from rlx.ir.lir import aligned
from rlx.ir.node import Node, Value
from rlx.ir.quant import QuantScheme
from rlx.ir.quant_rows import RowLayout
from rlx.ir.quant_strips import strip_layout
from rlx.ir.shape import Shape


def _rows(shape: Shape) -> Dim:
    return shape.with_dims(shape.dims[:-1]).num_elements


def _sides(scheme: QuantScheme, given: tuple[Value, ...]) -> list[KernelArg]:
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


# -- lookups ----------------------------------------------------------------------------------


@lowers("dequant_gather")
def lower_gather(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    table, ids, *sides = node.inputs
    k, count = node.output.shape.dims[-1], ids.shape.num_elements
    args: list[KernelArg] = [
        Pointer(table),
        *_sides(op.scheme, tuple(sides)),
        Status(),
        NodeNumber(node),
    ]
    args += [Pointer(ids), Pointer(node.output), count, table.shape.dims[0], k]
    spec = DecodeRows(op.scheme, ids.dtype)
    return [_launch(node, spec, args)]


def _strip_row_scratch(node: Node, target: Target, threads: int) -> int:
    op: Any = node.op
    return aligned(op.scheme.row_bytes(op.k)) * threads


@lowers("packed_dequant_gather", scratch=_strip_row_scratch)
def lower_strip_gather(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    packed, ids = node.inputs
    args: list[KernelArg] = [
        Pointer(packed),
        Scratch(node),
        _strip_row_scratch(node, ctx.target, 1),
    ]
    args += [Status(), NodeNumber(node), Pointer(ids), Pointer(node.output), ids.shape.num_elements]
    args += [op.n, op.k, packed.shape.dims[-1]]
    return [_launch(node, DecodeStripRows(op.scheme, ids.dtype), args, scratch=True)]


def _experts_scratch(node: Node, target: Target, threads: int) -> int:
    return aligned(4 * LINES * upper_bound(node.output.shape.dims[1], node.graph.live)) * threads


@lowers("dequant_moe_weights", scratch=_experts_scratch)
def lower_moe_weights(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    w, expert, *sides = node.inputs
    count, k, n = node.output.shape.dims
    args: list[KernelArg] = [
        Pointer(w),
        *_sides(op.scheme, tuple(sides)),
        Status(),
        NodeNumber(node),
    ]
    args += [Pointer(expert), Pointer(node.output), count, w.shape.dims[0], k, n]
    args += [Scratch(node), _experts_scratch(node, ctx.target, 1)]
    spec = DecodeExperts(op.scheme, expert.dtype)
    return [_launch(node, spec, args, scratch=True)]


# -- products that decode ---------------------------------------------------------------------


def _is_narrow(node: Node) -> bool:
    """Sums run in f32; a product of f64 is left to the decomposition."""
    return bool(node.output.dtype.bytes <= 4)


class _Decoded:
    """A product with packed rows: sizes, args, and scratch of each worker."""

    def __init__(self, node: Node, target: Target) -> None:
        op: Any = node.op
        self.scheme: QuantScheme = op.scheme
        x, w, *rest = node.inputs
        self.grouped = op.name == "dequant_grouped_matmul"
        sides = tuple(rest[1:] if self.grouped else rest)
        self.m, self.k, self.n = _rows(x.shape), x.shape.dims[-1], w.shape.dims[-2]
        kind = DecodedGrouped if self.grouped else DecodedMatmul
        epilogue = Epilogue(node.output.dtype)
        self.spec = kind(x.dtype, f32, epilogue, packed=False, w_unit="term", scheme=self.scheme)
        groups = sides[0].shape.dims[-1] if sides else 0
        scale, zp = _sides(self.scheme, sides)
        row = w.shape.dims[-1] * w.dtype.bytes
        self.args: dict[str, KernelArg] = {
            "x": Pointer(x), "w": Pointer(w), "out": Pointer(node.output), "m": self.m,
            "n": self.n, "k": self.k, "x_line": self.k * x.dtype.bytes, "x_term": x.dtype.bytes,
            "w_line": 0, "w_term": 0, "scale": scale, "zp": zp, "row": row,
            "scale_row": groups * 4, "zp_row": groups if self.scheme.has_zero_point else 0,
            "w_expert": self.n * row,
        }  # fmt: skip
        live = node.graph.live
        m, n, k = (upper_bound(d, live) for d in (self.m, self.n, self.k))
        self.each = aligned(self.spec.scratch(target, m, n, k))
        self.table = table_bytes(m, upper_bound(w.shape.dims[0], live)) if self.grouped else 0

    def step(self, node: Node) -> KernelLaunch:
        scratch: dict[str, KernelArg] = {"scratch": Scratch(node, self.table), "step": self.each}
        args = self.args | scratch | {"table": Scratch(node)}
        given = [args[w] for w in self.spec.args]
        return _launch(node, self.spec, given, scratch=True)


def _decoded_scratch(node: Node, target: Target, threads: int) -> int:
    case = _Decoded(node, target)
    return case.table + case.each * threads


@lowers("dequant_matmul", when=_is_narrow, scratch=_decoded_scratch)
def lower_dequant(node: Node, ctx: Context) -> list[KernelLaunch]:
    return [_Decoded(node, ctx.target).step(node)]


@lowers("dequant_grouped_matmul", when=_is_narrow, scratch=_decoded_scratch)
def lower_dequant_grouped(node: Node, ctx: Context) -> list[KernelLaunch]:
    return [_route_launch(node), _Decoded(node, ctx.target).step(node)]


def _route_launch(node: Node) -> KernelLaunch:
    """The table of routed rows at the start of the node's scratch."""
    x, w, expert = node.inputs[:3]
    args: list[KernelArg] = [Pointer(expert), Scratch(node), x.shape.dims[0], w.shape.dims[0]]
    args += [Status(), NodeNumber(node)]
    return KernelLaunch(Route(expert.dtype), args, [expert], solo=True, uses_scratch=True)


# -- integer products -------------------------------------------------------------------------


def _sizes(scheme: QuantScheme, layout: RowLayout, k: int) -> dict[str, KernelArg]:
    strips = strip_layout(scheme, k)
    assert strips is not None
    return {"k": k, "row": layout.row_bytes(k), "strip": strips.strip_bytes}


@lowers("pack_quant")
def lower_pack(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    w, *sides = node.inputs
    rows, width = w.shape.static_dims[-2:]
    k = op.scheme.row_elements(width)
    spec = RepackStrips(op.scheme)
    sizes = spec.sizes(_rows(w.shape) // rows, rows, k, op.pair)
    given: list[KernelArg] = [Pointer(w), *_sides(op.scheme, tuple(sides)), Pointer(node.output)]
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
    beside = dict(zip(names, extras, strict=True))
    bias, residual = (beside[n].dtype if n in beside else None for n in ("bias", "residual"))
    epilogue = Epilogue(op.dtype, op.activation, bias, residual, op.pair)
    layout = RowLayout.parse(op.layout, op.name)
    spec = QuantMatmul(op.scheme, layout, epilogue)
    args: dict[str, KernelArg] = {
        "x": Pointer(rows),
        "w": Pointer(packed),
        "out": Pointer(node.output),
    }
    args |= {"m": _rows(node.output.shape), "n": op.n}
    args |= _sizes(op.scheme, layout, op.k)
    args |= {name: Pointer(v) for name, v in beside.items()}
    given = [args[w] for w in spec.args]
    return [_launch(node, spec, given)]


class _Routed:
    """Where the parts of a routed product's scratch lie: the table, then quantised rows."""

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
    return _Routed(node).size


@lowers("packed_dequant_grouped", scratch=_routed_scratch)
def lower_packed_grouped(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    x, packed, _ = node.inputs
    routed = _Routed(node)
    rows, table = Scratch(node, routed.table), Scratch(node)
    m = x.shape.dims[0]
    quantize = RoutedRows(x.dtype, routed.layout)
    spec = QuantGrouped(op.scheme, routed.layout, Epilogue(node.output.dtype))
    args: dict[str, KernelArg] = {"x": rows, "w": Pointer(packed), "out": Pointer(node.output)}
    args |= {"m": m, "n": op.n, "table": table} | _sizes(op.scheme, routed.layout, op.k)
    args |= {"w_expert": packed.shape.with_dims(packed.shape.dims[1:]).size_bytes}
    given = [args[w] for w in spec.args]
    return [
        _route_launch(node),
        KernelLaunch(quantize, [Pointer(x), rows, m, op.k, table], [x], uses_scratch=True),
        _launch(node, spec, given, scratch=True),
    ]
