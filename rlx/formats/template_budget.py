"""What a chat template may spend: steps, CPU time, and the sizes of the values it makes.

The size of a value is about the number of characters it has when it is printed. Whatever a template
makes is measured when it is made, so no value outgrows the bound, not even one that holds others
many times.
"""

from __future__ import annotations

import re
import time
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

from rlx.errors import FormatError

_VALUE = 1 << 22  # size of one value
_TOTAL = 1 << 25  # of all values made, and of the text
_STEPS = 1 << 19  # loops, calls, filters, operators
_SECONDS = 2.0  # of CPU time
_PER_STEP = 1 << 10  # characters that are read in about the time of a step
_BITS = 1 << 12  # of a whole number
_ITEM = 4  # what an item of a list adds to its own size
_OTHER = 8  # the size of what is neither text nor a container


class Budget:
    """What one rendering may still spend. What it is given adds to it."""

    def __init__(self, given: object = ()) -> None:
        # by id: the container, which does not change in the sandbox, its size and depth
        self._known: dict[int, tuple[object, int, int]] = {}
        more = self.size(given)
        self._value, self._total = _VALUE + 4 * more, _TOTAL + 64 * more
        self._steps = _STEPS + more
        self._until = time.thread_time() + _SECONDS + more * 1e-6
        self._next_look = self._steps

    def step(self, count: int = 1) -> None:
        """Something was done that takes a microsecond, or `count` of them."""
        self._steps -= count
        if self._steps <= self._next_look:
            self._next_look = self._steps - 64
            if self._steps < 0 or time.thread_time() > self._until:
                _refuse("time")

    def read(self, *values: object) -> None:
        """The values are read from one end to the other."""
        self.step(1 + sum(map(self.size, values)) // _PER_STEP)

    def allow(self, size: int) -> None:
        """A value of this size may be made."""
        if size > self._value:
            _refuse("memory")

    def write(self, size: int) -> None:
        """Text of this size joins the output."""
        self._total -= size
        if self._total < 0:
            _refuse("memory")

    def made(self, value: Any) -> Any:
        """The value, which was made just now."""
        if isinstance(value, int) and value.bit_length() > _BITS:
            _refuse("memory")
        size = self.size(value)
        self.allow(size)
        self.write(size)
        self.step(1 + size // _PER_STEP)
        return self.each(value) if isinstance(value, Iterator) else value

    def each(self, values: Iterable[Any], written: int = 0) -> Iterator[Any]:
        """The values, each a step; a loop's body may write that much of the template's text."""
        for value in values:
            self.step()
            self.write(written)
            yield value

    def size(self, value: object) -> int:
        return self.measure(value)[0]

    def measure(self, value: Any) -> tuple[int, int]:
        """The size of a value, and how deep it nests."""
        if isinstance(value, str | bytes | range):
            return len(value), 0
        known = self._known.get(id(value))
        if known is not None:
            return known[1:]
        if isinstance(value, Mapping):
            parts = [part for pair in value.items() for part in pair]
        elif isinstance(value, list | tuple | ItemsView | KeysView | ValuesView):
            parts = list(value)
        else:
            return _OTHER, 0
        found = [self.measure(part) for part in parts]
        size = sum(size for size, _ in found) + _ITEM * len(found)
        depth = 1 + max((depth for _, depth in found), default=0)
        self._known[id(value)] = (value, size, depth)
        return size, depth

    def joined(self, left: Any, right: Any, value: Any) -> Any:
        """The list `value`, which was made of two others: only its items are new, not theirs."""
        (size, depth), (more, deeper) = self.measure(left), self.measure(right)
        self._known[id(value)] = (value, size + more, max(depth, deeper))
        self.write(len(value))
        self.step(1 + len(value) // _PER_STEP)
        return value


def _refuse(what: str) -> NoReturn:
    raise FormatError(
        f"the chat template takes too much {what}",
        expected=f"{_STEPS} steps" if what == "time" else f"values of {_VALUE} characters",
        hint="templates that models come with take a thousandth of that",
    )


_current: ContextVar[Budget | None] = ContextVar("budget", default=None)


@contextmanager
def spending(budget: Budget) -> Iterator[None]:
    """Templates spend from this budget meanwhile."""
    token = _current.set(budget)
    try:
        yield
    finally:
        _current.reset(token)


def budget() -> Budget:
    """The budget of the rendering that runs."""
    return _current.get() or Budget()


# -- how large results will be ----------------------------------------------------------------

_PERCENT = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(\*|\d*)(?:\.(\*|\d*))?")


def percent_size(text: str, values: object) -> int:
    """At most the size of `text % values`."""
    return _filled(text, values, [n for pair in _PERCENT.findall(text) for n in pair])


def format_size(text: str, values: object) -> int:
    """At most the size of `text.format(values)`."""
    nested = re.search(r"\{[^{}]*\{", text.replace("{{", ""))
    return _filled(text, values, ["*"] if nested else re.findall(r"\d+", text))


def _filled(text: str, values: object, widths: list[str]) -> int:
    if any(w == "*" or len(w) > 9 for w in widths):  # a width that is a value, or a huge one
        _refuse("memory")
    fields = text.count("%") + text.count("{")
    return len(text) + sum(int(w) for w in widths if w) + fields * budget().size(values)


def repeat_size(value: object, times: object) -> int:
    """The size of `value * times`, where that repeats."""
    repeats = isinstance(value, str | list | tuple) and isinstance(times, int)
    return budget().size(value) * max(times, 0) if repeats else 0  # type: ignore[call-overload]


def number(value: object) -> int:
    """A width or count as a whole number; 0 for what is none."""
    return value if isinstance(value, int) else 0
