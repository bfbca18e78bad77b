"""Where the args of a layer are."""

from __future__ import annotations

from rlx.backends.cuda.builder import BlockFunction
from rlx.backends.cuda.kernels.persistent.shape import ARGS, POINTERS, DenseShape
from rlx.llvm.builder import Value, i32

QKV, OUT, GATE, UP, DOWN, OTHERS = range(6)
GAIN, SECOND_GAIN, QUERY_GAIN, KEY_GAIN, KEYS, VALUES, KINDS = range(POINTERS)
OTHER_V, OTHER_DOWN = 1, 2  # bits of the last: matrices of other types


class LayerArgs:
    """The args of a layer, from shared memory: a load from far away would hold up all behind it."""

    def __init__(self, f: BlockFunction, shape: DenseShape, layer: Value) -> None:
        self._f, self._shape = f, shape
        self._at = layer * (8 * shape.layer_args) + (shape.place(ARGS) + 8 * shape.fixed_args)

    def __getitem__(self, i: int) -> Value:
        return self._load(self._shape.maps + i)

    def rows(self, block: Value) -> tuple[Value, Value]:
        """How many of the block's rows of q k v, and of down, are of the types that most are."""
        f, shape = self._f, self._shape
        kinds = f.load_shared(self._at, i32, 8 * (shape.maps + KINDS))
        qkv, down = shape.qkv.rows, shape.down.rows
        first, last = f.i32(qkv), f.i32(down)
        if shape.other_v is not None:
            before = f.max(f.min(shape.qk_rows - block * qkv, qkv), 0)
            first = f.select((kinds & OTHER_V).ne(0), before, first)
        if shape.other_down is not None:
            last = f.select((kinds & OTHER_DOWN).ne(0), 0, last)
        return first, last

    def maps(self, i: int) -> list[Value]:
        """The tensor maps of a matrix."""
        parts = self._shape.parts
        first = sum(part.maps for part in parts[:i])
        return [self._load(first + j) for j in range(parts[i].maps)]

    def _load(self, i: int) -> Value:
        return self._f.load_shared_pointer(self._at, 8 * i)
