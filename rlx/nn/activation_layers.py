"""Activations as layers."""

from __future__ import annotations

from typing import Any

import rlx.numpy as rnp
from rlx.nn import functional as F
from rlx.nn.functional.operands import ArrayLike
from rlx.nn.module import Module
from rlx.numpy.array import Array


class _Activation(Module):
    """A function with the options given when the layer was made."""

    def __init__(self, **options: Any) -> None:
        self.options = tuple(options.items())

    def _apply(self, function: Any, x: ArrayLike) -> Array:
        y: Array = function(x, **dict(self.options))
        return y

    def extra_repr(self) -> str:
        return ", ".join(f"{k}={v!r}" for k, v in self.options)


class ReLU(_Activation):
    """`functional.relu`."""

    def __init__(self) -> None:
        super().__init__()

    def __call__(self, x: ArrayLike) -> Array:
        return self._apply(F.relu, x)


class ReLU6(_Activation):
    """`functional.relu6`."""

    def __init__(self) -> None:
        super().__init__()

    def __call__(self, x: ArrayLike) -> Array:
        return self._apply(F.relu6, x)


class Sigmoid(_Activation):
    """`functional.sigmoid`."""

    def __init__(self) -> None:
        super().__init__()

    def __call__(self, x: ArrayLike) -> Array:
        return self._apply(F.sigmoid, x)


class Tanh(_Activation):
    """`functional.tanh`."""

    def __init__(self) -> None:
        super().__init__()

    def __call__(self, x: ArrayLike) -> Array:
        return self._apply(F.tanh, x)


class SiLU(_Activation):
    """`functional.silu`."""

    def __init__(self) -> None:
        super().__init__()

    def __call__(self, x: ArrayLike) -> Array:
        return self._apply(F.silu, x)


class SELU(_Activation):
    """`functional.selu`."""

    def __init__(self) -> None:
        super().__init__()

    def __call__(self, x: ArrayLike) -> Array:
        return self._apply(F.selu, x)


class Mish(_Activation):
    """`functional.mish`."""

    def __init__(self) -> None:
        super().__init__()

    def __call__(self, x: ArrayLike) -> Array:
        return self._apply(F.mish, x)


class Hardsigmoid(_Activation):
    """`functional.hardsigmoid`."""

    def __init__(self) -> None:
        super().__init__()

    def __call__(self, x: ArrayLike) -> Array:
        return self._apply(F.hardsigmoid, x)


class Hardswish(_Activation):
    """`functional.hardswish`."""

    def __init__(self) -> None:
        super().__init__()

    def __call__(self, x: ArrayLike) -> Array:
        return self._apply(F.hardswish, x)


class LogSigmoid(_Activation):
    """`functional.logsigmoid`."""

    def __init__(self) -> None:
        super().__init__()

    def __call__(self, x: ArrayLike) -> Array:
        return self._apply(F.logsigmoid, x)


class Softsign(_Activation):
    """`functional.softsign`."""

    def __init__(self) -> None:
        super().__init__()

    def __call__(self, x: ArrayLike) -> Array:
        return self._apply(F.softsign, x)


class Tanhshrink(_Activation):
    """`functional.tanhshrink`."""

    def __init__(self) -> None:
        super().__init__()

    def __call__(self, x: ArrayLike) -> Array:
        return self._apply(F.tanhshrink, x)


class GELU(_Activation):
    """`functional.gelu`."""

    def __init__(self, approximate: str = "none") -> None:
        super().__init__(approximate=approximate)

    def __call__(self, x: ArrayLike) -> Array:
        return self._apply(F.gelu, x)


class ELU(_Activation):
    """`functional.elu`."""

    def __init__(self, alpha: float = 1.0) -> None:
        super().__init__(alpha=alpha)

    def __call__(self, x: ArrayLike) -> Array:
        return self._apply(F.elu, x)


class CELU(_Activation):
    """`functional.celu`."""

    def __init__(self, alpha: float = 1.0) -> None:
        super().__init__(alpha=alpha)

    def __call__(self, x: ArrayLike) -> Array:
        return self._apply(F.celu, x)


class LeakyReLU(_Activation):
    """`functional.leaky_relu`."""

    def __init__(self, negative_slope: float = 0.01) -> None:
        super().__init__(negative_slope=negative_slope)

    def __call__(self, x: ArrayLike) -> Array:
        return self._apply(F.leaky_relu, x)


class Softplus(_Activation):
    """`functional.softplus`."""

    def __init__(self, beta: float = 1.0, threshold: float = 20.0) -> None:
        super().__init__(beta=beta, threshold=threshold)

    def __call__(self, x: ArrayLike) -> Array:
        return self._apply(F.softplus, x)


class Hardtanh(_Activation):
    """`functional.hardtanh`."""

    def __init__(self, min_val: float = -1.0, max_val: float = 1.0) -> None:
        super().__init__(min_val=min_val, max_val=max_val)

    def __call__(self, x: ArrayLike) -> Array:
        return self._apply(F.hardtanh, x)


class Softshrink(_Activation):
    """`functional.softshrink`."""

    def __init__(self, lambd: float = 0.5) -> None:
        super().__init__(lambd=lambd)

    def __call__(self, x: ArrayLike) -> Array:
        return self._apply(F.softshrink, x)


class Hardshrink(_Activation):
    """`functional.hardshrink`."""

    def __init__(self, lambd: float = 0.5) -> None:
        super().__init__(lambd=lambd)

    def __call__(self, x: ArrayLike) -> Array:
        return self._apply(F.hardshrink, x)


class GLU(_Activation):
    """`functional.glu`."""

    def __init__(self, axis: int = -1) -> None:
        super().__init__(axis=axis)

    def __call__(self, x: ArrayLike) -> Array:
        return self._apply(F.glu, x)


class Softmax(_Activation):
    """`functional.softmax`."""

    def __init__(self, axis: int = -1) -> None:
        super().__init__(axis=axis)

    def __call__(self, x: ArrayLike) -> Array:
        return self._apply(F.softmax, x)


class LogSoftmax(_Activation):
    """`functional.log_softmax`."""

    def __init__(self, axis: int = -1) -> None:
        super().__init__(axis=axis)

    def __call__(self, x: ArrayLike) -> Array:
        return self._apply(F.log_softmax, x)


class Softmin(_Activation):
    """`functional.softmin`."""

    def __init__(self, axis: int = -1) -> None:
        super().__init__(axis=axis)

    def __call__(self, x: ArrayLike) -> Array:
        return self._apply(F.softmin, x)


class PReLU(Module):
    """x where x ≥ 0, else weight · x; a weight for each channel (axis 1), or one for all."""

    weight: Array

    def __init__(
        self, num_parameters: int = 1, init: float = 0.25, *, dtype: Any = rnp.float32
    ) -> None:
        self.weight = rnp.full((num_parameters,), init, dtype=dtype)

    def __call__(self, x: ArrayLike) -> Array:
        return F.prelu(x, self.weight)

    def extra_repr(self) -> str:
        return f"num_parameters={self.weight.shape[0]}"
