"""Softmax within a nest: its weights e^(x - max x), of which none is above 1."""

from __future__ import annotations

from rlx.loops.nest import Apply, Fold, Nest

# Ops of floats that give NaN wherever an operand is NaN.
_PASS_NAN = ("add", "sub", "mul", "div", "neg", "log", "reciprocal", "cast")


def is_weight(nest: Nest, i: Apply) -> bool:
    """Whether this is e^(x - max x), computed in f32 or wider."""
    return i.dtype.bits >= 32 and _peak_of(nest, i) is not None


def _peak_of(nest: Nest, i: Apply) -> int | None:
    """The maximum that is taken away from x before its exponential, if that is what `i` is."""
    if i.record.name != "exp" or not i.dtype.is_float:
        return None
    low = nest.code[i.operands[0]]
    if not isinstance(low, Apply) or low.record.name != "sub":
        return None
    x, top = low.operands
    peak = nest.code[top]
    found = isinstance(peak, Fold) and peak.kind == "max" and peak.operand == x
    return top if found else None


def may_lose_nan(nest: Nest, peak: int) -> bool:
    """Whether a maximum need not be NaN where an element is: weights of the element, and so their
    sum, are NaN then, and all that is stored comes from this sum."""
    touched, poisoned = {peak}, set[int]()
    for number, i in enumerate(nest.code):
        if not touched.intersection(i.args):
            continue
        touched.add(number)
        if isinstance(i, Fold):
            if i.kind == "sum" and _is_weight_of(nest, i.operand, peak):
                poisoned.add(number)
        elif not isinstance(i, Apply):
            return False
        elif i.dtype.is_float and i.record.name in _PASS_NAN and poisoned.intersection(i.args):
            poisoned.add(number)
    return bool(poisoned) and all(
        s.operand in poisoned for s in nest.stores if s.operand in touched
    )


def _is_weight_of(nest: Nest, number: int, peak: int) -> bool:
    i = nest.code[number]
    return isinstance(i, Apply) and _peak_of(nest, i) == peak
