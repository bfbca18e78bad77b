"""From hidden states of tokens to a vector or logits per text: pooling, modules, classifier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.models.sentence_config import SentenceConfig, SentenceModule

if TYPE_CHECKING:
    from rlx.models.encoder_builder import EncoderBuilder, Tensor
    from rlx.models.weights import Weights

_LOWEST = float("-inf")
_TINY = 1e-24  # squared: shorter vectors are not normalised


def embedding(
    net: EncoderBuilder, x: Tensor, sentence: SentenceConfig, weights: list[Weights | None]
) -> Tensor:
    """[batch, width] of x [batch, seq, hidden], before the last normalisation."""
    pooled = [pool(net, x, mode) for mode in sentence.pooling]
    y = pooled[0] if len(pooled) == 1 else net.g.concat(pooled, axis=1)
    for i, (module, own) in enumerate(zip(sentence.modules, weights, strict=True)):
        y = _module(net, y, module, own, f"step.{i}")
    return y


def _module(
    net: EncoderBuilder, y: Tensor, module: SentenceModule, weights: Weights | None, name: str
) -> Tensor:
    def param(part: str) -> Tensor:  # None where the file has none
        if weights is None or part not in weights:
            return None
        return net.array_param(f"{name}.{part}", weights.get(part).array)

    if module.kind == "Normalize":
        return y.l2_norm(eps=_TINY)
    if module.kind == "LayerNorm":
        return net.g.layer_norm(y, param("norm.weight"), param("norm.bias"), eps=1e-5)
    w, b = param("linear.weight"), param("linear.bias")
    made = net.g.linear(y, w, b, activation=module.activation, transposed=True)
    if not module.residual:
        return made
    other = param("residual.weight")
    return made + (y if other is None else net.g.linear(y, other, transposed=True))


def pool(net: EncoderBuilder, x: Tensor, mode: str) -> Tensor:
    """Pool x [batch, seq, hidden] to [batch, hidden]; padding is left out."""
    if mode == "cls":
        return _row(net, x.narrow(axis=1, start=0, length=1))
    if mode == "lasttoken":
        return _last(net, x)
    if mode == "max":
        return _real(net, x, _LOWEST).max(axis=1)
    if mode == "weightedmean":
        return _weighted(net, x)
    total = _real(net, x, 0.0).sum(axis=1)
    count = _count(net, x)
    return total / (count if mode == "mean" else count.sqrt())


def _row(net: EncoderBuilder, x: Tensor) -> Tensor:
    batch, _, hidden = x.shape.dims
    return x.reshape(batch, hidden)


def _real(net: EncoderBuilder, x: Tensor, instead: float) -> Tensor:
    """x, with `instead` at padding."""
    if net.lengths is None:
        return x
    batch, seq, _ = x.shape.dims
    keep = net.is_real().reshape(batch, seq, 1)
    return net.g.where(keep, x, instead)


def _count(net: EncoderBuilder, x: Tensor) -> Tensor:
    """The number of real tokens, f32, to divide [batch, hidden] by."""
    g = net.g
    if net.lengths is None:
        return g.dim_value(dim=x.shape.dims[1], dtype="f32")
    column = net.lengths.reshape(-1, 1)
    return column.astype("f32")


def _weighted(net: EncoderBuilder, x: Tensor) -> Tensor:
    """The mean with weight i + 1 for token i."""
    g, seq = net.g, x.shape.dims[1]
    at = g.iota((seq,), dtype="f32", start=1)
    weights = at.reshape(1, seq, 1)
    total = _real(net, x * weights, 0.0).sum(axis=1)
    count = _count(net, x)
    return total / (count * (count + 1.0) * 0.5)


def _last(net: EncoderBuilder, x: Tensor) -> Tensor:
    g = net.g
    batch, seq, hidden = x.shape.dims
    if net.lengths is None:
        return _row(net, x.narrow(axis=1, start=seq - 1, length=1))
    rows = x.reshape(batch * seq, hidden)
    first = g.iota((batch,)) * g.dim_value(dim=seq)
    return rows.gather(first + net.lengths - 1, axis=0)


def classify(net: EncoderBuilder, x: Tensor) -> Tensor:
    """Logits [batch, labels]: a dense layer where the file has one, then the classifier."""
    y = pool(net, x, net.encoder.classifier_pooling)
    if "cls.weight" in net.weights:
        y = net.linear(y, "cls", net.encoder.classifier_activation)
    if "cls.norm.weight" in net.weights:
        y = net.norm(y, "cls.norm")
    return net.linear(y, "cls.output")


def normalized(rows: Any) -> Any:
    """Rows scaled to length 1, in NumPy; zeros stay zeros."""
    norms = np.sqrt(np.einsum("ij,ij->i", rows, rows))[:, None]
    return rows / np.maximum(norms, np.float32(1e-12))
