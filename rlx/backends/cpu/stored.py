"""CPU programs on disk: the listing, the code of its kernels and of the executor, the target.

What comes in was checked by its digest and is trusted as far as code must be; still, everything is
checked that would crash Python or run on the wrong CPU.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.backends.base import Parts
from rlx.backends.cpu.checks import Limit
from rlx.backends.cpu.executor import control_block
from rlx.backends.cpu.executor.select import make_executor, offer_executor, uses_futex
from rlx.backends.cpu.listing import CONSTANT, HostCall, Late, Listing, Mark, Report, Source
from rlx.errors import CodegenError, FormatError
from rlx.ir.attrs import Data
from rlx.ir.serial.reader import Reader
from rlx.ir.serial.writer import Writer, text, uint
from rlx.llvm.jit import Kernel, adopt
from rlx.llvm.target import Target

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
    executor = make_executor(target)
    code = [_framed(text(key) + kernels[key].object) for key in listing.kernels]
    code.append(_framed(text(executor.key) + executor.object))
    about = (control_block.ABI, target.triple, target.cpu, target.features, target.arch)
    return {
        "target": Writer().value(about),
        "program": _write_listing(listing),
        "kernels": uint(len(code)) + b"".join(code),
    }


def read_parts(parts: Parts) -> tuple[Listing, dict[str, Kernel]]:
    """The listing and the code of its kernels, loaded; the executor is offered to the pool."""
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
    *code, executor = _read_kernels(parts["kernels"])
    if [kernel.key for kernel in code] != listing.kernels:
        raise FormatError("code that is not the program's", where="artifact")
    offer_executor(executor, uses_futex(target))
    return listing, {kernel.key: kernel for kernel in code}


def read_target(parts: Parts) -> Target:
    value = _reader(parts, "target").value()
    abi, triple, cpu, features, arch = value
    if abi != control_block.ABI:
        raise FormatError(
            "a program of another version", where="artifact", got=f"ABI {abi}",
            expected=f"ABI {control_block.ABI}", hint="make it again with this RLX",
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
