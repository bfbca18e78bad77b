"""Operands brought into the form the tiles want: queries packed, keys and values copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rlx.codegen.attention import Args, Problem, Rows
from rlx.codegen.attention_blocks import load_packed
from rlx.codegen.attention_pairs import halves, pairs
from rlx.codegen.attention_tiles import Tiling
from rlx.codegen.emit import Function, Module, Value, i64, ptr, vec
from rlx.codegen.storage import load, memory_type
from rlx.ir.dtype import DType

_UNROLL = 16  # chunks of a row that are copied in straight code


def emit_copy(m: Module, name: str, problem: Problem, t: Tiling) -> Function:
    """void copy_k(ptr src, i64 row, i64 step, i64 count, ptr dst): `count` rows of k or v.

    Keys become [count][head_dim], values slabs of [block][width]. Blocks are copied because rows
    of a state or of a joined tensor lie a power of two apart and would fight for cache sets.
    The last key is repeated up to a whole tile; where pairs are multiplied, an odd last value has
    itself as its neighbour.
    """
    params = [("src", ptr), ("row", i64), ("step", i64), ("count", i64), ("dst", ptr)]
    f = m.function(f"copy_{name}", params, internal=True)
    lanes = problem.chunk(name, f.target)
    slabs, last = name == "v", f["count"] - 1
    width = t.width * t.lanes if slabs else t.head_dim
    rows, chunks = (t.pair, 1) if slabs else (1, t.pair)
    repeats = rows if slabs else t.keys
    for row in f.range(0, f.ceil_div(f["count"], repeats) * repeats, rows):
        sources = [f.gep(f["src"], f.min(row + i, last) * f["row"]) for i in range(rows)]
        line = width * t.sums.bytes // chunks
        dst = f.gep(f["dst"], row.udiv(rows), line)
        for first in range(0, t.head_dim, width):
            to = f.gep(dst, first // width * t.slab_block_bytes)
            for d in _each(f, min(width, t.head_dim - first), lanes * chunks):
                found = [
                    _chunk(f, name, source, d + (first + i * lanes), lanes, problem)
                    for source in sources
                    for i in range(chunks)
                ]
                f.store(_joined(f, found, slabs), f.gep(to, d, t.sums.bytes // chunks))
    return f


def _chunk(f: Function, name: str, row: Value, at: Value, lanes: int, problem: Problem) -> Value:
    if problem.packed:
        return load_packed(f, row, at, lanes, problem.sums)
    gaps = name in problem.gaps
    return _read(f, row, at, f["step"], problem.dtype(name), lanes, problem, gaps)


def _joined(f: Function, found: list[Value], side_by_side: bool) -> Value:
    """One chunk as it is, or two as bf16."""
    if len(found) == 1:
        return found[0]
    return pairs(f, *found) if side_by_side else halves(f, *found)


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
    """void pack(args, batch, head, row, dst): a panel of queries, scaled, as [head_dim][rows] (of
    pairs, [head_dim / 2][rows]). Rows beyond the last repeat it."""
    item = [(name, i64) for name in ("batch", "head", "row")]
    f = m.function("pack", [("args", ptr), *item, ("dst", ptr)], internal=True)
    if "q" in problem.gaps or problem.head_dim % 4 or t.panel % 4:
        _pack_one(f, problem, t)
    else:
        _pack_four(f, problem, t)
    return f


def _rows(f: Function, problem: Problem) -> Callable[[Value], Value]:
    """Where each row of the panel lies."""
    rows = Rows(f, problem)
    address, last = rows.addresses("q", f["batch"], f["head"]), rows.count - 1
    return lambda number: address(f.min(f["row"] + number, last))


def _pack_one(f: Function, problem: Problem, t: Tiling) -> None:
    gaps, step = "q" in problem.gaps, Args(f).row_bytes("q", problem, "step")
    address = _rows(f, problem)
    for r in f.range(0, t.panel):
        row = address(r)
        for d in f.range(0, t.head_dim):
            value = _read(f, row, d, step, problem.q, 1, problem, gaps)
            to = f.gep(f.gep(f["dst"], d, t.panel_bytes), r, t.sums)
            f.store(value * problem.query_factor, to)


def _pack_four(f: Function, problem: Problem, t: Tiling) -> None:
    """Squares of four rows and four dimensions, turned in registers."""
    address = _rows(f, problem)
    for r in f.range(0, t.panel, 4):
        rows = [address(r + i) for i in range(4)]
        for d in f.range(0, t.head_dim, 4):
            a, b, c, e = (
                load(f, f.gep(row, d, memory_type(problem.q)), problem.q, 4, problem.sums)
                for row in rows
            )
            to = f.gep(f.gep(f["dst"], d.udiv(t.pair), t.panel_bytes), r, t.sums)
            low = f.shuffle(a, b, [0, 4, 1, 5]), f.shuffle(c, e, [0, 4, 1, 5])
            high = f.shuffle(a, b, [2, 6, 3, 7]), f.shuffle(c, e, [2, 6, 3, 7])
            turned = []
            for i, (x, y) in enumerate((low, low, high, high)):
                half = [2 * (i % 2), 2 * (i % 2) + 1]
                scale = f.const(problem.query_factor, vec(4, t.sums))
                turned.append(f.shuffle(x, y, [*half, *(h + 4 for h in half)]) * scale)
            for i in range(0, 4, t.pair):
                step = _joined(f, turned[i : i + t.pair], side_by_side=True)
                f.store(step, to, i // t.pair * t.panel_bytes)
