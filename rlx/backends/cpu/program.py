"""A program's tables, as the native executor reads them; built once per variant, without LLVM."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.backends.cpu.executor import control_block
from rlx.errors import CodegenError
from rlx.support.records import dataclass

_LAUNCH = np.dtype(
    {
        "names": ["fn", "args", "flags", "phase"],
        "formats": [np.uint64, np.uint64, np.int32, np.int32],
        "offsets": [
            control_block.LAUNCH_FN,
            control_block.LAUNCH_ARGS,
            control_block.LAUNCH_FLAGS,
            control_block.LAUNCH_PHASE,
        ],
        "itemsize": control_block.LAUNCH_BYTES,
    }
)


@dataclass(frozen=True)
class Launch:
    """A kernel launch with addresses. `args` are 64-bit numbers: pointers and sizes.

    The kernel of a `jump` returns the distance to the next launch. A `host` call has no kernel and
    is left to the caller.
    """

    fn: int
    args: Sequence[int] = ()
    barrier: bool = True
    solo: bool = False
    phase: int = 0
    jump: bool = False
    host: bool = False

    @property
    def flags(self) -> int:
        return launch_flags(self.barrier, self.solo, self.jump, self.host)


def launch_flags(barrier: bool, solo: bool, jump: bool, host: bool, long: bool = False) -> int:
    flags = control_block.BARRIER * barrier | control_block.SOLO * solo
    flags |= control_block.JUMP * jump | control_block.HOST * host
    return flags | control_block.LONG * long


@dataclass(frozen=True)
class LaunchTable:
    """Launches as columns; the args of launch i are those from `starts[i]` to `starts[i + 1]`."""

    fns: npt.NDArray[np.uint64]
    starts: npt.NDArray[np.int64]
    flags: npt.NDArray[np.int32]
    phases: npt.NDArray[np.int32]

    @staticmethod
    def of(launches: Sequence[Launch]) -> LaunchTable:
        lengths = [0, *(len(launch.args) for launch in launches)]
        return LaunchTable(
            np.array([launch.fn for launch in launches], np.uint64),
            np.cumsum(lengths, dtype=np.int64),
            np.array([launch.flags for launch in launches], np.int32),
            np.array([launch.phase for launch in launches], np.int32),
        )


class Program:
    """Launches as tables of addresses, ready to be run by a thread pool.

    `patches` are pairs (arg, dynamic arg): before a run, the executor copies `dynamic_args` into
    the args of launches, which are numbered through the program (see `arg_number`). `keep` holds
    whatever the addresses in the tables point into. One thread at a time may run a program.
    """

    def __init__(
        self,
        launches: Sequence[Launch] | LaunchTable,
        patches: Iterable[tuple[int, int]] | npt.NDArray[np.int32] = (),
        dynamic_args: int = 0,
        workers: int = 0,
        keep: object = None,
    ) -> None:
        self.keep = keep
        table = launches if isinstance(launches, LaunchTable) else LaunchTable.of(launches)
        self._starts, count = table.starts, len(table.flags)
        self.args = np.zeros(max(int(self._starts[-1]), 1), np.int64)
        if not isinstance(launches, LaunchTable):
            flat = [arg for launch in launches for arg in launch.args]
            self.args[: len(flat)] = _signed(flat)
        self.dynamic_args = np.zeros(max(dynamic_args, 1), np.int64)
        pairs = patches if isinstance(patches, np.ndarray) else list(patches)
        self.patches = np.ascontiguousarray(np.array(pairs, np.int32).reshape(-1, 2))
        self._check_patches(dynamic_args)
        self.launches = np.zeros(count, _LAUNCH)
        self.launches["fn"], self.launches["flags"] = table.fns, table.flags
        self.launches["phase"] = table.phases
        self.launches["args"] = self._starts[:-1] * 8 + self.args.ctypes.data
        self._profile: list[npt.NDArray[np.int64]] | None = None
        self.cancelled = False  # whether a run ends at the next barrier
        self._header = np.zeros(control_block.HEADER_BYTES // 8, np.int64)
        self._set(control_block.LAUNCHES, self.launches.ctypes.data)
        self._set(control_block.PATCHES, self.patches.ctypes.data)
        self._set(control_block.PATCH_COUNT, len(self.patches))
        self._set(control_block.ARGS, self.args.ctypes.data)
        self._set(control_block.DYNAMIC_ARGS, self.dynamic_args.ctypes.data)
        self._set(control_block.LAUNCH_COUNT, count)
        self._set(control_block.USE_WORKERS, workers)
        self.address: int = self._header.ctypes.data

    def _set(self, offset: int, value: int) -> None:
        self._header[offset // 8] = value

    def _check_patches(self, dynamic_args: int) -> None:
        limits = np.array([self._starts[-1], dynamic_args])
        if ((self.patches < 0) | (self.patches >= limits)).any():
            raise CodegenError(
                "patch out of range",
                where="program",
                got=self.patches.tolist(),
                expected=f"args below {limits[0]}, dynamic args below {limits[1]}",
            )

    def __len__(self) -> int:
        return len(self.launches)

    def arg_number(self, launch: int, index: int) -> int:
        """Number of a launch's arg, for the patch table."""
        return int(self._starts[launch]) + index

    def args_of(self, launch: int) -> list[int]:
        """The current args of a launch."""
        return [int(w) for w in self.args[self._starts[launch] : self._starts[launch + 1]]]

    def arg_address(self, arg: int) -> int:
        """The address of an arg, for kernels that update the args of other launches."""
        return int(self.args.ctypes.data) + 8 * arg

    def profile(self, workers: int) -> list[npt.NDArray[np.int64]]:
        """Ask for time stamps: every run adds an array [worker, launch, (begin, end, iterations)].

        A launch in a loop has the begin of its first iteration; its end minus its begin is the time
        of all iterations. A launch that was jumped over has 0 iterations.
        """
        self._profile = []
        self._workers = workers
        return self._profile

    def begin_run(self) -> None:
        """Allocate the time stamps of a run."""
        if self._profile is not None:
            self._profile.append(np.zeros((self._workers, len(self), 3), np.int64))
            self._set(control_block.PROFILE, self._profile[-1].ctypes.data)

    def record(self, launch: int, begin: int, end: int) -> None:
        """Record a host call, as the executor records launches."""
        if self._profile is not None:
            stamps = self._profile[-1][0, launch]
            if not stamps[2]:
                stamps[:2] = begin
            stamps[1:] += end - begin, 1

    def is_host(self, launch: int) -> bool:
        return bool(self.launches[launch]["flags"] & control_block.HOST)

    def stop_profile(self) -> None:
        self._set(control_block.PROFILE, 0)
        self._profile = None


def _signed(args: Sequence[int]) -> npt.NDArray[np.int64]:
    """Args as signed 64-bit numbers; addresses and masks above 2^63 wrap."""
    wrapped: list[Any] = [(w + (1 << 63)) % (1 << 64) - (1 << 63) for w in args]
    return np.array(wrapped, np.int64)
