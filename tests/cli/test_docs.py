"""docs/cli.md names every command and option; every line that a page shows is understood."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from test_app import COMMAND, commands

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "docs"))
from blocks import PAGES, ROOT
from blocks import commands as shown

PAGE = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
LINES = [command.words for page in PAGES for command in shown(page)]


@pytest.mark.parametrize("words", LINES, ids=" ".join)
def test_lines_are_understood(words: list[str]) -> None:
    """Parsed as the command does it, all values checked, nothing run."""
    command: Any = COMMAND
    rest = list(words)
    while hasattr(command, "commands"):
        command = command.commands[rest.pop(0)]
    context = command.make_context(" ".join(words), rest)
    assert context.params


def test_everything_is_on_the_page() -> None:
    for path, command in commands():
        assert f"rlx {' '.join(path)}" in PAGE, path
        for option in command.params:
            names = [n for n in [*option.opts, *option.secondary_opts] if n.startswith("--")]
            assert all(re.search(rf"{n}\b", PAGE) for n in names), (path, names)


def test_the_error_it_shows(rlx: Any) -> None:
    done = rlx("run", "smolm2.gguf", "Hi")
    assert done.exit_code == 1
    assert done.stderr.splitlines()[0] in PAGE
