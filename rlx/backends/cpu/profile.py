"""Recorded native runs: the executor's time stamps as a profile and as a timeline."""

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

Names = tuple[str, str, str]  # of a launch: kernel, node, block
Stamps = npt.NDArray[np.int64]  # [worker, launch, (begin, end, iterations)]
LOOP = "loop"
"""The label of a slice that covers all iterations of a loop."""


class CpuRecording(Recording):
    """The time stamps that the executor wrote inside `record`; evaluated afterwards."""

    def __init__(self, executable: CpuExecutable) -> None:
        self._executable = executable
        self._rate = executable.pool.ticks_per_second
        self.stamps: list[Stamps] = []  # of each run
        self.sizes: list[Mapping[str, int]] = []

    @contextmanager
    def record(self) -> Iterator[CpuRecording]:
        executable, program = self._executable, self._executable.linked.program
        self.stamps = program.profile(executable.pool.workers)
        executable.recorder = self
        try:
            yield self
        finally:
            executable.recorder = None
            program.stop_profile()

    # -- profile ------------------------------------------------------------------------------

    def profile(self) -> Profile:
        """Medians; a launch lasts from the begin of its first worker to the end of its last."""
        spans = [_spans(stamps) for stamps in self.stamps]
        if not spans:
            return Profile(())
        begins, ends, iterations = (np.stack(column) for column in zip(*spans, strict=True))
        seconds, taken = (ends - begins) / self._rate, iterations > 0
        middle = len(spans) // 2
        rows = [
            self._timing(i, median_of(seconds[taken[:, i], i]), int(iterations[middle, i]), middle)
            for i in range(iterations.shape[1])
        ]
        elapsed = [
            (end[ran].max() - begin[ran].min()) / self._rate
            for begin, end, ran in zip(begins, ends, taken, strict=True)
            if ran.any()
        ]
        return Profile(tuple(rows), float(median_of(elapsed)))

    def _timing(self, launch: int, seconds: float, iterations: int, run: int) -> Timing:
        metadata, sizes = self._executable.relocatable.metadata[launch], self.sizes[run]
        flops: Dim = metadata.flops
        moved: Dim = metadata.bytes
        if metadata.node >= 0 and not flops and not moved:
            node = self._executable.lir.graph.nodes[metadata.node]
            cost = node.op.cost([v.shape for v in node.inputs], [v.shape for v in node.outputs])
            flops, moved = cost.flops, cost.bytes
        label, name, block = self._names(launch)
        done, touched = (iterations * evaluate(cost, sizes) for cost in (flops, moved))
        return Timing(label, name, block, float(seconds), done, touched, iterations)

    def _names(self, launch: int) -> Names:
        metadata = self._executable.relocatable.metadata[launch]
        if metadata.node < 0:
            return metadata.label, "", ""
        node = self._executable.lir.graph.nodes[metadata.node]
        return metadata.label, f"%{node.id} {node.op.name}", node.origin.block

    # -- timeline -----------------------------------------------------------------------------

    def slices(self) -> list[Slice]:
        """The launches of every worker, and its waiting at barriers. All iterations of a loop are
        one slice, because the executor records only their sum."""
        names = [self._names(i) for i in range(len(self._executable.relocatable))]
        waits = (self._executable.relocatable.flags & BARRIER) != 0
        found: list[Slice] = []
        for run, stamps in enumerate(self.stamps):
            _, ends, iterations = _spans(stamps)
            last = int(ends.max())
            for worker, own in enumerate(stamps):
                parts = _parts(own, iterations > 1, last, names, waits)
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
    """The slices of one worker, in ticks. A gap with a barrier in it counts as waiting."""
    launches = [int(i) for i in np.nonzero(stamps[:, 2])[0]]
    starts = [*map(int, stamps[launches, 0]), last]
    at = 0
    while at < len(launches):
        launch, after = launches[at], at + 1
        if looped[launch]:
            while after < len(launches) and looped[launches[after]]:
                after += 1
            yield (LOOP, *names[launch][1:]), starts[at], starts[after]
        else:
            end = int(stamps[launch, 1])
            yield names[launch], starts[at], end
            following = launches[after] if after < len(launches) else len(waits)
            if end < starts[after] and waits[launch:following].any():
                yield (WAIT, "", ""), end, starts[after]
        at = after


def _spans(stamps: Stamps) -> tuple[Stamps, Stamps, Stamps]:
    """For each launch: begin of its first worker, end of its last, and iterations; all 0 if it was
    jumped over. Workers that take no part in a solo launch have no stamps."""
    begins, ends, iterations = stamps[..., 0], stamps[..., 1], stamps[..., 2]
    taken = iterations.max(0) > 0
    first = np.where(iterations > 0, begins, np.iinfo(np.int64).max).min(0)
    return np.where(taken, first, 0), ends.max(0), iterations.max(0)
