"""A program with its memory: attached parameters and states, and runs.

Values as arrays: what Python sees of a run's memory, for steps that Python does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from ctypes import addressof, c_char
from functools import cached_property
from typing import Any

import numpy as np

from rlx.backends.base import Executable, PlanInfo, Span, check_numbers
from rlx.backends.bounds_checks import checker, raise_failed
from rlx.backends.buffer import HOST, Buffer
from rlx.backends.cpu.decode_loop import CpuDecodeLoop
from rlx.backends.cpu.executor.control_block import BARRIER
from rlx.backends.cpu.link import LinkedProgram, address_of, call_host
from rlx.backends.cpu.pool import Pool
from rlx.backends.cpu.profile import CpuRecording
from rlx.backends.decode_loop import LoopSpec
from rlx.errors import InputError
from rlx.ir.dim import evaluate
from rlx.ir.lir import Lir, View, contiguous_strides
from rlx.ir.node import Value
from rlx.ir.op import Array
from rlx.llvm.jit import Kernel
from rlx.support.records import dataclass


@dataclass
class RunMemory:
    """The memory of one run: the arena, what is attached, and what the caller brought."""

    lir: Lir
    arena: Array
    attached: Mapping[str, Buffer]  # params and states
    inputs: Mapping[str, Buffer | None]
    outputs: Sequence[Buffer | None]
    sizes: Mapping[str, int]

    def array(self, value: Value) -> Array:
        """The elements of `value`, in place."""
        root, _ = self.lir.home(value)
        shape = value.shape.bind(self.sizes)
        view = self.lir.slots[value].view or View(0, contiguous_strides(shape))
        flat = self._flat(root)
        start = evaluate(view.offset, self.sizes)
        strides = [evaluate(s, self.sizes) * shape.dtype.bytes for s in view.strides]
        if 0 in shape.static_dims:
            return np.empty(shape.static_dims, shape.dtype.numpy)
        return np.lib.stride_tricks.as_strided(flat[start:], shape.static_dims, strides)

    def _flat(self, root: Value) -> Array:
        found = self._given(root)
        if found is not None:
            return found.reshape(-1)
        slot = self.lir.slots[root]
        assert slot.offset is not None
        raw = self.arena[slot.offset : slot.offset + slot.size]
        return raw.view(root.shape.dtype.numpy)

    def _given(self, root: Value) -> Array | None:
        """The array of a value that is not in the arena."""
        kind, name = self.lir.slots[root].kind, root.node.name
        if kind == "constant":
            constant: Any = root.node.op
            return constant.data.array
        found: Buffer | None = None
        if kind in ("param", "state"):
            found = self.attached[name]
        elif kind == "input":
            found = self.inputs[name]
        elif kind == "output":
            pairs = zip(self.outputs, self.lir.outputs, strict=True)
            found = next(out for out, v in pairs if v is root)
        return None if found is None else found.array


class CpuExecutable(Executable):
    def __init__(self, made: LinkedProgram, info: PlanInfo, pool: Pool) -> None:
        self.made, self.relocatable, self.pool = made, made.relocatable, pool
        self.manifest, self.output_phases = info.manifest, info.output_phases
        self._info, manifest = info, info.manifest
        self.arena = HOST.put(made.arena)
        self._symbols = self.relocatable.symbols
        self._fill = made.filler(self._symbols)
        self._check = checker(self.relocatable.bounds_checks, self._symbols)
        self._live = memoryview(made.program.live.data)
        self._status = memoryview(made.status)
        self._externals = {external: i for i, external in enumerate(made.externals())}
        self._given = [0] * len(self._externals)  # their addresses in this run
        self._addresses: dict[tuple[str, str], int] = {}
        self._attached: dict[str, Buffer] = {}
        self.attachments = 0  # how often there were others
        self._sizes: Mapping[str, int] = {}
        self.watched_by: CpuRecording | None = None
        self._replaced: dict[str, Kernel] = {}  # held while the program points into them
        self._inputs = [e.name for e in manifest.inputs]
        self._outputs = [e.name for e in manifest.outputs]
        self._outside = [*manifest.params, *manifest.states]
        self._place_slots()

    @cached_property
    def lir(self) -> Lir:
        return self._info.lir()

    def _place_slots(self) -> None:
        """Inputs and outputs that a run does not bring lie in the arena."""
        start = address_of(self.arena.array)
        for entry in [*self.manifest.inputs, *self.manifest.outputs]:
            self._addresses[entry.role, entry.name] = start + (entry.arena_offset or 0)
        self._input_places = self._places("input", self._inputs)
        self._output_places = self._places("output", self._outputs)
        self._slots = [p for p in (*self._input_places, *self._output_places) if p[0] >= 0]

    def _places(self, role: str, names: Sequence[str]) -> list[tuple[int, int]]:
        """For each name: where its address goes in `_given` (-1: nowhere), and its slot."""
        keys = [(role, name) for name in names]
        return [(self._externals.get(key, -1), self._addresses[key]) for key in keys]

    def attach(self, params: Mapping[str, Buffer], states: Mapping[str, Buffer]) -> None:
        needed: dict[str, Buffer] = {}
        for entry in self._outside:
            buffer = (params if entry.role == "param" else states)[entry.name]
            needed[entry.name] = buffer
            self._addresses[entry.role, entry.name] = address_of(buffer.array)
        args = self.made.program.args
        for arg, external, addend in self.relocatable.relocations:
            args[arg] = self._addresses[external] + addend
        for external, place in self._externals.items():
            self._given[place] = self._addresses[external]
        self._attached = needed
        self.attachments += 1

    def run(
        self,
        inputs: Sequence[Buffer | None],
        outputs: Sequence[Buffer | None],
        sizes: Mapping[str, int],
        span: Span | None = None,
    ) -> None:
        self._begin(inputs, outputs, sizes)
        if self.watched_by is not None:
            self.watched_by.sizes.append(dict(sizes))  # callers may use one mapping again
        first, last = self._steps(span)
        self.pool.run(self.made.program, first, last, self._on_host)
        if self._status[0]:
            self._raise_status()

    def _steps(self, span: Span | None) -> tuple[int, int | None]:
        if span is None:
            return 0, None
        first, last = span
        return self.relocatable.end_of(first.order - 1), self.relocatable.end_of(last.order)

    def _begin(
        self,
        inputs: Sequence[Buffer | None],
        outputs: Sequence[Buffer | None],
        sizes: Mapping[str, int],
    ) -> None:
        """Check the sizes and fill in the args that belong to this run."""
        given = self._given
        for places, buffers in ((self._input_places, inputs), (self._output_places, outputs)):
            for (place, slot), buffer in zip(places, buffers, strict=True):
                if place >= 0:
                    given[place] = slot if buffer is None else _fast_address(buffer.array)
        live = [sizes[s] for s in self._symbols]
        self.check_sizes(*live)
        self._sizes = sizes
        self._fill(self._live, given, *live)

    def check_sizes(self, *live: int) -> None:
        """Raise where native code would leave its memory with these sizes."""
        failed = self._check(*live)
        if failed >= 0:
            sizes = dict(zip(self._symbols, live, strict=True))
            raise_failed(self.relocatable.bounds_checks[failed], sizes)

    def decode_loop(self, spec: LoopSpec) -> CpuDecodeLoop:
        return CpuDecodeLoop(self, spec)

    def fill_live(self, row: memoryview, *live: int) -> None:
        """The live args of a run with these sizes on what lies in the arena."""
        for place, slot in self._slots:
            self._given[place] = slot
        self._fill(row, self._given, *live)

    def run_loop(self, header: int) -> None:
        self.pool.run_loop(self.made.program, header)
        if self._status[0]:
            self._raise_status()

    def _memory(
        self,
        inputs: Sequence[Buffer | None],
        outputs: Sequence[Buffer | None],
        sizes: Mapping[str, int],
    ) -> RunMemory:
        given = dict(zip(self._inputs, inputs, strict=True))
        return RunMemory(self.lir, self.arena.array, self._attached, given, outputs, sizes)

    def run_checked(
        self,
        inputs: Sequence[Buffer | None],
        outputs: Sequence[Buffer | None],
        sizes: Mapping[str, int],
    ) -> None:
        self._begin(inputs, outputs, sizes)
        memory = self._memory(inputs, outputs, sizes)
        marks, nodes, done = self.relocatable.marks, self.lir.graph.nodes, 0
        while done < len(marks):
            number, first = marks[done].node, done
            while done < len(marks) and marks[done].node == number:
                done += 1
            self.pool.run(self.made.program, first, done, self._on_host)
            if number >= 0:
                node = nodes[number]
                check_numbers(node, [memory.array(v) for v in node.outputs])
        if self._status[0]:
            self._raise_status()

    def _on_host(self, index: int) -> None:
        call_host(self.relocatable.hosts[index], self.made.program.args_of(index), self._sizes)

    def replace_kernels(self, kernels: Mapping[str, Kernel]) -> set[str]:
        """Run other code for the kernels of these keys from now on; the keys that are there."""
        found = set(kernels) & set(self.relocatable.kernels)
        for number, key in enumerate(self.relocatable.kernels):
            if key in found:
                launches = self.relocatable.calls == number
                self.made.program.steps["fn"][launches] = kernels[key].address()
        self._replaced.update({key: kernels[key] for key in found})
        return found

    def set_barriers(self, after: Sequence[bool]) -> None:
        """Wait for all workers after these steps, and after no others."""
        flags = self.made.program.steps["flags"]
        flags[:] = flags & ~BARRIER | np.where(after, BARRIER, 0)

    def recording(self) -> AbstractContextManager[CpuRecording]:
        return CpuRecording(self).watch()

    def _raise_status(self) -> None:
        report = self.relocatable.reports[self._status[0]]
        self._status[0] = 0
        raise InputError(
            "an index is out of range",
            where=report.op,
            got=f"operands {report.operands}",
            origin=report.origin,
            hint="check the ids or indices given to this run",
        )


def _fast_address(array: Any) -> int:
    """`address_of` in a quarter of the time, where the array can be written and is not empty."""
    try:
        return addressof(c_char.from_buffer(array))
    except (TypeError, ValueError):
        return address_of(array)
