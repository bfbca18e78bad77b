"""LIR becomes a program: nodes to steps, distinct kernels to machine code, steps to a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rlx.backends.cpu.lowering import TABLE, Context, Step
from rlx.backends.cpu.schedule import place_barriers
from rlx.backends.cpu.words import WordTable
from rlx.codegen import program as native
from rlx.codegen.kernel import compile_specs
from rlx.codegen.program import Program
from rlx.codegen.target import Target
from rlx.errors import UnsupportedError
from rlx.ir.lir import ALIGNMENT, Lir
from rlx.ir.node import Node
from rlx.ir.op import Array

HOST_KINDS = frozenset({"custom", "cond", "while_loop", "scan"})
"""Ops that Python does between native segments, from their reference, where no kernel does."""


@dataclass
class Segment:
    """Steps [first, last) run natively, then, if there is one, `host` in Python."""

    first: int
    last: int
    host: Node | None = None


@dataclass
class Assembled:
    lir: Lir
    program: Program
    words: WordTable
    steps: list[Step]
    segments: list[Segment]
    arena: Array
    status: Array


def assemble(lir: Lir, target: Target, threads: int) -> Assembled:
    """Everything a run needs but parameters, states and inputs."""
    steps, segments = _steps(lir, Context(lir, target, threads))
    kernels = compile_specs((s.spec for s in steps), target)
    barriers = place_barriers(steps, lir)
    arena = aligned_bytes(lir.arena_size)
    status = np.zeros(1, np.int64)
    words = WordTable(lir, arena, status)
    table: list[native.Step] = []
    position = 0
    for step, barrier in zip(steps, barriers, strict=True):
        numbers = [words.resolve(w, position + i) for i, w in enumerate(step.words)]
        position += len(numbers)
        phase = lir.phases.get(step.node) if step.node is not None else None
        address = kernels[step.spec].address()
        order = phase.order if phase is not None else 0
        table.append(native.Step(address, numbers, barrier, step.solo, order))
    program = Program(table, words.patches, len(words.live), threads, keep=kernels)
    return Assembled(lir, program, words, steps, segments, arena, status)


def _steps(lir: Lir, ctx: Context) -> tuple[list[Step], list[Segment]]:
    steps: list[Step] = []
    segments: list[Segment] = []
    first = 0
    for node in lir.graph.nodes:
        if node.op.is_source or (node.op.is_view and lir.slots[node.output].kind == "alias"):
            continue
        entry = TABLE.get(node.op.name)
        if entry is None and node.op.name in HOST_KINDS:
            segments.append(Segment(first, len(steps), node))
            first = len(steps)
            continue
        if entry is None:
            raise UnsupportedError(
                "no native kernel", where=node.op.name, got=repr(node), origin=node.origin,
                hint="legalize should have rewritten it through its common body",
            )  # fmt: skip
        for step in entry.lower(node, ctx):
            step.node = node
            step.label = step.label or step.spec.label
            steps.append(step)
    segments.append(Segment(first, len(steps)))
    return steps, segments


def aligned_bytes(size: int) -> Array:
    """Zeroed memory at a 64-byte boundary."""
    raw = np.zeros(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size]


def address_of(array: Any) -> int:
    return int(array.__array_interface__["data"][0])
