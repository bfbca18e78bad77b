"""Products of matrices."""

from __future__ import annotations

import rlx.numpy as xp
from rlx.numpy.array import Array
from rlx.onnx.call import Call
from rlx.onnx.table import op


@op("MatMul")
def matmul(node: Call, a: Array, b: Array) -> Array:
    return xp.matmul(a, b)


@op("Gemm")
def gemm(node: Call, a: Array, b: Array, c: Array | None = None) -> Array:
    alpha, beta = node.float("alpha", 1.0), node.float("beta", 1.0)
    a = xp.matrix_transpose(a) if node.int("transA", 0) else a
    b = xp.matrix_transpose(b) if node.int("transB", 0) else b
    product = _scaled(xp.matmul(a, b), alpha)
    return product if c is None else product + _scaled(c, beta)


def _scaled(x: Array, factor: float) -> Array:
    if factor == 1.0:
        return x
    return x * (int(factor) if x.dtype.is_integer else factor)
