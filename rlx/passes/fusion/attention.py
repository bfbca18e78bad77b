"""Recognises decomposed attention: softmax(scale · q kᵀ + mask) v -> the attention op.

Matches backwards from the second matmul: weights, mask, softcap, scale, the matmul q kᵀ, then the
views that split heads and repeat them for grouped-query attention.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rlx.ir.attrs import MaskKind
from rlx.ir.dim import Dim, same
from rlx.ir.node import Value
from rlx.passes.fusion.causal_mask import hidden_scores, mask_kind, sees_itself
from rlx.passes.pattern import Match, number, op
from rlx.passes.rewrite import Result, Rule
from rlx.support.records import dataclass

FAR = -1e8  # a score this low has weight 0, whatever is added to it


@dataclass
class _Scores:
    """What happens to the scores q kᵀ before the second matmul."""

    inner: list[Value]  # values that belong to the pattern
    qk: Value | None = None
    keep: Value | None = None  # mask of visible keys
    inverted: bool = False  # … or of hidden keys
    hidden: float = 0.0  # the score of hidden keys
    bias: Value | None = None
    zeroed: Value | None = None  # mask that zeroes rows without visible keys
    scale: float = 1.0
    softcap: float = 0.0


def _without_casts(value: Value, scores: _Scores) -> Value:
    """`value` without casts."""
    while value.node.op.name == "cast":
        scores.inner.append(value)
        value = value.node.inputs[0]
    return value


def _read_weights(weights: Value) -> _Scores | str | None:
    """Match from the attention weights back to q kᵀ; a string says why there is no match."""
    found = _Scores([])
    value = _without_casts(weights, found)
    outer = None
    if value.node.op.name == "where" and number(value.node.inputs[2]) == 0.0:
        found.inner.append(value)
        outer, value = value.node.inputs[:2]
        value = _without_casts(value, found)
    node = value.node
    if node.op.name != "softmax" or node.op.axis % value.shape.rank != value.shape.rank - 1:  # type: ignore[attr-defined]
        return None
    found.inner.append(value)
    scores = _without_casts(node.inputs[0], found)
    value = _read_mask(scores, found)
    if outer is not None:
        if outer is not found.keep and not _is_not_hidden(outer, scores):
            return "the weights have another mask than the scores"
        found.zeroed = outer
    value = _read_softcap(_without_casts(value, found), found)
    value = _read_scale(_without_casts(value, found), found, found.inner)
    if value.node.op.name != "matmul":
        return None
    found.inner.append(value)
    found.qk = value
    return found


def _is_not_hidden(flags: Value, scores: Value) -> bool:
    node = flags.node
    return node.op.name == "ne" and node.inputs[0] is scores and number(node.inputs[1]) == -math.inf


def _read_mask(value: Value, found: _Scores) -> Value:
    node = value.node
    if node.op.name == "where":
        flags, first, second = node.inputs
        for shown, hidden, inverted in ((first, second, False), (second, first, True)):
            low = number(hidden)
            if low is not None and low < -1e3:
                found.inner.append(value)
                found.keep, found.hidden, found.inverted = flags, low, inverted
                return shown
    if node.op.name == "add":
        for scores, bias in (node.inputs, node.inputs[::-1]):
            if _leads_to_qk(scores) and bias.shape.dtype.is_float and bias.shape.rank:
                found.inner.append(value)
                found.bias = bias
                return scores
    return value


def _leads_to_qk(value: Value) -> bool:
    """Whether this operand of a sum is the scores."""
    for _ in range(6):
        node = value.node
        if node.op.name == "matmul":
            return True
        if node.op.name not in ("mul", "div", "cast", "tanh"):
            return False
        value = next((v for v in node.inputs if number(v) is None), node.inputs[0])
    return False


def _factor(value: Value) -> tuple[Value, float] | None:
    """(x, c) of x · c or x / c."""
    node = value.node
    if node.op.name == "mul":
        for x, c in (node.inputs, node.inputs[::-1]):
            found = number(c)
            if found is not None:
                return x, found
    if node.op.name == "div":
        found = number(node.inputs[1])
        if found:
            return node.inputs[0], 1.0 / found
    return None


def _read_softcap(value: Value, found: _Scores) -> Value:
    """c · tanh(s / c)"""
    outer = _factor(value)
    if outer is None or outer[0].node.op.name != "tanh":
        return value
    curve, cap = outer
    inner = _factor(curve.node.inputs[0])
    if inner is None or cap <= 0 or abs(inner[1] * cap - 1) > 1e-6:
        return value
    found.inner += [value, curve, curve.node.inputs[0]]
    found.softcap = cap
    return inner[0]


def _read_scale(value: Value, found: _Scores, inner: list[Value]) -> Value:
    while (factor := _factor(value)) is not None:
        inner.append(value)
        value = factor[0]
        found.scale *= factor[1]
    return value


# -- queries, keys and values ----------------------------------------------------------------


@dataclass
class _Heads:
    """A tensor split into heads, as the attention op takes it."""

    value: Value
    layout: str = "bhsd"
    repeats: int = 1

    @property
    def heads(self) -> Dim:
        return self.value.shape.dims[1 if self.layout == "bhsd" else 2]


def _transposed(m: Match, value: Value, perm: tuple[int, ...]) -> Value:
    """`value` transposed; transposes of transposes are merged."""
    node = value.node
    if node.op.name == "transpose":
        inner: tuple[int, ...] = node.op.axes  # type: ignore[attr-defined]
        perm, value = tuple([inner[p] for p in perm]), node.inputs[0]
    if perm == tuple(range(len(perm))):
        return value
    return m.g.transpose(value, axes=perm)


def _rank_four(m: Match, value: Value) -> Value:
    """[S, D] and [B, S, D] have one head; [B, KV, G, S, D] has KV·G of them."""
    dims = value.shape.dims
    if len(dims) == 4:
        return value
    if len(dims) < 4:
        dims = (*(1,) * (3 - len(dims)), *dims[:-2], 1, *dims[-2:])
    else:
        dims = (dims[0], dims[1] * dims[2], *dims[3:])
    return m.g.reshape(value, shape=dims)


def _heads(m: Match, value: Value, repeated: bool) -> _Heads:
    """`value` [B, H, S, D] without the views that the attention op does itself."""
    found = _Heads(value)
    while True:
        node = found.value.node
        record: Any = node.op
        if record.name == "transpose" and record.axes == (0, 2, 1, 3):
            found.value = node.inputs[0]
            found.layout = "bshd" if found.layout == "bhsd" else "bhsd"
            continue
        source = _unrepeated(m, found) if repeated and found.repeats == 1 else None
        if source is None:
            return found
        found.value, found.repeats = source


def _unrepeated(m: Match, found: _Heads) -> tuple[Value, int] | None:
    """The heads before they were repeated, and the repeat count."""
    axis = 1 if found.layout == "bhsd" else 2
    node = found.value.node
    dims = found.value.shape.dims
    if node.op.name == "reshape" and node.inputs[0].node.op.name == "expand":
        wide = node.inputs[0]
        small = wide.node.inputs[0].shape.dims
        if len(small) != 5 or len(wide.shape.dims) != 5 or small[axis + 1] != 1:
            return None
        group = wide.shape.dims[axis + 1]
        kept = [*small[: axis + 1], *small[axis + 2 :]]
        merged = [*wide.shape.dims[:axis], small[axis] * group, *wide.shape.dims[axis + 2 :]]
        same_heads = all(map(same, merged, dims))
        grown = [i for i in range(5) if i != axis + 1 and not same(small[i], wide.shape.dims[i])]
        if not isinstance(group, int) or not same_heads or grown:
            return None
        source = wide.node.inputs[0]
        inner = source.node.inputs[0] if source.node.op.name == "reshape" else None
        if inner is not None and inner.shape.same_dims(source.shape.with_dims(kept)):
            return inner, group
        return m.g.reshape(source, shape=tuple(kept)), group
    if node.op.name == "gather" and node.op.axis % 4 == axis:  # type: ignore[attr-defined]
        return _ungathered(node.inputs[0], node.inputs[1], axis)
    return None


def _ungathered(x: Value, indices: Value, axis: int) -> tuple[Value, int] | None:
    heads = x.shape.dims[axis]
    if indices.node.op.name != "constant" or not isinstance(heads, int) or indices.shape.rank != 1:
        return None
    order = np.asarray(indices.node.op.data.array)  # type: ignore[attr-defined]
    if not heads or order.size % heads:
        return None
    group = order.size // heads
    return (x, group) if np.array_equal(order, np.repeat(np.arange(heads), group)) else None


# -- the rule --------------------------------------------------------------------------------


def _attention(m: Match) -> Result:
    weights, values = m.root.inputs
    scores = _read_weights(weights)
    if scores is None:
        return None
    if isinstance(scores, str):
        return m.miss(scores)
    assert scores.qk is not None
    taken = _foreign_user(m, scores)
    if taken is not None:
        return m.miss(taken)
    aside: list[Value] = []
    q, k_t = scores.qk.node.inputs
    q, k_t = (_read_scale(v, scores, aside) for v in (q, k_t))
    rank = scores.qk.shape.rank
    if not weights.shape.same_dims(scores.qk.shape):
        return m.miss(f"the mask broadcasts the scores {scores.qk.shape} to {weights.shape}")
    if any(v.shape.rank != rank for v in (q, k_t, values)) or rank not in (2, 3, 4, 5):
        return m.miss(f"queries, keys and values differ in rank: {q.shape}, {k_t.shape}")
    return _build(m, scores, (q, k_t, values), rank)


def _foreign_user(m: Match, scores: _Scores) -> str | None:
    inside = {v.node for v in scores.inner} | {m.root}
    if scores.zeroed is not None:
        inside.add(scores.zeroed.node)
    for value in scores.inner:
        if value in m.editor.returned:
            return f"the {value.node.op.name} inside is a graph output"
        for user in m.editor.users[value]:
            if user not in inside:
                return f"the {value.node.op.name} inside has another user"
    return None


def _build(m: Match, scores: _Scores, given: tuple[Value, Value, Value], rank: int) -> Result:
    swap = (*range(rank - 2), rank - 1, rank - 2)
    q, k, v = given[0], _transposed(m, given[1], swap), given[2]
    mask = scores.bias if scores.keep is None else scores.keep
    if rank == 5 and not all(same(t.shape.dims[2], 1) for t in (k, v)):
        return m.miss("keys differ inside a group of heads")
    if rank == 5 and mask is not None and any(not same(d, 1) for d in mask.shape.dims[-4:-2]):
        return m.miss("the mask differs between heads")
    q4, k4, v4 = (_rank_four(m, t) for t in (q, k, v))
    queries = _heads(m, q4, repeated=False)
    keys, vals = _heads(m, k4, repeated=True), _heads(m, v4, repeated=True)
    if keys.repeats != vals.repeats:
        keys, vals = _Heads(k4), _Heads(v4)
    if keys.layout != vals.layout:
        vals = _Heads(_transposed(m, vals.value, (0, 2, 1, 3)), keys.layout, vals.repeats)
    problem = _mismatch(q4, queries, keys, vals)
    if problem:
        return m.miss(problem)
    masking = _mask(m, scores, q4.shape.dims[2], k4.shape.dims[2], rank)
    if masking is None:
        return m.miss(f"hidden scores are lowered to {scores.hidden} only")
    kind, extra = masking
    head_dim = q4.shape.dims[3]
    default = abs(scores.scale * math.sqrt(head_dim) - 1) < 1e-6  # type: ignore[arg-type]
    out = m.g.attention(
        queries.value, keys.value, vals.value, *extra,
        num_heads=queries.heads, num_kv_heads=keys.heads, head_dim=head_dim,  # type: ignore[arg-type]
        mask_kind=kind,
        scale=None if default else scores.scale, softcap=scores.softcap,
        q_layout=queries.layout, kv_layout=keys.layout,
    )  # fmt: skip
    if queries.layout == "bshd":
        out = m.g.transpose(out, axes=(0, 2, 1, 3))
    if out.shape.rank != rank:
        out = m.g.reshape(out, shape=m.root.output.shape.dims)
    return m.if_same(out)


def _mismatch(q4: Value, queries: _Heads, keys: _Heads, vals: _Heads) -> str:
    """Why q, k and v do not fit the attention op."""
    shapes = f"q {queries.value.shape}, k {keys.value.shape}, v {vals.value.shape}"
    heads, kv_heads, head_dim = queries.heads, keys.heads, q4.shape.dims[3]
    if not all(isinstance(n, int) for n in (heads, kv_heads, vals.heads, head_dim)):
        return f"heads of unknown number or size: {shapes}"
    if kv_heads != vals.heads or not kv_heads or heads % kv_heads:  # type: ignore[operator]
        return f"heads do not divide: {shapes}"
    if not all(same(t.value.shape.dims[3], head_dim) for t in (keys, vals)):
        return f"heads differ in size: {shapes}"
    if not all(same(t.value.shape.dims[0], q4.shape.dims[0]) for t in (keys, vals)):
        return f"batches differ: {shapes}"
    if not all(t.value.shape.dtype is q4.shape.dtype for t in (keys, vals)):
        return f"element types differ: {shapes}"
    return "" if q4.shape.dtype.is_float else f"not floats: {shapes}"


def _mask(
    m: Match, scores: _Scores, rows: Dim, keys: Dim, rank: int
) -> tuple[MaskKind, list[Value]] | None:
    """The mask kind and the mask operand; None when the op has no equivalent."""
    keep, low, bias = scores.keep, scores.hidden, scores.bias
    if keep is not None and scores.inverted:
        keep = m.g.logical_not(keep)
    if bias is not None:
        parts = hidden_scores(bias)
        if parts is not None and parts[1] <= FAR:
            keep, low = parts
    if keep is not None:
        kind = mask_kind(keep, rows, keys)
        if kind is not None and (scores.zeroed is not None or sees_itself(rows, keys)):
            return kind, []
        if bias is None and low == -math.inf:
            return MaskKind.CUSTOM, [_mask_of_rank_four(m, keep, rank)]
        if bias is None and low > FAR:
            return None
        if bias is None:
            # a row without visible keys must stay the mean of all values: its scores are equal
            element = m.root.output.shape.dtype
            numbers = [m.g.constant(n, element) for n in (0.0, low)]
            bias = m.g.where(keep, *numbers)
    if bias is None:
        return MaskKind.NONE, []
    return MaskKind.BIAS, [_mask_of_rank_four(m, bias, rank)]


def _mask_of_rank_four(m: Match, mask: Value, rank: int) -> Value:
    """A mask of scores [B, Sq, Sk] or [B, KV, G, Sq, Sk] for scores [B, H, Sq, Sk]."""
    dims = mask.shape.dims
    if rank == 3 and len(dims) == 3:
        return m.g.reshape(mask, shape=(dims[0], 1, *dims[1:]))
    if rank == 5 and len(dims) >= 3:  # no difference between heads, as was checked
        return m.g.reshape(mask, shape=(*dims[:-4], 1, *dims[-2:]))
    return mask


ATTENTION: tuple[Rule, ...] = (
    Rule("decomposed attention", op("matmul", having="softmax"), _attention),
    Rule("decomposed attention", op("matmul", having="where"), _attention),
    Rule("decomposed attention", op("matmul", having="cast"), _attention),
)
