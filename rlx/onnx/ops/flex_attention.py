"""Attention whose scores and probabilities a subgraph changes; the rest are functions of ONNX."""

from __future__ import annotations

import math
from typing import Any

import rlx.numpy as xp
from rlx.ir.dtype import f32, f64
from rlx.numpy.array import Array
from rlx.onnx.call import Call
from rlx.onnx.interpreter import as_array
from rlx.onnx.table import op


@op("FlexAttention", domain="ai.onnx.preview")
def flex_attention(node: Call, q: Array, k: Array, v: Array) -> Array:
    """prob_mod(softmax(score_mod(q kᵀ · scale))) v, with key heads shared by groups of heads."""
    default = f64 if q.dtype is f64 else f32
    work = node.dtype("softmax_precision") if node.int("softmax_precision", 0) else default
    scale = node.float("scale", 1.0 / math.sqrt(int(q.shape[-1])))
    groups = int(q.shape[1]) // int(k.shape[1])
    if groups > 1:
        k, v = (xp.repeat(x, groups, axis=1) for x in (k, v))
    scores = xp.matmul(q.astype(work), xp.matrix_transpose(k.astype(work))) * float(scale)
    scores = _changed(node, "score_mod", scores)
    probabilities = _changed(node, "prob_mod", xp.softmax(scores, axis=-1))
    return xp.matmul(probabilities, v.astype(work)).astype(q.dtype)


def _changed(node: Call, name: str, x: Array) -> Any:
    if not node.has(name):
        return x
    return as_array(node.run(node.graph(name), x)[0])
