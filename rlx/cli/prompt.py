"""The prompt of `rlx chat`: line editing, history, completion, multi-line messages."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

_FENCE = '"""'
_KEPT = 1000  # lines of history
ReadLine = Callable[[str], str]


def read_message(read: ReadLine) -> str:
    """One message. A line that ends in a backslash goes on with the next; between three quotes
    stands any number of lines. EOFError at the end of the input."""
    line = read("> ")
    if line.lstrip().startswith(_FENCE):
        return _fenced(read, line.lstrip()[len(_FENCE) :])
    lines = []
    while line.endswith("\\"):
        lines.append(line[:-1])
        line = read("… ")
    return "\n".join([*lines, line])


def _fenced(read: ReadLine, line: str) -> str:
    lines = []
    while not line.rstrip().endswith(_FENCE):
        lines.append(line)
        line = read("… ")
    lines.append(line.rstrip()[: -len(_FENCE)])
    return "\n".join(lines).strip("\n")


def line_reader(words: Sequence[str], history: Path | None) -> ReadLine:
    """How to read a line: with editing on a terminal, plainly otherwise. `words` are completed;
    `history` keeps the lines for the next time."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return _plain
    with contextlib.suppress(ImportError):  # where Python has no readline, lines are still read
        _prepare_readline(words, history)
    return input


def _plain(_: str) -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def _prepare_readline(words: Sequence[str], history: Path | None) -> None:
    import readline

    def complete(text: str, state: int) -> str | None:
        found = [w for w in words if w.startswith(text)] if text.startswith("/") else []
        return found[state] if state < len(found) else None

    readline.set_completer_delims(" ")
    readline.set_completer(complete)
    readline.parse_and_bind("tab: complete")
    if history is None:
        return
    with contextlib.suppress(OSError):
        readline.read_history_file(history)
    readline.set_history_length(_KEPT)
    atexit.register(_keep_history, history)


def _keep_history(path: Path) -> None:
    """Write the lines to a file that only its owner reads; failing is no reason to complain."""
    import readline

    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        readline.write_history_file(path)
