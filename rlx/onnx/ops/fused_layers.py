"""Microsoft's operators of exported transformers: activations, norms and products in one."""

from __future__ import annotations

from typing import Any

import rlx.numpy as xp
from rlx.ir.dtype import f32
from rlx.numpy.array import Array
from rlx.onnx.call import Call
from rlx.onnx.graph_ops import graph_op
from rlx.onnx.ops.convolution import conv
from rlx.onnx.table import op

DOMAIN = "com.microsoft"


# -- activations ----------------------------------------------------------------------------------


@op("Gelu", domain=DOMAIN)
def gelu(node: Call, x: Array) -> Array:
    return xp.gelu(x)


@op("BiasGelu", domain=DOMAIN)
def bias_gelu(node: Call, x: Array, bias: Array) -> Array:
    return xp.gelu(x + bias)


@op("FastGelu", domain=DOMAIN)
def fast_gelu(node: Call, x: Array, bias: Array | None = None) -> Array:
    return xp.gelu_tanh(x if bias is None else x + bias)


@op("QuickGelu", domain=DOMAIN)
def quick_gelu(node: Call, x: Array) -> Array:
    return x * xp.sigmoid(float(node.float("alpha", 1.702)) * x)


@op("BiasSplitGelu", domain=DOMAIN)
def bias_split_gelu(node: Call, x: Array, bias: Array) -> Array:
    made = x + bias
    half = made.shape[-1] // 2
    return made[..., :half] * xp.gelu(made[..., half:])


@op("BiasAdd", domain=DOMAIN)
def bias_add(node: Call, x: Array, bias: Array, skip: Array) -> Array:
    return x + bias + skip


@op("BiasSoftmax", domain=DOMAIN)
def bias_softmax(node: Call, x: Array, bias: Array) -> Array:
    axis = node.int("axis", 1) % x.ndim
    if axis != x.ndim - 1:
        raise node.unsupported("softmax over more than the last axis", axis)
    if not node.int("is_inner_broadcast", 1):  # over the axes in front of the last ones
        shape = (*bias.shape[: bias.ndim - 1], *[1] * (x.ndim - bias.ndim), bias.shape[-1])
        bias = xp.reshape(bias, shape)
    return xp.softmax(x + bias, axis=-1)


# -- norms ----------------------------------------------------------------------------------------


@op("SimplifiedLayerNormalization")
@op("SimplifiedLayerNormalization", domain=DOMAIN)
def simplified_layer_normalization(node: Call, x: Array, scale: Array) -> Any:
    if node.int("axis", -1) % x.ndim != x.ndim - 1:
        raise node.unsupported("a norm over more than the last axis", node.int("axis"))
    eps = float(node.float("epsilon", 1e-5))
    made = graph_op("rms_norm", x, scale, eps=eps).astype(scale.dtype)
    if not node.wants(1):
        return made
    wide = x.astype(f32)
    return made, 1.0 / xp.sqrt(xp.mean(xp.square(wide), axis=-1, keepdims=True) + eps)


@op("SkipSimplifiedLayerNormalization", domain=DOMAIN)
def skip_simplified_layer_normalization(
    node: Call, x: Array, skip: Array, gamma: Array, bias: Array | None = None
) -> Any:
    total = _skipped(x, skip, bias)
    made = graph_op("rms_norm", total, gamma, eps=float(node.float("epsilon", 1e-5)))
    return made, None, None, total


@op("SkipLayerNormalization", domain=DOMAIN)
def skip_layer_normalization(
    node: Call, x: Array, skip: Array, gamma: Array, beta: Array | None = None,
    bias: Array | None = None,
) -> Any:  # fmt: skip
    total = _skipped(x, skip, bias)
    return _layer_norm(total, gamma, beta, float(node.float("epsilon", 1e-12))), None, None, total


def _skipped(x: Array, skip: Array, bias: Array | None) -> Array:
    total = x + skip
    return total if bias is None else total + bias


def _layer_norm(x: Array, gamma: Array, beta: Array | None, eps: float) -> Array:
    operands = [x, gamma] if beta is None else [x, gamma, beta]
    return graph_op("layer_norm", *operands, eps=eps)


@op("EmbedLayerNormalization", domain=DOMAIN)
def embed_layer_normalization(
    node: Call, ids: Array, segments: Array | None, words: Array, places: Array,
    kinds: Array | None, gamma: Array, beta: Array, mask: Array | None = None,
    positions: Array | None = None,
) -> Any:  # fmt: skip
    total = graph_op("gather", words, ids, axis=0)
    if positions is None:
        positions = xp.arange(ids.shape[1], dtype=xp.int64)
    total = total + graph_op("gather", places, positions, axis=0)
    if segments is not None and kinds is not None:
        total = total + graph_op("gather", kinds, segments, axis=0)
    made = _layer_norm(total, gamma, beta, float(node.float("epsilon", 1e-12)))
    if mask is not None:
        lengths = xp.sum(mask.astype(xp.int32), axis=1, dtype=xp.int32)
    else:
        lengths = xp.zeros((ids.shape[0],), dtype=xp.int32)
    return made, lengths, total


@op("GroupNorm", domain=DOMAIN)
def group_norm(node: Call, x: Array, gamma: Array, beta: Array) -> Array:
    groups, eps = node.int("groups"), float(node.float("epsilon", 1e-5))
    last = bool(node.int("channels_last", 1))
    moved = xp.moveaxis(x, -1, 1) if last else x
    rows = xp.reshape(moved.astype(f32), (moved.shape[0], groups, -1))
    centred = rows - xp.mean(rows, axis=2, keepdims=True)
    made = centred / xp.sqrt(xp.mean(xp.square(centred), axis=2, keepdims=True) + eps)
    column = (1, -1, *[1] * (x.ndim - 2))
    made = xp.reshape(made, moved.shape) * xp.reshape(gamma, column) + xp.reshape(beta, column)
    if node.int("activation", 0):
        made = xp.silu(made)
    made = made.astype(x.dtype)
    return xp.moveaxis(made, 1, -1) if last else made


# -- products -------------------------------------------------------------------------------------


@op("FusedMatMul", "TransposeMatMul", domain=DOMAIN)
def fused_matmul(node: Call, a: Array, b: Array) -> Array:
    a = _batch_turned(a) if node.int("transBatchA", 0) else a
    b = _batch_turned(b) if node.int("transBatchB", 0) else b
    a = xp.matrix_transpose(a) if node.int("transA", 0) and a.ndim > 1 else a
    b = xp.matrix_transpose(b) if node.int("transB", 0) and b.ndim > 1 else b
    made, alpha = xp.matmul(a, b), float(node.float("alpha", 1.0))
    return made if alpha == 1.0 else made * alpha


def _batch_turned(x: Array) -> Array:
    """[first, batch …, last] as [batch …, first, last]."""
    return xp.moveaxis(x, 0, -2)


_ACTIVATIONS = {
    "Relu": xp.relu, "Sigmoid": xp.sigmoid, "Tanh": xp.tanh,
    "LeakyRelu": lambda x, a=0.01: graph_op("leaky_relu", x, alpha=float(a)),
    "Clip": lambda x, low, high: xp.clip(x, float(low), float(high)),
    "HardSigmoid": lambda x, a=0.2, b=0.5: xp.clip(float(a) * x + float(b), 0.0, 1.0),
}  # fmt: skip


def _activated(node: Call, x: Array, parameters: Any) -> Array:
    name = node.text("activation", "")
    if not name:
        return x
    function: Any = _ACTIVATIONS.get(name)
    if function is None:
        raise node.fault("unknown activation", got=name, expected=", ".join(_ACTIVATIONS))
    return function(x, *parameters)  # type: ignore[no-any-return]


@op("FusedConv", domain=DOMAIN)
def fused_conv(
    node: Call, x: Array, w: Array, bias: Array | None = None, residual: Array | None = None
) -> Array:
    made = conv(node, x, w, bias)
    made = made if residual is None else made + residual
    return _activated(node, made, node.floats("activation_params", ()))


@op("FusedGemm", domain=DOMAIN)
def fused_gemm(node: Call, a: Array, b: Array, c: Array | None = None) -> Array:
    a = xp.matrix_transpose(a) if node.int("transA", 0) else a
    b = xp.matrix_transpose(b) if node.int("transB", 0) else b
    made = xp.matmul(a, b) * float(node.float("alpha", 1.0))
    if c is not None:
        made = made + c * float(node.float("beta", 1.0))
    names = ("activation_alpha", "activation_beta", "activation_gamma")
    return _activated(node, made, [node.float(n) for n in names if node.has(n)])


@op("ComplexMul", domain=DOMAIN)
def complex_mul(node: Call, a: Array, b: Array) -> Array:
    real = a[..., 0] * b[..., 0] - a[..., 1] * b[..., 1]
    return xp.stack([real, a[..., 0] * b[..., 1] + a[..., 1] * b[..., 0]], axis=-1)


@op("ExpandDims", domain=DOMAIN, known=(1,))
def expand_dims(node: Call, x: Array, axis: Any) -> Array:
    return xp.expand_dims(x, int(axis))


@op("Inverse", domain=DOMAIN)
def inverse(node: Call, x: Array) -> Array:
    return xp.linalg.inv(x)


@op("CDist", domain=DOMAIN)
def distances(node: Call, a: Array, b: Array) -> Array:
    squares = xp.sum(xp.square(xp.expand_dims(a, 1) - xp.expand_dims(b, 0)), axis=-1)
    return squares if node.text("metric", "sqeuclidean") == "sqeuclidean" else xp.sqrt(squares)
