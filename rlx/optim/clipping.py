"""Clipping of gradients, by their norm and by value."""

from __future__ import annotations

import functools
import operator

import rlx.numpy as rnp
from rlx.errors import OptionError
from rlx.ir.dtype import f32
from rlx.numpy.array import Array
from rlx.numpy.dispatch import as_array
from rlx.numpy.tree import flatten, tree_map
from rlx.optim.optimizer import Params, working


def global_norm(tree: object) -> Array:
    """The Euclidean norm of all floats of a tree together."""
    parts = [as_array(x) for x in flatten(tree)[0]]
    floats = working(*[x for x in parts if x.dtype.kind == "float"])
    # row by row: squares are added up as they are made
    sums = [rnp.sum(rnp.sum(x * x, axis=-1) if x.ndim > 1 else x * x) for x in floats]
    if not sums:
        return rnp.zeros((), dtype=f32)
    return rnp.sqrt(functools.reduce(operator.add, sums))


def clip_by_global_norm(grads: Params, limit: float) -> tuple[Params, Array]:
    """Gradients scaled so that their norm is at most `limit`, and the norm before, as
    `torch.nn.utils.clip_grad_norm_`. A norm that is not finite stays visible in both."""
    _check(limit)
    norm = global_norm(grads)
    scale = rnp.minimum(limit / (norm + 1e-6), 1.0)
    return tree_map(lambda g: _float(g, lambda x: x * scale.astype(x.dtype)), grads), norm


def clip_by_value(grads: Params, limit: float) -> Params:
    """Gradients with each element between -limit and limit."""
    _check(limit)
    made: Params = tree_map(lambda g: _float(g, lambda x: rnp.clip(x, -limit, limit)), grads)
    return made


def _float(x: Array, change: object) -> Array:
    array = as_array(x)
    return change(array) if array.dtype.kind == "float" else array  # type: ignore[operator]


def _check(limit: float) -> None:
    if not limit > 0:
        raise OptionError("not a limit", where="optim.clip", got=repr(limit), expected="above 0")
