"""LIR becomes a program: nodes to steps, distinct kernels to machine code, steps to a listing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rlx.backends.cpu.checks import limits_of
from rlx.backends.cpu.frame import Frame, ascending
from rlx.backends.cpu.listing import HostCall, Listing, Mark
from rlx.backends.cpu.lowering import Context, Step, steps_of
from rlx.backends.cpu.place import Placed, PlacedWords, place
from rlx.backends.cpu.repeat import Repeats
from rlx.backends.cpu.schedule import place_barriers
from rlx.backends.cpu.told import KindLowering
from rlx.backends.cpu.words import WordTable, number_sources
from rlx.codegen import driver_layout
from rlx.codegen.jit import Kernel
from rlx.codegen.kernel import compile_specs
from rlx.codegen.program import Program, step_flags
from rlx.codegen.target import Target
from rlx.ir.lir import Lir
from rlx.ir.op import Array
from rlx.ir.phase import Phase
from rlx.passes.mould import Variant
from rlx.support.records import dataclass


class Listed(NamedTuple):
    """A program that could be stored, and the code its kernels are."""

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
    steps, listed = _by_node(lir, target, threads)
    return Assembled(lir, steps, place(*listed))


def list_program(lir: Lir, target: Target, threads: int) -> Listed:
    """The program for up to so many workers, also where the target is another machine."""
    listed = _by_kind(lir, target, threads) if isinstance(lir, Variant) else None
    return listed or _by_node(lir, target, threads)[1]


def _by_node(lir: Lir, target: Target, threads: int) -> tuple[list[Step], Listed]:
    ctx = Context(lir, target, threads)
    steps = steps_of(ctx, Repeats(ctx))
    words = WordTable(lir)
    starts, places = [0], dict[int, int]()
    for step in steps:
        places[id(step)] = len(words.offsets)
        words.extend(step.words)
        starts.append(len(words.offsets))
    words.close(places)
    orders: dict[Phase | None, int] = {phase: phase.order for phase in Phase} | {None: 0}
    nodes = [-1 if s.node is None else s.node.id for s in steps]
    code = _Code(steps, target)
    live, patches = number_sources(words.live)
    listing = Listing(
        kernels=code.keys,
        calls=code.calls,
        starts=np.array(starts, np.int64),
        flags=code.flags | _barriers(place_barriers(steps, lir)),
        phases=ascending([0 if n < 0 else orders[lir.phases.get(n)] for n in nodes]),
        anchors=np.array(words.anchors, np.int32),
        offsets=np.array(words.offsets, np.int64),
        live=live,
        late=words.late,
        patches=patches,
        constants=words.constants,
        symbols=sorted(lir.live),
        limits=limits_of(lir.graph.nodes) if lir.live else [],
        arena_size=lir.arena_size,
        workers=threads,
        reports=words.reports,
        hosts={i: _host_call(s) for i, s in enumerate(steps) if s.host is not None},
        marks=Marks(steps, range(len(steps)), nodes),
    )
    return steps, Listed(listing, code.kernels)


def _by_kind(lir: Variant, target: Target, threads: int) -> Listed | None:
    """The same program, its steps lowered by kinds of nodes; None where that is not possible."""
    mould, sized = lir.mould, lir.sized
    key = ("cpu", target.key, threads)
    lowering = mould.kept.get(key) or mould.kept.setdefault(
        key, KindLowering(mould, target, threads)
    )
    kinds = lowering.lower_all(sized) if lowering.possible else None
    if kinds is None:
        return None
    layout = tuple([kind.layout for kind in kinds])
    frame = lowering.frames.get(layout)
    if frame is None:
        frame = lowering.frames[layout] = Frame(lir, kinds)
    steps = [step.pattern.step for kind in kinds for step in kind.steps]
    words = frame.words(lir, kinds)
    code = _Code(steps, target, frame.first)
    listing = Listing(
        kernels=code.keys,
        calls=code.calls[frame.rows],
        starts=frame.step_starts,
        flags=code.flags[frame.rows] | _barriers(frame.barriers(lir, steps)),
        phases=frame.phases,
        anchors=frame.anchors,
        offsets=words.offsets,
        live=words.live,
        late=words.late,
        patches=words.patches,
        constants=frame.constants,
        symbols=sorted(lir.live),
        limits=limits_of(mould.nodes(sized)) if lir.live else [],
        arena_size=lir.arena_size,
        workers=threads,
        reports=frame.reports(lir),
        marks=Marks(steps, frame.steps, frame.nodes),
    )
    return Listed(listing, code.kernels)


class _Code:
    """Kernels of steps, numbered in the order in which they are first called."""

    def __init__(
        self, steps: Sequence[Step], target: Target, order: Iterable[int] | None = None
    ) -> None:
        specs = [steps[i].spec for i in order] if order is not None else [s.spec for s in steps]
        made = compile_specs((spec for spec in specs if spec is not None), target)
        self.kernels = {kernel.key: kernel for kernel in made.values()}
        self.keys = list(self.kernels)
        places = {key: i for i, key in enumerate(self.keys)}
        numbers = {spec: places[kernel.key] for spec, kernel in made.items()}
        calls = [-1 if s.spec is None else numbers[s.spec] for s in steps]
        flags = [step_flags(False, s.solo, s.jump, s.spec is None) for s in steps]
        self.calls, self.flags = np.array(calls, np.int32), np.array(flags, np.int32)


def _barriers(after: Sequence[bool]) -> npt.NDArray[np.int32]:
    return np.array(after, np.int32) * np.int32(driver_layout.BARRIER)


class Marks(Sequence[Mark]):
    """Marks of steps, made when somebody looks: a variant that only runs needs none."""

    def __init__(self, rows: Sequence[Step], of: Sequence[int], nodes: Sequence[int]) -> None:
        self.rows, self.of, self.nodes = rows, of, nodes

    def __len__(self) -> int:
        return len(self.of)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        step = self.rows[self.of[index]]
        return Mark(step.label, self.nodes[index], step.flops, step.bytes)


def _host_call(step: Step) -> HostCall:
    node = step.host
    assert node is not None
    return HostCall(
        node.op, tuple(v.shape for v in node.inputs), tuple(v.shape for v in node.outputs)
    )
