"""The derivatives of a case by RLX, under the names that `make_derivatives.py` gives its own."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
from derivative_cases import directions

import rlx
import rlx.numpy as rnp
from rlx.nn import functional as F

Arrays = dict[str, Any]


def wide(arrays: Arrays) -> Arrays:
    return {k: v.astype(np.float64) if v.dtype == np.float32 else v for k, v in arrays.items()}


def derivatives(
    name: str, expression: str, case: Any, arrays: Arrays, known: Collection[str], draw: int = 0
) -> Iterator[tuple[str, Any]]:
    """The cotangent of each input for a drawn one of the result, and how these change along drawn
    directions: those whose names are `known`."""
    moving = {k: rnp.asarray(v) for k, v in arrays.items() if v.dtype.kind in "fc"}
    fixed = {k: rnp.asarray(v) for k, v in arrays.items() if k not in moving}

    def f(moving: Arrays) -> Any:
        return eval(expression, {"np": rnp, "F": F, **fixed, **moving})

    y, pullback = rlx.vjp(f, moving)
    ct = directions(case, draw, {"y": np.asarray(y)}, "ct")["y"]
    vs = directions(case, draw, arrays, "v")
    firsts = [k for k in moving if f"{name}/{draw}/d{k}" in known]
    assert firsts, f"nobody knows the derivative of {name}"
    found = pullback(ct)[0]
    yield from ((f"{name}/{draw}/d{k}", found[k]) for k in firsts)
    if not any(f"{name}/{draw}/dd{k}" in known for k in moving):
        return

    def along(moving: Arrays) -> Any:
        (cts,) = rlx.vjp(f, moving)[1](ct)
        return sum(rnp.sum(rnp.real(cts[k] * vs[k])) for k in vs if k in firsts)

    for k, second in rlx.grad(along)(moving).items():
        if f"{name}/{draw}/dd{k}" in known:
            yield f"{name}/{draw}/dd{k}", second


def distance(found: Any, expected: Any) -> float:
    """How far they are apart, relative to the largest element and 1; infinite where one is not
    finite and the other is something else."""
    found = np.asarray(found)
    fine = np.isfinite(expected)
    if found.shape != expected.shape or not np.array_equal(np.isfinite(found), fine):
        return np.inf
    if not np.array_equal(found[~fine], expected[~fine].astype(found.dtype), equal_nan=True):
        return np.inf
    size = 1 + np.max(np.abs(expected[fine]), initial=0.0)
    return float(np.max(np.abs(found[fine] - expected[fine]), initial=0.0) / size)
