"""Runs the steps of a native program that are Python's."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import numpy as np

from rlx.backends.cpu.listing import HostCall
from rlx.ir.bind import bind_op
from rlx.ir.op import Array
from rlx.ir.shape import Shape


def call_host(call: HostCall, addresses: Sequence[int], sizes: Mapping[str, int]) -> None:
    """Run the reference of the op on operands and results at these addresses."""
    shapes = (*call.inputs, *call.outputs)
    arrays = [_array(a, s.bind(sizes)) for a, s in zip(addresses, shapes, strict=True)]
    operands, targets = arrays[: len(call.inputs)], arrays[len(call.inputs) :]
    with np.errstate(all="ignore"):
        results = bind_op(call.op, sizes).reference(*operands)
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
