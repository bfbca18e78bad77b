"""An executable: a linked program with its arena, attached parameters and states, and its runs.

A decode loop makes many runs in one native call, where the program allows it: it must depend on the
counter alone, and linearly, and have no host calls (see `executor.emit`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from ctypes import addressof, c_char
from functools import cached_property
from typing import Any

import numpy as np

from rlx.backends.base import (
    Buffers,
    Executable,
    KernelExecutable,
    OtherArrays,
    PlanInfo,
    Sizes,
    Span,
    raise_bad_index,
)
from rlx.backends.buffer import HOST, Buffer, HostBuffer
from rlx.backends.cpu.executor import control_block
from rlx.backends.cpu.executor.control_block import BARRIER, LONG
from rlx.backends.cpu.interruptible import AsideRun, handles_signals, long_check
from rlx.backends.cpu.profile import CpuRecording
from rlx.backends.cpu.program import LinkedProgram, address_of, call_host
from rlx.backends.cpu.thread_pool import ThreadPool
from rlx.backends.decode_loop import DecodeLoop, LoopSpec
from rlx.ir.dim import evaluate, is_affine
from rlx.ir.lir import Lir, View, contiguous_strides
from rlx.ir.node import Node, Value
from rlx.ir.op import Array
from rlx.llvm.jit import Kernel
from rlx.support.records import dataclass

_LITTLE = 1 << 16  # operations and bytes of a program; with more, a barrier is worth its time


@dataclass
class RunMemory:
    """The memory of one run as NumPy sees it: arena, attached buffers, inputs and outputs."""

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
        found = self._outside_arena(root)
        if found is not None:
            return found.reshape(-1)
        slot = self.lir.slots[root]
        assert slot.offset is not None
        raw = self.arena[slot.offset : slot.offset + slot.size]
        return raw.view(root.shape.dtype.numpy)

    def _outside_arena(self, root: Value) -> Array | None:
        """The array of a value that is not in the arena, else None."""
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


class CpuExecutable(KernelExecutable):
    def __init__(self, linked: LinkedProgram, info: PlanInfo, pool: ThreadPool) -> None:
        self.linked, self.relocatable, self.pool = linked, linked.relocatable, pool
        super().__init__(info, self.relocatable.bounds_checks, self.relocatable.symbols)
        self._info, manifest = info, info.manifest
        self.arena = HOST.put(linked.arena)
        self._fill = linked.filler(self.symbols)
        self._dynamic_args = memoryview(linked.program.dynamic_args.data)
        self._status = memoryview(linked.status)
        self._externals = {external: i for i, external in enumerate(linked.externals())}
        self._external_addresses = [0] * len(self._externals)  # in this run
        self._addresses: dict[tuple[str, str], int] = {}
        self._attached: dict[str, Buffer] = {}
        self.attachments = 0  # how often buffers were attached
        self._sizes: Mapping[str, int] = {}
        self.recorder: CpuRecording | None = None
        self._overrides: dict[str, Kernel] = {}  # alive while the program points into them
        self._inputs = [e.name for e in manifest.inputs]
        self._outputs = [e.name for e in manifest.outputs]
        # of those that share the arena, the one whose run was interrupted and goes on
        self._abandoned: list[tuple[CpuExecutable, AsideRun]] = []
        self._long = self._long_check()
        if self._does_little():
            linked.program.use_workers(1)
        self._find_slots()

    @cached_property
    def lir(self) -> Lir:
        return self._info.lir()

    def _long_check(self) -> Callable[..., bool] | None:
        """Whether a run has a launch that takes long; None if no size makes it so."""
        launches = np.flatnonzero(self.relocatable.flags & LONG).tolist()
        if not launches:
            return None
        metadata = [self.relocatable.metadata[i] for i in launches]
        return long_check([(m.flops, m.bytes) for m in metadata], self.symbols)

    def _does_little(self) -> bool:
        if self.linked.program.count > 16:
            return False
        total = 0
        for launch in self.relocatable.metadata:
            work = launch.flops + launch.bytes
            if not isinstance(work, int) or not work:  # not known, or not of this launch alone
                return False
            total += work
        return total < _LITTLE

    def _find_slots(self) -> None:
        """Inputs and outputs that the caller passes no buffer for are in the arena."""
        start = address_of(self.arena.array)
        for entry in [*self.manifest.inputs, *self.manifest.outputs]:
            self._addresses[entry.role, entry.name] = start + (entry.arena_offset or 0)
        self._input_args = self._external_args("input", self._inputs)
        self._output_args = self._external_args("output", self._outputs)
        self._slots = [p for p in (*self._input_args, *self._output_args) if p[0] >= 0]

    def _external_args(self, role: str, names: Sequence[str]) -> list[tuple[int, int]]:
        """For each name: its index in `_external_addresses` (−1: none), and its slot's address."""
        keys = [(role, name) for name in names]
        return [(self._externals.get(key, -1), self._addresses[key]) for key in keys]

    def share_arena(self, other: Executable) -> None:
        assert isinstance(other, CpuExecutable) and other.arena.nbytes >= self.arena.nbytes
        self.linked.use_arena(other.linked.arena)
        self.arena, self._abandoned = other.arena, other._abandoned
        self._find_slots()

    def attach(self, params: Mapping[str, Buffer], states: Mapping[str, Buffer]) -> None:
        if self._abandoned:
            self._settle()
        needed: dict[str, Buffer] = {}
        for entry, buffer in self.attachments_of(params, states):
            needed[entry.name] = buffer
            self._addresses[entry.role, entry.name] = address_of(buffer.array)
        args = self.linked.program.args
        for arg, external, addend in self.relocatable.relocations:
            args[arg] = self._addresses[external] + addend
        for external, index in self._externals.items():
            self._external_addresses[index] = self._addresses[external]
        self._attached = needed
        self.attachments += 1

    def run(
        self, inputs: Buffers, outputs: Buffers, sizes: Sizes, span: Span | None = None
    ) -> None:
        self._begin(inputs, outputs, sizes)
        if self.recorder is not None:
            self.recorder.sizes.append(dict(sizes))  # callers may use one mapping again
        first, last = self._launches(span)
        if self._long is None or not self._is_long(sizes):
            self.pool.run(self.linked.program, first, last, self._on_host)
        else:
            self._run_aside(first, last, (inputs, outputs))
        if self._status[0]:
            self._raise_status()

    def caller(
        self, order: Sequence[int], makers: Sequence[Callable[[], Any]], sizes: Sizes,
        other: OtherArrays | None = None,
    ) -> Callable[[Sequence[Any]], tuple[Any, ...]] | None:  # fmt: skip
        if self._long is not None or self.relocatable.hosts or self._has_sized_params():
            return None
        self.check_sizes(*[sizes[s] for s in self.symbols])
        numbers = [n for n, _ in self._input_args], [n for n, _ in self._output_args]
        start = self.linked.starter(*numbers, order, makers, sizes)
        dynamic, status, run_all = self._dynamic_args, self._status, self.pool.run_all
        program, from_buffer = self.linked.program, c_char.from_buffer

        def call_other(arrays: Sequence[Any]) -> tuple[Any, ...]:
            assert other is not None
            if self.recorder is not None or self._abandoned:
                made = call([other.to_numpy(a) for a in arrays])
                return tuple([other.from_numpy(a) for a in made])
            results = start(arrays, dynamic, _same, other.address)
            run_all(program)
            if status[0]:
                self._raise_status()
            return results

        def call(arrays: Sequence[Array]) -> tuple[Array, ...]:
            if self.recorder is not None or self._abandoned:
                given = [HostBuffer(contiguous(arrays[i])) for i in order]
                results = tuple([make() for make in makers])
                self.run(given, [HostBuffer(a) for a in results], sizes)
                return results
            kept = arrays
            try:
                results = start(arrays, dynamic, from_buffer, addressof)
            except (TypeError, ValueError, BufferError):  # read-only, empty or strided
                kept = [contiguous(a) for a in arrays]  # alive until the run is over
                results = start(kept, dynamic, _same, address_of)
            run_all(program)
            if status[0]:
                self._raise_status()
            return results

        return call if other is None else call_other

    def _has_sized_params(self) -> bool:
        """Whether an arg depends on a size and on where a param or state is."""
        slots = {index for index, _ in (*self._input_args, *self._output_args)}
        return any(index not in slots for index in self._externals.values())

    def _is_long(self, sizes: Mapping[str, int]) -> bool:
        assert self._long is not None
        # time stamps and host calls belong to the thread that asked for the run
        if self.recorder is not None or self.relocatable.hosts or not handles_signals():
            return False
        return self._long(*[sizes[s] for s in self.symbols])

    def _run_aside(self, first: int, last: int | None, used: Any) -> None:
        """Run so that Ctrl-C interrupts a long kernel; `used` stays alive until it ends."""

        program = self.linked.program

        def call(_: Any = used) -> None:
            self.pool.run(program, first, last)

        run = AsideRun(call)
        self._abandoned.append((self, run))  # until it is over
        try:
            run.run()
            self._abandoned.clear()
        except BaseException:
            if not run.done:
                self.pool.abandon(program, True)
            raise

    def _settle(self) -> None:
        """Wait for a run that was interrupted: it still reads args and writes to the arena."""
        executable, run = self._abandoned[0]
        run.wait()
        self._abandoned.clear()
        executable._status[0] = 0
        self.pool.abandon(executable.linked.program, False)

    def _launches(self, span: Span | None) -> tuple[int, int | None]:
        if span is None:
            return 0, None
        first, last = span
        return self.relocatable.end_of(first.order - 1), self.relocatable.end_of(last.order)

    def _begin(self, inputs: Buffers, outputs: Buffers, sizes: Sizes) -> None:
        """Check the sizes and compute the dynamic args of this run."""
        if self._abandoned:
            self._settle()
        addresses = self._external_addresses
        for args, buffers in ((self._input_args, inputs), (self._output_args, outputs)):
            for (index, slot), buffer in zip(args, buffers, strict=True):
                if index >= 0:
                    addresses[index] = slot if buffer is None else _fast_address(buffer.array)
        dims = [sizes[s] for s in self.symbols]
        if self._check(*dims) >= 0:
            self.check_sizes(*dims)  # raises
        self._sizes = sizes
        self._fill(self._dynamic_args, addresses, *dims)

    def decode_loop(self, spec: LoopSpec) -> CpuDecodeLoop:
        return CpuDecodeLoop(self, spec)

    def fill_dynamic_args(self, row: memoryview, *dims: int) -> None:
        """Compute the dynamic args of a run whose inputs and outputs are in the arena."""
        for index, slot in self._slots:
            self._external_addresses[index] = slot
        self._fill(row, self._external_addresses, *dims)

    def run_loop(self, header: int) -> None:
        if self._abandoned:
            self._settle()
        self.pool.run_loop(self.linked.program, header)
        if self._status[0]:
            self._raise_status()

    def _launch_nodes(self) -> list[int]:
        return [metadata.node for metadata in self.relocatable.metadata]

    def _run_launches(self, first: int, last: int, sizes: Sizes) -> None:
        self.pool.run(self.linked.program, first, last, self._on_host)

    def _results(
        self, inputs: Buffers, outputs: Buffers, sizes: Sizes
    ) -> Callable[[Node], list[Array]]:
        given = dict(zip(self._inputs, inputs, strict=True))
        memory = RunMemory(self.lir, self.arena.array, self._attached, given, outputs, sizes)
        return lambda node: [memory.array(v) for v in node.outputs]

    def check_status_later(self) -> None:
        if self._status[0]:
            self._raise_status()

    def _on_host(self, index: int) -> None:
        call_host(self.relocatable.hosts[index], self.linked.program.args_of(index), self._sizes)

    def replace_kernels(self, kernels: Mapping[str, Kernel]) -> set[str]:
        """Run other code for the kernels of these keys. Returns the keys that the program has."""
        found = set(kernels) & set(self.relocatable.kernels)
        for number, key in enumerate(self.relocatable.kernels):
            if key in found:
                launches = self.relocatable.calls == number
                self.linked.program.launches["fn"][launches] = kernels[key].address()
        self._overrides.update({key: kernels[key] for key in found})
        return found

    def set_barriers(self, after: Sequence[bool]) -> None:
        """Put barriers after these launches, and after no others."""
        flags = self.linked.program.launches["flags"]
        flags[:] = flags & ~BARRIER | np.where(after, BARRIER, 0)

    def recording(self) -> AbstractContextManager[CpuRecording]:
        return CpuRecording(self).record()

    def _raise_status(self) -> None:
        site = self.relocatable.error_sites[self._status[0]]
        self._status[0] = 0
        raise_bad_index(site.op, site.operands, site.origin)


def _same(array: Array) -> Array:
    return array


def contiguous(array: Array) -> Array:
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def _fast_address(array: Any) -> int:
    """`address_of` in a quarter of the time, for arrays that are writeable and not empty."""
    try:
        return addressof(c_char.from_buffer(array))
    except (TypeError, ValueError):
        return address_of(array)


MAX_RUNS = 256  # of one call
_COPY_UNIT = 4  # bytes


class CpuDecodeLoop(DecodeLoop):
    def __init__(self, executable: CpuExecutable, spec: LoopSpec) -> None:
        super().__init__(executable, spec)
        self._cpu, relocatable = executable, executable.relocatable
        sizes = [arg.addend for arg in relocatable.dynamic_args]
        sizes += [end for check in relocatable.bounds_checks for end in (check.value, check.most)]
        self._native = (
            relocatable.symbols == [spec.counter]
            and all(is_affine(size) for size in sizes)
            and not relocatable.hosts
            and all(target.nbytes % _COPY_UNIT == 0 for target, _ in self.carried)
        )
        self._copies, self._log = _copies(self.carried), np.zeros(MAX_RUNS, np.int32)
        self._stop: Collection[int] = ()
        self._stop_array = np.zeros(1, np.int32)
        self._base = np.zeros(executable.linked.program.dynamic_args.size, np.int64)
        self._slope = np.zeros_like(self._base)
        self._attached = -1
        self._header = np.zeros(control_block.LOOP_BYTES // 8, np.int64)
        for offset, array in (
            (control_block.LOOP_BASE, self._base),
            (control_block.LOOP_SLOPE, self._slope),
            (control_block.LOOP_STATUS, executable.linked.status),
            (control_block.LOOP_EMITTED, self.emitted.array),
            (control_block.LOOP_LOG, self._log),
            (control_block.LOOP_COPIES, self._copies),
            (control_block.LOOP_STOP, self._stop_array),
        ):
            self._header[offset // 8] = address_of(array)
        self._header[control_block.LOOP_DYNAMIC_COUNT // 8] = len(relocatable.dynamic_args)
        self._header[control_block.LOOP_COPY_COUNT // 8] = len(self._copies)
        self._address = address_of(self._header)
        self._fields, self._logged = memoryview(self._header.data), memoryview(self._log.data)

    def run(self, sizes: Mapping[str, int], count: int, stop: Collection[int]) -> list[int]:
        if not self._native:
            return super().run(sizes, count, stop)
        size, recorder = sizes[self.spec.counter], self._cpu.recorder
        if recorder is None:
            return self._run_native(size, min(count, MAX_RUNS), stop)
        found: list[int] = []  # recorded runs are calls of their own: time stamps are per run
        while len(found) < count and not (found and found[-1] in stop):
            recorder.sizes.append({self.spec.counter: size + len(found)})
            found += self._run_native(size + len(found), 1, stop)
        return found

    def _run_native(self, size: int, count: int, stop: Collection[int]) -> list[int]:
        self._cpu.check_sizes(size)
        self._cpu.check_sizes(size + count - 1)  # checks are linear: both ends imply the rest
        if self._attached != self._cpu.attachments:
            self._fit_dynamic_args()
        if stop is not self._stop:
            self._set_stop(stop)
        fields = self._fields
        fields[_SIZE], fields[_COUNT], fields[_DONE], fields[_RESUME_AT] = size, count, 0, 0
        self._cpu.run_loop(self._address)
        return self._logged[: fields[_DONE]].tolist()

    def _fit_dynamic_args(self) -> None:
        """Express dynamic args as base + slope · size; valid until buffers are attached again."""
        self._cpu.fill_dynamic_args(self._base.data, 0)
        self._cpu.fill_dynamic_args(self._slope.data, 1)
        self._slope -= self._base
        self._attached = self._cpu.attachments

    def _set_stop(self, stop: Collection[int]) -> None:
        self._stop, self._stop_array = stop, np.array([*stop, 0], np.int32)
        self._fields[control_block.LOOP_STOP // 8] = address_of(self._stop_array)
        self._fields[control_block.LOOP_STOP_COUNT // 8] = len(stop)


_COUNT, _DONE, _RESUME_AT, _SIZE = (
    offset // 8
    for offset in (
        control_block.LOOP_COUNT,
        control_block.LOOP_DONE,
        control_block.LOOP_RESUME_AT,
        control_block.LOOP_SIZE,
    )
)


def _copies(buffers: list[tuple[Buffer, Buffer]]) -> Array:
    """Pairs of addresses, target and source, for every four bytes."""
    pairs = []
    for target, source in buffers:
        to, of = address_of(target.array), address_of(source.array)
        pairs += [(to + at, of + at) for at in range(0, target.nbytes, _COPY_UNIT)]
    return np.array(pairs, np.int64).reshape(-1, 2)
