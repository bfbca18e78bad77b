"""Derivatives of functions: `grad`, `vjp`, `jvp`, Hessian-vector products.

They take a function and give a function. Inside `rlx.jit` the derivative is part of the trace;
outside it runs at once. They compose in any order with each other, with `rlx.jit` and `rlx.vmap`.
Arguments and results are trees. Leaves of integers have no derivative; their gradient is zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from rlx.errors import DTypeError, InputError, ShapeError
from rlx.ir.hir import FusionPolicy
from rlx.ir.module import GraphModule, GraphStage
from rlx.ir.node import Value
from rlx.numpy.array import Array, Tracer
from rlx.numpy.retraced import run_traced
from rlx.numpy.trace import recording_trace
from rlx.numpy.traced_body import require_functions
from rlx.numpy.traced_function import TracedFunction, argument_numbers, leaves_like
from rlx.numpy.tree import flatten

P = ParamSpec("P")
R = TypeVar("R")
X = TypeVar("X")


# -- reverse mode ---------------------------------------------------------------------------------


class _Pullback:
    """A function in a trace, its results, and what gives cotangents."""

    def __init__(
        self, where: str, function: Callable[..., Any], args: Sequence[Any], named: dict[str, Any],
        of: Sequence[int],
    ) -> None:  # fmt: skip
        from rlx.passes.grad import linearize  # late: most programs differentiate nothing
        from rlx.passes.grad.rules import is_differentiable

        self.traced = traced = TracedFunction(where, function, args, named, of)
        floats = [is_differentiable(v.shape.dtype) for v in traced.values]
        if traced.values and not any(floats):
            raise DTypeError(
                "no derivative by integers", where=where,
                got=", ".join(f"{traced.names[i]} {v.shape}" for i, v in enumerate(traced.values)),
                expected="an argument with arrays of floats or complex numbers",
            )  # fmt: skip
        graph = traced.parent.graph
        wanted = [*floats, *[False] * (len(traced.operands) - len(floats))]
        self.outputs, self.pullback = linearize(graph, traced.graph, traced.operands, wanted)
        self.results = traced.results(self.outputs)

    def cotangents(self, given: Sequence[Value | None]) -> list[Array]:
        """Those of the leaves of the arguments."""
        from rlx.passes.grad.rules import zeros

        traced = self.traced
        cts = [*given, *[None] * (len(self.outputs) - len(given))]
        found = self.pullback(cts)[: len(traced.values)]
        graph = traced.parent.graph
        return [
            Tracer(traced.parent, zeros(graph, v.shape) if ct is None else ct)
            for ct, v in zip(found, traced.values, strict=True)
        ]


@overload
def value_and_grad(
    function: Callable[Concatenate[X, P], R],
) -> Callable[Concatenate[X, P], tuple[R, X]]: ...
@overload
def value_and_grad(
    function: Callable[P, R], argnums: int | Sequence[int], has_aux: bool = False
) -> Callable[P, tuple[R, Any]]: ...
@overload
def value_and_grad(function: Callable[P, R], *, has_aux: bool) -> Callable[P, tuple[R, Any]]: ...
def value_and_grad(
    function: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """A function that gives `function(…)`, which is a scalar, and its gradient by the positional
    arguments `argnums`: a tree like the argument, or a tuple of them.

    With `has_aux` the function returns a pair, of which the second is not differentiated.
    """
    return _value_and_grad("value_and_grad", function, argnums, has_aux)


def _value_and_grad(
    where: str, function: Callable[..., Any], argnums: int | Sequence[int], has_aux: bool
) -> Callable[..., Any]:
    require_functions(where, function)

    def evaluate(*args: Any, **named: Any) -> Any:
        found = _Pullback(where, function, args, named, of(args))
        value, aux = _scalar(found, has_aux, where)
        seeds: list[Value | None] = [None] * len(found.outputs)
        seeds[0] = found.traced.parent.graph.constant(1, value.shape.dtype)
        trees = found.traced.argument_trees(found.cotangents(seeds))
        gradient = trees[0] if isinstance(argnums, int) else tuple(trees)
        result = Tracer(found.traced.parent, value)
        return ((result, aux) if has_aux else result), gradient

    def of(args: Sequence[Any]) -> tuple[int, ...]:
        return argument_numbers(where, argnums, len(args))

    @functools.wraps(function)
    def transformed(*args: Any, **named: Any) -> Any:
        return run_traced(where, evaluate, args, named, set(of(args)).__contains__)

    return transformed


def _scalar(found: _Pullback, has_aux: bool, where: str) -> tuple[Value, Any]:
    """The value to differentiate, the first output, and what comes with it."""
    tree = found.traced.tree(found.results)
    aux = None
    if has_aux:
        if not isinstance(tree, tuple) or len(tree) != 2:
            raise InputError(
                "not a value and something beside it", where=where, got=f"{tree!r:.80}",
                expected="a function that returns (value, aux), as has_aux says",
            )  # fmt: skip
        tree, aux = tree
    leaves, _ = flatten(tree)
    if len(leaves) != 1 or leaves[0] is not tree:
        raise InputError(
            "not one number", where=where, got=f"{tree!r:.80}", expected="a scalar",
            hint="" if has_aux else "return (value, aux) and say has_aux=True",
        )  # fmt: skip
    value = found.outputs[0]
    if value.shape.rank:
        raise ShapeError(
            "the gradient of an array", where=where, got=value.shape, expected="a scalar",
            hint="sum or average it, or use jacrev",
        )  # fmt: skip
    if not value.shape.dtype.is_float:
        raise DTypeError(
            "the gradient of a number that is not real", where=where, got=value.shape,
            expected="a float", hint="take real or abs of it, or use vjp",
        )  # fmt: skip
    return value, aux


@overload
def grad(
    function: GraphModule, *, wrt: Sequence[str] = (), of: str | None = None
) -> GraphModule: ...
@overload
def grad(function: Callable[Concatenate[X, P], Any]) -> Callable[Concatenate[X, P], X]: ...
@overload
def grad(
    function: Callable[P, Any], argnums: int | Sequence[int], has_aux: bool = False
) -> Callable[P, Any]: ...
@overload
def grad(function: Callable[P, Any], *, has_aux: bool) -> Callable[P, Any]: ...
def grad(
    function: Any, argnums: int | Sequence[int] = 0, has_aux: bool = False,
    wrt: Sequence[str] = (), of: str | None = None,
) -> Any:  # fmt: skip
    """A function that gives the gradient of `function`, which returns a scalar, by the positional
    arguments `argnums`. With `has_aux` the function returns a pair, and the result is one too.

    Of a `GraphModule`: a module with the same outputs, and the gradient of the output `of` by the
    params or inputs `wrt`.
    """
    if isinstance(function, GraphModule):
        return _module_gradient(function, wrt, of)
    both = _value_and_grad("grad", function, argnums, has_aux)

    @functools.wraps(function)
    def transformed(*args: Any, **named: Any) -> Any:
        value, gradient = both(*args, **named)
        return (gradient, value[1]) if has_aux else gradient

    return transformed


def _module_gradient(module: GraphModule, wrt: Sequence[str], of: str | None) -> GraphModule:
    from rlx.passes.grad import gradient_graph

    if module.stage is GraphStage.HIR:  # blocks as primitives, which have derivatives
        module = module.with_fusion_policy(FusionPolicy.FUSABLE)
    return GraphModule.from_graph(gradient_graph(module.into_graph(), wrt, of))


def vjp(function: Callable[..., R], *primals: Any) -> tuple[R, Callable[[Any], tuple[Any, ...]]]:
    """`function(*primals)`, and its pullback: from the cotangents of the results, a tree like them,
    to a tuple of those of the arguments."""
    where = "vjp"
    require_functions(where, function)
    home = recording_trace()
    found: _Pullback | None = None
    if home is None:
        result = run_traced(where, function, primals, {}, lambda i: True)
        structure = flatten(result)[1]
    else:
        found = _Pullback(where, function, primals, {}, range(len(primals)))
        structure = found.traced.body.structure
        result = found.traced.tree(found.results)

    def again(args: Sequence[Any], ct: Any) -> Any:
        return pull(_Pullback(where, function, args, {}, range(len(args))), ct)

    def pull(made: _Pullback, ct: Any) -> Any:
        outputs, parent = made.outputs[: made.traced.count], made.traced.parent
        given = leaves_like(where, "cotangents", ct, structure, outputs, parent)
        return tuple(made.traced.argument_trees(made.cotangents(given)))

    def pullback(ct: Any) -> tuple[Any, ...]:
        if found is not None and recording_trace() is home:
            return pull(found, ct)  # type: ignore[no-any-return]
        # outside a trace, or in one inside: the forward part runs again there
        given = (list(primals), ct)
        return run_traced(where, again, given, {}, lambda i: True)  # type: ignore[no-any-return]

    return result, pullback


# -- forward mode ---------------------------------------------------------------------------------


def jvp(
    function: Callable[..., R], primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[R, Any]:
    """`function(*primals)`, and how it changes with the arguments changing by `tangents`."""
    where = "jvp"
    require_functions(where, function)
    if len(primals) != len(tangents):
        raise InputError(
            "as many tangents as arguments", where=where, got=len(tangents), expected=len(primals)
        )

    def evaluate(given: Sequence[Any], moved: Sequence[Any]) -> Any:
        return _push(where, function, given, moved)

    given = (list(primals), list(tangents))
    return run_traced(where, evaluate, given, {}, lambda i: True)  # type: ignore[no-any-return]


def _push(
    where: str, function: Callable[..., Any], given: Sequence[Any], moved: Sequence[Any]
) -> tuple[Any, Any]:
    from rlx.passes.grad import push_forward
    from rlx.passes.grad.rules import is_differentiable, zeros

    traced = TracedFunction(where, function, given, {}, range(len(given)))
    parent, graph = traced.parent, traced.parent.graph
    structure = flatten(list(given))[1]
    leaves = leaves_like(where, "tangents", list(moved), structure, traced.values, parent)
    ts = [t if is_differentiable(t.shape.dtype) else None for t in leaves]
    ts += [None] * (len(traced.operands) - len(ts))
    outputs, changes = push_forward(graph, traced.graph, traced.operands, ts)
    pairs = zip(outputs[: traced.count], changes[: traced.count], strict=True)
    filled = [Tracer(parent, zeros(graph, v.shape) if t is None else t) for v, t in pairs]
    return traced.tree(traced.results(outputs)), traced.tree(filled)


def hvp(function: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """The Hessian of `function`, by its first argument, times the tangents: forward over reverse,
    at some times the cost of the function. The other arguments' tangents move the gradient too."""
    return jvp(grad(function), primals, tangents)[1]
