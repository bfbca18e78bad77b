"""Control flow: `cond`, `switch`, `while_loop`, `fori_loop`, `scan` and `map`, on trees of arrays.

Outside `rlx.jit` they are Python's own `if` and loops. Inside, a function that is a branch or the
body of a loop is traced once, into a graph of its own. Loops are not unrolled, whatever their
length. Arrays of the surrounding function that a body uses become its operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from rlx.errors import InputError, ShapeError
from rlx.ir.attrs import Body
from rlx.ir.dim import Dim
from rlx.ir.dtype import i64
from rlx.ir.op import lookup
from rlx.ir.ops.control import endless_loop
from rlx.numpy.array import Array, Tracer
from rlx.numpy.debug import PrintBranch, PrintLoop, tracers_of, with_tracers
from rlx.numpy.dispatch import as_array
from rlx.numpy.elementwise import add, less, subtract
from rlx.numpy.trace import Size, Trace, recording_trace
from rlx.numpy.traced_body import (
    TracedBody,
    apply_op,
    arrays_of,
    checked_carry,
    flag_of,
    require_functions,
    require_no_prints,
    require_same,
    trace_of,
    tree_text,
    unflattened,
    value_in,
)
from rlx.numpy.tree import Structure, flatten, unflatten

C = TypeVar("C")
X = TypeVar("X")
Y = TypeVar("Y")
R = TypeVar("R")


# -- branches -------------------------------------------------------------------------------------


def cond(pred: Any, on_true: Callable[..., R], on_false: Callable[..., R], *operands: Any) -> R:
    """`on_true(*operands)` where `pred` holds, else `on_false(*operands)`. Only one of them runs;
    both give results of the same tree, types and shapes."""
    require_functions("cond", on_true, on_false)
    if not isinstance(pred, Tracer):
        return (on_true if bool(pred) else on_false)(*operands)
    parent = trace_of(pred)
    flag = flag_of(pred, "cond", "the predicate")
    leaves, structure = arrays_of(operands, "cond")
    values = [value_in(parent, x) for x in leaves]
    branches: list[TracedBody] = []
    for function in (on_true, on_false):
        branch = TracedBody("cond", parent)
        given = branch.inputs(values)
        for before in branches:  # the same operands in the same order
            for outer in before.trace.operands:
                branch.trace.add_operand(outer)
        branch.call(partial(function, *unflatten(structure, given)))
        branches.append(branch)
    then, otherwise = branches
    _share_operands(then, otherwise)
    _require_same_results(then, otherwise)
    count = len(then.results)
    for branch, other in ((then, otherwise), (otherwise, then)):
        branch.add_prints(other)
        _share_operands(then, otherwise)
    results: list[Tracer] = []
    if then.results:
        made = lookup("cond")(then=Body(then.body()), otherwise=Body(otherwise.body()))
        results = apply_op(parent, made, [flag, *values, *otherwise.trace.operands])
    if then.trace.prints or otherwise.trace.prints:
        printed = iter(results[count:])
        prints = [with_tracers(b.trace.prints, printed) for b in branches]
        parent.prints.append(PrintBranch(Tracer(parent, flag), *prints))
    return unflatten(then.structure, results[:count])  # type: ignore[no-any-return]


def _share_operands(*branches: TracedBody) -> None:
    """Give branches the operands that one of them has more."""
    longest = max(branches, key=lambda b: len(b.trace.operands))
    for branch in branches:
        for outer in longest.trace.operands[len(branch.trace.operands) :]:
            branch.trace.add_operand(outer)


def switch(index: Any, branches: Sequence[Callable[..., R]], *operands: Any) -> R:
    """`branches[index](*operands)`; an index out of range counts as the first or the last."""
    if not branches:
        raise InputError("no branches", where="switch", expected="one or more")
    require_functions("switch", *branches)
    if len(branches) == 1:
        return branches[0](*operands)
    if not isinstance(index, Tracer):
        return branches[min(max(int(index), 0), len(branches) - 1)](*operands)
    middle, at = len(branches) // 2, as_array(index)
    return cond(
        less(at, middle),
        lambda *xs: switch(at, branches[:middle], *xs),
        lambda *xs: switch(subtract(at, middle), branches[middle:], *xs),
        *operands,
    )


def _require_same_results(then: TracedBody, otherwise: TracedBody) -> None:
    if then.structure != otherwise.structure:
        raise InputError(
            "the branches return different trees", where="cond",
            got=tree_text(otherwise), expected=tree_text(then),
        )  # fmt: skip
    for i, name in enumerate(then.names):
        first = then.convert(i, otherwise.results[i].shape.dtype)
        second = otherwise.convert(i, first.shape.dtype)
        require_same(then.trace, second, first, "cond", (
            f"the branches return different types, result{name}", "of on_false", "of on_true"
        ))  # fmt: skip


# -- loops ----------------------------------------------------------------------------------------


def while_loop(
    condition: Callable[[C], Any], body: Callable[[C], C], init: C,
    max_iterations: int | None = None,
) -> C:  # fmt: skip
    """`carry = body(carry)`, beginning with `init`, as long as `condition(carry)` holds; the last
    carry. The carry is a tree whose types and shapes do not change. To go on for longer than
    `max_iterations` is an error."""
    require_functions("while_loop", condition, body)
    leaves, structure = arrays_of(init, "while_loop")
    parent = recording_trace()
    if parent is None:
        carry: Any = unflatten(structure, leaves)
        done = 0
        while bool(condition(carry)):
            if done == max_iterations:
                raise endless_loop()
            carry = checked_carry(body(carry), structure, leaves, "while_loop")
            done += 1
        return carry  # type: ignore[no-any-return]
    if not leaves:
        raise InputError("a loop carries at least one array", where="while_loop", got=repr(init))
    values = [value_in(parent, x) for x in leaves]
    test, step = TracedBody("while_loop", parent), TracedBody("while_loop", parent)
    given = test.inputs(values)
    test.call(lambda: condition(unflatten(structure, given)))
    if len(test.results) != 1:
        raise InputError(
            "the condition gives one truth value", where="while_loop", got=tree_text(test)
        )
    test.results[0] = test.flag(test.results[0])
    state = step.inputs(values)
    for outer in test.trace.operands:
        step.trace.add_operand(outer)
    step.call(lambda: body(unflatten(structure, state)))
    for outer in step.trace.operands[len(test.trace.operands) :]:
        test.trace.add_operand(outer)
    require_no_prints("while_loop", test, step)
    step.require_carry(init, structure, [v.shape for v in values])
    made = lookup("while_loop")(
        condition=Body(test.body()), body=Body(step.body()), n_carry=len(values),
        max_iterations=max_iterations or 0, must_end=max_iterations is not None,
    )  # fmt: skip
    operands = [*values, *step.trace.operands]
    return unflattened(parent, made, operands, structure)  # type: ignore[no-any-return]


def fori_loop(lower: Any, upper: Any, body: Callable[[Any, C], C], init: C) -> C:
    """`carry = body(i, carry)` for i from `lower` to before `upper`; the last carry."""
    require_functions("fori_loop", body)
    if recording_trace() is None:
        leaves, structure = arrays_of(init, "fori_loop")
        carry: Any = unflatten(structure, leaves)
        for i in range(int(lower), int(upper)):
            new = body(as_array(i), carry)
            carry = checked_carry(new, structure, leaves, "fori_loop")
        return carry  # type: ignore[no-any-return]
    if isinstance(lower, Tracer) or isinstance(upper, Tracer):
        start, end = (_index(n) for n in (lower, upper))
        _, found = while_loop(
            lambda state: less(state[0], end),
            lambda state: (add(state[0], 1), body(state[0], state[1])),
            (start, init),
        )
        return found
    first, last = (n if isinstance(n, Size) else int(n) for n in (lower, upper))
    length = last - first if last > first else 0

    def step(state: Any, _: None) -> Any:
        i, carry = state
        return (i + 1, body(i, carry)), None

    (_, found), _ = scan(step, (_index(first), init), None, length=length)
    return found


def _index(n: Any) -> Array:
    """A loop counter."""
    if isinstance(n, Size):
        return n.as_array()
    made = as_array(n)
    return made if made.dtype is i64 else made.astype(i64)


def map(function: Callable[[X], Y], xs: X) -> Y:
    """`function` applied to every slice along axis 0 of the arrays of `xs`; results stacked."""
    require_functions("map", function)
    return scan(lambda carry, x: (None, function(x)), None, xs)[1]


def scan(
    function: Callable[[C, X], tuple[C, Y]], init: C, xs: X, length: int | None = None,
    reverse: bool = False,
) -> tuple[C, Y]:  # fmt: skip
    """`carry, y = function(carry, x)` for every slice `x` along axis 0 of the arrays of `xs`.

    Returns the last carry, and the results `y` stacked on a new axis 0. The carry is a tree whose
    types and shapes do not change. `length` is the number of iterations where `xs` has no arrays;
    `reverse` goes from the last slice to the first, and results stay at their index.
    """
    require_functions("scan", function)
    carried, structure = arrays_of(init, "scan")
    scanned, shape_of_xs = arrays_of(xs, "scan")
    count = _length(scanned, length)
    parent = recording_trace()
    if parent is not None:
        plan = _Scan(parent, structure, shape_of_xs, reverse)
        return plan.trace(function, init, carried, scanned, count)  # type: ignore[no-any-return]
    if count == 0:  # what the results are is known from a trace alone
        from rlx.numpy.jit import jit  # late: it is built on control flow's own files

        run = jit(lambda c, x: scan(function, c, x, length, reverse), fixed=["c", "x"])
        return run(init, xs)
    carry, rows = unflatten(structure, carried), []
    for i in reversed(range(int(count))) if reverse else range(int(count)):
        carry, y = _pair(function(carry, unflatten(shape_of_xs, [x[i] for x in scanned])))
        carry = checked_carry(carry, structure, carried, "scan")
        rows.append(arrays_of(y, "scan"))
    rows = rows[::-1] if reverse else rows
    columns = zip(*[leaves for leaves, _ in rows], strict=True)
    stacked = [Array(np.stack([np.asarray(x) for x in column])) for column in columns]
    return carry, unflatten(rows[0][1], stacked)


class _Scan(NamedTuple):
    """A scan inside a jitted function."""

    parent: Trace
    structure: Structure
    shape_of_xs: Structure
    reverse: bool

    def trace(
        self, function: Callable[..., Any], init: Any, carried: list[Array], scanned: list[Array],
        count: Any,
    ) -> Any:  # fmt: skip
        parent = self.parent
        state, xs = ([value_in(parent, x) for x in side] for side in (carried, scanned))
        step = TracedBody("scan", parent)
        carry, slices = step.inputs(state), step.inputs(xs, sliced=True)
        pair: list[Any] = []

        def call() -> Any:
            found = function(unflatten(self.structure, carry), unflatten(self.shape_of_xs, slices))
            pair.append(_pair(found))
            return pair[0]

        step.call(call)
        step.require_carry(init, self.structure, [v.shape for v in state], pair[0][0])
        _, of_results = flatten(pair[0][1])
        prints = step.trace.prints
        if prints:
            step.add_marker(prints)
        if not step.results:
            return unflatten(self.structure, []), unflatten(of_results, [])
        made = lookup("scan")(
            body=Body(step.body()), n_carry=len(state), n_xs=len(xs), reverse=self.reverse,
            length=None if xs else parent.resolve(_dim(count)),
        )  # fmt: skip
        results = apply_op(parent, made, [*state, *xs, *step.trace.operands])
        if prints:
            results = self._printed(prints, results)
        carried_end = len(state)
        return (
            unflatten(self.structure, results[:carried_end]),
            unflatten(of_results, results[carried_end:]),
        )

    def _printed(self, prints: list[Any], results: list[Tracer]) -> list[Tracer]:
        """Give the prints of the body the stacked values; the results that are not theirs."""
        count = 1 + len(tracers_of(prints))
        marker, *stacked = results[len(results) - count :]
        records = with_tracers(prints, iter(stacked))
        self.parent.prints.append(PrintLoop(records, marker, self.reverse))
        return results[: len(results) - count]


def _pair(found: Any) -> tuple[Any, Any]:
    if not isinstance(found, tuple) or len(found) != 2:
        raise InputError(
            "not a carry and a result", where="scan", got=f"{found!r:.60}",
            expected="a function that returns (carry, y)",
        )  # fmt: skip
    return found


def _length(scanned: Sequence[Array], length: Any) -> Any:
    """The number of iterations, checked."""
    for x in scanned:
        if not x.ndim:
            raise ShapeError("an array has no axis to scan", where="scan", got=repr(x))
    found = length
    for x in scanned:
        n = x.shape[0]
        if found is None:
            found = n
        elif isinstance(found, Size) and isinstance(n, Size):
            if not found.trace.same_size(found.dim, n.dim, "equal for scan"):
                raise _different_lengths(n, found)
        elif n != found:
            raise _different_lengths(n, found)
    if found is None:
        raise InputError("nothing is scanned", where="scan", hint="give length=")
    if not isinstance(found, Size) and (not isinstance(found, (int, np.integer)) or found < 0):
        raise InputError("not a length", where="scan", got=repr(found), expected="an int")
    return found


def _different_lengths(n: Any, length: Any) -> ShapeError:
    return ShapeError("scanned arrays differ in length", where="scan", got=n, expected=length)


def _dim(count: Any) -> Dim:
    return count.dim if isinstance(count, Size) else int(count)
