"""Adafactor: second moments of matrices from their rows and columns alone."""

from __future__ import annotations

import rlx.numpy as rnp
from rlx.numpy.array import Array
from rlx.optim.optimizer import (
    Mask,
    Moment,
    Optimizer,
    Rate,
    Slots,
    applies,
    check,
    decayed,
    lerp,
    like,
    working,
    working_type,
    zeros_like,
)
from rlx.support.records import dataclass


@dataclass(frozen=True)
class Adafactor(Optimizer):
    """Shazeer and Stern, "Adafactor: adaptive learning rates with sublinear memory cost", 2018, as
    `torch.optim.Adafactor`: the rate is relative to the size of each parameter."""

    learning_rate: Rate = 1e-2
    beta2_decay: float = -0.8
    eps: float | None = None  # of the element type
    smallest_scale: float = 1e-3
    clip: float = 1.0
    weight_decay: float = 0.0
    mask: Mask | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, beta2_decay=(self.beta2_decay, -10, 0.001), clip=(self.clip, 1e-9, 1e9))
        check(self, weight_decay=(self.weight_decay, 0, 1e9))

    def slots(self, path: str, param: Array) -> Slots:
        if param.ndim < 2:
            return {"square": zeros_like(param)}
        *lead, rows, columns = param.shape
        made = working_type(param)
        return {
            "rows": rnp.zeros((*lead, rows, 1), dtype=made),
            "columns": rnp.zeros((*lead, 1, columns), dtype=made),
        }

    def leaf(
        self, path: str, param: Array, grad: Array, slots: Slots, now: Moment
    ) -> tuple[Array, Slots]:
        p, g = working(param, grad)
        eps = self.eps if self.eps is not None else rnp.finfo(p.dtype).eps
        weight = like(now.step**self.beta2_decay, p)
        rate = like(rnp.minimum(now.rate, now.step**-0.5), p)
        rate = rate * rnp.maximum(_root_mean_square(p), self.smallest_scale)
        p = decayed(p, now, self.weight_decay, applies(self.mask, path, param))
        kept, square = _second_moment(g, slots, weight, eps)
        step = g / rnp.sqrt(rnp.maximum(square, eps * eps))
        largest = rnp.maximum(_root_mean_square(step) / self.clip, 1.0)
        return (p - rate / largest * step).astype(param.dtype), kept


def _second_moment(g: Array, slots: Slots, weight: Array, eps: float) -> tuple[Slots, Array]:
    """The new averages, and the mean square of each element that they say."""
    if g.ndim < 2:
        square = lerp(slots["square"], g * g, weight)
        return {"square": square}, square
    rows = lerp(slots["rows"], rnp.mean(g * g, axis=-1, keepdims=True), weight)
    columns = lerp(slots["columns"], rnp.mean(g * g, axis=-2, keepdims=True), weight)
    total = rnp.maximum(rnp.mean(rows, axis=-2, keepdims=True), eps)
    return {"rows": rows, "columns": columns}, rows * columns / total


def _root_mean_square(x: Array) -> Array:
    return rnp.sqrt(rnp.mean(x * x))
