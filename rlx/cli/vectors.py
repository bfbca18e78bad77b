"""Vectors on their way out: as lines of JSON or as a NumPy file, any number of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from rlx.errors import OptionError

_HEADER = 128  # bytes of a .npy file before its numbers
SUFFIXES = (".npy", ".jsonl")


def require_place(path: Path) -> None:
    """Raise where no file of vectors can be written, before anything is computed for it."""
    if path.suffix.lower() not in SUFFIXES:
        raise OptionError(
            "unknown kind of file", where="--output", got=path.name, expected=", ".join(SUFFIXES)
        )
    if not path.parent.is_dir():
        raise OptionError("no such folder", where="--output", got=path.parent)
    if path.is_dir():
        raise OptionError("a folder, not a file", where="--output", got=path)


def print_lines(rows: Iterable[Any]) -> None:
    """A vector per line, each as soon as it is there."""
    for row in rows:
        sys.stdout.write(json.dumps(row.tolist()) + "\n")


def write_file(path: Path, rows: Iterable[Any], width: int) -> int:
    """Write the vectors of `width` numbers, whole or not at all; how many there were."""
    from rlx.support.files import atomic_file

    with atomic_file(path.resolve()) as file:  # a link stays one
        if path.suffix.lower() == ".npy":
            return _write_npy(file, rows, width)
        return _write_lines(file, rows)


def _write_lines(file: BinaryIO, rows: Iterable[Any]) -> int:
    count = 0
    for count, row in enumerate(rows, 1):  # noqa: B007
        file.write(json.dumps(row.tolist()).encode() + b"\n")
    return count


def _write_npy(file: BinaryIO, rows: Iterable[Any], width: int) -> int:
    """The header says how many rows there are, so it is written last, where room was left."""
    file.write(b"\0" * _HEADER)
    count = 0
    for count, row in enumerate(rows, 1):  # noqa: B007
        file.write(row.astype("<f4").tobytes())
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({count}, {width}), }}"
    head = b"\x93NUMPY\x01\x00" + (_HEADER - 10).to_bytes(2, "little")
    file.seek(0)
    file.write(head + text.encode().ljust(_HEADER - 11) + b"\n")
    return count
