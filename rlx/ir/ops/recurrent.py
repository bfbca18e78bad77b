"""LSTM and GRU over a sequence: the part behind the products with the inputs.

`x_gates [T, B, gates · H]` are the products of the inputs of all steps with their weights, biases
added; `r [H, gates · H]` multiplies the hidden state. Gates lie one behind the other, in PyTorch's
order. The states are computed in f32 at least and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rlx.errors import DTypeError
from rlx.ir.dim import Dim
from rlx.ir.dtype import DType
from rlx.ir.op import Array, Cost, Op, op
from rlx.ir.ops._common import (
    cast,
    compute,
    quiet,
    require_float,
    require_rank,
    require_same,
    rounded,
    upcast,
    wide,
)
from rlx.ir.ops.control import make_body
from rlx.ir.shape import Shape

if TYPE_CHECKING:
    from rlx.ir.graph import Graph
    from rlx.ir.node import Value


class _Recurrence(Op):
    """What both share: checks, the loop over the steps, and the cost."""

    gates: ClassVar[int]
    reverse: bool

    def _check_operands(self, x_gates: Shape, r: Shape, *states: Shape) -> Dim:
        """The number of hidden units H."""
        require_float(x_gates, "x_gates")
        require_rank(x_gates, 3, "x_gates")
        require_rank(r, 2, "r")
        hidden = r.dims[0]
        for shape, what in ((r, "r"), (x_gates, "x_gates")):
            require_same(shape.dims[-1], hidden * self.gates, f"last axis of {what}")
        for state in states:
            require_rank(state, 2, "a state")
            require_same(state.dims[0], x_gates.dims[1], "batch of a state")
            require_same(state.dims[1], hidden, "units of a state")
        for shape in (r, *states):
            if shape.dtype is not x_gates.dtype:
                raise DTypeError(
                    "operands differ in their element type", got=shape,
                    expected=x_gates.dtype.name, hint="cast them to one type",
                )  # fmt: skip
        return hidden

    def _steps(self, count: int) -> range:
        return range(count)[:: -1 if self.reverse else 1]

    def _scan(
        self, g: Graph, x_gates: Value, states: Sequence[Value], invariant: Sequence[Value],
        step: Any,
    ) -> Any:  # fmt: skip
        """(y, last states…) of a loop whose body gives the new states, the first being the row."""
        kept = x_gates.shape.dtype
        x, *rest = (wide(g, v) for v in (x_gates, *states, *invariant))
        first = x.shape.with_dims(x.shape.dims[1:])
        n = len(states)
        shapes = [*[v.shape for v in rest[:n]], first, *[v.shape for v in rest[n:]]]

        def body(g: Graph, *values: Value) -> list[Value]:
            new = step(g, values[:n], *values[n:])
            return [*new, new[0]]

        made = make_body(body, *shapes, name=f"{self.name}_step")
        results = g.scan(
            *rest[:n], x, *rest[n:], body=made, n_carry=n, n_xs=1, reverse=self.reverse
        )
        *last, y = (cast(g, v, kept) for v in results)
        return (y, *last)

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        """A multiply and an add per weight and row, some 30 operations for the functions."""
        units = outputs[0].num_elements
        traffic: Dim = 0
        for shape in (*inputs, *outputs):
            traffic = traffic + shape.size_bytes
        return Cost(units * (inputs[1].dims[0] * (2 * self.gates) + 30), traffic)


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _parts(g: Graph, x: Value, count: int) -> list[Value]:
    hidden = x.shape.dims[1] // count
    return [g.narrow(x, axis=1, start=i * hidden, length=hidden) for i in range(count)]


@op("lstm")
class Lstm(_Recurrence):
    """c ← σ(f)·c + σ(i)·tanh(g), h ← σ(o)·tanh(c), with (i, f, g, o) = x_gates[t] + h·r.

    States h and c are `[B, H]`; returns (all h `[T, B, H]`, the last h, the last c). With `reverse`
    the last step comes first.
    """

    gates = 4
    reverse: bool = False

    def infer(self, x_gates: Shape, r: Shape, h: Shape, c: Shape) -> tuple[Shape, Shape, Shape]:
        hidden = self._check_operands(x_gates, r, h, c)
        return x_gates.with_dims((*x_gates.dims[:2], hidden)), h, c

    def reference(self, x_gates: Array, r: Array, h: Array, c: Array) -> tuple[Array, Array, Array]:
        kept = DType.of(x_gates.dtype)
        x, r, h, c = upcast(x_gates, r, h, c)
        y = np.zeros((*x.shape[:2], len(r)), x.dtype)
        with quiet():
            for t in self._steps(len(x)):
                i, f, new, o = np.split(x[t] + h @ r, 4, axis=1)
                c = _sigmoid(f) * c + _sigmoid(i) * np.tanh(new)
                y[t] = h = _sigmoid(o) * np.tanh(c)
        return rounded(y, kept), rounded(h, kept), rounded(c, kept)

    def decompose(self, g: Graph, x_gates: Value, r: Value, h: Value, c: Value) -> Any:
        def step(g: Graph, states: Sequence[Value], x: Value, r: Value) -> list[Value]:
            h, c = states
            i, f, new, o = _parts(g, g.add(x, g.matmul(h, r)), 4)
            c = g.add(g.mul(g.sigmoid(f), c), g.mul(g.sigmoid(i), g.tanh(new)))
            return [g.mul(g.sigmoid(o), g.tanh(c)), c]

        return self._scan(g, x_gates, (h, c), (r,), step)


@op("gru")
class Gru(_Recurrence):
    """h ← n + σ(z)·(h - n) with r, z = x_gates[t] + h·r and n = tanh(x_n + σ(r)·(h·r_n + bias)).

    Gates are r, z, n; the state h is `[B, H]`, `bias [H]` belongs to the third gate's product.
    Returns (all h `[T, B, H]`, the last h). With `reverse` the last step comes first.
    """

    gates = 3
    reverse: bool = False

    def infer(
        self, x_gates: Shape, r: Shape, h: Shape, bias: Shape | None = None
    ) -> tuple[Shape, Shape]:
        hidden = self._check_operands(x_gates, r, h)
        if bias is not None:
            require_rank(bias, 1, "bias")
            require_same(bias.dims[0], hidden, "bias")
        return x_gates.with_dims((*x_gates.dims[:2], hidden)), h

    def reference(
        self, x_gates: Array, r: Array, h: Array, bias: Array | None = None
    ) -> tuple[Array, Array]:
        kept = DType.of(x_gates.dtype)
        x, r, h = upcast(x_gates, r, h)
        more = 0 if bias is None else compute(bias)
        y = np.zeros((*x.shape[:2], len(r)), x.dtype)
        with quiet():
            for t in self._steps(len(x)):
                xr, xz, xn = np.split(x[t], 3, axis=1)
                hr, hz, hn = np.split(h @ r, 3, axis=1)
                new = np.tanh(xn + _sigmoid(xr + hr) * (hn + more))
                y[t] = h = new + _sigmoid(xz + hz) * (h - new)
        return rounded(y, kept), rounded(h, kept)

    def decompose(
        self, g: Graph, x_gates: Value, r: Value, h: Value, bias: Value | None = None
    ) -> Any:
        def step(g: Graph, states: Sequence[Value], x: Value, *rest: Value) -> list[Value]:
            (h,), (r, *more) = states, rest
            xr, xz, xn = _parts(g, x, 3)
            hr, hz, hn = _parts(g, g.matmul(h, r), 3)
            for b in more:
                hn = g.add(hn, b)
            reset, update = g.sigmoid(g.add(xr, hr)), g.sigmoid(g.add(xz, hz))
            new = g.tanh(g.add(xn, g.mul(reset, hn)))
            return [g.add(new, g.mul(update, g.sub(h, new)))]

        invariant = (r,) if bias is None else (r, bias)
        return self._scan(g, x_gates, (h,), invariant, step)
