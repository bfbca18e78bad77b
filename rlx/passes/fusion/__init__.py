"""Fusion passes: tables of rewrite rules, in the order they are applied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from rlx.errors import OptionError
from rlx.ir.graph import Graph
from rlx.ir.op import registrations
from rlx.passes.fusion.attention import ATTENTION
from rlx.passes.fusion.linear import ACTIVATION, GLU, LINEAR, share_inputs
from rlx.passes.fusion.norm import NORM, RESIDUAL
from rlx.passes.fusion.region import fuse_regions
from rlx.passes.fusion.rope import ROPE
from rlx.passes.precision import PRECISION
from rlx.passes.report import FusionReport
from rlx.passes.rewrite import OnFire, Rule, apply
from rlx.passes.simplify import LAYOUT

Fusion = Callable[[Graph, FusionReport | None, OnFire | None], Graph]


_added: dict[str, list[Rule]] = {}


def add_rules(fusion: str, *rules: Rule) -> None:
    """Append rules to the fusion `fusion`, for ops defined outside the package."""
    if fusion not in _TABLES:
        expected = ", ".join(_TABLES)
        raise OptionError("no such table of rules", got=repr(fusion), expected=expected)
    _added.setdefault(fusion, []).extend(rules)
    _joined.cache_clear()


@lru_cache(maxsize=64)
def _joined(fusion: str, registered: int) -> tuple[Rule, ...]:
    """The rules of a fusion; those on activations grow with the op registry."""
    tables = (*_TABLES[fusion], _added.get(fusion, ()))
    return tuple([rule for table in tables for rule in table])


def _rules(name: str) -> Fusion:
    def run(graph: Graph, report: FusionReport | None, on_fire: OnFire | None) -> Graph:
        return apply(graph, _joined(name, registrations()), "fuse", report, on_fire)

    return run


_TABLES: dict[str, tuple[Sequence[Rule], ...]] = {
    "activations": (ACTIVATION, NORM),
    "attention": (ATTENTION,),
    "rope": (ROPE,),
    "glu": (GLU,),
    "residual": (RESIDUAL,),
    "precision": (PRECISION,),
    "linear": (LINEAR,),
}

# First ops are recognised in their decomposed form, then they are fused with their neighbours, and
# what is left becomes elementwise regions.
FUSIONS: dict[str, Fusion] = {
    **{name: _rules(name) for name in _TABLES},
    "views": lambda graph, _, on_fire: apply(graph, LAYOUT, "fuse", on_fire=on_fire),
    "shared_input": share_inputs,
    "regions": lambda graph, report, _: fuse_regions(graph, report),
}


def fuse(
    graph: Graph,
    report: FusionReport | None = None,
    on_fire: OnFire | None = None,
    only: Sequence[str] | None = None,
) -> Graph:
    """Run all fusion passes in order, or those named in `only`."""
    for name, fusion in FUSIONS.items():
        if only is None or name in only:
            graph = fusion(graph, report, on_fire)
    return graph
