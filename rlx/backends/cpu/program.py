"""A program's tables, as the native executor reads them; built once per variant, without LLVM.

`link` gives a relocatable program memory and addresses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.backends.bounds_checks import compiled
from rlx.backends.buffer import HOST
from rlx.backends.cpu.executor import control_block
from rlx.backends.cpu.relocatable import (
    ABSOLUTE,
    ARENA,
    ARGS,
    CONSTANT,
    STATUS,
    External,
    HostCall,
    RelocatableProgram,
)
from rlx.errors import CodegenError
from rlx.ir.binding import bind_op
from rlx.ir.dim import evaluate
from rlx.ir.op import Array
from rlx.ir.shape import Shape
from rlx.llvm.jit import Kernel
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
    flush: bool = False

    @property
    def flags(self) -> int:
        return launch_flags(self.barrier, self.solo, self.jump, self.host, flush=self.flush)


def launch_flags(
    barrier: bool, solo: bool, jump: bool, host: bool, long: bool = False, flush: bool = False
) -> int:
    flags = control_block.BARRIER * barrier | control_block.SOLO * solo
    flags |= control_block.JUMP * jump | control_block.HOST * host
    return flags | control_block.LONG * long | control_block.FLUSH * flush


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
        self._starts, self.count = table.starts, len(table.flags)
        self.args = np.zeros(max(int(self._starts[-1]), 1), np.int64)
        if not isinstance(launches, LaunchTable):
            flat = [arg for launch in launches for arg in launch.args]
            self.args[: len(flat)] = _signed(flat)
        self.dynamic_args = np.zeros(max(dynamic_args, 1), np.int64)
        pairs = patches if isinstance(patches, np.ndarray) else list(patches)
        self.patches = np.ascontiguousarray(np.array(pairs, np.int32).reshape(-1, 2))
        self._check_patches(dynamic_args)
        self.launches = np.zeros(self.count, _LAUNCH)
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
        self._set(control_block.LAUNCH_COUNT, self.count)
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
        return self.count

    def use_workers(self, count: int) -> None:
        """Run on so many of the pool's workers; 0: on all."""
        self._set(control_block.USE_WORKERS, count)

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


@dataclass
class LinkedProgram:
    """A program with code, arena and constants; parameters, states and inputs come later."""

    relocatable: RelocatableProgram
    program: Program
    arena: Array
    status: Array
    addresses: list[int]  # of the relocation bases

    def use_arena(self, arena: Array) -> None:
        """Move to another arena. Externals are attached later."""
        self.arena, self.addresses[ARENA] = arena, address_of(arena)
        addresses = np.array(self.addresses, np.int64)
        args = addresses[self.relocatable.bases] + self.relocatable.addends
        self.program.args[: len(args)] = args

    def externals(self) -> list[External]:
        """The externals of dynamic args, in the order in which `fill` takes their addresses."""
        used = [arg.external for arg in self.relocatable.dynamic_args]
        return list(dict.fromkeys(external for external in used if external is not None))

    def starter(
        self, inputs: Sequence[int], outputs: Sequence[int], order: Sequence[int],
        makers: Sequence[Callable[[], Array]], sizes: Mapping[str, int],
    ) -> Callable[..., tuple[Array, ...]]:  # fmt: skip
        """`start(arrays, dynamic, view, address)` makes the results of a run with these sizes and
        computes every dynamic arg, as `filler` does for all sizes. `inputs` and `outputs` are the
        numbers of their externals, −1 where no dynamic arg needs the address. Input i is
        `arrays[order[i]]`."""
        made = [f"r{i}" for i in range(len(outputs))]
        lines = ["def start(arrays, dynamic, view, address):"]
        lines += [f"    {r} = make{i}()" for i, r in enumerate(made)]
        named = [*zip(inputs, [f"arrays[{i}]" for i in order], strict=True)]
        named += zip(outputs, made, strict=True)
        lines += [f"    p{number} = address(view({name}))" for number, name in named if number >= 0]
        externals = {external: i for i, external in enumerate(self.externals())}
        scope: dict[str, Any] = {f"make{i}": make for i, make in enumerate(makers)}
        for i, (base, external, addend) in enumerate(self.relocatable.dynamic_args):
            known = evaluate(addend, sizes)
            scope[f"c{i}"] = known if base == ABSOLUTE else known + self.addresses[base]
            source = f"c{i}" if external is None else f"p{externals[external]} + c{i}"
            lines.append(f"    dynamic[{i}] = {source}")
        lines.append(f"    return ({''.join(r + ', ' for r in made)})")
        exec(compiled("\n".join(lines)), scope)  # names are numbered, sizes are in the scope
        start: Callable[..., tuple[Array, ...]] = scope["start"]
        return start

    def filler(self, symbols: Sequence[str]) -> Callable[..., None]:
        """`fill(dynamic, externals, *sizes)` computes every dynamic arg. It is generated as Python
        source, so that a run evaluates no expression trees."""
        externals = {external: i for i, external in enumerate(self.externals())}
        lines = [f"def fill(dynamic, externals{''.join(', ' + s for s in symbols)}):"]
        for i, (base, external, addend) in enumerate(self.relocatable.dynamic_args):
            terms = [] if external is None else [f"externals[{externals[external]}]"]
            if base != ABSOLUTE:
                terms.append(f"bases[{base}]")
            if addend != 0 or not terms:
                terms.append(f"({addend})")
            lines.append(f"    dynamic[{i}] = {' + '.join(terms)}")
        lines.append("    return")
        scope: dict[str, Any] = {"bases": self.addresses}
        exec(compiled("\n".join(lines)), scope)  # names are checked identifiers, the rest integers
        fill: Callable[..., None] = scope["fill"]
        return fill


def link(
    relocatable: RelocatableProgram, kernels: Mapping[str, Kernel], arena: Array | None = None
) -> LinkedProgram:
    """Resolve the addresses of a program's kernels, constants and arena, a new one unless given."""
    status = np.zeros(1, np.int64)
    if arena is None:
        arena = HOST.alloc_arena(relocatable.arena_size).array
    code = np.array([*(kernels[k].address() for k in relocatable.kernels), 0], np.uint64)
    fns = code[relocatable.calls]  # a host call is −1: the null at the end
    table = LaunchTable(fns, relocatable.starts, relocatable.flags, relocatable.phases)
    keep, count = (kernels, relocatable.constants), len(relocatable.dynamic_args)
    # a program of solo launches alone wakes no worker
    solo = bool((relocatable.flags & control_block.SOLO).all())
    workers = 1 if solo else relocatable.workers
    program = Program(table, relocatable.patches, count, workers, keep)
    addresses = np.zeros(CONSTANT + len(relocatable.constants), np.int64)
    addresses[ARENA], addresses[STATUS] = address_of(arena), address_of(status)
    addresses[ARGS] = program.arg_address(0)
    addresses[CONSTANT:] = [address_of(c) for c in relocatable.constants]
    args = addresses[relocatable.bases] + relocatable.addends
    program.args[: len(args)] = args
    return LinkedProgram(relocatable, program, arena, status, addresses.tolist())


def address_of(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


# -- host calls ------------------------------------------------------------------------------------


def call_host(call: HostCall, addresses: Sequence[int], sizes: Mapping[str, int]) -> None:
    """Run the reference of the op on operands and results at these addresses."""
    shapes = (*call.inputs, *call.outputs)
    arrays = [_array_at(a, s.bind(sizes)) for a, s in zip(addresses, shapes, strict=True)]
    operands, targets = arrays[: len(call.inputs)], arrays[len(call.inputs) :]
    with np.errstate(all="ignore"):
        results = bind_op(call.op, sizes).reference(*operands)
    if not isinstance(results, tuple):
        results = (results,)
    for target, result in zip(targets, results, strict=True):
        target[...] = result


def _array_at(address: int, shape: Shape) -> Array:
    """A row-major array over memory at an address."""
    size = int(np.prod(shape.static_dims, dtype=np.int64)) * shape.dtype.bytes
    if not size:
        return np.empty(shape.static_dims, shape.dtype.numpy)
    raw = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
    return raw.view(shape.dtype.numpy).reshape(shape.static_dims)
