"""Losses. `reduction` is "mean", "sum" or "none" as in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlx.errors import OptionError, ShapeError
from rlx.ir.dtype import i64
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.nn.functional.operands import ArrayLike, call, require_option
from rlx.numpy.array import Array
from rlx.numpy.dispatch import as_array

_REDUCTIONS = ("mean", "sum", "none")


def _reduced(g: Graph, x: Value, reduction: str) -> Any:
    return x if reduction == "none" else getattr(g, reduction)(x)


def _loss(name: str, operands: list[ArrayLike | None], reduction: str, *options: Any) -> Array:
    require_option(reduction, _REDUCTIONS, f"{name}.reduction")
    return call(_BUILDERS[name], operands, reduction, *options)


def _squared(g: Graph, x: Value, y: Value, reduction: str) -> Any:
    return _reduced(g, g.square(g.sub(x, y)), reduction)


def mse_loss(x: ArrayLike, target: ArrayLike, reduction: str = "mean") -> Array:
    """(x − target)²."""
    return _loss("mse_loss", [x, target], reduction)


def _absolute(g: Graph, x: Value, y: Value, reduction: str) -> Any:
    return _reduced(g, g.abs(g.sub(x, y)), reduction)


def l1_loss(x: ArrayLike, target: ArrayLike, reduction: str = "mean") -> Array:
    """|x − target|."""
    return _loss("l1_loss", [x, target], reduction)


def _huber(g: Graph, x: Value, y: Value, reduction: str, delta: float, scale: float) -> Any:
    signed = g.sub(x, y)
    off = g.abs(signed)
    near = g.mul(g.square(signed), 0.5)  # not of |x − y|: it has a second derivative at 0
    far = g.mul(g.sub(off, 0.5 * delta), delta)
    return _reduced(g, g.mul(g.where(g.lt(off, delta), near, far), scale), reduction)


def huber_loss(
    x: ArrayLike, target: ArrayLike, reduction: str = "mean", delta: float = 1.0
) -> Array:
    """(x − target)² / 2 up to a distance of delta, linear beyond."""
    return _loss("huber_loss", [x, target], reduction, float(delta), 1.0)


def smooth_l1_loss(
    x: ArrayLike, target: ArrayLike, reduction: str = "mean", beta: float = 1.0
) -> Array:
    """The Huber loss over beta; |x − target| for beta 0."""
    if beta == 0:
        return l1_loss(x, target, reduction)
    return _loss("huber_loss", [x, target], reduction, float(beta), 1.0 / float(beta))


def _cross_entropy(
    g: Graph, logits: Value, targets: Value, weight: Value | None, reduction: str, axis: int,
    ignore: int | None, smoothing: float, is_log: bool,
) -> Any:  # fmt: skip
    order = [a for a in range(logits.shape.rank) if a != axis]
    x = g.transpose(logits, (*order, axis))
    if not (is_log or smoothing or targets.shape.dtype.is_float or weight is not None):
        return _fused_entropy(g, x, targets, reduction, ignore)
    scores = x if is_log else g.log_softmax(x, axis=-1)
    if targets.shape.dtype.is_float:
        return _soft_entropy(g, scores, g.transpose(targets, (*order, axis)), weight, reduction,
                             smoothing)  # fmt: skip
    ids = g.cast(targets, i64)
    kept = None if ignore is None else g.ne(ids, ignore)
    ids = ids if kept is None else g.where(kept, ids, g.mul(ids, 0))
    column = g.reshape(ids, (*ids.shape.dims, 1))
    losses = g.reshape(g.neg(g.take_along(scores, column, axis=-1)), ids.shape.dims)
    per = None if weight is None else g.gather(weight, ids, axis=0)
    losses = losses if per is None else g.mul(losses, per)
    count = g.expand(g.constant(1.0, x.shape.dtype), ids.shape.dims) if per is None else per
    if smoothing:
        spread = scores if weight is None else g.mul(scores, weight)
        even = g.mul(g.sum(spread, axis=(-1,)), g.div(-smoothing, _classes(g, x)))
        losses = g.add(g.mul(losses, 1.0 - smoothing), even)
    if kept is not None:
        losses, count = g.where(kept, losses, 0.0), g.where(kept, count, 0.0)
    if reduction == "mean":
        return g.div(g.sum(losses), g.sum(count))
    return _reduced(g, losses, reduction)


def _fused_entropy(g: Graph, x: Value, targets: Value, reduction: str, ignore: int | None) -> Any:
    """Of class numbers alone: no probabilities are stored, here or in the backward part."""
    losses, _ = g.softmax_cross_entropy(x, targets, ignore_index=ignore)
    if reduction == "mean" and ignore is not None:
        kept = g.cast(g.ne(targets, ignore), losses.shape.dtype)
        found = g.div(g.sum(losses), g.sum(kept))
    else:
        found = _reduced(g, losses, reduction)
    return g.cast(found, x.shape.dtype)


def _classes(g: Graph, x: Value) -> Any:
    return g.dim_value(x.shape.dims[-1], dtype=x.shape.dtype)


def _soft_entropy(
    g: Graph, scores: Value, targets: Value, weight: Value | None, reduction: str, smoothing: float
) -> Any:
    if smoothing:
        targets = g.add(g.mul(targets, 1.0 - smoothing), g.div(smoothing, _classes(g, scores)))
    products = g.mul(scores, targets)
    products = products if weight is None else g.mul(products, weight)
    losses = g.neg(g.sum(products, axis=(-1,)))
    return _reduced(g, losses, reduction)


def cross_entropy(
    logits: ArrayLike, targets: ArrayLike, *, axis: int = -1, weight: ArrayLike | None = None,
    ignore_index: int | None = -100, label_smoothing: float = 0.0, reduction: str = "mean",
) -> Array:  # fmt: skip
    """−ln softmax(logits)[target] along the axis of the classes, the last one by default.

    Targets are class numbers, of the logits' shape without that axis, or probabilities of its whole
    shape. Targets equal to `ignore_index` do not count. `weight` [classes] scales the loss of each
    class; means are over the weights.
    """
    return _entropy("cross_entropy", logits, targets, axis, weight, ignore_index, label_smoothing,
                    reduction, False)  # fmt: skip


def nll_loss(
    log_probabilities: ArrayLike, targets: ArrayLike, *, axis: int = -1,
    weight: ArrayLike | None = None, ignore_index: int | None = -100, reduction: str = "mean",
) -> Array:  # fmt: skip
    """−log_probabilities[target]: `cross_entropy` behind a `log_softmax`."""
    return _entropy("nll_loss", log_probabilities, targets, axis, weight, ignore_index, 0.0,
                    reduction, True)  # fmt: skip


def _entropy(
    name: str, logits: ArrayLike, targets: ArrayLike, axis: int, weight: ArrayLike | None,
    ignore: int | None, smoothing: float, reduction: str, is_log: bool,
) -> Array:  # fmt: skip
    require_option(reduction, _REDUCTIONS, f"{name}.reduction")
    x, y = as_array(logits), as_array(targets)
    if not x.ndim or y.ndim != x.ndim - (0 if y.dtype.is_float else 1):
        raise ShapeError(
            "targets do not fit the logits", where=name, got=str(list(y.shape)),
            expected=f"those of {list(x.shape)}, without the axis of classes for class numbers",
            hint="floats are probabilities of all classes: class numbers are integers"
            if y.dtype.is_float else "",
        )  # fmt: skip
    if not 0 <= smoothing <= 1:
        raise OptionError("not a share", where=f"{name}.label_smoothing", got=smoothing)
    return call(_cross_entropy, [x, y, weight], reduction, axis % x.ndim, ignore,
                float(smoothing), is_log)  # fmt: skip


def _binary(
    g: Graph, x: Value, y: Value, weight: Value | None, positive: Value | None, reduction: str,
    is_logit: bool,
) -> Any:  # fmt: skip
    if is_logit:  # ln sigmoid(x) = −softplus(−x)
        yes, no = g.neg(g.softplus(g.neg(x))), g.neg(g.softplus(x))
    else:
        yes, no = (g.maximum(g.log(p), -100.0) for p in (x, g.sub(1.0, x)))
    yes = yes if positive is None else g.mul(yes, positive)
    losses = g.neg(g.add(g.mul(y, yes), g.mul(g.sub(1.0, y), no)))
    return _reduced(g, losses if weight is None else g.mul(losses, weight), reduction)


def binary_cross_entropy(
    p: ArrayLike, target: ArrayLike, weight: ArrayLike | None = None, reduction: str = "mean"
) -> Array:
    """−target · ln p − (1 − target) · ln(1 − p); logarithms stay above −100."""
    return _loss("binary", [p, target, weight, None], reduction, False)


def binary_cross_entropy_with_logits(
    x: ArrayLike, target: ArrayLike, weight: ArrayLike | None = None, reduction: str = "mean",
    pos_weight: ArrayLike | None = None,
) -> Array:  # fmt: skip
    """`binary_cross_entropy` of sigmoid(x), without overflow; `pos_weight` scales target 1."""
    return _loss("binary", [x, target, weight, pos_weight], reduction, True)


def _kl_div(g: Graph, x: Value, y: Value, reduction: str, log_target: bool) -> Any:
    if log_target:
        losses = g.mul(g.exp(y), g.sub(y, x))
    else:
        ratio = g.sub(g.log(g.where(g.gt(y, 0.0), y, 1.0)), x)
        losses = g.where(g.gt(y, 0.0), g.mul(y, ratio), 0.0)
    if reduction == "batchmean":
        return g.div(g.sum(losses), g.dim_value(x.shape.dims[0], dtype=x.shape.dtype))
    return _reduced(g, losses, reduction)


def kl_div(
    log_p: ArrayLike, target: ArrayLike, reduction: str = "mean", log_target: bool = False
) -> Array:
    """target · (ln target − log_p); "batchmean" sums and divides by the first size."""
    require_option(reduction, (*_REDUCTIONS, "batchmean"), "kl_div.reduction")
    return call(_kl_div, [log_p, target], reduction, bool(log_target))


def _hinge(g: Graph, x: Value, y: Value, reduction: str, margin: float) -> Any:
    away = g.maximum(g.sub(margin, x), 0.0)
    return _reduced(g, g.where(g.gt(y, 0.0), x, away), reduction)


def hinge_embedding_loss(
    x: ArrayLike, target: ArrayLike, margin: float = 1.0, reduction: str = "mean"
) -> Array:
    """x where the target is 1, max(0, margin − x) where it is −1."""
    return _loss("hinge", [x, target], reduction, float(margin))


def _triplet(
    g: Graph, a: Value, p: Value, n: Value, reduction: str, margin: float, eps: float
) -> Any:
    near, far = (g.sqrt(g.sum(g.square(g.add(g.sub(a, v), eps)), axis=(-1,))) for v in (p, n))
    return _reduced(g, g.maximum(g.add(g.sub(near, far), margin), 0.0), reduction)


def triplet_margin_loss(
    anchor: ArrayLike, positive: ArrayLike, negative: ArrayLike, margin: float = 1.0,
    reduction: str = "mean", eps: float = 1e-6,
) -> Array:  # fmt: skip
    """max(0, |anchor − positive| − |anchor − negative| + margin), distances over the last axis."""
    return _loss("triplet", [anchor, positive, negative], reduction, float(margin), float(eps))


def _gaussian(g: Graph, x: Value, y: Value, var: Value, reduction: str, eps: float) -> Any:
    v = g.maximum(var, eps)
    losses = g.mul(g.add(g.log(v), g.div(g.square(g.sub(x, y)), v)), 0.5)
    return _reduced(g, losses, reduction)


def gaussian_nll_loss(
    x: ArrayLike, target: ArrayLike, var: ArrayLike, reduction: str = "mean", eps: float = 1e-6
) -> Array:
    """(ln var + (x − target)² / var) / 2, the variance at least eps."""
    return _loss("gaussian", [x, target, var], reduction, float(eps))


_BUILDERS: dict[str, Callable[..., Any]] = {
    "mse_loss": _squared, "l1_loss": _absolute, "huber_loss": _huber, "binary": _binary,
    "hinge": _hinge, "triplet": _triplet, "gaussian": _gaussian,
}  # fmt: skip
