"""Tables of 16 floats in a vector register, where the target has a permute to look them up."""

from __future__ import annotations

from rlx.llvm.builder import Value, f32, vec

SIZE = 16


def has_lookup(x: Value) -> bool:
    """Whether the target has table lookup for vectors of this type."""
    return x.fn.target.avx512 and x.type.scalar is f32 and x.type.lanes <= SIZE


def lookup(table: tuple[float, ...], index: Value) -> Value:
    """table[index & 15] in each lane."""
    f, lanes, wide = index.fn, index.type.lanes, vec(SIZE, f32)
    if lanes == 1:
        index = f.splat(index, SIZE)
    elif lanes < SIZE:
        index = f.shuffle(index, None, [min(i, lanes - 1) for i in range(SIZE)])
    found = f.intrinsic("llvm.x86.avx512.permvar.sf.512", wide, f.const(table, wide), index)
    return found if lanes == SIZE else f.slice(found, 0, lanes)
