"""What the compiler did and did not do, for people to read.

How many passes ran in this process: a start from an artifact runs none.
"""

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
    """A place where a fusion rule nearly applied."""

    rule: str
    reason: str
    origin: Origin


@dataclass
class FusionReport:
    """Which rules fused what, and where one nearly did."""

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
    """What became of the nodes of one kind."""

    kind: str
    outcome: Outcome
    nodes: int
    why: str


@dataclass
class DispatchReport:
    """Per op kind: native, host, common, rewritten or unsupported, how many nodes, and why.

    `native`: the backend's own kernel. `host`: the op's reference, run by the host in the midst of
    a run, since there is neither a kernel nor a decomposition. `common`: the body of primitive
    ops, by choice of the dispatch policy. `rewritten`: the same body, because there is no native
    kernel.
    """

    counts: Counter[tuple[str, Outcome, str]] = field(default_factory=Counter)
    places: dict[str, Origin] = field(default_factory=dict)  # where a kind was seen first

    def add(self, kind: str, outcome: Outcome, why: str, origin: Origin) -> None:
        self.counts[kind, outcome, why] += 1
        self.places.setdefault(kind, origin)

    def count_native(self, graph: Graph) -> None:
        """Everything a legal graph holds, nested graphs included, runs natively."""
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
        """Sorted with the troubles first."""
        found = [Dispatched(k, o, n, w) for (k, o, w), n in self.counts.items()]
        return sorted(found, key=lambda r: (_OUTCOMES.index(r.outcome), r.kind, r.why))

    def outcome(self, kind: str) -> set[Outcome]:
        return {o for k, o, _ in self.counts if k == kind}

    @property
    def unsupported(self) -> list[Dispatched]:
        return [r for r in self.rows if r.outcome == "unsupported"]

    def __str__(self) -> str:
        rows = self.rows
        if not rows:
            return "dispatch: no ops"
        kind = max(len(r.kind) for r in rows)
        count = max(len(str(r.nodes)) for r in rows)
        return "\n".join(
            f"{r.kind:{kind}}  {r.outcome:11}  {r.nodes:{count}}  {r.why}".rstrip() for r in rows
        )


@dataclass
class Counters:
    passes: int = 0  # of the list, see `pipeline`
    plans: int = 0  # bound variants that were given memory


counters = Counters()
