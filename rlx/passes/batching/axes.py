"""Ops that name axes: views, copies, reductions, and ops along one axis. Each axis is one more."""

from __future__ import annotations

from typing import Any

from rlx.ir.graph import Graph
from rlx.ir.ops._common import normalize_axes
from rlx.ir.shape import normalize_axis
from rlx.passes.batching.rules import (
    Flags,
    MappedAxis,
    Values,
    aligned,
    batched,
    one,
    spread_all,
)


@batched("reduction", "flip")
def _along_axes(op: Any, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis) -> Values:
    axes = normalize_axes(op.axis, one(inputs[0]).rank)
    return g.append_node(op.replace(axis=tuple(a + 1 for a in axes)), inputs).outputs


@batched(
    "softmax", "log_softmax", "cumsum", "cumprod", "sort", "argsort", "argmax", "argmin", "top_k",
    "fft", "rfft", "irfft", "l2_norm", "narrow",
)  # fmt: skip
def _along_axis(op: Any, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis) -> Values:
    axis = normalize_axis(op.axis, one(inputs[0]).rank)
    return g.append_node(op.replace(axis=axis + 1), inputs).outputs


@batched("reshape")
def _reshape(op: Any, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis) -> Values:
    (x,) = inputs
    return [g.reshape(x, shape=(over.size, *op.resolved(one(x).dims)))]


@batched("transpose")
def _transpose(op: Any, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis) -> Values:
    return [g.transpose(inputs[0], axes=(0, *(a + 1 for a in op.axes)))]


@batched("slice")
def _slice(op: Any, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis) -> Values:
    whole = op.replace(starts=(None, *op.starts), stops=(None, *op.stops), steps=(1, *op.steps))
    return g.append_node(whole, inputs).outputs


@batched("expand")
def _expand(op: Any, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis) -> Values:
    x = aligned(g, inputs[0], True, len(op.shape))
    return [g.expand(x, shape=(over.size, *op.shape))]


@batched("pad")
def _pad(op: Any, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis) -> Values:
    return g.append_node(op.replace(low=(0, *op.low), high=(0, *op.high)), inputs).outputs


@batched("concat")
def _concat(op: Any, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis) -> Values:
    parts = spread_all(g, inputs, mapped, over)
    axis = normalize_axis(op.axis, one(parts[0]).rank)
    return g.append_node(op.replace(axis=axis + 1), parts).outputs
