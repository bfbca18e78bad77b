"""Recurrences over a sequence: the selective scan and the gated delta rule.

The recurrent state is computed in f32 at least, whatever the operands are. A state that is not
given starts as zeros and comes back as f32 (f64 with f64 operands); a given one keeps its type.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.errors import AttributeValueError, ShapeError
from rlx.ir import dtype as dt
from rlx.ir.dim import Dim
from rlx.ir.dtype import DType, promote
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


def _require_dims(shape: Shape, dims: Sequence[Dim], what: str) -> None:
    require_float(shape, what)
    require_rank(shape, len(dims), what)
    for axis, (found, expected) in enumerate(zip(shape.dims, dims, strict=True)):
        require_same(found, expected, f"axis {axis} of {what}")


def _traffic(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Dim:
    total: Dim = 0
    for shape in (*inputs, *outputs):
        total = total + shape.size_bytes
    return total


@op("selective_scan", depends_on_neighbours=True)
class SelectiveScan(Op):
    """h ← exp(delta·a)·h + delta·b·u; y = Σ_n c·h + d·u; returns (y, the last h).

    `u`, `delta [B, S, D]`, `a [D, N]`, `b`, `c [B, S, N]`, then `d [D]` where `has_d` and the
    state h `[B, D, N]` to start from where `has_state`. `delta` is used as given; y has u's type.
    """

    has_d: bool = False
    has_state: bool = False

    def infer(
        self, u: Shape, delta: Shape, a: Shape, b: Shape, c: Shape,
        d: Shape | None = None, state: Shape | None = None,
    ) -> tuple[Shape, Shape]:  # fmt: skip
        d, state = self._optional(d, state)
        require_rank(u, 3, "u")
        require_rank(a, 2, "a")
        batch, seq, inner = u.dims
        n = a.dims[1]
        _require_dims(u, u.dims, "u")
        _require_dims(delta, u.dims, "delta")
        _require_dims(a, (inner, n), "a")
        _require_dims(b, (batch, seq, n), "b")
        _require_dims(c, (batch, seq, n), "c")
        if d is not None:
            _require_dims(d, (inner,), "d")
        if state is not None:
            _require_dims(state, (batch, inner, n), "state")
        element = state.dtype if state is not None else promote(u.dtype, a.dtype, dt.f32)
        return u, Shape((batch, inner, n), element)

    def _optional(self, d: Any, state: Any) -> tuple[Any, Any]:
        """Trailing operands as (d, state): the flags say which of them are there."""
        given = [v for v in (d, state) if v is not None]
        if len(given) != self.has_d + self.has_state:
            raise ShapeError(
                "optional operands differ from the flags", got=len(given),
                expected=f"has_d={self.has_d}, has_state={self.has_state}",
                hint="set has_d and has_state for the operands that are given",
            )  # fmt: skip
        return (given[0] if self.has_d else None), (given[-1] if self.has_state else None)

    def reference(
        self, u: Array, delta: Array, a: Array, b: Array, c: Array,
        d: Array | None = None, state: Array | None = None,
    ) -> tuple[Array, Array]:  # fmt: skip
        d, state = self._optional(d, state)
        y_type, a_type = DType.of(u.dtype), DType.of(a.dtype)
        h_type = DType.of(state.dtype) if state is not None else promote(y_type, a_type, dt.f32)
        u, delta, a, b, c = upcast(u, delta, a, b, c)
        wide = np.result_type(u, delta, a, b, c)
        h = np.zeros((len(u), *a.shape), wide) if state is None else compute(state)
        y = np.zeros(u.shape, np.result_type(wide, h))
        with quiet():
            for s in range(u.shape[1]):
                step, x = delta[:, s, :, None], u[:, s, :, None]
                h = np.exp(step * a) * h + step * b[:, s, None, :] * x
                y[:, s] = (h * c[:, s, None, :]).sum(-1)
            if d is not None:
                y = y + u * compute(d)
        return rounded(y, y_type), rounded(h, h_type)

    def decompose(
        self, g: Graph, u: Value, delta: Value, a: Value, b: Value, c: Value, *rest: Value
    ) -> Any:
        """A loop over the tokens."""
        d, state = self._optional(*rest, *[None] * (2 - len(rest)))
        parts = [wide(g, v) for v in (u, delta, a, b, c, state) if v is not None]
        inner = promote(*[v.shape.dtype for v in parts])
        parts = [cast(g, v, inner) for v in parts]
        batch, _, width = u.shape.dims
        dims = (batch, width, a.shape.dims[1])
        start = parts[5] if state is not None else g.expand(g.constant(0, inner), shape=dims)
        xs = [g.transpose(parts[i], axes=(1, 0, 2)) for i in (0, 1, 3, 4)]
        slices = [x.shape.with_dims(x.shape.dims[1:]) for x in xs]
        body = make_body(
            _scan_step, start.shape, *slices, parts[2].shape, name="selective_scan_step"
        )
        last, y = g.scan(start, *xs, parts[2], body=body, n_carry=1, n_xs=4)
        y = g.transpose(y, axes=(1, 0, 2))
        if d is not None:
            y = g.add(y, g.mul(parts[0], wide(g, d)))
        kept = promote(u.shape.dtype, a.shape.dtype, dt.f32) if state is None else state.dtype
        return cast(g, y, u.shape.dtype), cast(g, last, kept)

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        """Per state element and token: exp, four multiplies, two adds."""
        return Cost(inputs[0].num_elements * inputs[2].dims[1] * 7, _traffic(inputs, outputs))


@op("gated_delta_net", is_anchor=True, depends_on_neighbours=True)
class GatedDeltaNet(Op):
    """Per token and head: S ← exp(g)·S; d = (v − kᵀS)·beta; S ← S + k dᵀ; o = (q/√N)ᵀS.

    `q`, `k`, `v [B, S, H, N]`, `g`, `beta [B, S, H]`, the state S `[B, H, N, N]` (rows go with k,
    columns with v) to start from where given; returns (o, the last S). `state_size` states N; 0
    takes it from q.
    """

    state_size: int = 0

    def check(self) -> None:
        if self.state_size < 0:
            raise AttributeValueError(
                "negative size", where="gated_delta_net.state_size", got=self.state_size
            )

    def infer(
        self, q: Shape, k: Shape, v: Shape, g: Shape, beta: Shape, state: Shape | None = None
    ) -> tuple[Shape, Shape]:
        require_rank(q, 4, "q")
        batch, seq, heads, n = q.dims
        if not isinstance(n, int) or n < 1:
            raise ShapeError("the head size is a positive int", got=q, expected="[B, S, H, N]")
        if self.state_size:
            require_same(n, self.state_size, "head size of q against state_size")
        for shape, what in ((q, "q"), (k, "k"), (v, "v")):
            _require_dims(shape, q.dims, what)
        _require_dims(g, (batch, seq, heads), "g")
        _require_dims(beta, (batch, seq, heads), "beta")
        if state is not None:
            _require_dims(state, (batch, heads, n, n), "state")
        out = promote(q.dtype, k.dtype, v.dtype)
        element = state.dtype if state is not None else promote(out, dt.f32)
        return q.with_dtype(out), Shape((batch, heads, n, n), element)

    def reference(
        self, q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array | None = None
    ) -> tuple[Array, Array]:
        out = promote(*[DType.of(x.dtype) for x in (q, k, v)])
        kept = DType.of(state.dtype) if state is not None else promote(out, dt.f32)
        q, k, v, g, beta = upcast(q, k, v, g, beta)
        batch, seq, heads, n = q.shape
        wide = np.result_type(q, k, v, g, beta)
        s = np.zeros((batch, heads, n, n), wide) if state is None else compute(state)
        o = np.zeros(q.shape, np.result_type(wide, s))
        q = q / q.dtype.type(sqrt(n))
        with quiet():
            for t in range(seq):
                s = s * np.exp(g[:, t])[..., None, None]
                d = (v[:, t] - np.einsum("bhk,bhkv->bhv", k[:, t], s)) * beta[:, t, :, None]
                s = s + k[:, t, :, :, None] * d[:, :, None, :]
                o[:, t] = np.einsum("bhk,bhkv->bhv", q[:, t], s)
        return rounded(o, out), rounded(s, kept)

    def decompose(
        self, graph: Graph, q: Value, k: Value, v: Value, g: Value, beta: Value,
        state: Value | None = None,
    ) -> Any:  # fmt: skip
        """A loop over the tokens."""
        out = promote(*[x.shape.dtype for x in (q, k, v)])
        given = [wide(graph, x) for x in (q, k, v, g, beta, state) if x is not None]
        inner = promote(*[x.shape.dtype for x in given])
        given = [cast(graph, x, inner) for x in given]
        batch, _, heads, n = q.shape.dims
        start = given[5] if state is not None else graph.constant(0.0, inner)
        if state is None:
            start = graph.expand(start, shape=(batch, heads, n, n))
        xs = [graph.transpose(x, axes=(1, 0, *range(2, x.shape.rank))) for x in given[:5]]
        slices = [x.shape.with_dims(x.shape.dims[1:]) for x in xs]
        body = make_body(_delta_step, start.shape, *slices, name="gated_delta_step")
        last, o = graph.scan(start, *xs, body=body, n_carry=1, n_xs=5)
        kept = promote(out, dt.f32) if state is None else state.shape.dtype
        o = graph.transpose(o, axes=(1, 0, 2, 3))
        return cast(graph, o, out), cast(graph, last, kept)

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        """Per state element and token: the decay, and three multiply-adds."""
        n = inputs[0].dims[3]
        return Cost(inputs[0].num_elements * n * 7, _traffic(inputs, outputs))


# -- one token of each recurrence -------------------------------------------------------------


def _scan_step(
    b: Graph, h: Value, u: Value, delta: Value, b_: Value, c: Value, a: Value
) -> list[Value]:
    """h ← exp(delta·a)·h + delta·b·u; y = Σ c·h"""
    batch, width = u.shape.dims
    n = b_.shape.dims[1]
    step, x = (b.reshape(v, shape=(batch, width, 1)) for v in (delta, u))
    b_, c = (b.reshape(v, shape=(batch, 1, n)) for v in (b_, c))
    h = b.add(b.mul(b.exp(b.mul(step, a)), h), b.mul(b.mul(step, b_), x))
    return [h, b.sum(b.mul(h, c), axis=(2,))]


def _delta_step(
    b: Graph, state: Value, q: Value, k: Value, v: Value, g: Value, beta: Value
) -> list[Value]:
    """(state, q, k, v, g, beta) -> (state, o)"""
    batch, heads, n = q.shape.dims
    row, column = (batch, heads, 1, n), (batch, heads, n, 1)
    single = (batch, heads, 1, 1)
    state = b.mul(state, b.reshape(b.exp(g), shape=single))
    seen = b.matmul(b.reshape(k, shape=row), state)
    change = b.sub(b.reshape(v, shape=row), seen)
    change = b.mul(change, b.reshape(beta, shape=single))
    state = b.add(state, b.mul(b.reshape(k, shape=column), change))
    scaled = b.mul(q, 1.0 / sqrt(n))  # type: ignore[arg-type]  # N is an int
    o = b.matmul(b.reshape(scaled, shape=row), state)
    return [state, b.reshape(o, shape=(batch, heads, n))]
