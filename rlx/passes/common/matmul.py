"""Products in terms of the one matmul, and packed weights unpacked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx.ir.blocks._parts import cast, wide
from rlx.ir.dtype import f32, i32, promote
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.passes.common.registry import common


@common("dot_general")
def dot_general(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    a, b = inputs
    (batch, contract, free), (b_batch, b_contract, b_free) = op.axes(a.shape.rank, b.shape.rank)
    sizes = [a.shape.dims[i] for i in batch]
    rows, columns = [a.shape.dims[i] for i in free], [b.shape.dims[j] for j in b_free]
    terms = a.shape.with_dims([a.shape.dims[i] for i in contract]).num_elements
    left = g.transpose(a, axes=batch + free + contract)
    left = g.reshape(left, shape=(*sizes, a.shape.with_dims(rows).num_elements, terms))
    right = g.transpose(b, axes=b_batch + b_contract + b_free)
    right = g.reshape(right, shape=(*sizes, terms, b.shape.with_dims(columns).num_elements))
    return g.reshape(g.matmul(left, right), shape=(*sizes, *rows, *columns))


@common("lora_matmul")
def lora_matmul(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    x, w, a, b = (wide(g, v) for v in inputs)
    adapter = g.mul(g.matmul(g.matmul(x, a), b), op.scale)
    result = promote(*[v.shape.dtype for v in inputs])
    return cast(g, g.add(g.matmul(x, w), adapter), result)


@common("grouped_matmul")
def grouped_matmul(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    """Every row with a copy of its expert's weight."""
    x, w, expert = inputs
    return _row_products(g, x, g.gather(w, expert, axis=0))


def _row_products(g: Graph, x: Value, weights: Value) -> Value:
    """x [T, K] with weights [T, K, N], row by row."""
    tokens, k = x.shape.dims
    rows = g.matmul(g.reshape(x, shape=(tokens, 1, k)), weights)
    return g.reshape(rows, shape=(tokens, weights.shape.dims[2]))


@common("dequant_grouped_matmul")
def dequant_grouped_matmul(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    x, w, expert, *sides = inputs
    weights = g.dequant_moe_weights(w, expert, *sides, scheme=op.scheme)
    return cast(g, _row_products(g, _computed(g, x), weights), x.shape.dtype)


@common("dequant_matmul")
def dequant_matmul(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    """The weight as the only expert, unpacked to [K, N]."""
    x, *parts = inputs
    first = g.constant([0], i32)
    packed = [g.reshape(p, shape=(1, *p.shape.dims)) for p in parts]
    weights = g.dequant_moe_weights(packed[0], first, *packed[1:], scheme=op.scheme)
    weight = g.reshape(weights, shape=weights.shape.dims[1:])
    return cast(g, g.matmul(_computed(g, x), weight), x.shape.dtype)


def _computed(g: Graph, x: Value) -> Value:
    return x if x.shape.dtype.bytes > 4 else cast(g, x, f32)


@common("dequant_gather")
def dequant_gather(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    """Every row of the table as an expert of one output."""
    table, ids, *sides = inputs
    parts = [g.reshape(p, shape=(p.shape.dims[0], 1, *p.shape.dims[1:])) for p in (table, *sides)]
    flat = g.reshape(ids, shape=(ids.shape.num_elements,))
    rows = g.dequant_moe_weights(parts[0], flat, *parts[1:], scheme=op.scheme)
    return g.reshape(rows, shape=(*ids.shape.dims, rows.shape.dims[1]))


@common("dequant_moe_weights")
def dequant_moe_weights(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    """Schemes whose scales lie beside the weights; the blocks of GGUF need a kernel."""
    w, expert, *sides = inputs
    scheme = op.scheme
    if scheme.ggml_type is not None or not scheme.has_scale:
        return None
    packed, *sides = (g.gather(v, expert, axis=0) for v in (w, *sides))
    q = _nibbles(g, packed) if scheme.bits_per_element == 4 else packed
    q = cast(g, q, f32)
    tokens, n, k = q.shape.dims
    groups = sides[0].shape.dims[2]
    q = g.reshape(q, shape=(tokens, n, groups, k // groups))  # type: ignore[operator]
    if scheme.has_zero_point:
        q = g.sub(q, _per_group(g, cast(g, sides[1], f32)))
    elif scheme.bits_per_element == 4:
        q = g.sub(q, 8.0)  # symmetric nibbles are stored with 8 added
    q = g.mul(q, _per_group(g, sides[0]))
    return g.transpose(g.reshape(q, shape=(tokens, n, k)), axes=(0, 2, 1))


def _per_group(g: Graph, side: Value) -> Value:
    return g.reshape(side, shape=(*side.shape.dims, 1))


def _nibbles(g: Graph, packed: Value) -> Value:
    """[..., n] bytes as [..., 2n] numbers 0 … 15, the low nibble first."""
    element = packed.shape.dtype
    low = g.bitwise_and(packed, g.constant(15, element))
    high = g.shift_right(packed, g.constant(4, element))
    pairs = [g.reshape(v, shape=(*v.shape.dims, 1)) for v in (low, high)]
    *outer, n = packed.shape.dims
    joined = g.concat(*pairs, axis=packed.shape.rank)
    return g.reshape(joined, shape=(*outer, n * 2))
