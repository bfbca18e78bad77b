"""Rows packed as blocks of Q8_0, as keys and values of a KV cache are: a warp for each row."""

from __future__ import annotations

from typing import Any

from rlx.backends.cuda.append import Append
from rlx.backends.cuda.builder import WARP, BlockFunction, KernelModule
from rlx.backends.cuda.kernel import BlockKernel
from rlx.backends.cuda.kernels.rotary.slots import Slots, slot_args
from rlx.backends.cuda.lowering import Context, KernelLaunch, lowers
from rlx.backends.kernel_args import Pointer
from rlx.ir.dim import Dim
from rlx.ir.dtype import DType
from rlx.ir.node import Node
from rlx.ir.quant.scheme import GGUF_SCHEMES
from rlx.llvm.builder import Value, f16, f32, i8, i32, i64
from rlx.llvm.storage import load
from rlx.support.records import dataclass

_WARPS = 8
_SCHEME = GGUF_SCHEMES["Q8_0"]
_SMALLEST_NORMAL = 2.0**-126
_FLOATS = ("f32", "bf16", "f16")


@dataclass(frozen=True)
class PackRows(BlockKernel):
    """args: x, result, status, error number, slots, slots of the state, tokens, heads, rows,
    strides of x (token, head; elements) and of the result (token, head; bytes)

    A row is a head of a token, `width` numbers. With `slots`, it goes to the slots of a state.
    """

    x: DType
    width: int
    slots: bool

    @property
    def label(self) -> str:
        return "pack(q8_0)"

    @property
    def threads(self) -> int:
        return _WARPS * WARP

    def emit(self, m: KernelModule) -> None:
        f = m.begin_block(self.threads)
        row = f.block_number().to(i64) * _WARPS + (f.thread() >> 5).to(i64)
        f.let_next_start()
        f.wait_for_previous()
        f.if_(row < f.arg(f["args"], 8, i64), lambda: self._emit_row(f, row))

    def _emit_row(self, f: BlockFunction, row: Value) -> None:
        args = f["args"]
        slots = Slots(f, args, 2, self.slots)
        tokens, heads = (f.arg(args, i, i64) for i in (6, 7))
        token = row.udiv(heads)
        head = row - token * heads
        slot, known, wins = slots.place(token, tokens)
        strides = [f.arg(args, i, i64) for i in range(9, 13)]
        x = f.gep(f.arg(args, 0), token * strides[0] + head * strides[1], self.x.bytes)
        to = f.gep(f.arg(args, 1), slot * strides[2] + head * strides[3])

        def pack() -> None:
            for i in range(self.width // WARP):
                _pack_block(f, self.x, f.gep(x, i * WARP, self.x.bytes), f.gep(to, i * 34))

        if known is None or wins is None:
            pack()
        else:
            f.if_(known, lambda: drop(f.if_(wins, pack)), slots.report)


def _pack_block(f: BlockFunction, dtype: DType, x: Value, to: Value) -> None:
    """Rounds as `quant.encode` does: by the inverse of the scale before that becomes f16, and
    halves away from zero. The fraction is exact, so halves are recognised."""
    lane = f.lane32()
    number = load(f, f.gep(x, lane.to(i64), dtype.bytes), dtype, 1, f32)
    scale = f.warp_max(f.abs(number)) / 127.0
    inverse = f.select(scale < _SMALLEST_NORMAL, 0.0, 1.0 / scale)
    with f.exact():
        scaled = number * inverse
        whole = scaled.to(i32)
        rest = scaled - whole.to(f32)
    up, down = (f.select(c, f.i32(1), 0) for c in (rest >= 0.5, rest <= -0.5))
    f.store((whole + up - down).to(i8), f.gep(to, lane.to(i64)), 2)
    f.if_(lane.eq(0), lambda: f.store(scale.to(f16), to))


def _suits(node: Node) -> bool:
    return node.inputs[0].dtype.name in _FLOATS


@lowers("quantize_blocks", when=_suits, strided=False)
def lower_pack(node: Node, ctx: Context) -> list[KernelLaunch]:
    x = node.inputs[0]
    *outer, width = x.shape.dims
    assert isinstance(width, int)
    if 0 in x.shape.dims:
        return []
    tokens: Dim = 1
    for dim in outer:
        tokens = tokens * dim
    append, row, strides = ctx.append_of(node), width, None
    if append is not None:
        row, strides = _heads(append, width, tokens)
    if append is None or strides is None:
        append, row, strides = None, width, (_SCHEME.row_bytes(width), 0)
    else:
        ctx.absorb(append)
    out = node.output if append is None else append.state
    heads = width // row
    args = [
        Pointer(x), Pointer(out, 0 if append is None else append.offset),
        *slot_args(node, append), tokens, heads, tokens * heads, width, row, *strides,
    ]  # fmt: skip
    kernel = PackRows(x.dtype, row, append is not None and append.slots is not None)
    return [
        KernelLaunch(
            kernel, args, blocks=-(-ctx.upper(tokens * heads) // _WARPS),
            node=None if append is None else append.node, reads=[x], writes=[out],
        )
    ]  # fmt: skip


def _heads(append: Append, width: int, tokens: Dim) -> tuple[int, tuple[Dim, Dim] | None]:
    """How many numbers a head has, and the strides of tokens and heads in the state; None where the
    state lies otherwise."""
    last: Any = append.dims[-1]
    if last[1:] != (1, 1) or not isinstance(last[0], int) or last[0] % 34:
        return width, None
    row, total = _SCHEME.row_elements(last[0]), _SCHEME.row_bytes(width)
    head = 0 if row == width else append.stride(width // row, last[0])
    token = append.axis[1] if append.slots is not None else append.stride(tokens, total)
    if token is None or head is None or not append.has_tokens(tokens, total):
        return width, None
    known = 1 + (row != width) + (tokens != 1)
    return row, (token, head) if len(append.dims) == known else None


def drop(value: object) -> None:
    """Use a result for its effect alone."""
