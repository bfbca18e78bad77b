"""The arena plan as rectangles."""

from __future__ import annotations

import itertools

import rlx
from rlx.viz.report.records import arena_plan


def test_what_lives_at_the_same_time_does_not_overlap() -> None:
    g = rlx.Graph("chain")
    x = g.input("x", [256, 64])
    with g.block("top"):
        h = g.matmul(x, g.param("w", [64, 64]))
        for i in range(3):
            h = g.softmax(g.matmul(h, g.param(f"w{i}", [64, 64])))
    g.set_outputs(h)
    lir = rlx.Session("cpu").compile(g).executable.lir
    plan = arena_plan(lir)
    assert plan[0].name == "x"
    assert {"input", "output"} <= {p.kind for p in plan}
    assert max(p.offset + p.size for p in plan) <= lir.arena_size
    assert [p.first for p in plan] == sorted(p.first for p in plan)
    assert "top" in {p.block for p in plan}
    for a, b in itertools.combinations(plan, 2):
        together = a.first <= b.last and b.first <= a.last
        apart = a.offset + a.size <= b.offset or b.offset + b.size <= a.offset
        if together and a.last != b.first and b.last != a.first:  # the last reader may write there
            assert apart, (a, b)
