"""Muon: momentum of matrices made orthogonal by a Newton–Schulz iteration."""

from __future__ import annotations

import rlx.numpy as rnp
from rlx.errors import OptionError
from rlx.ir.dtype import DType, DTypeLike
from rlx.numpy.array import Array
from rlx.numpy.elementwise import maximum
from rlx.optim.adam import AdamW
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
    matrices_only,
    working,
    zeros_like,
)
from rlx.support.records import dataclass

_COEFFICIENTS = (3.4445, -4.775, 2.0315)  # the steepest at 0 that stays within 0.3 of 1


@dataclass(frozen=True)
class Muon(Optimizer):
    """Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024, as
    `torch.optim.Muon`. Matrices for which `matrices` holds take its steps, all other parameters
    those of `other`, which embeddings and heads need:
    `matrices=lambda path, p: "head" not in path`.

    `adjust` scales the rate of a matrix: "original" by max(1, rows / columns)^½, "match_rms_adamw"
    so that rates of AdamW fit. The iteration computes in `dtype`, or that of the parameter.
    """

    learning_rate: Rate = 1e-3
    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.1
    iterations: int = 5
    eps: float = 1e-7
    adjust: str = "original"
    dtype: DTypeLike | None = None
    matrices: Mask = matrices_only
    mask: Mask | None = None
    other: Optimizer = AdamW()

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, momentum=(self.momentum, 0, 1), weight_decay=(self.weight_decay, 0, 1e9))
        check(self, iterations=(self.iterations, 1, 100))
        if self.adjust not in ("original", "match_rms_adamw"):
            raise OptionError(
                "no such adjustment", where="Muon", got=repr(self.adjust),
                expected="original, match_rms_adamw",
            )  # fmt: skip

    def _is_matrix(self, path: str, param: Array) -> bool:
        return param.ndim == 2 and self.matrices(path, param)

    def slots(self, path: str, param: Array) -> Slots:
        if not self._is_matrix(path, param):
            return self.other.slots(path, param)
        return {"momentum": zeros_like(param)}

    def leaf(
        self, path: str, param: Array, grad: Array, slots: Slots, now: Moment
    ) -> tuple[Array, Slots]:
        if not self._is_matrix(path, param):
            then = Moment(now.step, self.other.rate_of(now.step - 1))
            return self.other.leaf(path, param, grad, slots, then)
        p, g = working(param, grad)
        average = lerp(slots["momentum"], g, 1 - self.momentum)
        step = lerp(g, average, self.momentum) if self.nesterov else average
        made = DType.of(self.dtype) if self.dtype is not None else p.dtype
        step = orthogonal(step.astype(made), self.iterations, self.eps).astype(p.dtype)
        p = decayed(p, now, self.weight_decay, applies(self.mask, path, param))
        rate = like(now.rate * _scale(self.adjust, param), p)
        return (p - step * rate).astype(param.dtype), {"momentum": average}


def _scale(adjust: str, param: Array) -> Array:
    rows, columns = (rnp.asarray(n, dtype="f64") for n in param.shape)
    if adjust == "original":
        return rnp.sqrt(maximum(1.0, rows / columns))
    return 0.2 * rnp.sqrt(maximum(rows, columns))


def orthogonal(x: Array, iterations: int = 5, eps: float = 1e-7) -> Array:
    """About U Vᵀ of x = U S Vᵀ, with singular values between 0.7 and 1.2, by matmuls alone."""
    a, b, c = _COEFFICIENTS
    tall = bool(x.shape[0] > x.shape[1])  # the smaller square is the cheaper
    y = x.mT if tall else x
    y = y / maximum(rnp.sqrt(rnp.sum(y * y)), eps)
    for _ in range(iterations):
        square = y @ y.mT
        y = a * y + (b * square + c * (square @ square)) @ y
    return y.mT if tall else y
