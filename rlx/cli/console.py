"""Output of commands: text, tables, JSON, progress. Colour and progress bars on a terminal only.

Results go to standard output; progress, timings and errors to standard error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from rlx.support.progress import Progress

# control characters, which could steer a terminal; line feed and tab are allowed
_CONTROL = dict.fromkeys({*range(32), 127, *range(128, 160)} - {9, 10})
_PIPE_WIDTH = 160


def screen(stderr: bool = False) -> Console:
    """A rich console on standard output or error; honours NO_COLOR."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(
        stderr=stderr,
        color_system=None if os.environ.get("NO_COLOR") else "auto",
        width=None if stream.isatty() else _PIPE_WIDTH,
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def error(message: str) -> None:
    out = screen(stderr=True)
    out.print("error: ", style="bold red", end="")
    out.print(plain(message))


def note(message: str) -> None:
    """A remark beside the results."""
    screen(stderr=True).print(plain(message), style="dim")


def plain(text: str) -> str:
    """The text without control characters: output of models and names in files are untrusted."""
    return text.translate(_CONTROL)


def write(text: str) -> None:
    """Write a part of a result and flush."""
    sys.stdout.write(plain(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def write_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False, indent=2))


def table(header: Sequence[str], rows: Sequence[Sequence[object]], *, right: str = "") -> None:
    """Aligned columns; those named in `right` are right-aligned."""
    cells = [[plain(str(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    numbers = right.split()

    def line(row: Sequence[str]) -> str:
        parts = zip(header, row, widths, strict=True)
        shown = [c.rjust(w) if name in numbers else c.ljust(w) for name, c, w in parts]
        return "  ".join(shown).rstrip()

    out = screen()
    out.print(line(header), style="bold")
    for row in cells:
        out.print(line(row))


def heading(text: str, *, first: bool = False) -> None:
    """A heading above a table."""
    screen().print(plain(text) if first else f"\n{plain(text)}", style="bold cyan")


def facts(pairs: Sequence[tuple[str, object]]) -> None:
    """A column of names and one of values."""
    width = max((len(name) for name, _ in pairs), default=0)
    out = screen()
    for name, value in pairs:
        out.print(f"{name:<{width}}  ", style="bold", end="")
        out.print(plain(str(value)))


def size(count: float) -> str:
    """Bytes in decimal units, as downloads and memory makers count: `98.4 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


@contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """A spinner while something runs, on a terminal; yields a function that changes its text."""
    out = screen(stderr=True)
    if not out.is_terminal:
        yield lambda text: None
        return
    with out.status(f"{plain(what)} …", spinner="dots") as status:

        def show(text: str) -> None:
            status.update(f"{plain(text)} …")

        with shows_stages(what, show):
            yield show


_waits: list[tuple[str, Callable[[str], None]]] = []  # spinners and bars: own text, how to change


@contextmanager
def shows_stages(what: str, show: Callable[[str], None]) -> Iterator[None]:
    """What `stages` reports in this block is shown by `show`; `what` is shown between stages."""
    _waits.append((what, show))
    try:
        yield
    finally:
        _waits.pop()


def stages() -> Progress:
    """The progress function for `rlx.load`: its stages, while they last, are the text of the
    spinner or bar that is shown at the time. None is on anything but a terminal."""
    under_way: dict[str, str] = {}

    def show(stage: str, done: int, total: int) -> None:
        under_way[stage] = _stage_text(stage, done, total)
        if done == total:
            del under_way[stage]
        if _waits:
            what, change = _waits[-1]
            change(", ".join(under_way.values()) or what)

    return show


def _stage_text(stage: str, done: int, total: int) -> str:
    """`compiling 12 of 31 kernels`, or of bytes: `packing weights 40 %`."""
    if stage == "compiling kernels":
        return f"compiling {done} of {total} kernels"
    return f"{stage} {100 * done // total} %"


@contextmanager
def transfer(name: str) -> Iterator[Progress]:
    """A progress function for bytes: a bar on a terminal, one line per step elsewhere."""
    out = screen(stderr=True)
    if not out.is_terminal:
        yield _progress_lines(name)
        return
    from rich import progress as rp

    columns = (
        rp.TextColumn("{task.description}"),
        rp.BarColumn(),
        rp.DownloadColumn(),
        rp.TransferSpeedColumn(),
        rp.TimeRemainingColumn(),
    )
    with rp.Progress(*columns, console=out, transient=True) as bar:
        tasks: dict[str, rp.TaskID] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(f"{what} {name}", total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield show


def _progress_lines(name: str) -> Progress:
    said: set[str] = set()

    def show(what: str, done: int, total: int) -> None:
        if what not in said:
            said.add(what)
            note(f"{what} {name} ({size(total)})")

    return show


@contextmanager
def counting() -> Iterator[Any]:
    """`counted` for work whose total is known later: a function of title and total."""
    with ExitStack() as stack:
        yield lambda what, total: stack.enter_context(counted(what, total))


@contextmanager
def counted(what: str, total: int | None, unit: str = "") -> Iterator[Any]:
    """A function to call after each of `total` items (None or 0: unknown), or with how many; a bar
    on a terminal."""
    out = screen(stderr=True)
    if not out.is_terminal:
        yield lambda count=1: None
        return
    from rich import progress as rp

    columns = (
        rp.TextColumn("{task.description}"),
        rp.BarColumn(),
        rp.MofNCompleteColumn(),
        rp.TextColumn(unit),
        rp.TimeElapsedColumn(),
        rp.TimeRemainingColumn(),
    )
    with rp.Progress(*columns, console=out, transient=True) as bar:
        task = bar.add_task(what, total=total or None)
        with shows_stages(what, lambda text: bar.update(task, description=plain(text))):
            yield lambda count=1: bar.advance(task, count)
