"""Products of matrices. Fusion joins them with what follows: bias, activation, residual."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlx.ir.node import Value
from rlx.pytorch.aten.table import aten

if TYPE_CHECKING:
    from rlx.pytorch.lower_aten import Lowering


@aten("mm.default", "bmm.default", "matmul.default", "mv.default", "dot.default")
def matmul(low: Lowering, a: Value, b: Value) -> Value:
    return low.g.matmul(a, b)


@aten("addmm.default", "addmv.default", "baddbmm.default")
def addmm(low: Lowering, bias: Value, a: Value, b: Value, beta: Any = 1, alpha: Any = 1) -> Value:
    """beta · bias + alpha · a·b"""
    element = low.out.dtype
    product = low.g.matmul(a, b)
    if alpha != 1:
        product = low.g.mul(product, low.scalar(alpha, element))
    if beta == 0:
        return product
    added = bias if beta == 1 else low.g.mul(bias, low.scalar(beta, element))
    return low.g.add(product, added)


@aten("linear.default")
def linear(low: Lowering, x: Value, weight: Value, bias: Value | None = None) -> Value:
    """x · weightᵀ + bias"""
    turned = low.g.transpose(weight, axes=(1, 0)) if weight.shape.rank == 2 else weight
    product = low.g.matmul(x, turned)
    return product if bias is None else low.g.add(product, bias)
