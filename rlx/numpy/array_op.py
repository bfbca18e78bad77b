"""`rlx.custom_op`: ops that users define, for arrays as well as for graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlx.ir.graph import Graph
from rlx.ir.ops.custom import CustomOp, register
from rlx.numpy.dispatch import apply_many, as_array


class ArrayOp(CustomOp):
    """A registered definition; calling it on arrays computes, calling it on a graph and values
    builds a node."""

    def __call__(self, graph: Any, *operands: Any, name: str = "", **attributes: Any) -> Any:
        if isinstance(graph, Graph):
            return super().__call__(graph, *operands, name=name, **attributes)
        given = [as_array(x) for x in (graph, *operands)]
        found = apply_many(self._build, given, tuple(sorted(attributes.items())))
        return found[0] if len(found) == 1 else found

    def _build(self, g: Graph, *operands: Any) -> Any:
        *values, attributes = operands
        return super().__call__(g, *values, **dict(attributes))


def custom_op(
    name: str,
    *,
    infer: Callable[..., Any],
    reference: Callable[..., Any],
    kernel: object = None,
    gradient: Callable[..., Any] | None = None,
    batching: Callable[..., Any] | None = None,
) -> ArrayOp:
    """Register an op under `name` and give a function of arrays, which transformed and jitted
    functions may call; on a graph and values it builds a node.

    `infer(*shapes, **attributes)` returns a Shape or a tuple of them, `reference(*arrays,
    **attributes)` the arrays. The keyword-only parameters of `infer` are the op's attributes.
    `gradient(g, inputs, outputs, grads, **attributes)` returns a value, or None, per input. A
    backend that knows `kernel` uses it; the others run the reference.

    `batching(g, inputs, mapped, size, **attributes)` returns the results for a batch, which is
    axis 0 of the inputs that are `mapped`, and of all results. Without it `vmap` calls the op for
    one element after the other.
    """
    return register(ArrayOp(name, infer, reference, kernel, gradient, batching))
