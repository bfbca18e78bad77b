"""Softmax in a nest: its weights exp(x - max x) are at most 1, so a cheaper exp will do."""

from __future__ import annotations

from rlx.loops.nest import Apply, Nest, Reduce

# Ops of floats that give NaN wherever an operand is NaN.
_PASS_NAN = ("add", "sub", "mul", "div", "neg", "log", "reciprocal", "cast")


def is_weight(nest: Nest, i: Apply) -> bool:
    """Whether this is exp(x - max x), computed in f32 or wider."""
    return i.dtype.bits >= 32 and _max_of(nest, i) is not None


def _max_of(nest: Nest, i: Apply) -> int | None:
    """The instruction of max x, if `i` is exp(x - max x)."""
    if i.record.name != "exp" or not i.dtype.is_float:
        return None
    low = nest.code[i.operands[0]]
    if not isinstance(low, Apply) or low.record.name != "sub":
        return None
    x, top = low.operands
    row_max = nest.code[top]
    found = isinstance(row_max, Reduce) and row_max.kind == "max" and row_max.operand == x
    return top if found else None


def may_drop_nan(nest: Nest, row_max: int) -> bool:
    """Whether a maximum may ignore NaN: a NaN element makes its weight and the sum of weights NaN,
    and every store that depends on the maximum is computed from this sum."""
    dependent, poisoned = {row_max}, set[int]()
    for number, i in enumerate(nest.code):
        if not dependent.intersection(i.args):
            continue
        dependent.add(number)
        if isinstance(i, Reduce):
            if i.kind == "sum" and _is_weight_of(nest, i.operand, row_max):
                poisoned.add(number)
        elif not isinstance(i, Apply):
            return False
        elif i.dtype.is_float and i.record.name in _PASS_NAN and poisoned.intersection(i.args):
            poisoned.add(number)
    return bool(poisoned) and all(
        s.operand in poisoned for s in nest.stores if s.operand in dependent
    )


def _is_weight_of(nest: Nest, number: int, row_max: int) -> bool:
    i = nest.code[number]
    return isinstance(i, Apply) and _max_of(nest, i) == row_max
