"""Time stamps of a native run, read as a profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rlx.backends.cpu.listing import Mark
from rlx.backends.timing import Profile, Timing
from rlx.ir.dim import Dim, evaluate
from rlx.ir.node import Node
from rlx.ir.op import Array

if TYPE_CHECKING:
    from rlx.backends.cpu.executable import CpuExecutable


def profile_run(
    executable: CpuExecutable,
    inputs: Sequence[Array | None],
    outputs: Sequence[Array | None],
    sizes: Mapping[str, int],
) -> Profile:
    """Run once with time stamps. A step lasts from its first worker's begin to its last one's end;
    waiting at barriers is nobody's."""
    program, pool = executable.made.program, executable.pool
    stamps = program.profile(pool.workers)
    try:
        executable.run(inputs, outputs, sizes)
    finally:
        program.stop_profile()
    rows = []
    nodes = executable.lir.graph.nodes
    for i, mark in enumerate(executable.listing.marks):
        begin, end = stamps[:, i, 0], stamps[:, i, 1]
        took = begin > 0  # a step done by one worker leaves the others' stamps alone
        ticks = int(end[took].max() - begin[took].min()) if took.any() else 0
        rounds = int(stamps[:, i, 2].max())
        node = nodes[mark.node] if mark.node >= 0 else None
        rows.append(_timing(mark, node, ticks / pool.ticks_per_second, rounds, sizes))
    return Profile(tuple(rows))


def _timing(
    mark: Mark, node: Node | None, seconds: float, rounds: int, sizes: Mapping[str, int]
) -> Timing:
    flops: Dim = mark.flops
    moved: Dim = mark.bytes
    if node is not None and not flops and not moved:
        cost = node.op.cost([v.shape for v in node.inputs], [v.shape for v in node.outputs])
        flops, moved = cost.flops, cost.bytes
    name = "" if node is None else f"%{node.id} {node.op.name}"
    block = "" if node is None else node.origin.block
    done, touched = (rounds * evaluate(cost, sizes) for cost in (flops, moved))
    return Timing(mark.label, name, block, seconds, done, touched)
