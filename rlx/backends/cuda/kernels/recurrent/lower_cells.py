"""Lowering of LSTM and GRU: one kernel whose blocks wait for each other. Others are loops."""

from __future__ import annotations

from typing import Any

from rlx.backends.cuda.kernels.recurrent.cells import GATES, MOST_UNITS, CellSteps
from rlx.backends.cuda.launches import Lasting
from rlx.backends.cuda.lowering import Context, KernelArg, KernelLaunch, lowers
from rlx.backends.kernel_args import Pointer
from rlx.ir.node import Node

_MOST_ROWS = 32  # beyond that, products of all rows by other kernels take less time


def _kernel(node: Node) -> CellSteps:
    op: Any = node.op
    has_bias = op.name == "gru" and len(node.inputs) == 4
    return CellSteps(op.name, int(node.inputs[1].shape.dims[0]), has_bias, op.reverse)  # type: ignore[arg-type]


def _has_kernel(node: Node) -> bool:
    """The number of rows is known: what they have handed over must not be mistaken."""
    x_gates, r = node.inputs[:2]
    rows, hidden = x_gates.shape.dims[1], r.shape.dims[0]
    if x_gates.dtype.name != "f32" or not isinstance(rows, int) or not isinstance(hidden, int):
        return False
    return 0 < rows <= _MOST_ROWS and 0 < hidden <= MOST_UNITS and hidden % 4 == 0


def blocks_at_once(node: Node) -> int:
    """How many blocks of a node's kernel wait for each other; 0 if none do."""
    return _kernel(node).blocks if node.op.name in GATES and _has_kernel(node) else 0


@lowers("lstm", "gru", when=_has_kernel, strided=False)
def lower_cells(node: Node, ctx: Context) -> list[KernelLaunch]:
    kernel, (x, r, h, *rest) = _kernel(node), node.inputs
    y, *last = node.outputs
    steps, rows = x.shape.dims[:2]
    assert isinstance(rows, int)
    lstm = kernel.cell == "lstm"
    args: list[KernelArg] = [Pointer(x), Pointer(r), Pointer(h)]
    args += [Pointer(rest[0]) if lstm else 0, Pointer(rest[0]) if kernel.bias else 0]
    args += [Pointer(y), Pointer(last[0]), Pointer(last[1]) if lstm else 0]
    args += [Lasting(kernel.lasting(rows), kernel.blocks), steps, rows]
    return [KernelLaunch(kernel, args, blocks=kernel.blocks)]
