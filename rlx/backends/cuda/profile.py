"""Times of launches by events on the stream, read as a profile and as a timeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from rlx.backends.cuda.driver import Event, Stream
from rlx.backends.timing import Profile, Recording, Slice, Timing, median_of
from rlx.ir.dim import evaluate

if TYPE_CHECKING:
    from rlx.backends.cuda.executable import CudaExecutable


class _Timed(NamedTuple):
    """A launch between two events."""

    number: int
    begin: Event
    end: Event

    @property
    def seconds(self) -> float:
        return self.end.seconds_since(self.begin)


class CudaRecording(Recording):
    """Runs launch by launch, not as a graph; nothing waits while they are recorded."""

    def __init__(self, executable: CudaExecutable) -> None:
        self._executable = executable
        self._runs: list[list[_Timed]] = []
        self._sizes: list[Mapping[str, int]] = []

    @contextmanager
    def watch(self) -> Iterator[CudaRecording]:
        self._executable.watched_by = self
        try:
            yield self
        finally:
            self._executable.watched_by = None

    def begin_run(self, sizes: Mapping[str, int]) -> None:
        self._runs.append([])
        self._sizes.append(dict(sizes))  # callers may use one mapping again

    def record(self, number: int, stream: Stream, launch: Callable[[], None]) -> None:
        begin = Event(stream).record()
        launch()
        self._runs[-1].append(_Timed(number, begin, Event(stream).record()))

    def profile(self) -> Profile:
        if not self._runs:
            return Profile(())
        longest = max(len(run) for run in self._runs)
        whole = [i for i, run in enumerate(self._runs) if len(run) == longest]  # not of a part
        middle = whole[len(whole) // 2]
        rows = [
            self._timing(timed.number, median_of(self._runs[i][k].seconds for i in whole), middle)
            for k, timed in enumerate(self._runs[middle])
        ]
        elapsed = [r[-1].end.seconds_since(r[0].begin) for i in whole if (r := self._runs[i])]
        return Profile(tuple(rows), median_of(elapsed) if elapsed else 0.0)

    def _timing(self, number: int, seconds: float, run: int) -> Timing:
        numbers, sizes = self._executable.program.nodes, self._sizes[run]
        node = self._executable.node_of(number)
        shares = numbers.count(numbers[number])  # launches of the same node
        cost = node.op.cost([v.shape for v in node.inputs], [v.shape for v in node.outputs])
        flops, moved = (evaluate(c, sizes) // shares for c in (cost.flops, cost.bytes))
        return Timing(*self._names(number), seconds, flops, moved)

    def _names(self, number: int) -> tuple[str, str, str]:
        """Kernel, node and block of a launch."""
        node = self._executable.node_of(number)
        label = self._executable.program.launches[number].label
        return label, f"%{node.id} {node.op.name}", node.origin.block

    def slices(self) -> list[Slice]:
        found: list[Slice] = []
        first = next((run[0].begin for run in self._runs if run), None)
        for number, run in enumerate(self._runs):
            for timed in run:
                assert first is not None
                begin, end = (e.seconds_since(first) for e in (timed.begin, timed.end))
                found.append(Slice(number, 0, *self._names(timed.number), begin, end))
        return found
