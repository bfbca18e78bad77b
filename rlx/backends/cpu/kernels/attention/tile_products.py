"""Products of small matrices that lie in the caches: C = A·B or C += A·B, any strides of A.

A tile of C is a few rows of some vectors, in registers over the whole of k. Sizes are multiples of
a tile's: callers pad with zeros.
"""

from __future__ import annotations

from rlx.llvm.builder import Function, Module, Type, Value, i64, ptr
from rlx.llvm.target import Target

ROWS = 4  # of a tile


def tile_vectors(target: Target) -> int:
    """Vectors of a tile's row."""
    return 4 if target.num_vector_registers >= 32 else 2


def emit_product(m: Module, name: str, acc: Type, by_rows: bool, adds: bool) -> Function:
    """void product(a, a_stride, b, b_stride, c, c_stride, rows, columns, k)

    Strides are bytes from row to row. With `by_rows` the rows of A are rows in memory, else its
    columns are: row i and k are at a + k · a_stride + i. `adds` to what C has.
    """
    pointers = [("a", ptr), ("a_stride", i64), ("b", ptr), ("b_stride", i64), ("c", ptr)]
    sizes = [(n, i64) for n in ("c_stride", "rows", "columns", "k")]
    f = m.function(name, [*pointers, *sizes], internal=True)
    vectors, lanes = tile_vectors(m.target), m.target.lanes(acc.bits)
    for row in f.range(0, f["rows"], ROWS):
        a = f.gep(f["a"], row * f["a_stride"] if by_rows else row * acc.bytes)
        for column in f.range(0, f["columns"], vectors * lanes):
            to = f.gep(f.gep(f["c"], row * f["c_stride"]), column, acc)
            b = f.gep(f["b"], column, acc)
            _emit_tile(f, acc.with_lanes(lanes), a, b, to, by_rows, adds)
    return f


def _emit_tile(
    f: Function, wide: Type, a: Value, b: Value, c: Value, by_rows: bool, adds: bool
) -> None:
    acc, vectors = wide.scalar, tile_vectors(f.target)
    lines = [f.gep(c, f["c_stride"] * i) for i in range(ROWS)]
    places = [(line, j * wide.bytes) for line in lines for j in range(vectors)]
    start = [f.load(*_at(p, wide)) if adds else f.const(0, wide) for p in places]
    step = acc.bytes if by_rows else 0
    rows = [
        f.gep(a, f["a_stride"] * i) if by_rows else f.gep(a, i * acc.bytes) for i in range(ROWS)
    ]
    sums = f.carry([*start, b, f.i64(0)])
    for _ in sums.range(0, f["k"]):
        *totals, line, at = sums.values
        columns = [f.load(line, wide, j * wide.bytes) for j in range(vectors)]
        found = []
        for i, row in enumerate(rows):
            x = f.broadcast_load(f.gep(row, at), acc, wide.lanes)
            found += [f.fma(x, v, totals[i * vectors + j]) for j, v in enumerate(columns)]
        ahead = at + step if by_rows else at + f["a_stride"]
        sums.values = [*found, f.gep(line, f["b_stride"]), ahead]
    for place, value in zip(places, sums.values[: len(places)], strict=True):
        f.store(value, *place)


def _at(place: tuple[Value, int], wide: Type) -> tuple[Value, Type, int]:
    return place[0], wide, place[1]
