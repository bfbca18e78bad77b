"""Where the args of a layer are."""

from __future__ import annotations

from rlx.backends.cuda.builder import BlockFunction
from rlx.backends.cuda.kernels.persistent.shape import ARGS, POINTERS, DenseShape, part_maps
from rlx.llvm.builder import Value

QKV, OUT, GATE, UP, DOWN = range(5)
GAIN, SECOND_GAIN, QUERY_GAIN, KEY_GAIN, KEYS, VALUES = range(POINTERS)


class LayerArgs:
    """The args of a layer, from shared memory: a load from far away would hold up all behind it."""

    def __init__(self, f: BlockFunction, shape: DenseShape, layer: Value) -> None:
        self._f, self._shape = f, shape
        self._at = layer * (8 * shape.layer_args) + (shape.place(ARGS) + 8 * shape.fixed_args)

    def __getitem__(self, i: int) -> Value:
        return self._load(self._shape.maps + i)

    def maps(self, i: int) -> list[Value]:
        """The tensor maps of a matrix."""
        parts = self._shape.parts
        first = sum(part_maps(part) for part in parts[:i])
        return [self._load(first + j) for j in range(part_maps(parts[i]))]

    def _load(self, i: int) -> Value:
        return self._f.load_shared_pointer(self._at, 8 * i)
