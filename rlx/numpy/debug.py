"""Looking at values inside jitted functions: `rlx.debug.print`, `rlx.debug.check_nan`.

A print inside `rlx.jit` becomes hidden results of the graph, so that no pass removes or moves it.
They are printed when the run is over, in order. In the body of a `scan`, `map` or `fori_loop` the
values of all iterations are stacked and printed one after the other. Of the branches of a `cond`
the one that ran is printed.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from rlx.errors import InputError
from rlx.numpy.array import Array, Tracer
from rlx.numpy.trace import Size, recording_trace
from rlx.numpy.tree import Structure, flatten, unflatten
from rlx.support.settings import NAN_CHECKS


class Print(NamedTuple):
    """A print: its template, and the leaves of its arguments, traced or not."""

    template: str
    structure: Structure
    leaves: list[Any]


class PrintLoop(NamedTuple):
    """The prints of a loop's body. Their traced leaves, and `marker`, are stacked on axis 0."""

    records: list[Any]
    marker: Tracer
    reverse: bool


class PrintBranch(NamedTuple):
    """The prints of two branches, and which of them ran. The values of the other are zeros."""

    marker: Tracer
    then: list[Any]
    otherwise: list[Any]


def print(template: str, /, *values: Any, **named: Any) -> None:
    """Print `template.format(*values, **named)`: at once, or inside `rlx.jit` after every run."""
    _check(template, values, named)
    trace = recording_trace()
    if trace is None:
        builtins.print(template.format(*values, **named))
        return
    leaves, structure = flatten((values, named))
    trace.prints.append(Print(template, structure, [_printed(x) for x in leaves]))


class _Anything:
    """Stands for a value whose elements are not known yet, in a template."""

    def __format__(self, spec: str) -> str:
        return ""

    def __getattr__(self, name: str) -> _Anything:
        return self

    def __getitem__(self, index: object) -> _Anything:
        return self


def _check(template: object, values: Sequence[Any], named: Mapping[str, Any]) -> None:
    if not isinstance(template, str):
        raise InputError(
            "not a template", where="debug.print", got=repr(template), expected='"x = {}"'
        )
    anything = _Anything()
    try:
        template.format(*[anything] * len(values), **dict.fromkeys(named, anything))
    except (ValueError, LookupError) as error:
        raise InputError(
            "the template does not fit the values", where="debug.print", got=repr(template),
            expected=f"{len(values)} values and names {sorted(named)}",
        ) from error  # fmt: skip


def _printed(leaf: Any) -> Any:
    return leaf.as_array() if isinstance(leaf, Size) else leaf


def tracers_of(records: Sequence[Any]) -> list[Tracer]:
    """The traced leaves of prints, in order."""
    found: list[Tracer] = []
    for record in records:
        if isinstance(record, PrintLoop):
            found += [record.marker, *tracers_of(record.records)]
        elif isinstance(record, PrintBranch):
            found += [record.marker, *tracers_of(record.then), *tracers_of(record.otherwise)]
        else:
            found += [x for x in record.leaves if isinstance(x, Tracer)]
    return found


def with_tracers(records: Sequence[Any], tracers: Iterator[Tracer]) -> list[Any]:
    """The same prints of other traced leaves."""
    made: list[Any] = []
    for record in records:
        if isinstance(record, PrintLoop):
            marker = next(tracers)
            made.append(PrintLoop(with_tracers(record.records, tracers), marker, record.reverse))
        elif isinstance(record, PrintBranch):
            marker, then = next(tracers), with_tracers(record.then, tracers)
            made.append(PrintBranch(marker, then, with_tracers(record.otherwise, tracers)))
        else:
            leaves = [next(tracers) if isinstance(x, Tracer) else x for x in record.leaves]
            made.append(record._replace(leaves=leaves))
    return made


def show(records: Sequence[Any], values: Mapping[int, Any], index: tuple[int, ...] = ()) -> None:
    """Print, with the value of each traced leaf by its id."""
    for record in records:
        if isinstance(record, PrintLoop):
            count = len(values[id(record.marker)][index])
            for i in reversed(range(count)) if record.reverse else range(count):
                show(record.records, values, (*index, i))
            continue
        if isinstance(record, PrintBranch):
            ran = values[id(record.marker)][index]
            show(record.then if ran else record.otherwise, values, index)
            continue
        leaves = [
            Array(np.asarray(values[id(x)][index])) if isinstance(x, Tracer) else x
            for x in record.leaves
        ]
        positional, named = unflatten(record.structure, leaves)
        builtins.print(record.template.format(*positional, **named))


@contextmanager
def check_nan() -> Iterator[None]:
    """Inside the context every result of every op is checked, in all threads: NumericsError names
    the first op that made a NaN, and the line it comes from. Slow."""
    before, NAN_CHECKS.wanted = NAN_CHECKS.wanted, True
    try:
        yield
    finally:
        NAN_CHECKS.wanted = before
