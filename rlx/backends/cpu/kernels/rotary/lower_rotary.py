"""Lowering of rotary embedding."""

from __future__ import annotations

from rlx.backends.cpu.kernels.attention.lower_attention import by_axis
from rlx.backends.cpu.kernels.rotary.rotary import ARGS, RotaryEmbedding
from rlx.backends.cpu.lowering import (
    Context,
    KernelArg,
    KernelLaunch,
    NodeNumber,
    Pointer,
    Status,
    lowers,
)
from rlx.ir.dim import Dim
from rlx.ir.node import Node, Value
from rlx.ir.ops.attention import head_sizes
from rlx.ir.ops.fused import FusedQkNormRope
from rlx.ir.ops.rope import Rope


@lowers("rope", "fused_qk_norm_rope", strided=True)
def lower_rope(node: Node, ctx: Context) -> list[KernelLaunch]:
    op = node.op
    assert isinstance(op, Rope | FusedQkNormRope)
    rope = op.rotation() if isinstance(op, FusedQkNormRope) else op
    operands = _operands(node)
    strides = _strides(operands, rope, ctx)
    x, cos, sin = (operands[name] for name in ("x", "cos", "sin"))
    positions, gamma = operands.get("positions"), operands.get("gamma")
    spec = RotaryEmbedding(
        x.dtype,
        cos.dtype,
        sin.dtype,
        node.output.dtype,
        rope.head_dim,
        rope.rotated,
        rope.interleaved,
        heads_first=rope.layout == "bhsd",
        positions=positions.dtype if positions is not None else None,
        gamma=gamma.dtype if gamma is not None else None,
        eps=op.eps if isinstance(op, FusedQkNormRope) else 0.0,
        strided=any(name.endswith("_stride") and s != 1 for name, s in strides.items()),
        streaming=ctx.outgrows_caches(node.output),
    )
    sizes = head_sizes(x.shape, rope.head_dim, rope.layout, "x")
    args: dict[str, KernelArg] = {name: Pointer(value) for name, value in operands.items()}
    args |= {"out": Pointer(node.output), "status": Status()}
    args["node"] = (
        0 if positions is None else NodeNumber(node)
    )  # only given positions can be out of range
    args |= {"batch": sizes.batch, "length": sizes.length, "heads": sizes.heads}
    args |= {"offset": rope.offset, "table_rows": cos.shape.dims[0], **strides}
    cost = op.cost([v.shape for v in node.inputs], [node.output.shape])
    listed = [args.get(name, 0) for name in ARGS]
    return [
        KernelLaunch(spec, listed, node.inputs, node.outputs, flops=cost.flops, bytes=cost.bytes)
    ]


def _operands(node: Node) -> dict[str, Value]:
    names = ["x", "cos", "sin", "positions"]
    if node.op.name != "rope":
        names.insert(1, "gamma")
    return dict(zip(names, node.inputs, strict=False))


def _strides(operands: dict[str, Value], rope: Rope, ctx: Context) -> dict[str, Dim]:
    batch, row, head, step = by_axis(ctx.strides(operands["x"]), rope.layout, rope.head_dim)
    found: dict[str, Dim] = {"x_batch": batch, "x_row": row, "x_head": head}
    found["x_stride"] = step if rope.head_dim > 1 else 1
    for name in ("cos", "sin"):
        found[f"{name}_row"], step = ctx.strides(operands[name])
        found[f"{name}_stride"] = step if rope.rotated > 2 else 1
    if "gamma" in operands:
        found["gamma_stride"] = ctx.strides(operands["gamma"])[0]
    if "positions" in operands:
        *batches, found["positions_row"] = ctx.strides(operands["positions"])
        found["positions_batch"] = batches[0] if batches else 0
    return found
