"""Fusion: tables of rules, in the order in which they are applied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from rlx.ir.graph import Graph
from rlx.ir.op import registrations
from rlx.passes.fuse.activation import ACTIVATION
from rlx.passes.fuse.attention import ATTENTION
from rlx.passes.fuse.glu import GLU
from rlx.passes.fuse.linear import LINEAR
from rlx.passes.fuse.norm import NORM, RESIDUAL
from rlx.passes.fuse.precision import PRECISION
from rlx.passes.fuse.region import fuse_regions
from rlx.passes.fuse.rope import ROPE
from rlx.passes.fuse.shared_input import share_inputs
from rlx.passes.report import FusionReport
from rlx.passes.rewrite import OnFire, Rule, apply
from rlx.passes.simplify_layout import LAYOUT

Fusion = Callable[[Graph, FusionReport | None, OnFire | None], Graph]


def _table(*rules: Sequence[Rule]) -> Fusion:
    @lru_cache(maxsize=1)
    def joined(registered: int) -> tuple[Rule, ...]:
        return tuple([rule for table in rules for rule in table])

    return lambda graph, report, on_fire: apply(
        graph, joined(registrations()), "fuse", report, on_fire
    )


# First what ops were written out is recognised, then those ops are joined with their neighbours,
# and what is left over becomes regions.
FUSIONS: dict[str, Fusion] = {
    "activations": _table(ACTIVATION, NORM),
    "attention": _table(ATTENTION),
    "rope": _table(ROPE),
    "glu": _table(GLU),
    "residual": _table(RESIDUAL),
    "precision": _table(PRECISION),
    "linear": _table(LINEAR),
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
    """Every fusion in order, or those named in `only`."""
    for name, fusion in FUSIONS.items():
        if only is None or name in only:
            graph = fusion(graph, report, on_fire)
    return graph
