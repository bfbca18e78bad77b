"""Chains that the native driver runs by itself: see `driver_chain`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np

from rlx.backends.chain import Chain, Links
from rlx.backends.cpu.link import address_of
from rlx.codegen import driver_layout as driver
from rlx.ir.dim import is_affine
from rlx.ir.op import Array

if TYPE_CHECKING:
    from rlx.backends.cpu.executable import CpuExecutable

MOST = 256  # runs of one call
_MOVED = 4  # bytes of one move


class CpuChain(Chain):
    def __init__(self, executable: CpuExecutable, links: Links) -> None:
        super().__init__(executable, links)
        self._cpu, relocatable = executable, executable.relocatable
        sizes = [arg.addend for arg in relocatable.dynamic_args]
        sizes += [end for check in relocatable.bounds_checks for end in (check.value, check.most)]
        self._native = (
            relocatable.symbols == [links.grows]
            and all(is_affine(size) for size in sizes)
            and not relocatable.hosts
            and all(place.nbytes % _MOVED == 0 for place, _ in self.moves)
        )
        self._moves, self._log = _moves(self.moves), np.zeros(MOST, np.int32)
        self._ends: Collection[int] = ()
        self._end_array = np.zeros(1, np.int32)
        self._base = np.zeros(executable.made.program.live.size, np.int64)
        self._slope = np.zeros_like(self._base)
        self._attached = -1
        self._header = np.zeros(driver.CHAIN_BYTES // 8, np.int64)
        for offset, array in (
            (driver.CHAIN_BASE, self._base),
            (driver.CHAIN_SLOPE, self._slope),
            (driver.CHAIN_STATUS, executable.made.status),
            (driver.CHAIN_KEPT, self.kept),
            (driver.CHAIN_LOG, self._log),
            (driver.CHAIN_MOVES, self._moves),
            (driver.CHAIN_ENDS, self._end_array),
        ):
            self._header[offset // 8] = address_of(array)
        self._header[driver.CHAIN_LIVE_COUNT // 8] = len(relocatable.dynamic_args)
        self._header[driver.CHAIN_MOVE_COUNT // 8] = len(self._moves)
        self._address = address_of(self._header)
        self._fields, self._logged = memoryview(self._header.data), memoryview(self._log.data)

    def run(self, sizes: Mapping[str, int], count: int, ends: Collection[int]) -> list[int]:
        if not self._native:
            return super().run(sizes, count, ends)
        size, watcher = sizes[self.links.grows], self._cpu.watched_by
        if watcher is None:
            return self._go_on(size, min(count, MOST), ends)
        found: list[int] = []  # time stamps are those of one run
        while len(found) < count and not (found and found[-1] in ends):
            watcher.sizes.append({self.links.grows: size + len(found)})
            found += self._go_on(size + len(found), 1, ends)
        return found

    def _go_on(self, size: int, count: int, ends: Collection[int]) -> list[int]:
        self._cpu.check_sizes(size)
        self._cpu.check_sizes(size + count - 1)  # what holds at both ends holds between them
        if self._attached != self._cpu.attachments:
            self._learn_live()
        if ends is not self._ends:
            self._end_at(ends)
        fields = self._fields
        fields[_SIZE], fields[_COUNT], fields[_DONE], fields[_AT] = size, count, 0, 0
        self._cpu.run_chain(self._address)
        return self._logged[: fields[_DONE]].tolist()

    def _learn_live(self) -> None:
        """How live words follow from the size, until other parameters are attached."""
        self._cpu.fill_live(self._base.data, 0)
        self._cpu.fill_live(self._slope.data, 1)
        self._slope -= self._base
        self._attached = self._cpu.attachments

    def _end_at(self, ends: Collection[int]) -> None:
        self._ends, self._end_array = ends, np.array([*ends, 0], np.int32)
        self._fields[driver.CHAIN_ENDS // 8] = address_of(self._end_array)
        self._fields[driver.CHAIN_END_COUNT // 8] = len(ends)


_COUNT, _DONE, _AT, _SIZE = (
    offset // 8
    for offset in (driver.CHAIN_COUNT, driver.CHAIN_DONE, driver.CHAIN_AT, driver.CHAIN_SIZE)
)


def _moves(arrays: list[tuple[Array, Array]]) -> Array:
    """Pairs of addresses, to and from."""
    pairs = []
    for place, source in arrays:
        to, of = address_of(place), address_of(source)
        pairs += [(to + at, of + at) for at in range(0, place.nbytes, _MOVED)]
    return np.array(pairs, np.int64).reshape(-1, 2)
