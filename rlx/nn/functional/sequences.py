"""Recurrent layers over a sequence: LSTM and GRU are ops, an RNN is a loop of the graph.

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


def _loop(
    g: Graph, kind: str, x_gates: Value, turned: Value, bias: Value | None, h: Value, reverse: bool
) -> Any:
    """An Elman network: (y, the last state) of a loop over the steps."""

    def body(g: Graph, h: Value, x: Value, turned: Value, *bias: Value) -> list[Value]:
        y = g.matmul(h, turned)
        for b in bias:
            y = g.add(y, b)
        new = getattr(g, kind)(g.add(x, y))
        return [new, new]

    invariant = [turned] if bias is None else [turned, bias]
    shapes = [h.shape, x_gates.shape.with_dims(x_gates.shape.dims[1:])]
    step = make_body(body, *shapes, *[v.shape for v in invariant], name=f"{kind}_step")
    last, y = g.scan(h, x_gates, *invariant, body=step, n_carry=1, n_xs=1, reverse=reverse)
    return y, last


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
    if kind == "lstm":
        x_gates = x_gates if b_hh is None else g.add(x_gates, b_hh)
        return g.lstm(x_gates, turned, states[0], states[1], reverse=reverse)
    if kind == "gru":
        inside = None
        if b_hh is not None:  # that of the third gate is inside the product
            inside = g.narrow(b_hh, axis=0, start=2 * hidden, length=hidden)
            own = g.narrow(b_hh, axis=0, start=0, length=2 * hidden)
            x_gates = g.add(x_gates, g.pad(own, low=(0,), high=(hidden,)))
        return g.gru(x_gates, turned, states[0], inside, reverse=reverse)
    return _loop(g, kind, x_gates, turned, b_hh, states[0], reverse)


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
