"""Philox4x32-10 in scalar code: the same words as `rlx.ir.philox`."""

from __future__ import annotations

from rlx.codegen.emit import Function, Value, f64
from rlx.ir.philox import ROUNDS

_LOW = 0xFFFFFFFF
_MULTIPLY = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def uniform(f: Function, seed: Value, counter: Value, row: Value) -> Value:
    """An f64 in [0, 1) from word 0 with key `seed` at counter (counter, row); all are i64."""
    start = [counter & _LOW, counter >> 32, row & _LOW, row >> 32, seed & _LOW, seed >> 32]

    def turn(_: Value, c0: Value, c1: Value, c2: Value, c3: Value, *key: Value) -> list[Value]:
        a, b = c0 * _MULTIPLY[0], c2 * _MULTIPLY[1]
        k0, k1 = key
        mixed = [(b >> 32) ^ c1 ^ k0, b & _LOW, (a >> 32) ^ c3 ^ k1, a & _LOW]
        return [*mixed, k0 + _WEYL[0] & _LOW, k1 + _WEYL[1] & _LOW]

    word, *_ = f.loop(0, ROUNDS, 1, start, turn)
    return word.to(f64) * 2.0**-32
