"""Uses of every block, each with an independent NumPy formula in f64; sequences are apart."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from rlx.ir.quant.scheme import QuantScheme, encode

B, S, K = 2, 5, 8  # batch, seq, width


class Case(NamedTuple):
    shapes: dict[str, Any]  # tensor: dims as the graph states them
    arrays: dict[str, np.ndarray]
    build: Callable[..., Any]  # (module, *values)
    formula: Callable[..., Any]  # (*arrays in f64)


CASES: dict[str, Case] = {}
rng = np.random.default_rng(7)
SIZES = {"batch": B, "seq": S, "past_seq": 3, "frames": 9}


def case(name: str, build: Callable[..., Any], formula: Callable[..., Any], **tensors: Any) -> None:
    """Tensors are dims (random f32 is drawn) or (dims, array)."""
    shapes, arrays = {}, {}
    for tensor, given in tensors.items():
        dims, array = given if isinstance(given, tuple) else (given, None)
        if array is None:
            sizes = [SIZES[d] if isinstance(d, str) else d for d in dims]
            array = rng.normal(size=sizes).astype(np.float32)
        shapes[tensor], arrays[tensor] = dims, array
    CASES[name] = Case(shapes, arrays, build, formula)


X = ["batch", "seq", K]


# -- formulas ---------------------------------------------------------------------------------


def gelu(x: Any) -> Any:
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def silu(x: Any) -> Any:
    return x / (1 + np.exp(-x))


def rms(x: Any, gamma: Any, eps: float = 1e-6) -> Any:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * gamma


def layer(x: Any, gamma: Any, eps: float = 1e-5) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * gamma


def softmax(x: Any) -> Any:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# -- matmuls ----------------------------------------------------------------------------------

case("linear", lambda m, x, w: m.linear(x, w), lambda x, w: x @ w, x=X, w=[K, 3])
case(
    "linear/bias-gelu",
    lambda m, x, w, b: m.linear(x, w, bias=b, activation="gelu"),
    lambda x, w, b: gelu(x @ w + b),
    x=X, w=[K, 3], b=[3],
)  # fmt: skip
case(
    "linear/transposed",
    lambda m, x, w: m.linear(x, w, activation="relu", transposed=True),
    lambda x, w: np.maximum(x @ w.T, 0),
    x=X, w=[3, K],
)  # fmt: skip
case(
    "linear_fused",
    lambda m, x, w, b: m.linear_fused(x, w, b, "silu"),
    lambda x, w, b: silu(x @ w + b),
    x=X, w=[K, 3], b=[3],
)  # fmt: skip
case(
    "shared_linear_pair",
    lambda m, x, w1, w2: m.shared_linear_pair(x, w1, w2),
    lambda x, w1, w2: (x @ w1, x @ w2),
    x=X, w1=[K, 3], w2=[K, 4],
)  # fmt: skip
case(
    "lora_linear",
    lambda m, x, w, a, b, bias: m.lora_linear(x, w, a, b, bias, scale=0.5, activation="tanh"),
    lambda x, w, a, b, bias: np.tanh(x @ w + 0.5 * (x @ a @ b) + bias),
    x=X, w=[K, 3], a=[K, 2], b=[2, 3], bias=[3],
)  # fmt: skip

_scheme = QuantScheme.parse("Q8_0")
_dense = rng.integers(-127, 128, (3, 64)).astype(np.float32)
_dense[:, ::32] = 127.0  # the largest of each block, so that its scale is 1 and packing is exact
case(
    "dequant_matmul",
    lambda m, x, w: m.dequant_matmul(x, w, scheme=_scheme),
    lambda x, w: x @ _dense.T.astype(float),
    x=["batch", "seq", 64], w=([3, 68], np.asarray(encode(_scheme, _dense).data)),
)  # fmt: skip

# -- norms ------------------------------------------------------------------------------------

case("rms_norm", lambda m, x, g: m.rms_norm(x, g), rms, x=X, g=[K])
case(
    "rms_norm/beta",
    lambda m, x, g, b: m.rms_norm(x, g, beta=b, eps=0.1),
    lambda x, g, b: rms(x, g, 0.1) + b,
    x=X, g=[K], b=[K],
)  # fmt: skip
case(
    "layer_norm",
    lambda m, x, g: m.layer_norm(x, g, eps=0.1),
    lambda x, g: layer(x, g, 0.1),
    x=X, g=[K],
)  # fmt: skip
case(
    "layer_norm/beta",
    lambda m, x, g, b: m.layer_norm(x, g, b),
    lambda x, g, b: layer(x, g) + b,
    x=X, g=[K], b=[K],
)  # fmt: skip
case(
    "residual_rms_norm",
    lambda m, x, r, g, b: m.residual_rms_norm(x, r, g, beta=b, eps=1e-3),
    lambda x, r, g, b: (rms(x + r, g, 1e-3) + b, x + r),
    x=X, r=X, g=[K], b=[K],
)  # fmt: skip
case(
    "residual_layer_norm",
    lambda m, x, r, g: m.residual_layer_norm(x, r, g),
    lambda x, r, g: (layer(x + r, g), x + r),
    x=X, r=X, g=[K],
)  # fmt: skip

# -- feed-forward -----------------------------------------------------------------------------

_ffn = {"x": X, "up": [K, 12], "gate": [K, 12], "down": [12, K]}
case(
    "swiglu_ffn",
    lambda m, x, up, gate, down: m.swiglu_ffn(x, up, gate, down),
    lambda x, up, gate, down: (silu(x @ gate) * (x @ up)) @ down,
    **_ffn,
)
case(
    "geglu_ffn",
    lambda m, x, up, gate, down: m.geglu_ffn(x, up, gate, down),
    lambda x, up, gate, down: (gelu(x @ gate) * (x @ up)) @ down,
    **_ffn,
)
case(
    "gelu_ffn",
    lambda m, x, up, down: m.gelu_ffn(x, up, down),
    lambda x, up, down: gelu(x @ up) @ down,
    x=X, up=[K, 12], down=[12, K],
)  # fmt: skip
case(
    "gelu_ffn/down-bias",
    lambda m, x, up, down, b: m.gelu_ffn(x, up, down, down_bias=b),
    lambda x, up, down, b: gelu(x @ up) @ down + b,
    x=X, up=[K, 12], down=[12, K], b=[K],
)  # fmt: skip
case(
    "gelu_ffn/both",
    lambda m, x, up, down, a, b: m.gelu_ffn(x, up, down, a, b, activation="relu"),
    lambda x, up, down, a, b: np.maximum(x @ up + a, 0) @ down + b,
    x=X, up=[K, 12], down=[12, K], a=[12], b=[K],
)  # fmt: skip


def _moe(x: Any, router: Any, up: Any, gate: Any, down: Any, normalize: bool = True) -> Any:
    out = np.zeros_like(x)
    for index in np.ndindex(*x.shape[:-1]):
        scores = softmax(x[index] @ router)
        chosen = np.argsort(-scores, kind="stable")[:2]
        total = scores[chosen].sum() if normalize else 1.0
        for e in chosen:
            hidden = silu(x[index] @ gate[e]) * (x[index] @ up[e])
            out[index] += scores[e] / total * (hidden @ down[e])
    return out


_experts = {"x": X, "router": [K, 4], "up": [4, K, 6], "gate": [4, K, 6], "down": [4, 6, K]}
case("moe_ffn", lambda m, *t: m.moe_ffn(*t, top_k=2), _moe, **_experts)
case(
    "moe_ffn/raw-scaled",
    lambda m, *t: m.moe_ffn(*t, top_k=2, normalize=False, scale=2.0),
    lambda *t: 2.0 * _moe(*t, normalize=False),
    **_experts,
)


def _moe_sigmoid(x: Any, router: Any, up: Any, gate: Any, down: Any) -> Any:
    scores = 1 / (1 + np.exp(-(x @ router)))
    best = scores.argmax(-1)
    out = np.zeros_like(x)
    for i in np.ndindex(*best.shape):
        e = best[i]
        out[i] = scores[i][e] * ((silu(x[i] @ gate[e]) * (x[i] @ up[e])) @ down[e])
    return out


case(
    "moe_ffn/sigmoid",
    lambda m, *t: m.moe_ffn(*t, top_k=1, normalize=False, scoring="sigmoid"),
    _moe_sigmoid,
    **_experts,
)

# -- tokens -----------------------------------------------------------------------------------

_ids = rng.integers(0, 11, (B, S)).astype(np.int32)
case(
    "embedding",
    lambda m, ids, table: m.embedding(ids, table, scale=3.0),
    lambda ids, table: 3.0 * table[ids],
    ids=(["batch", "seq"], _ids), table=[11, K],
)  # fmt: skip
case("lm_head", lambda m, x, w: m.lm_head(x, w), lambda x, w: x @ w, x=X, w=[K, 11])
case(
    "lm_head/tied-last-capped",
    lambda m, x, w, b: m.lm_head(x, w, b, transposed=True, softcap=2.0, last_only=True),
    lambda x, w, b: 2.0 * np.tanh((x[:, -1:] @ w.T + b) / 2.0),
    x=X, w=[11, K], b=[11],
)  # fmt: skip

# -- convolutions -----------------------------------------------------------------------------


def _conv2d(x: Any, w: Any, b: Any, pad: int, stride: int) -> Any:
    x = np.pad(x, [(0, 0), (0, 0), (pad, pad), (pad, pad)])
    kh, kw = w.shape[2:]
    rows = (x.shape[2] - kh) // stride + 1
    columns = (x.shape[3] - kw) // stride + 1
    out = np.zeros((x.shape[0], w.shape[0], rows, columns))
    for i in range(rows):
        for j in range(columns):
            patch = x[:, :, i * stride : i * stride + kh, j * stride : j * stride + kw]
            out[:, :, i, j] = np.einsum("bchw,ochw->bo", patch, w) + b
    return out


def _conv1d(x: Any, w: Any, b: Any) -> Any:
    return _conv2d(x[:, :, None], w[:, :, None], b, 0, 1)[:, :, 0]


case(
    "conv2d",
    lambda m, x, w, b: m.conv2d(x, w, b, stride=2, padding=1, activation="relu"),
    lambda x, w, b: np.maximum(_conv2d(x, w, b, 1, 2), 0),
    x=["batch", 3, 6, "frames"], w=[4, 3, 3, 3], b=[4],
)  # fmt: skip
case(
    "conv2d/plain",
    lambda m, x, w: m.conv2d(x, w),
    lambda x, w: _conv2d(x, w, 0.0, 0, 1),
    x=["batch", 3, 6, "frames"], w=[4, 3, 2, 3],
)  # fmt: skip
case(
    "conv1d",
    lambda m, x, w, b: m.conv1d(x, w, bias=b, padding=1),
    lambda x, w, b: _conv1d(np.pad(x, [(0, 0), (0, 0), (1, 1)]), w, b),
    x=["batch", 3, "frames"], w=[4, 3, 3], b=[4],
)  # fmt: skip


def _causal(x: Any, w: Any, left: Any) -> Any:
    joined = np.concatenate([left, x], 1)
    out = np.zeros_like(x)
    for t in range(x.shape[1]):
        for j in range(w.shape[1]):
            out[:, t] += joined[:, t + j] * w[:, j]
    return out


case(
    "depthwise_conv1d_causal",
    lambda m, x, w, left: m.depthwise_conv1d_causal(x, w, left, kernel_size=4),
    _causal,
    x=X, w=[K, 4], left=["batch", 3, K],
)  # fmt: skip
