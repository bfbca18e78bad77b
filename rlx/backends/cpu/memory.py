"""Values as arrays: what Python sees of a run's memory, for steps that Python does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlx.backends.buffer import Buffer
from rlx.ir.dim import evaluate
from rlx.ir.lir import Lir, View, contiguous_strides
from rlx.ir.node import Value
from rlx.ir.op import Array
from rlx.support.records import dataclass


@dataclass
class RunMemory:
    """The memory of one run: the arena, what is attached, and what the caller brought."""

    lir: Lir
    arena: Array
    attached: Mapping[str, Buffer]  # params and states
    inputs: Mapping[str, Buffer | None]
    outputs: Sequence[Buffer | None]
    sizes: Mapping[str, int]

    def array(self, value: Value) -> Array:
        """The elements of `value`, in place."""
        root, _ = self.lir.home(value)
        shape = value.shape.bind(self.sizes)
        view = self.lir.slots[value].view or View(0, contiguous_strides(shape))
        flat = self._flat(root)
        start = evaluate(view.offset, self.sizes)
        strides = [evaluate(s, self.sizes) * shape.dtype.bytes for s in view.strides]
        if 0 in shape.static_dims:
            return np.empty(shape.static_dims, shape.dtype.numpy)
        return np.lib.stride_tricks.as_strided(flat[start:], shape.static_dims, strides)

    def _flat(self, root: Value) -> Array:
        found = self._given(root)
        if found is not None:
            return found.reshape(-1)
        slot = self.lir.slots[root]
        assert slot.offset is not None
        raw = self.arena[slot.offset : slot.offset + slot.size]
        return raw.view(root.shape.dtype.numpy)

    def _given(self, root: Value) -> Array | None:
        """The array of a value that is not in the arena."""
        kind, name = self.lir.slots[root].kind, root.node.name
        if kind == "constant":
            constant: Any = root.node.op
            return constant.data.array
        found: Buffer | None = None
        if kind in ("param", "state"):
            found = self.attached[name]
        elif kind == "input":
            found = self.inputs[name]
        elif kind == "output":
            pairs = zip(self.outputs, self.lir.outputs, strict=True)
            found = next(out for out, v in pairs if v is root)
        return None if found is None else found.array
