"""`vmap`: a function of single examples as one of whole batches, without a loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from rlx.errors import InputError, ShapeError
from rlx.ir.dim import Dim
from rlx.ir.node import Value
from rlx.numpy.array import Array, Tracer
from rlx.numpy.retraced import run_traced
from rlx.numpy.trace import Trace
from rlx.numpy.traced_function import TracedFunction
from rlx.numpy.tree import children_of, flatten

P = ParamSpec("P")
R = TypeVar("R")
Axes = Any  # an int, None, or a tree of them that begins like the arguments


def vmap(
    function: Callable[P, R], in_axes: Axes = 0, out_axes: Axes = 0,
    axis_name: str | None = None, axis_size: int | None = None,
) -> Callable[P, R]:  # fmt: skip
    """A function that maps `function` over an axis of its arguments, as one computation.

    `in_axes` names the axis of each argument (None: the same for all examples), as an int for all,
    a tuple with one entry per positional argument, or trees of them; `out_axes` where the axis is
    in the results. Arguments given by name are mapped over axis 0. `axis_name` lets the function
    compute across examples: `rlx.psum(x, axis_name)`. `axis_size` is needed where no argument is
    mapped.
    """
    if not callable(function):
        raise InputError("not a function", where="vmap", got=f"{function!r:.60}")

    def evaluate(*args: Any, **named: Any) -> Any:
        axes = _per_argument(in_axes, len(args))
        numbers = [_spread(axes[i], x, f"argument {i}") for i, x in enumerate(args)]
        numbers += [_spread(0, x, name) for name, x in named.items()]
        flat = [n for part in numbers for n in part]
        call = _Mapped(function, args, named, flat, axis_size, axis_name)
        return call.run(out_axes)

    @functools.wraps(function)
    def transformed(*args: Any, **named: Any) -> Any:
        axes = _per_argument(in_axes, len(args))
        return run_traced("vmap", evaluate, args, named, lambda i: axes[i] is not None)

    return transformed


class _Mapped(TracedFunction):
    """A function traced on single examples."""

    def __init__(
        self, function: Callable[..., Any], args: Sequence[Any], named: dict[str, Any],
        axes: list[int | None], size: int | None, name: str | None,
    ) -> None:  # fmt: skip
        # arguments given by name follow the positional ones
        self.names_of, self.positional = list(named), len(args)
        self.axes, self.given_size, self.axis_name = axes, size, name

        def call(*everything: Any) -> Any:
            rest = dict(zip(self.names_of, everything[self.positional :], strict=True))
            return function(*everything[: self.positional], **rest)

        everything = [*args, *named.values()]
        super().__init__("vmap", call, everything, {}, range(len(everything)))

    def given_values(self, values: Sequence[Value]) -> Sequence[Value]:
        """Examples: without the mapped axis, which comes first in `values` from here on."""
        axes, parent = [], self.parent
        for value, axis, name in zip(values, self.axes, self.names, strict=True):
            rank = value.shape.rank
            if axis is not None and not -rank <= axis < rank:
                raise ShapeError(
                    "no such axis to map", where=f"vmap, {name}", got=f"{axis} of {value.shape}",
                    expected=f"{-rank} … {rank - 1}" if rank else "an array with axes",
                    hint="in_axes=None keeps an argument the same for all examples",
                )  # fmt: skip
            axes.append(None if axis is None else axis % rank)
        self.axes = axes
        self.size = _common_size(parent, values, axes, self.names, self.given_size)
        if self.axis_name is not None:
            self.body.trace.mapped_axis = self.axis_name, self.size
        return [_Example(v, a) for v, a in zip(values, axes, strict=True)]  # type: ignore[misc]

    def run(self, out_axes: Axes) -> Any:
        # late: most programs map nothing
        from rlx.passes.batching import batch

        g = self.parent.graph
        axes = [*self.axes, *[None] * (len(self.operands) - len(self.axes))]
        outputs, flags = batch(
            g, self.graph, self.operands, axes, self.parent.resolve(self.size), self.axis_name
        )
        results = self.results(outputs)
        tree = self.tree(results)
        places = _spread(out_axes, tree, "the result")
        return self.tree([
            _placed(self.parent, x, flag, axis, self.size)
            for x, flag, axis in zip(results, flags, places, strict=False)
        ])  # fmt: skip


class _Example:
    """A value seen without one of its axes: what the body's input looks like."""

    def __init__(self, value: Value, axis: int | None) -> None:
        dims = value.shape.dims
        kept = dims if axis is None else (*dims[:axis], *dims[axis + 1 :])
        self.shape = value.shape.with_dims(kept)


def _placed(trace: Trace, x: Array, is_batched: bool, axis: int | None, size: Dim) -> Array:
    """A result with its batch axis, now in front, where it was asked for."""
    assert isinstance(x, Tracer)
    g, value = trace.graph, x.own
    if axis is None:
        if is_batched:
            raise ShapeError(
                "a result differs between examples", where="vmap, out_axes", got="None",
                expected="an axis for it", hint="reduce it over the examples, or give an axis",
            )  # fmt: skip
        return x
    if not is_batched:
        value = g.expand(value, shape=(trace.resolve(size), *value.shape.dims))
    rank = value.shape.rank
    if not -rank <= axis < rank:
        raise ShapeError(
            "no such axis of a result", where="vmap, out_axes", got=axis,
            expected=f"{-rank} … {rank - 1}",
        )  # fmt: skip
    order = list(range(1, rank))
    order.insert(axis % rank, 0)
    return Tracer(trace, value if axis % rank == 0 else g.transpose(value, axes=tuple(order)))


def _common_size(
    trace: Trace, values: Sequence[Value], axes: Sequence[int | None], names: Sequence[str],
    given: int | None,
) -> Dim:  # fmt: skip
    found: tuple[Dim, str] | None = None if given is None else (given, "axis_size")
    for value, axis, name in zip(values, axes, names, strict=True):
        if axis is None:
            continue
        size = value.shape.dims[axis]
        if found is None:
            found = size, name
        elif not trace.same_size(found[0], size, "equal for vmap"):
            raise ShapeError(
                "mapped axes differ in size", where="vmap",
                got=f"{trace.hint(size)} of {name}",
                expected=f"{trace.hint(found[0])}, as {found[1]}",
            )  # fmt: skip
    if found is None:
        raise InputError(
            "nothing is mapped", where="vmap", expected="an argument with an axis",
            hint="give axis_size=, or an axis in in_axes",
        )  # fmt: skip
    return found[0]


def _per_argument(in_axes: Axes, count: int) -> Sequence[Axes]:
    if isinstance(in_axes, (tuple, list)):
        if len(in_axes) != count:
            raise InputError(
                "not an axis per argument", where="vmap, in_axes", got=f"{in_axes!r}",
                expected=f"{count} entries",
            )  # fmt: skip
        return list(in_axes)
    return [in_axes] * count


def _spread(axes: Axes, tree: Any, what: str) -> list[int | None]:
    """The axis of each leaf of `tree`, where `axes` is a tree that begins like it."""
    if axes is None or (isinstance(axes, int) and not isinstance(axes, bool)):
        return [axes] * len(flatten(tree)[0])
    mine, others = children_of(axes), children_of(tree)
    if mine is None or others is None or mine[0] != others[0] or len(mine[1]) != len(others[1]):
        raise InputError(
            "the axes do not fit the tree", where=f"vmap, {what}", got=f"{axes!r:.60}",
            expected="an int, None, or a tree of them that begins like the argument",
        )  # fmt: skip
    return [n for a, t in zip(mine[1], others[1], strict=True) for n in _spread(a, t, what)]
