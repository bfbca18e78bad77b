"""`rlx inspect --html`: everything about a variant on one page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlx.cli import console
from rlx.runtime import machine

if TYPE_CHECKING:
    from rlx.cli.programs import Subject
    from rlx.cli.stages import Stages

Page = Annotated[
    Path | None,
    typer.Option(
        "--html",
        metavar="FILE",
        help="Compile, run and measure; write a page about all of it, to open in a browser.",
    ),
]


def write_report(
    path: Path, subject: Subject, stages: Stages, facts: Sequence[tuple[str, str]]
) -> None:
    """A page about the variant that `stages` is of."""
    from rlx.viz.report import make_report, write_page
    from rlx.viz.report.page import charting_library

    charting_library()  # where it is missing, that is said before the work
    with console.working("compiling and measuring"):
        report = make_report(
            subject.module,
            stages.options,
            device=stages.backend,
            params=subject.params,
            name=subject.name,
            facts=[*facts, ("processor", machine.cpu_name())],
        )
        write_page(path, report)
    console.note(f"wrote {path}: open it in a browser")
