"""A relocatable program: what an artifact stores, and what `link` gives addresses to.

Every arg of a program is an offset from an anchor: nothing (then it is a number), the arena, the
status word, the table of args itself, or a constant. What is known later still has a base, a
parameter, state, input or output by name: args with a fixed offset from a parameter or state are
`late`, filled in when those are attached; args that depend on a dynamic dimension, or on memory
that comes with each run, are sources in `live`, patched into place by the native driver.

On disk a program is its columns, the code of its kernels and of the driver, and the target. What is
read was checked by its digest and is trusted as far as code must be; still, everything is checked
that would crash Python or run on the wrong CPU.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rlx.backends.base import Parts
from rlx.backends.cpu.bounds_checks import Limit
from rlx.codegen import driver_layout
from rlx.codegen.drivers import make_driver, offer_driver, uses_futex
from rlx.codegen.jit import Kernel, adopt
from rlx.codegen.target import Target
from rlx.errors import CodegenError, FormatError
from rlx.ir.attrs import Data
from rlx.ir.dim import Dim
from rlx.ir.node import Node
from rlx.ir.op import Array, Op
from rlx.ir.serial.reader import Reader
from rlx.ir.serial.writer import Writer, text, uint
from rlx.ir.shape import Shape
from rlx.records import dataclass

NUMBER, ARENA, STATUS, WORDS, CONSTANT = range(5)
"""Anchors; from CONSTANT on, one for each constant."""

Base = tuple[str, str]  # ("input", name), ("output", name), ("param", name), ("state", name)


class Source(NamedTuple):
    """A word of each run: the address of an anchor, that of a base, and an expression of sizes."""

    anchor: int
    base: Base | None
    offset: Dim


class Late(NamedTuple):
    """A word that is known once parameters and states are attached."""

    word: int
    base: Base
    offset: int


class Report(NamedTuple):
    """A node that may find bad data, as its error message names it."""

    op: str
    operands: str
    origin: str

    @staticmethod
    def of(node: Node) -> Report:
        operands = ", ".join(f"{v.name} {v.shape}" for v in node.inputs)
        return Report(node.op.name, operands, str(node.origin))


@dataclass(frozen=True)
class HostCall:
    """A step that Python does: the op's reference on plain operands."""

    op: Op
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]

    @staticmethod
    def of(node: Node) -> HostCall:
        inputs, outputs = (tuple([v.shape for v in vs]) for vs in (node.inputs, node.outputs))
        return HostCall(node.op, inputs, outputs)


class Mark(NamedTuple):
    """What a step is, for profiles and checks. Costs of 0 stand for those of the node."""

    label: str
    node: int  # its id; −1: none
    flops: Dim = 0
    bytes: Dim = 0


@dataclass
class Listing:
    """The steps of a program as columns, its words, and what is needed to run and explain them."""

    kernels: list[str]  # content keys
    calls: npt.NDArray[np.int32]  # a kernel's number for every step; −1: the step is Python's
    starts: npt.NDArray[np.int64]
    flags: npt.NDArray[np.int32]
    phases: npt.NDArray[np.int32]
    anchors: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    live: list[Source]
    late: list[Late]
    patches: npt.NDArray[np.int32]  # pairs: word, source
    constants: list[Array]
    symbols: list[str]  # live ones, sorted
    limits: list[Limit]
    arena_size: int
    workers: int  # most that may run it
    reports: dict[int, Report] = field(default_factory=dict)
    hosts: dict[int, HostCall] = field(default_factory=dict)
    marks: Sequence[Mark] = ()

    def __len__(self) -> int:
        return len(self.calls)

    def end_of(self, phase: int) -> int:
        """How many steps belong to the phase and those before it; later ones come last."""
        return int(np.searchsorted(self.phases, phase, side="right"))


# -- on disk ---------------------------------------------------------------------------------------

_COLUMNS = (
    ("calls", np.int32),
    ("starts", np.int64),
    ("flags", np.int32),
    ("phases", np.int32),
    ("anchors", np.int32),
    ("offsets", np.int64),
    ("patches", np.int32),
)


def write_parts(listing: Listing, kernels: Mapping[str, Kernel], target: Target) -> Parts:
    driver = make_driver(target)
    code = [_framed(text(key) + kernels[key].object) for key in listing.kernels]
    code.append(_framed(text(driver.key) + driver.object))
    about = (driver_layout.ABI, target.triple, target.cpu, target.features, target.arch)
    return {
        "target": Writer().value(about),
        "program": _write_listing(listing),
        "kernels": uint(len(code)) + b"".join(code),
    }


def read_parts(parts: Parts) -> tuple[Listing, dict[str, Kernel]]:
    """The listing and the code of its kernels, loaded; the driver is offered to the pool."""
    target = read_target(parts)
    host = Target.host()
    if not target.runs_on(host):
        missing = sorted(f[1:] for f in target.features if f[0] == "+" and not host.has(f[1:]))
        raise CodegenError(
            "code for another CPU", where="artifact", got=f"{target.arch} {target.cpu}",
            expected=f"{host.arch} {host.cpu}",
            hint=f"this machine lacks {', '.join(missing)}" if missing else "",
        )  # fmt: skip
    listing = _read_listing(parts["program"])
    *code, driver = _read_kernels(parts["kernels"])
    if [kernel.key for kernel in code] != listing.kernels:
        raise FormatError("code that is not the program's", where="artifact")
    offer_driver(driver, uses_futex(target))
    return listing, {kernel.key: kernel for kernel in code}


def read_target(parts: Parts) -> Target:
    value = _reader(parts, "target").value()
    abi, triple, cpu, features, arch = value
    if abi != driver_layout.ABI:
        raise FormatError(
            "a program of another version", where="artifact", got=f"ABI {abi}",
            expected=f"ABI {driver_layout.ABI}", hint="make it again with this RLX",
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


# -- listings -------------------------------------------------------------------------------------


def _write_listing(listing: Listing) -> bytes:
    bases = _Table()
    live = [(s.anchor, bases.number(s.base), s.offset) for s in listing.live]
    late = [n for w in listing.late for n in (w.word, bases.number(w.base), w.offset)]
    labels, costs, marks = _Table(), _Table(), list[int]()
    for label, node, *cost in listing.marks:
        marks += (labels.number(label), node, costs.number(tuple(cost)))
    writer = Writer()
    about = (
        tuple(listing.kernels), tuple(live), tuple(bases.entries), tuple(listing.symbols),
        _plain(listing.limits), listing.arena_size, listing.workers,
        _plain((n, *r) for n, r in sorted(listing.reports.items())),
        tuple(labels.entries), tuple(costs.entries),
        tuple(Data(c) for c in listing.constants),
    )  # fmt: skip
    out = [_framed(writer.value(about))]
    out += [_array(getattr(listing, name), kind) for name, kind in _COLUMNS]
    out += [_array(np.array(rows, np.int64), np.int64) for rows in (late, marks)]
    out.append(uint(len(listing.hosts)))
    for step, call in sorted(listing.hosts.items()):
        shapes = (call.inputs, call.outputs)
        out += [uint(step), writer.op(call.op), writer.value(shapes)]
    return b"".join(out)


def _read_listing(data: bytes) -> Listing:
    reader = Reader(data)
    size = reader.uint()
    end = reader.at + size
    about: Any = reader.value()
    if reader.at != end:
        reader.fail("a program that makes no sense")
    kernels, live, bases, symbols, limits, arena, workers, reports, labels, costs, constants = about
    columns = {name: _read_array(reader, kind) for name, kind in _COLUMNS}
    late, marks = (_read_array(reader, np.int64).tolist() for _ in range(2))
    listing = Listing(
        kernels=list(kernels),
        **{**columns, "patches": columns["patches"].reshape(-1, 2)},
        live=[Source(a, None if b < 0 else bases[b], d) for a, b, d in live],
        late=[Late(w, bases[b], o) for w, b, o in _rows(late, 3)],
        constants=[c.array for c in constants],
        symbols=list(symbols),
        limits=[Limit(*limit) for limit in limits],
        arena_size=arena,
        workers=workers,
        reports={n: Report(*r) for n, *r in reports},
        hosts=dict([_read_host(reader) for _ in range(reader.count())]),
        marks=[Mark(labels[label], node, *costs[cost]) for label, node, cost in _rows(marks, 3)],
    )
    reader.finish()
    _require_sound(listing)
    return listing


def _require_sound(listing: Listing) -> None:
    """Indices in range: a fault here would be a crash in native code."""
    steps, words = len(listing.calls), len(listing.offsets)
    anchors = CONSTANT + len(listing.constants)
    sound = (
        len(listing.starts) == steps + 1
        and len(listing.flags) == len(listing.phases) == len(listing.marks) == steps
        and len(listing.anchors) == words == listing.starts[-1]
        and (np.diff(listing.starts) >= 0).all()
        and _within(listing.calls, -1, len(listing.kernels))
        and _within(listing.anchors, 0, anchors)
        and all(0 <= w.word < words for w in listing.late)
        and all(0 <= s.anchor < anchors for s in listing.live)
    )
    if not sound:
        raise FormatError("a program that makes no sense", where="artifact")


def _within(column: npt.NDArray[Any], low: int, high: int) -> bool:
    return not len(column) or bool(column.min() >= low and column.max() < high)


def _read_host(reader: Reader) -> tuple[int, HostCall]:
    step, op = reader.uint(), reader.op()
    inputs, outputs = reader.value()
    return step, HostCall(op, inputs, outputs)


class _Table:
    """Distinct entries by number; None is −1."""

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
