"""Collects nodes, blocks, pass times, fusions and dispatch for a report."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

from rlx.backends.timing import block_pattern
from rlx.ir.attrs import Body
from rlx.ir.graph import Graph
from rlx.ir.lir import Lir
from rlx.ir.node import Node, Value
from rlx.ir.text.printer import write_call
from rlx.passes.pipeline import PipelineResult
from rlx.passes.report import DispatchReport, FusionReport
from rlx.viz.report.records import Block, Dispatch, Fused, Place, Result, Spent, Statement

_SEGMENT = re.compile(r"\.(?!\d+(?:\.|$))")  # `blk.0.rope` is rope in blk.0


def statements(
    graph: Graph, lir: Lir | None = None, seconds: Mapping[int, float] | None = None
) -> list[Statement]:
    """The nodes of a graph; with its plan, also the slots of results."""
    return [_statement(node, lir, (seconds or {}).get(node.id, 0.0)) for node in graph.nodes]


def _statement(node: Node, lir: Lir | None, seconds: float) -> Statement:
    text = write_call(node, _nested)
    phase = lir.phases.get(node.id) if lir is not None else None
    origin = node.origin
    return Statement(
        node.id,
        node.op.name,
        text.removeprefix(node.op.name),
        [_result(v, lir) for v in node.outputs],
        node.name,
        node.op.is_source,
        f"{os.path.basename(origin.file)}:{origin.line}" if origin.file else "",
        origin.passes,
        phase.value if phase is not None else "",
        seconds,
    )


def _nested(body: Body) -> str:
    """The ops of a nested graph, in order."""
    return f"{{{', '.join(n.op.name for n in body.graph.nodes if not n.op.is_source)}}}"


def _result(value: Value, lir: Lir | None) -> Result:
    dims = f"[{', '.join(map(str, value.shape.dims))}]"
    place = None
    if lir is not None:
        slot = lir.slots[value]
        root = "" if slot.root is None else str(slot.root)
        place = Place(slot.kind, slot.size, slot.first, slot.last, slot.offset, root)
    return Result(dims, str(value.shape.dtype), place)


def blocks(name: str, stages: Mapping[str, Graph]) -> list[Block]:
    """The blocks of all stages as one tree."""
    found = [Block(name, "", -1)]
    known = {"": 0}
    for stage, graph in stages.items():
        for node in graph.nodes:
            block = found[_block(node.origin.block, found, known)]
            getattr(block, stage).append(node.id)
    return found


def _block(path: str, found: list[Block], known: dict[str, int]) -> int:
    if path not in known:
        *outer, name = _SEGMENT.split(path)
        parent = _block(".".join(outer), found, known)
        known[path] = len(found)
        found.append(Block(name, path, parent))
    return known[path]


def spent_in_passes(result: PipelineResult) -> list[Spent]:
    """Time and change in the number of nodes, pass by pass."""
    found, before = [], None
    for stage in result.trace:
        change = "" if before in (None, stage.nodes) else f" ({stage.nodes - before:+d})"
        found.append(Spent("passes", stage.name, stage.seconds, f"{stage.nodes} nodes{change}"))
        before = stage.nodes
    return found


def fusions(report: FusionReport) -> list[Fused]:
    """Fusions, the most frequent first, then near misses."""
    done = [
        Fused(rule, len(origins), patterns(report.blocks(rule)))
        for rule, origins in report.fused.items()
    ]
    missed: dict[tuple[str, str], list[str]] = {}
    for m in report.missed:
        missed.setdefault((m.rule, m.reason), []).append(m.origin.block or str(m.origin))
    nearly = [
        Fused(rule, len(places), patterns(places), reason)
        for (rule, reason), places in missed.items()
    ]
    return [*sorted(done, key=_by_count), *sorted(nearly, key=_by_count)]


def _by_count(fused: Fused) -> int:
    return -fused.count


def patterns(blocks: Iterable[str]) -> list[str]:
    """Each block pattern once; layer numbers become `*`."""
    return [b for b in dict.fromkeys(map(block_pattern, blocks)) if b]


def dispatches(report: DispatchReport) -> list[Dispatch]:
    return [Dispatch(r.kind, r.outcome, r.nodes, r.why) for r in report.rows]
