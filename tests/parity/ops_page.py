"""Prints docs/ops.md from the table of cases: `python tests/parity/ops_page.py > docs/ops.md`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from cases import Case, cases

from rlx.backends.cpu.backend import CpuBackend
from rlx.ir.graph import Graph
from rlx.ir.op import REGISTRY
from rlx.llvm.target import Target

HEAD = """# Ops

Every op of MIR: what it computes, the element types it is tested with, how the CPU device runs it,
and how far a result may be from the reference, in units in the last place of the element ("ulp")
or, for what accumulates, of the largest result ("ulp of max"). Made by
`python tests/parity/ops_page.py` from the table that the tests run.

| op | computes | element types | on the CPU | tolerance |
|---|---|---|---|---|
"""


def how(case: Case, backend: CpuBackend) -> str:
    graph: Graph = case.graph()
    nodes = [n for n in graph.nodes if n.op.name == case.op]
    if nodes and nodes[0].op.is_view:
        return "view, or copy"
    if nodes and backend.has_native(nodes[0]):
        return "native"
    return "decomposition" if REGISTRY[case.op].has_decomposition() else "unsupported"


def tolerance(group: list[Case]) -> str:
    worst = max(group, key=lambda c: c.ulps)
    if worst.ulps == 0:
        return "equal bits"
    unit = "ulp" if worst.mode == "element" else "ulp of max"
    why = f" ({worst.reason})" if worst.reason else ""
    return f"{worst.ulps:g} {unit}{why}"


def page() -> str:
    backend = CpuBackend(Target.host())
    groups: dict[str, list[Case]] = {}
    for case in cases():
        groups.setdefault(case.op, []).append(case)
    rows = []
    for name in sorted(groups):
        group = groups[name]
        summary = (REGISTRY[name].__doc__ or "").strip().splitlines()[0].rstrip(".")
        types = ", ".join(dict.fromkeys(c.dtype for c in group))
        ways = ", ".join(dict.fromkeys(how(c, backend) for c in group))
        text = summary.replace("|", "\\|")
        rows.append(f"| `{name}` | {text} | {types} | {ways} | {tolerance(group)} |")
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
