"""The CPU's decode loop: many runs in one native call, where the program allows it.

It must depend on the counter alone, and linearly, and have no host calls: see `executor.emit`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np

from rlx.backends.buffer import Buffer
from rlx.backends.cpu.executor import control_block
from rlx.backends.cpu.link import address_of
from rlx.backends.decode_loop import DecodeLoop, LoopSpec
from rlx.ir.dim import is_affine
from rlx.ir.op import Array

if TYPE_CHECKING:
    from rlx.backends.cpu.executable import CpuExecutable

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
