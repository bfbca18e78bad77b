"""Reports for users: which rules fused, how each op was dispatched, how many passes ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import field
from typing import Literal, NamedTuple

from rlx.ir.graph import Graph
from rlx.ir.node import Node, Origin
from rlx.ir.text.printer import bodies
from rlx.support.records import dataclass


class Missed(NamedTuple):
    """A fusion rule whose pattern matched but which did not apply."""

    rule: str
    reason: str
    origin: Origin


@dataclass
class FusionReport:
    """Which rules fused what, and which matched without applying."""

    fused: dict[str, list[Origin]] = field(default_factory=dict)
    missed: list[Missed] = field(default_factory=list)

    def add(self, rule: str, origin: Origin) -> None:
        self.fused.setdefault(rule, []).append(origin)

    def miss(self, rule: str, reason: str, origin: Origin) -> None:
        self.missed.append(Missed(rule, reason, origin))

    def count(self, rule: str) -> int:
        return len(self.fused.get(rule, ()))

    def blocks(self, rule: str) -> list[str]:
        """Blocks in which a rule fused something, each once, in order."""
        return list(dict.fromkeys(o.block for o in self.fused.get(rule, ()) if o.block))

    def __str__(self) -> str:
        lines = ["fused:"] if self.fused else ["fused: nothing"]
        for rule, origins in self.fused.items():
            lines.append(f"  {rule}: {len(origins)} ×{_in_blocks(self.blocks(rule))}")
        if self.missed:
            lines.append("nearly fused:")
        groups: dict[tuple[str, str], list[Origin]] = {}
        for m in self.missed:
            groups.setdefault((m.rule, m.reason), []).append(m.origin)
        for (rule, reason), origins in groups.items():
            blocks = list(dict.fromkeys(o.block or str(o) for o in origins))
            lines.append(f"  {rule}: {reason}; {len(origins)} ×{_in_blocks(blocks)}")
        return "\n".join(lines)


def _in_blocks(blocks: list[str]) -> str:
    shown = [b for b in blocks if b]
    if not shown:
        return ""
    more = f", … ({len(shown)} blocks)" if len(shown) > 3 else ""
    return f" in {', '.join(shown[:3])}{more}"


Outcome = Literal["native", "host", "common", "rewritten", "unsupported"]
_OUTCOMES: tuple[Outcome, ...] = ("unsupported", "host", "rewritten", "common", "native")


class Dispatched(NamedTuple):
    """How the nodes of one op were dispatched."""

    op: str
    outcome: Outcome
    nodes: int
    why: str

    @property
    def kind(self) -> str:
        """Alias of `op`."""
        return self.op


@dataclass
class DispatchReport:
    """Per op name: native, host, common, rewritten or unsupported, how many nodes, and why.

    `native`: the backend's own kernel. `host`: the op's reference, run by the host in the middle of
    a run, since there is neither a kernel nor a decomposition. `common`: the decomposition, chosen
    by the dispatch policy. `rewritten`: the decomposition, because there is no native kernel.
    """

    counts: Counter[tuple[str, Outcome, str]] = field(default_factory=Counter)
    origins: dict[str, Origin] = field(default_factory=dict)  # of the first node of each op

    def add(self, op: str, outcome: Outcome, why: str, origin: Origin) -> None:
        self.counts[op, outcome, why] += 1
        self.origins.setdefault(op, origin)

    def count_native(self, graph: Graph) -> None:
        """Count every node of a legal graph, subgraphs included, as native."""
        for key in [k for k in self.counts if k[1] == "native"]:
            del self.counts[key]
        self._count(graph)

    def _count(self, graph: Graph) -> None:
        for node in graph.nodes:
            if not node.op.is_source:
                self.add(node.op.name, "native", "", node.origin)
                if node.op.is_control_flow:
                    for body in bodies(node.op):
                        self._count(body.graph)

    def count_host(self, graph: Graph, runs_on_host: Callable[[Node], bool]) -> None:
        """Nodes of a legal graph that the host runs, which were counted as native."""
        for node in graph.nodes:
            if runs_on_host(node):
                self.counts[node.op.name, "native", ""] -= 1
                self.add(node.op.name, "host", "no kernel and no decomposition", node.origin)
        self.counts = +self.counts

    @property
    def rows(self) -> list[Dispatched]:
        """One row per op and outcome, unsupported ops first."""
        found = [Dispatched(k, o, n, w) for (k, o, w), n in self.counts.items()]
        return sorted(found, key=lambda r: (_OUTCOMES.index(r.outcome), r.op, r.why))

    def outcome(self, op: str) -> set[Outcome]:
        return {o for name, o, _ in self.counts if name == op}

    @property
    def unsupported(self) -> list[Dispatched]:
        return [r for r in self.rows if r.outcome == "unsupported"]

    def __str__(self) -> str:
        rows = self.rows
        if not rows:
            return "dispatch: no ops"
        width = max(len(r.op) for r in rows)
        count = max(len(str(r.nodes)) for r in rows)
        return "\n".join(
            f"{r.op:{width}}  {r.outcome:11}  {r.nodes:{count}}  {r.why}".rstrip() for r in rows
        )


@dataclass
class Counters:
    """Work done in this process; loading an artifact does none."""

    passes: int = 0  # of `pipeline.PASSES`
    plans: int = 0  # variants whose memory was planned


counters = Counters()
