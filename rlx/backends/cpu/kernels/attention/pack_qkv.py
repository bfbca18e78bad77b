"""Packing for prefill: queries into panels, the keys and values of a KV block copied together."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rlx.backends.cpu.kernels.attention.problem import Args, Problem, Rows
from rlx.backends.cpu.kernels.attention.q8_cache import load_q8
from rlx.backends.cpu.kernels.attention.tiles import Tiling, interleave_bf16, to_bf16
from rlx.ir.dtype import DType
from rlx.llvm.builder import Function, Module, Value, i64, ptr, vec
from rlx.llvm.storage import load, memory_type

_MAX_UNROLL = 16  # vectors of a row that are copied without a loop


def emit_copy_kv(m: Module, name: str, problem: Problem, t: Tiling) -> Function:
    """void copy_k(ptr src, i64 row, i64 step, i64 count, ptr dst): `count` rows of k or v.

    Keys become [count][head_dim], values panels of [block][width]. The copy avoids cache conflicts:
    rows of a KV cache or of a concatenated tensor are a power of two apart. The last key is
    repeated up to a whole tile; with the bf16 dot product an odd last value is paired with itself.
    """
    params = [("src", ptr), ("row", i64), ("step", i64), ("count", i64), ("dst", ptr)]
    f = m.function(f"copy_{name}", params, internal=True)
    lanes = problem.vector_width(name, f.target)
    is_values, last = name == "v", f["count"] - 1
    width = t.width * t.lanes if is_values else t.head_dim
    rows, vectors = (t.pair, 1) if is_values else (1, t.pair)
    repeats = rows if is_values else t.keys
    for row in f.range(0, f.ceil_div(f["count"], repeats) * repeats, rows):
        sources = [f.gep(f["src"], f.min(row + i, last) * f["row"]) for i in range(rows)]
        row_bytes = width * t.acc.bytes // vectors
        dst = f.gep(f["dst"], row.udiv(rows), row_bytes)
        for first in range(0, t.head_dim, width):
            to = f.gep(dst, first // width * t.v_panel_bytes)
            for d in _steps(f, min(width, t.head_dim - first), lanes * vectors):
                found = [
                    _load_kv(f, name, source, d + (first + i * lanes), lanes, problem)
                    for source in sources
                    for i in range(vectors)
                ]
                f.store(_as_bf16(f, found, is_values), f.gep(to, d, t.acc.bytes // vectors))
    return f


def _load_kv(f: Function, name: str, row: Value, at: Value, lanes: int, problem: Problem) -> Value:
    if problem.q8_kv:
        return load_q8(f, row, at, lanes, problem.acc)
    strided = name in problem.strided
    return _read(f, row, at, f["step"], problem.dtype(name), lanes, problem, strided)


def _as_bf16(f: Function, found: list[Value], interleaved: bool) -> Value:
    """One vector as it is, or two as bf16."""
    if len(found) == 1:
        return found[0]
    return interleave_bf16(f, *found) if interleaved else to_bf16(f, *found)


def _steps(f: Function, count: int, step: int) -> Iterator[Value]:
    """Multiples of step below count, unrolled when they are few."""
    if count > step * _MAX_UNROLL:
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
    strided: bool,
) -> Value:
    where = f.gep(row, at * step) if strided else f.gep(row, at, memory_type(dtype))
    return load(f, where, dtype, lanes, problem.acc)


def emit_pack_q(m: Module, problem: Problem, t: Tiling) -> Function:
    """void pack(args, batch, head, row, dst): a query panel, scaled, as [head_dim][rows] (bf16
    pairs: [head_dim / 2][rows]). Rows beyond the last repeat it."""
    item = [(name, i64) for name in ("batch", "head", "row")]
    f = m.function("pack", [("args", ptr), *item, ("dst", ptr)], internal=True)
    if "q" in problem.strided or problem.head_dim % 4 or t.panel % 4:
        _pack_scalar(f, problem, t)
    else:
        _pack_transposed(f, problem, t)
    return f


def _row_address(f: Function, problem: Problem) -> Callable[[Value], Value]:
    """The address of each row of the panel."""
    rows = Rows(f, problem)
    address, last = rows.addresses("q", f["batch"], f["head"]), rows.count - 1
    return lambda number: address(f.min(f["row"] + number, last))


def _pack_scalar(f: Function, problem: Problem, t: Tiling) -> None:
    strided, step = "q" in problem.strided, Args(f).row_bytes("q", problem, "step")
    address = _row_address(f, problem)
    for r in f.range(0, t.panel):
        row = address(r)
        for d in f.range(0, t.head_dim):
            value = _read(f, row, d, step, problem.q, 1, problem, strided)
            to = f.gep(f.gep(f["dst"], d, t.score_row_bytes), r, t.acc)
            f.store(value * problem.query_factor, to)


def _pack_transposed(f: Function, problem: Problem, t: Tiling) -> None:
    """4x4 blocks of rows and dimensions, transposed in registers."""
    address = _row_address(f, problem)
    for r in f.range(0, t.panel, 4):
        rows = [address(r + i) for i in range(4)]
        for d in f.range(0, t.head_dim, 4):
            a, b, c, e = (
                load(f, f.gep(row, d, memory_type(problem.q)), problem.q, 4, problem.acc)
                for row in rows
            )
            to = f.gep(f.gep(f["dst"], d.udiv(t.pair), t.score_row_bytes), r, t.acc)
            low = f.shuffle(a, b, [0, 4, 1, 5]), f.shuffle(c, e, [0, 4, 1, 5])
            high = f.shuffle(a, b, [2, 6, 3, 7]), f.shuffle(c, e, [2, 6, 3, 7])
            transposed = []
            for i, (x, y) in enumerate((low, low, high, high)):
                half = [2 * (i % 2), 2 * (i % 2) + 1]
                scale = f.const(problem.query_factor, vec(4, t.acc))
                transposed.append(f.shuffle(x, y, [*half, *(h + 4 for h in half)]) * scale)
            for i in range(0, 4, t.pair):
                step = _as_bf16(f, transposed[i : i + t.pair], interleaved=True)
                f.store(step, to, i // t.pair * t.score_row_bytes)
