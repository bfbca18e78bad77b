"""A program without addresses: what an artifact stores, and what `place` gives addresses to.

Every word of a program is an offset from an anchor: nothing (then it is a number), the arena, the
status word, the table of words itself, or a constant. What is known later still has a base, a
parameter, state, input or output by name: words with a fixed offset from a parameter or state are
`late`, filled in when those are attached; words that depend on a live dimension, or on memory that
comes with each run, are sources in `live`, patched into place by the native driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rlx.backends.cpu.checks import Limit
from rlx.ir.dim import Dim
from rlx.ir.node import Node
from rlx.ir.op import Array, Op
from rlx.ir.shape import Shape
from rlx.records import dataclass

NUMBER, ARENA, STATUS, WORDS, CONSTANT = range(5)
"""Anchors; from CONSTANT on, one for each constant."""

Base = tuple[str, str]  # ("input", name), ("output", name), ("param", name), ("state", name)


class Source(NamedTuple):
    """A word of each run: the address of an anchor, that of a base, and an expression of sizes."""

    anchor: int
    base: Base | None
    offset: Dim


class Late(NamedTuple):
    """A word that is known once parameters and states are attached."""

    word: int
    base: Base
    offset: int


class Report(NamedTuple):
    """A node that may find bad data, as its error message names it."""

    op: str
    operands: str
    origin: str

    @staticmethod
    def of(node: Node) -> Report:
        operands = ", ".join(f"{v.name} {v.shape}" for v in node.inputs)
        return Report(node.op.name, operands, str(node.origin))


@dataclass(frozen=True)
class HostCall:
    """A step that Python does: the op's reference on plain operands."""

    op: Op
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]

    @staticmethod
    def of(node: Node) -> HostCall:
        inputs, outputs = (tuple([v.shape for v in vs]) for vs in (node.inputs, node.outputs))
        return HostCall(node.op, inputs, outputs)


class Mark(NamedTuple):
    """What a step is, for profiles and checks. Costs of 0 stand for those of the node."""

    label: str
    node: int  # its id; −1: none
    flops: Dim = 0
    bytes: Dim = 0


@dataclass
class Listing:
    """The steps of a program as columns, its words, and what is needed to run and explain them."""

    kernels: list[str]  # content keys
    calls: npt.NDArray[np.int32]  # a kernel's number for every step; −1: the step is Python's
    starts: npt.NDArray[np.int64]
    flags: npt.NDArray[np.int32]
    phases: npt.NDArray[np.int32]
    anchors: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    live: list[Source]
    late: list[Late]
    patches: npt.NDArray[np.int32]  # pairs: word, source
    constants: list[Array]
    symbols: list[str]  # live ones, sorted
    limits: list[Limit]
    arena_size: int
    workers: int  # most that may run it
    reports: dict[int, Report] = field(default_factory=dict)
    hosts: dict[int, HostCall] = field(default_factory=dict)
    marks: Sequence[Mark] = ()

    def __len__(self) -> int:
        return len(self.calls)

    def end_of(self, phase: int) -> int:
        """How many steps belong to the phase and those before it; later ones come last."""
        return int(np.searchsorted(self.phases, phase, side="right"))
