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
import tempfile
from pathlib import Path
from typing import Any

from rlx.errors import FormatError, RlxError
from rlx.ir.graph import Graph
from rlx.ir.hir import FusionPolicy, HirModule
from rlx.ir.lir import Lir
from rlx.ir.module import GraphModule
from rlx.ir.serial.plan import read_lir, write_lir
from rlx.ir.serial.reader import Reader
from rlx.ir.serial.writer import Writer, canonical, text
from rlx.ir.verify import verify

__all__ = ["VERSION", "canonical", "from_bytes", "load", "save", "to_bytes"]

MAGIC = b"\x89RLX\r\n\x1a\n"  # reveals transfers that changed line ends or dropped the eighth bit
VERSION = 3
_HEADER = struct.Struct("<8sHHQ32s")
_KINDS: dict[int, str] = {1: "graph", 2: "HIR module", 3: "LIR", 4: "module"}


def to_bytes(program: Graph | Lir | GraphModule) -> bytes:
    """The program in the versioned container; VerifyError when it is not valid IR."""
    kind, payload = _payload(program)
    digest = hashlib.sha256(payload).digest()
    return _HEADER.pack(MAGIC, VERSION, kind, len(payload), digest) + payload


def _payload(program: object) -> tuple[int, bytes]:
    if isinstance(program, GraphModule):
        kind, inner = _payload(program._held)
        return 4, text(program.fusion_policy.value) + bytes([kind]) + inner
    if isinstance(program, Graph):
        verify(program)
        return 2 if isinstance(program, HirModule) else 1, Writer().graph(program)
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
    if kind not in _KINDS:
        raise FormatError("unknown kind of program", got=kind, expected=_KINDS)
    if length != size - _HEADER.size:
        what = "truncated" if length > size - _HEADER.size else "bytes after the end"
        raise FormatError(what, got=f"{size - _HEADER.size} bytes", expected=f"{length} bytes")
    return kind, digest


def _program(reader: Reader, kind: int) -> Any:
    if kind == 1:
        return reader.graph(Graph)
    if kind == 2:
        return reader.graph(HirModule)
    if kind == 3:
        return read_lir(reader)
    policy = FusionPolicy.of(reader.text())
    held = reader.take(1)[0]
    if held not in (1, 2, 3):
        reader.fail("a module that holds no program", got=held)
    return GraphModule(_program(reader, held), policy)


def save(program: Graph | Lir | GraphModule, path: str | os.PathLike[str]) -> None:
    """Write the program to a file atomically."""
    target, data = Path(path), to_bytes(program)
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
