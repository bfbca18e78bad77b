"""LIR becomes a program: nodes to steps, distinct kernels to machine code, steps to a listing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.backends.cpu.checks import limits_of
from rlx.backends.cpu.listing import HostCall, Listing, Mark
from rlx.backends.cpu.lowering import Context, Step, steps_of
from rlx.backends.cpu.place import Placed, PlacedWords, place
from rlx.backends.cpu.repeat import Repeats
from rlx.backends.cpu.schedule import place_barriers
from rlx.backends.cpu.words import WordTable
from rlx.codegen.jit import Kernel
from rlx.codegen.kernel import KernelSpec, compile_specs
from rlx.codegen.program import Program, step_flags
from rlx.codegen.target import Target
from rlx.ir.lir import Lir
from rlx.ir.op import Array
from rlx.ir.phase import Phase


@dataclass
class Listed:
    """A program that could be stored, and the code its kernels are."""

    lir: Lir
    steps: list[Step]
    listing: Listing
    kernels: dict[str, Kernel]


@dataclass
class Assembled:
    """A program in memory."""

    lir: Lir
    steps: list[Step]
    placed: Placed

    @property
    def program(self) -> Program:
        return self.placed.program

    @property
    def words(self) -> PlacedWords:
        return self.placed.words

    @property
    def arena(self) -> Array:
        return self.placed.arena

    @property
    def status(self) -> Array:
        return self.placed.status


def assemble(lir: Lir, target: Target, threads: int) -> Assembled:
    """Everything a run needs but parameters, states and inputs."""
    listed = list_program(lir, target, threads)
    return Assembled(lir, listed.steps, place(listed.listing, listed.kernels))


def list_program(lir: Lir, target: Target, threads: int) -> Listed:
    """The program for up to so many workers, also where the target is another machine."""
    ctx = Context(lir, target, threads)
    steps = steps_of(ctx, Repeats(ctx))
    kernels = compile_specs((s.spec for s in steps if s.spec is not None), target)
    words = WordTable(lir)
    starts, places = [0], dict[int, int]()
    for step in steps:
        places[id(step)] = len(words.offsets)
        words.extend(step.words)
        starts.append(len(words.offsets))
    words.close(places)
    barriers = place_barriers(steps, lir)
    listing = _columns(lir, steps, barriers, kernels, words, starts)
    listing.workers = threads
    return Listed(lir, steps, listing, {k.key: k for k in kernels.values()})


def _columns(
    lir: Lir,
    steps: Sequence[Step],
    barriers: Sequence[bool],
    kernels: Mapping[KernelSpec, Kernel],
    words: WordTable,
    starts: list[int],
) -> Listing:
    keys = {kernel.key: i for i, kernel in enumerate(dict.fromkeys(kernels.values()))}
    numbers = {spec: keys[kernel.key] for spec, kernel in kernels.items()}
    calls = [-1 if s.spec is None else numbers[s.spec] for s in steps]
    flags = [
        step_flags(barrier, s.solo, s.jump, s.spec is None)
        for s, barrier in zip(steps, barriers, strict=True)
    ]
    return Listing(
        kernels=list(keys),
        calls=np.array(calls, np.int32),
        starts=np.array(starts, np.int64),
        flags=np.array(flags, np.int32),
        phases=_phases(lir, steps),
        anchors=np.array(words.anchors, np.int32),
        offsets=np.array(words.offsets, np.int64),
        live=words.live,
        late=words.late,
        patches=np.array(words.patches, np.int32).reshape(-1, 2),
        constants=words.constants,
        symbols=sorted(lir.live),
        limits=limits_of(lir.graph),
        arena_size=lir.arena_size,
        workers=0,
        reports=words.reports,
        hosts={i: _host_call(s) for i, s in enumerate(steps) if s.host is not None},
        marks=StepMarks(steps),
    )


class StepMarks(Sequence[Mark]):
    """Marks of steps, made when somebody looks: a variant that only runs needs none."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        step = self.steps[index]
        number = -1 if step.node is None else step.node.id
        return Mark(step.label, number, step.flops, step.bytes)


def _phases(lir: Lir, steps: Sequence[Step]) -> npt.NDArray[np.int32]:
    """The phase of every step, ascending: one that stands before an earlier phase belongs to it."""
    orders: dict[Phase | None, int] = {phase: phase.order for phase in Phase} | {None: 0}
    phase_of = lir.phases.get
    found = [0 if s.node is None else orders[phase_of(s.node)] for s in steps]
    return np.minimum.accumulate(np.array(found[::-1], np.int32))[::-1]


def _host_call(step: Step) -> HostCall:
    node = step.host
    assert node is not None
    return HostCall(
        node.op, tuple(v.shape for v in node.inputs), tuple(v.shape for v in node.outputs)
    )
