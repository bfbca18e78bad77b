"""A relocatable program: what an artifact stores, and what `link` gives addresses to.

Every arg of a program is an addend to a relocation base: zero (then it is a number), the arena, the
status word, the table of args itself, or a constant. Memory that the program does not own is
external: a parameter, state, input or output by name. An arg with a fixed addend to a parameter or
state is a relocation, applied when those are attached. An arg that depends on a dynamic dimension,
or on memory that comes with each run, is a dynamic arg, which the executor patches into its launch.

On disk a program is its columns, the code of its kernels and of the executor, and the target. A
file is trusted as code is, and its digest was checked before. Still, everything that would crash
Python or run on the wrong CPU is checked here.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rlx.backends.base import Parts
from rlx.backends.bounds_checks import BoundsCheck
from rlx.backends.cpu.executor import control_block
from rlx.backends.cpu.thread_pool import make_executor, offer_executor, uses_futex
from rlx.errors import CodegenError, FormatError
from rlx.ir.attrs import Data
from rlx.ir.dim import Dim
from rlx.ir.node import Node
from rlx.ir.op import Array, Op
from rlx.ir.serial.reader import Reader
from rlx.ir.serial.writer import Writer, text, uint
from rlx.ir.shape import Shape
from rlx.llvm.jit import Kernel, adopt
from rlx.llvm.target import Target
from rlx.support.records import dataclass

ABSOLUTE, ARENA, STATUS, ARGS, CONSTANT = range(5)
"""Relocation bases; from CONSTANT on, one for each constant."""

External = tuple[str, str]  # ("input", name), ("output", name), ("param", name), ("state", name)


class DynamicArg(NamedTuple):
    """An arg computed in each run: a relocation base, plus an external, plus an expression of
    dynamic dimensions."""

    base: int
    external: External | None
    addend: Dim


class Relocation(NamedTuple):
    """An arg that is known once parameters and states are attached."""

    arg: int
    external: External
    addend: int


class ErrorSite(NamedTuple):
    """A node whose kernel may meet bad data, as the error message describes it."""

    op: str
    operands: str
    origin: str

    @staticmethod
    def of(node: Node) -> ErrorSite:
        operands = ", ".join(f"{v.name} {v.shape}" for v in node.inputs)
        return ErrorSite(node.op.name, operands, str(node.origin))


@dataclass(frozen=True)
class HostCall:
    """A launch that Python does: the op's reference on row-major operands."""

    op: Op
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]

    @staticmethod
    def of(node: Node) -> HostCall:
        inputs, outputs = (tuple([v.shape for v in vs]) for vs in (node.inputs, node.outputs))
        return HostCall(node.op, inputs, outputs)


class LaunchMetadata(NamedTuple):
    """What a launch is, for profiles and checks. Where flops and bytes are 0, the node's count."""

    label: str
    node: int  # its id; −1: none
    flops: Dim = 0
    bytes: Dim = 0


@dataclass
class RelocatableProgram:
    """Kernel launches as columns, their args, and what is needed to run and explain them."""

    kernels: list[str]  # content keys
    calls: npt.NDArray[np.int32]  # for every launch the index of its kernel; −1: a host call
    starts: npt.NDArray[np.int64]
    flags: npt.NDArray[np.int32]
    phases: npt.NDArray[np.int32]
    bases: npt.NDArray[np.int32]
    addends: npt.NDArray[np.int64]
    dynamic_args: list[DynamicArg]
    relocations: list[Relocation]
    patches: npt.NDArray[np.int32]  # pairs: arg, dynamic arg
    constants: list[Array]
    symbols: list[str]  # of dynamic dimensions, sorted
    bounds_checks: list[BoundsCheck]
    arena_size: int
    workers: int  # at most so many may run it
    error_sites: dict[int, ErrorSite] = field(default_factory=dict)
    hosts: dict[int, HostCall] = field(default_factory=dict)
    metadata: Sequence[LaunchMetadata] = ()

    def __len__(self) -> int:
        return len(self.calls)

    def end_of(self, phase: int) -> int:
        """The number of launches up to the end of a phase."""
        return int(np.searchsorted(self.phases, phase, side="right"))


# -- on disk ---------------------------------------------------------------------------------------

_COLUMNS = (
    ("calls", np.int32),
    ("starts", np.int64),
    ("flags", np.int32),
    ("phases", np.int32),
    ("bases", np.int32),
    ("addends", np.int64),
    ("patches", np.int32),
)


def write_parts(
    program: RelocatableProgram, kernels: Mapping[str, Kernel], target: Target
) -> Parts:
    executor = make_executor(target)
    code = [_framed(text(key) + kernels[key].object) for key in program.kernels]
    code.append(_framed(text(executor.key) + executor.object))
    about = (control_block.ABI, target.triple, target.cpu, target.features, target.arch)
    return {
        "target": Writer().value(about),
        "program": _write_program(program),
        "kernels": uint(len(code)) + b"".join(code),
    }


def read_parts(parts: Parts) -> tuple[RelocatableProgram, dict[str, Kernel]]:
    """The program and its kernels, loaded; the executor is offered to the thread pool."""
    target = read_target(parts)
    host = Target.host()
    if not target.runs_on(host):
        missing = sorted(f[1:] for f in target.features if f[0] == "+" and not host.has(f[1:]))
        raise CodegenError(
            "code for another CPU", where="artifact", got=f"{target.arch} {target.cpu}",
            expected=f"{host.arch} {host.cpu}",
            hint=f"this machine lacks {', '.join(missing)}" if missing else "",
        )  # fmt: skip
    program = _read_program(parts["program"])
    *code, executor = _read_kernels(parts["kernels"])
    if [kernel.key for kernel in code] != program.kernels:
        raise FormatError("the kernels do not belong to the program", where="artifact")
    offer_executor(executor, uses_futex(target))
    return program, {kernel.key: kernel for kernel in code}


def read_target(parts: Parts) -> Target:
    value = _reader(parts, "target").value()
    abi, triple, cpu, features, arch = value
    if abi != control_block.ABI:
        raise FormatError(
            "a program of another version", where="artifact", got=f"ABI {abi}",
            expected=f"ABI {control_block.ABI}", hint="compile it again with this RLX",
        )  # fmt: skip
    return Target(triple, cpu, features, arch)


def _framed(data: bytes) -> bytes:
    return uint(len(data)) + data


def _reader(parts: Parts, name: str) -> Reader:
    if name not in parts:
        raise FormatError("a part is missing", where="artifact", expected=name)
    return Reader(parts[name])


def _read_kernels(data: bytes) -> list[Kernel]:
    reader = Reader(data)
    found = []
    for _ in range(reader.count()):
        size, start = reader.uint(), reader.at
        key = reader.text()
        found.append(adopt(key, reader.take(size - (reader.at - start))))
    reader.finish()
    return found


# -- columns --------------------------------------------------------------------------------------


def _write_program(program: RelocatableProgram) -> bytes:
    externals = _Table()
    dynamic = [(s.base, externals.number(s.external), s.addend) for s in program.dynamic_args]
    relocations = [
        n for r in program.relocations for n in (r.arg, externals.number(r.external), r.addend)
    ]
    labels, costs, metadata = _Table(), _Table(), list[int]()
    for label, node, *cost in program.metadata:
        metadata += (labels.number(label), node, costs.number(tuple(cost)))
    writer = Writer()
    about = (
        tuple(program.kernels), tuple(dynamic), tuple(externals.entries), tuple(program.symbols),
        _plain(program.bounds_checks), program.arena_size, program.workers,
        _plain((n, *r) for n, r in sorted(program.error_sites.items())),
        tuple(labels.entries), tuple(costs.entries),
        tuple(Data(c) for c in program.constants),
    )  # fmt: skip
    out = [_framed(writer.value(about))]
    out += [_array(getattr(program, name), kind) for name, kind in _COLUMNS]
    out += [_array(np.array(rows, np.int64), np.int64) for rows in (relocations, metadata)]
    out.append(uint(len(program.hosts)))
    for launch, call in sorted(program.hosts.items()):
        shapes = (call.inputs, call.outputs)
        out += [uint(launch), writer.op(call.op), writer.value(shapes)]
    return b"".join(out)


def _read_program(data: bytes) -> RelocatableProgram:
    reader = Reader(data)
    size = reader.uint()
    end = reader.at + size
    about: Any = reader.value()
    if reader.at != end:
        reader.fail("malformed program")
    kernels, dynamic, externals, symbols, checks, arena, workers, *rest = about
    error_sites, labels, costs, constants = rest
    columns = {name: _read_array(reader, kind) for name, kind in _COLUMNS}
    relocations, metadata = (_read_array(reader, np.int64).tolist() for _ in range(2))
    program = RelocatableProgram(
        kernels=list(kernels),
        **{**columns, "patches": columns["patches"].reshape(-1, 2)},
        dynamic_args=[DynamicArg(a, None if b < 0 else externals[b], d) for a, b, d in dynamic],
        relocations=[Relocation(w, externals[b], o) for w, b, o in _rows(relocations, 3)],
        constants=[c.array for c in constants],
        symbols=list(symbols),
        bounds_checks=[BoundsCheck(*check) for check in checks],
        arena_size=arena,
        workers=workers,
        error_sites={n: ErrorSite(*r) for n, *r in error_sites},
        hosts=dict([_read_host(reader) for _ in range(reader.count())]),
        metadata=[
            LaunchMetadata(labels[label], node, *costs[cost])
            for label, node, cost in _rows(metadata, 3)
        ],
    )
    reader.finish()
    _require_sound(program)
    return program


def _require_sound(program: RelocatableProgram) -> None:
    """Check that all indices are in range: a bad one would crash native code."""
    launches, args = len(program.calls), len(program.addends)
    bases = CONSTANT + len(program.constants)
    sound = (
        len(program.starts) == launches + 1
        and len(program.flags) == len(program.phases) == len(program.metadata) == launches
        and len(program.bases) == args == program.starts[-1]
        and (np.diff(program.starts) >= 0).all()
        and _within(program.calls, -1, len(program.kernels))
        and _within(program.bases, 0, bases)
        and all(0 <= r.arg < args for r in program.relocations)
        and all(0 <= s.base < bases for s in program.dynamic_args)
    )
    if not sound:
        raise FormatError("malformed program", where="artifact")


def _within(column: npt.NDArray[Any], low: int, high: int) -> bool:
    return not len(column) or bool(column.min() >= low and column.max() < high)


def _read_host(reader: Reader) -> tuple[int, HostCall]:
    launch, op = reader.uint(), reader.op()
    inputs, outputs = reader.value()
    return launch, HostCall(op, inputs, outputs)


class _Table:
    """Distinct entries, each with an index; None is −1."""

    def __init__(self) -> None:
        self.entries: dict[Any, int] = {}

    def number(self, entry: Hashable) -> int:
        return -1 if entry is None else self.entries.setdefault(entry, len(self.entries))


def _plain(rows: Iterable[Iterable[Any]]) -> tuple[tuple[Any, ...], ...]:
    return tuple(tuple(row) for row in rows)


def _rows(numbers: list[int], width: int) -> list[tuple[int, ...]]:
    return list(zip(*[iter(numbers)] * width, strict=True))


def _array(array: npt.NDArray[Any], kind: Any) -> bytes:
    return _framed(np.ascontiguousarray(array, np.dtype(kind).newbyteorder("<")).tobytes())


def _read_array(reader: Reader, kind: Any) -> npt.NDArray[Any]:
    raw = reader.take(reader.uint())
    stored = np.dtype(kind).newbyteorder("<")
    if len(raw) % stored.itemsize:
        reader.fail("a column that ends within a number")
    return np.frombuffer(raw, stored).astype(kind)
