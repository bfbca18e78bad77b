"""Common bodies: what a logical kernel is in terms of primitive ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlx.ir.graph import Graph
from rlx.ir.node import Value

# Builds the function of an op on `g` and gives its value or values; None where the body does not
# cover these attributes.
Body = Callable[[Graph, Any, Sequence[Value]], Any]

COMMON: dict[str, Body] = {}


def common(*kinds: str) -> Callable[[Body], Body]:
    """Register a body for op kinds."""

    def register(body: Body) -> Body:
        for kind in kinds:
            COMMON[kind] = body
        return body

    return register
