"""Time stamps of native runs, read as a profile and as a timeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rlx.backends.cpu.executor.control_block import BARRIER
from rlx.backends.timing import WAIT, Profile, Recording, Slice, Timing, median_of
from rlx.ir.dim import Dim, evaluate

if TYPE_CHECKING:
    from rlx.backends.cpu.executable import CpuExecutable

Names = tuple[str, str, str]  # kernel, node and block of a step
Stamps = npt.NDArray[np.int64]  # [worker, step, (begin, end, rounds)]
LOOP = "loop"
"""The label of a slice that is all rounds of a loop."""


class CpuRecording(Recording):
    """What the driver wrote while `watch` was on. Reading it is left for afterwards."""

    def __init__(self, executable: CpuExecutable) -> None:
        self._executable = executable
        self._rate = executable.pool.ticks_per_second
        self.stamps: list[Stamps] = []  # of each run
        self.sizes: list[Mapping[str, int]] = []

    @contextmanager
    def watch(self) -> Iterator[CpuRecording]:
        executable, program = self._executable, self._executable.made.program
        self.stamps = program.profile(executable.pool.workers)
        executable.watched_by = self
        try:
            yield self
        finally:
            executable.watched_by = None
            program.stop_profile()

    # -- profile ------------------------------------------------------------------------------

    def profile(self) -> Profile:
        """A step lasts from its first worker's begin to its last one's end."""
        spans = [_spans(stamps) for stamps in self.stamps]
        if not spans:
            return Profile(())
        begins, ends, rounds = (np.stack(column) for column in zip(*spans, strict=True))
        seconds, taken = (ends - begins) / self._rate, rounds > 0
        middle = len(spans) // 2
        rows = [
            self._timing(i, median_of(seconds[taken[:, i], i]), int(rounds[middle, i]), middle)
            for i in range(rounds.shape[1])
        ]
        elapsed = [
            (end[ran].max() - begin[ran].min()) / self._rate
            for begin, end, ran in zip(begins, ends, taken, strict=True)
            if ran.any()
        ]
        return Profile(tuple(rows), float(median_of(elapsed)))

    def _timing(self, step: int, seconds: float, rounds: int, run: int) -> Timing:
        mark, sizes = self._executable.relocatable.marks[step], self.sizes[run]
        flops: Dim = mark.flops
        moved: Dim = mark.bytes
        if mark.node >= 0 and not flops and not moved:
            node = self._executable.lir.graph.nodes[mark.node]
            cost = node.op.cost([v.shape for v in node.inputs], [v.shape for v in node.outputs])
            flops, moved = cost.flops, cost.bytes
        label, name, block = self._names(step)
        done, touched = (rounds * evaluate(cost, sizes) for cost in (flops, moved))
        return Timing(label, name, block, float(seconds), done, touched, rounds)

    def _names(self, step: int) -> Names:
        mark = self._executable.relocatable.marks[step]
        if mark.node < 0:
            return mark.label, "", ""
        node = self._executable.lir.graph.nodes[mark.node]
        return mark.label, f"%{node.id} {node.op.name}", node.origin.block

    # -- timeline -----------------------------------------------------------------------------

    def slices(self) -> list[Slice]:
        """Steps of every worker, and its waiting at barriers. The rounds of a loop are one slice:
        the driver keeps their sum."""
        names = [self._names(i) for i in range(len(self._executable.relocatable))]
        waits = (self._executable.relocatable.flags & BARRIER) != 0
        found: list[Slice] = []
        for run, stamps in enumerate(self.stamps):
            _, ends, rounds = _spans(stamps)
            last = int(ends.max())
            for worker, own in enumerate(stamps):
                parts = _parts(own, rounds > 1, last, names, waits)
                found += [
                    Slice(run, worker, *about, begin / self._rate, end / self._rate)
                    for about, begin, end in parts
                ]
        return found


def _parts(
    stamps: Stamps,
    looped: npt.NDArray[np.bool_],
    last: int,
    names: Sequence[Names],
    waits: npt.NDArray[np.bool_],
) -> Iterator[tuple[Names, int, int]]:
    """What one worker did, in ticks. A gap counts as waiting where a barrier stands in it."""
    steps = [int(i) for i in np.nonzero(stamps[:, 2])[0]]
    starts = [*map(int, stamps[steps, 0]), last]
    at = 0
    while at < len(steps):
        step, after = steps[at], at + 1
        if looped[step]:
            while after < len(steps) and looped[steps[after]]:
                after += 1
            yield (LOOP, *names[step][1:]), starts[at], starts[after]
        else:
            end = int(stamps[step, 1])
            yield names[step], starts[at], end
            following = steps[after] if after < len(steps) else len(waits)
            if end < starts[after] and waits[step:following].any():
                yield (WAIT, "", ""), end, starts[after]
        at = after


def _spans(stamps: Stamps) -> tuple[Stamps, Stamps, Stamps]:
    """Of each step its first worker's begin, its last one's end, and its rounds; 0 of one that was
    jumped over. A step done by one worker leaves the others' stamps alone."""
    begins, ends, rounds = stamps[..., 0], stamps[..., 1], stamps[..., 2]
    taken = rounds.max(0) > 0
    first = np.where(rounds > 0, begins, np.iinfo(np.int64).max).min(0)
    return np.where(taken, first, 0), ends.max(0), rounds.max(0)
