"""The reference device, oracle of the tests: runs LIR in NumPy, node by node."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property

from rlx.backends.base import (
    Backend,
    Buffers,
    Executable,
    Parts,
    PlanInfo,
    Sizes,
    Span,
    check_numbers,
)
from rlx.backends.buffer import HOST, Allocator, Buffer
from rlx.backends.timing import Profile, Recording, Slice, Timing, median_of
from rlx.ir.binding import bind_nodes
from rlx.ir.dim import evaluate
from rlx.ir.interp import Hook, Program
from rlx.ir.lir import Lir
from rlx.ir.node import Node, Value
from rlx.ir.op import Array
from rlx.specialize.options import CompileOptions


class ReferenceExecutable(Executable):
    def __init__(self, lir: Lir, allocator: Allocator = HOST) -> None:
        self._lir = lir
        info = PlanInfo.of(lir)
        self.manifest, self.output_phases = info.manifest, info.output_phases
        self.arena = allocator.alloc_arena(lir.arena_size)
        self._params: dict[str, Buffer] = {}
        self._states: Mapping[str, Buffer] = {}
        self._programs: dict[tuple[tuple[str, int], ...], Program] = {}
        self.recorder: ReferenceRecording | None = None
        self._left: dict[Value, Array] = {}  # values of earlier phases, for the next ones
        self._left_by: Program | None = None

    @property
    def lir(self) -> Lir:
        return self._lir

    def attach(self, params: Mapping[str, Buffer], states: Mapping[str, Buffer]) -> None:
        self._params = {n.name: params[n.name] for n in self.lir.params}
        self._states = states

    def load(self, buffer: Buffer) -> Array:
        """The elements of a buffer, for reading."""
        return buffer.array

    def store(self, buffer: Buffer, array: Array) -> None:
        """Write a result to a buffer."""
        if array is not buffer.array:
            buffer.array[...] = array

    def run(
        self,
        inputs: Buffers,
        outputs: Buffers,
        sizes: Sizes,
        span: Span | None = None,
        on_node: Hook | None = None,
    ) -> None:
        given = self._arguments(inputs, sizes)
        program, values = self._program(sizes), dict[Value, Array]()
        first, last = 0, len(program.instructions)
        if span is not None:
            first, last = self._end_of(span[0].order - 1), self._end_of(span[1].order)
            values = self._left_for(program) if first else values
        if on_node is None and self.recorder is not None:
            on_node = self.recorder.new_run(sizes)
        program.run_part(values, given, first, last, on_node, keep=span is not None)
        self._left, self._left_by = ({} if span is None else values), program
        for name, array in program.states_in(values, first, last).items():
            self.store(self._states[name], array)
        rows = zip(program.graph.outputs, outputs, self.manifest.outputs, strict=True)
        for value, out, entry in rows:
            if value in values:
                self.store(self.slot(entry, sizes) if out is None else out, values[value])

    def _arguments(
        self, inputs: Sequence[Buffer | None], sizes: Mapping[str, int]
    ) -> dict[str, Array]:
        """Inputs, parameters and states by name."""
        given = {**self._params, **{n.name: self._states[n.name] for n in self.lir.states}}
        for entry, buffer in zip(self.manifest.inputs, inputs, strict=True):
            given[entry.name] = self.slot(entry, sizes) if buffer is None else buffer
        return {name: self.load(buffer) for name, buffer in given.items()}

    def _left_for(self, program: Program) -> dict[Value, Array]:
        """The values of earlier phases, which may have run with other sizes."""
        if self._left_by is program:
            return self._left
        nodes = program.graph.nodes
        return {nodes[v.node.id].outputs[v.index]: array for v, array in self._left.items()}

    def _end_of(self, phase: int) -> int:
        """The number of nodes up to the end of a phase."""
        return bisect_right(self._orders, phase)

    @cached_property
    def _orders(self) -> list[int]:
        return self.lir.phase_orders()

    def recording(self) -> AbstractContextManager[ReferenceRecording]:
        return ReferenceRecording(self).record()

    def run_checked(self, inputs: Buffers, outputs: Buffers, sizes: Sizes) -> None:
        self.run(inputs, outputs, sizes, on_node=check_numbers)

    def _program(self, sizes: Mapping[str, int]) -> Program:
        key = tuple(sorted(sizes.items()))
        if key not in self._programs:
            if len(self._programs) >= 64:
                self._programs.pop(next(iter(self._programs)))
            graph = bind_nodes(self.lir.graph, sizes) if sizes else self.lir.graph
            self._programs[key] = Program(graph, sizes)
        return self._programs[key]


class ReferenceRecording(Recording):
    """Runs in NumPy; a launch is a node."""

    def __init__(self, executable: ReferenceExecutable) -> None:
        self._executable = executable
        self._runs: list[list[Timing]] = []
        self._slices: list[Slice] = []

    @contextmanager
    def record(self) -> Iterator[ReferenceRecording]:
        self._executable.recorder = self
        try:
            yield self
        finally:
            self._executable.recorder = None

    def new_run(self, sizes: Mapping[str, int]) -> Hook:
        run, rows = len(self._runs), list[Timing]()
        self._runs.append(rows)
        last = time.perf_counter()

        def stamp(node: Node, results: Sequence[Array]) -> None:
            nonlocal last
            now = time.perf_counter()
            if not node.op.is_source:
                shapes = [[v.shape.bind(sizes) for v in vs] for vs in (node.inputs, node.outputs)]
                cost = node.op.cost(*shapes)
                flops, moved = evaluate(cost.flops, sizes), evaluate(cost.bytes, sizes)
                names = node.op.name, f"%{node.id} {node.op.name}", node.origin.block
                rows.append(Timing(*names, now - last, flops, moved))
                self._slices.append(Slice(run, 0, *names, last, now))
            last = time.perf_counter()

        return stamp

    def profile(self) -> Profile:
        if not self._runs:
            return Profile(())
        longest = max(len(rows) for rows in self._runs)
        whole = [rows for rows in self._runs if len(rows) == longest]  # not runs of some phases
        middle = whole[len(whole) // 2]
        times = [median_of(r.seconds for r in same) for same in zip(*whole, strict=True)]
        rows = tuple(replace(r, seconds=t) for r, t in zip(middle, times, strict=True))
        return Profile(rows, median_of(sum(r.seconds for r in run) for run in whole))

    def slices(self) -> list[Slice]:
        return self._slices


class ReferenceBackend(Backend):
    name = "reference"

    def has_native(self, node: Node) -> bool:
        return True  # every op has a reference

    def compile(self, lir: Lir, options: CompileOptions) -> ReferenceExecutable:
        return ReferenceExecutable(lir)

    def export(self, lir: Lir, options: CompileOptions) -> Parts:
        return {}  # the plan is enough

    def restore(self, parts: Parts, info: PlanInfo, options: CompileOptions) -> ReferenceExecutable:
        return ReferenceExecutable(info.lir())


def make_backend() -> Backend:
    return ReferenceBackend()
