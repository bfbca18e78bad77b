"""Lowering of recurrences over a sequence: the selective scan and the gated delta rule."""

from __future__ import annotations

from typing import Any

from rlx.backends.carried_state import carried_state
from rlx.backends.cuda.builder import WARP
from rlx.backends.cuda.kernel import BlockKernel
from rlx.backends.cuda.kernels.gemm.problem import is_aligned, row_stride
from rlx.backends.cuda.kernels.recurrent import delta_net, selective_scan
from rlx.backends.cuda.kernels.recurrent.delta_net import DeltaNet
from rlx.backends.cuda.kernels.recurrent.selective_scan import SelectiveScan
from rlx.backends.cuda.lowering import Context, KernelArg, KernelLaunch, Layouts, lowers
from rlx.backends.kernel_args import Pointer
from rlx.ir.dim import Dim
from rlx.ir.node import Node, Value

_FLOATS = ("f32", "bf16", "f16")


def _are_narrow(node: Node) -> bool:
    return all(v.dtype.name in _FLOATS for v in (*node.inputs, *node.outputs))


def _has_scan(node: Node) -> bool:
    size = node.inputs[2].shape.dims[1]
    return _are_narrow(node) and isinstance(size, int) and 0 < size <= WARP * selective_scan.MOST


_TOKENS = (0, 1, 3, 4)  # operands of a scan that have rows for tokens


def _reads(node: Node, layouts: Layouts) -> set[int]:
    """The operands whose rows are read where they lie."""
    return {i for i in _TOKENS if row_stride(node.inputs[i], layouts) is not None}


@lowers("selective_scan", when=_has_scan, strided=_reads)
def lower_scan(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    names = ["u", "delta", "a", "b", "c", *["d"] * op.has_d, *["state"] * op.has_state]
    given: dict[str, Value] = dict(zip(names, node.inputs, strict=True))
    y, last = node.outputs
    batch, tokens, inner = given["u"].shape.dims
    size = given["a"].shape.dims[1]
    assert isinstance(size, int)
    types: dict[str, Any] = {"d": None, "state": None}
    types |= {name: value.dtype for name, value in given.items()}
    kernel = SelectiveScan(**types, last=last.dtype, size=size, one=tokens == 1)
    operands = [_pointer(given.get(n)) for n in ("u", "delta", "a", "b", "c", "d", "state")]
    home = carried_state(last, ctx)
    strides = [_apart(node.inputs[i], ctx) for i in _TOKENS]
    args = [*operands, Pointer(y), Pointer(home), batch, tokens, inner, *strides]
    blocks = -(-ctx.upper(batch * inner) // kernel.channels)
    return _launches(kernel, args, blocks, node, [y, home])


def _launches(
    kernel: BlockKernel, args: list[KernelArg], blocks: int, node: Node, writes: list[Value]
) -> list[KernelLaunch]:
    """One launch, which is merged with its neighbours if they do not depend on each other."""
    made = KernelLaunch(kernel, args, blocks=blocks, reads=node.inputs, writes=writes)
    return [made] if blocks else []


def _apart(rows: Value, ctx: Context) -> Dim:
    """How far apart rows lie; others than `_reads` finds were copied."""
    found = row_stride(rows, ctx)
    return rows.shape.dims[-1] if found is None else found


def _pointer(value: Value | None) -> KernelArg:
    return 0 if value is None else Pointer(value)


def _has_rule(node: Node) -> bool:
    size = node.inputs[0].shape.dims[3]
    return _are_narrow(node) and isinstance(size, int) and size <= delta_net.MOST


@lowers("gated_delta_net", when=_has_rule, strided=False)
def lower_delta_net(node: Node, ctx: Context) -> list[KernelLaunch]:
    names = ("q", "k", "v", "g", "beta", "state")
    given: dict[str, Value] = dict(zip(names, node.inputs, strict=False))
    o, last = node.outputs
    batch, tokens, heads, size = o.shape.dims
    assert isinstance(size, int)
    types: dict[str, Any] = {"state": None}
    types |= {name: value.dtype for name, value in given.items()}
    aligned = size % 16 == 0 and all(is_aligned(given[n], ctx) for n in "qk")
    kernel = DeltaNet(
        **types, o=o.dtype, last=last.dtype, size=size, one=tokens == 1, aligned=aligned
    )
    args = [_pointer(given.get(n)) for n in names]
    home = carried_state(last, ctx)
    args += [Pointer(o), Pointer(home), batch, tokens, heads]
    blocks = kernel.blocks(ctx.upper(batch * heads))
    return _launches(kernel, args, blocks, node, [o, home])
