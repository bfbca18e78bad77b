"""Linear maps, lookups, adapters and experts. Weights have PyTorch's layout, [out, in]."""

from __future__ import annotations

from typing import Any

import numpy as np

import rlx.numpy as rnp
from rlx import random
from rlx.errors import InputError, ShapeError
from rlx.ir.dtype import DType, i64
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.nn.functional.operands import (
    ArrayLike,
    call,
    call_many,
    fixed,
    require_option,
    require_rank,
    root,
)
from rlx.nn.functional.quantized import (
    QuantizedWeight,
    quantized_embedding,
    quantized_linear,
)
from rlx.numpy.array import Array
from rlx.numpy.dispatch import as_array
from rlx.numpy.trace import Size


def _linear(g: Graph, x: Value, weight: Value, bias: Value | None) -> Any:
    y = g.matmul(x, g.transpose(weight, (1, 0)) if weight.shape.rank == 2 else weight)
    return y if bias is None else g.add(y, bias)


def linear(
    x: ArrayLike, weight: ArrayLike | QuantizedWeight, bias: ArrayLike | None = None
) -> Array:
    """x · weightᵀ + bias for x [..., in] and a weight [out, in], which may be quantised."""
    if isinstance(weight, QuantizedWeight):
        return quantized_linear(x, weight, bias)
    made = require_rank(weight, (1, 2), "linear", "a weight [out, in]")
    return call(_linear, [x, made, bias])


def _bilinear(g: Graph, a: Value, b: Value, weight: Value, bias: Value | None) -> Any:
    lead = a.shape.dims[:-1]
    rows = g.reshape(a, (-1, 1, a.shape.dims[-1], 1))
    columns = g.reshape(b, (-1, 1, 1, b.shape.dims[-1]))
    y = g.sum(g.mul(g.mul(rows, columns), weight), axis=(2, 3))
    y = g.reshape(y, (*lead, weight.shape.dims[0]))
    return y if bias is None else g.add(y, bias)


def bilinear(a: ArrayLike, b: ArrayLike, weight: ArrayLike, bias: ArrayLike | None = None) -> Array:
    """aᵀ · weight[k] · b + bias[k] for a [..., m], b [..., n] and a weight [out, m, n]."""
    made = require_rank(weight, (3,), "bilinear", "a weight [out, m, n]")
    return call(_bilinear, [a, b, made, bias])


def _embedding(g: Graph, ids: Value, weight: Value) -> Any:
    return g.gather(weight, ids, axis=0)


def embedding(ids: ArrayLike, weight: ArrayLike | QuantizedWeight) -> Array:
    """Rows `ids` of a table [entries, width], which may be quantised."""
    numbers = as_array(ids)
    if not numbers.dtype.is_integer:
        raise InputError("not ids", where="embedding", got=numbers.dtype, expected="integers")
    if isinstance(weight, QuantizedWeight):
        return quantized_embedding(numbers, weight)
    return call(_embedding, [numbers, weight])


def _one_hot(g: Graph, ids: Value, classes: int, dtype: DType) -> Any:
    column = g.reshape(ids, (*ids.shape.dims, 1))
    numbers = g.iota((classes,), dtype=i64)
    return g.cast(g.eq(g.cast(column, i64), numbers), dtype)


def one_hot(ids: ArrayLike, num_classes: int, dtype: Any = rnp.float32) -> Array:
    """1 at the id along a new last axis, 0 elsewhere; an id out of range gives zeros."""
    numbers = as_array(ids)
    if not numbers.dtype.is_integer:
        raise InputError("not ids", where="one_hot", got=numbers.dtype, expected="integers")
    return call(_one_hot, [numbers], int(num_classes), DType.of(dtype))


def _lora(
    g: Graph, x: Value, weight: Value, a: Value, b: Value, bias: Value | None, scale: float
) -> Any:
    weight, a, b = (g.transpose(v, (1, 0)) for v in (weight, a, b))
    y = g.lora_matmul(x, weight, a, b, scale=scale)
    return y if bias is None else g.add(y, bias)


def lora_linear(
    x: ArrayLike, weight: ArrayLike, a: ArrayLike, b: ArrayLike, bias: ArrayLike | None = None,
    scale: float = 1.0,
) -> Array:  # fmt: skip
    """`linear` with an adapter, a [rank, in] and b [out, rank]:
    x · weightᵀ + scale · (x · aᵀ) · bᵀ + bias."""
    return call(_lora, [x, weight, a, b, bias], float(scale))


def _grouped(g: Graph, x: Value, weight: Value, expert: Value) -> Any:
    return g.grouped_matmul(x, weight, expert)


def grouped_matmul(x: ArrayLike, weight: ArrayLike, expert: ArrayLike) -> Array:
    """Row t of x [T, in] times the weight of its expert: weight [E, in, out], expert [T]."""
    return call(_grouped, [x, weight, expert])


def _routes(g: Graph, logits: Value, k: int, scoring: str, normalize: bool) -> Any:
    every = g.softmax(logits, axis=-1) if scoring == "softmax" else g.sigmoid(logits)
    scores, chosen = g.top_k(every, k=k, axis=-1)
    if normalize:
        scores = g.div(scores, g.sum(scores, axis=(-1,), keepdims=True))
    return scores, chosen


def route_top_k(
    logits: ArrayLike, k: int, scoring: str = "softmax", normalize: bool = True
) -> tuple[Array, Array]:
    """The k experts that a router prefers for each token: (scores, numbers), [..., k] each."""
    require_option(scoring, ("softmax", "sigmoid"), "route_top_k.scoring")
    scores, chosen = call_many(_routes, [logits], int(k), scoring, bool(normalize))
    return scores, chosen


def _moe(
    g: Graph, x: Value, scores: Value, chosen: Value, gate: Value, up: Value, down: Value, act: str
) -> Any:
    width, k = x.shape.dims[-1], chosen.shape.dims[-1]
    flat = g.reshape(x, (-1, width))
    tokens = flat.shape.dims[0]
    rows = g.expand(g.reshape(flat, (tokens, 1, width)), (tokens, k, width))
    rows, expert = g.reshape(rows, (tokens * k, width)), g.reshape(chosen, (tokens * k,))
    hidden = getattr(g, act)(g.grouped_matmul(rows, gate, expert))
    hidden = g.mul(hidden, g.grouped_matmul(rows, up, expert))
    y = g.grouped_matmul(hidden, down, expert)
    y = g.reshape(y, (tokens, k, down.shape.dims[2]))
    y = g.sum(g.mul(y, g.reshape(scores, (tokens, k, 1))), axis=(1,))
    return g.reshape(y, (*x.shape.dims[:-1], down.shape.dims[2]))


def mixture_of_experts(
    x: ArrayLike, router: ArrayLike, gate: ArrayLike, up: ArrayLike, down: ArrayLike, k: int,
    activation: str = "silu", scoring: str = "softmax", normalize: bool = True,
) -> Array:  # fmt: skip
    """Each token of x [..., in] through the k experts its router [E, in] prefers, weighted by their
    scores. An expert is (activation(x · gate) · (x · up)) · down, [E, in, hidden] and
    [E, hidden, out]."""
    require_option(activation, ("silu", "gelu", "gelu_tanh", "relu"), "activation")
    scores, chosen = route_top_k(linear(x, router), k, scoring, normalize)
    return call(_moe, [x, scores, chosen, gate, up, down], activation)


def _dropped(g: Graph, x: Value, kept: Value, scale: float) -> Any:
    return g.where(kept, g.mul(x, scale), 0.0)


def dropout(
    x: ArrayLike, p: float = 0.5, key: Array | None = None, training: bool = True, axes: int = 0
) -> Array:
    """Elements replaced by 0 with probability p, the others scaled by 1 / (1 − p).

    With `axes` = n > 0 whole slices along all but the first n axes fall out together, as channels
    do in PyTorch's Dropout2d (n = 2).
    """
    made = as_array(x)
    if not 0 <= p <= 1:
        raise InputError("not a probability", where="dropout", got=p, expected="0 … 1")
    if not training or p == 0:
        return made
    if key is None:
        raise InputError(
            "dropout draws random numbers", where="dropout", got="no key",
            hint="give key=, or eval() for a network that is not trained",
        )  # fmt: skip
    shape: tuple[int | Size, ...] = made.shape
    if axes:
        shape = (*shape[:axes], *[1] * (made.ndim - axes))
    kept = random.dropout_mask(key, float(p), shape)  # type: ignore[arg-type]
    return call(_dropped, [made, kept], 1 / (1 - p) if p < 1 else 0.0)


def _cosine(g: Graph, a: Value, b: Value, axis: int, eps: float) -> Any:
    dot, aa, bb = (g.sum(g.mul(u, v), axis=(axis,)) for u, v in ((a, b), (a, a), (b, b)))
    return g.div(dot, g.mul(g.maximum(root(g, aa), eps), g.maximum(root(g, bb), eps)))


def cosine_similarity(a: ArrayLike, b: ArrayLike, axis: int = -1, eps: float = 1e-8) -> Array:
    """The cosine of the angle between vectors along an axis."""
    left, right = rnp.broadcast_arrays(a, b) if _differs(a, b) else (as_array(a), as_array(b))
    return call(_cosine, [left, right], axis, float(eps))


def _differs(a: ArrayLike, b: ArrayLike) -> bool:
    return as_array(a).ndim != as_array(b).ndim


def _top_k(g: Graph, x: Value, k: int, axis: int, largest: bool) -> Any:
    return g.top_k(x, k=k, axis=axis, largest=largest)


def top_k(x: ArrayLike, k: int, axis: int = -1, largest: bool = True) -> tuple[Array, Array]:
    """The k greatest (or least) elements along an axis in order, and their indices."""
    made = as_array(x)
    if not made.ndim:
        raise ShapeError("no axis", where="top_k", got="an array without axes")
    values, indices = call_many(_top_k, [made], int(k), axis, bool(largest))
    return values, indices


def _sample(g: Graph, logits: Value, rng: Value, *settings: Any) -> Any:
    t, k, p, m = settings
    rng = fixed(g, rng, (2,))
    return g.sample(logits, rng, temperature=t, top_k=k, top_p=p, min_p=m)[0]


def sample(
    logits: ArrayLike, key: Array, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
    min_p: float = 0.0,
) -> Array:  # fmt: skip
    """Tokens i32 [...] drawn from logits [..., vocabulary], after temperature, top-k, top-p, min-p.
    Temperature 0 takes the likeliest."""
    seed = random.bits(key, (1,), rnp.uint64)
    rng = rnp.concat([seed, rnp.asarray(np.zeros(1, np.uint64))])
    options = (float(temperature), int(top_k), float(top_p), float(min_p))
    return call(_sample, [logits, rng], *options)
