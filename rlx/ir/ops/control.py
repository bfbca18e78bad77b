"""Control flow: cond, while_loop and scan over subgraphs. Loops are never unrolled.

A subgraph takes its operands through its `input` nodes, in order, and returns its outputs. It has
no params or states of its own: values from outside are operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from rlx.errors import AttributeValueError, DTypeError, InputError, ShapeError
from rlx.ir import dtype as dt
from rlx.ir.attrs import Body
from rlx.ir.dim import Dim
from rlx.ir.graph import Graph
from rlx.ir.interp import Program
from rlx.ir.op import Array, Cost, Op, op
from rlx.ir.ops._common import require_same
from rlx.ir.shape import Shape


def make_body(build: Callable[..., Any], *shapes: object, name: str = "body") -> Graph:
    """A subgraph from a function `build(g, *values)` and the shapes of its operands."""
    graph = Graph(name)
    inputs = [graph.input(f"x{i}", Shape.of(s)) for i, s in enumerate(shapes)]
    return graph.set_outputs(build(graph, *inputs))


def endless_loop(origin: object = None) -> InputError:
    return InputError(
        "a loop that does not end", where="while_loop", got="more iterations than max_iterations",
        origin=origin, hint="where so many are right, raise that limit",
    )  # fmt: skip


def body_results(body: Body, operands: Sequence[Shape], what: str) -> tuple[Shape, ...]:
    """Output shapes of a subgraph, after checking its inputs against the operands."""
    graph = body.graph
    for node in graph.nodes:
        if node.op.name in ("param", "state"):
            raise InputError(
                f"the {what} graph has a {node.op.name} of its own", got=node.name,
                hint="pass it to the loop or branch as an operand",
            )  # fmt: skip
    inputs = [n.output.shape for n in graph.sources("input")]
    _require_equal(inputs, operands, f"inputs of the {what} graph")
    return tuple([v.shape for v in graph.outputs])


def _require_equal(found: Sequence[Shape], expected: Sequence[Shape], what: str) -> None:
    if len(found) != len(expected):
        raise ShapeError(f"{what}: wrong number", got=len(found), expected=len(expected))
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        if not a.same_dims(b):
            raise ShapeError(f"{what}: shape of number {i} differs", got=a, expected=b)
        if a.dtype is not b.dtype:
            raise DTypeError(f"{what}: type of number {i} differs", got=a, expected=b)


def _require_flag(shape: Shape, what: str) -> None:
    if shape.rank or shape.dtype is not dt.bool_:
        raise DTypeError(f"{what} must be one truth value", got=shape, expected="[] bool")


@lru_cache(maxsize=64)
def body_program(body: Body) -> Program:
    return Program(body.graph)


def _body_cost(body: Body) -> Cost:
    flops: Dim = 0
    traffic: Dim = 0
    for node in body.graph.nodes:
        if not node.op.is_source:
            shapes = [v.shape for v in node.inputs], [v.shape for v in node.outputs]
            cost = node.op.cost(*shapes)
            flops, traffic = flops + cost.flops, traffic + cost.bytes
    return Cost(flops, traffic)


@op("cond", is_control_flow=True, depends_on_neighbours=True)
class Cond(Op):
    """The results of `then` on the operands where the predicate holds, of `otherwise` elsewhere.

    Only the chosen graph runs; both give the same shapes and types.
    """

    then: Body
    otherwise: Body

    def infer(self, pred: Shape, *operands: Shape) -> tuple[Shape, ...]:
        _require_flag(pred, "the predicate")
        results = body_results(self.then, operands, "then")
        others = body_results(self.otherwise, operands, "otherwise")
        _require_equal(others, results, "results of the two branches")
        if not results:
            raise ShapeError("a branch gives at least one result", got=0)
        return results

    def reference(self, pred: Array, *operands: Array) -> Any:
        return tuple(body_program(self.then if pred else self.otherwise).call(*operands))

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        """The cost of the more expensive branch; of `then` when symbols hide which that is."""
        a, b = _body_cost(self.then), _body_cost(self.otherwise)
        if isinstance(a.flops, int) and isinstance(b.flops, int):
            return a if a.flops >= b.flops else b
        return a


@op("while_loop", is_control_flow=True, depends_on_neighbours=True)
class WhileLoop(Op):
    """Runs `body` on the loop-carried values while `condition` holds; returns the last ones.

    The first `n_carry` operands are loop-carried, the rest are loop-invariant operands of both
    subgraphs. The loop also ends after `max_iterations` iterations, if that is not 0; `must_end`
    makes it an error if the condition holds after these.
    """

    condition: Body
    body: Body
    n_carry: int
    max_iterations: int = 0
    must_end: bool = False

    def check(self) -> None:
        if self.n_carry < 1:
            raise AttributeValueError(
                "a loop carries at least one value", where="while_loop.n_carry", got=self.n_carry
            )
        if self.max_iterations < 0:
            raise AttributeValueError(
                "negative bound", where="while_loop.max_iterations", got=self.max_iterations
            )
        if self.must_end and not self.max_iterations:
            raise AttributeValueError(
                "a loop that must end has a bound", where="while_loop.max_iterations", got=0
            )

    def infer(self, *operands: Shape) -> tuple[Shape, ...]:
        _require_operands(operands, self.n_carry)
        flags = body_results(self.condition, operands, "condition")
        if len(flags) != 1:
            raise ShapeError("the condition gives one result", got=len(flags), expected=1)
        _require_flag(flags[0], "the condition")
        carried = operands[: self.n_carry]
        results = body_results(self.body, operands, "body")
        _require_equal(results, carried, "carried values after one iteration")
        return carried

    def reference(self, *operands: Array) -> Any:
        carried, fixed = list(operands[: self.n_carry]), operands[self.n_carry :]
        condition, body = body_program(self.condition), body_program(self.body)
        done = 0
        while condition.call(*carried, *fixed)[0]:
            if done and done == self.max_iterations:
                if self.must_end:
                    raise endless_loop()
                break
            carried = body.call(*carried, *fixed)
            done += 1
        return tuple(carried)

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        """The cost of `max_iterations` iterations, or of one when the number is unknown."""
        rounds = max(self.max_iterations, 1)
        a, b = _body_cost(self.condition), _body_cost(self.body)
        return Cost((a.flops + b.flops) * rounds, (a.bytes + b.bytes) * rounds)


@op("scan", is_control_flow=True, depends_on_neighbours=True)
class Scan(Op):
    """Runs `body` for each index of axis 0 of the scanned operands, with loop-carried values.

    Operands are `n_carry` carried values, `n_xs` scanned tensors, then loop-invariant ones.
    `body(carried…, slices…, invariant…)` returns the carried values and the results of the
    iteration; `scan` returns the last carried values and the results stacked on a new axis 0. With
    `reverse` it iterates from the last index to the first; results stay at their index. `length` is
    needed only when nothing is scanned.
    """

    body: Body
    n_carry: int
    n_xs: int
    length: Dim | None = None
    reverse: bool = False

    def check(self) -> None:
        for field in ("n_carry", "n_xs"):
            if getattr(self, field) < 0:
                raise AttributeValueError(
                    "negative count", where=f"scan.{field}", got=getattr(self, field)
                )
        if isinstance(self.length, int) and self.length < 0:
            raise AttributeValueError("negative length", where="scan.length", got=self.length)

    def infer(self, *operands: Shape) -> tuple[Shape, ...]:
        _require_operands(operands, self.n_carry + self.n_xs)
        carried, xs, fixed = self.split(operands)
        length = self.length
        for i, x in enumerate(xs):
            if not x.rank:
                raise ShapeError("a scanned operand has no axis to scan", got=x, expected="rank 1+")
            if length is None:
                length = x.dims[0]
            require_same(x.dims[0], length, f"length of scanned operand {i}")
        if length is None:
            raise ShapeError("nothing is scanned and no length given", hint="give length=")
        slices = [x.with_dims(x.dims[1:]) for x in xs]
        results = body_results(self.body, [*carried, *slices, *fixed], "body")
        if len(results) < max(self.n_carry, 1):
            raise ShapeError("the body gives too few results", got=len(results))
        _require_equal(results[: self.n_carry], carried, "carried values after one iteration")
        stacked = [y.with_dims((length, *y.dims)) for y in results[self.n_carry :]]
        return (*carried, *stacked)

    def split(self, operands: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        """Operands as (carried, scanned, loop-invariant)."""
        end = self.n_carry + self.n_xs
        return operands[: self.n_carry], operands[self.n_carry : end], operands[end:]

    def reference(self, *operands: Array) -> Any:
        start, xs, fixed = self.split(operands)
        carried = list(start)
        length: Any = len(xs[0]) if xs else self.length
        ys = [
            np.empty((length, *v.shape.static_dims), v.shape.dtype.numpy)
            for v in self.body.graph.outputs[self.n_carry :]
        ]
        program = body_program(self.body)
        for i in reversed(range(length)) if self.reverse else range(length):
            results = program.call(*carried, *[x[i] for x in xs], *fixed)
            carried = results[: self.n_carry]
            for y, part in zip(ys, results[self.n_carry :], strict=True):
                y[i] = part
        return (*carried, *ys)

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        length = inputs[self.n_carry].dims[0] if self.n_xs else self.length
        assert length is not None  # inference ensures it
        once = _body_cost(self.body)
        return Cost(once.flops * length, once.bytes * length)


def _require_operands(operands: Sequence[Shape], least: int) -> None:
    if len(operands) < least:
        raise ShapeError("too few operands", got=len(operands), expected=f"at least {least}")
