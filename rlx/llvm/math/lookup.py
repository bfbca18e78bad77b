"""Tables of 16 numbers that lie in a register, where the target can look numbers up in one."""

from __future__ import annotations

from rlx.llvm.builder import Value, f32, vec

SIZE = 16


def has_lookup(x: Value) -> bool:
    """Whether functions of such vectors may use tables."""
    return x.fn.target.avx512 and x.type.scalar is f32 and x.type.lanes <= SIZE


def lookup(table: tuple[float, ...], index: Value) -> Value:
    """For each lane the number of the table that the low 4 bits of its index name."""
    f, lanes, wide = index.fn, index.type.lanes, vec(SIZE, f32)
    if lanes == 1:
        index = f.splat(index, SIZE)
    elif lanes < SIZE:
        index = f.shuffle(index, None, [min(i, lanes - 1) for i in range(SIZE)])
    found = f.intrinsic("llvm.x86.avx512.permvar.sf.512", wide, f.const(table, wide), index)
    return found if lanes == SIZE else f.slice(found, 0, lanes)
