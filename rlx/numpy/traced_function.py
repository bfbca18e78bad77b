"""A function traced into a graph of its own, which a transformation then adds to the trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlx.errors import DTypeError, InputError
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.numpy.array import Array, Tracer
from rlx.numpy.debug import tracers_of, with_tracers
from rlx.numpy.trace import Trace, recording_trace
from rlx.numpy.traced_body import TracedBody, as_leaf, value_in
from rlx.numpy.tree import Structure, flatten, leaf_names, unflatten


class TracedFunction:
    """`function(*args, **named)` as a graph: its inputs are the leaves of the arguments `of`, then
    the arrays of the surrounding trace that the function uses."""

    def __init__(
        self, where: str, function: Callable[..., Any], args: Sequence[Any], named: dict[str, Any],
        of: Sequence[int],
    ) -> None:  # fmt: skip
        parent = recording_trace()
        assert parent is not None  # `run_traced` made one
        self.where, self.parent, self.of = where, parent, tuple(of)
        leaves, self.argument = flatten([args[i] for i in of])
        self.leaves = [as_leaf(x, where) for x in leaves]
        self.names = leaf_names({f"argument {i}": args[i] for i in of})
        values = [value_in(parent, x) for x in self.leaves]
        self.body = TracedBody(where, parent)
        self.given = self.body.inputs(self.given_values(values))
        self.values = values
        self._trace(function, args, named)

    def given_values(self, values: Sequence[Value]) -> Sequence[Value]:
        """What the body's inputs look like: the leaves themselves."""
        return values

    def _trace(
        self, function: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]
    ) -> None:
        all_args = list(args)
        for i, tree in zip(self.of, unflatten(self.argument, self.given), strict=True):
            all_args[i] = tree
        self.body.call(lambda: function(*all_args, **named))
        self.count = len(self.body.results)
        prints = self.body.trace.prints
        if prints:
            with self.body.trace.reopened():
                self.body.results += [
                    self.body.trace.enter(x.own, x.home) for x in tracers_of(prints)
                ]
        self.graph: Graph = self.body.body()
        self.operands = [*self.values, *self.body.trace.operands]

    def results(self, outputs: Sequence[Value]) -> list[Array]:
        """The arrays of the function's results, given the outputs of its graph in the trace."""
        tracers = [Tracer(self.parent, v) for v in outputs]
        prints = self.body.trace.prints
        if prints:
            self.parent.prints += with_tracers(prints, iter(tracers[self.count :]))
        return list(tracers[: self.count])

    def tree(self, leaves: Sequence[Any]) -> Any:
        """Leaves in the tree of the function's results."""
        return unflatten(self.body.structure, leaves)

    def argument_trees(self, leaves: Sequence[Any]) -> list[Any]:
        """Leaves in the trees of the arguments `of`."""
        found: list[Any] = unflatten(self.argument, leaves)
        return found


def argument_numbers(where: str, argnums: int | Sequence[int], count: int) -> tuple[int, ...]:
    """The positions of arguments, checked; negative ones count from the end."""
    given = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    found = []
    for i in given:
        if not isinstance(i, int) or not -count <= i < count:
            raise InputError(
                "no such positional argument", where=where, got=f"argnums={argnums!r}",
                expected=f"{-count} … {count - 1}" if count else "a call with arguments",
            )  # fmt: skip
        found.append(i % count)
    if len(set(found)) != len(found):
        raise InputError("an argument is named twice", where=where, got=f"argnums={argnums!r}")
    return tuple(found)


def leaves_like(
    where: str, what: str, tree: Any, expected: Structure, values: Sequence[Value], parent: Trace
) -> list[Value]:
    """The leaves of a tree of cotangents or tangents, checked against what they belong to."""
    leaves, found = flatten(tree)
    if found != expected:
        raise InputError(
            f"{what} have another tree", where=where, got=str(found), expected=str(expected)
        )
    made = []
    for leaf, value in zip(leaves, values, strict=True):
        given = value_in(parent, as_leaf(leaf, where))
        kind = given.shape.dtype
        if kind is not value.shape.dtype:
            fits = not isinstance(leaf, Array) or kind.kind == value.shape.dtype.kind
            if not fits:
                raise DTypeError(
                    f"{what} of another type", where=where, got=given.shape, expected=value.shape
                )
            given = parent.graph.cast(given, value.shape.dtype)
        if not given.shape.same_dims(value.shape):
            given = parent.graph.expand(given, shape=value.shape.dims)
        made.append(given)
    return made
