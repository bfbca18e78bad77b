"""Learning rates as functions of the steps so far: numbers or arrays, outside `rlx.jit` and inside.

    rate = schedules.warmup(schedules.cosine(3e-4, 10_000), 500)
    float(rate(0)), float(rate(500))

They compute in f64: a rate of step 100,000 is as exact as the first. `cosine`, `step`,
`polynomial` and `one_cycle` are PyTorch's `CosineAnnealingLR`, `StepLR`, `PolynomialLR` and
`OneCycleLR`; `chain` joins any of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import rlx.numpy as rnp
from rlx.errors import OptionError
from rlx.ir.dtype import f64
from rlx.numpy.array import Array
from rlx.numpy.dispatch import as_array
from rlx.support.records import dataclass

Schedule: TypeAlias = Callable[[Any], Array]


def _float(step: Any) -> Array:
    return as_array(step).astype(f64)


def _check(where: str, steps: float) -> None:
    if not steps > 0:
        raise OptionError(
            "not a number of steps", where=f"schedules.{where}", got=repr(steps), expected="above 0"
        )


@dataclass(frozen=True)
class constant:
    """The same rate at every step."""

    value: float

    def __call__(self, step: Any) -> Array:
        return _float(step) * 0 + self.value


@dataclass(frozen=True)
class linear:
    """From `start` to `end` in so many steps, then `end`."""

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        _check("linear", self.steps)

    def __call__(self, step: Any) -> Array:
        done = rnp.minimum(_float(step) / self.steps, 1.0)
        return self.start * (1 - done) + self.end * done


@dataclass(frozen=True)
class cosine:
    """From `start` to `end` along half a cosine, then `end`."""

    start: float
    steps: int
    end: float = 0.0

    def __post_init__(self) -> None:
        _check("cosine", self.steps)

    def __call__(self, step: Any) -> Array:
        done = rnp.minimum(_float(step) / self.steps, 1.0)
        return self.end + (self.start - self.end) * 0.5 * (1 + rnp.cos(math.pi * done))


@dataclass(frozen=True)
class polynomial:
    """`start` times (1 − step / steps) to the `power`, then 0."""

    start: float
    steps: int
    power: float = 1.0

    def __post_init__(self) -> None:
        _check("polynomial", self.steps)

    def __call__(self, step: Any) -> Array:
        left = 1 - rnp.minimum(_float(step) / self.steps, 1.0)
        return self.start * left**self.power


@dataclass(frozen=True)
class inverse_sqrt:
    """Linear up to `peak` in the first steps, then falling as 1 / √step."""

    peak: float
    warmup: int

    def __post_init__(self) -> None:
        _check("inverse_sqrt", self.warmup)

    def __call__(self, step: Any) -> Array:
        n = _float(step)
        return self.peak * rnp.where(
            n < self.warmup, n / self.warmup, rnp.sqrt(self.warmup / rnp.maximum(n, 1.0))
        )


@dataclass(frozen=True)
class step:
    """Times `factor` after each `every` steps."""

    start: float
    every: int
    factor: float = 0.1

    def __post_init__(self) -> None:
        _check("step", self.every)

    def __call__(self, step: Any) -> Array:
        return self.start * self.factor ** rnp.floor(_float(step) / self.every)


@dataclass(frozen=True)
class one_cycle:
    """Along half cosines up to `peak` and down again: from peak / `div`, in the first `rise` of the
    steps, and then to peak / div / `final_div`."""

    peak: float
    steps: int
    rise: float = 0.3
    div: float = 25.0
    final_div: float = 1e4

    def __post_init__(self) -> None:
        _check("one_cycle", self.rise * self.steps - 1)

    def __call__(self, step: Any) -> Array:
        n, top = _float(step), self.rise * self.steps - 1
        low, last = self.peak / self.div, self.peak / self.div / self.final_div
        up = _between(low, self.peak, n / top)
        down = _between(self.peak, last, (n - top) / (self.steps - 1 - top))
        return rnp.where(n <= top, up, down)


def _between(a: float, b: float, done: Array) -> Array:
    return b + (a - b) * 0.5 * (1 + rnp.cos(math.pi * rnp.minimum(done, 1.0)))


@dataclass(frozen=True)
class chain:
    """Schedules one after the other: each but the last with its steps, which begin at 0 again."""

    parts: Sequence[tuple[Schedule, int]]
    last: Schedule

    def __post_init__(self) -> None:
        for _, steps in self.parts:
            _check("chain", steps)

    def __call__(self, step: Any) -> Array:
        ends = [sum(n for _, n in self.parts[: i + 1]) for i in range(len(self.parts))]
        number = as_array(step)
        rate = self.last(rnp.maximum(number - (ends[-1] if ends else 0), 0))
        for (part, steps), end in reversed(list(zip(self.parts, ends, strict=True))):
            rate = rnp.where(number < end, part(rnp.maximum(number - (end - steps), 0)), rate)
        return rate


def warmup(after: Schedule | float, steps: int, start: float = 0.0) -> Schedule:
    """Linear from `start` to the first rate of `after` in so many steps; then `after`."""
    then = after if callable(after) else constant(after)
    return chain(((linear(start, float(then(0)), steps), steps),), then)
