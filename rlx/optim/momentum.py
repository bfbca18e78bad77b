"""Optimisers with one moment: SGD with momentum, and Lion."""

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
    zeros_like,
)
from rlx.support.records import dataclass


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent, with momentum (Nesterov's too) and weight decay in the gradient,
    as `torch.optim.SGD`."""

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    mask: Mask | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, momentum=(self.momentum, 0, 1), weight_decay=(self.weight_decay, 0, 1e9))

    def slots(self, path: str, param: Array) -> Slots:
        return {"momentum": zeros_like(param)} if self.momentum else {}

    def leaf(
        self, path: str, param: Array, grad: Array, slots: Slots, now: Moment
    ) -> tuple[Array, Slots]:
        p, g = working(param, grad)
        if self.weight_decay and applies(self.mask, path, param):
            g = g + p * self.weight_decay
        kept: Slots = {}
        if self.momentum:
            average = slots["momentum"] * self.momentum + g
            kept = {"momentum": average}
            g = g + average * self.momentum if self.nesterov else average
        return (p - g * like(now.rate, p)).astype(param.dtype), kept


@dataclass(frozen=True)
class Lion(Optimizer):
    """The sign of an interpolated momentum, with decoupled weight decay: Chen et al., "Symbolic
    discovery of optimization algorithms", 2023. Rates are 3 to 10 times smaller than AdamW's."""

    learning_rate: Rate = 1e-4
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0
    mask: Mask | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, beta1=(self.beta1, 0, 1), beta2=(self.beta2, 0, 1))
        check(self, weight_decay=(self.weight_decay, 0, 1e9))

    def slots(self, path: str, param: Array) -> Slots:
        return {"momentum": zeros_like(param)}

    def leaf(
        self, path: str, param: Array, grad: Array, slots: Slots, now: Moment
    ) -> tuple[Array, Slots]:
        p, g = working(param, grad)
        m = slots["momentum"]
        p = decayed(p, now, self.weight_decay, applies(self.mask, path, param))
        direction = rnp.sign(lerp(m, g, 1 - self.beta1))
        made = (p - direction * like(now.rate, p)).astype(param.dtype)
        return made, {"momentum": lerp(m, g, 1 - self.beta2)}
