"""Serialisation: graphs, HIR modules, LIR and modules in one versioned container.

    magic 8 bytes | version u16 | kind u16 | payload length u64 | SHA-256 of the payload | payload

The payload is a canonical tagged encoding: equal objects have equal bytes in every process.
`canonical` is that encoding without graph names and node origins, for cache keys. The reader trusts
nothing: every length, index, attribute and shape is checked, and any fault raises a FormatError.
"""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path
from typing import Any

from rlx.errors import FormatError, RlxError
from rlx.ir.graph import Graph
from rlx.ir.hir import FusionPolicy, HirModule
from rlx.ir.lir import Lir, Slot, View
from rlx.ir.module import GraphModule
from rlx.ir.node import Value
from rlx.ir.phase import Phase, PhaseSchedule
from rlx.ir.serial.reader import Reader
from rlx.ir.serial.writer import Table, Writer, canonical, integer, text, uint
from rlx.ir.shape import Shape
from rlx.ir.verify import verify

__all__ = ["VERSION", "canonical", "from_bytes", "load", "save", "to_bytes"]

MAGIC = b"\x89RLX\r\n\x1a\n"  # reveals transfers that changed line ends or dropped the eighth bit
VERSION = 3
_HEADER = struct.Struct("<8sHHQ32s")
_PROGRAMS: dict[int, str] = {
    1: "graph", 2: "HIR module", 3: "LIR", 4: "module", 5: "fusable HIR module"
}  # fmt: skip


def to_bytes(program: Graph | Lir | GraphModule) -> bytes:
    """The program in the versioned container; VerifyError when it is not valid IR."""
    kind, payload = _payload(program)
    digest = hashlib.sha256(payload).digest()
    return _HEADER.pack(MAGIC, VERSION, kind, len(payload), digest) + payload


def _payload(program: object) -> tuple[int, bytes]:
    if isinstance(program, GraphModule):
        kind, inner = _payload(program._held)
        held = 2 if kind == 5 else kind  # the module has the policy
        return 4, text(program.fusion_policy.value) + bytes([held]) + inner
    if isinstance(program, HirModule):
        verify(program)
        direct = program.fusion_policy is FusionPolicy.DIRECT
        return 2 if direct else 5, Writer().graph(program)
    if isinstance(program, Graph):
        verify(program)
        return 1, Writer().graph(program)
    if isinstance(program, Lir):
        verify(program.graph)
        return 3, write_lir(Writer(), program)
    raise FormatError(
        "cannot be stored",
        where="to_bytes",
        got=type(program).__name__,
        expected="a Graph, an HirModule, a Lir or a GraphModule",
    )


def from_bytes(data: bytes, name: str = "bytes") -> Any:
    """The program stored in `data`; `name` is the file it came from, for messages."""
    try:
        kind, digest = _header(data[: _HEADER.size], len(data))
        payload = data[_HEADER.size :]
        if hashlib.sha256(payload).digest() != digest:
            raise FormatError("the contents do not match their digest", hint="the file is damaged")
        reader = Reader(payload)
        program = _program(reader, kind)
        reader.finish()
        return program
    except FormatError as e:
        raise e.located(name) from e.__cause__
    # inference of users' ops may raise anything on a hostile graph
    except Exception as e:
        what = f"{e.where}: {e.what}" if isinstance(e, RlxError) else f"{type(e).__name__}: {e}"
        raise FormatError(f"contents that make no program: {what}", where=name) from e


def _header(head: bytes, size: int) -> tuple[int, bytes]:
    """Check magic, version and length of the header; returns kind and digest."""
    if head[: len(MAGIC)] != MAGIC[: len(head)] or not head:
        raise FormatError("not an RLX program", got=head[:8].hex(" "), expected=MAGIC.hex(" "))
    if len(head) < _HEADER.size:
        raise FormatError("truncated header", got=f"{len(head)} bytes", expected=_HEADER.size)
    _, version, kind, length, digest = _HEADER.unpack(head)
    if version != VERSION:
        raise FormatError(
            "another version of the format",
            got=f"version {version}",
            expected=f"version {VERSION}",
            hint="written by a newer RLX" if version > VERSION else "write it again with this RLX",
        )
    if kind not in _PROGRAMS:
        raise FormatError("unknown kind of program", got=kind, expected=_PROGRAMS)
    if length != size - _HEADER.size:
        what = "truncated" if length > size - _HEADER.size else "bytes after the end"
        raise FormatError(what, got=f"{size - _HEADER.size} bytes", expected=f"{length} bytes")
    return kind, digest


def _program(reader: Reader, kind: int) -> Any:
    if kind == 1:
        return reader.graph(Graph)
    if kind in (2, 5):
        hir = reader.graph(HirModule)
        hir.fusion_policy = FusionPolicy.DIRECT if kind == 2 else FusionPolicy.FUSABLE
        return hir
    if kind == 3:
        return read_lir(reader)
    policy = FusionPolicy.of(reader.text())
    held = reader.take(1)[0]
    if held not in (1, 2, 3):
        reader.fail("a module that holds no program", got=held)
    program = _program(reader, held)
    if isinstance(program, HirModule):
        program.fusion_policy = policy
    return GraphModule(program, policy)


def save(program: Graph | Lir | GraphModule, path: str | os.PathLike[str]) -> None:
    """Write the program to a file atomically."""
    target, data = Path(path), to_bytes(program)
    import tempfile  # slow to import, and readers do without it

    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def load(path: str | os.PathLike[str]) -> Any:
    """The program in a file; FormatError when it is damaged, foreign or of another version."""
    name = os.fspath(path)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(_HEADER.size)
        try:
            _header(head, size)
        except FormatError as e:
            raise e.located(name) from None
        return from_bytes(head + file.read(), name)


# -- LIR: the graph, then the slots of its values in 64-bit rows -----------------------------------

_SLOT_KINDS = ("arena", "input", "output", "param", "state", "constant", "alias")
_IN_ARENA = ("arena", "input", "output")  # slots with an arena offset
_PHASES = (None, *Phase)
_WIDTH = 7  # numbers in a row: kind, size, offset, root, view, first, last
_NONE = -1


def write_lir(writer: Writer, lir: Lir) -> bytes:
    graph = lir.graph
    values = [v for n in graph.nodes for v in n.outputs]
    number = {v: i for i, v in enumerate(values)}
    views, rows = Table(), list[int]()
    for v in values:
        rows += _row(writer, lir.slots.get(v), number, views)
    phases = bytes([_PHASES.index(lir.phases.get(i)) for i in range(len(graph.nodes))])
    parts = [_framed(writer.graph(graph)), integer(lir.arena_size), views.pack()]
    parts += [struct.pack(f"<{len(rows)}q", *rows), phases, uint(len(lir.scratch))]
    for node, (offset, size) in sorted(lir.scratch.items()):
        parts += [uint(node), uint(offset), uint(size)]
    parts.append(b"\0" if lir.prepare is None else b"\1" + writer.graph(lir.prepare))
    return b"".join(parts)


def _framed(data: bytes) -> bytes:
    return uint(len(data)) + data


def _row(writer: Writer, slot: Slot | None, number: dict[Value, int], views: Table) -> list[int]:
    if slot is None:
        return [_NONE] * _WIDTH
    view = slot.view
    return [
        _SLOT_KINDS.index(slot.kind),
        slot.size,
        _NONE if slot.offset is None else slot.offset,
        _NONE if slot.root is None else number[slot.root],
        _NONE if view is None else views.add(writer.value((view.offset, view.strides))),
        slot.first,
        slot.last,
    ]


def read_lir(reader: Reader) -> Lir:
    size, end = reader.uint(), reader.end
    if size > end - reader.at:
        reader.fail("a length past the end", got=size)
    reader.end = reader.at + size
    graph = reader.graph(Graph)
    reader.finish()
    reader.end = end
    return _PlanReader(reader, graph).read()


class _PlanReader:
    def __init__(self, reader: Reader, graph: Graph) -> None:
        self.reader, self.graph = reader, graph
        self.values = [v for n in graph.nodes for v in n.outputs]
        self.sizes: dict[Shape, int] = {}

    def read(self) -> Lir:
        reader, graph = self.reader, self.graph
        self.arena = reader.integer()
        self.views = reader.table(self._view)
        count = _WIDTH * len(self.values)
        rows = struct.unpack(f"<{count}q", reader.take(8 * count))
        slots: dict[Value, Slot] = {}
        for i, v in enumerate(self.values):
            row = rows[i * _WIDTH : (i + 1) * _WIDTH]
            if row[0] != _NONE:
                slots[v] = self._slot(v, row, slots)
        phases = self._phases()
        scratch = dict([self._scratch() for _ in range(reader.count(3))])
        prepare = reader.graph(Graph) if reader.flag() else None
        return Lir(graph, slots, self.arena, phases, prepare, scratch)

    def _view(self) -> View:
        value = self.reader.value()
        if type(value) is not tuple or len(value) != 2 or type(value[1]) is not tuple:
            self.reader.fail("not a view", got=repr(value))
        return View(value[0], value[1])

    def _slot(self, value: Value, row: tuple[int, ...], slots: dict[Value, Slot]) -> Slot:
        kind, size, offset, root, view, first, last = row
        if not 0 <= kind < len(_SLOT_KINDS):
            self.reader.fail("unknown kind of slot", got=kind)
        name = _SLOT_KINDS[kind]
        slot = Slot(name, size, None if offset == _NONE else offset, first=first, last=last)
        fits = size >= self._bytes(value.shape) and 0 <= first <= last <= len(self.graph.nodes)
        if not fits or (name in _IN_ARENA) != (slot.offset is not None):
            self.reader.fail(f"a slot that does not fit {value}", got=slot)
        if slot.offset is not None:
            self._require_inside(slot.offset, size)
        if name == "alias":
            slot.root, slot.view = self._alias(value, root, view, slots)
        elif (root, view) != (_NONE, _NONE):
            self.reader.fail(f"a view of nothing for {value}", got=name)
        return slot

    def _alias(
        self, value: Value, root: int, view: int, slots: dict[Value, Slot]
    ) -> tuple[Value, View]:
        if not (0 <= root < len(self.values) and 0 <= view < len(self.views)):
            self.reader.fail(f"an alias of nothing for {value}", got=(root, view))
        source, found = self.values[root], self.views[view]
        home = slots.get(source)
        if home is None or home.kind == "alias":
            self.reader.fail(f"an alias of something without memory for {value}", got=source)
        if len(found.strides) != value.shape.rank:
            self.reader.fail(f"a view of another rank for {value}", got=found)
        return source, found

    def _bytes(self, shape: Shape) -> int:
        found = self.sizes.get(shape)
        if found is None:
            found = self.sizes[shape] = shape.upper_bytes(self.graph.dynamic)
        return found

    def _require_inside(self, offset: int, size: int) -> None:
        if offset < 0 or size < 0 or offset + size > self.arena:
            got = f"{offset} … {offset + size}"
            self.reader.fail("a slot outside the arena", got=got, expected=f"0 … {self.arena}")

    def _phases(self) -> PhaseSchedule:
        codes = self.reader.take(len(self.graph.nodes))
        if max(codes, default=0) >= len(_PHASES):
            self.reader.fail("unknown phase", got=max(codes))
        named = {i: phase for i, code in enumerate(codes) if (phase := _PHASES[code]) is not None}
        return PhaseSchedule(named)

    def _scratch(self) -> tuple[int, tuple[int, int]]:
        node, offset, size = self.reader.uint(), self.reader.uint(), self.reader.uint()
        if node >= len(self.graph.nodes):
            self.reader.fail("scratch memory of no node", got=node)
        self._require_inside(offset, size)
        return node, (offset, size)
