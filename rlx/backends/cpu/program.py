"""A program's tables, as the native driver reads them. Made once per variant, without LLVM."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.backends.cpu.executor import control_block as driver
from rlx.errors import CodegenError
from rlx.support.records import dataclass

_STEP = np.dtype(
    {
        "names": ["fn", "args", "flags", "phase"],
        "formats": [np.uint64, np.uint64, np.int32, np.int32],
        "offsets": [driver.STEP_FN, driver.STEP_ARGS, driver.STEP_FLAGS, driver.STEP_PHASE],
        "itemsize": driver.STEP_BYTES,
    }
)


@dataclass(frozen=True)
class Launch:
    """One kernel launch. `args` are 64-bit numbers: addresses, and sizes known now.

    The kernel of a `jump` says where to go on; a `host` call has none and is left to the caller.
    """

    fn: int
    args: Sequence[int] = ()
    barrier: bool = True
    alone: bool = False
    phase: int = 0
    jump: bool = False
    host: bool = False

    @property
    def flags(self) -> int:
        return launch_flags(self.barrier, self.alone, self.jump, self.host)


def launch_flags(barrier: bool, alone: bool, jump: bool, host: bool) -> int:
    return driver.BARRIER * barrier | driver.ALONE * alone | driver.JUMP * jump | driver.HOST * host


@dataclass(frozen=True)
class LaunchTable:
    """Launches as columns; the args of launch i are those from `starts[i]` to `starts[i + 1]`."""

    fns: npt.NDArray[np.uint64]
    starts: npt.NDArray[np.int64]
    flags: npt.NDArray[np.int32]
    phases: npt.NDArray[np.int32]

    @staticmethod
    def of(steps: Sequence[Launch]) -> LaunchTable:
        lengths = [0, *(len(step.args) for step in steps)]
        return LaunchTable(
            np.array([step.fn for step in steps], np.uint64),
            np.cumsum(lengths, dtype=np.int64),
            np.array([step.flags for step in steps], np.int32),
            np.array([step.phase for step in steps], np.int32),
        )


class Program:
    """The tables of a sequence of launches, ready to be run by a thread pool.

    `patches` are (arg, source) pairs: before a run, `live[source]` is copied into that arg, args
    being numbered through all launches (see `arg_number`). `keep` holds whatever the addresses in
    the tables point into. A program may be run by one thread at a time.
    """

    def __init__(
        self,
        steps: Sequence[Launch] | LaunchTable,
        patches: Iterable[tuple[int, int]] | npt.NDArray[np.int32] = (),
        live: int = 0,
        workers: int = 0,
        keep: object = None,
    ) -> None:
        self.keep = keep
        table = steps if isinstance(steps, LaunchTable) else LaunchTable.of(steps)
        self._starts, count = table.starts, len(table.flags)
        self.args = np.zeros(max(int(self._starts[-1]), 1), np.int64)
        if not isinstance(steps, LaunchTable):
            flat = [arg for step in steps for arg in step.args]
            self.args[: len(flat)] = _signed(flat)
        self.live = np.zeros(max(live, 1), np.int64)
        pairs = patches if isinstance(patches, np.ndarray) else list(patches)
        self.patches = np.ascontiguousarray(np.array(pairs, np.int32).reshape(-1, 2))
        self._check_patches(live)
        self.steps = np.zeros(count, _STEP)
        self.steps["fn"], self.steps["flags"] = table.fns, table.flags
        self.steps["phase"] = table.phases
        self.steps["args"] = self._starts[:-1] * 8 + self.args.ctypes.data
        self._profile: list[npt.NDArray[np.int64]] | None = None
        self._header = np.zeros(driver.HEADER_BYTES // 8, np.int64)
        self._set(driver.STEPS, self.steps.ctypes.data)
        self._set(driver.PATCHES, self.patches.ctypes.data)
        self._set(driver.PATCH_COUNT, len(self.patches))
        self._set(driver.ARGS, self.args.ctypes.data)
        self._set(driver.LIVE, self.live.ctypes.data)
        self._set(driver.STEP_COUNT, count)
        self._set(driver.USE_WORKERS, workers)
        self.address: int = self._header.ctypes.data

    def _set(self, offset: int, value: int) -> None:
        self._header[offset // 8] = value

    def _check_patches(self, live: int) -> None:
        limits = np.array([self._starts[-1], live])
        if ((self.patches < 0) | (self.patches >= limits)).any():
            raise CodegenError(
                "patch out of range",
                where="program",
                got=self.patches.tolist(),
                expected=f"args below {limits[0]}, sources below {limits[1]}",
            )

    def __len__(self) -> int:
        return len(self.steps)

    def arg_number(self, step: int, index: int) -> int:
        """Number of a launch's arg, for the patch table."""
        return int(self._starts[step]) + index

    def args_of(self, step: int) -> list[int]:
        """The args of a launch as they stand now."""
        return [int(w) for w in self.args[self._starts[step] : self._starts[step + 1]]]

    def arg_address(self, arg: int) -> int:
        """Where an arg lies, for kernels that change the args of others."""
        return int(self.args.ctypes.data) + 8 * arg

    def profile(self, workers: int) -> list[npt.NDArray[np.int64]]:
        """Ask for time stamps: every run adds an array [worker, step, (begin, end, rounds)].

        A step in a loop has the begin of its first round, and an end such that the difference is
        the time of all its rounds; one that was jumped over has none.
        """
        self._profile = []
        self._workers = workers
        return self._profile

    def begin_run(self) -> None:
        """Make room for the time stamps of a run."""
        if self._profile is not None:
            self._profile.append(np.zeros((self._workers, len(self), 3), np.int64))
            self._set(driver.PROFILE, self._profile[-1].ctypes.data)

    def record(self, step: int, begin: int, end: int) -> None:
        """Time stamps of a step that the caller did, as the driver keeps them."""
        if self._profile is not None:
            stamps = self._profile[-1][0, step]
            if not stamps[2]:
                stamps[:2] = begin
            stamps[1:] += end - begin, 1

    def is_host(self, step: int) -> bool:
        return bool(self.steps[step]["flags"] & driver.HOST)

    def stop_profile(self) -> None:
        self._set(driver.PROFILE, 0)
        self._profile = None


def _signed(args: Sequence[int]) -> npt.NDArray[np.int64]:
    """Args as 64 bits each; addresses and masks above 2^63 wrap."""
    wrapped: list[Any] = [(w + (1 << 63)) % (1 << 64) - (1 << 63) for w in args]
    return np.array(wrapped, np.int64)
