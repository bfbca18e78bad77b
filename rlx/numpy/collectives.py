"""Computing across the examples of a `vmap`, by the name that it gave their axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from rlx.errors import InputError
from rlx.ir.dim import Dim
from rlx.ir.op import lookup
from rlx.numpy.array import Array
from rlx.numpy.trace import Trace, recording_trace
from rlx.numpy.traced_body import apply_op, as_leaf, value_in
from rlx.numpy.tree import tree_map

T = TypeVar("T")
Names = str | Sequence[str]


def psum(x: T, axis_name: Names) -> T:
    """The sum of x over the mapped axis, or several of them. `psum(1, name)` is its size."""
    return _reduced("psum", x, axis_name)


def pmean(x: T, axis_name: Names) -> T:
    """The mean of x over the mapped axis."""
    return _reduced("pmean", x, axis_name)


def pmax(x: T, axis_name: Names) -> T:
    """The greatest x over the mapped axis."""
    return _reduced("pmax", x, axis_name)


def pmin(x: T, axis_name: Names) -> T:
    """The least x over the mapped axis."""
    return _reduced("pmin", x, axis_name)


def all_gather(x: T, axis_name: str, axis: int = 0) -> T:
    """The x of all examples, stacked on a new axis."""
    trace, size = _mapped("all_gather", axis_name)
    op = lookup("all_gather")(axis_name=axis_name, size=trace.resolve(size), axis=axis)
    return _applied(trace, op, x)


def axis_index(axis_name: str) -> Array:
    """The number of the example, an i32."""
    trace, _ = _mapped("axis_index", axis_name)
    return apply_op(trace, lookup("axis_index")(axis_name=axis_name), [])[0]


def _reduced(where: str, x: T, axis_name: Names) -> T:
    for name in [axis_name] if isinstance(axis_name, str) else axis_name:
        trace, _ = _mapped(where, name)
        x = _applied(trace, lookup(where)(axis_name=name), x)
    return x


def _applied(trace: Trace, op: Any, x: T) -> T:
    def on_leaf(leaf: Any) -> Array:
        return apply_op(trace, op, [value_in(trace, as_leaf(leaf, op.name))])[0]

    return tree_map(on_leaf, x)  # type: ignore[no-any-return]


def _mapped(where: str, name: str) -> tuple[Trace, Dim]:
    """The trace that records now, and the size of the axis that a `vmap` around it has named."""
    here = trace = recording_trace()
    known = []
    while here is not None and trace is not None:
        if trace.mapped_axis is not None:
            if trace.mapped_axis[0] == name:
                return here, trace.mapped_axis[1]
            known.append(trace.mapped_axis[0])
        trace = trace.parent
    raise InputError(
        "no mapped axis of that name", where=where, got=repr(name),
        expected=", ".join(map(repr, known)) or "the axis_name of a vmap around the function",
        hint=f"map the function that calls it: rlx.vmap(f, axis_name={name!r})",
    )  # fmt: skip
