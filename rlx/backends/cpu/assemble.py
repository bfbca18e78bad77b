"""LIR becomes a program: nodes to steps, distinct kernels to machine code, steps to a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rlx.backends.cpu.lowering import Context, Step, steps_of
from rlx.backends.cpu.schedule import place_barriers
from rlx.backends.cpu.words import WordTable
from rlx.codegen import program as native
from rlx.codegen.kernel import compile_specs
from rlx.codegen.program import Program
from rlx.codegen.target import Target
from rlx.ir.lir import ALIGNMENT, Lir
from rlx.ir.op import Array


@dataclass
class Assembled:
    lir: Lir
    program: Program
    words: WordTable
    steps: list[Step]
    arena: Array
    status: Array


def assemble(lir: Lir, target: Target, threads: int) -> Assembled:
    """Everything a run needs but parameters, states and inputs."""
    steps = steps_of(Context(lir, target, threads))
    kernels = compile_specs((s.spec for s in steps if s.spec is not None), target)
    barriers = place_barriers(steps, lir)
    arena = aligned_bytes(lir.arena_size)
    status = np.zeros(1, np.int64)
    words = WordTable(lir, arena, status)
    table: list[native.Step] = []
    starts: dict[int, int] = {}
    position = 0
    for step, barrier in zip(steps, barriers, strict=True):
        starts[id(step)] = position
        numbers = [words.resolve(w, position + i) for i, w in enumerate(step.words)]
        position += len(numbers)
        phase = lir.phases.get(step.node) if step.node is not None else None
        address = 0 if step.spec is None else kernels[step.spec].address()
        order = phase.order if phase is not None else 0
        host = step.spec is None
        table.append(native.Step(address, numbers, barrier, step.solo, order, step.jump, host))
    program = Program(table, words.patches, len(words.live), threads, keep=kernels)
    for word, target_word in words.links(starts):
        program.words[word] = program.word_address(target_word)
    return Assembled(lir, program, words, steps, arena, status)


def aligned_bytes(size: int) -> Array:
    """Zeroed memory at a 64-byte boundary."""
    raw = np.zeros(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size]


def address_of(array: Any) -> int:
    return int(array.__array_interface__["data"][0])
