"""RNN, GRU and LSTM: the op of the graph for each direction, or a loop where there is none.

Products with the inputs of all steps are one matmul before it. Sequences of unequal length keep
their state behind their end, and give zeros there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import rlx.numpy as xp
from rlx.numpy import control_flow
from rlx.numpy.array import Array
from rlx.onnx.call import Call
from rlx.onnx.graph_ops import graph_op, graph_ops
from rlx.onnx.table import op

Function = Callable[[Array], Array]


class Direction(NamedTuple):
    """One direction's operands: x [length, batch, in], weights turned for `x @ w`."""

    x: Array
    w: Array
    r: Array
    bias: Array | None
    recurrent_bias: Array | None
    peepholes: Array | None
    functions: list[Function]


def _activation(node: Call, name: str, alpha: float | None, beta: float | None) -> Function:
    def number(given: float | None, default: float) -> float:
        return default if given is None else given

    simple: dict[str, Function] = {
        "sigmoid": xp.sigmoid, "tanh": xp.tanh, "relu": xp.relu, "softplus": xp.softplus,
        "softsign": lambda x: x / (1.0 + xp.abs(x)),
        "affine": lambda x: number(alpha, 1.0) * x + number(beta, 0.0),
        "leakyrelu": lambda x: xp.where(xp.less(x, 0), number(alpha, 0.01) * x, x),
        "thresholdedrelu": lambda x: xp.where(
            xp.greater(x, number(alpha, 1.0)), x, xp.zeros_like(x)
        ),
        "scaledtanh": lambda x: number(alpha, 1.0) * xp.tanh(number(beta, 1.0) * x),
        "hardsigmoid": lambda x: xp.clip(number(alpha, 0.2) * x + number(beta, 0.5), 0.0, 1.0),
        "elu": lambda x: xp.where(
            xp.less(x, 0), number(alpha, 1.0) * xp.expm1(xp.minimum(x, 0.0)), x
        ),
    }  # fmt: skip
    found = simple.get(name.lower())
    if found is None:
        raise node.fault("unknown activation", got=name, expected=", ".join(simple))
    return found


def _functions(node: Call, defaults: tuple[str, ...], directions: int) -> list[list[Function]]:
    names = node.texts("activations", None) or list(defaults) * directions
    count = len(defaults)
    if len(names) != count * directions:
        raise node.fault("not a number of activations", got=len(names), expected=count * directions)
    alphas = list(node.floats("activation_alpha", ()))
    betas = list(node.floats("activation_beta", ()))
    made = []
    for name in names:
        takes_alpha = name.lower() in _WITH_ALPHA
        takes_beta = name.lower() in _WITH_BETA
        alpha = alphas.pop(0) if takes_alpha and alphas else None
        beta = betas.pop(0) if takes_beta and betas else None
        made.append(_activation(node, name, alpha, beta))
    return [made[i * count : (i + 1) * count] for i in range(directions)]


_WITH_ALPHA = {"affine", "leakyrelu", "thresholdedrelu", "scaledtanh", "hardsigmoid", "elu"}
_WITH_BETA = {"affine", "scaledtanh", "hardsigmoid"}


class Step(NamedTuple):
    """What differs between the three: gates, activations, and a step of the loop.

    `order` are the gates as the op of the graph has them, None where there is no such op."""

    gates: int
    defaults: tuple[str, ...]
    states: int
    run: Callable[..., tuple[Array, ...]]
    order: tuple[int, ...] | None = None


def _recurrence(
    node: Call, step: Step, x: Array, w: Array, r: Array, b: Array | None, lengths: Array | None,
    states: list[Array | None], peepholes: Array | None,
) -> tuple[Array, ...]:  # fmt: skip
    batch_first = bool(node.int("layout", 0))
    ways = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
    way = node.text("direction", "forward")
    if way not in ways:
        raise node.fault("unknown direction", got=way)
    hidden = int(r.shape[-1])
    if int(w.shape[0]) != len(ways[way]) or int(w.shape[1]) != step.gates * hidden:
        raise node.fault("weights do not fit", got=list(w.shape))
    if batch_first:
        x = xp.permute_dims(x, (1, 0, 2))
        states = [None if s is None else xp.permute_dims(s, (1, 0, 2)) for s in states]
    functions = _functions(node, step.defaults, len(ways[way]))
    outputs: list[Array] = []
    last: list[list[Array]] = [[] for _ in range(step.states)]
    for d, backwards in enumerate(ways[way]):
        half = step.gates * hidden
        given = Direction(
            x, xp.matrix_transpose(w[d]), xp.matrix_transpose(r[d]),
            None if b is None else b[d, :half], None if b is None else b[d, half:],
            None if peepholes is None else peepholes[d], functions[d],
        )  # fmt: skip
        first = [_start(s, d, x, hidden) for s in states]
        y, after = _run(node, step, given, first, lengths, backwards)
        outputs.append(y)
        for kept, state in zip(last, after, strict=True):
            kept.append(state)
    y = xp.stack(outputs, axis=1)  # [length, directions, batch, hidden]
    ends = [xp.stack(kept, axis=0) for kept in last]
    if batch_first:
        y = xp.permute_dims(y, (2, 0, 1, 3))
        ends = [xp.permute_dims(s, (1, 0, 2)) for s in ends]
    return (y, *ends)


def _start(state: Array | None, direction: int, x: Array, hidden: int) -> Array:
    if state is not None:
        return state[direction]
    return xp.zeros((x.shape[1], hidden), dtype=x.dtype)


def _run(
    node: Call, step: Step, given: Direction, first: list[Array], lengths: Array | None,
    backwards: bool,
) -> tuple[Array, tuple[Array, ...]]:  # fmt: skip
    x = given.x
    if _has_op(node, step, given, lengths):
        return _by_op(node, step, given, first, backwards)
    if backwards and lengths is not None:
        x = _turned(x, lengths)
    inputs = xp.matmul(x, given.w)
    if given.bias is not None:
        inputs = inputs + given.bias

    def once(carry: Any, row: Any) -> Any:
        found = step.run(node, given, carry, row[0])
        if lengths is not None:
            keep = xp.expand_dims(xp.less(row[1], lengths), -1)
            made = [xp.where(keep, new, old) for new, old in zip(found, carry, strict=True)]
            return tuple(made), xp.where(keep, found[0], xp.zeros_like(found[0]))
        return tuple(found), found[0]

    rows: tuple[Array, ...] = (inputs,)
    if lengths is not None:
        rows = (inputs, xp.arange(x.shape[0], dtype=lengths.dtype))
    reverse = backwards and lengths is None
    after, y = control_flow.scan(once, tuple(first), rows, reverse=reverse)
    return (_turned(y, lengths) if backwards and lengths is not None else y), after


def _has_op(node: Call, step: Step, given: Direction, lengths: Array | None) -> bool:
    """Whether the graph has an op for just this recurrence."""
    if step.order is None or lengths is not None or given.peepholes is not None:
        return False
    if node.float("clip", None) is not None or node.int("input_forget", 0):
        return False
    if step.gates == 3 and not node.int("linear_before_reset", 0):
        return False
    named = node.texts("activations", None) or ()
    return all(a.lower() == b.lower() for a, b in zip(named, step.defaults * 2, strict=False))


def _by_op(
    node: Call, step: Step, given: Direction, first: list[Array], backwards: bool
) -> tuple[Array, tuple[Array, ...]]:
    assert step.order is not None
    hidden = int(given.r.shape[0])
    w, r = (_ordered(x, step.order) for x in (given.w, given.r))
    biases = [
        None if b is None else _ordered(b, step.order) for b in (given.bias, given.recurrent_bias)
    ]
    last: list[Array] = []
    if step.gates == 3 and biases[1] is not None:  # that of the third gate is inside the product
        own = biases[1][: 2 * hidden]
        last.append(biases[1][2 * hidden :])
        biases[1] = xp.concat((own, xp.zeros((hidden,), dtype=own.dtype)))
    inputs = xp.matmul(given.x, w)
    known = [b for b in biases if b is not None]
    if known:
        inputs = inputs + (known[0] if len(known) == 1 else known[0] + known[1])
    name = "lstm" if step.gates == 4 else "gru"
    y, *after = graph_ops(name, inputs, r, *first, *last, reverse=backwards)
    return y, tuple(after)


def _ordered(x: Array, order: tuple[int, ...]) -> Array:
    """The gates of the last axis in another order."""
    parts = _split(x, len(order))
    return xp.concat([parts[i] for i in order], axis=-1)


def _turned(x: Array, lengths: Array) -> Array:
    """Each sequence of [length, batch, …] from its end to its start; what is behind stays."""
    step = xp.reshape(xp.arange(x.shape[0], dtype=xp.int64), (-1, 1))
    length = lengths.astype(xp.int64)
    source = xp.where(xp.less(step, length), length - 1 - step, step)
    return graph_op("take_along", x, xp.broadcast_to(xp.expand_dims(source, -1), x.shape), axis=0)


def _clipped(node: Call, x: Array) -> Array:
    limit = node.float("clip", None)
    return x if limit is None else xp.clip(x, -float(limit), float(limit))


def _split(x: Array, count: int) -> list[Array]:
    hidden = int(x.shape[-1]) // count
    return [x[..., i * hidden : (i + 1) * hidden] for i in range(count)]


def _with_bias(x: Array, bias: Array | None) -> Array:
    return x if bias is None else x + bias


# -- the three ------------------------------------------------------------------------------------


def _rnn_step(node: Call, given: Direction, carry: Any, x: Array) -> tuple[Array, ...]:
    gates = x + _with_bias(xp.matmul(carry[0], given.r), given.recurrent_bias)
    return (given.functions[0](_clipped(node, gates)),)


def _gru_step(node: Call, given: Direction, carry: Any, x: Array) -> tuple[Array, ...]:
    h = carry[0]
    f, g = given.functions
    hidden = int(h.shape[-1])
    xz, xr, xn = _split(x, 3)
    if node.int("linear_before_reset", 0):
        hz, hr, hn = _split(_with_bias(xp.matmul(h, given.r), given.recurrent_bias), 3)
        update, reset = f(_clipped(node, xz + hz)), f(_clipped(node, xr + hr))
        new = g(_clipped(node, xn + reset * hn))
    else:
        bias, last = given.recurrent_bias, None
        if bias is not None:
            bias, last = bias[: 2 * hidden], bias[2 * hidden :]
        both = _with_bias(xp.matmul(h, given.r[:, : 2 * hidden]), bias)
        hz, hr = _split(both, 2)
        update, reset = f(_clipped(node, xz + hz)), f(_clipped(node, xr + hr))
        product = xp.matmul(reset * h, given.r[:, 2 * hidden :])
        new = g(_clipped(node, xn + _with_bias(product, last)))
    return ((1.0 - update) * new + update * h,)


def _lstm_step(node: Call, given: Direction, carry: Any, x: Array) -> tuple[Array, ...]:
    h, c = carry
    f, g, after = given.functions
    i, o, forget, new = _split(x + _with_bias(xp.matmul(h, given.r), given.recurrent_bias), 4)
    if given.peepholes is not None:
        pi, po, pf = _split(given.peepholes, 3)
        i, forget = i + pi * c, forget + pf * c
    entered = f(_clipped(node, i))
    kept = 1.0 - entered if node.int("input_forget", 0) else f(_clipped(node, forget))
    c = kept * c + entered * g(_clipped(node, new))
    if given.peepholes is not None:
        o = o + po * c
    return f(_clipped(node, o)) * after(c), c


_RNN = Step(1, ("Tanh",), 1, _rnn_step)
_GRU = Step(3, ("Sigmoid", "Tanh"), 1, _gru_step, (1, 0, 2))  # z, r, n
_LSTM = Step(4, ("Sigmoid", "Tanh", "Tanh"), 2, _lstm_step, (0, 2, 3, 1))  # i, o, f, g


@op("RNN")
def rnn(
    node: Call, x: Array, w: Array, r: Array, b: Array | None = None, lengths: Array | None = None,
    h: Array | None = None,
) -> Any:  # fmt: skip
    return _recurrence(node, _RNN, x, w, r, b, lengths, [h], None)


@op("GRU")
def gru(
    node: Call, x: Array, w: Array, r: Array, b: Array | None = None, lengths: Array | None = None,
    h: Array | None = None,
) -> Any:  # fmt: skip
    return _recurrence(node, _GRU, x, w, r, b, lengths, [h], None)


@op("LSTM")
def lstm(
    node: Call, x: Array, w: Array, r: Array, b: Array | None = None, lengths: Array | None = None,
    h: Array | None = None, c: Array | None = None, peepholes: Array | None = None,
) -> Any:  # fmt: skip
    return _recurrence(node, _LSTM, x, w, r, b, lengths, [h, c], peepholes)
