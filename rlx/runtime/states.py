"""The states of a compiled graph (KV cache, recurrent state): buffers by name, zero at first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlx.backends.buffer import Allocator, Buffer
from rlx.errors import InputError
from rlx.ir.binding import infer_sizes
from rlx.ir.dim import upper_bound
from rlx.ir.shape import Shape
from rlx.runtime.params import as_argument


class StateStore:
    """Buffers in the memory of one device, allocated on first use or bound by the caller."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self.buffers: dict[str, Buffer] = {}
        self.version = 0  # counts bindings

    def bind(self, name: str, array: Any, shape: Shape, sizes: Mapping[str, int]) -> None:
        """Use a buffer of the device, or an array, as the memory of a state."""
        is_host = self._allocator.is_host
        own = isinstance(array, Buffer) and array.allocator is self._allocator
        if not own and (not isinstance(array, np.ndarray) or not array.flags.c_contiguous):
            raise InputError(
                "a state is a buffer of the device or a C-ordered NumPy array", where=name,
                got=type(array).__name__,
            )  # fmt: skip
        if is_host and not (array.array if own else array).flags.writeable:
            raise InputError("a state must be writeable", where=name)
        as_argument(name, array, shape, self._allocator)
        infer_sizes([(name, shape, array.shape)], sizes)
        self.buffers[name] = array if own else self._allocator.put(array)
        self.version += 1

    def allocate(self, shapes: Mapping[str, Shape], bounds: Mapping[str, int]) -> None:
        """Make those of these states that are not there yet; dynamic dims get their bounds."""
        for name, shape in shapes.items():
            if name not in self.buffers:
                dims = [upper_bound(d, bounds) for d in shape.dims]
                self.buffers[name] = self._allocator.alloc(dims, shape.dtype.numpy)

    def read(self, name: str) -> Any:
        """The memory itself where it is the host's, else a copy."""
        buffer = self.buffers[name]
        return buffer.array if self._allocator.is_host else buffer.copy_out()
