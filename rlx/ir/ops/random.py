"""Random words: Philox4x32-10 as an op of the graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.errors import DTypeError
from rlx.ir import dtype as dt
from rlx.ir.op import Array, Cost, Op, op
from rlx.ir.ops._common import traffic
from rlx.ir.philox import MULTIPLIERS, ROUNDS, WEYL, philox4x32
from rlx.ir.shape import Shape, broadcast_dims

if TYPE_CHECKING:
    from rlx.ir.graph import Graph
    from rlx.ir.node import Value


@op("philox", is_elementwise=True)
class Philox(Op):
    """Four random u32 words for each counter (c0 … c3) under a key (k0, k1); operands broadcast.

    Words depend on counter and key alone, so every device and every order of work gives the same.
    """

    def infer(
        self, c0: Shape, c1: Shape, c2: Shape, c3: Shape, k0: Shape, k1: Shape
    ) -> tuple[Shape, ...]:
        words = (c0, c1, c2, c3, k0, k1)
        for name, shape in zip(("c0", "c1", "c2", "c3", "k0", "k1"), words, strict=True):
            if shape.dtype is not dt.u32:
                raise DTypeError(f"{name}: words of another type", got=shape, expected="u32")
        made = Shape(broadcast_dims(*[w.dims for w in words]), dt.u32)
        return (made,) * 4

    def reference(self, *words: Array) -> tuple[Array, ...]:
        whole = np.broadcast_arrays(*words)
        made = philox4x32(np.stack(whole[:4], -1), np.stack(whole[4:], -1))
        return tuple(made[..., i] for i in range(4))

    def decompose(self, g: Graph, *words: Value) -> Any:
        """Elementwise ops, which are fused with what makes the counters and uses the words. The
        keys of the rounds are elements too: scalars would be kernels of their own."""
        dims = broadcast_dims(*[w.shape.dims for w in words])
        c0, c1, c2, c3, k0, k1 = (w if w.shape.dims == dims else g.expand(w, dims) for w in words)
        for i in range(ROUNDS):
            if i:
                k0, k1 = g.add(k0, _word(g, WEYL[0])), g.add(k1, _word(g, WEYL[1]))
            high0, low0 = _product(g, c0, MULTIPLIERS[0])
            high1, low1 = _product(g, c2, MULTIPLIERS[1])
            c0 = g.bitwise_xor(g.bitwise_xor(high1, c1), k0)
            c2 = g.bitwise_xor(g.bitwise_xor(high0, c3), k1)
            c1, c3 = low1, low0
        return c0, c1, c2, c3

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        """Ten integer operations per round."""
        return Cost(outputs[0].num_elements * 10 * ROUNDS, traffic(inputs, outputs))


def _word(g: Graph, value: int) -> Value:
    return g.constant(np.uint32(value))


def _product(g: Graph, x: Value, factor: int) -> tuple[Value, Value]:
    """The high and the low word of x · factor."""
    whole = g.mul(g.cast(x, dt.u64), g.constant(np.uint64(factor)))
    return g.cast(g.shift_right(whole, g.constant(np.uint64(32))), dt.u32), g.cast(whole, dt.u32)
