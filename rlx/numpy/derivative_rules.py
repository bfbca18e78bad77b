"""What a function says about its own derivative: `stop_gradient`, `checkpoint`, `custom_vjp` and
`custom_jvp`. Outside a trace they are the function itself."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, overload

from rlx.errors import InputError, OptionError, ShapeError
from rlx.ir.attrs import Body
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.ir.op import lookup
from rlx.ir.ops.derivatives import inline
from rlx.numpy.array import Tracer
from rlx.numpy.creation import zeros
from rlx.numpy.trace import Trace, recording_trace
from rlx.numpy.traced_body import TracedBody, require_functions, structure_text
from rlx.numpy.traced_function import TracedFunction
from rlx.numpy.tree import (
    LEAF,
    Structure,
    children_of,
    flatten,
    is_tree,
    tree_map,
    unflatten,
)

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
_POLICIES = ("nothing", "matmuls")


def stop_gradient(x: T) -> T:
    """The arrays of a tree, with a derivative of zero."""

    def stopped(leaf: Any) -> Any:
        if not isinstance(leaf, Tracer):
            return leaf
        trace = leaf.trace.innermost()
        value = trace.enter(leaf.own, leaf.home)
        return Tracer(trace, trace.graph.stop_gradient(value))

    return tree_map(stopped, x)  # type: ignore[no-any-return]


@overload
def checkpoint(function: Callable[P, R], policy: str = "nothing") -> Callable[P, R]: ...
@overload
def checkpoint(*, policy: str) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def checkpoint(function: Any = None, policy: str = "nothing") -> Any:
    """The same function, whose values are not kept for the backward part but computed again there:
    less memory for more work. `policy` "matmuls" keeps the results of matmuls, convolutions and
    attention. Also a decorator: `@rlx.checkpoint(policy="matmuls")`."""
    if policy not in _POLICIES:
        raise OptionError(
            "unknown policy", where="checkpoint", got=repr(policy), expected=", ".join(_POLICIES)
        )
    if function is None:
        return functools.partial(checkpoint, policy=policy)
    require_functions("checkpoint", function)

    @functools.wraps(function)
    def wrapped(*args: Any, **named: Any) -> Any:
        if recording_trace() is None:
            return function(*args, **named)
        traced = TracedFunction("checkpoint", function, args, named, _arrays_at(args))
        op = lookup("checkpoint")(body=Body(traced.graph), policy=policy)
        made = traced.parent.graph.append_node(op, traced.operands).outputs
        return traced.tree(traced.results(made))

    return wrapped


def _arrays_at(args: Sequence[Any]) -> list[int]:
    """The positions of arguments that hold traced arrays."""
    return [i for i, x in enumerate(args) if any(isinstance(v, Tracer) for v in flatten(x)[0])]


class _Inside(threading.local):
    rule = False


class _Custom(Generic[P, R]):
    def __init__(self, function: Callable[P, R], nondiff_argnums: Sequence[int] = ()) -> None:
        if not callable(function):
            raise InputError("not a function", where=type(self).__name__, got=f"{function!r:.60}")
        functools.update_wrapper(self, function)
        self.function, self.static = function, tuple(nondiff_argnums)
        self._inside = _Inside()

    def _split(self, args: Sequence[Any]) -> tuple[list[int], list[Any]]:
        """Positions of the arguments that are differentiated, and the others."""
        of = [i for i in range(len(args)) if i not in self.static]
        return of, [args[i] for i in self.static]

    def _untraced(self, args: Sequence[Any]) -> bool:
        return recording_trace() is None or not _arrays_at(args)

    def __call__(self, *args: P.args, **named: P.kwargs) -> R:
        if self._inside.rule or self._untraced(args):
            return self.function(*args, **named)
        if named:
            raise InputError(
                "arguments given by name", where=type(self).__name__, got=", ".join(named),
                expected="positional arguments",
            )  # fmt: skip
        self._inside.rule = True  # a rule may call the function: there it has no rule
        try:
            return self._record(args)
        finally:
            self._inside.rule = False

    def _record(self, args: tuple[Any, ...]) -> R:
        raise NotImplementedError

    def _require_rules(self, *rules: object) -> None:
        if any(rule is None for rule in rules):
            how = "defvjp(forward, backward)" if len(rules) == 2 else "defjvp(rule)"
            raise InputError(
                "no derivative was given", where=type(self).__name__,
                got=getattr(self.function, "__name__", "a function"), hint=f"call .{how} on it",
            )  # fmt: skip


class custom_vjp(_Custom[P, R]):
    """A function with a derivative of its own in reverse mode.

        @rlx.custom_vjp
        def clipped(x):
            return x

        clipped.defvjp(lambda x: (x, None), lambda residuals, ct: (rnp.clip(ct, -1, 1),))

    `forward(*args)` returns the result and residuals, `backward(residuals, cotangent)` a tuple with
    a cotangent for each argument. Arguments at `nondiff_argnums` are Python values: `backward` gets
    them first.
    """

    forward: Callable[..., Any] | None = None
    backward: Callable[..., Any] | None = None

    def defvjp(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
        self.forward, self.backward = forward, backward

    def _record(self, args: tuple[Any, ...]) -> R:
        self._require_rules(self.forward, self.backward)
        assert self.forward is not None
        of, static = self._split(args)
        primal = TracedFunction("custom_vjp", self.function, args, {}, of)
        pair = TracedFunction("custom_vjp", self.forward, args, {}, of)
        tree = pair.tree(pair.graph.outputs[: pair.count])
        if not isinstance(tree, tuple) or len(tree) != 2:
            raise InputError(
                "not a result and residuals", where="custom_vjp", got=f"{tree!r:.60}",
                expected="a forward function that returns (result, residuals)",
            )  # fmt: skip
        results, structure = flatten(tree[0])
        _require_tree("the result of the forward function", structure, primal.body.structure)
        back = self._trace_backward(primal, static, results, tree[1])
        operands = _Operands(primal.parent, primal.values)
        for traced in (primal.operands, pair.operands, back.trace.operands):
            operands.add(traced)
        made = self._cotangents(back, primal, operands)
        forward = operands.body(pair.graph, pair.operands, back.trace.operands)
        op = lookup("custom_vjp")(
            body=operands.body(primal.graph, primal.operands), forward=forward, backward=Body(made)
        )
        found = primal.parent.graph.append_node(op, operands.values).outputs
        return primal.tree(primal.results(found))  # type: ignore[no-any-return]

    def _trace_backward(
        self, primal: TracedFunction, static: Sequence[Any], results: Sequence[Value], kept: Any
    ) -> TracedBody:
        residuals, tree = flatten(kept)
        back = TracedBody("custom_vjp", primal.parent)
        given = back.inputs(residuals)
        cts = iter(back.inputs([v for v in results if _moves(v)]))
        zero = [None if _moves(v) else zeros(v.shape.static_dims) for v in results]
        trees = [next(cts) if z is None else z for z in zero]
        ct = unflatten(primal.body.structure, trees)
        assert self.backward is not None
        back.call(functools.partial(self.backward, *static, unflatten(tree, given), ct))
        return back

    def _cotangents(self, back: TracedBody, primal: TracedFunction, operands: _Operands) -> Graph:
        """The graph of the backward function, with one result for each operand that is a float."""
        found = unflatten(back.structure, back.results)
        arguments = primal.argument_trees(primal.values)
        if not isinstance(found, (tuple, list)) or len(found) != len(arguments):
            raise InputError(
                "not a cotangent per argument", where="custom_vjp", got=f"{found!r:.60}",
                expected=f"a backward function that returns a tuple of {len(arguments)}",
            )  # fmt: skip
        made: list[Value] = []
        with back.trace.reopened() as graph:
            for ct, argument in zip(found, arguments, strict=True):
                values, structure = flatten(argument)
                cts = _spread_none(ct, structure)
                pairs = zip(cts, values, strict=True)
                made += [_fitting(graph, c, v) for c, v in pairs if _moves(v)]
            captured = operands.values[len(primal.values) :]
            made += [_fitting(graph, None, v) for v in captured if _moves(v)]
        return back.trace.body(made)


class custom_jvp(_Custom[P, R]):
    """A function with a derivative of its own, for both modes.

        @rlx.custom_jvp
        def f(x):
            return rnp.log1p(rnp.exp(x))

        @f.defjvp
        def _(primals, tangents):
            (x,), (t,) = primals, tangents
            return f(x), t * F.sigmoid(x)

    The rule returns the result and its tangent, and is linear in the tangents. Arguments at
    `nondiff_argnums` are Python values: the rule gets them first. Where the rule calls the
    function, that call is differentiated as if it had no rule.
    """

    rule: Callable[..., Any] | None = None

    def defjvp(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        self.rule = rule
        return rule

    def _record(self, args: tuple[Any, ...]) -> R:
        self._require_rules(self.rule)
        of, static = self._split(args)
        primal = TracedFunction("custom_jvp", self.function, args, {}, of)
        moved = self._trace_rule(primal, static)
        results, tree = moved.results, unflatten(moved.structure, moved.results)
        if not isinstance(tree, tuple) or len(tree) != 2:
            raise InputError(
                "not a result and its tangent", where="custom_jvp", got=f"{tree!r:.60}",
                expected="a rule that returns (result, tangent)",
            )  # fmt: skip
        tangents, structure = flatten(tree[1])
        _require_tree("the tangent", structure, primal.body.structure)
        outputs = primal.graph.outputs
        with moved.trace.reopened() as graph:
            results = [
                _fitting(graph, t, v) for t, v in zip(tangents, outputs, strict=False) if _moves(v)
            ]
        rule = moved.trace.body(results)
        operands = _Operands(primal.parent, primal.values)
        for traced in (primal.operands, moved.trace.operands):
            operands.add(traced)
        op = lookup("custom_jvp")(
            body=operands.body(primal.graph, primal.operands),
            rule=operands.rule(rule, primal.values, moved.trace.operands),
        )
        found = primal.parent.graph.append_node(op, operands.values).outputs
        return primal.tree(primal.results(found))  # type: ignore[no-any-return]

    def _trace_rule(self, primal: TracedFunction, static: Sequence[Any]) -> TracedBody:
        moved = TracedBody("custom_jvp", primal.parent)
        given = moved.inputs(primal.values)
        moving = iter(moved.inputs([v for v in primal.values if _moves(v)]))
        tangents = [
            next(moving) if _moves(v) else zeros(v.shape.static_dims) for v in primal.values
        ]
        trees = [tuple(primal.argument_trees(leaves)) for leaves in (given, tangents)]
        assert self.rule is not None
        moved.call(functools.partial(self.rule, *static, *trees))
        return moved


class _Operands:
    """The operands that several bodies share: the arguments, then what they use from outside."""

    def __init__(self, trace: Trace, values: Sequence[Value]) -> None:
        self.trace, self.values = trace, list(values)

    def add(self, more: Sequence[Value]) -> None:
        self.values += [v for v in more if not any(v is known for known in self.values)]

    def _inputs(self, graph: Graph, values: Sequence[Value], name: str = "x") -> list[Value]:
        return [graph.input(f"{name}{i}", v.shape) for i, v in enumerate(values)]

    def body(
        self, graph: Graph, operands: Sequence[Value], handed_on: Sequence[Value] = ()
    ) -> Body:
        """`graph`, taking all operands; further results are the operands `handed_on`."""
        made = Graph(graph.name)
        given = dict(zip(map(id, self.values), self._inputs(made, self.values), strict=True))
        graph = self.trace.current_graph(graph)
        outputs = inline(made, graph, [given[id(v)] for v in operands])
        outputs += [made.contiguous(given[id(v)]) for v in handed_on]
        return Body(made.set_outputs(outputs))

    def rule(self, graph: Graph, values: Sequence[Value], captured: Sequence[Value]) -> Body:
        """A jvp rule, taking all operands and the tangents of those that are floats."""
        made = Graph(graph.name)
        given = self._inputs(made, self.values)
        by_value = dict(zip(map(id, self.values), given, strict=True))
        tangents = self._inputs(made, [v for v in self.values if _moves(v)], "t")
        own = [given[i] for i in range(len(values))]
        own += tangents[: sum(map(_moves, values))] + [by_value[id(v)] for v in captured]
        return Body(made.set_outputs(inline(made, self.trace.current_graph(graph), own)))


def _spread_none(tree: Any, structure: Structure) -> list[Any]:
    """The leaves of cotangents; None stands for zeros in place of any part of the tree."""
    if structure is LEAF or tree is None:
        if tree is not None and is_tree(tree):
            raise _another_tree("a cotangent", flatten(tree)[1], structure)
        return [tree] * _count_leaves(structure)
    parts, (kind, keys, inner) = children_of(tree), structure
    if parts is None or type(tree) is not kind or parts[0] != keys or len(parts[1]) != len(inner):
        raise _another_tree("a cotangent", flatten(tree)[1], structure)
    pairs = zip(parts[1], inner, strict=True)
    return [leaf for part, each in pairs for leaf in _spread_none(part, each)]


def _count_leaves(structure: Structure) -> int:
    return 1 if structure is LEAF else sum(map(_count_leaves, structure[2]))


def _another_tree(what: str, found: Any, expected: Any) -> InputError:
    return InputError(
        f"{what} has another tree", got=structure_text(found), expected=structure_text(expected)
    )


def _require_tree(what: str, found: Any, expected: Any) -> None:
    if found != expected:
        raise _another_tree(what, found, expected)


def _moves(value: Value) -> bool:
    return value.shape.dtype.is_float or value.shape.dtype.is_complex


def _fitting(graph: Graph, ct: Value | None, value: Value) -> Value:
    """A cotangent or tangent in the type and the shape of its value; None is zero."""
    if ct is None:
        ct = graph.constant(0, value.shape.dtype)
    found, expected = ct.shape, value.shape
    if found.dtype is not expected.dtype:
        ct = graph.cast(ct, expected.dtype)
    if found.same_dims(expected):
        return ct
    try:
        return graph.expand(ct, shape=expected.dims)
    except ShapeError as error:
        raise ShapeError(
            "a cotangent or tangent of another shape", where="a rule", got=found, expected=expected
        ) from error
