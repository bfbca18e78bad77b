"""Ops that Python does, in the midst of a native run: those of users, by their reference."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import numpy as np

from rlx.backends.cpu.lowering import Context, Pointer, Step, lowers
from rlx.ir.bind import bind_op
from rlx.ir.node import Node
from rlx.ir.op import Array
from rlx.ir.shape import Shape


@lowers("custom")
def lower_custom(node: Node, ctx: Context) -> list[Step]:
    words = [Pointer(v) for v in (*node.inputs, *node.outputs)]
    return [Step(None, words, node.inputs, node.outputs, host=node)]


def call_host(step: Step, addresses: Sequence[int], sizes: Mapping[str, int]) -> None:
    """Run the reference of the step's node on operands and results at these addresses."""
    node = step.host
    assert node is not None
    values = (*node.inputs, *node.outputs)
    arrays = [_array(a, v.shape.bind(sizes)) for a, v in zip(addresses, values, strict=True)]
    operands, targets = arrays[: len(node.inputs)], arrays[len(node.inputs) :]
    with np.errstate(all="ignore"):
        results = bind_op(node.op, sizes).reference(*operands)
    if not isinstance(results, tuple):
        results = (results,)
    for target, result in zip(targets, results, strict=True):
        target[...] = result


def _array(address: int, shape: Shape) -> Array:
    """Row-major memory as an array, in place."""
    size = int(np.prod(shape.static_dims, dtype=np.int64)) * shape.dtype.bytes
    if not size:
        return np.empty(shape.static_dims, shape.dtype.numpy)
    raw = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
    return raw.view(shape.dtype.numpy).reshape(shape.static_dims)
