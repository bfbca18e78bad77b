"""Operands brought into the form the tiles want: queries packed, keys and values copied."""

from __future__ import annotations

from collections.abc import Iterator

from rlx.codegen.attention import Problem
from rlx.codegen.attention_blocks import load_packed
from rlx.codegen.attention_tiles import Tiling
from rlx.codegen.emit import Function, Module, Value, i64, ptr, vec
from rlx.codegen.storage import load, memory_type
from rlx.ir.dtype import DType

_UNROLL = 16  # chunks of a row that are copied in straight code


def emit_copy(m: Module, name: str, problem: Problem, t: Tiling) -> Function:
    """void copy_k(ptr src, i64 row, i64 step, i64 count, ptr dst): `count` rows of k or v.

    Keys become [count][head_dim], values slabs of [block][width]. Blocks are copied because rows
    of a state or of a joined tensor lie a power of two apart and would fight for cache sets.
    """
    params = [("src", ptr), ("row", i64), ("step", i64), ("count", i64), ("dst", ptr)]
    f = m.function(f"copy_{name}", params, internal=True)
    dtype, lanes = problem.dtype(name), problem.chunk(name, f.target)
    slabs = name == "v"
    width = t.width * t.lanes if slabs else t.head_dim
    jump = t.block * width * t.sums.bytes
    for row in f.range(0, f["count"]):
        src = f.gep(f["src"], row * f["row"])
        dst = f.gep(f["dst"], row, width * t.sums.bytes)
        for first in range(0, t.head_dim, width):
            to = f.gep(dst, first // width * jump)
            for d in _each(f, min(width, t.head_dim - first), lanes):
                at = d + first
                if problem.packed:
                    value = load_packed(f, src, at, lanes, problem.sums)
                else:
                    gaps = name in problem.gaps
                    value = _read(f, src, at, f["step"], dtype, lanes, problem, gaps)
                f.store(value, f.gep(to, d, t.sums))
    return f


def _each(f: Function, count: int, step: int) -> Iterator[Value]:
    """Multiples of step below count, in straight code when they are few."""
    if count > step * _UNROLL:
        yield from f.range(0, count, step)
    else:
        yield from (f.i64(i) for i in range(0, count, step))


def _read(
    f: Function,
    row: Value,
    at: Value,
    step: Value,
    dtype: DType,
    lanes: int,
    problem: Problem,
    gaps: bool,
) -> Value:
    where = f.gep(row, at * step) if gaps else f.gep(row, at, memory_type(dtype))
    return load(f, where, dtype, lanes, problem.sums)


def emit_pack(m: Module, problem: Problem, t: Tiling) -> Function:
    """void pack(ptr rows, i64 step, ptr dst): a panel of queries, scaled, as [head_dim][rows].

    `rows` is a table of the rows' addresses.
    """
    f = m.function("pack", [("rows", ptr), ("step", i64), ("dst", ptr)], internal=True)
    if "q" in problem.gaps or problem.head_dim % 4 or t.panel % 4:
        _pack_one(f, problem, t)
    else:
        _pack_four(f, problem, t)
    return f


def _pack_one(f: Function, problem: Problem, t: Tiling) -> None:
    gaps = "q" in problem.gaps
    for r in f.range(0, t.panel):
        row = f.load(f.gep(f["rows"], r, 8), ptr)
        for d in f.range(0, t.head_dim):
            value = _read(f, row, d, f["step"], problem.q, 1, problem, gaps)
            to = f.gep(f.gep(f["dst"], d, t.panel_bytes), r, t.sums)
            f.store(value * problem.query_factor, to)


def _pack_four(f: Function, problem: Problem, t: Tiling) -> None:
    """Squares of four rows and four dimensions, turned in registers."""
    for r in f.range(0, t.panel, 4):
        table = f.gep(f["rows"], r, 8)
        rows = [f.load(table, ptr, 8 * i) for i in range(4)]
        for d in f.range(0, t.head_dim, 4):
            a, b, c, e = (
                load(f, f.gep(row, d, memory_type(problem.q)), problem.q, 4, problem.sums)
                for row in rows
            )
            to = f.gep(f.gep(f["dst"], d, t.panel_bytes), r, t.sums)
            low = f.shuffle(a, b, [0, 4, 1, 5]), f.shuffle(c, e, [0, 4, 1, 5])
            high = f.shuffle(a, b, [2, 6, 3, 7]), f.shuffle(c, e, [2, 6, 3, 7])
            for i, (x, y) in enumerate((low, low, high, high)):
                half = [2 * (i % 2), 2 * (i % 2) + 1]
                turned = f.shuffle(x, y, [*half, *(h + 4 for h in half)])
                scale = f.const(problem.query_factor, vec(4, t.sums))
                f.store(turned * scale, to, i * t.panel_bytes)
