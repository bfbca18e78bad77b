"""Mixed precision: compute in bf16, keep and update weights in f32."""

from __future__ import annotations

from typing import Any

import rlx.numpy as rnp
from rlx.ir.dtype import DType, DTypeLike, bf16
from rlx.numpy.array import Array
from rlx.numpy.dispatch import as_array
from rlx.numpy.tree import flatten, tree_map, unflatten
from rlx.optim.optimizer import Optimizer, Params, State, working_type
from rlx.support.records import dataclass


def cast(tree: Params, dtype: DTypeLike = bf16) -> Params:
    """The tree with its floats in another element type: `loss(cast(params), batch)` computes in
    bf16, and its gradient is in the type of `params`."""
    made = DType.of(dtype)
    found: Params = tree_map(
        lambda x: as_array(x).astype(made) if as_array(x).dtype.kind == "float" else x, tree
    )
    return found


@dataclass(frozen=True)
class MasterWeights:
    """An optimiser for parameters in bf16 or f16, which keeps them in f32 in its state: steps much
    smaller than a parameter are not lost."""

    inner: Optimizer

    def init(self, params: Any) -> State:
        master = tree_map(_wide, params)
        return {"master": master, **self.inner.init(master)}

    def update(self, grads: Params, state: State, params: Params) -> tuple[Params, State]:
        """As `Optimizer.update`; the parameters are the rounded weights of the state."""
        inner = {name: x for name, x in state.items() if name != "master"}
        master, inner = self.inner.update(grads, inner, state["master"])
        types = [as_array(p).dtype for p in flatten(params)[0]]
        leaves, structure = flatten(master)
        rounded = [as_array(x).astype(t) for x, t in zip(leaves, types, strict=True)]
        return unflatten(structure, rounded), {"master": master, **inner}


def _wide(x: Any) -> Array:
    """The array in f32 at least, in memory of its own."""
    array = as_array(x)
    wanted = working_type(array) if array.dtype.kind == "float" else array.dtype
    return rnp.asarray(array, copy=True) if wanted is array.dtype else array.astype(wanted)
