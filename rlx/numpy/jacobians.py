"""Whole matrices of derivatives: `jacfwd`, `jacrev` and `hessian`, by `vmap` over directions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

from rlx.numpy.array import Array
from rlx.numpy.creation import eye, zeros_like
from rlx.numpy.differentiate import jvp, vjp
from rlx.numpy.manipulation import moveaxis, reshape
from rlx.numpy.retraced import run_traced
from rlx.numpy.traced_body import arrays_of, require_functions
from rlx.numpy.traced_function import argument_numbers
from rlx.numpy.tree import flatten, unflatten
from rlx.numpy.vectorize import vmap

P = ParamSpec("P")


def jacfwd(function: Callable[P, Any], argnums: int | Sequence[int] = 0) -> Callable[P, Any]:
    """A function that gives the Jacobian, a column at a time (forward mode): for few inputs.

    For each leaf of the result, a tree like the argument; axes of the result, then of the argument.
    """
    return _jacobian("jacfwd", function, argnums, _columns)


def jacrev(function: Callable[P, Any], argnums: int | Sequence[int] = 0) -> Callable[P, Any]:
    """The same as `jacfwd`, a row at a time (reverse mode): for few outputs."""
    return _jacobian("jacrev", function, argnums, _rows)


def hessian(function: Callable[P, Any], argnums: int | Sequence[int] = 0) -> Callable[P, Any]:
    """A function that gives the second derivatives, forward over reverse."""
    return jacfwd(jacrev(function, argnums), argnums)


Parts = Callable[[Callable[..., Any], list[Any]], tuple[list[Any], Any]]


def _jacobian(
    where: str, function: Callable[..., Any], argnums: int | Sequence[int], parts: Parts
) -> Callable[..., Any]:
    require_functions(where, function)

    def evaluate(*args: Any, **named: Any) -> Any:
        of = argument_numbers(where, argnums, len(args))

        def chosen(*given: Any) -> Any:
            everything = list(args)
            for i, x in zip(of, given, strict=True):
                everything[i] = x
            return function(*everything, **named)

        trees, structure = parts(chosen, [args[i] for i in of])
        by_result = [tree[0] if isinstance(argnums, int) else tuple(tree) for tree in trees]
        return unflatten(structure, by_result)

    @functools.wraps(function)
    def transformed(*args: Any, **named: Any) -> Any:
        of = argument_numbers(where, argnums, len(args))
        return run_traced(where, evaluate, args, named, set(of).__contains__)

    return transformed


def _basis(x: Array) -> Array:
    """The unit arrays of the shape of `x`, stacked on axis 0."""
    return reshape(eye(x.size, dtype=x.dtype), (x.size, *x.shape))


def _unit(leaves: Sequence[Array], at: int, direction: Array) -> list[Array]:
    return [direction if i == at else zeros_like(x) for i, x in enumerate(leaves)]


def _columns(function: Callable[..., Any], args: list[Any]) -> tuple[list[Any], Any]:
    """For each leaf of the result its derivatives, a tree like the arguments."""
    leaves, argument = arrays_of(args, "jacfwd")
    columns: list[list[Array]] = []
    structure: Any = None
    for at, x in enumerate(leaves):

        def push(direction: Array, at: int = at) -> Any:
            tangents = unflatten(argument, _unit(leaves, at, direction))
            return jvp(function, args, tangents)[1]

        found, structure = flatten(vmap(push)(_basis(x)))
        columns.append([reshape(moveaxis(y, 0, -1), (*y.shape[1:], *x.shape)) for y in found])
    return [unflatten(argument, list(row)) for row in zip(*columns, strict=True)], structure


def _rows(function: Callable[..., Any], args: list[Any]) -> tuple[list[Any], Any]:
    """The same, a row at a time."""
    argument = flatten(args)[1]
    results, structure = arrays_of(function(*args), "jacrev")
    trees = []
    for at, y in enumerate(results):

        def pull(direction: Array, at: int = at) -> list[Any]:
            _, pullback = vjp(function, *args)
            return list(pullback(unflatten(structure, _unit(results, at, direction))))

        found, _ = flatten(vmap(pull)(_basis(y)))
        rows = [reshape(x, (*y.shape, *x.shape[1:])) for x in found]
        trees.append(unflatten(argument, rows))
    return trees, structure
