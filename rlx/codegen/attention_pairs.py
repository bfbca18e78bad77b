"""Numbers rounded to bf16, for products that take them in pairs: twice as many as of f32."""

from __future__ import annotations

from rlx.codegen.emit import Function, Value, bf16, i16, vec
from rlx.codegen.target import Target

_LANES = 16


def has_pairs(target: Target, head_dim: int) -> bool:
    """Whether heads of this size can be multiplied so: whole vectors of pairs only."""
    fits = head_dim % (2 * _LANES) == 0 and target.lanes(32) == _LANES
    return fits and target.is_x86 and target.bf16


def halves(f: Function, first: Value, second: Value) -> Value:
    """The numbers of one vector and then those of another, as i16."""
    lanes = first.type.lanes
    name = f"llvm.x86.avx512bf16.cvtne2ps2bf16.{32 * lanes}"
    both = f.intrinsic(name, vec(2 * lanes, bf16), second, first)
    return both.bits(vec(2 * lanes, i16))


def pairs(f: Function, first: Value, second: Value) -> Value:
    """Numbers of two vectors side by side; a lane holds the first one's in its low half."""
    lanes = first.type.lanes
    order = [i // 2 + i % 2 * lanes for i in range(2 * lanes)]
    return f.shuffle(halves(f, first, second), None, order).bits(first.type)


def multiply(f: Function, a: Value, b: Value, total: Value) -> Value:
    """total + the sum of both products of every lane."""
    lanes = total.type.lanes
    wide = vec(2 * lanes, bf16)
    name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * lanes}"
    return f.intrinsic(name, total.type, total, a.bits(wide), b.bits(wide))


def parts(both: Value) -> list[Value]:
    """The numbers of pairs: those in the low halves of lanes, and those in the high ones."""
    bits = both.bits()
    return [(bits << 16).bits(both.type), (bits & 0xFFFF0000).bits(both.type)]
