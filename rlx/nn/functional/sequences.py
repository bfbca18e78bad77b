"""Recurrent layers: RNN, LSTM and GRU over a sequence, one loop of the graph each.

Weights have PyTorch's layout: weight_ih [gates · hidden, in], weight_hh [gates · hidden, hidden];
gates come in the order i, f, g, o (LSTM) and r, z, n (GRU). The products with the inputs of all
steps are one matmul before the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx.errors import ShapeError
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.ir.ops.control import make_body
from rlx.nn.functional.operands import ArrayLike, call_many, fixed, require_option, require_rank
from rlx.numpy.array import Array
from rlx.numpy.dispatch import as_array

GATES = {"tanh": 1, "relu": 1, "lstm": 4, "gru": 3}


def _gates(g: Graph, x: Value, count: int, hidden: int) -> list[Value]:
    return [g.narrow(x, axis=1, start=i * hidden, length=hidden) for i in range(count)]


def _lstm_step(
    g: Graph, hidden: int, states: Sequence[Value], x: Value, turned: Value, bias: Value | None
) -> list[Value]:
    h, c = states
    i, f, n, o = _gates(g, g.add(x, _product(g, h, turned, bias)), 4, hidden)
    c = g.add(g.mul(g.sigmoid(f), c), g.mul(g.sigmoid(i), g.tanh(n)))
    return [g.mul(g.sigmoid(o), g.tanh(c)), c]


def _gru_step(
    g: Graph, hidden: int, states: Sequence[Value], x: Value, turned: Value, bias: Value | None
) -> list[Value]:
    h = states[0]
    xr, xz, xn = _gates(g, x, 3, hidden)
    hr, hz, hn = _gates(g, _product(g, h, turned, bias), 3, hidden)
    reset, update = g.sigmoid(g.add(xr, hr)), g.sigmoid(g.add(xz, hz))
    new = g.tanh(g.add(xn, g.mul(reset, hn)))
    return [g.add(new, g.mul(update, g.sub(h, new)))]


def _plain_step(kind: str) -> Any:
    def step(
        g: Graph, hidden: int, states: Sequence[Value], x: Value, turned: Value,
        bias: Value | None,
    ) -> list[Value]:  # fmt: skip
        return [getattr(g, kind)(g.add(x, _product(g, states[0], turned, bias)))]

    return step


_STEPS = {
    "lstm": _lstm_step, "gru": _gru_step, "tanh": _plain_step("tanh"), "relu": _plain_step("relu")
}  # fmt: skip


def _product(g: Graph, h: Value, turned: Value, bias: Value | None) -> Value:
    y = g.matmul(h, turned)
    return y if bias is None else g.add(y, bias)


def _recurrent(
    g: Graph, x: Value, w_ih: Value, w_hh: Value, b_ih: Value | None, b_hh: Value | None,
    h: Value | None, c: Value | None, kind: str, hidden: int, reverse: bool,
) -> Any:  # fmt: skip
    """x [length, batch, in] → (y [length, batch, hidden], the last states)."""
    rows = GATES[kind] * hidden
    w_ih, w_hh = fixed(g, w_ih, (rows, None)), fixed(g, w_hh, (rows, hidden))
    b_ih, b_hh = (None if b is None else fixed(g, b, (rows,)) for b in (b_ih, b_hh))
    x_gates = g.matmul(x, g.transpose(w_ih, (1, 0)))
    x_gates = x_gates if b_ih is None else g.add(x_gates, b_ih)
    batch = x.shape.dims[1]
    zero = g.expand(g.constant(0, x.shape.dtype), (batch, hidden))
    given = [h, c] if kind == "lstm" else [h]
    states = [g.contiguous(zero) if s is None else fixed(g, s, (None, hidden)) for s in given]
    turned = g.contiguous(g.transpose(w_hh, (1, 0)))
    invariant = [turned] if b_hh is None else [turned, b_hh]

    def body(g: Graph, *values: Value) -> list[Value]:
        n = len(states)
        new = _STEPS[kind](g, hidden, values[:n], values[n], *_pair(values[n + 1 :]))
        return [*new, new[0]]

    shapes = [
        *[s.shape for s in states], x_gates.shape.with_dims(x_gates.shape.dims[1:]),
        *[v.shape for v in invariant],
    ]  # fmt: skip
    step = make_body(body, *shapes, name=f"{kind}_step")
    results = g.scan(
        *states, x_gates, *invariant, body=step, n_carry=len(states), n_xs=1, reverse=reverse
    )
    *last, y = results
    return (y, *last)


def _pair(values: Sequence[Value]) -> tuple[Value, Value | None]:
    return values[0], values[1] if len(values) > 1 else None


def _run(
    kind: str, x: ArrayLike, states: Sequence[ArrayLike | None], weights: Sequence[Any],
    reverse: bool,
) -> tuple[Array, ...]:  # fmt: skip
    made = require_rank(x, (3,), kind, "[length, batch, inputs]")
    hidden = int(as_array(weights[1]).shape[-1])
    rows = GATES[kind] * hidden
    for w in weights[:2]:
        if int(as_array(w).shape[0]) != rows:
            raise ShapeError(
                "a weight has the wrong number of rows", where=kind, expected=rows,
                got=str(list(as_array(w).shape)),
            )  # fmt: skip
    operands = [made, *weights, *states, *[None] * (2 - len(states))]
    return call_many(_recurrent, operands, kind, hidden, bool(reverse))


def rnn(
    x: ArrayLike, h: ArrayLike | None, weight_ih: ArrayLike, weight_hh: ArrayLike,
    bias_ih: ArrayLike | None = None, bias_hh: ArrayLike | None = None,
    nonlinearity: str = "tanh", reverse: bool = False,
) -> tuple[Array, Array]:  # fmt: skip
    """An Elman network over x [length, batch, in]: h ← tanh(W_ih x + b_ih + W_hh h + b_hh).
    Returns all h [length, batch, hidden] and the last; h starts as zeros by default."""
    require_option(nonlinearity, ("tanh", "relu"), "rnn.nonlinearity")
    y, last = _run(nonlinearity, x, [h], [weight_ih, weight_hh, bias_ih, bias_hh], reverse)
    return y, last


def lstm(
    x: ArrayLike, state: tuple[ArrayLike, ArrayLike] | None, weight_ih: ArrayLike,
    weight_hh: ArrayLike, bias_ih: ArrayLike | None = None, bias_hh: ArrayLike | None = None,
    reverse: bool = False,
) -> tuple[Array, tuple[Array, Array]]:  # fmt: skip
    """A long short-term memory over x [length, batch, in]. Returns all h [length, batch, hidden]
    and the last (h, c), which start as zeros by default."""
    states = [None, None] if state is None else [*state]
    y, h, c = _run("lstm", x, states, [weight_ih, weight_hh, bias_ih, bias_hh], reverse)
    return y, (h, c)


def gru(
    x: ArrayLike, h: ArrayLike | None, weight_ih: ArrayLike, weight_hh: ArrayLike,
    bias_ih: ArrayLike | None = None, bias_hh: ArrayLike | None = None, reverse: bool = False,
) -> tuple[Array, Array]:  # fmt: skip
    """A gated recurrent unit over x [length, batch, in]. Returns all h [length, batch, hidden] and
    the last."""
    y, last = _run("gru", x, [h], [weight_ih, weight_hh, bias_ih, bias_hh], reverse)
    return y, last
