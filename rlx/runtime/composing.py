"""Builds a model for a component: its layer composition says what the stack is made of.

A function that takes an argument gets the composition and builds that stack. One that takes none
describes the stack by itself; then the two must not contradict each other.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

from rlx.errors import OptionError
from rlx.ir.graph import Graph
from rlx.ir.module import GraphModule
from rlx.specialize.component import LayerComposition

BuildHir = Callable[..., Graph | GraphModule]


def build(build_hir: BuildHir, composition_key: str = "") -> Graph | GraphModule:
    """The model, with the layers that the composition of this key asks for."""
    if not composition_key:
        return build_hir()
    composition = LayerComposition.of_key(composition_key)
    if composition is None:
        raise OptionError(
            "unknown layer composition", got=composition_key[:16],
            hint="take the key of a LayerComposition made in this process",
        )  # fmt: skip
    if _takes_one(build_hir):
        return build_hir(composition)
    module = build_hir()
    _require_layers(module, composition)
    return module


def _takes_one(function: BuildHir) -> bool:
    """Whether it has a parameter without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(p.kind in plain and p.default is p.empty for p in parameters)


def _require_layers(module: Graph | GraphModule, composition: LayerComposition) -> None:
    """Blocks named `layer.0`, `layer.1`, … are the layers of a composition of that name."""
    graph = module if isinstance(module, Graph) else module.as_hir() or module.as_graph()
    blocks = {node.origin.block for node in graph.nodes} if graph is not None else set()
    for layer in composition.layers:
        numbered = re.compile(rf"(?:^|\.){re.escape(layer)}\.(\d+)(?:\.|$)")
        found = {m[1] for b in blocks if (m := numbered.search(b))}
        wanted = composition.count if composition.kind == "homogeneous" else 1
        if found and len(found) != wanted:
            raise OptionError(
                "the model is not what its layer composition says", where=layer,
                got=f"{len(found)} layers", expected=str(composition),
            )  # fmt: skip
