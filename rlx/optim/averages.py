"""Exponential moving averages of parameters, to evaluate with."""

from __future__ import annotations

import rlx.numpy as rnp
from rlx.numpy.array import Array
from rlx.numpy.dispatch import as_array
from rlx.numpy.tree import tree_map
from rlx.optim.optimizer import Params, check, lerp, working
from rlx.support.records import dataclass


@dataclass(frozen=True)
class EMA:
    """average ← decay · average + (1 − decay) · params.

    The average is a tree like the parameters: `functional_call(model, average, x)` evaluates it.
    """

    decay: float = 0.999

    def __post_init__(self) -> None:
        check(self, decay=(self.decay, 0, 1))

    def init(self, params: Params) -> Params:
        """The average before the first step: a copy, so that both can be donated."""
        made: Params = tree_map(lambda p: rnp.asarray(p, copy=True), params)
        return made

    def update(self, average: Params, params: Params) -> Params:
        """The average after a step. Arrays that are no floats are taken as they are."""
        made: Params = tree_map(self._leaf, average, params)
        return made

    def _leaf(self, average: Array, param: Array) -> Array:
        if as_array(param).dtype.kind != "float":
            return param
        a, p = working(as_array(average), as_array(param))
        return lerp(a, p, 1 - self.decay).astype(as_array(average).dtype)
