"""Random graphs over all op groups, for property tests of passes, formats and devices.

A graph has symbolic dims `n` and `m` beside small ints, inputs, params and a few random ops.
`arguments(graph, sizes, seed)` makes data that fits it. Ops with jumps (rounding, comparing,
argmax) are applied to inputs and params only: there both sides of a comparison see the very same
bits, while after arithmetic a difference in the last digit may become a difference of one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

import rlx.ir.ops  # noqa: F401
from rlx.ir.attrs import Body
from rlx.ir.dim import Dim, sym
from rlx.ir.graph import Graph
from rlx.ir.node import Value

N, M = sym("n"), sym("m")
AXES: list[Dim] = [N, M, 1, 2, 3, 4]
UNARY = ["neg", "abs", "tanh", "sigmoid", "silu", "gelu", "gelu_tanh", "relu", "exp", "erf"]
UNARY += ["square", "sin", "cos", "softplus"]
JUMPS = ["floor", "ceil", "round", "trunc", "sign"]
BINARY = ["add", "sub", "mul", "maximum", "minimum"]


@dataclass
class Pool:
    """Values so far, and the dice."""

    g: Graph
    draw: Callable[[Any], Any]
    values: list[Value]

    def pick(self, want: Callable[[Value], bool] = lambda v: True) -> Value | None:
        fitting = [v for v in self.values if v.shape.dtype.is_float and want(v)]
        return self.draw(st.sampled_from(fitting)) if fitting else None

    def leaf(self, want: Callable[[Value], bool] = lambda v: True) -> Value | None:
        return self.pick(lambda v: v.node.op.is_source and want(v))

    def choose(self, options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def axis(self, v: Value) -> int:
        return int(self.draw(st.integers(-v.shape.rank, v.shape.rank - 1)))

    def param(self, *dims: Dim) -> Value:
        return self.g.param(f"p{len(self.g)}", list(dims))

    def ints(self, high: int, *dims: Dim) -> Value:
        """Indices below `high`, as a constant."""
        shape = [d if isinstance(d, int) else 2 for d in dims]
        seed = int(self.draw(st.integers(0, 99)))
        data = np.random.default_rng(seed).integers(0, high, shape)
        return self.g.constant(data.astype(np.int32))


def _unary(p: Pool) -> Any:
    v = p.pick()
    return None if v is None else p.g.apply(p.choose(UNARY), v)


def _binary(p: Pool) -> Any:
    a = p.pick()
    if a is None:
        return None
    b = p.pick(lambda v: v.shape is a.shape)
    scalar = p.draw(st.booleans())
    return p.g.apply(p.choose(BINARY), a, 0.5 if scalar or b is None else b)


def _row(p: Pool) -> Any:
    """Broadcasting against a parameter of the last axis."""
    v = p.pick(lambda v: v.shape.rank >= 1 and isinstance(v.shape.dims[-1], int))
    return None if v is None else p.g.apply(p.choose(BINARY), v, p.param(v.shape.dims[-1]))


def _jump(p: Pool) -> Any:
    v = p.leaf()
    return None if v is None else p.g.apply(p.choose(JUMPS), v * 4.0)


def _compare(p: Pool) -> Any:
    v = p.leaf()
    if v is None:
        return None
    mask = p.g.apply(p.choose(["lt", "ge", "eq"]), v, 0.1)
    return p.g.where(mask, v, p.g.neg(v))


def _cast(p: Pool) -> Any:
    v = p.leaf()
    return (
        None if v is None else p.g.cast(p.g.cast(v, p.choose(["f16", "bf16", "f64", "i32"])), "f32")
    )


def _reduce(p: Pool) -> Any:
    v = p.pick(lambda v: v.shape.rank >= 1)
    if v is None:
        return None
    kind = p.choose(["sum", "mean", "max", "min"])
    return p.g.apply(kind, v, axis=(p.axis(v),), keepdims=p.draw(st.booleans()))


def _argmax(p: Pool) -> Any:
    v = p.leaf(lambda v: v.shape.rank >= 1)
    return None if v is None else p.g.cast(p.g.argmax(v, axis=p.axis(v)), "f32")


def _softmax(p: Pool) -> Any:
    v = p.pick(lambda v: v.shape.rank >= 1)
    return (
        None
        if v is None
        else p.g.apply(p.choose(["softmax", "log_softmax", "cumsum"]), v, axis=p.axis(v))
    )


def _norm(p: Pool) -> Any:
    v = p.pick(lambda v: v.shape.rank >= 1 and isinstance(v.shape.dims[-1], int))
    return (
        None
        if v is None
        else p.g.apply(p.choose(["rms_norm", "layer_norm"]), v, p.param(v.shape.dims[-1]))
    )


def _primitive_norm(p: Pool) -> Any:
    """rms_norm spelled out, for the fusions to find."""
    v = p.pick(lambda v: v.shape.rank >= 1 and isinstance(v.shape.dims[-1], int))
    if v is None:
        return None
    g = p.g
    mean = g.mean(g.square(v), axis=(-1,), keepdims=True)
    return v * g.rsqrt(mean + 1e-6) * p.param(v.shape.dims[-1])


def _transpose(p: Pool) -> Any:
    v = p.pick(lambda v: v.shape.rank >= 2)
    return None if v is None else p.g.transpose(v, p.draw(st.permutations(range(v.shape.rank))))


def _reshape(p: Pool) -> Any:
    v = p.pick(lambda v: v.shape.rank >= 2)
    if v is None:
        return None
    d = v.shape.dims
    return p.g.reshape(v, [d[0] * d[1], *d[2:]])


def _narrow(p: Pool) -> Any:
    v = p.pick(lambda v: any(isinstance(d, int) and d > 1 for d in v.shape.dims))
    if v is None:
        return None
    axis = p.choose([i for i, d in enumerate(v.shape.dims) if isinstance(d, int) and d > 1])
    size = v.shape.dims[axis]
    start = p.draw(st.integers(0, size - 1))
    return p.g.narrow(v, axis, start, p.draw(st.integers(1, size - start)))


def _concat(p: Pool) -> Any:
    a = p.pick(lambda v: v.shape.rank >= 1)
    if a is None:
        return None
    b = p.pick(lambda v: v.shape is a.shape)
    return p.g.concat(a, b, axis=p.axis(a))


def _expand(p: Pool) -> Any:
    v = p.pick(lambda v: 1 in v.shape.dims)
    if v is None:
        return None
    return p.g.expand(v, [3 if d == 1 else d for d in v.shape.dims])


def _pad_flip(p: Pool) -> Any:
    v = p.pick(lambda v: v.shape.rank >= 1)
    if v is None:
        return None
    if p.draw(st.booleans()):
        return p.g.flip(v, (p.axis(v),))
    ones = [1] * v.shape.rank
    return p.g.pad(v, ones, [0] * v.shape.rank, 0.5)


def _gather(p: Pool) -> Any:
    v = p.pick(lambda v: v.shape.rank >= 1 and isinstance(v.shape.dims[0], int))
    return None if v is None else p.g.gather(v, p.ints(v.shape.dims[0], 3), axis=0)


def _scatter(p: Pool) -> Any:
    v = p.pick(lambda v: v.shape.rank >= 2 and isinstance(v.shape.dims[0], int))
    if v is None:
        return None
    rows = p.g.gather(v, p.ints(v.shape.dims[0], 2), axis=0)
    kind = p.choose(["scatter", "scatter_add"])
    return p.g.apply(kind, v, p.ints(v.shape.dims[0], 2), rows, axis=0)


def _top_k(p: Pool) -> Any:
    v = p.pick(lambda v: v.shape.rank >= 1 and isinstance(v.shape.dims[-1], int))
    return None if v is None else p.g.top_k(v, k=1)[0]


def _linear(p: Pool) -> Any:
    v = p.pick(lambda v: v.shape.rank >= 2 and isinstance(v.shape.dims[-1], int))
    if v is None:
        return None
    g, out = p.g, p.choose([2, 3, 4])
    y = g.matmul(v, p.param(v.shape.dims[-1], out))
    if p.draw(st.booleans()):
        y = y + p.param(out)
    if p.draw(st.booleans()):
        y = g.apply(p.choose(["relu", "gelu", "silu", "tanh"]), y)
    residual = p.pick(lambda r: r.shape is y.shape)
    return y + residual if residual is not None and p.draw(st.booleans()) else y


def _twins(p: Pool) -> Any:
    """Two products of one input: the fusions join their weights."""
    v = p.pick(lambda v: v.shape.rank >= 2 and isinstance(v.shape.dims[-1], int))
    if v is None:
        return None
    k = v.shape.dims[-1]
    a, b = (p.g.matmul(v, p.param(k, 4)) for _ in range(2))
    return p.g.silu(a) * b if p.draw(st.booleans()) else a - b


def _batched(p: Pool) -> Any:
    v = p.pick(lambda v: v.shape.rank == 3)
    return None if v is None else p.g.matmul(v, p.g.transpose(v, (0, 2, 1)))


def _dot_general(p: Pool) -> Any:
    v = p.pick(lambda v: v.shape.rank >= 2)
    return None if v is None else p.g.dot_general(v, v, lhs_contract=(0,), rhs_contract=(0,))


def _attention(p: Pool) -> Any:
    v = p.pick(lambda v: v.shape.rank == 3 and v.shape.dims[-1] == 4)
    if v is None:
        return None
    mask = p.choose(["none", "causal", "sliding_window(2)"])
    cap = p.choose([0.0, 2.0])
    return p.g.attention(
        v, v, v, num_heads=2, num_kv_heads=2, head_dim=2, mask_kind=mask, softcap=cap
    )


def _rope(p: Pool) -> Any:
    v = p.pick(lambda v: v.shape.rank == 3 and v.shape.dims[-1] == 4)
    if v is None:
        return None
    inter = p.draw(st.booleans())
    return p.g.rope(v, p.param(16, 1), p.param(16, 1), head_dim=2, interleaved=inter, offset=1)


def _conv(p: Pool) -> Any:
    v = p.pick(lambda v: v.shape.rank == 3 and isinstance(v.shape.dims[1], int))
    if v is None:
        return None
    return p.g.conv(v, p.param(2, v.shape.dims[1], 3), stride=(1,), padding=(1,))


def _quantize(p: Pool) -> Any:
    v = p.leaf()
    if v is None:
        return None
    scale = p.g.constant(0.05)
    return p.g.dequantize(p.g.quantize(v, scale), scale)


def _delta(p: Pool) -> Any:
    v = p.pick(lambda v: v.shape.rank == 3 and v.shape.dims[-1] == 4)
    if v is None:
        return None
    g, (b, s, _) = p.g, v.shape.dims
    q = g.reshape(g.tanh(v), [b, s, 2, 2])
    gates = g.neg(g.sigmoid(g.narrow(v, 2, 0, 2)))
    return g.gated_delta_net(q, q, q, gates, g.sigmoid(gates), state_size=2)[0]


def _scan(p: Pool) -> Any:
    v = p.pick(lambda v: v.shape.rank == 2)
    if v is None:
        return None
    body = Graph("step")
    row = v.shape.with_dims(v.shape.dims[1:])
    carry, x = body.input("carry", row), body.input("x", row)
    total = carry * 0.5 + x
    body.set_outputs(total, body.tanh(total), names=["carry", "y"])
    start = p.g.sum(v, axis=(0,))
    return p.g.scan(start, v, body=Body(body), n_carry=1, n_xs=1)[1]


def _cond(p: Pool) -> Any:
    v = p.pick()
    if v is None:
        return None
    branches = []
    for kind in ("relu", "neg"):
        body = Graph(kind)
        body.set_outputs(body.apply(kind, body.input("x", v.shape)), names=["y"])
        branches.append(Body(body))
    leaf = p.leaf()
    flag = p.g.gt(p.g.max(leaf), 0.5)
    return p.g.cond(flag, v, then=branches[0], otherwise=branches[1])


def _rfft(p: Pool) -> Any:
    v = p.pick(lambda v: v.shape.rank >= 1 and v.shape.dims[-1] in (2, 3, 4))
    return None if v is None else p.g.abs(p.g.rfft(v, axis=-1))


MAKERS: list[Callable[[Pool], Any]] = [
    _unary, _unary, _binary, _binary, _row, _jump, _compare, _cast,
    _reduce, _argmax, _softmax, _norm, _primitive_norm, _transpose, _reshape, _narrow, _concat,
    _expand, _pad_flip, _gather, _scatter, _top_k, _linear, _linear, _twins, _batched,
    _dot_general, _attention, _rope, _conv, _quantize, _delta, _scan, _cond, _rfft,
]  # fmt: skip


@st.composite
def graphs(draw: st.DrawFn, max_ops: int = 12) -> Graph:
    """A valid MIR graph with symbolic dims n and m."""
    g = Graph("random")
    values = [g.input("a", [N, 3, 4]), g.input("b", [N, 4]), g.input("c", [M, 1])]
    values.append(g.param("w", [3, 4]))
    pool = Pool(g, draw, values)
    for maker in draw(st.lists(st.sampled_from(MAKERS), min_size=1, max_size=max_ops)):
        made = maker(pool)
        if made is not None and made.shape.rank <= 4:
            values.append(made)
    outputs = draw(st.lists(st.sampled_from(values[4:] or values), min_size=1, max_size=3))
    g.set_outputs(outputs, names=[f"out{i}" for i in range(len(outputs))])
    return g


def arguments(graph: Graph, sizes: Mapping[str, int], seed: int = 0) -> dict[str, np.ndarray]:
    """Arrays for every input, param and state; values near 1, so that products stay tame."""
    rng = np.random.default_rng(seed)
    made = {}
    for node in graph.nodes:
        if node.op.name in ("input", "param", "state"):
            shape = node.output.shape.bind(sizes)
            made[node.name] = rng.uniform(-1, 1, shape.static_dims).astype(shape.dtype.numpy)
    return made
