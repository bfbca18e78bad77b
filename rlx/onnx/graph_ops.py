"""Ops of our graphs on arrays: for what `rlx.numpy` has no function, such as convolutions."""

from __future__ import annotations

from typing import Any

from rlx.ir.graph import Graph
from rlx.numpy.array import Array
from rlx.numpy.dispatch import apply_many
from rlx.numpy.trace import Size


def graph_op(name: str, *operands: Array, **attributes: Any) -> Array:
    """The result of an op of the graph with these attributes; sizes in them may be symbolic."""
    return graph_ops(name, *operands, **attributes)[0]


def graph_ops(name: str, *operands: Array, **attributes: Any) -> tuple[Array, ...]:
    """All its results."""
    given = tuple([(key, _plain(value)) for key, value in attributes.items()])
    return apply_many(_build, operands, name, given)


def _build(g: Graph, *args: Any) -> Any:
    *operands, name, attributes = args
    return getattr(g, name)(*operands, **dict(attributes))


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple([_plain(x) for x in value])
    return value.dim if isinstance(value, Size) else value
