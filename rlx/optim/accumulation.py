"""Gradient accumulation: a large batch in parts, one after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import rlx.numpy as rnp
from rlx.errors import OptionError, ShapeError
from rlx.numpy.array import Array
from rlx.numpy.control_flow import scan
from rlx.numpy.dispatch import as_array
from rlx.numpy.tree import tree_map
from rlx.optim.optimizer import working_type
from rlx.random import fold_in


def accumulate(
    value_and_grad: Callable[..., tuple[Any, Any]], micro_batches: int
) -> Callable[..., tuple[Any, Any]]:
    """A function `(params, batch, …) -> (value, grads)` that calls `value_and_grad` for parts of
    the batch and gives the means: memory for activations is that of one part.

    The first axes of all arrays of the batch are split; arguments after it are the same for all. A
    random key is given by keyword, `key=`, and each part gets one of its own. Of what comes beside
    the value (`has_aux`), floats are averaged, such as running statistics and accuracies, and of
    the rest is the last.
    """
    if micro_batches < 1:
        raise OptionError("not a number of parts", where="optim.accumulate", got=micro_batches)

    @functools.wraps(value_and_grad)
    def accumulated(
        params: Any, batch: Any, *more: Any, key: Array | None = None
    ) -> tuple[Any, Any]:
        parts = tree_map(lambda x: _split(x, micro_batches), batch)

        def part(number: Any, rows: Any) -> Any:
            named = {} if key is None else {"key": fold_in(key, number)}
            return tree_map(_wide, value_and_grad(params, rows, *more, **named))

        def add(mean: Any, given: Any) -> tuple[Any, None]:
            number, rows = given
            return tree_map(lambda a, b: _moved(a, b, number), mean, part(number, rows)), None

        first = part(0, tree_map(lambda x: x[0], parts))
        rest = rnp.arange(1, micro_batches), tree_map(lambda x: x[1:], parts)
        mean: tuple[Any, Any] = scan(add, first, rest)[0] if micro_batches > 1 else first
        return mean

    return accumulated


def _split(x: Any, parts: int) -> Array:
    array = as_array(x)
    if not array.ndim or array.shape[0] % parts:
        raise ShapeError(
            "a batch that does not divide into parts", where="optim.accumulate",
            got=list(array.shape), expected=f"a first axis of a multiple of {parts}",
        )  # fmt: skip
    return rnp.reshape(array, (parts, -1, *array.shape[1:]))


def _wide(x: Any) -> Array:
    array = as_array(x)
    return array.astype(working_type(array)) if array.dtype.kind == "float" else array


def _moved(mean: Array, x: Array, number: Array) -> Array:
    """The mean of one more part; equal numbers, such as parameters, keep their bits."""
    return mean + (x - mean) / (number + 1).astype(x.dtype) if x.dtype.kind == "float" else x
