"""A piece of a key or value, as one lane loads it: 16 bytes of floats, or 8 codes of Q8_0.

Q8_0 rows are blocks of 34 bytes: a scale in f16, then 32 codes in i8. Blocks are aligned to 2 bytes
only, so codes are loaded two at a time.
"""

from __future__ import annotations

from rlx.backends.cuda.builder import BlockFunction
from rlx.backends.cuda.kernels.attention.attention_problem import AttentionForm
from rlx.backends.cuda.kernels.gemm.weight_rows import Raw, floats_of, words
from rlx.llvm.builder import Value, f16, f32, i16, i32, i64

BLOCK = 32  # numbers that share a scale
BLOCK_BYTES = 34
_CODES = 8  # of a piece


def piece_numbers(form: AttentionForm) -> int:
    """Numbers of a piece."""
    return _CODES if form.q8 else 16 // form.kv.bytes


def piece_at(f: BlockFunction, form: AttentionForm, row: Value, piece: Value) -> Value:
    """Where a piece (i32) of a row begins; of Q8_0, where its codes begin."""
    if not form.q8:
        return f.gep(row, piece.to(i64), 16)
    block, inside = piece >> 2, piece & 3
    return f.gep(row, (block * BLOCK_BYTES + inside * _CODES + 2).to(i64))


def load_piece(f: BlockFunction, form: AttentionForm, row: Value, piece: Value) -> Raw:
    """Values of 32 bits; of Q8_0 two with four codes each, and the scale."""
    at = piece_at(f, form, row, piece)
    if not form.q8:
        return words(f, at, 4)
    halves = [f.load(at, i16, 2 * i).to(i32, signed=False) for i in range(4)]
    scale = f.load(f.gep(row, ((piece >> 2) * BLOCK_BYTES).to(i64)), f16).to(f32)
    return [*(low | (high << 16) for low, high in zip(halves[::2], halves[1::2], strict=True)),
            scale.bits()]  # fmt: skip


def numbers_of(f: BlockFunction, form: AttentionForm, raw: Raw) -> tuple[list[Value], Value | None]:
    """The numbers of a piece, and what all of them are to be multiplied with."""
    if not form.q8:
        return floats_of(f, raw, form.kv), None
    *packed, scale = raw
    codes = [(word << (24 - 8 * i)).ashr(24) for word in packed for i in range(4)]
    return [code.to(f32) for code in codes], scale.bits(f32)
