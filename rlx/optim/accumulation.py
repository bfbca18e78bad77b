"""Gradient accumulation: a large batch in parts, one after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import rlx.numpy as rnp
from rlx.errors import OptionError
from rlx.ir.dtype import f32
from rlx.numpy.array import Array
from rlx.numpy.control_flow import scan
from rlx.numpy.dispatch import as_array
from rlx.numpy.tree import tree_map
from rlx.optim.optimizer import zeros_like


def accumulate(
    value_and_grad: Callable[..., tuple[Array, Any]], micro_batches: int
) -> Callable[..., tuple[Array, Any]]:
    """A function `(params, batch, …) -> (value, grads)` that calls `value_and_grad` for parts of
    the batch and gives the means: memory for activations is that of one part.

    The first axes of all arrays of the batch are split; arguments after it are the same for all.
    """
    if micro_batches < 1:
        raise OptionError("not a number of parts", where="optim.accumulate", got=micro_batches)

    @functools.wraps(value_and_grad)
    def accumulated(params: Any, batch: Any, *more: Any) -> tuple[Array, Any]:
        def add(total: Any, part: Any) -> tuple[Any, None]:
            value, grads = value_and_grad(params, part, *more)
            return (
                total[0] + value.astype(f32),
                tree_map(lambda a, b: a + b, total[1], grads),
            ), None

        start = rnp.zeros((), dtype=f32), tree_map(lambda p: zeros_like(as_array(p)), params)
        total, _ = scan(add, start, tree_map(_parts, batch))
        value, grads = tree_map(lambda x: x / micro_batches, total)
        return value, grads

    def _parts(x: Any) -> Array:
        array = as_array(x)
        return rnp.reshape(array, (micro_batches, -1, *array.shape[1:]))

    return accumulated
