"""Philox4x32-10 as code: the number that decides which token a row draws."""

from __future__ import annotations

from rlx.backends.cuda.builder import BlockFunction
from rlx.ir.philox import ROUNDS
from rlx.llvm.builder import Value, f64, i64

_LOW = 0xFFFFFFFF
_MULTIPLY = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85


def emit_uniform(f: BlockFunction, rng: Value, row: Value) -> Value:
    """A number in [0, 1) of the row, from (seed, counter) in memory."""
    seed, counter = f.load(rng, i64), f.load(rng, i64, 8)
    c = [counter & _LOW, counter >> 32, row.to(i64, signed=False), f.i64(0)]
    k = [seed & _LOW, seed >> 32]
    for _ in range(ROUNDS):
        a, b = c[0] * _MULTIPLY[0], c[2] * _MULTIPLY[1]
        c = [(b >> 32) ^ c[1] ^ k[0], b & _LOW, (a >> 32) ^ c[3] ^ k[1], a & _LOW]
        k = [(k[0] + _WEYL[0]) & _LOW, (k[1] + _WEYL[1]) & _LOW]
    return c[0].to(f64) * 2.0**-32
