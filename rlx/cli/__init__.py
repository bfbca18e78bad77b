"""The command line: `rlx run`, `rlx chat` and the others, one file each.

Modules of this folder import what a command needs inside the command, so that `rlx --help` and
completion in the shell answer at once.
"""

from __future__ import annotations

import sys


def main() -> None:
    """The `rlx` command; without the libraries that it stands on, a line that says how to get
    them."""
    try:
        import rich  # noqa: F401

        from rlx.cli.app import app
    except ModuleNotFoundError as e:
        if e.name is None or e.name.partition(".")[0] not in ("typer", "rich"):
            raise
        print(f"rlx: the command line needs {e.name}: pip install typer rich", file=sys.stderr)
        raise SystemExit(1) from None
    app(prog_name="rlx")
