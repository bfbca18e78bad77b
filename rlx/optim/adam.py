"""Adam and AdamW."""

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
    working,
    zeros_like,
)
from rlx.support.records import dataclass


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam; weight decay goes into the gradient, as in `torch.optim.Adam`."""

    learning_rate: Rate = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    mask: Mask | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, beta1=(self.beta1, 0, 1), beta2=(self.beta2, 0, 1), eps=(self.eps, 0, 1))
        check(self, weight_decay=(self.weight_decay, 0, 1e9))

    def slots(self, path: str, param: Array) -> Slots:
        return {"mean": zeros_like(param), "square": zeros_like(param)}

    def leaf(
        self, path: str, param: Array, grad: Array, slots: Slots, now: Moment
    ) -> tuple[Array, Slots]:
        p, g = working(param, grad)
        if self.weight_decay and applies(self.mask, path, param):
            g = g + p * self.weight_decay
        p, kept = self.moved(p, g, slots, now)
        return p.astype(param.dtype), kept

    def moved(self, p: Array, g: Array, slots: Slots, now: Moment) -> tuple[Array, Slots]:
        """The step against the mean gradient over the root of its mean square, both corrected for
        having begun at zero."""
        mean = lerp(slots["mean"], g, 1 - self.beta1)
        square = slots["square"] * self.beta2 + g * g * (1 - self.beta2)
        rate = now.once("rate", p.dtype, lambda n: n.rate / (1 - self.beta1**n.step))
        root = now.once("root", p.dtype, lambda n: rnp.sqrt(1 - self.beta2**n.step))
        p = p - rate * (mean / (rnp.sqrt(square) / root + self.eps))
        return p, {"mean": mean, "square": square}


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay, as `torch.optim.AdamW`. `mask` says which parameters
    decay, such as `rlx.optim.matrices_only`."""

    weight_decay: float = 0.01

    def leaf(
        self, path: str, param: Array, grad: Array, slots: Slots, now: Moment
    ) -> tuple[Array, Slots]:
        p, g = working(param, grad)
        p = decayed(p, now, self.weight_decay, applies(self.mask, path, param))
        p, kept = self.moved(p, g, slots, now)
        return p.astype(param.dtype), kept
