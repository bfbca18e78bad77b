"""Keys and values as matrices for the copy engine: a row is a token of one head, or of all."""

from __future__ import annotations

from rlx.backends.cuda.kernels.attention.attention_problem import Attend
from rlx.backends.cuda.lowering import Context
from rlx.backends.cuda.tensor_map import Matrix, TensorMap
from rlx.backends.kernel_args import Pointer
from rlx.ir.dim import Dim
from rlx.ir.node import Value

Places = tuple[Dim, Dim, Dim]


def key_rows(
    attend: Attend, number: int, box: int, ctx: Context
) -> tuple[TensorMap, Places] | None:
    """The tensor map of input `number`, in tiles of `box` tokens, and how far it is: rows from a
    sequence to the next, rows and columns from a head to the next. None where it is no matrix, or
    where a run may have less memory than the most tokens need."""
    value, form = attend.node.inputs[number], attend.form
    start = ctx.offset(value)
    batch, head, token = attend.strides[number]
    if not all(isinstance(s, int) for s in (start, batch, head, token)):
        return None
    assert isinstance(start, int) and isinstance(batch, int)
    assert isinstance(head, int) and isinstance(token, int)
    if not isinstance(attend.keys, int) and ctx.lir.home(value)[1].kind not in ("arena", "state"):
        return None
    sequences, heads = ctx.upper(attend.batch), form.kv_heads
    if sequences > 1 and batch % token:
        return None
    by_batch = batch // token if sequences > 1 else 0
    if heads == 1 or head % token == 0:
        by_head, across = head // token if heads > 1 else 0, 0
    elif heads * head <= token:
        by_head, across = 0, head
    else:
        return None
    columns = (heads - 1) * across + form.dim
    wanted = (sequences - 1) * by_batch + (heads - 1) * by_head + ctx.upper(attend.keys)
    rows = min(wanted, _rows_of_memory(value, start, token, columns, ctx))
    matrix = Matrix(form.kv, rows, columns, token, box)
    return TensorMap(Pointer(value), matrix), (by_batch, by_head, across)


def _rows_of_memory(value: Value, start: int, stride: int, columns: int, ctx: Context) -> int:
    """How many rows there are behind the first in the memory that a value is part of."""
    root = ctx.lir.home(value)[0]
    size = root.shape.upper_bytes(ctx.lir.live) // value.dtype.bytes
    return (size - start - columns) // stride + 1
